"""P5 and P7: which grants are released and by which holder, and which error leaves the ``async with``."""

from __future__ import annotations

import math
from collections import defaultdict

from fencing_sdk.testing.history._facts import Facts, RecordedCall, RecordedLease, StoreGrant
from fencing_sdk.testing.history._verdict import Report

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
            _given_back(facts, grant, lease, report)
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


def _given_back(facts: Facts, grant: StoreGrant, lease: RecordedLease, report: Report) -> None:
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
    lost = lease.lost is not None  # told at the end of the turn in which the body ended too late
    expected = {lease.how}
    if lease.how == "clean":
        expected = {"LeaseLostError"} if lost else {"None"}
    elif lease.how == "cancelled":
        expected = {"CancelledError"} if lease.outer else {"LeaseLostError"}
    if lease.outer:
        expected.add("CancelledError")  # it may come while the lock is given back, and it wins
    report.saw("P7")
    if str(lease.error) not in expected:
        text = f"the body of {lease.actor} ended {lease.how}, and {lease.error} left (lost: {lease.reason or 'no'})"
        report.found("P7", "wrong_error", ended, text)
    elif lost and lease.how not in {"clean", "cancelled", "LeaseLostError"} and not lease.noted and not lease.outer:
        text = f"{lease.error} left the body of {lease.actor} without a note that the lease was lost too"
        report.found("P7", "loss_not_noted", ended, text)
