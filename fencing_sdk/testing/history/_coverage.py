"""
P1 and P2: the work, and every token that was read, lay within the store's grant.

With a store that records its grants the grant itself is the measure. Without one it is the next
holder's acquisition: whoever read a token or renewed after it was too late.
"""

from __future__ import annotations

from fencing_sdk.testing.history._facts import EXACT, Facts, StoreGrant, Tenure
from fencing_sdk.testing.history._verdict import Report


def check_coverage(facts: Facts, report: Report) -> None:
    """Judge every tenure by the store's grants, or by its successor."""
    grants = {(grant.name, grant.holder, grant.token): grant for grant in facts.grants}
    for at, old in facts.revived:
        report.found(
            "P1", "store_revived", at, f"the store extended {old.name} (token {old.token}), over since {old.end:.6f}"
        )
    for tenure in facts.tenures:
        if tenure.revived is not None:
            text = f"{tenure.actor} took a renewal of {tenure.name} (token {tenure.token}) after its deadline"
            report.found("P2", "revived", tenure.revived, text)
        grant = grants.get((tenure.name, tenure.holder, tenure.token))
        if grant is not None:
            _within(facts, report, tenure, grant)
        elif not facts.grants:
            _before_successor(facts, report, tenure)
        else:
            text = f"{tenure.actor} holds {tenure.name} with token {tenure.token}, and the store never granted it"
            report.found("P1", "held_without_grant", tenure.acquired, text)
    _one_at_a_time(facts, report)


def _within(facts: Facts, report: Report, tenure: Tenure, grant: StoreGrant) -> None:
    if grant.excused:
        return
    report.saw("P2", len(tenure.reads))
    late = [read for read in tenure.reads if not grant.start - EXACT <= read <= grant.end + EXACT]
    if late:
        text = f"{tenure.actor} read token {tenure.token} of {tenure.name}; the grant ended at {grant.end:.6f}"
        report.found("P2", "stale_read", late[0], text)
    ended = tenure.body_ended
    if ended is not None and not facts.troubled(tenure.actor, grant.start, ended):
        report.saw("P1")
        if ended > grant.end + EXACT:
            text = f"{tenure.actor} worked under token {tenure.token} of {tenure.name} after {grant.end:.6f}"
            report.found("P1", "overrun", ended, text)


def _before_successor(facts: Facts, report: Report, tenure: Tenure) -> None:
    later = [other.acquired for other in facts.of(tenure.name) if other.token > tenure.token]
    taken = min(later, default=None)
    if taken is None or any(trouble.what in {"forgot", "stepped", "revoked"} for trouble in facts.troubles):
        return
    report.saw("P2", len(tenure.reads))
    for read in tenure.reads:
        if read > taken + EXACT:
            text = f"{tenure.actor} read token {tenure.token} of {tenure.name}, held by another since {taken:.6f}"
            report.found("P2", "stale_read", read, text)
            break
    if facts.troubled(tenure.actor, tenure.acquired, tenure.body_ended or taken):
        return
    report.saw("P1")
    work = [*tenure.renewals, *([] if tenure.body_ended is None else [tenure.body_ended])]
    if any(moment > taken + EXACT for moment in work):
        text = f"{tenure.actor} went on with token {tenure.token} of {tenure.name}, held by another since {taken:.6f}"
        report.found("P1", "overrun", max(work), text)


def _one_at_a_time(facts: Facts, report: Report) -> None:
    last: dict[str, StoreGrant] = {}
    for grant in sorted(facts.grants, key=lambda grant: grant.start):
        before = last.get(grant.name)
        if before is not None and not before.excused and grant.start < before.end - EXACT:
            text = f"the store granted {grant.name} with token {grant.token} while {before.token} lasted"
            report.found("P1", "two_grants", grant.start, text)
        if before is None or grant.end >= before.end or before.excused:
            last[grant.name] = grant
