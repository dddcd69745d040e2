"""An event loop that does not wait: when nothing is ready, its time jumps to the next timer."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

P = ParamSpec("P")

START = 1000.0
_ROUNDING = 1e-6
"""Seconds by which a sum of pauses may miss the moment of a timer: the jump goes to that very moment."""
_NOISE = 1e-9
"""Seconds by which a sum of pauses may fall short of a whole microsecond: the jump goes on to that on every Python."""


class _NoWaiting(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = START
        self.waits = 0
        self.loop: Any = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("nothing is scheduled: the test would wait for ever")
            end = self.now + timeout
            due = self.loop._scheduled[0].when() if self.loop._scheduled else end
            moment = due if abs(due - end) < _ROUNDING else end
            whole = round(moment, 6)
            self.now = whole if 0 <= whole - moment < _NOISE else moment
            self.waits += timeout > 0
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop for code that only sleeps: no sockets, no threads."""

    def __init__(self) -> None:
        self._selector_of_time = _NoWaiting()
        super().__init__(self._selector_of_time)
        self._selector_of_time.loop = self

    def time(self) -> float:
        return self._selector_of_time.now

    @property
    def turns_that_waited(self) -> int:
        """How often a real loop would have slept."""
        return self._selector_of_time.waits

    def pass_time(self, seconds: float) -> None:
        """Let time go by while nothing runs: a blocked loop, or a process that is stopped."""
        self._selector_of_time.now += seconds


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test in a loop of its own where a sleep of an hour takes no time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


def now() -> float:
    """Seconds of virtual time since the loop began."""
    return asyncio.get_running_loop().time() - START


async def settle() -> None:
    """Let everything that is ready run, without letting time pass."""
    for _ in range(20):
        await asyncio.sleep(0)


def block(seconds: float) -> None:
    """Keep the loop from turning for *seconds*."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.pass_time(seconds)
