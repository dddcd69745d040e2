"""
P5 to P8: how grants, leases and waits end.

P5 and P7: which grants are released and by which holder, and which error leaves the ``async with``.
P6 and P8: no lease is lost without a cause, and every waiter gets a turn once faults have ended.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from fencing_sdk.testing.history._facts import (
    Facts,
    RecordedCall,
    RecordedLease,
    StoreGrant,
    Trouble,
)
from fencing_sdk.testing.history._verdict import Report

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
    """What was released is free at once, not at its ttl."""
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
    return facts.rhythm.ridden(lease.ttl, refused=all(trouble.what == "refused" for trouble in stretch))


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
