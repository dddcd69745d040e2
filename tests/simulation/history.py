"""
Recorded JSON lines in, facts out: leases, grants of the store, writes, and faults.

Lines come from the simulation, from processes under fire, or from ``FENCING_RECORD``. A line that lacks what its kind
always has is an error; one of an unknown kind is passed over. Nothing is judged here, and nothing of the engine, the
backends or the guards is imported: a mistake there must not be repeated here.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

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
    """``clean``, ``cancelled``, or the class of the error that ended the body."""
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
    ended: float | None = None
    why: str = ""
    by: str = ""
    meant: int | None = None
    """The token of the grant that an operator wanted to end."""
    mode: str = "lock"
    permit: int | None = None
    drawn: float = math.inf
    """When its ticket was first asked for."""
    excused: bool = False
    """
    The store itself broke an assumption while it lasted: it forgot, was stepped, or revoked it. A clock that is stepped
    forward while the ticket waits takes from the life on which its holder counts, so that counts too.
    """

    @property
    def place(self) -> str:
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


@dataclass(slots=True)
class RecordedCall:
    """A request to the store as its sender saw it."""

    operation: str
    name: str
    holder: str
    actor: str
    ttl: float
    asked: float
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

    @cached_property
    def by_name(self) -> dict[str, list[RecordedLease]]:
        """The leases of each lock, in order of appearance. Complete once the last line was read."""
        found: dict[str, list[RecordedLease]] = {}
        for lease in self.leases:
            found.setdefault(lease.name, []).append(lease)
        return found

    @cached_property
    def successors(self) -> dict[str, Maxima]:
        """For each place, the first acquisition with a token higher than a given one."""
        found: dict[str, list[tuple[float, float]]] = {}
        for lease in self.leases:
            found.setdefault(lease.place, []).append((-lease.token, -lease.acquired))
        return {place: Maxima(pairs) for place, pairs in found.items()}

    @cached_property
    def entries(self) -> dict[str, list[tuple[float, float]]]:
        """For each resource, the entries of leases that raise its fence, with their tokens."""
        found: dict[str, list[tuple[float, float]]] = {}
        for lease in self.leases:
            for resource in lease.fences if lease.entered is not None else ():
                found.setdefault(resource, []).append((lease.entered or 0.0, lease.token))
        return found

    @cached_property
    def given(self) -> dict[int, list[tuple[str, float]]]:
        """For each token, its holders and the earliest moment of each grant."""
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
        """For each token, the permits, readers and writers that had it."""
        found: dict[int, list[RecordedLease]] = {}
        for lease in self.leases:
            if lease.mode != "lock":
                found.setdefault(lease.token, []).append(lease)
        return found


class Maxima:
    """Finds the highest second number of all pairs whose first number is below a limit, by bisection."""

    def __init__(self, pairs: Iterable[tuple[float, float]]) -> None:
        ordered = sorted(pairs)
        self._firsts = [first for first, _ in ordered]
        self._highest = list(itertools.accumulate((second for _, second in ordered), max))

    def below(self, limit: float) -> float:
        return self._upto(bisect_left(self._firsts, limit))

    def until(self, limit: float) -> float:
        return self._upto(bisect_right(self._firsts, limit))

    def _upto(self, count: int) -> float:
        return self._highest[count - 1] if count else -math.inf


def _place(name: str, permit: int | None) -> str:
    return name if permit is None else f"{name}/{permit}"


def gather(lines: Iterable[Line]) -> list[Facts]:
    """
    Put the lines of a recording together, one `Facts` for each run in it. A line ``run`` begins one.

    Raises:
        ValueError: a line lacks something that its kind always has.
    """
    gatherers = [_Gatherer()]
    for line in sorted(lines, key=lambda line: float(line["t"])):
        if line["kind"] == "run" and gatherers[-1].begun:
            gatherers.append(_Gatherer())
        gatherers[-1].add(line)
    return [gatherer.finish() for gatherer in gatherers if gatherer.begun]


class PendingAcquisition(NamedTuple):
    """An acquisition that has not ended."""

    start: float
    first: float
    """When its caller began, where earlier grants to the same caller came too late."""


class _Gatherer:
    def __init__(self) -> None:
        self.facts = Facts()
        self.begun = False
        self._leases: dict[tuple[str, str, int], RecordedLease] = {}
        self._by_holder: dict[tuple[str, str], RecordedLease] = {}
        self._by_token: dict[tuple[str, int], RecordedLease] = {}
        self._grants: dict[tuple[str, str], StoreGrant] = {}
        self._calls: dict[str, RecordedCall] = {}
        self._drawn: dict[tuple[str, str], float] = {}
        self._frozen: dict[str, float] = {}
        self._pending: dict[tuple[str, str, str], PendingAcquisition] = {}
        self._going_on: dict[tuple[str, str], float] = {}  # since when, of those whose grant came too late

    def add(self, line: Line) -> None:
        step = _STEPS.get(str(line["kind"]))
        if step is None:
            return
        try:
            at = float(line["t"])
            if not self.begun:
                self.begun = True
                self.facts.start = at
            self.facts.end = at  # they come in order
            actor = str(line.get("lane", line.get("actor", "?")))
            step(self, line, at, actor)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            msg = f"a recorded event of kind {line['kind']!r} at {line['t']} is incomplete: {error!r}"
            raise ValueError(msg) from error

    def finish(self) -> Facts:
        facts = self.facts
        facts.troubles += [Trouble("frozen", since, math.inf, actor) for actor, since in self._frozen.items()]
        facts.waits += [
            RecordedWait(actor, name, pending.first, None, granted=False)
            for (actor, name, _), pending in self._pending.items()
        ]
        broken = [trouble for trouble in facts.troubles if trouble.what in {"forgot", "stepped"}]
        for grant in facts.grants:
            for trouble in broken:
                since = min(grant.drawn, grant.start) if trouble.what == "stepped" else grant.start
                grant.excused |= since <= trouble.end and trouble.start <= grant.end
        return facts

    # What the SDK records by itself.

    def _on_run(self, line: Line, _at: float, _actor: str) -> None:
        self.facts.declared = bool(line.get("declared", False))
        if "heartbeat_interval" in line:
            buffer, interval = float(line["safety_buffer"]), float(line["heartbeat_interval"])
            self.facts.rhythm = Rhythm(buffer, interval, float(line["drift"]))

    def _on_acquiring(self, line: Line, at: float, actor: str) -> None:
        name, holder = str(line["name"]), str(line.get("holder", ""))
        self._pending[actor, name, holder] = PendingAcquisition(at, self._going_on.pop((actor, name), at))

    def _on_not_acquired(self, line: Line, at: float, actor: str) -> None:
        name, holder = str(line["name"]), str(line.get("holder", ""))
        if line.get("reason") == "too_late":  # the caller goes on with another holder id
            pending = self._pending.pop((actor, name, holder), PendingAcquisition(at, at))
            self._going_on[actor, name] = pending.first
        else:
            self._answer((actor, name, holder), at - float(line.get("waited", 0.0)), at, granted=False)

    def _on_acquired(self, line: Line, at: float, actor: str) -> None:
        name, token, holder = str(line["name"]), int(line["token"]), str(line.get("holder") or "")
        asked = self._answer((actor, name, holder), at - float(line.get("waited", 0.0)), at, granted=True)
        holder = holder or f"{actor} {token}"
        deadline, ttl = float(line["deadline"]), float(line["ttl"])
        max_hold = line.get("max_hold")
        lease = RecordedLease(actor, name, token, holder, asked, at, ttl, deadline)
        lease.max_hold = None if max_hold is None else float(max_hold)
        lease.mode, lease.permit, lease.permits = _mode(line), _number(line, "permit"), _number(line, "permits")
        self.facts.leases.append(lease)
        self._leases[actor, name, token] = self._by_holder[name, holder] = self._by_token[actor, token] = lease

    def _on_renewed(self, line: Line, at: float, actor: str) -> None:
        if (lease := self._lease(line, actor)) is not None:
            if at > lease.deadline:
                lease.revived = at
            lease.deadline = float(line["deadline"])
            lease.renewals.append(at)

    def _on_lost(self, line: Line, at: float, actor: str) -> None:
        if (lease := self._lease(line, actor)) is not None:
            lease.lost, lease.reason = at, str(line.get("reason", ""))

    def _on_released(self, line: Line, at: float, actor: str) -> None:
        if (lease := self._lease(line, actor)) is not None:
            lease.released, lease.kept = at, bool(line.get("kept_for"))

    def _on_fence_raised(self, line: Line, at: float, actor: str) -> None:
        lease = self._lease(line, actor)
        if lease is not None and lease.mode == "reader":  # to a guard all readers of one token are one holder
            line = {**line, "holder": None}
        self.facts.accesses.append(_access(line, at, actor, accepted=True, write=False))

    # What workers, resources and harnesses record.

    def _on_entered(self, line: Line, at: float, actor: str) -> None:
        if (lease := self._lease(line, actor)) is not None:
            lease.entered, lease.fences = at, tuple(map(str, line.get("fences", ())))

    def _on_read(self, line: Line, at: float, actor: str) -> None:
        key = str(line.get("name", line.get("resource"))), str(line.get("holder", ""))
        lease = self._by_holder.get(key)
        if lease is None:
            lease = self._by_token.get((actor, int(line["token"])))
        if lease is not None:
            lease.reads.append(at)

    def _on_body_ended(self, line: Line, at: float, actor: str) -> None:
        if (lease := self._lease(line, actor)) is not None:
            lease.body_ended, lease.how = at, str(line["how"])

    def _on_left(self, line: Line, _at: float, actor: str) -> None:
        if (lease := self._lease(line, actor)) is not None:
            error = line.get("error")
            lease.left, lease.error = True, None if error is None else str(error)
            lease.noted, lease.outer = bool(line.get("noted", False)), bool(line.get("outer", False))

    def _on_write_accepted(self, line: Line, at: float, actor: str) -> None:
        self.facts.accesses.append(_access(line, at, actor, accepted=True))

    def _on_write_refused(self, line: Line, at: float, actor: str) -> None:
        self.facts.accesses.append(_access(line, at, actor, accepted=False))

    # What a store that can be looked into records.

    def _on_granted(self, line: Line, at: float, _actor: str) -> None:
        name, holder = str(line["name"]), str(line["holder"])
        since = min(at, float(line.get("since", at)))
        grant = StoreGrant(name, int(line["token"]), holder, since, float(line["until"]))
        grant.mode, grant.permit = _mode(line), _number(line, "permit")
        grant.drawn = self._drawn.get((name, holder), since)
        self.facts.grants.append(grant)
        self._grants[name, holder] = grant

    def _on_extended(self, line: Line, at: float, _actor: str) -> None:
        if (grant := self._grants.get((str(line["name"]), str(line["holder"])))) is not None:
            if at > grant.end and not any(trouble.what == "stepped" for trouble in self.facts.troubles):
                self.facts.revived.append((at, grant))
            grant.until = float(line["until"])

    def _on_ended(self, line: Line, at: float, _actor: str) -> None:
        grant = self._grants.get((str(line["name"]), str(line["holder"])))
        if grant is not None and grant.ended is None:
            grant.ended, grant.why, grant.by = at, str(line["why"]), str(line.get("by", ""))
            grant.meant = _number(line, "meant")
            grant.excused |= grant.why in {"revoked", "forgotten"}

    def _on_asked(self, line: Line, at: float, actor: str) -> None:
        name, holder = str(line["name"]), str(line["holder"])
        call = RecordedCall(str(line["operation"]), name, holder, actor, float(line["ttl"]), at)
        self.facts.calls.append(call)
        self._calls[str(line["call"])] = call
        if call.operation == "acquire":
            self._drawn.setdefault((name, holder), at)

    def _on_repeated(self, line: Line, _at: float, _actor: str) -> None:
        if (call := self._calls.get(str(line["call"]))) is not None:
            call.repeated = True

    # What was done to the run.

    def _on_frozen(self, _line: Line, at: float, actor: str) -> None:
        self._frozen.setdefault(actor, at)

    def _on_resumed(self, _line: Line, at: float, actor: str) -> None:
        if (since := self._frozen.pop(actor, None)) is not None:
            self.facts.troubles.append(Trouble("frozen", since, at, actor))

    def _on_trouble(self, line: Line, at: float, _actor: str) -> None:
        until = line.get("until")
        end = at if until is None else float(until)
        start = float(line.get("since", at))
        self.facts.troubles.append(Trouble(str(line["what"]), start, end, str(line.get("who", ""))))

    def _on_healed(self, line: Line, at: float, _actor: str) -> None:
        self.facts.healed = (at, float(line["within"]))

    def _on_end(self, line: Line, _at: float, _actor: str) -> None:
        self.facts.left_behind = [str(name) for name in line["held"]]

    def _lease(self, line: Line, actor: str) -> RecordedLease | None:
        """The lease *line* is about; None when the recording began after its grant."""
        name, token = str(line["name"]), int(line["token"])
        lease = self._by_holder.get((name, str(line.get("holder", ""))))  # readers of one actor may share a token
        if lease is not None and (lease.actor, lease.token) == (actor, token):
            return lease
        return self._leases.get((actor, name, token))

    def _answer(self, key: tuple[str, str, str], since: float, at: float, *, granted: bool) -> float:
        """Note that an acquisition ended; return when it began, which is *since* where that was not recorded."""
        pending = self._pending.pop(key, PendingAcquisition(since, since))
        self.facts.waits.append(RecordedWait(key[0], key[1], pending.first, at, granted))
        return pending.start


def _access(line: Line, at: float, actor: str, *, accepted: bool, write: bool = True) -> RecordedAccess:
    holder, fence = line.get("holder"), line.get("fence")
    return RecordedAccess(
        resource=str(line["resource"]),
        token=int(line["token"]),
        holder=None if holder is None else str(holder),
        low=min(at, float(line.get("sent", at))),
        high=at,
        actor=actor,
        accepted=accepted,
        fence=None if fence is None else int(line["fence"]),
        write=write,
    )


def _mode(line: Line) -> str:
    return str(line.get("mode") or "lock")


def _number(line: Line, field: str) -> int | None:
    number = line.get(field)
    return None if number is None else int(number)


_STEPS: dict[str, Callable[[_Gatherer, Line, float, str], None]] = {
    name.removeprefix("_on_"): step for name, step in vars(_Gatherer).items() if name.startswith("_on_")
}
"""Kind of a line -> the step that reads it."""
