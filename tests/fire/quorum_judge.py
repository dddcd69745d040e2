"""
Judges what clients of a quorum have written down. It knows neither the backend nor the protocol, only this:

each line is one grant that a client has used: the lock, the token, when it was asked for, when the client knew of it,
and the last moment at which the client took it for its own. All moments are on one clock of one machine.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path


@dataclass(frozen=True)
class Used:
    lock: str
    token: int
    asked: float
    known: float
    ended: float


@dataclass
class Judgement:
    grants: int = 0
    duplicates: int = 0
    """Tokens that two grants of one lock share, beyond the first."""
    fallen: int = 0
    """Grants whose token is not above that of every grant that was known before they were asked for."""
    overlaps: int = 0
    """Grants that begin while the client of another takes the lock for its own."""

    @property
    def tokens_hold(self) -> bool:
        return not (self.duplicates or self.fallen)

    def add(self, other: Judgement) -> None:
        self.grants += other.grants
        self.duplicates += other.duplicates
        self.fallen += other.fallen
        self.overlaps += other.overlaps


def read(paths: Iterable[Path]) -> list[Used]:
    """Read the grants; the last line of a process that is at work, or was killed, may be cut off."""
    lines = (line for path in paths for line in path.read_text().splitlines())
    return [Used(**json.loads(line)) for line in lines if line.endswith("}")]


def judge(grants: Sequence[Used]) -> Judgement:
    """Judge each lock by itself: tokens of different locks are not compared."""
    total = Judgement()
    by_lock: dict[str, list[Used]] = defaultdict(list)
    for grant in grants:
        by_lock[grant.lock].append(grant)
    for used in by_lock.values():
        total.add(Judgement(len(used), _duplicates(used), _fallen(used), _overlaps(used)))
    return total


def _duplicates(used: Sequence[Used]) -> int:
    return len(used) - len({grant.token for grant in used})


def _fallen(used: Sequence[Used]) -> int:
    fallen, highest = 0, -1
    known = sorted(used, key=attrgetter("known"))
    before = 0
    for grant in sorted(used, key=attrgetter("asked")):
        while before < len(known) and known[before].known < grant.asked:
            highest = max(highest, known[before].token)
            before += 1
        fallen += grant.token <= highest
    return fallen


def _overlaps(used: Sequence[Used]) -> int:
    overlaps, until = 0, -1.0
    for grant in sorted(used, key=attrgetter("known")):
        overlaps += grant.known < until
        until = max(until, grant.ended)
    return overlaps
