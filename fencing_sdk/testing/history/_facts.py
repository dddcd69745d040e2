"""
What a recording says, put together: leases, the store's grants, writes, disturbances.

``fencing check`` judges these facts, and ``fencing timeline`` draws them. Nothing is judged here, and nothing of
the engine, the backends or the guards is imported: a mistake there must not be repeated here.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

EXACT = 1e-6
"""Seconds by which two readings of one axis may differ through rounding."""

Line = Mapping[str, Any]
"""One event: at least ``t`` in seconds, ``kind``, and ``actor``."""


@dataclass(slots=True)
class RecordedLease:
    """One lease as its holder saw it. Times are seconds on the axis of the recording."""

    actor: str
    name: str
    token: int
    holder: str
    asked: float
    acquired: float
    ttl: float
    deadline: float
    mode: str = "lock"
    permit: int | None = None
    permits: int | None = None
    released: float | None = None
    kept: bool = False
    """True if the client asked the store to keep the lock for a while, instead of releasing it."""
    lost: float | None = None
    reason: str = ""
    entered: float | None = None
    fences: tuple[str, ...] = ()
    max_hold: float | None = None
    body_ended: float | None = None
    how: str = ""
    """What ended the body: ``clean``, ``cancelled``, or the class of its error."""
    left: bool = False
    error: str | None = None
    """The class of what left the ``async with``."""
    noted: bool = False
    outer: bool = False
    """True if the task was cancelled from outside meanwhile."""
    reads: list[float] = field(default_factory=list)
    renewals: list[float] = field(default_factory=list)
    revived: float | None = None
    """When a renewal counted although the deadline had passed."""

    @property
    def place(self) -> str:
        """What it holds, and readers with it: the name, or one permit of it."""
        return _place(self.name, self.permit)

    @property
    def over(self) -> float:
        """When the holder knew that it was over, at the latest; infinity while it did not."""
        return min(math.inf if end is None else end for end in (self.released, self.lost))


@dataclass(slots=True)
class StoreGrant:
    """One grant as the store saw it."""

    name: str
    token: int
    holder: str
    start: float
    until: float
    """When it expires unless it is extended."""
    ended: float | None = None
    why: str = ""
    by: str = ""
    meant: int | None = None
    """The token of the grant that an operator wanted to end."""
    mode: str = "lock"
    permit: int | None = None
    excused: bool = False
    """The store itself broke an assumption while it lasted: it forgot, was stepped, or revoked it."""

    @property
    def place(self) -> str:
        """What it is a grant of: the name, or one permit of it."""
        return _place(self.name, self.permit)

    @property
    def end(self) -> float:
        """When the store could hand the lock on."""
        return self.until if self.ended is None else min(self.until, self.ended)


@dataclass(frozen=True, slots=True)
class RecordedAccess:
    """A write, or a fence being raised. It took effect between ``low`` and ``high``."""

    resource: str
    token: int
    holder: str | None
    low: float
    high: float
    actor: str
    accepted: bool
    fence: int | None = None
    write: bool = True
    text: str = ""
    """What its worker wrote down about it."""


@dataclass(slots=True)
class RecordedCall:
    """A request to the store as its sender saw it. ``answered`` is infinite without an answer."""

    number: str
    operation: str
    name: str
    holder: str
    actor: str
    ttl: float
    asked: float
    answered: float = math.inf
    outcome: str = ""
    token: int | None = None
    mode: str = "lock"
    repeated: bool = False
    """The network delivered it more than once."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A fault that was injected into a run. An empty actor means that it met all clients."""

    what: str
    start: float
    end: float
    actor: str = ""


