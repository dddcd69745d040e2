"""
The judge of recorded histories: facts in, a verdict on promises P1 to P8 out.

It shares no code with what it judges: it knows events and numbers, no lock, no lease, no guard. A recording that shows
too little is ``unknown``. ``docs/proof.md`` lists the kinds of lines and which rules need them.

P1, P2: the work, and every token that was read, lay within the store's grant. With a store that records its grants
the grant itself is the measure. Without one it is the next holder's acquisition: a holder that read its token or
renewed after it was too late. Each permit has a next holder of its own, and readers that share a token are not each
other's.
P3: no resource accepts a token below one that it has accepted, and none refuses the newest.
P4: per lock, a later grant has a higher token, and two grants never share one. Readers that hold together do.
P5, P7: which grants are released and by which holder, and which error leaves the ``async with``.
P6, P8: no lease is lost without a cause, and every waiter gets a turn once faults have ended.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, unique

from tests.simulation.history import (
    EXACT,
    Facts,
    Line,
    Maxima,
    RecordedAccess,
    RecordedCall,
    RecordedLease,
    StoreGrant,
    Trouble,
    gather,
)

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
    """Facts of a recording."""

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

    def verdict(self, *, least: int, require: Sequence[str] = PROMISES) -> Verdict:
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


def check(lines: Iterable[Line]) -> Report:
    """
    Judge the *lines* of a recording, in any order; a line ``run`` begins a run that is judged by itself.

    Raises:
        ValueError: a line lacks something that its kind always has.
    """
    report = Report()
    for facts in gather(lines):
        _count(facts, report)
        check_coverage(facts, report)
        check_tokens(facts, report)
        check_fences(facts, report)
        check_endings(facts, report)
        check_liveness(facts, report)
    report.violations.sort(key=lambda violation: violation.at)
    return report


def _count(facts: Facts, report: Report) -> None:
    report.saw("runs")
    report.saw("acquisitions", len(facts.leases))
    report.saw("losses", sum(lease.lost is not None for lease in facts.leases))
    report.saw("writes", sum(access.write for access in facts.accesses))
    report.saw("refusals", sum(not access.accepted for access in facts.accesses))
    report.saw("troubles", len(facts.troubles))
    for leases in facts.by_name.values():
        holders = [lease.holder for lease in leases]
        report.saw("hand-overs", sum(one != other for one, other in itertools.pairwise(holders)))


# P1 and P2


def check_coverage(facts: Facts, report: Report) -> None:
    """Judge every lease by the store's grants, or by its successor."""
    # The first of two: a request that the network has doubled may be granted to a reader again, with the same token.
    grants = {(grant.name, grant.holder, grant.token): grant for grant in reversed(facts.grants)}
    for at, old in facts.revived:
        report.found(
            "P1", "store_revived", at, f"the store extended {old.name} (token {old.token}), over since {old.end:.6f}"
        )
    for lease in facts.leases:
        if lease.revived is not None:
            text = f"{lease.actor} took a renewal of {lease.name} (token {lease.token}) after its deadline"
            report.found("P2", "revived", lease.revived, text)
        grant = grants.get((lease.name, lease.holder, lease.token))
        if grant is not None:
            _within(facts, report, lease, grant)
        elif not facts.grants:
            _before_successor(facts, report, lease)
        else:
            text = f"{lease.actor} holds {lease.name} with token {lease.token}, and the store never granted it"
            report.found("P1", "held_without_grant", lease.acquired, text)
    _one_at_a_time(facts, report)
    _no_more_than_there_are(facts, report)


def _within(facts: Facts, report: Report, lease: RecordedLease, grant: StoreGrant) -> None:
    if grant.excused:
        return
    report.saw("P2", len(lease.reads))
    late = [read for read in lease.reads if not grant.start - EXACT <= read <= grant.end + EXACT]
    if late:
        text = f"{lease.actor} read token {lease.token} of {lease.name}; the grant ended at {grant.end:.6f}"
        report.found("P2", "stale_read", late[0], text)
    ended = lease.body_ended
    if ended is not None and not facts.troubled(lease.actor, grant.start, ended):
        report.saw("P1")
        if ended > grant.end + EXACT:
            text = f"{lease.actor} worked under token {lease.token} of {lease.name} after {grant.end:.6f}"
            report.found("P1", "overrun", ended, text)


