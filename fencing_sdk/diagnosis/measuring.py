"""
What is measured: how long this process stood still, how long the store takes to answer, and how its clock runs.

Pauses are those of the event loop, and of the process as a whole. The store is timed by the renewals of a scratch lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from fencing_sdk._values.claim import Claim, Grant, Renewal
from fencing_sdk._values.clock import BootClock, wall_seconds
from fencing_sdk._values.reports import Finding, error, warning
from fencing_sdk._values.tasks import move_on_after
from fencing_sdk.abc import Backend, SupportsDiagnosis
from fencing_sdk.diagnosis.checks import too_slow
from fencing_sdk.diagnosis.self_test import TTL
from fencing_sdk.errors import BackendError

_CLOCK = BootClock()
_LOOP_STEP = 0.005
_THREAD_STEP = 0.01
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
    """Return the clock from which the kernel counts, such as ``tsc``; None where the system does not show it."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None


_STEP = 0.1
"""Seconds between two renewals: every store bears ten calls a second."""
_LIMIT = 5.0


@dataclass(frozen=True, slots=True)
class _Reading:
    """One reading of the store's clock, and of ours in the middle of the call."""

    store: float
    ours: float
    wall: float
    error: float


@dataclass(slots=True)
class StoreTimes:
    """Seconds that renewals took, and readings of the store's clock."""

    renewals: list[float] = field(default_factory=list)
    readings: list[_Reading] = field(default_factory=list)

    def quantile(self, part: float) -> float | None:
        """The time within which so large a *part* of the renewals was answered."""
        in_order = sorted(self.renewals)
        return in_order[min(int(part * len(in_order)), len(in_order) - 1)] if in_order else None

    @property
    def difference(self) -> float | None:
        """How far the store's clock is ahead of this machine's."""
        if not self.readings:
            return None
        best = min(self.readings, key=lambda reading: reading.error)
        return best.store - best.wall

    @property
    def drift(self) -> float | None:
        """How much faster the store's clock runs, as a fraction; None without two readings."""
        if (elapsed := self._elapsed()) is None:
            return None
        return (self.readings[-1].store - self.readings[0].store) / elapsed - 1

    @property
    def drift_error(self) -> float:
        """By how much `drift` may be wrong, because it is not known when within a call the clock was read."""
        elapsed = self._elapsed()
        return 0.0 if elapsed is None else (self.readings[0].error + self.readings[-1].error) / elapsed

    def _elapsed(self) -> float | None:
        elapsed = self.readings[-1].ours - self.readings[0].ours if self.readings else 0.0
        return elapsed if elapsed > 0 else None


async def time_renewals(
    backend: Backend, store: SupportsDiagnosis | None, name: str, over: float, times: StoreTimes
) -> list[Finding]:
    """Hold the lock *name* for *over* seconds, and time its renewals. A failed one is a finding."""
    claim = Claim(name, TTL)
    end = _CLOCK.now() + over
    try:
        with anyio.fail_after(over + _LIMIT):
            await _read_clock(store, times)
            if isinstance(await backend.acquire(claim), Grant):
                await _renew_until(end, backend, claim, times)
            await _read_clock(store, times)
    except BackendError as failure:
        fix = "look at the store's log and at the network; a client rides out faults until the deadline of a lease"
        return [warning("store.renewals", str(failure), "the store failed while it was measured", fix)]
    except TimeoutError:
        return [too_slow("store.renewals", _LIMIT, "leases would be lost")]
    finally:
        with move_on_after(2.0, shield=True), suppress(BackendError):
            await backend.release(claim)
    if times.renewals:
        return []
    what = "a lease was not renewed right after its grant"
    return [error("store.renewals", what, "leases would be lost", "look at the store's log")]


async def _renew_until(end: float, backend: Backend, claim: Claim, times: StoreTimes) -> None:
    while True:
        before = _CLOCK.now()
        (outcome,) = await backend.renew([claim])
        if outcome is not Renewal.RENEWED:
            return
        times.renewals.append(_CLOCK.now() - before)
        left = end - _CLOCK.now()
        if left <= 0:
            return
        await anyio.sleep(min(_STEP, left))


async def _read_clock(store: SupportsDiagnosis | None, times: StoreTimes) -> None:
    if store is None:
        return
    before, wall = _CLOCK.now(), wall_seconds()
    theirs = await store.server_time()
    half = (_CLOCK.now() - before) / 2
    if theirs is not None:
        times.readings.append(_Reading(theirs, before + half, wall + half, half))
