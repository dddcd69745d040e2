"""The last lines of a run: what it left out and how to get that, and the machine's load if tests failed by time."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

_BY_TIME = ("TimeoutError", "Timeout (>", ": not within ")
"""What stands in the report of a test that waited in vain: errors of Python, of pytest-timeout, and of `patience`."""


def last_lines(stats: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """Say once why tests were skipped, and not once for every line of a test, with what to install for them."""
    reasons = Counter(str(report.longrepr[2]) for report in stats.get("skipped", []))
    for reason, tests in reasons.most_common():
        yield f"{tests} skipped: {reason.removeprefix('Skipped: ')}"
    failed = [str(report.longrepr) for outcome in ("failed", "error") for report in stats.get(outcome, [])]
    late = sum(any(words in text for words in _BY_TIME) for text in failed)
    if late and hasattr(os, "getloadavg"):
        load, cores = [f"{average:.1f}" for average in os.getloadavg()], os.cpu_count()
        yield (
            f"{late} of {len(failed)} failed by time, on {cores} cores with a load of {load[0]} in the last minute, "
            f"{load[1]} in the last five and {load[2]} in the last fifteen: run them alone (-n0) on a quiet machine"
        )


@pytest.hookimpl(trylast=True)  # below the slowest tests: the last lines are read
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in last_lines(terminalreporter.stats):
        terminalreporter.write_line(line)
