"""
Releases each lease once, and reports the one end that each of them has.

A release holds up its caller for a bounded time and goes on in the background. A first release that is answered
`Gone` has found a loss: the lease is lost, and the end of its block raises.

A lock may be left taken instead, for a bounded time and without a heartbeat: its ticket is given back *after* so many
seconds, under an owner that no process has, so it outlives the client and the process. Four outcomes:

1. The store confirms: the lock stays taken.
2. The time left is over before that: there is nothing to keep, and the lock is released.
3. The store refuses: the lock was lost, perhaps while the work still ran.
4. No answer until the deadline that the lease had: it is not known how long the store keeps the lock.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from contextvars import Context

from fencing_sdk._engine.heartbeat import Heartbeat
from fencing_sdk._engine.observer_reports import LeaseReport
from fencing_sdk._engine.store_calls import Returned, StoreCalls
from fencing_sdk._lease_state import LeaseState, loss_in
from fencing_sdk._values.answer import Call
from fencing_sdk._values.claim import Gone
from fencing_sdk._values.clock import Clock
from fencing_sdk._values.observers import logger
from fencing_sdk._values.tasks import outlast_cancellation
from fencing_sdk._values.timing import DRIFT, MIN_TTL, RELEASE_LIMIT
from fencing_sdk.errors import BackendError, LeaseLostError, LossReason, shown


class Releases:
    """The leases of one client that were not released."""

    def __init__(self, heartbeat: Heartbeat, store_calls: StoreCalls, clock: Clock, report: LeaseReport) -> None:
        self.store_calls = store_calls
        self._heartbeat = heartbeat
        self.unreleased = heartbeat.leases
        """The leases that were not released, by owner."""
        self.returning: dict[str, LeaseState] = {}
        """Released leases, by owner, whose `Released` event has not been emitted."""
        self._behind: dict[str, asyncio.Task[Returned]] = {}
        """Releases that began in the background, by owner."""
        self._unconfirmed: list[str] = []
        """The names whose release the store did not confirm while the client was closed."""
        self.on_end: Callable[[], object] | None = None
        """Called after each report of a lease's end, from the beginning of a drain on."""
        self._clock = clock
        self._report = report

    def take(self, lease: LeaseState) -> bool:
        """Begin to release *lease*; False if that began before, or if the client was closed meanwhile."""
        if self._heartbeat.forget(lease.claim.owner) is None:
            return False
        lease.ticket.close()
        self.returning[lease.claim.owner] = lease
        return True

    def send_first(self, lease: LeaseState) -> Call[Gone | None] | None:
        """Send the first release of *lease*, which was taken; None if something has to come before it."""
        if lease.companion is not None or lease.unanswered_calls or self.store_calls.closing or _silent(lease):
            return None
        return self.store_calls.give_back(lease.claim, _limit(lease))

    def send(self, lease: LeaseState, first: Call[Gone | None] | None = None) -> asyncio.Task[Returned]:
        """
        Release *lease*, which was taken, in the background.

        A first request that was sent already is waited for, and so is the release of a companion.
        """
        limit = _limit(lease)

        async def release_both() -> Returned:
            await lease.companion.release()
            return await self.store_calls.release(lease.claim, limit)

        if lease.companion is None:
            returned = self.store_calls.release(lease.claim, limit, first)
        else:
            returned = self.store_calls.start(release_both())
        if lease.unanswered_calls and lease.held_for < lease.timing.ttl:
            self.store_calls.undo(lease.claim, list(lease.unanswered_calls), limit, returned)
        return returned

    async def finish(
        self, lease: LeaseState, first: Call[Gone | None] | None = None, sent_at: float | None = None
    ) -> None:
        """Release *lease* and wait until that is done, shielded from every cancellation, for a bounded time."""
        returned = self._behind.get(lease.claim.owner) or self.send(lease, first)
        if _silent(lease):  # the store is not waited for
            self.report_when_done(lease, returned)
            return
        limit = _limit(lease) * (1 if lease.companion is None else 2)  # each of the two releases is waited for
        end = (self._clock.now() if sent_at is None else sent_at) + limit
        try:
            cancelled = await outlast_cancellation(
                lambda: self.store_calls.wait_for(returned, end - self._clock.now()),
                lambda: returned.done() or self._clock.now() >= end,
            )
        except BaseException:  # the caller's coroutine was closed: no task runs it
            self.report_when_done(lease, returned)
            raise
        self._end(lease, returned)
        if cancelled is not None:
            raise cancelled

    async def finish_behind(self, lease: LeaseState) -> None:
        """Wait, as `finish` does, if *lease* is being released in the background: ``max_hold`` has ended it."""
        if lease.pid == os.getpid() and lease.claim.owner in self._behind:
            await self.finish(lease)

    async def park(self, lease: LeaseState, parking: Parking, within: float) -> None:
        """
        Let the store keep *lease*, which was taken, for a while instead of releasing it.

        After *within* seconds the tries go on in the background.

        Raises:
            LeaseLostError: it was lost, or the store has not confirmed it yet.
        """
        parked = self.store_calls.start(self._park(lease, parking))
        until, cancelled = self._clock.now() + within, None
        try:
            await self.store_calls.wait_for(parked, within)
        except asyncio.CancelledError as error:
            cancelled, end = error, min(until, self._clock.now() + _limit(lease))
            await outlast_cancellation(
                lambda: self.store_calls.wait_for(parked, end - self._clock.now()),
                lambda: parked.done() or self._clock.now() >= end,
            )
        loss = parking.loss
        if loss is None and not parked.done() and not parking.over:
            detail = "the store did not confirm at once that it keeps the lock taken"
            loss = LeaseLostError(lease.name, lease.number, LossReason.EXPIRED, detail)
        if cancelled is not None:
            raise cancelled from loss
        if loss is not None:
            raise loss

    async def _park(self, lease: LeaseState, parking: Parking) -> None:
        if lease.companion is not None:
            await lease.companion.release()
        if not await parking.run():
            await self.finish(lease)
            if lease.lost is not None:
                parking.loss = lease.loss()
        else:
            if parking.refusal is not None:
                lease.lose(*parking.refusal, by_release=True)
            self.report_end(lease, confirmed=parking.loss is None, kept_for=parking.kept_for)

    def release_behind(self, lease: LeaseState, parking: Parking | None = None) -> None:
        """Release *lease* in the background, or let the store keep it for a while."""
        if not self.take(lease):
            return
        if parking is None:
            owner = lease.claim.owner
            returned = self._behind[owner] = self.send(lease)
            returned.add_done_callback(lambda _: self._behind.pop(owner), context=Context())
            self.report_when_done(lease, returned)
        else:
            self.store_calls.start(self._park(lease, parking))

    def release_all(self, *, but: Collection[str]) -> None:
        """Release every lease in the background. Those of the owners in *but* end by their ttl."""
        for owner, lease in tuple(self.unreleased.items()):
            if owner not in but:
                self.release_behind(lease)
        self._leave_rest()

    def report_ends(self) -> None:
        """Report the end of the leases whose release the store has not confirmed, and log how many they are."""
        self._leave_rest()
        for lease in tuple(self.returning.values()):
            self.report_end(lease, confirmed=False)
        if self._unconfirmed:
            more = f" and {len(self._unconfirmed) - 1} others" if self._unconfirmed[1:] else ""
            first = shown(self._unconfirmed[0])
            logger.warning("closed; the store did not confirm the release of %s%s: the ttl frees them", first, more)
            self._unconfirmed.clear()

    def _leave_rest(self) -> None:
        self.returning.update(self.unreleased)
        self.unreleased.clear()

    def report_when_done(self, lease: LeaseState, returned: asyncio.Task[Returned]) -> None:
        """Report the end of *lease* once it is *returned*."""
        if returned.done():
            self._end(lease, returned)
        else:
            returned.add_done_callback(lambda task: self._end(lease, task), context=Context())

    def _end(self, lease: LeaseState, returned: asyncio.Task[Returned]) -> None:
        """Report the end of *lease* by what has become of its release until now."""
        outcome = returned.done() and not returned.cancelled() and returned.result()
        if isinstance(outcome, bool) or lease.lost is not None or lease.claim.owner not in self.returning:
            self.report_end(lease, confirmed=outcome is not False)
        else:
            lease.lose(*loss_in(outcome), by_release=True)
            self.report_end(lease, confirmed=False)

    def report_end(self, lease: LeaseState, *, confirmed: bool, kept_for: float = 0.0) -> None:
        """Report the one end of *lease*, unless it was reported before."""
        if self.returning.pop(lease.claim.owner, None) is not None:
            if not confirmed and self.store_calls.closing and lease.lost_reason in _ENDED_HERE:
                self._unconfirmed.append(lease.name)
            if self._report.observed:
                self._report.released(lease, confirmed=confirmed, kept_for=kept_for)
            if self.on_end is not None:
                self.on_end()


