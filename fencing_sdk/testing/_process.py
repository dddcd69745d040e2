"""
A simulated process: an event loop and a clock of its own, and the power to be frozen.

A paused process runs nothing, while time and its clock go on and messages pile up in front of it.
That is what a signal, a debugger, a garbage collection or a hypervisor does to a real one. During
a suspension its event loop's clock stands still besides, as ``CLOCK_MONOTONIC`` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine, Iterable
from contextvars import Context
from typing import Any, TypeVar

from fencing_sdk.testing._loop import Timeline, VirtualLoop

T = TypeVar("T")

TURN = 50e-6
"""Seconds that one turn of an event loop takes: without them code that spins would stop time."""
_CANCELLATIONS = 3
"""How often to cancel what is left at the end."""
_LAST_SECONDS = 10.0
"""Seconds to clean up after each time."""


class ProcessClock:
    """A clock that began somewhere and runs a little fast or slow."""

    def __init__(self, timeline: Timeline, *, rate: float) -> None:
        self._timeline = timeline
        self._offset = timeline.random.uniform(0.0, 1e5)
        self.rate = rate
        """Seconds that it shows after one second."""

    def now(self) -> float:
        """Seconds; only differences mean something."""
        return self._offset + self.rate * self._timeline.now


class Process:
    """One process of a world: it turns its loop whenever there is something to do and nothing forbids it."""

    def __init__(self, timeline: Timeline, name: str, *, rate: float) -> None:
        self.name = name
        self.clock = ProcessClock(timeline, rate=rate)
        self.loop = VirtualLoop(self._loop_time, self._plan, self._failed)  # type: ignore[abstract]  # no I/O
        self.turning = False
        self.after_turn: dict[Callable[[], object], None] = {}
        """Called between two turns, where a signal would strike."""
        self._kept: list[object] = []
        self._closers: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._timeline = timeline
        self._spawned: dict[asyncio.Task[Any], None] = {}
        self._planned = math.inf
        self._free_at = 0.0
        self._slept = 0.0
        self._suspended_at: float | None = None

    def _loop_time(self) -> float:
        return self.clock.now() - self._slept

    @property
    def paused(self) -> bool:
        """True if nothing runs here."""
        return self.loop.frozen

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run *work* in this process, in a context of its own."""
        task = self.loop.create_task(work, context=Context())
        self._spawned[task] = None
        task.add_done_callback(self._spawned.pop)
        return task

    def keep(self, thing: object) -> None:
        """Let *thing* live as long as the process, even without another reference."""
        self._kept.append(thing)

    def on_close(self, closer: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Await *closer* when the process ends, after its work was cancelled."""
        self._closers.append(closer)

    def pause(self, *, suspend: bool = False) -> None:
        """Run nothing from now on. Idempotent."""
        if suspend and not self.paused:
            self._suspended_at = self.clock.now()
        self.loop.frozen = True

    def resume(self) -> None:
        """Go on with what is due, beginning with what arrived. Idempotent."""
        if self._suspended_at is not None:
            self._slept += self.clock.now() - self._suspended_at
            self._suspended_at = None
        self.loop.frozen = False
        self._planned = math.inf
        self._plan()

    def _plan(self) -> None:
        """Put the next turn on the timeline, unless it is there already."""
        if self.turning or self.loop.frozen:
            return
        due = self.loop.next_due()
        if due is None:
            return
        timeline = self._timeline
        when = timeline.now
        if due != -math.inf:
            when = max(when, when + (due - self._loop_time()) / self.clock.rate)
        when = max(when, self._free_at)
        if when < self._planned:
            self._planned = when
            timeline.at(when, self._turn, when)

    def _turn(self, when: float) -> None:
        if when != self._planned or self.loop.frozen or self.turning:
            return  # an earlier turn came between, or none is possible now: `resume` plans anew
        self._planned = math.inf
        self.turning = True
        try:
            self.loop.turn()
        finally:
            self.turning = False
        if self.after_turn:
            for call in tuple(self.after_turn):
                call()
        self._free_at = self._timeline.now + TURN
        self._plan()

    def _failed(self, error: BaseException, message: str) -> None:
        error.add_note(f"in simulated process {self.name}: {message}")
        self._timeline.failures.append(error)

    # The end.

    def unseen(self) -> list[BaseException]:
        """The errors of tasks whose outcome was never retrieved. They count as retrieved afterwards."""
        found = [error for task in self.loop.take_failed() if (error := task.exception()) is not None]
        for error in found:
            error.add_note(f"in a task of simulated process {self.name} that was never awaited")
        return found

    def end(self) -> asyncio.Task[None]:
        """Begin the end: cancel what was started, close what was opened, cancel what is left."""
        self.resume()
        return self.loop.create_task(self._end(), context=Context())

    async def _end(self) -> None:
        if await _cancel(self._spawned):
            return  # code that does not end by itself must not meet a closed client: it might spin
        for closer in self._closers:
            await closer()
        me = asyncio.current_task()
        await _cancel(task for task in self.loop.tasks if task is not me)
        await self.loop.shutdown_asyncgens()

    def close(self) -> list[BaseException]:
        """Close the loop; return what failed since the last look at `unseen`, and what does not end."""
        stubborn = [
            RuntimeError(f"a task of simulated process {self.name} does not end when it is cancelled: {task!r}")
            for task in self._spawned or self.loop.tasks
            if not task.done()
        ]
        failures = [*self.unseen(), *stubborn]
        for task in tuple(self.loop.tasks):
            _discard(task)
        self.loop.close()
        self._kept.clear()
        return failures


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> set[asyncio.Task[Any]]:
    """Cancel *tasks* again and again, because code may swallow one cancellation; return those that go on."""
    pending = {task for task in tasks if not task.done()}
    for _ in range(_CANCELLATIONS):
        for task in pending:
            task.cancel()
        if pending:
            _, pending = await asyncio.wait(pending, timeout=_LAST_SECONDS)
    return pending


def _discard(task: asyncio.Task[Any]) -> None:
    """Close the coroutine of a task that does not end: the garbage collector would, and complain about it."""
    coroutine = task.get_coro()
    for _ in range(_CANCELLATIONS):
        with contextlib.suppress(Exception):  # it awaited once more, or missed the loop that is gone
            if coroutine is not None:
                coroutine.close()
            return
