"""P4: per lock, a later grant has a higher token, and two grants never share one."""

from __future__ import annotations

from fencing_sdk.testing.history._facts import Facts, Tenure
from fencing_sdk.testing.history._verdict import Report


def check_tokens(facts: Facts, report: Report) -> None:
    """
    Compare tokens of grants that are ordered in time.

    Two acquisitions are ordered if one had its answer before the other was asked for. Of those
    that overlap nothing is promised, except that they differ.
    """
    for name in facts.names:
        tenures = facts.of(name)
        _unlike(name, tenures, report)
        _growing(name, tenures, report)
    highest: dict[str, int] = {}
    for grant in sorted(facts.grants, key=lambda grant: grant.start):
        before = highest.get(grant.name)
        if before is not None and grant.token <= before:
            text = f"the store granted {grant.name} with token {grant.token} after {before}"
            report.found("P4", "store_token_fell", grant.start, text)
        highest[grant.name] = max(grant.token, before or grant.token)


def _unlike(name: str, tenures: list[Tenure], report: Report) -> None:
    seen: dict[int, Tenure] = {}
    for tenure in tenures:
        other = seen.setdefault(tenure.token, tenure)
        if other.holder != tenure.holder:
            text = f"{other.actor} and {tenure.actor} were both given token {tenure.token} of {name}"
            report.found("P4", "shared_token", tenure.acquired, text)


def _growing(name: str, tenures: list[Tenure], report: Report) -> None:
    answered = sorted(tenures, key=lambda tenure: tenure.acquired)
    best: Tenure | None = None
    passed = 0
    for tenure in sorted(tenures, key=lambda tenure: tenure.asked):
        while passed < len(answered) and answered[passed].acquired < tenure.asked:
            if best is None or answered[passed].token > best.token:
                best = answered[passed]
            passed += 1
        if best is None:
            continue
        report.saw("P4")
        if tenure.token <= best.token and tenure.holder != best.holder:
            text = f"{tenure.actor} was given token {tenure.token} of {name} after {best.actor} had {best.token}"
            report.found("P4", "token_fell", tenure.acquired, text)
