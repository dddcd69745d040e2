"""P6 and P8: no lease is lost without a cause, and everybody gets a turn once faults have ended."""

from __future__ import annotations

import math

from fencing_sdk.testing.history._facts import Facts, Tenure, Trouble
from fencing_sdk.testing.history._verdict import Report

_SILENCES = frozenset({"cut", "outage", "lost", "late", "hung"})
RIDDEN = 0.3
"""The part of a ttl for which a store may be silent without cost: one heartbeat call, and its retries, fit behind."""


def check_liveness(facts: Facts, report: Report) -> None:
    """Judge losses by their causes, and requests by how long they took after faults ended."""
    if facts.declared:
        for tenure in facts.tenures:
            _ridden_out(facts, tenure, report)
    if facts.healed is not None:
        _everybody_served(facts, *facts.healed, report)


def _ridden_out(facts: Facts, tenure: Tenure, report: Report) -> None:
    end = min(tenure.over, facts.end)
    if any(t.what in _SILENCES and t.actor in {"", tenure.actor} and t.start <= end and t.end >= tenure.acquired
           for t in facts.troubles) or tenure.renewals:  # fmt: skip
        report.saw("P6")
    if tenure.lost is None or tenure.reason == "closed":
        return
    since = tenure.lost - 1.1 * tenure.ttl
    if tenure.max_hold is not None and tenure.lost - tenure.acquired > 0.9 * tenure.max_hold:
        return
    violent = ("frozen", "stalled", "forgot", "stepped", "revoked")
    if facts.troubled(tenure.actor, since, tenure.lost, violent):
        return
    longest = _longest_silence(facts, tenure, since)
    if longest <= RIDDEN * tenure.ttl:
        what = f"{tenure.actor} lost {tenure.name} (token {tenure.token}, {tenure.reason})"
        text = f"{what} after a silence of {longest:.3f} s, with a ttl of {tenure.ttl:g} s"
        report.found("P6", "lost_without_cause", tenure.lost, text)


def _longest_silence(facts: Facts, tenure: Tenure, since: float) -> float:
    """The longest stretch without a usable store; shorter pauses than a renewal needs join what they part."""
    silences = [
        trouble
        for trouble in facts.troubles
        if trouble.what in _SILENCES and trouble.actor in {"", tenure.actor} and trouble.end >= since
    ]
    longest = 0.0
    start = end = -math.inf
    for silence in sorted(silences, key=lambda trouble: trouble.start):
        if silence.start > end + 0.3 * tenure.ttl:
            start = silence.start
        end = max(end, silence.end)
        longest = max(longest, end - start)
    return longest


def _everybody_served(facts: Facts, healed: float, within: float, report: Report) -> None:
    for request in facts.requests:
        if request.start < healed or _gone(facts.troubles, request.actor):
            continue
        end = facts.end if request.end is None else request.end
        waited = end - request.start
        if request.granted or waited > within:
            report.saw("P8")
        if waited > within:
            became = "was served" if request.granted else "was not served"
            text = (
                f"{request.actor} {became} {waited:.3f} s after it asked for {request.name}; {within:.3f} are allowed"
            )
            report.found("P8", "waited_too_long", end, text)


def _gone(troubles: list[Trouble], actor: str) -> bool:
    """Whether *actor* never came back."""
    return any(trouble.actor == actor and trouble.end == math.inf for trouble in troubles)
