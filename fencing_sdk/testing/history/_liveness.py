"""P6 and P8: no lease is lost without a cause, and everybody gets a turn once faults have ended."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fencing_sdk.testing.history._facts import Facts, Tenure, Trouble
from fencing_sdk.testing.history._verdict import Report

_SILENCES = frozenset({"cut", "outage", "refused", "lost", "late", "hung"})
RIDDEN = 0.3
"""
The part of a ttl for which the store may be silent without cost where a run does not tell its rhythm: little
more than half of what default timing rides out, see `Rhythm.ridden`, as real clients have to connect again.
"""


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
    longest, allowed = _longest_silence(facts, tenure, since)
    if longest <= allowed:
        what = f"{tenure.actor} lost {tenure.name} (token {tenure.token}, {tenure.reason})"
        text = (
            f"{what} after a silence of {longest:.3f} s; {allowed:.3f} s are ridden out with a ttl of {tenure.ttl:g} s"
        )
        report.found("P6", "lost_without_cause", tenure.lost, text)


def _longest_silence(facts: Facts, tenure: Tenure, since: float) -> tuple[float, float]:
    """
    The stretch without a usable store that was the hardest to ride out, and how long it might have been.

    Shorter pauses than a renewal needs join what they part.
    """
    pause = RIDDEN * tenure.ttl if facts.rhythm is None else facts.rhythm.between_attempts
    stretches: list[list[Trouble]] = []
    end = -math.inf
    for silence in sorted(_silences(facts, tenure, since), key=lambda trouble: trouble.start):
        if silence.start > end + pause:
            stretches.append([])
        stretches[-1].append(silence)
        end = max(end, silence.end)
    found = [(_length(stretch), _ridden(facts, tenure, stretch)) for stretch in stretches]
    return max(found, key=lambda pair: pair[0] - pair[1], default=(0.0, _ridden(facts, tenure, [])))


def _silences(facts: Facts, tenure: Tenure, since: float) -> Iterator[Trouble]:
    for trouble in facts.troubles:
        if trouble.what in _SILENCES and trouble.actor in {"", tenure.actor} and trouble.end >= since:
            yield trouble


def _length(stretch: list[Trouble]) -> float:
    return max(trouble.end for trouble in stretch) - stretch[0].start


def _ridden(facts: Facts, tenure: Tenure, stretch: list[Trouble]) -> float:
    if facts.rhythm is None:
        return RIDDEN * tenure.ttl
    return facts.rhythm.ridden(tenure.ttl, refused=all(trouble.what == "refused" for trouble in stretch))


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
