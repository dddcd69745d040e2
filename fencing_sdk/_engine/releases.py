"""
Gives leases back, each of them once, and tells the one end that each of them has.

A release is posted where the backend supports it (`Posts`). What follows when that is not enough is here: a release
holds up its caller for a bounded time and goes on in the background. A first release that is answered "not this
owner's" has found a loss (see `Returned`): the lease is lost, and the end of its block raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextvars import Context

from fencing_sdk._engine.cancellation import outlast_cancellation
from fencing_sdk._engine.heartbeat import Heartbeat
from fencing_sdk._engine.lease_state import LeaseState, loss_in
from fencing_sdk._engine.observer_reports import LeaseReport
from fencing_sdk._engine.parking import Parking
from fencing_sdk._engine.posted_requests import Flight
from fencing_sdk._engine.store_calls import Returned, StoreCalls
from fencing_sdk._values import forks
from fencing_sdk._values.claim import LOCK
from fencing_sdk._values.clock import Clock
from fencing_sdk.errors import LeaseLostError, LossReason

_LIMIT = 2.0
"""Seconds a release may hold up the one that leaves."""


class Releases:
    """The leases of one client that were not given back."""

    def __init__(self, heartbeat: Heartbeat, store_calls: StoreCalls, clock: Clock, report: LeaseReport) -> None:
        self.store_calls = store_calls
        self._heartbeat = heartbeat
        self.unreleased = heartbeat.leases
        """By owner: those that were not given back."""
        self.returning: dict[str, LeaseState] = {}
        """By owner: those that were, and whose end is not told yet."""
        self._behind: dict[str, asyncio.Task[Returned]] = {}
        """By owner: releases that began in the background."""
        self.on_end: Callable[[], object] | None = None
        """Called when the end of a lease was told, from the beginning of a drain on."""
        self._clock = clock
        self._report = report

    def take(self, lease: LeaseState) -> bool:
        """Begin to give *lease* back; False if that began before, or if the client was closed meanwhile."""
        if self._heartbeat.forget(lease.claim.owner) is None:
            return False
        self.returning[lease.claim.owner] = lease
        return True

    def post(self, lease: LeaseState) -> Flight | None:
        """Post the release of *lease*, which was taken; None if only the full way will do."""
        calls = self.store_calls
        if calls.posts is None or lease.claim.mode is not LOCK or lease.unanswered_calls or calls.closing:
            return None
        if lease.loss_detail and _silent(lease):
            return None
        return calls.posts.release(lease.claim, self._clock.now(), _limit(lease))

    def send(self, lease: LeaseState, flight: Flight | None = None) -> asyncio.Task[Returned]:
        """Give *lease*, which was taken, back in the background. A release that was posted is waited for first."""
        limit = _limit(lease)
        returned = self.store_calls.give_back(lease.claim, limit, flight)
        if lease.unanswered_calls and lease.held_for < lease.timing.ttl:
            self.store_calls.undo(lease.claim, list(lease.unanswered_calls), limit, returned)
        return returned

    async def finish(self, lease: LeaseState, flight: Flight | None) -> None:
        """Give *lease* back and wait until that is done, shielded from every cancellation, for a bounded time."""
        returned = self._behind.get(lease.claim.owner) or self.send(lease, flight)
        if _silent(lease):  # the store is not waited for
            self.tell_when_done(lease, returned)
            return
        end = (self._clock.now() if flight is None else flight.sent_at) + _limit(lease)
        try:
            cancelled = await outlast_cancellation(
                lambda: self.store_calls.wait_for(returned, end - self._clock.now()),
                lambda: returned.done() or self._clock.now() >= end,
            )
        except BaseException:  # the caller's coroutine was closed: no task runs it
            self.tell_when_done(lease, returned)
            raise
        self._end(lease, returned)
        if cancelled is not None:
            raise cancelled

    async def finish_behind(self, lease: LeaseState) -> None:
        """Wait, as `finish` does, if *lease* is being given back in the background: ``max_hold`` has ended it."""
        if lease.generation == forks.here() and lease.claim.owner in self._behind:
            await self.finish(lease, None)

    async def park(self, lease: LeaseState, parking: Parking, within: float) -> None:
        """
        Let the store keep *lease*, which was taken, for a while instead of giving it back.

        After *within* seconds the store is asked on in the background.

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
        if not await parking.run():
            await self.finish(lease, None)
            if lease.lost is not None:
                parking.loss = lease.loss()
        else:
            if parking.refusal is not None:
                lease.lose(*parking.refusal, by_release=True)
            self.tell_end(lease, confirmed=parking.loss is None, kept_for=parking.kept_for)

    def give_back_behind(self, lease: LeaseState, parking: Parking | None = None) -> None:
        """Give *lease* back in the background, or let the store keep it for a while."""
        if not self.take(lease):
            return
        if parking is None:
            owner = lease.claim.owner
            returned = self._behind[owner] = self.send(lease)
            returned.add_done_callback(lambda _: self._behind.pop(owner), context=Context())
            self.tell_when_done(lease, returned)
        else:
            self.store_calls.start(self._park(lease, parking))

    def give_back_all(self, *, but: Collection[str]) -> None:
        """Give every lease back in the background. Those of the owners in *but* end by their ttl."""
        for owner, lease in tuple(self.unreleased.items()):
            if owner not in but:
                self.give_back_behind(lease)
        self._leave_rest()

    def tell_ends(self) -> None:
        """Tell the end of the leases whose release was not confirmed until now."""
        self._leave_rest()
        for lease in tuple(self.returning.values()):
            self.tell_end(lease, confirmed=False)

    def _leave_rest(self) -> None:
        self.returning.update(self.unreleased)
        self.unreleased.clear()

    def tell_when_done(self, lease: LeaseState, returned: asyncio.Task[Returned]) -> None:
        """Tell the end of *lease* once it is *returned*."""
        if returned.done():
            self._end(lease, returned)
        else:
            returned.add_done_callback(lambda task: self._end(lease, task), context=Context())

    def _end(self, lease: LeaseState, returned: asyncio.Task[Returned]) -> None:
        """Tell the end of *lease* by what has become of its release until now."""
        outcome = returned.done() and not returned.cancelled() and returned.result()
        if isinstance(outcome, bool) or lease.lost is not None or lease.claim.owner not in self.returning:
            self.tell_end(lease, confirmed=outcome is not False)
        else:
            lease.lose(*loss_in(outcome), by_release=True)
            self.tell_end(lease, confirmed=False)

    def tell_end(self, lease: LeaseState, *, confirmed: bool, kept_for: float = 0.0) -> None:
        """Tell the one end of *lease*, unless it was told before."""
        if self.returning.pop(lease.claim.owner, None) is not None:
            if self._report.observed:
                self._report.released(lease, confirmed=confirmed, kept_for=kept_for)
            if self.on_end is not None:
                self.on_end()


def _silent(lease: LeaseState) -> bool:
    """Whether the lease has expired because the store does not answer."""
    return bool(lease.loss_detail) and lease.lost_reason is LossReason.EXPIRED


def _limit(lease: LeaseState) -> float:
    return min(lease.timing.call_limit, _LIMIT)