def _before_successor(facts: Facts, report: Report, lease: RecordedLease) -> None:
    taken = -facts.successors[lease.place].below(-lease.token)
    if taken == math.inf or facts.store_was_changed:
        return
    report.saw("P2", len(lease.reads))
    for read in lease.reads:
        if read > taken + EXACT:
            text = f"{lease.actor} read token {lease.token} of {lease.name}, held by another since {taken:.6f}"
            report.found("P2", "stale_read", read, text)
            break
    if facts.troubled(lease.actor, lease.acquired, lease.body_ended or taken):
        return
    report.saw("P1")
    work = [*lease.renewals, *([] if lease.body_ended is None else [lease.body_ended])]
    if any(moment > taken + EXACT for moment in work):
        text = f"{lease.actor} went on with token {lease.token} of {lease.name}, held by another since {taken:.6f}"
        report.found("P1", "overrun", max(work), text)


def _one_at_a_time(facts: Facts, report: Report) -> None:
    last: dict[str, StoreGrant] = {}
    for grant in sorted(facts.grants, key=lambda grant: grant.start):
        before = last.get(grant.place)
        together = before is not None and before.mode == grant.mode == "reader"
        if before is not None and not together and not before.excused and grant.start < before.end - EXACT:
            text = f"the store granted {grant.name} with token {grant.token} while {before.token} lasted"
            report.found("P1", "two_grants", grant.start, text)
        if before is None or grant.end >= before.end or before.excused:
            last[grant.place] = grant


def _no_more_than_there_are(facts: Facts, report: Report) -> None:
    """A permit's number is below the number of permits: with one holder for each number, that bounds them all."""
    for lease in facts.leases:
        if lease.permit is not None and lease.permits is not None and not 0 <= lease.permit < lease.permits:
            text = f"{lease.actor} got permit {lease.permit} of {lease.name}, which has {lease.permits}"
            report.found("P1", "too_many_permits", lease.acquired, text)


# P4


def check_tokens(facts: Facts, report: Report) -> None:
    """
    Compare tokens of grants that are ordered in time.

    Two acquisitions are ordered if one had its answer before the other began. The tokens of those that overlap only
    have to differ.
    """
    for name, leases in facts.by_name.items():
        _unlike(name, leases, report)
        _growing(name, leases, report)
    highest: dict[str, int] = {}
    for grant in sorted(facts.grants, key=lambda grant: grant.start):
        before = highest.get(grant.name)
        if before is not None and grant.token < before + (grant.mode != "reader"):
            text = f"the store granted {grant.name} with token {grant.token} after {before}"
            report.found("P4", "store_token_fell", grant.start, text)
        highest[grant.name] = max(grant.token, before or grant.token)


def _readers(one: RecordedLease, other: RecordedLease) -> bool:
    return one.mode == other.mode == "reader"


def _unlike(name: str, leases: list[RecordedLease], report: Report) -> None:
    seen: dict[int, RecordedLease] = {}
    for lease in leases:
        other = seen.setdefault(lease.token, lease)
        if other.holder != lease.holder and not _readers(lease, other):
            text = f"{other.actor} and {lease.actor} were both given token {lease.token} of {name}"
            report.found("P4", "shared_token", lease.acquired, text)


def _growing(name: str, leases: list[RecordedLease], report: Report) -> None:
    answered = sorted(leases, key=lambda lease: lease.acquired)
    best: RecordedLease | None = None
    passed = 0
    for lease in sorted(leases, key=lambda lease: lease.asked):
        while passed < len(answered) and answered[passed].acquired < lease.asked:
            if best is None or answered[passed].token > best.token:
                best = answered[passed]
            passed += 1
        if best is None:
            continue
        report.saw("P4")
        together = lease.token == best.token and _readers(lease, best)
        if lease.token <= best.token and lease.holder != best.holder and not together:
            text = f"{lease.actor} got token {lease.token} of {name} after {best.actor} had {best.token}"
            report.found("P4", "token_fell", lease.acquired, text)


# P3


def check_fences(facts: Facts, report: Report) -> None:
    """Judge every write, accepted or refused, of every resource."""
    by_resource: dict[str, list[RecordedAccess]] = defaultdict(list)
    for access in facts.accesses:
        by_resource[access.resource].append(access)
    for resource, accesses in by_resource.items():
        report.saw("P3", sum(access.write for access in accesses))
        _never_back(resource, [access for access in accesses if access.accepted], report)
        _raised_at_entry(facts, resource, accesses, report)
        _newest_admitted(facts, resource, accesses, report)
        _holders_admitted(facts, resource, accesses, report)


