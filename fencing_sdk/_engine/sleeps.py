"""
Sleeps that end in time although the machine was suspended.

A lease is measured on the client's clock, which goes on during a suspend. The timers of an event loop run
on another one, which stands still meanwhile, so after the suspend they are late by as long as it
took. While a lease is held or an acquisition waits, the two clocks are compared about once a
second; when they have moved apart, every sleep is measured anew. A client without leases and waiters is not woken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from contextvars import Context

import anyio

from fencing_sdk._values.clock import Clock

_LOOK_EVERY = 0.9
"""Seconds between two comparisons: a body whose lease ended in a suspend runs on for at most one second."""
_APART = 0.05
"""Seconds by which the clocks may differ more than before: a loop may read its own once in a turn only."""


class SuspendWatch:
    """Compares the clock of a client with the one of its event loop, and corrects those who sleep by the latter."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._apart = clock.now() - loop.time()
        self._sleeps: dict[anyio.CancelScope, float] = {}  # with the end of each, on the client's clock
        self._needed: dict[Hashable, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False

    async def sleep(self, event: asyncio.Event, seconds: float) -> None:
        """Wait for *event*, or until *seconds* have passed on the client's clock, if something needs this watch."""
        end = self._clock.now() + seconds
        with anyio.move_on_after(seconds) as scope:
            self._sleeps[scope] = end
            try:
                await event.wait()
            finally:
                del self._sleeps[scope]

    async def watched_sleep(self, event: asyncio.Event, seconds: float) -> None:
        """`sleep` that needs the watch itself."""
        if event.is_set():
            return
        key = object()
        self.begin(key)
        try:
            await self.sleep(event, seconds)
        finally:
            self.end(key)

    def begin(self, key: Hashable) -> None:
        """Compare the clocks from now on, at least as long as *key* needs it."""
        self._needed[key] = None
        if self._timer is None and not self._ended:
            self._look()

    def end(self, key: Hashable) -> None:
        """*key* does not need it any more. The timer goes on once, as it may be needed again at once."""
        self._needed.pop(key, None)

    def stop(self) -> None:
        """Compare no more, and leave no timer behind."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._needed:
            self._compare()
            self._timer = self._loop.call_later(_LOOK_EVERY, self._look, context=Context())

    def _compare(self) -> None:
        now, loop_now = self._clock.now(), self._loop.time()
        if abs(now - loop_now - self._apart) < _APART:
            return
        self._apart = now - loop_now
        for scope, end in self._sleeps.items():
            scope.deadline = loop_now + end - now
