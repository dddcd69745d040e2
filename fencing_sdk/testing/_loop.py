"""
Virtual time, a heap of what will happen and a history of what did; and the event loop that runs on it.

Nothing waits: time goes to the next moment at which something happens. While a timeline runs, the
caller's event loop and the caller's random numbers are set aside, so that a world can be run from
inside any coroutine, repeats itself from its seed, and leaves no trace in either.

`VirtualLoop` is an asyncio event loop without I/O and without time of its own: its driver decides when it turns.
One turn is one iteration of CPython's selector loop, in the same order: what was ready before, what
arrived meanwhile, the timers that are due. What these schedule waits for the next turn. Nothing
runs between two turns, so there a process can be frozen as a signal or a hypervisor freezes it.

Its tasks are numbered and hash by their number. A set of tasks, as `asyncio.wait`, `asyncio.TaskGroup` and a cancel
scope keep one, is then walked in the same order in every run. The default hash is an address, which differs.

A process has a loop and a clock of its own, and can be frozen: then it runs nothing, while time and its clock go on and
messages pile up in front of it. That is what a signal, a debugger, a garbage collection or a hypervisor does to a real
one. During a suspension its event loop's clock stands still besides, as ``CLOCK_MONOTONIC`` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
import random
import sys
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any, NoReturn, TypeVar, TypeVarTuple, cast

from fencing_sdk._values.clock import JITTER
from fencing_sdk._values.drivers import KnownDriver
from fencing_sdk._values.loop_owner import loop_here
from fencing_sdk.errors import FencingError, UsageError

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
        """Let *call* happen at *when*; what is due at one moment happens in the order of these calls."""
        heapq.heappush(self._heap, (when, next(self._numbers), call, args))

    @property
    def over(self) -> bool:
        """True if nothing is left to happen."""
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
    """State of the random numbers that the program and the package draw next."""
    return random.getstate(), JITTER.drawn_from


def _draw_from(draws: _Draws) -> None:
    random.setstate(draws[0])
    JITTER.drawn_from = draws[1]


T = TypeVar("T")

_RESOLUTION = 1e-9
"""Seconds by which a timer may be early, as in CPython: converting between clocks rounds."""
_NOT_HERE = (
    "add_reader",
    "add_signal_handler",
    "add_writer",
    "create_connection",
    "create_datagram_endpoint",
    "create_server",
    "create_unix_connection",
    "create_unix_server",
    "getaddrinfo",
    "run_in_executor",
    "set_task_factory",
    "sock_accept",
    "sock_connect",
    "sock_recv",
    "sock_sendall",
    "subprocess_exec",
    "subprocess_shell",
)


_PYTHON = KnownDriver("Python", user="World")


def check_python() -> None:
    """Look whether asyncio has what a loop without I/O uses of it."""
    _PYTHON.check("simulate", asyncio, "_enter_task", "_leave_task", "_set_running_loop")
    _PYTHON.check("simulate", asyncio.Handle, "_run")
    _PYTHON.check("simulate", asyncio.Task, "_exception", "_log_traceback")


def _ended(task: VirtualTask[Any]) -> None:
    """Report to the loop of *task* that it has ended."""
    loop = task.get_loop()
    assert isinstance(loop, VirtualLoop)  # which made it
    loop.forget(task)


class VirtualLoop(asyncio.AbstractEventLoop):
    """
    An event loop that is turned from outside.

    Args:
        now: The loop's time, in seconds.

        woken: Called when something was scheduled while the loop does not turn.

        failed: Called with the error and a message when a callback raised, or an error was lost.
    """

    def __init__(
        self, now: Callable[[], float], woken: Callable[[], object], failed: Callable[[BaseException, str], object]
    ) -> None:
        self._now = now
        self._woken = woken
        self._failed = failed
        self._ready: deque[asyncio.Handle] = deque()
        self._arrived: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        self._generators: weakref.WeakSet[AsyncGenerator[Any, Any]] = weakref.WeakSet()
        self._begun, self._dropped = self._generators.add, self._finalize
        self._turning = False
        self._closed = False
        self.frozen = False
        """True if callbacks have to wait. May be set by a callback: then it is the last one."""
        self.tasks: dict[VirtualTask[Any], None] = {}
        """Tasks that did not end yet, oldest first."""
        self._failed_tasks: list[weakref.ref[VirtualTask[Any]]] = []

    # The driver's side.

    def arrive(self, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """Hand in something from outside, as a socket does: it is noticed in the next turn."""
        self._arrived.append(asyncio.Handle(callback, args, self, None))
        if not self._turning:
            self._woken()

    def next_due(self) -> float | None:
        """When the next turn has something to do, on the loop's time; None while nothing is scheduled."""
        if self._ready or self._arrived:
            return -math.inf
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def take_failed(self) -> list[VirtualTask[Any]]:
        """Failed tasks whose outcome was never retrieved and which are still referred to."""
        living = [task for reference in self._failed_tasks if (task := reference()) is not None]
        self._failed_tasks.clear()
        return [task for task in (*living, *self.tasks) if task.unseen]

    def turn(self) -> None:
        """Run one iteration. The caller has made sure that no other loop runs in this thread."""
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._begun, finalizer=self._dropped)
        asyncio._set_running_loop(self)  # noqa: SLF001  (documented as being for event loops)
        self._turning = True
        try:
            self._iterate()
        finally:
            self._turning = False
            asyncio._set_running_loop(None)  # noqa: SLF001
            sys.set_asyncgen_hooks(*hooks)

    def _iterate(self) -> None:
        ready, timers = self._ready, self._timers
        if self._arrived:
            ready.extend(self._arrived)
            self._arrived.clear()
        if timers:
            end = self._now() + _RESOLUTION
            while timers and timers[0][0] < end:
                ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            if self.frozen:
                return
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()  # noqa: SLF001  (what a loop does with a handle)
            del handle  # the traceback of an error refers to this frame, and would keep the failed task alive

    # The side of asyncio and anyio.

    def time(self) -> float:
        """Seconds on the clock of this loop."""
        return self._now()

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """See `asyncio.loop.call_soon`."""
        if self._closed:
            self._refuse()
        handle = asyncio.Handle(callback, args, self, context)
        if cast("object", callback) is _ended:  # bookkeeping takes no turn
            callback(*args)
            return handle
        self._ready.append(handle)
        if not self._turning:
            self._woken()
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """See `call_soon`: a world has one thread."""
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See `asyncio.loop.call_later`."""
        return self.call_at(self._now() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See `asyncio.loop.call_at`. Timers that are due at one moment run in the order they were set."""
        if self._closed:
            self._refuse()
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        if not self._turning:
            self._woken()
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing to count: a cancelled timer is skipped when it surfaces."""

    def create_future(self) -> asyncio.Future[Any]:
        """See `asyncio.loop.create_future`."""
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Generator[Any, None, T] | Coroutine[Any, Any, T], *, name: object = None, **options: Any
    ) -> VirtualTask[T]:
        """See `asyncio.loop.create_task`."""
        if self._closed:
            self._refuse()
        number = next(self._numbers)
        label = f"task-{number}" if name is None else str(name)
        task: VirtualTask[T] = VirtualTask(number, coro, loop=self, name=label, **options)
        self.tasks[task] = None
        task.add_done_callback(_ended)
        return task

    def forget(self, task: VirtualTask[Any]) -> None:
        """Hold *task* no longer: it has ended."""
        self.tasks.pop(task, None)
        if task.failed:
            self._failed_tasks.append(weakref.ref(task))  # dropped unseen, it reports to `call_exception_handler`

    def get_task_factory(self) -> None:
        """There is none: tasks have to be numbered."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Pass on what would vanish in a log."""
        message = str(context.get("message", "error in the event loop"))
        error: BaseException | None = context.get("exception")
        if not self._closed:
            self._failed(error or RuntimeError(message), message)
        elif error is not None and not isinstance(error, FencingError):
            raise error  # a lost error that the garbage collector found: the interpreter reports it as unraisable

    def get_debug(self) -> bool:
        """Never: the debug mode measures real time."""
        return False

    def is_running(self) -> bool:
        """Return whether a turn is under way."""
        return self._turning

    def is_closed(self) -> bool:
        """Return whether the loop has stopped taking callbacks."""
        return self._closed

    def close(self) -> None:
        """Forget what is scheduled and take nothing more."""
        self._closed = True
        self._ready.clear()
        self._arrived.clear()
        self._timers.clear()

    @staticmethod
    def _refuse() -> NoReturn:
        msg = "Event loop is closed"  # the words, and the class, that callers of asyncio know
        raise RuntimeError(msg)

    def _finalize(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self._closed:
            self.call_soon(self.create_task, generator.aclose())

    async def shutdown_asyncgens(self) -> None:
        """Close every asynchronous generator that was not run to its end."""
        for generator in tuple(self._generators):
            await generator.aclose()

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """There is none."""


def _refuse(call: str) -> Callable[..., NoReturn]:
    def refuse(*_args: object, **_options: object) -> NoReturn:
        msg = f"a simulated process has no loop.{call}(): no I/O, no threads, only tasks, timers and its links"
        raise UsageError(msg)

    return refuse


for _call in _NOT_HERE:
    setattr(VirtualLoop, _call, _refuse(_call))


class VirtualTask(asyncio.Task[T]):
    """A task whose hash is its number, not its address."""

    def __init__(self, number: int, coro: Generator[Any, None, T] | Coroutine[Any, Any, T], **options: Any) -> None:
        self._number = number  # first: registering the task hashes it
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number

    @property
    def unseen(self) -> bool:
        """True if the task failed and its outcome was never retrieved."""
        return self._log_traceback  # what asyncio itself reports a lost exception by

    @property
    def failed(self) -> bool:
        """True if the task ended with an error. Asking does not count as having seen it."""
        return self._exception is not None


TURN = 50e-6
"""Seconds that one turn of an event loop takes: without them code that spins would stop time."""
_CANCELLATIONS = 3
"""Number of times to cancel what is left at the end."""
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
