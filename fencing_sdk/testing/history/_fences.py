"""P3: no resource accepts a token below one that it has accepted, and none refuses the newest."""

from __future__ import annotations

from collections import defaultdict

from fencing_sdk.testing.history._facts import Facts, Maxima, RecordedAccess
from fencing_sdk.testing.history._verdict import Report


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
