"""
Who blocked the event loop: a sleeping thread that looks at the loop's stack when a beat is overdue.

The heartbeat tells when it expects to run next; while it keeps its word the thread only sleeps.
One long C call that keeps the interpreter lock stops this thread too: then the stack is seen when
the call ends, or not at all, and only the lateness is reported.
"""

from __future__ import annotations

import math
import sys
import threading
import traceback

from fencing_sdk._values.clock import Clock

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
        if overdue_at is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fencing-stall-watch", daemon=True)
            self._thread.start()
        elif overdue_at < self._asleep_until:
            self._rearmed.set()

    def stack_since(self, moment: float) -> str | None:
        """What was seen on the stack since *moment*, innermost call last."""
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
        calls: list[traceback.FrameSummary] = []
        # Nothing in this loop waits: while this thread reads a source line the watched thread would run and leave these
        # frames, and CPython 3.11 has crashed on a frame of another thread that went on.
        while frame is not None and len(calls) < _DEPTH:
            code = frame.f_code
            if not _of_the_loop(code.co_filename):
                calls.insert(
                    0, traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name, lookup_line=False)
                )
            frame = frame.f_back
        return "".join(traceback.format_list(calls))


def _of_the_loop(filename: str) -> bool:
    return any(part in filename.replace("\\", "/") for part in _LOOP_FILES)
