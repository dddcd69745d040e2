"""The table at the end, and the numbers in it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One measure. Without a *reach* there is nothing to be reached."""

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
    """Print the table."""
    lines = [_HEADS, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    for line in lines:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")


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
