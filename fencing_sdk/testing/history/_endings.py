"""P5 and P7: what is given back, by whom, and what leaves the ``async with``."""

from __future__ import annotations

import math
from collections import defaultdict

from fencing_sdk.testing.history._facts import Call, Facts, StoreGrant, Tenure
from fencing_sdk.testing.history._verdict import Report

_SLACK = 1.0
"""Seconds on top of what the request itself was late, after which an orphan has to be gone."""

_LOST = ("frozen", "stalled", "cut", "outage", "refused", "lost")
_SILENT = (*_LOST, "late")


def check_endings(facts: Facts, report: Report) -> None:
    """Judge releases, grants that nobody came to hold, and errors."""
    calls: dict[tuple[str, str], list[Call]] = defaultdict(list)
    for call in facts.calls:
        calls[call.name, call.holder].append(call)
    held = {(tenure.name, tenure.holder, tenure.token): tenure for tenure in facts.tenures}
    for grant in facts.grants:
        asked = calls[grant.name, grant.holder]
        _by_its_owner(grant, report)
        tenure = held.get((grant.name, grant.holder, grant.token))
        if tenure is not None:
            _given_back(facts, grant, tenure, report)
        elif asked:
            _given_up(facts, grant, asked, report)
    for tenure in facts.tenures:
        _no_renewal_after_release(tenure, calls[tenure.name, tenure.holder], report)
        if tenure.left:
            _right_error(tenure, report)
    if facts.left_behind is not None:
        report.saw("P5")
        for name in facts.left_behind:
            report.found("P5", "left_behind", facts.end, f"{name} is still held when everybody has left")


def _by_its_owner(grant: StoreGrant, report: Report) -> None:
    if grant.why != "released" or grant.ended is None:
        return
    report.saw("P5")
    if grant.by != grant.holder:
        text = f"{grant.by} released {grant.name}, which {grant.holder} held with token {grant.token}"
        report.found("P5", "foreign_release", grant.ended, text)


def _given_back(facts: Facts, grant: StoreGrant, tenure: Tenure, report: Report) -> None:
    """What was released is free at once, not at its ttl."""
    released = tenure.released
    if released is None or grant.excused or facts.troubled(tenure.actor, released - _SLACK, released + _SLACK, _SILENT):
        return
    report.saw("P5")
    if grant.end > released + _SLACK:
        text = f"{tenure.actor} released {grant.name} (token {grant.token}) at {released:.6f}; the store kept it"
        report.found("P5", "kept_after_release", grant.end, text)


def _given_up(facts: Facts, grant: StoreGrant, calls: list[Call], report: Report) -> None:
    """A grant that nobody came to hold: it has to be given back as soon as it was made, not at its ttl."""
    actor = calls[0].actor
    if grant.excused or any(call.repeated for call in calls):
        return  # a request that the network doubled is nobody's any more: its ttl frees the lock
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


def _no_renewal_after_release(tenure: Tenure, calls: list[Call], report: Report) -> None:
    released = tenure.released
    if released is None:
        return
    for call in calls:
        if call.operation == "renew" and call.asked > released:
            text = f"{tenure.actor} renewed {tenure.name} (token {tenure.token}), released at {released:.6f}"
            report.found("P5", "renewed_after_release", call.asked, text)
            return


def _right_error(tenure: Tenure, report: Report) -> None:
    ended = math.inf if tenure.body_ended is None else tenure.body_ended
    lost = tenure.lost is not None  # told at the end of the turn in which the body ended too late
    expected = {tenure.how}
    if tenure.how == "clean":
        expected = {"LeaseLostError"} if lost else {"None"}
    elif tenure.how == "cancelled":
        expected = {"CancelledError"} if tenure.outer else {"LeaseLostError"}
    if tenure.outer:
        expected.add("CancelledError")  # it may come while the lock is given back, and it wins
    report.saw("P7")
    if str(tenure.error) not in expected:
        text = f"the body of {tenure.actor} ended {tenure.how}, and {tenure.error} left (lost: {tenure.reason or 'no'})"
        report.found("P7", "wrong_error", ended, text)
    elif lost and tenure.how not in {"clean", "cancelled", "LeaseLostError"} and not tenure.noted and not tenure.outer:
        text = f"{tenure.error} left the body of {tenure.actor} without a note that the lease was lost too"
        report.found("P7", "loss_not_noted", ended, text)