@dataclass(frozen=True, slots=True)
class RecordedWait:
    """A caller's wait for a lock. ``end`` is None while the caller has neither got the lock nor given up."""

    actor: str
    name: str
    start: float
    end: float | None
    granted: bool


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How the locks of a run are renewed: what promise P6 is measured by. Seconds, and ``drift`` a fraction."""

    safety_buffer: float
    heartbeat_interval: float
    drift: float

    def ridden(self, ttl: float, *, refused: bool) -> float:
        """
        The longest silence of the store that costs nothing.

        One interval may have passed when it begins. Close to the deadline an attempt that was refused
        at once is followed by the next within a thirty-second of an interval, and an attempt whose
        request was swallowed is waited for besides, for a quarter. The rest is left for the way there and back.
        """
        intervals = 1.1 if refused else 1.35
        own = ttl * (1 - self.drift) - self.safety_buffer - intervals * self.heartbeat_interval
        return own * (1 - self.drift)  # on a clock that is fast by all of the drift

    @property
    def between_attempts(self) -> float:
        """A gap between silences that is too short for a renewal to be sure to fall into it."""
        return 1.4 * self.heartbeat_interval


@dataclass
class Facts:
    """Everything that one run has recorded."""

    title: str = ""
    outcome: str = ""
    declared: bool = False
    """True if everything that was done to the run from outside is in the recording."""
    rhythm: Rhythm | None = None
    start: float = math.inf
    end: float = -math.inf
    leases: list[RecordedLease] = field(default_factory=list)
    grants: list[StoreGrant] = field(default_factory=list)
    accesses: list[RecordedAccess] = field(default_factory=list)
    calls: list[RecordedCall] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    waits: list[RecordedWait] = field(default_factory=list)
    revived: list[tuple[float, StoreGrant]] = field(default_factory=list)
    """Grants that the store extended when they were over already, and when."""
    healed: tuple[float, float] | None = None
    """When faults ended, and the seconds within which every waiter gets a turn from then on."""
    actors: dict[str, None] = field(default_factory=dict)
    """Who did something, in order of appearance."""
    first: float = math.inf
    last: float = -math.inf
    """When an actor did something for the first time, and for the last time."""
    asides: list[RecordedAccess] = field(default_factory=list)
    """What no promise is measured by: reads, and writes that a guard refused in the process of its caller."""
    left_behind: list[str] | None = None
    """Names still held after all clients had left; None when that was not recorded."""

    def troubled(self, actor: str, start: float, end: float, kinds: Iterable[str] = ("frozen", "stalled")) -> bool:
        """Return whether *actor* was disturbed between *start* and *end*."""
        return any(
            trouble.what in kinds and trouble.start <= end + EXACT and trouble.end >= start - EXACT
            for trouble in (*self.troubles_of.get("", ()), *(self.troubles_of.get(actor, ()) if actor else ()))
        )

    @cached_property
    def troubles_of(self) -> dict[str, list[Trouble]]:
        """The faults by the actor that they met."""
        found: dict[str, list[Trouble]] = {}
        for trouble in self.troubles:
            found.setdefault(trouble.actor, []).append(trouble)
        return found

    @cached_property
    def store_was_changed(self) -> bool:
        """True if the store itself forgot, was stepped, or revoked a grant: then later grants prove less."""
        return any(trouble.what in {"forgot", "stepped", "revoked"} for trouble in self.troubles)

    def of(self, name: str) -> list[RecordedLease]:
        """The leases of one lock, as they were acquired."""
        return self.by_name.get(name, [])

    @cached_property
    def by_name(self) -> dict[str, list[RecordedLease]]:
        """The leases of every lock, in order of appearance. Asked for when the last line was read."""
        found: dict[str, list[RecordedLease]] = {}
        for lease in self.leases:
            found.setdefault(lease.name, []).append(lease)
        return found

    @cached_property
    def successors(self) -> dict[str, Maxima]:
        """By place: when a lease with a higher token was acquired first."""
        found: dict[str, list[tuple[float, float]]] = {}
        for lease in self.leases:
            found.setdefault(lease.place, []).append((-lease.token, -lease.acquired))
        return {place: Maxima(pairs) for place, pairs in found.items()}

    @cached_property
    def entries(self) -> dict[str, list[tuple[float, float]]]:
        """By resource: when a lease was entered that raises its fence, and its token."""
        found: dict[str, list[tuple[float, float]]] = {}
        for lease in self.leases:
            for resource in lease.fences if lease.entered is not None else ():
                found.setdefault(resource, []).append((lease.entered or 0.0, lease.token))
        return found

    @cached_property
    def given(self) -> dict[int, list[tuple[str, float]]]:
        """By token: who got it, and when at the earliest."""
        found: dict[int, list[tuple[str, float]]] = {}
        for lease in self.leases:
            found.setdefault(lease.token, []).append((lease.holder, lease.asked))
        for grant in self.grants:
            found.setdefault(grant.token, []).append((grant.holder, grant.start))
        return found

    @cached_property
    def given_by(self) -> Maxima:
        """When each token was granted at the earliest."""
        return Maxima((since, token) for token, holders in self.given.items() for _, since in holders)

    @cached_property
    def shares(self) -> dict[int, list[RecordedLease]]:
        """By token: the permits, readers and writers that had it."""
        found: dict[int, list[RecordedLease]] = {}
        for lease in self.leases:
            if lease.mode != "lock":
                found.setdefault(lease.token, []).append(lease)
        return found

    @property
    def names(self) -> list[str]:
        """Every lock that was held, in order of appearance."""
        return list(self.by_name)


class Maxima:
    """The highest second number of all pairs whose first number is below a limit: a search, and no walk."""

    def __init__(self, pairs: Iterable[tuple[float, float]]) -> None:
        ordered = sorted(pairs)
        self._firsts = [first for first, _ in ordered]
        self._highest = list(itertools.accumulate((second for _, second in ordered), max))

    def below(self, limit: float) -> float:
        """Of the pairs below *limit*; minus infinity if there is none."""
        return self._upto(bisect_left(self._firsts, limit))

    def until(self, limit: float) -> float:
        """Of the pairs up to and with *limit*; minus infinity if there is none."""
        return self._upto(bisect_right(self._firsts, limit))

    def _upto(self, count: int) -> float:
        return self._highest[count - 1] if count else -math.inf


def _place(name: str, permit: int | None) -> str:
    return name if permit is None else f"{name}/{permit}"
