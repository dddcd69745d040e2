"""
What a recording tells: when each lock was held and by which client, freezes, and the outcome of writes.

Lines in, values out: nothing is drawn here. An event of an unknown kind is passed over.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fencing_sdk.cli._recording_lines import Line, incomplete, read_seconds, read_token
from fencing_sdk.errors import LossReason

_BY_THE_CLOCK = {LossReason.EXPIRED, LossReason.STALLED}


@dataclass(slots=True)
class DrawnLease:
    """One lease, as its holder and as the store saw it."""

    lane: str
    lock: str
    token: int
    start: float
    ttl: float
    deadline: float
    """When the holder stops by itself, unless it renews."""
    expires: float
    """When the store hands the lock on at the latest, unless it is renewed."""
    renewals: list[float] = field(default_factory=list)
    released: float | None = None
    lost: float | None = None
    reason: str = ""

    @property
    def ends(self) -> list[float]:
        """When the lease ended for its holder, other than by its deadline."""
        return [moment for moment in (self.released, self.lost) if moment is not None]

    @property
    def used_until(self) -> float:
        """When the holder's right to work ended."""
        return min([self.deadline, *self.ends])

    @property
    def known_to_store(self) -> bool:
        """Whether the store had ended the grant by then: it said so itself, or was told in time."""
        return self.lost is None or self.reason not in _BY_THE_CLOCK


@dataclass(slots=True)
class Span:
    """Something that lasted: a wait for a lock, or a freeze. ``end`` is None while it lasts."""

    lane: str
    start: float
    lock: str = ""
    end: float | None = None
    holder: str = ""
    """The acquisition that waits, where it was recorded."""

    @property
    def until(self) -> float:
        """When it ended, as far as it was recorded."""
        return self.start if self.end is None else self.end


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


@dataclass(slots=True)
class Story:
    """One run, to be drawn as one panel."""

    title: str = ""
    outcome: str = ""
    start: float = math.inf
    end: float = -math.inf
    lanes: list[str] = field(default_factory=list)
    locks: list[str] = field(default_factory=list)
    resources: list[str] = field(default_factory=list)
    leases: list[DrawnLease] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    freezes: list[Span] = field(default_factory=list)
    accesses: list[DrawnAccess] = field(default_factory=list)
    grants: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """The start and the token of each lease, by lock and in their order: a search in all leases is slow for many."""

    @property
    def duration(self) -> float:
        """Seconds from the first event to the last."""
        return max(0.0, self.end - self.start)

    def handed_on(self, lease: DrawnLease) -> float:
        """The moment the store's grant behind *lease* ended."""
        grants = self.grants[lease.lock]
        after = range(bisect_right(grants, (lease.start, math.inf)), len(grants))
        others = (grants[place][0] for place in after if grants[place][1] != lease.token)  # no fellow reader
        later = next(others, math.inf)
        ends: list[float] = [lease.expires, later, *(lease.ends if lease.known_to_store else [])]
        return min(ends)

    def safety_of(self, lease: DrawnLease) -> tuple[float, float] | None:
        """From the holder's own deadline to the moment the store hands on, where the lease came to that."""
        end = self.handed_on(lease)
        reached = lease.used_until >= lease.deadline and (lease.lost is not None or lease.released is None)
        return (lease.deadline, end) if reached and end > lease.deadline else None


def tell(lines: Iterable[Line]) -> list[Story]:
    """
    Make a story of every run in a recording. A line of the kind ``run`` begins one.

    Raises:
        ConfigurationError: an event lacks a number that its kind always has.
    """
    tellers = [_StoryTeller()]
    for line in lines:
        if line["kind"] == "run":
            tellers.append(_StoryTeller())
        tellers[-1].add(line)
    return [teller.finish() for teller in tellers if teller.told]


