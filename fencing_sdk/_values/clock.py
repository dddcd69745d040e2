"""
The only reader of the clock that leases are measured on.

Durations are compared on one machine only, on a clock that is never stepped and that goes on while
the machine is suspended. `time.monotonic` stops in a suspend on Linux and on macOS, so a lease would
look valid after an hour of sleep. On Linux `CLOCK_BOOTTIME` goes on. macOS has no such clock, but its
`CLOCK_MONOTONIC` goes on, unlike `mach_absolute_time`, which `time.monotonic` reads there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol


def _boot_clock_id(system: object) -> int | None:
    """The best of the clocks that *system*, a module like `time`, has; None where it has `time.monotonic` alone."""
    boottime: int | None = getattr(system, "CLOCK_BOOTTIME", None)
    monotonic: int | None = getattr(system, "CLOCK_MONOTONIC", None)
    return monotonic if boottime is None else boottime


class Clock(Protocol):
    """A monotonic clock in seconds. Only differences mean something; read from any thread."""

    def now(self) -> float: ...


def _reader(clock: int | None) -> Callable[[], float]:
    """Read *clock* without a call of Python's own: each use of a token looks at it."""
    return time.monotonic if clock is None else partial(time.clock_gettime, clock)


class BootClock:
    """Seconds of `CLOCK_BOOTTIME` where the system has it, else of `CLOCK_MONOTONIC`, else of `time.monotonic`."""

    now = staticmethod(_reader(_boot_clock_id(time)))


class LoopClock:
    """The running event loop's own time: follows a loop that runs on virtual time."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


def wall_seconds() -> float:
    """Seconds since 1970. For people and for the start value of tokens, never for a deadline."""
    return time.time()


def wall_micros() -> int:
    """Microseconds since 1970: the floor under a token whose counter may get lost."""
    return time.time_ns() // 1000


def boot_identity() -> str:
    """
    Name the period in which readings of `BootClock` of this machine may be compared.

    `CLOCK_BOOTTIME` starts at zero with every boot, and a container with a time namespace of its
    own sees it shifted under the same boot id, so both are part of the name.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return "unknown"
