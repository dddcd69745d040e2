"""
The last stretch of a client before it is closed: what runs may end, and nothing new begins.

    begin        acquisitions that wait are interrupted and leave the line; new ones are refused
    until then   bodies go on, and the heartbeat renews their leases
    the bound    the leases that are still held are lost, so that their bodies are cancelled
    always       a lock is released by the block that holds it, after its body has ended

What a body acquires is a part of what runs: until the bound it is neither interrupted nor refused. The error of a
refusal ends a worker, and its task group then cancels the other workers, whose bodies may run. So no task gets it while
a body of another one runs. A body that waits for such a worker waits until the bound.

A drain never ends: the client is closed next. A second call may bring the bound forward, but not put it off.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextvars import Context
from typing import NamedTuple, Protocol

from fencing_sdk._engine.acquisition import Terms
from fencing_sdk._engine.releases import Releases
from fencing_sdk._lease import AnyLease, WaitingThread, held_here, state_of, waiting_thread
from fencing_sdk._lease_state import LeaseState
from fencing_sdk._values.observers import logger
from fencing_sdk.errors import DrainingError, LossReason

_GRACE = 5.0
"""Seconds after the bound in which a body that was cancelled may end."""


class Interruptible(Protocol):
    """A request for a lock: an `Acquisition`, or that for an old lock beside ours."""

    def interrupt(self) -> None:
        """End the waiting: the client drains."""


class _Caller(NamedTuple):
    """Waiter for the end of a drain: a task, or the thread that waits for that task."""

    task: asyncio.Task[object] | None
    thread: WaitingThread | None

    def is_inside(self, lease: LeaseState) -> bool:
        """Return whether *lease* is its own: it can release that after the wait only."""
        task = lease.task or lease.block
        in_task = task is not None and task is self.task
        return in_task or (self.thread is not None and lease in self.thread.inside)


class Draining:
    """Begins at most once. Every caller may wait until it is over."""

    def __init__(self, releases: Releases) -> None:
        self.begun = False
        self.waiting: dict[Interruptible, tuple[AnyLease, ...]] = {}
        """Acquisitions that wait, and the leases that their callers work under."""
        self.releases = releases
        self._listeners: dict[Callable[[], object], None] = {}
        self._bound: asyncio.TimerHandle | None = None
        self._bound_at = math.inf
        """When `_bound` runs. uvloop's handle of a timer that is due at once has no `when()`."""
        self._bound_is_over = False
        self._last_moment: float | None = None
        """When the drain stops waiting for bodies that were cancelled, counted from the first bound that is over."""
        self.given_up = False
        self._cut_short = False
        self.changed = asyncio.Event()
        self._closed = False
        self._callers: list[_Caller] = []
        self.refused: set[asyncio.Task[object] | None] = set()
        """Tasks that get a `DrainingError` as soon as no body runs."""
        self.around: tuple[LeaseState, ...] = ()
        """Leases around the work that the drain ends: their blocks are not bodies."""
        self.together: list[Draining] = [self]
        """The drains that begin by one signal. A body of one client is a body to the others."""

    def check(self, terms: Terms) -> None:
        """
        Raise if this acquisition may not begin, or go on.

        Raises:
            DrainingError: the client drains, and the caller is not a body.
        """
        if self.begun and not self._is_body(work_of(terms)):
            raise DrainingError(terms.name, 0.0)

    def waits_no_more(self, acquisition: Interruptible) -> None:
        """Note that *acquisition* has its lock, or has ended without it."""
        del self.waiting[acquisition]
        if self.begun:
            self.look_again()

    def begin(self, within: float) -> None:
        """Let nothing begin from now on, and end what has not ended by itself after *within* seconds."""
        loop = asyncio.get_running_loop()
        when = loop.time() + within
        if when < self._bound_at:
            self._drop_bound()
            self._set_bound(when, self._end_bodies)
        if not self.begun:
            self.begun = True
            self.releases.on_end = self.look_again
            loop.call_soon(self._interrupt_waiters, context=Context())  # later: an eager task may be inside one of them
            for listener in tuple(self._listeners):
                listener()

    def on_begin(self, listener: Callable[[], object]) -> Callable[[], object]:
        """Call *listener* when the drain begins, or now if it has begun. The returned call takes it out."""
        if self.begun:
            listener()
        self._listeners[listener] = None
        return lambda: self._listeners.pop(listener, None)

    def join(self, other: Draining) -> None:
        """Begin by the same signal as the drain of another client."""
        self.together = other.together
        self.together.append(self)

    def part(self) -> None:
        """Undo `join`."""
        self.together.remove(self)
        self.together = [self]

    def stop(self) -> None:
        """Stop ending bodies, and keep no error back: the client is closed, which ends all of it."""
        self._drop_bound()
        self._closed = True
        self.changed.set()

    async def wait(self) -> bool:
        """
        Wait until every lock was released; return whether every body ended by itself.

        The caller's own locks are not waited for. Bodies that go on although they were cancelled are left alone
        after a while.
        """
        caller = _Caller(asyncio.current_task(), waiting_thread())
        self._callers.append(caller)
        try:
            while not self.over:
                self.changed.clear()
                await self.changed.wait()
        finally:
            self._callers.remove(caller)
        return not self._cut_short

    async def wait_together(self) -> None:
        """Wait until every lock was released, also by the clients that have joined this one."""
        while going_on := [one for one in self._draining_ones() if not one.over]:
            await going_on[0].wait()

    async def let_bodies_end(self) -> None:
        """Wait until no body of another task runs, except of those that are refused too. A thread does not wait."""
        if waiting_thread() is not None:  # its error cancels nothing
            return
        self.refused.add(task := asyncio.current_task())
        self.look_again()
        try:
            while not self._closed and any(one.has_bodies for one in self._draining_ones()):
                self.changed.clear()
                await self.changed.wait()
        finally:
            self.refused.discard(task)

    def _draining_ones(self) -> list[Draining]:
        return [one for one in self.together if one.begun and not one.given_up]

    @property
    def has_bodies(self) -> bool:
        """True if a body of a task runs that gets no refusal itself."""
        refused = [task for one in self.together for task in one.refused]
        tasks = [lease.task or lease.block for lease in self.releases.unreleased.values() if lease not in self.around]
        return any(task is not None and not task.done() and task not in refused for task in tasks)

    def look_again(self) -> None:
        """Wake those who wait for the end of a drain: an acquisition, a body or a release has ended."""
        for one in self.together:
            one.changed.set()

    @property
    def over(self) -> bool:
        """True if every lock was released, or the rest is not waited for."""
        return self.given_up or not self._goes_on()

    def _goes_on(self) -> bool:
        """Return whether an acquisition, a body or a release has not ended."""
        if self.waiting or self.releases.returning:
            return True
        for lease in self.releases.unreleased.values():
            # The work of a plain handle may go on after a loss, which nothing shows.
            ended = self._bound_is_over if lease.task is None else lease.task.done()
            if not ended and not self._is_of_a_caller(lease):
                return True
        return False

    def _is_body(self, leases: tuple[AnyLease, ...]) -> bool:
        """Return whether one of the *leases* that a caller works under is that of a body."""
        return any(one.holds(state) for state in map(state_of, leases) for one in self.together)

    def holds(self, lease: LeaseState) -> bool:
        """Return whether *lease* is one of this client that is held, and its block is a body."""
        return lease.claim.owner in self.releases.unreleased and lease.held and lease not in self.around

    def _is_of_a_caller(self, lease: LeaseState) -> bool:
        return any(caller.is_inside(lease) for caller in self._callers)

    def _interrupt_waiters(self) -> None:
        for acquisition, leases in tuple(self.waiting.items()):
            if not self._is_body(leases):
                acquisition.interrupt()

    def _end_bodies(self) -> None:
        self._bound_is_over = True
        for lease in tuple(self.releases.unreleased.values()):
            if not self._is_of_a_caller(lease):
                self._cut_short = self._cut_short or lease.held
                lease.lose(LossReason.DRAINED)
        self._interrupt_waiters()
        self.look_again()
        loop = asyncio.get_running_loop()
        if self._last_moment is None:
            self._last_moment = loop.time() + _GRACE
        self._set_bound(self._last_moment, self._give_up)

    def _drop_bound(self) -> None:
        if self._bound is not None:
            self._bound.cancel()

    def _set_bound(self, when: float, end: Callable[[], None]) -> None:
        self._bound = asyncio.get_running_loop().call_at(when, end, context=Context())
        self._bound_at = when

    def _give_up(self) -> None:
        self.given_up = True
        self.look_again()
        if self._goes_on():
            logger.warning("draining: some bodies go on although they were cancelled; the drain does not wait for them")


def work_of(terms: Terms) -> tuple[AnyLease, ...]:
    """Return the leases that the caller works under: not those of a multi-lock that it is only taking."""
    return held_here() if terms.under is None else terms.under
