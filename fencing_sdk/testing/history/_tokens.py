"""P4: per lock, a later grant has a higher token, and two grants never share one. Readers that hold together do."""

from __future__ import annotations

from fencing_sdk.testing.history._facts import Facts, RecordedLease
from fencing_sdk.testing.history._verdict import Report


def check_tokens(facts: Facts, report: Report) -> None:
    """
    Compare tokens of grants that are ordered in time.

    Two acquisitions are ordered if one had its answer before the other was asked for. Of those
    that overlap nothing is promised, except that they differ.
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
            text = f"{lease.actor} was given token {lease.token} of {name} after {best.actor} had {best.token}"
            report.found("P4", "token_fell", lease.acquired, text)
