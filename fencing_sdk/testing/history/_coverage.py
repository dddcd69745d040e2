"""
P1 and P2: the work, and every token that was read, lay within the store's grant.

With a store that records its grants the grant itself is the measure. Without one it is the next
holder's acquisition: a holder that read its token or renewed after it was too late. Each permit has a next holder of
its own, and readers that share a token are not each other's.
"""

from __future__ import annotations

import math

from fencing_sdk.testing.history._facts import EXACT, Facts, RecordedLease, StoreGrant
from fencing_sdk.testing.history._verdict import Report


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
            text = f"{lease.actor} was given permit {lease.permit} of {lease.name}, which has {lease.permits}"
            report.found("P1", "too_many_permits", lease.acquired, text)
