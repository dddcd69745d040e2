"""
Timers of a client: timeouts of calls to the store, and sleeps that end in time although the machine was suspended.

Timeouts run on the event loop's clock: one timer of the loop serves all calls, because nearly every call ends before
its limit.

A lease is measured on the client's clock, which goes on during a suspend. The timers of an event loop run
on another one, which stands still meanwhile, so after the suspend they are late by as long as it
took. While a lease is held or an acquisition waits, the two clocks are compared about once a
second; when they have moved apart, every sleep is measured anew. A client without leases and waiters is not woken.

`StallWatch` finds who blocked the loop: a sleeping thread that looks at the loop's stack when a beat is overdue. The
heartbeat announces when it will run next, and while it is punctual the thread only sleeps. One long C call that
keeps the interpreter lock stops this thread too: then the stack is seen when the call ends, or not at all, and only the
lateness is reported.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import traceback
from collections.abc import Callable, Hashable, Sized
from contextvars import Context
from typing import Any, Self, TypeVar

from fencing_sdk._values.clock import Clock
from fencing_sdk._values.loop_owner import no_task

K = TypeVar("K", bound=Hashable)

_FIRST_PAUSE = 0.01
"""Seconds between the cancellations of a call that swallows them; each pause is twice the one before."""
_LAST_PAUSE = 1.0


class TimerQueue:
    """
    Calls to be made at a moment, by one timer of the event loop for all of them.

    Nearly every entry is dropped before it is due, and putting and dropping one costs a tenth of a
    timer of its own. The timer is not moved when the earliest entry is dropped: it fires for nothing then.
    """

    __slots__ = ("_due", "_ending", "_fires_at", "_timer", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._due: dict[Any, tuple[float, Callable[[Any], None]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._fires_at = math.inf
        self._ending = False

    def put(self, key: K, seconds: float, call: Callable[[K], None]) -> None:
        """Make ``call(key)`` in *seconds*, unless *key* is dropped before."""
        when = self.loop.time() + seconds
        self._due[key] = (when, call)
        if when < self._fires_at:
            self._set_timer(when)

    def drop(self, key: Hashable) -> None:
        """Call nothing for *key*, which need not be known."""
        self._due.pop(key, None)
        if self._ending and not self._due:
            self._set_timer(math.inf)

    def end(self) -> None:
        """Cancel the timer once the last entry is dropped; an entry that comes later is still called."""
        self._ending = True
        self.drop(None)

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires_at = when
        self._timer = None if math.isinf(when) else self.loop.call_at(when, self._fire, context=Context())

    def _fire(self) -> None:
        now = self.loop.time()
        due = [(key, call) for key, (when, call) in self._due.items() if when <= now]
        try:
            for key, call in due:
                if self._due.pop(key, None) is not None:
                    call(key)
        finally:  # a driver's future may refuse its cancellation: the others are called all the same
            self._set_timer(min((when for when, _ in self._due.values()), default=math.inf))


class CallTimeout:
    """
    Cancels the current task after *seconds*, and again after growing pauses while it goes on.

    Swallows the cancellation that it caused, and one that leaked out of a driver; a cancellation
    from outside passes. True once the limit was reached; `why` is then the cause that the backend
    gave to the cancellation. (A cancel scope would do, but it cancels a task that swallows its
    cancellation in every turn of the loop, and so occupies the processor.)
    """

    __slots__ = ("_before", "_cancelled", "_pause", "_seconds", "_timers", "task", "why")

    task: asyncio.Task[Any]
    why: BaseException | None

    def __init__(self, timers: TimerQueue, seconds: float) -> None:
        self._timers = timers
        self._seconds = seconds
        self._pause = _FIRST_PAUSE
        self._cancelled = 0

    def __bool__(self) -> bool:
        return self._cancelled > 0

    def __enter__(self) -> Self:
        if (task := asyncio.current_task(self._timers.loop)) is None:  # a call to the store is a task; one is hidden
            raise no_task()
        self.task = task
        self._before = task.cancelling()
        self._timers.put(self, self._seconds, CallTimeout._cancel)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        self._timers.drop(self)
        self.why = None if error is None else error.__cause__
        for _ in range(self._cancelled):
            self.task.uncancel()
        return kind is asyncio.CancelledError and self.task.cancelling() <= self._before

    def _cancel(self) -> None:
        self._cancelled += 1
        self.task.cancel()
        self._timers.put(self, self._pause, CallTimeout._cancel)
        self._pause = min(self._pause * 2, _LAST_PAUSE)


_LOOK_EVERY = 0.9
"""Seconds between two comparisons: a body whose lease ended in a suspend runs on for at most one second."""
_APART = 0.05
"""Seconds that the clocks may move apart before sleeps are corrected. Some loops read theirs once in a turn."""


_asleep: dict[asyncio.Event, asyncio.Task[Any] | None] = {}
"""
Sleepers, in all loops. Without it a loop that is dropped unclosed would take its tasks along at the end of the
interpreter, and Python would report each as destroyed, and close its coroutine where no event loop runs.
"""


class SuspendWatch:
    """Compares the clock of a client with the one of its event loop, and corrects those who sleep by the latter."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._apart = clock.now() - loop.time()
        self._sleeps: dict[
            asyncio.Event, tuple[float, asyncio.TimerHandle | None]
        ] = {}  # end on the client's clock, timer
        self._needed: dict[Hashable, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.resting = True
        """True if nothing is compared, so that the next lease has to call `wake`."""
        self.leases: Sized = ()
        """The leases of the client. While there are any, the clocks are compared."""

    async def sleep(self, event: asyncio.Event, seconds: float) -> None:
        """
        Wait for *event*, which is set after *seconds* on the client's clock, if something needs this watch.

        The event is the sleeper's own. No cancellation ends the sleep, so none from outside can be taken for it.
        """
        end = self._clock.now() + seconds
        _asleep[event] = asyncio.current_task(self._loop)
        timer = None if math.isinf(seconds) else self._set_later(event, seconds)
        self._sleeps[event] = end, timer
        try:
            await event.wait()
        finally:
            del _asleep[event]
            _, timer = self._sleeps.pop(event)
            if timer is not None:
                timer.cancel()

    def _set_later(self, event: asyncio.Event, seconds: float) -> asyncio.TimerHandle:
        return self._loop.call_later(seconds, event.set, context=Context())

    async def watched_sleep(self, event: asyncio.Event, seconds: float) -> None:
        """Like `sleep`, but the clocks are compared meanwhile also without leases."""
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
        self.wake()

    def wake(self) -> None:
        """Have the clocks compared. A timer that was set while freezegun stopped the loop may be years ahead."""
        timer = self._timer
        if timer is not None and timer.when() - self._loop.time() > 2 * _LOOK_EVERY:
            timer.cancel()
            self.look()
        elif self.resting:
            self.look()

    def end(self, key: Hashable) -> None:
        """*key* no longer needs it. The timer goes on once, as it may be needed again at once."""
        self._needed.pop(key, None)

    def stop(self) -> None:
        """Stop comparing clocks and cancel the timer."""
        self.resting = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> None:
        """Compare, and go on as long as that is needed."""
        self._timer = None
        self.resting = not self._needed and not self.leases
        if not self.resting:
            self._compare()
            self._timer = self._loop.call_later(_LOOK_EVERY, self.look, context=Context())

    def _compare(self) -> None:
        now, loop_now = self._clock.now(), self._loop.time()
        if abs(now - loop_now - self._apart) < _APART:
            return
        self._apart = now - loop_now
        for event, (end, timer) in self._sleeps.items():
            if timer is not None:
                timer.cancel()
                self._sleeps[event] = end, self._set_later(event, max(0.0, end - now))


_DEPTH = 6
_LOOP_FILES = ("/asyncio/", "/selectors.py")


class StallWatch:
    """Samples the stack of the thread that made it, once for every beat that is overdue."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._watched = threading.get_ident()
        self._overdue_at: float | None = None
        self._asleep_until = math.inf  # of the thread; it is woken for what comes earlier, and only for that
        self._seen: tuple[float, str | None] | None = None
        self._rearmed = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def arm(self, overdue_at: float | None) -> None:
        """Expect the next `arm` before *overdue_at* on the clock; None expects nothing."""
        self._overdue_at = overdue_at
        if overdue_at is None or self._stopped:
            return
        if self._thread is None:
            try:
                self._thread = threading.Thread(target=self._run, name="fencing-stall-watch", daemon=True)
                self._thread.start()
            except RuntimeError:  # a subinterpreter, or a system without room for a thread: leases do without the stack
                self._stopped = True
        elif overdue_at < self._asleep_until:
            self._rearmed.set()

    def stack_since(self, moment: float) -> str | None:
        """Return the stack that was seen since *moment*, innermost call last."""
        seen = self._seen
        return seen[1] if seen is not None and seen[0] >= moment else None

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self._rearmed.set()

    def _run(self) -> None:
        sampled: float | None = None
        while True:
            self._rearmed.clear()
            if self._stopped:  # looked at after clearing, or a call of stop() in between would be missed
                return
            expected = self._overdue_at
            watching = expected is not None and expected != sampled
            self._asleep_until = expected if watching and expected is not None else math.inf
            if self._overdue_at != expected:
                continue  # armed again after we looked, and perhaps before it was said how long we sleep
            early = self._asleep_until - self._clock.now()
            if early > 0:
                self._rearmed.wait(None if math.isinf(early) else early)
            else:
                self._seen = (self._clock.now(), self._sample())
                sampled = expected

    def _sample(self) -> str | None:
        frame = sys._current_frames().get(self._watched)  # noqa: SLF001  (documented, and the only way)
        if frame is None or _of_the_loop(frame.f_code.co_filename):
            return None  # it is not blocked now: the whole process stood still, or the loop has just come back
        calls = [call for call in traceback.walk_stack(frame) if not _of_the_loop(call[0].f_code.co_filename)]
        return "".join(traceback.format_list(traceback.StackSummary.extract(reversed(calls[:_DEPTH]))))


def _of_the_loop(filename: str) -> bool:
    return any(part in filename.replace("\\", "/") for part in _LOOP_FILES)
