"""
The last stretch of a client before it is closed: what runs may end, and nothing new begins.

    begin        acquisitions that wait are interrupted and leave the line; new ones are refused
    until then   bodies go on, and the heartbeat renews their leases
    the bound    the leases that are still held are lost, so that their bodies are cancelled
    always       a lock is given back by the block that holds it, after its body has ended

A drain never ends: the client is closed next. A second call may bring the bound forward, but not put it off.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextvars import Context
from typing import NamedTuple

from fencing_sdk._current_lease import WaitingThread, waiting_thread
from fencing_sdk._engine.acquisition import Acquisition
from fencing_sdk._engine.lease_state import LeaseState
from fencing_sdk._engine.posted_requests import Flight
from fencing_sdk._engine.releases import Releases
from fencing_sdk._values.observers import logger
from fencing_sdk.errors import DrainingError, LossReason

_GRACE = 5.0
"""Seconds after the bound in which a body that was cancelled may end."""


class _Caller(NamedTuple):
    """Who waits for the end of a drain: a task, or the thread that waits for that task."""

    task: asyncio.Task[object] | None
    thread: WaitingThread | None

    def is_inside(self, lease: LeaseState) -> bool:
        """Whether *lease* is its own: it can give that back after the wait only."""
        in_task = lease.task is not None and lease.task is self.task
        return in_task or (self.thread is not None and lease in self.thread.inside)


class Draining:
    """Begins at most once. Every caller may wait until it is over."""

    def __init__(self, releases: Releases) -> None:
        self.begun = False
        self.waiting: dict[Acquisition | Flight, None] = {}
        """Acquisitions that have no grant yet."""
        self._releases = releases
        self._listeners: dict[Callable[[], object], None] = {}
        self._bound: asyncio.TimerHandle | None = None
        self._bound_at = math.inf
        """When `_bound` runs. uvloop's handle of a timer that is due at once has no `when()`."""
        self._bound_is_over = False
        self._last_moment: float | None = None
        """When the drain stops waiting for bodies that were cancelled, counted from the first bound that is over."""
        self._given_up = False
        self._cut_short = False
        self._changed = asyncio.Event()
        self._callers: list[_Caller] = []

    def check(self, name: str) -> None:
        """
        Raise if no acquisition may begin.

        Raises:
            DrainingError: the client drains.
        """
        if self.begun:
            raise DrainingError(name, 0.0)

    def begin(self, within: float) -> None:
        """Let nothing begin from now on, and end what has not ended by itself after *within* seconds."""
        loop = asyncio.get_running_loop()
        when = loop.time() + within
        if when < self._bound_at:
            self.stop()
            self._set_bound(when, self._end_bodies)
        if not self.begun:
            self.begun = True
            self._releases.on_end = self.look_again
            loop.call_soon(self._interrupt_waiters, context=Context())  # later: an eager task may be inside one of them
            for listener in tuple(self._listeners):
                listener()

    def on_begin(self, listener: Callable[[], object]) -> Callable[[], object]:
        """Call *listener* when the drain begins, or now if it has begun. The returned call takes it out."""
        if self.begun:
            listener()
        self._listeners[listener] = None
        return lambda: self._listeners.pop(listener, None)

    def stop(self) -> None:
        """End nothing any more: the client is closed, which ends all of it."""
        if self._bound is not None:
            self._bound.cancel()

    async def wait(self) -> bool:
        """
        Wait until every lock was given back; return whether every body ended by itself.

        The caller's own locks are not waited for. Bodies that go on although they were cancelled are left alone
        after a while.
        """
        caller = _Caller(asyncio.current_task(), waiting_thread())
        self._callers.append(caller)
        try:
            while not self._given_up and self._goes_on():
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._callers.remove(caller)
        return not self._cut_short

    def look_again(self) -> None:
        """Something that is waited for has ended: an acquisition, a body or a release."""
        self._changed.set()

    def _goes_on(self) -> bool:
        """Whether an acquisition, a body or a release has not ended."""
        return bool(self.waiting or self._releases.returning) or any(
            self._is_in_use(lease) for lease in self._releases.unreleased.values()
        )

    def _is_in_use(self, lease: LeaseState) -> bool:
        if self._is_of_a_caller(lease):
            return False
        if lease.task is None:  # a plain handle: nothing tells whether its work ends when it is lost
            return not self._bound_is_over
        return not lease.task.done()

    def _is_of_a_caller(self, lease: LeaseState) -> bool:
        return any(caller.is_inside(lease) for caller in self._callers)

    def _interrupt_waiters(self) -> None:
        for acquisition in tuple(self.waiting):
            acquisition.interrupt()

    def _end_bodies(self) -> None:
        self._bound_is_over = True
        for lease in tuple(self._releases.unreleased.values()):
            if not self._is_of_a_caller(lease):
                self._cut_short = self._cut_short or lease.held
                lease.lose(LossReason.DRAINED)
        self._changed.set()
        loop = asyncio.get_running_loop()
        if self._last_moment is None:
            self._last_moment = loop.time() + _GRACE
        self._set_bound(self._last_moment, self._give_up)

    def _set_bound(self, when: float, end: Callable[[], None]) -> None:
        self._bound = asyncio.get_running_loop().call_at(when, end, context=Context())
        self._bound_at = when

    def _give_up(self) -> None:
        self._given_up = True
        self._changed.set()
        if self._goes_on():
            logger.warning("draining: some bodies go on although they were cancelled; they are not waited for")