_ENDED_HERE = {None, LossReason.CLOSED, LossReason.DRAINED}
"""Reasons of the loss of a lease that its own client has ended; None: it was not lost. Others see it as held."""


def _silent(lease: LeaseState) -> bool:
    """Return whether the lease has expired because the store does not answer."""
    return bool(lease.loss_detail) and lease.lost_reason is LossReason.EXPIRED


def _limit(lease: LeaseState) -> float:
    return min(lease.timing.call_limit, RELEASE_LIMIT)


_FIRST_PAUSE = 0.02
_LAST_PAUSE = 1.0


class Parking:
    """One lock that stays taken until the moment *until* on the client's clock, although its lease ends."""

    def __init__(self, store_calls: StoreCalls, clock: Clock, lease: LeaseState, until: float) -> None:
        self._store_calls = store_calls
        self._clock = clock
        self._lease = lease
        self._until = until
        self._deadline = lease.deadline
        self._problem: BackendError | None = None
        self.kept_for = 0.0
        """Seconds for which the store keeps the lock, once it has confirmed that."""
        self.loss: LeaseLostError | None = None
        self.refusal: tuple[LossReason, str] | None = None
        """Why the store refused, and what the operator wrote."""

    async def run(self) -> bool:
        """
        Leave the lock taken. Return False if it has to be released instead.

        If the lock was lost, `loss` says why.
        """
        pause, last = _FIRST_PAUSE, False  # last: the client closes, and this is the last try
        while (left := self._until - self._clock.now()) > 0:
            gone = await self._give_back(left)
            if gone is None:
                self.kept_for = max(self._until - self._clock.now(), 0.0)
                return True
            if isinstance(gone, Gone) or last or self._clock.now() + pause >= self._deadline:
                self.refusal = loss_in(gone) if isinstance(gone, Gone) else None
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
        """The time for which the lock had to be kept has passed."""
        return self._until <= self._clock.now()

    async def _give_back(self, left: float) -> Gone | BackendError | None:
        after = max(MIN_TTL, left / (1 - DRIFT))  # the store's clock may be the quicker one
        limit = min(self._lease.timing.heartbeat_interval, max(self._deadline - self._clock.now(), MIN_TTL))
        calls, claim = self._store_calls, self._lease.claim
        try:
            return await calls.answer("release", calls.give_back(claim, limit, after), limit)
        except BackendError as error:
            self._problem = error
            return error

    def _lost(self) -> LeaseLostError:
        lease = self._lease
        if self.refusal is None:
            left = self._until - self._clock.now()
            detail = f"the store did not confirm that it keeps the lock for {left:.3g} s more"
            detail += f": {self._problem}" if self._problem is not None else ""
            logger.warning("lease on %s (token %d): %s", shown(lease.name), lease.number, detail)
            return LeaseLostError(lease.name, lease.number, LossReason.EXPIRED, detail)
        return LeaseLostError(lease.name, lease.number, *self.refusal)
