"""Interleaved rounds of several contestants, and the ratios between them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

Operation = Callable[[], Awaitable[object]]


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


async def compare(contestants: dict[str, Operation], *, times: int, rounds: int = 7) -> dict[str, Result]:
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


def report(title: str, results: dict[str, Result]) -> None:
    """Print a table; the first contestant is the bare operation that the others are compared with."""
    bare = next(iter(results.values()))
    print(f"\n{title}")
    print(f"  {'':38} {'wall us':>9} {'CPU us':>9} {'wall':>7} {'CPU':>7}")
    for name, result in results.items():
        ratios = f"{result.wall / bare.wall:6.2f}x {result.cpu / bare.cpu:6.2f}x"
        print(f"  {name:38} {result.wall:9.1f} {result.cpu:9.1f} {ratios}")
