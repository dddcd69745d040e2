"""
The short way to the store: a request that is posted, and whose answer is handed over by a callback.

Most acquisitions ask once and get the lock, and most releases are answered. Where the backend supports posts they need
no task and no timer of their own. The rules:

1. Only two outcomes are used here: a plain grant whose deadline is still ahead, and a release that ended the grant.
   After any other outcome the caller hands the flight to `Acquisition` or `Releases`, which goes on from there.
2. An answer always lands, however late, and also if its caller was cancelled. What was granted meanwhile is released.
3. Landing stores the outcome, drops the limit and wakes the caller, and nothing else: it runs inside the driver's
   callback, where an error would break the connection of all other requests.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fencing_sdk._engine.timers import TimerQueue
from fencing_sdk._values.claim import Busy, Claim, Grant, Renewal, Revoked
from fencing_sdk._values.tasks import retrieve
from fencing_sdk._values.token import TOKEN_LIMIT
from fencing_sdk.abc import Backend
from fencing_sdk.abc._powers import PendingPost, PostOutcome, SupportsPosts
from fencing_sdk.errors import BackendError

AT_ONCE = 16
"""After so many answers without a suspension the caller suspends once, so that other tasks run."""

Outcome = Grant | Busy | PostOutcome | Renewal | Revoked | BackendError


class Flight:
    """
    One posted request, from before it is sent until its answer has landed.

    The backend calls it with the answer. Its limit stays until then, also if its caller has stopped waiting,
    so that a silent connection is closed.
    """

    __slots__ = ("_call", "_timers", "claim", "outcome", "overdue", "sent", "sent_at", "waiter")

    def __init__(self, claim: Claim, sent_at: float, timers: TimerQueue) -> None:
        self._timers = timers
        self.claim = claim
        self.sent_at = sent_at
        self.outcome: Outcome | None = None
        """The answer; None while there is none."""
        self.overdue = False
        """True if the limit was reached before an answer came."""
        self.waiter: asyncio.Future[None] | None = None
        """What the caller awaits; None if the answer came at once."""
        self.sent: PendingPost | None = None
        self._call: asyncio.Future[Any] | None = None

    def __call__(self, outcome: Outcome) -> None:
        """Land: take the answer, and wake the caller if it still waits. The first answer counts."""
        if self.outcome is not None:
            return
        self.outcome = outcome
        if self.waiter is not None:
            self._timers.drop(self)
            if not self.waiter.done():
                self.waiter.set_result(None)
        if self._call is not None:
            _settle(self._call, outcome)

    def over(self) -> None:
        """The limit is reached: wake the caller without an answer, which may still come."""
        if self.outcome is not None:
            return
        self.overdue = True
        self._timers.drop(self)
        if self.sent is not None:
            self.sent.give_up()
        _wake(self.waiter)

    def interrupt(self) -> None:
        """Wake the caller without an answer: the client drains."""
        _wake(self.waiter)

    def call(self) -> asyncio.Future[Any]:
        """The answer as a future, for `Acquisition` and `Releases`."""
        if self._call is None:
            self._call = asyncio.get_running_loop().create_future()
            self._call.add_done_callback(retrieve)
            if self.outcome is not None:
                _settle(self._call, self.outcome)
        return self._call


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def _settle(call: asyncio.Future[Any], outcome: Outcome) -> None:
    if call.done():
        return
    if isinstance(outcome, BackendError):
        call.set_exception(outcome)
    else:
        call.set_result(outcome)


class Posts:
    """Posts the requests of one client."""

    def __init__(self, backend: SupportsPosts, timers: TimerQueue) -> None:
        self._backend = backend
        self._timers = timers
        self._at_once = 0

    def acquire(self, claim: Claim, sent_at: float, limit: float) -> Flight:
        """Post an acquisition. The caller awaits the flight's waiter, if there is one."""
        flight = Flight(claim, sent_at, self._timers)
        flight.sent = self._backend.post_acquire(claim, flight)
        self._follow(flight, limit)
        return flight

    def release(self, claim: Claim, sent_at: float, limit: float) -> Flight:
        """Post a release, likewise."""
        flight = Flight(claim, sent_at, self._timers)
        flight.sent = self._backend.post_release(claim, flight)
        self._follow(flight, limit)
        return flight

    def _follow(self, flight: Flight, limit: float) -> None:
        if flight.outcome is not None:
            self._at_once += 1
            if self._at_once >= AT_ONCE:  # others run now and then, although this answer needs no turn of the loop
                self._at_once = 0
                flight.waiter = self._timers.loop.create_future()
                self._timers.loop.call_soon(_wake, flight.waiter)
        elif flight.sent is not None:
            flight.waiter = self._timers.loop.create_future()
            self._timers.put(flight, limit, Flight.over)
        else:
            flight.outcome = PostOutcome.NOT_EXECUTED


def granted(flight: Flight) -> Grant | None:
    """A plain grant; None for everything that only the full way can judge."""
    grant = flight.outcome
    if isinstance(grant, Grant) and grant.ttl is None and type(grant.token) is int and 0 <= grant.token < TOKEN_LIMIT:
        return grant
    return None


def posts_of(backend: Backend) -> SupportsPosts | None:
    """
    Return *backend* if its posts do what its calls do.

    If a subclass or an object overrides a call and inherits the post, only the calls are used.
    """
    if not isinstance(backend, SupportsPosts):
        return None
    for call in ("acquire", "release"):
        places = [getattr(backend, "__dict__", {}), *map(vars, type(backend).__mro__)]
        first = next(place for place in places if call in place or f"post_{call}" in place)
        if f"post_{call}" not in first:
            return None
    return backend
