"""
``fencing check``: recordings are read from files and judged. For ``fencing timeline``, what they say is arranged.

The lines are untrusted input: one that is not an event is an error with its number. What the events say together is
gathered by `fencing_sdk.testing.history`, for ``fencing check`` too.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, unique
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from fencing_sdk.cli._streams import harmless
from fencing_sdk.errors import ConfigurationError, LossReason, shown
from fencing_sdk.testing.history import HEADLINES, PROMISES, Report, Verdict, check
from fencing_sdk.testing.history._facts import Facts, RecordedLease
from fencing_sdk.testing.history._gathering import OF_ACTORS, gather

Line = dict[str, Any]
"""One event: at least ``t`` in seconds, ``kind``, and ``actor``."""


class PlacedLine(Line):
    """An event that knows ``where`` it was read, for an error about it."""

    __slots__ = ("where",)

    def __init__(self, line: Line, where: str) -> None:
        super().__init__(line)
        self.where = where


_SHOW_EVERY = 500
"""Lines after which the progress is shown anew."""
_SECONDS_LIMIT = 2**53
"""Seconds: a later moment is an error of the recording; far below, sums and differences stay finite."""


def read_recording(paths: Sequence[Path]) -> list[Line]:
    """
    Read the lines of recordings made on one machine, in order of time. A terminal shows how far that is.

    Raises:
        ConfigurationError: a file cannot be read, or a line is not an event.
    """
    console = Console(stderr=True)
    lines: list[Line] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for path in paths:
            try:
                size = path.stat().st_size
                with path.open("rb") as file:
                    task = progress.add_task(f"reading {escape(shown(path.name))}", total=size)
                    for number, raw in enumerate(file, start=1):
                        if text := raw.decode().strip():
                            lines.append(parse_line(text, f"line {number} of {shown(str(path))}"))
                        if number % _SHOW_EVERY == 0:
                            progress.update(task, completed=file.tell())
            except (OSError, UnicodeDecodeError) as error:
                msg = f"cannot read {shown(str(path))}: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}"
                raise ConfigurationError(msg) from error
    lines.sort(key=lambda line: float(line["t"]))
    return lines


def parse_line(raw: str | bytes, where: str) -> Line:
    """
    Return the event that *raw* holds; *where* names it in the error.

    Raises:
        ConfigurationError: it is not an object with a finite ``t`` and a ``kind``.
    """
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):  # the latter: brackets in brackets in brackets
        line = None
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str) or not _is_seconds(line.get("t")):
        msg = f"{where} is not an event: expected a JSON object with 't' in seconds and 'kind'"
        raise ConfigurationError(msg)
    return PlacedLine(line, where)


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_SECONDS_LIMIT < value < _SECONDS_LIMIT


PLAIN = ("P1", "P4")
"""What a recording shows that was made with ``FENCING_RECORD`` and nothing else."""
_SHOWN = 20
"""Violations that are printed."""


@unique
class Code(IntEnum):
    """Exit codes. 2 is wrong usage, as everywhere."""

    OK = 0
    VIOLATED = 1
    UNKNOWN = 3


def check_recordings(recordings: Sequence[Path], console: Console, *, least: int, require: Sequence[str]) -> Code:
    """
    Judge *recordings* of one run, and print what was observed and what was broken.

    Args:
        recordings: Files of JSON lines, made on one machine.

        console: Where to print.

        least: Acquisitions below which they show nothing.

        require: Promises without which there is no pass.

    Raises:
        ConfigurationError: a file cannot be read, a line is not an event, or an argument cannot work.
    """
    if least < 1:
        msg = f"--least must be at least 1, got {least}"
        raise ConfigurationError(msg)
    if unknown := [promise for promise in require if promise not in PROMISES]:
        msg = f"--require takes promises from P1 to P8, not {shown(unknown[0])}"
        raise ConfigurationError(msg)
    report = check(read_recording(recordings))
    verdict = report.verdict(least=least, require=tuple(require))
    for line in _lines_of(report, verdict, least, require):
        console.print(harmless(line), markup=False, highlight=False, soft_wrap=True)
    return Code[verdict.name]


def _lines_of(report: Report, verdict: Verdict, least: int, require: Sequence[str]) -> list[str]:
    seen = report.observed
    counts = ("acquisitions", "hand-overs", "losses", "writes", "refusals")
    lines = [", ".join(f"{seen[name]} {name}" for name in counts)]
    lines += [f"  {p} {report.of(p):<9}{seen[p]:>8} checks  {HEADLINES[p]}" for p in PROMISES]
    lines += [f"  {violation}" for violation in report.violations[:_SHOWN]]
    if len(report.violations) > _SHOWN:
        lines.append(f"  and {len(report.violations) - _SHOWN} more")
    return [*lines, f"verdict: {verdict}{_missing(report, verdict, least, require)}"]


def _missing(report: Report, verdict: Verdict, least: int, require: Sequence[str]) -> str:
    """Why a recording shows too little."""
    if verdict is not Verdict.UNKNOWN:
        return ""
    if report.observed["acquisitions"] < least:
        return f": fewer than {least} acquisitions"
    if not report.observed["hand-overs"]:
        return ": no lock was ever handed on"
    never = [promise for promise in require if report.of(promise) is Verdict.UNKNOWN]
    return f": the recording has nothing about {', '.join(never)}"


# For a picture; nothing is drawn here.

_BY_THE_CLOCK = {LossReason.EXPIRED, LossReason.STALLED}


@dataclass(frozen=True, slots=True)
class Span:
    """Something that lasted: a wait for a lock, or a freeze."""

    lane: str
    start: float
    end: float
    lock: str = ""


@dataclass(frozen=True, slots=True)
class DrawnAccess:
    """A read or a write of the resource, or its fence being raised."""

    kind: str
    lane: str
    resource: str
    at: float
    token: int
    fence: int | None = None
    text: str = ""
    stale: bool = False
    """A write that was accepted although a later holder had written before."""


class Story:
    """One run, to be drawn as one panel: the *facts* that `fencing_sdk.testing.history` reads, and their lanes."""

    def __init__(self, facts: Facts) -> None:
        self.title, self.outcome = facts.title, facts.outcome
        self.start, self._last = facts.first, facts.last
        self.lanes = list(facts.actors)
        self.leases = facts.leases
        self.locks = _locks(facts)
        self.accesses = list(_drawn(facts))
        self.resources = list(dict.fromkeys(access.resource for access in self.accesses))
        self.waits = [
            Span(wait.actor, max(self.start, wait.start), self._last if wait.end is None else wait.end, wait.name)
            for wait in sorted(facts.waits, key=lambda wait: wait.start)
        ]
        self.freezes = [
            Span(trouble.actor, trouble.start, min(trouble.end, self._last))
            for trouble in facts.troubles
            if trouble.what == "frozen" and trouble.actor in facts.actors
        ]
        self._grants: dict[str, list[tuple[float, int]]] = {}  # by lock, in their order: searched, not walked through
        for lease in sorted(self.leases, key=lambda lease: lease.acquired):
            self._grants.setdefault(lock_of(lease), []).append((lease.acquired, lease.token))
        self.end = max([self._last, *map(self.handed_on, self.leases)])

    @property
    def duration(self) -> float:
        """Seconds from the first event to the last."""
        return max(0.0, self.end - self.start)

    def deadline_of(self, lease: RecordedLease) -> float:
        """When the holder stops by itself; at the end of the recording a lease may go on."""
        return min(lease.deadline, self._last) if lease.over == math.inf else lease.deadline

    def used_until(self, lease: RecordedLease) -> float:
        """When the holder's right to work ended."""
        return min(self.deadline_of(lease), lease.over)

    def handed_on(self, lease: RecordedLease) -> float:
        """The moment the store's grant behind *lease* ended: by time, by the next grant, or because the store knew."""
        expires = (lease.renewals[-1] if lease.renewals else lease.acquired) + lease.ttl
        grants = self._grants[lock_of(lease)]
        after = range(bisect_right(grants, (lease.acquired, math.inf)), len(grants))
        others = (grants[place][0] for place in after if grants[place][1] != lease.token)  # no fellow reader
        known_to_store = lease.lost is None or lease.reason not in _BY_THE_CLOCK
        end = self._last if lease.over == math.inf else lease.over if known_to_store else math.inf
        return min(expires, next(others, math.inf), end)

    def safety_of(self, lease: RecordedLease) -> tuple[float, float] | None:
        """From the holder's own deadline to the moment the store hands on, where the lease came to that."""
        deadline, end = self.deadline_of(lease), self.handed_on(lease)
        reached = self.used_until(lease) >= deadline and (lease.lost is not None or lease.released is None)
        return (deadline, end) if reached and end > deadline else None


