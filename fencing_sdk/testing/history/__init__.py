"""
A checker for what really happened: recorded JSON lines in, a verdict out.

It judges a recording by promises P1 to P8 and shares no code with what it judges: it knows events
and numbers, no lock, no lease, no guard. A recording that shows too little is ``unknown``.
Recordings come from the simulation, from a harness with real processes and servers, or from
``FENCING_RECORD``. ``docs/proof.md`` lists the kinds of lines and which rules need them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from fencing_sdk.testing.history import _endings, _order, _safety
from fencing_sdk.testing.history._facts import Facts, Line
from fencing_sdk.testing.history._gathering import gather
from fencing_sdk.testing.history._verdict import HEADLINES, PROMISES, Report, Verdict, Violation

__all__ = ["HEADLINES", "PROMISES", "Line", "Report", "Verdict", "Violation", "check"]

_RULES = (
    _safety.check_coverage,
    _safety.check_tokens,
    _safety.check_fences,
    _endings.check_endings,
    _endings.check_liveness,
    _order.check_order,
)


def check(lines: Iterable[Line]) -> Report:
    """
    Judge the *lines* of a recording, in any order; a line ``run`` begins a run that is judged by itself.

    Raises:
        ConfigurationError: an event lacks something that its kind always has.
    """
    report = Report()
    for facts in gather(lines):
        _count(facts, report)
        for rule in _RULES:
            rule(facts, report)
    report.violations.sort(key=lambda violation: violation.at)
    return report


def _count(facts: Facts, report: Report) -> None:
    report.saw("runs")
    report.saw("acquisitions", len(facts.leases))
    report.saw("losses", sum(lease.lost is not None for lease in facts.leases))
    report.saw("writes", sum(access.write for access in facts.accesses))
    report.saw("refusals", sum(not access.accepted for access in facts.accesses))
    report.saw("troubles", len(facts.troubles))
    for name in facts.names:
        holders = [lease.holder for lease in facts.of(name)]
        report.saw("hand-overs", sum(one != other for one, other in itertools.pairwise(holders)))
