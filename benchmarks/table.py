"""Interleaved rounds of several contestants, and the one table in which every benchmark ends."""

from __future__ import annotations

import asyncio
import logging
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import uvloop

Operation = Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class Row:
    """One measure: ours, the peers of the same run, and their ratio. Without a *reach* there is nothing to reach."""

    measure: str
    ours: str
    peer: str = ""
    ratio: str = ""
    reach: str = ""
    reached: bool | None = None

    def cells(self) -> tuple[str, ...]:
        verdict = {None: "", True: "yes", False: "NO"}[self.reached]
        return (self.measure, self.ours, self.peer, self.ratio, self.reach, verdict)


_HEADS = ("measure", "ours", "peer", "ratio", "reach", "ok?")


def show(rows: Sequence[Row]) -> None:
    """Print the table, in Markdown."""
    lines = [_HEADS, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    for line in lines:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")


class Measure(Protocol):
    def __call__(self, *, quick: bool) -> Coroutine[Any, Any, list[Row]]: ...


def run(measure: Measure) -> None:
    """Run one benchmark as a script, and print its table. ``--quick`` takes fewer rounds, ``--uvloop`` that loop."""
    logging.getLogger("fencing_sdk").setLevel(logging.ERROR)  # leases are lost on purpose
    loop = uvloop if "--uvloop" in sys.argv else asyncio
    print(f"Python {sys.version.split()[0]}, {loop.__name__}")
    rows = loop.run(measure(quick="--quick" in sys.argv))
    print()
    show(rows)


@dataclass(frozen=True)
class Result:
    """Microseconds for one operation: the median of the rounds, wall and CPU."""

    wall: float
    cpu: float


async def _round(operation: Operation, times: int) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(times):
        await operation()
    return (time.perf_counter() - wall) / times * 1e6, (time.process_time() - cpu) / times * 1e6


async def compare(contestants: Mapping[str, Operation], *, times: int, rounds: int = 7) -> dict[str, Result]:
    """Run every contestant once in each round, after one round that does not count."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, operation in contestants.items():
            sample = await _round(operation, times)
            if number:
                samples[name].append(sample)
    return {
        name: Result(statistics.median(wall for wall, _ in taken), statistics.median(cpu for _, cpu in taken))
        for name, taken in samples.items()
    }


def compared(results: dict[str, Result], *, reach: dict[str, float] | None = None, by: str = "wall") -> list[Row]:
    """
    Make a row for every contestant but the first, the bare operation, with which the others are compared.

    Args:
        results: What `compare` returned.

        reach: The ratio that a contestant is to reach, by its name.

        by: Which ratio that is, ``wall`` or ``cpu``.
    """
    (bare_name, bare), *others = results.items()
    rows = []
    for name, result in others:
        wall, cpu = result.wall / bare.wall, result.cpu / bare.cpu
        wanted = (reach or {}).get(name)
        reached = None if wanted is None else (wall if by == "wall" else cpu) <= wanted
        rows.append(
            Row(
                name,
                f"{result.wall:.1f} us, CPU {result.cpu:.1f}",
                f"{bare_name}: {bare.wall:.1f} us, CPU {bare.cpu:.1f}",
                f"{wall:.2f}x wall, {cpu:.2f}x CPU",
                "" if wanted is None else f"{wanted:g}x {by}",
                reached,
            )
        )
    return rows


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that is not below so many percent of *values*."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def p50_p99(values: Sequence[float], *, scale: float = 1e6, unit: str = "us") -> str:
    """Both percentiles as a text."""
    return f"p50 {statistics.median(values) * scale:,.3g}, p99 {percentile(values, 99) * scale:,.3g} {unit}"


def times(ours: float, other: float) -> str:
    """A ratio as a text."""
    return f"{ours / other:.2f}x" if other else ""