def stories_of(lines: Iterable[Line]) -> list[Story]:
    """
    Make a story of every run in a recording in which something was done, of the kinds of lines that are drawn.

    Raises:
        ConfigurationError: an event lacks a number that its kind always has.
    """
    drawn = OF_ACTORS | {"run", "outcome"}
    return [Story(facts) for facts in gather(line for line in lines if line["kind"] in drawn) if facts.actors]


def lock_of(lease: RecordedLease) -> str:
    """The lane of a lease among the locks: each permit has one of its own."""
    return lease.name if lease.permit is None else f"{lease.name} #{lease.permit}"


def _locks(facts: Facts) -> list[str]:
    """The lanes of locks in order of appearance; that of a name is left out where all its grants are permits."""
    permits = {lease.name for lease in facts.leases if lease.permit is not None}
    waited = [(wait.start, wait.name) for wait in facts.waits if wait.name not in permits]
    held = [(lease.acquired, lock_of(lease)) for lease in facts.leases]
    return list(dict.fromkeys(lock for _, lock in sorted([*waited, *held], key=lambda one: one[0])))


def _drawn(facts: Facts) -> Iterator[DrawnAccess]:
    written: dict[str, int] = {}  # the highest token of an accepted write, by resource
    asides = set(map(id, facts.asides))
    for one in sorted([*facts.accesses, *facts.asides], key=lambda access: access.high):
        kind = "refused" if not one.accepted else "accepted" if one.write else "read" if id(one) in asides else "fence"
        fence, stale = one.fence, False
        if kind == "accepted":
            highest = written.get(one.resource, one.token)
            written[one.resource] = max(highest, one.token)
            fence, stale = (highest, True) if one.token < highest else (None, False)
        yield DrawnAccess(kind, one.actor, one.resource, one.high, one.token, fence, one.text, stale)
