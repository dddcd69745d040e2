"""What a check found: a verdict for each promise, and every violation with the moment it shows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum, unique

PROMISES = ("P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8")
HEADLINES = {
    "P1": "no silent overrun: the work ended before the store could hand the lock on",
    "P2": "a readable token is a usable token",
    "P3": "a stale writer is refused",
    "P4": "tokens only grow",
    "P5": "nothing is left behind, and a release frees only the releaser's own grant",
    "P6": "faults of the store are ridden out",
    "P7": "your errors stay yours",
    "P8": "waiters get their turn",
}


@unique
class Verdict(StrEnum):
    """What a recording shows."""

    OK = "ok"
    VIOLATED = "violated"
    UNKNOWN = "unknown"
    """Too little was observed. Never to be counted as a pass."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise."""

    promise: str
    rule: str
    at: float
    """Seconds on the axis of the recording."""
    text: str

    def __str__(self) -> str:
        return f"{self.promise} {self.rule} at {self.at:.6f}: {self.text}"


@dataclass(slots=True)
class Report:
    """The outcome of a check, or of many."""

    violations: list[Violation] = field(default_factory=list)
    observed: Counter[str] = field(default_factory=Counter)
    """How often each promise was put to the test, and the counts named in ``tally``."""

    def saw(self, what: str, times: int = 1) -> None:
        """Count evidence."""
        self.observed[what] += times

    def found(self, promise: str, rule: str, at: float, text: str) -> None:
        """Note a violation."""
        self.violations.append(Violation(promise, rule, at, text))

    def add(self, other: Report) -> None:
        """Count another run in."""
        self.violations += other.violations
        self.observed.update(other.observed)

    @property
    def rules(self) -> set[str]:
        """The rules that were broken."""
        return {violation.rule for violation in self.violations}

    def of(self, promise: str) -> Verdict:
        """The verdict on one promise."""
        if any(violation.promise == promise for violation in self.violations):
            return Verdict.VIOLATED
        return Verdict.OK if self.observed[promise] else Verdict.UNKNOWN

    def verdict(self, *, least: int, require: tuple[str, ...] = PROMISES) -> Verdict:
        """
        The verdict on the whole: a pass only if enough was seen of everything that is required.

        Args:
            least: The fewest acquisitions from which to judge a recording.

            require: Promises that must have been put to the test.
        """
        if self.violations:
            return Verdict.VIOLATED
        enough = self.observed["acquisitions"] >= least and self.observed["hand-overs"] > 0
        return Verdict.OK if enough and all(self.of(promise) is Verdict.OK for promise in require) else Verdict.UNKNOWN