def _never_back(resource: str, accepted: list[RecordedAccess], report: Report) -> None:
    """Compare each write with the highest that had surely taken effect before it was sent."""
    place = {id(access): number for number, access in enumerate(accepted)}
    finished = sorted(accepted, key=lambda access: (access.high, place[id(access)]))
    best: RecordedAccess | None = None
    passed = 0
    for write in sorted(accepted, key=lambda access: (access.low, place[id(access)])):
        while passed < len(finished) and _before(finished[passed], write, place):
            if best is None or finished[passed].token >= best.token:
                best = finished[passed]
            passed += 1
        if best is None or not write.write:
            continue
        if write.token < best.token:
            text = f"{resource} accepted token {write.token} of {write.actor} after {best.token}"
            report.found("P3", "stale_write_accepted", write.high, text)
            return
        if write.token == best.token and None not in {write.holder, best.holder} and write.holder != best.holder:
            text = f"{resource} accepted token {write.token} from two holders"
            report.found("P3", "shared_token_accepted", write.high, text)
            return


def _before(one: RecordedAccess, other: RecordedAccess, place: dict[int, int]) -> bool:
    if one.high != other.low:
        return one.high < other.low
    return one.low == one.high and other.low == other.high and place[id(one)] < place[id(other)]


def _raised_at_entry(facts: Facts, resource: str, accesses: list[RecordedAccess], report: Report) -> None:
    """With ``fences`` the old holder is refused from the moment the new one enters, before its first write."""
    highest = Maxima((entered, token) for entered, token in facts.entries.get(resource, ()))
    for write in accesses:
        if not (write.accepted and write.write):
            continue
        entered = highest.below(write.low)
        if write.token < entered:
            text = f"{resource} accepted token {write.token} after a holder had entered with {entered:.0f}"
            report.found("P3", "fence_not_raised", write.high, text)
            return


def _newest_admitted(facts: Facts, resource: str, accesses: list[RecordedAccess], report: Report) -> None:
    """A refusal needs a reason: by then a higher token was granted, or the same token to another holder."""
    for write in accesses:
        if write.accepted or not write.write or not (alike := facts.given.get(write.token)):
            continue
        higher = facts.given_by.until(write.high) > write.token
        if not higher and not any(since <= write.high and holder != write.holder for holder, since in alike):
            text = f"{resource} refused token {write.token} of {write.actor}, the newest ever granted"
            report.found("P3", "newest_refused", write.high, text)
            return


def _holders_admitted(facts: Facts, resource: str, accesses: list[RecordedAccess], report: Report) -> None:
    """A permit or a reader that is held is not refused, whatever token those have who hold beside it."""
    if facts.store_was_changed:
        return
    for write in accesses:
        if write.accepted or not write.write:
            continue
        for lease in facts.shares.get(write.token, ()):
            alike = resource in {lease.name, lease.place} and (lease.mode == "reader" or lease.holder == write.holder)
            if alike and lease.acquired <= write.low and write.high <= min(lease.over, lease.deadline):
                text = f"{resource} refused token {write.token} of {write.actor}, which {lease.actor} held"
                report.found("P3", "holder_refused", write.high, text)
                return


# P5 and P7

_SLACK = 1.0
"""Seconds on top of what the request itself was late, after which an orphan has to be gone."""

_LOST = ("frozen", "stalled", "cut", "outage", "refused", "lost")
_SILENT = (*_LOST, "late")


def check_endings(facts: Facts, report: Report) -> None:
    """Judge releases, grants that no client came to hold, and errors."""
    calls: dict[tuple[str, str], list[RecordedCall]] = defaultdict(list)
    for call in facts.calls:
        calls[call.name, call.holder].append(call)
    held = {(lease.name, lease.holder, lease.token): lease for lease in facts.leases}
    for grant in facts.grants:
        asked = calls[grant.name, grant.holder]
        _by_its_owner(grant, report)
        _as_meant(grant, report)
        lease = held.get((grant.name, grant.holder, grant.token))
        late = lease is not None and lease.released is not None and grant.start > lease.released  # readers: same token
        if lease is not None and not late:
            _released(facts, grant, lease, report)
        elif asked:
            _given_up(facts, grant, asked, report)
    for lease in facts.leases:
        _no_renewal_after_release(lease, calls[lease.name, lease.holder], report)
        if lease.left:
            _right_error(lease, report)
    if facts.left_behind is not None:
        report.saw("P5")
        for name in facts.left_behind:
            report.found("P5", "left_behind", facts.end, f"{name} is still held after all clients have left")