class _StoryTeller:
    """Puts one story together, event by event."""

    def __init__(self) -> None:
        self._story = Story()
        self._leases: dict[tuple[str, str, int], DrawnLease] = {}
        self._written: dict[str, int] = {}  # the highest token of an accepted write, by resource
        self._open_waits: dict[tuple[str, str, str], deque[Span]] = {}
        self._frozen: dict[str, list[Span]] = {}
        self._noted: set[tuple[int, str]] = set()
        self._held: set[str] = set()
        self.told = False

    def add(self, line: Line) -> None:
        step: Callable[[Line, str], None] | None = getattr(self, f"_on_{line['kind']}", None)
        if step is None:
            return
        try:
            step(line, str(line.get("lane", line.get("actor", "?"))))
        except (KeyError, ValueError) as error:
            raise incomplete(line, error) from error

    def finish(self) -> Story:
        story = self._story
        for span in (*story.waits, *story.freezes):
            span.end = story.end if span.end is None else span.end
        for lease in sorted(story.leases, key=lambda lease: lease.start):
            story.grants.setdefault(lease.lock, []).append((lease.start, lease.token))
            if lease.released is None and lease.lost is None:
                lease.deadline = min(lease.deadline, story.end)
                lease.expires = min(lease.expires, story.end)
        story.end = max([story.end, *(story.handed_on(lease) for lease in story.leases)])
        return story

    def _at(self, line: Line, lane: str) -> float:
        """Note that *line* takes place, on *lane*; return when."""
        at = read_seconds(line, "t")
        self.told = True
        self._story.start = min(self._story.start, at)
        self._story.end = max(self._story.end, at)
        self._note(self._story.lanes, lane)
        return at

    def _on_run(self, line: Line, _lane: str) -> None:
        self._story.title = str(line.get("title", ""))

    def _on_outcome(self, line: Line, _lane: str) -> None:
        self._story.outcome = str(line.get("text", ""))

    def _on_acquiring(self, line: Line, lane: str) -> None:
        lock = str(line["name"])
        self._note(self._story.locks, lock)
        wait = Span(lane, self._at(line, lane), lock, holder=str(line.get("holder", "")))
        self._story.waits.append(wait)
        self._open_waits.setdefault((lane, lock, wait.holder), deque()).append(wait)

    def _on_not_acquired(self, line: Line, lane: str) -> None:
        self._end_wait(line, lane, self._at(line, lane))

    def _on_acquired(self, line: Line, lane: str) -> None:
        at, name = self._at(line, lane), str(line["name"])
        token, ttl = read_token(line, "token"), read_seconds(line, "ttl")
        lock = self._lane_of(name, line.get("permit"))
        self._end_wait(line, lane, at)
        lease = DrawnLease(lane, lock, token, at, ttl, deadline=read_seconds(line, "deadline"), expires=at + ttl)
        self._story.leases.append(lease)
        self._held.add(lock)
        self._leases[lane, name, token] = lease

    def _lane_of(self, name: str, permit: object) -> str:
        """The lane of a grant: each permit has one of its own, in the place of the one of their name."""
        if not isinstance(permit, int):
            self._note(self._story.locks, name)
            return name
        lane, lanes = f"{name} #{permit}", self._story.locks
        if (id(lanes), name) in self._noted and name not in self._held:
            self._noted.remove((id(lanes), name))
            lanes.remove(name)
        self._note(lanes, lane)
        return lane

    def _on_renewed(self, line: Line, lane: str) -> None:
        at, lease = self._at(line, lane), self._lease(line, lane)
        if lease is not None:
            lease.renewals.append(at)
            lease.deadline = read_seconds(line, "deadline")
            lease.expires = at + lease.ttl

    def _on_lost(self, line: Line, lane: str) -> None:
        at, lease = self._at(line, lane), self._lease(line, lane)
        if lease is not None:
            lease.lost, lease.reason = at, str(line.get("reason", ""))

    def _on_released(self, line: Line, lane: str) -> None:
        at, lease = self._at(line, lane), self._lease(line, lane)
        if lease is not None:
            lease.released = at

    def _on_frozen(self, line: Line, lane: str) -> None:
        freeze = Span(lane, self._at(line, lane))
        self._story.freezes.append(freeze)
        self._frozen.setdefault(lane, []).append(freeze)

    def _on_resumed(self, line: Line, lane: str) -> None:
        at = self._at(line, lane)
        for freeze in self._frozen.pop(lane, ()):
            freeze.end = at

    def _on_fence_raised(self, line: Line, lane: str) -> None:
        self._access(line, lane, "fence")

    def _on_read(self, line: Line, lane: str) -> None:
        self._access(line, lane, "read")

    def _on_write_accepted(self, line: Line, lane: str) -> None:
        token, resource = read_token(line, "token"), str(line["resource"])
        highest = self._written.get(resource, token)
        self._written[resource] = max(highest, token)
        stale = token < highest
        self._access(line, lane, "accepted", stale=stale, fence=highest if stale else None)

    def _on_write_refused(self, line: Line, lane: str) -> None:
        self._access(line, lane, "refused", fence=read_token(line, "fence"))

    def _on_stale_rejected(self, line: Line, lane: str) -> None:
        self._access(line, lane, "refused", fence=read_token(line, "fence"))

    def _access(self, line: Line, lane: str, kind: str, *, stale: bool = False, fence: int | None = None) -> None:
        resource, token = str(line["resource"]), read_token(line, "token")
        self._note(self._story.resources, resource)
        access = DrawnAccess(kind, lane, resource, self._at(line, lane), token, fence, str(line.get("text", "")), stale)
        self._story.accesses.append(access)

    def _lease(self, line: Line, lane: str) -> DrawnLease | None:
        """The lease *line* is about; None when the recording began after its grant."""
        return self._leases.get((lane, str(line["name"]), read_token(line, "token")))

    def _end_wait(self, line: Line, lane: str, at: float) -> None:
        key = lane, str(line["name"]), str(line.get("holder", ""))
        if waits := self._open_waits.get(key):
            waits.popleft().end = at
            if not waits:
                del self._open_waits[key]

    def _note(self, names: list[str], name: str) -> None:
        if (id(names), name) not in self._noted:
            self._noted.add((id(names), name))
            names.append(name)
