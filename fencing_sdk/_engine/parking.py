"""
A lock that stays taken after its lease has ended, for a bounded time and without a heartbeat.

Its ttl in the store keeps it, so it outlives the client and the process. That takes one renewal of the same claim,
whose ttl is the time left. Four outcomes:

1. The store confirms: the lock is parked.
2. The time left is over before that: there is nothing to keep, and the lock is given back.
3. The store refuses: the lock was lost, perhaps while the work still ran.
4. No answer until the deadline that the lease had: it is not known how long the store keeps the lock.

A renewal of the heartbeat that has no answer yet may reach the store after this one, and would set the former ttl
again. Where that is possible, the renewal is repeated in the background until a former ttl has passed.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from fencing_sdk._engine.lease_state import LeaseState, loss_in
from fencing_sdk._engine.store_calls import StoreCalls
from fencing_sdk._values.claim import Renewal, Revoked
from fencing_sdk._values.clock import Clock
from fencing_sdk._values.observers import logger
from fencing_sdk._values.timing import MIN_TTL
from fencing_sdk.abc import Backend
from fencing_sdk.errors import BackendError, LeaseLostError, LossReason, shown

_FIRST_PAUSE = 0.02
_LAST_PAUSE = 1.0


class Parking:
    """One lock on its way from a lease to a ttl, until the moment *until* on the client's clock."""

    def __init__(
        self, backend: Backend, store_calls: StoreCalls, clock: Clock, lease: LeaseState, until: float
    ) -> None:
        self._backend = backend
        self._store_calls = store_calls
        self._clock = clock
        self._lease = lease
        self._until = until
        self._deadline = lease.deadline
        under_way = lease.due_at >= lease.deadline  # no beat is planned: a renewal has no answer yet
        self._overtaken = under_way or bool(lease.loss_detail) or bool(lease.unanswered_calls)
        self.kept_for = 0.0
        """Seconds for which the store keeps the lock, once it is parked."""
        self.loss: LeaseLostError | None = None
        self.refusal: tuple[LossReason, str] | None = None
        """Why the store refused, and what the operator wrote."""

    async def run(self) -> bool:
        """
        Park the lock. Return False if it has to be given back instead.

        If the lock was lost, `loss` says why.
        """
        pause = _FIRST_PAUSE
        last = False  # the client closes, and this is the last try
        outcome: Renewal | Revoked = Renewal.UNKNOWN
        while self._left() > 0:
            outcome = await self._renew()
            if outcome is Renewal.RENEWED:
                self.kept_for = max(self._left(), 0.0)
                if self._overtaken:
                    self._store_calls.start(self._repeat())
                return True
            self._overtaken = True
            if outcome is not Renewal.UNKNOWN or last or self._clock.now() + pause >= self._deadline:
                self.refusal = None if outcome is Renewal.UNKNOWN else loss_in(outcome)
                self.loss = self._lost()
                return True
            await self._store_calls.sleep_until_closing(pause)
            last = self._store_calls.closing
            if last:
                await asyncio.sleep(_FIRST_PAUSE)
            pause = min(2 * pause, _LAST_PAUSE)
        return False

    @property
    def over(self) -> bool:
        """Whether there is nothing to keep any more."""
        return self._left() <= 0

    def _left(self) -> float:
        return self._until - self._clock.now()

    async def _renew(self) -> Renewal | Revoked:
        timing = self._lease.timing
        ttl = max(MIN_TTL, self._left() / (1 - timing.drift))  # the store's clock may be the quicker one
        claim = replace(self._lease.claim, ttl=ttl)
        limit = min(timing.heartbeat_interval, max(self._deadline - self._clock.now(), MIN_TTL))
        try:
            (outcome,) = await self._store_calls.ask("renew", lambda: self._backend.renew((claim,)), limit)
        except Exception as error:  # noqa: BLE001  (as for the heartbeat: whatever a driver raises is no proof of a loss)
            if not isinstance(error, BackendError):
                logger.debug("parking failed", exc_info=error)
            return Renewal.UNKNOWN
        return outcome

    async def _repeat(self) -> None:
        stop = min(self._clock.now() + self._lease.timing.ttl, self._until)
        pause = _FIRST_PAUSE
        while (left := stop - self._clock.now()) > 0:
            await self._store_calls.sleep_until_closing(min(pause, left))
            closing = self._store_calls.closing
            if closing:
                await asyncio.sleep(_FIRST_PAUSE)  # for what is on its way: this is the last time
            if self._left() > 0:
                await self._renew()
            if closing:
                return
            pause = min(2 * pause, _LAST_PAUSE)

    def _lost(self) -> LeaseLostError:
        lease = self._lease
        if self.refusal is None:
            detail = f"the store did not confirm that it keeps the lock for {self._left():.3g} s more"
            logger.warning("lease on %s (token %d): %s", shown(lease.name), lease.number, detail)
            return LeaseLostError(lease.name, lease.number, LossReason.EXPIRED, detail)
        return LeaseLostError(lease.name, lease.number, *self.refusal)