def _by_its_owner(grant: StoreGrant, report: Report) -> None:
    if grant.why != "released" or grant.ended is None:
        return
    report.saw("P5")
    if grant.by != grant.holder:
        text = f"{grant.by} released {grant.name}, which {grant.holder} held with token {grant.token}"
        report.found("P5", "foreign_release", grant.ended, text)


def _as_meant(grant: StoreGrant, report: Report) -> None:
    """A successor is not hit by a revocation of the grant before it."""
    if grant.meant is None or grant.ended is None:
        return
    report.saw("P5")
    if grant.meant != grant.token:
        text = f"an operator revoked token {grant.meant} of {grant.name}, and {grant.holder} lost token {grant.token}"
        report.found("P5", "foreign_revocation", grant.ended, text)


def _released(facts: Facts, grant: StoreGrant, lease: RecordedLease, report: Report) -> None:
    """A released lock is free at once, not at its ttl."""
    released = lease.released
    if released is None or lease.kept or grant.excused:
        return
    if facts.troubled(lease.actor, released - _SLACK, released + _SLACK, _SILENT):
        return
    report.saw("P5")
    if grant.end > released + _SLACK:
        text = f"{lease.actor} released {grant.name} (token {grant.token}) at {released:.6f}; the store kept it"
        report.found("P5", "kept_after_release", grant.end, text)


def _given_up(facts: Facts, grant: StoreGrant, calls: list[RecordedCall], report: Report) -> None:
    """A grant that no client came to hold has to be released as soon as it was made, not at its ttl."""
    actor = calls[0].actor
    if grant.excused or any(call.repeated for call in calls):
        return  # the sender does not know of a doubled request: its ttl frees the lock
    gave_up = min((call.asked for call in calls if call.operation == "release"), default=math.inf)
    late = max(0.0, grant.start - gave_up)
    since = grant.start if gave_up == math.inf else max(grant.start, gave_up)
    bound = since + late + _SLACK
    lost = facts.troubled(actor, min(since, gave_up), bound, _LOST)
    if facts.end < bound or lost or facts.troubled(actor, since, bound, ("late",)):
        return
    report.saw("P5")
    if gave_up == math.inf:
        still = max(call.asked for call in calls)
        if still + _SLACK + calls[0].ttl < facts.end:
            text = f"{actor} was granted {grant.name} with token {grant.token}, and neither held nor released it"
            report.found("P5", "never_released", grant.start, text)
    elif grant.end > bound:
        text = f"{actor} gave {grant.name} up at {gave_up:.6f}; token {grant.token} was kept until {grant.end:.6f}"
        report.found("P5", "leaked_grant", grant.end, text)


def _no_renewal_after_release(lease: RecordedLease, calls: list[RecordedCall], report: Report) -> None:
    released = lease.released
    if released is None or lease.kept:
        return
    for call in calls:
        if call.operation == "renew" and call.asked > released:
            text = f"{lease.actor} renewed {lease.name} (token {lease.token}), released at {released:.6f}"
            report.found("P5", "renewed_after_release", call.asked, text)
            return


def _right_error(lease: RecordedLease, report: Report) -> None:
    ended = math.inf if lease.body_ended is None else lease.body_ended
    lost = lease.lost is not None  # reported at the end of the turn in which the body ended too late
    expected = {lease.how}
    if lease.how == "clean":
        expected = {"LeaseLostError"} if lost else {"None"}
    elif lease.how == "cancelled":
        expected = {"CancelledError"} if lease.outer else {"LeaseLostError"}
    if lease.outer:
        expected.add("CancelledError")  # it may come while the lock is released, and it wins
    report.saw("P7")
    if str(lease.error) not in expected:
        text = f"the body of {lease.actor} ended {lease.how}, and {lease.error} left (lost: {lease.reason or 'no'})"
        report.found("P7", "wrong_error", ended, text)
    elif lost and lease.how not in {"clean", "cancelled", "LeaseLostError"} and not lease.noted and not lease.outer:
        text = f"{lease.error} left the body of {lease.actor} without a note that the lease was lost too"
        report.found("P7", "loss_not_noted", ended, text)


# P6 and P8

_SILENCES = frozenset({"cut", "outage", "refused", "lost", "late", "hung"})
_AT_ONCE = 0.05
"""Seconds of an acquisition after which its ticket may have waited."""
_WAITER_LIFE = 5.0
"""Seconds for which a ticket that waits lives at most, also when it begins to hold: until its first renewal."""
RIDDEN = 0.3
"""
The part of a ttl for which the store may be silent without cost where a run does not record its rhythm: little
more than half of what default timing rides out, see `Rhythm.ridden`, as real clients have to connect again.
"""


