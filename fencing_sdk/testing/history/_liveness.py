"""P6 and P8: no lease is lost without a cause, and every waiter gets a turn once faults have ended."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fencing_sdk.testing.history._facts import Facts, RecordedLease, Trouble
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
    """Whether *actor* never came back."""
    return any(trouble.actor == actor and trouble.end == math.inf for trouble in troubles)
