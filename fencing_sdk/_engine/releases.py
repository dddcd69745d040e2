"""
Gives leases back, each of them once, and tells the one end that each of them has.

A release holds up its caller for a bounded time and goes on in the background.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextvars import Context

from fencing_sdk._engine.cancellation import outlast_cancellation
from fencing_sdk._engine.lease_state import LeaseState
from fencing_sdk._engine.reports import LeaseReport
from fencing_sdk._engine.store_calls import StoreCalls
from fencing_sdk._values.clock import Clock
from fencing_sdk.errors import LossReason

_LIMIT = 2.0
"""Seconds a release may hold up the one that leaves."""


class Releases:
    """The leases of one client that were not given back."""

    def __init__(self, store_calls: StoreCalls, clock: Clock, report: LeaseReport) -> None:
        self.store_calls = store_calls
        self.held: dict[str, LeaseState] = {}
        """By owner: those that were not given back."""
        self.returning: dict[str, LeaseState] = {}
        """By owner: those that were, and whose end is not told yet."""
        self.on_end: Callable[[], object] = lambda: None
        """Called when the end of a lease was told."""
        self._clock = clock
        self._report = report

    def add(self, lease: LeaseState) -> None:
        """Keep in mind that *lease* has to be given back."""
        self.held[lease.owner] = lease

    def give_back(self, lease: LeaseState) -> asyncio.Task[bool] | None:
        """Begin to give *lease* back; None if that began before, or if the client was closed meanwhile."""
        if lease.owner not in self.held:
            return None
        self.returning[lease.owner] = self.held.pop(lease.owner)
        limit = _limit(lease)
        returned = self.store_calls.give_back(lease.claim, limit)
        if lease.unanswered_calls and lease.held_for < lease.timing.ttl:
            self.store_calls.undo(lease.claim, list(lease.unanswered_calls), limit)
        return returned

    async def finish(self, lease: LeaseState, returned: asyncio.Task[bool]) -> None:
        """Wait until *lease* is *returned*, shielded from every cancellation, for a bounded time."""
        if lease.last_renewal_error and lease.lost_reason is LossReason.EXPIRED:  # silent: the store is not waited for
            self._tell_when_done(lease, returned)
            return
        end = self._clock.now() + _limit(lease)
        cancelled = await outlast_cancellation(
            lambda: self.store_calls.wait_for(returned, end - self._clock.now()),
            lambda: returned.done() or self._clock.now() >= end,
        )
        self._tell_end(lease, confirmed=_confirmed(returned))
        if cancelled is not None:
            raise cancelled

    def give_back_behind(self, lease: LeaseState) -> None:
        """Give *lease* back in the background."""
        if (returned := self.give_back(lease)) is not None:
            self._tell_when_done(lease, returned)

    def give_back_all(self, *, but: Collection[str]) -> None:
        """Give everything back in the background, except what is left to its ttl: the leases of these owners."""
        for owner, lease in tuple(self.held.items()):
            if owner not in but:
                self.give_back_behind(lease)
        self._leave_rest()

    def tell_ends(self) -> None:
        """Tell the end of the leases whose release was not confirmed until now."""
        self._leave_rest()
        for lease in tuple(self.returning.values()):
            self._tell_end(lease, confirmed=False)

    def _leave_rest(self) -> None:
        self.returning.update(self.held)
        self.held.clear()

    def _tell_when_done(self, lease: LeaseState, returned: asyncio.Task[bool]) -> None:
        if returned.done():
            self._tell_end(lease, confirmed=_confirmed(returned))
        else:
            returned.add_done_callback(
                lambda task: self._tell_end(lease, confirmed=_confirmed(task)), context=Context()
            )

    def _tell_end(self, lease: LeaseState, *, confirmed: bool) -> None:
        """Tell the one end of *lease*, unless it was told before."""
        if self.returning.pop(lease.owner, None) is not None:
            self._report.released(lease, confirmed=confirmed)
            self.on_end()


def _limit(lease: LeaseState) -> float:
    return min(lease.timing.call_limit, _LIMIT)


def _confirmed(returned: asyncio.Task[bool]) -> bool:
    return returned.done() and not returned.cancelled() and returned.result()