def check_liveness(facts: Facts, report: Report) -> None:
    """Judge losses by their causes, and requests by how long they took after faults ended."""
    if facts.declared:
        for lease in facts.leases:
            _ridden_out(facts, lease, report)
    if facts.healed is not None:
        _waiters_served(facts, *facts.healed, report)


def _ridden_out(facts: Facts, lease: RecordedLease, report: Report) -> None:
    end = min(lease.over, facts.end)
    if any(t.what in _SILENCES and t.actor in {"", lease.actor} and t.start <= end and t.end >= lease.acquired
           for t in facts.troubles) or lease.renewals:  # fmt: skip
        report.saw("P6")
    if lease.lost is None or lease.reason in {"closed", "drained"}:
        return
    since = lease.lost - 1.1 * lease.ttl
    if lease.max_hold is not None and lease.lost - lease.acquired > 0.9 * lease.max_hold:
        return
    violent = ("frozen", "stalled", "forgot", "stepped", "revoked")
    if facts.troubled(lease.actor, since, lease.lost, violent):
        return
    mine = (call for call in facts.calls if (call.name, call.holder) == (lease.name, lease.holder))
    if any(call.repeated and call.operation == "release" for call in mine):
        return  # carried out twice by the network: the answer of the second, which found nothing, came first
    longest, allowed = _longest_silence(facts, lease, since)
    if longest <= allowed:
        what = f"{lease.actor} lost {lease.name} (token {lease.token}, {lease.reason})"
        text = (
            f"{what} after a silence of {longest:.3f} s; {allowed:.3f} s are ridden out with a ttl of {lease.ttl:g} s"
        )
        report.found("P6", "lost_without_cause", lease.lost, text)


def _longest_silence(facts: Facts, lease: RecordedLease, since: float) -> tuple[float, float]:
    """
    The stretch without a usable store that was the hardest to ride out, and how long it might have been.

    Shorter pauses than a renewal needs join what they part.
    """
    pause = RIDDEN * lease.ttl if facts.rhythm is None else facts.rhythm.between_attempts
    stretches: list[list[Trouble]] = []
    end = -math.inf
    for silence in sorted(_silences(facts, lease, since), key=lambda trouble: trouble.start):
        if silence.start > end + pause:
            stretches.append([])
        stretches[-1].append(silence)
        end = max(end, silence.end)
    found = [(_length(stretch), _ridden(facts, lease, stretch)) for stretch in stretches]
    return max(found, key=lambda pair: pair[0] - pair[1], default=(0.0, _ridden(facts, lease, [])))


def _silences(facts: Facts, lease: RecordedLease, since: float) -> Iterator[Trouble]:
    for trouble in facts.troubles:
        if trouble.what in _SILENCES and trouble.actor in {"", lease.actor} and trouble.end >= since:
            yield trouble


def _length(stretch: list[Trouble]) -> float:
    return max(trouble.end for trouble in stretch) - stretch[0].start


def _ridden(facts: Facts, lease: RecordedLease, stretch: list[Trouble]) -> float:
    if facts.rhythm is None:
        return RIDDEN * lease.ttl
    begins = min([trouble.start for trouble in stretch], default=math.inf)
    waited = lease.acquired - lease.asked > _AT_ONCE and not any(renewal < begins for renewal in lease.renewals)
    life = min(lease.ttl, _WAITER_LIFE) if waited else lease.ttl
    return facts.rhythm.ridden(life, refused=all(trouble.what == "refused" for trouble in stretch))


def _waiters_served(facts: Facts, healed: float, within: float, report: Report) -> None:
    for wait in facts.waits:
        if wait.start < healed or _gone(facts.troubles, wait.actor):
            continue
        end = facts.end if wait.end is None else wait.end
        waited = end - wait.start
        if wait.granted or waited > within:
            report.saw("P8")
        if waited > within:
            became = "was served" if wait.granted else "was not served"
            text = f"{wait.actor} {became} {waited:.3f} s after it asked for {wait.name}; {within:.3f} are allowed"
            report.found("P8", "waited_too_long", end, text)


def _gone(troubles: list[Trouble], actor: str) -> bool:
    """Return whether *actor* never came back."""
    return any(trouble.actor == actor and trouble.end == math.inf for trouble in troubles)
