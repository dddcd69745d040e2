"""How long this process stood still: the event loop, and the process as a whole."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from fencing_sdk._values.clock import BootClock

_LOOP_STEP = 0.005
_THREAD_STEP = 0.01
_CLOCK = BootClock()
_CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")


class PauseWatch:
    """The longest pauses so far, in seconds. Each is how much later than asked for a sleep ended."""

    def __init__(self) -> None:
        self.loop = 0.0
        """Of the event loop: code that did not await, and everything that stops the process."""
        self.process = 0.0
        """Of a thread that does nothing else: a stopped or starved process, or code that keeps the interpreter."""
        self._stop = threading.Event()

    def watch_process(self) -> None:
        """Watch in the thread that calls, until `stop`."""
        before = _CLOCK.now()
        while not self._stop.wait(_THREAD_STEP):
            now = _CLOCK.now()
            self.process = max(self.process, now - before - _THREAD_STEP)
            before = now

    async def watch_loop(self) -> None:
        """Watch in the task that calls, until it is cancelled."""
        while True:
            before = _CLOCK.now()
            await asyncio.sleep(_LOOP_STEP)
            self.loop = max(self.loop, _CLOCK.now() - before - _LOOP_STEP)

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()


@asynccontextmanager
async def watching_pauses() -> AsyncIterator[PauseWatch]:
    """Watch the pauses of this process while the body runs."""
    watch = PauseWatch()
    thread = threading.Thread(target=watch.watch_process, name="fencing-pauses", daemon=True)
    thread.start()
    task = asyncio.create_task(watch.watch_loop())
    try:
        yield watch
    finally:
        watch.stop()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        thread.join()


def clock_source(path: Path = _CLOCK_SOURCE) -> str | None:
    """The clock from which the kernel counts, such as ``tsc``; None where the system does not tell."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
