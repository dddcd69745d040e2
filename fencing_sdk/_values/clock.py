"""
The only reader of the clock that leases are measured on, and the only source of random numbers.

Durations are compared on one machine only, on a clock that is never stepped and that goes on while
the machine is suspended. `time.monotonic` stops in a suspend on Linux and on macOS, so a lease would
look valid after an hour of sleep. On Linux `CLOCK_BOOTTIME` goes on. macOS has no such clock, but its
`CLOCK_MONOTONIC` goes on, unlike `mach_absolute_time`, which `time.monotonic` reads there.

The random numbers make pauses, and orders in which servers are tried. The system draws each of them, so that forked
workers do not pause in step, and a program that seeds `random` gets the same numbers with and without a client.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from functools import partial
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
    """Microseconds since 1970."""
    return time.time_ns() // 1000


TICK = 10
"""
Microseconds that a hybrid token counts.

Such a token has 15 digits until 2286, and so is an Integer of RFC 9651, which every library for structured headers
reads. One that counts single microseconds has 16.
"""


def wall_ticks() -> int:
    """Ticks since 1970: the floor under a token whose counter may get lost."""
    return wall_micros() // TICK


def boot_identity() -> str:
    """
    Name the period in which readings of `BootClock` of this machine may be compared.

    `CLOCK_BOOTTIME` starts at zero with every boot, and a container with a time namespace of its
    own sees it shifted under the same boot id, so both are part of the name.
    """
    from pathlib import Path  # noqa: PLC0415  (few stores ask, and its own imports take longer than ours)

    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return "unknown"


class _Jitter(random.SystemRandom):
    """Draws from the system, or from *drawn_from*, by which a test repeats a run."""

    drawn_from: random.Random | None = None

    def random(self) -> float:
        """See `random.Random.random`."""
        return super().random() if self.drawn_from is None else self.drawn_from.random()

    def getrandbits(self, k: int) -> int:
        """See `random.Random.getrandbits`."""
        return super().getrandbits(k) if self.drawn_from is None else self.drawn_from.getrandbits(k)


JITTER = _Jitter()
