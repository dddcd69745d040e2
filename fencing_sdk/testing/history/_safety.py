"""
P1 to P4: work, reads and writes, judged by the grants and their tokens.

P1 and P2: the work, and every token that was read, lay within the store's grant. With a store that records its grants
the grant itself is the measure. Without one it is the next holder's acquisition: a holder that read its token or
renewed after it was too late. Each permit has a next holder of its own, and readers that share a token are not each
other's.
P3: no resource accepts a token below one that it has accepted, and none refuses the newest.
P4: per lock, a later grant has a higher token, and two grants never share one. Readers that hold together do.
"""

from __future__ import annotations

import math
from collections import defaultdict

from fencing_sdk.testing.history._facts import (
    EXACT,
    Facts,
    Maxima,
    RecordedAccess,
    RecordedLease,
    StoreGrant,
)
from fencing_sdk.testing.history._verdict import Report

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
    for name in facts.names:
        leases = facts.of(name)
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
