"""
Virtual time: a heap of what will happen, and a history of what did.

Nothing waits: time goes to the next moment at which something happens. While a timeline runs, the
caller's event loop and the caller's random numbers are set aside, so that a world can be run from
inside any coroutine, repeats itself from its seed, and leaves no trace in either.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVarTuple

from fencing_sdk._values.jitter import JITTER
from fencing_sdk._values.loop_owner import loop_here

Ts = TypeVarTuple("Ts")
_Draws = tuple[tuple[Any, ...], random.Random | None]
"""The state of `random`, and what `JITTER` draws from."""


def never() -> bool:
    """Stop for nothing but the end of the time given."""
    return False


class Timeline:
    """One time for every process of a world, in seconds since the world began."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        """For the world's own decisions, such as how long a message travels."""
        self.history: list[str] = []
        self.recording = True
        self.failures: list[BaseException] = []
        """Errors that no task carries; the driver raises them as soon as it can."""
        self._heap: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = []
        self._numbers = itertools.count()
        # What the program and the package draw from in the world.
        self._inside: _Draws = random.Random(f"{seed} program").getstate(), random.Random(seed)
        self._depth = 0

    def at(self, when: float, call: Callable[[*Ts], object], *args: *Ts) -> None:
        """Let *call* happen at *when*; what is due at one moment happens in the order it was asked for."""
        heapq.heappush(self._heap, (when, next(self._numbers), call, args))

    @property
    def over(self) -> bool:
        """Whether nothing is left to happen."""
        return not self._heap

    def note(self, text: str) -> None:
        """Write a line of history."""
        if self.recording:
            self.history.append(f"{self.now:11.6f} {text}")

    def run(self, until: float, stop: Callable[[], bool] = never) -> None:
        """
        Let happen what is due by *until*, or until *stop* is true or something failed.

        May be called by what happens: then time goes on while the caller stands still.
        """
        heap, pop, failures = self._heap, heapq.heappop, self.failures
        with self._aside():
            while heap and heap[0][0] <= until and not failures and not stop():
                when, _, call, args = pop(heap)
                self.now = max(self.now, when)  # an inner run may have gone further
                call(*args)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Put no event loop and our own random numbers in the place of the caller's."""
        loop = loop_here()
        task = None if loop is None else asyncio.current_task(loop)
        if loop is not None and task is not None:
            asyncio._leave_task(loop, task)  # noqa: SLF001  (documented as being for event loops)
        asyncio._set_running_loop(None)  # noqa: SLF001
        try:
            with self.own_random():
                yield
        finally:
            asyncio._set_running_loop(loop)  # noqa: SLF001
            if loop is not None and task is not None:
                asyncio._enter_task(loop, task)  # noqa: SLF001

    @contextmanager
    def own_random(self) -> Iterator[None]:
        """Let `random` and the package draw from our own numbers. May be entered again inside, at no cost."""
        outside = _drawn() if self._depth == 0 else None  # 20 us: once for a run, not once for a step
        if outside is not None:
            _draw_from(self._inside)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if outside is not None:
                self._inside = _drawn()
                _draw_from(outside)


def _drawn() -> _Draws:
    """What the program and the package will draw next."""
    return random.getstate(), JITTER.drawn_from


def _draw_from(draws: _Draws) -> None:
    random.setstate(draws[0])
    JITTER.drawn_from = draws[1]
