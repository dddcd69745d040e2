"""No work of a row counts twice, and no claim but the last is committed, under kills, freezes and crashes."""

from __future__ import annotations

from pathlib import Path

import pytest
from campaigns import amount
from mysql_fixtures import require_mysql
from mysql_programs import flavours
from postgresql_fixtures import require_postgresql
from torture import CANCELLED, COUNTER, NO_COMPARE, PLAIN, REVIVES, Report, Torture, database

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.campaign]

KINDS = ["sqlite", "postgresql", *flavours()]
ROWS = amount(5000, short=400)
SLOW = amount(0.0015, short=0.01)
MINUTES = 15.0
CONTROLS = amount([(NO_COMPARE, False), (COUNTER, True), (REVIVES, False)], short=[(NO_COMPARE, False)])
"""Mistakes that are caught; the last two show themselves once in some thousands of rows."""


def tortured(kind: str, folder: Path, *, mode: str, crashes: bool = False, slow: float = SLOW) -> Report:
    if kind == "postgresql":
        require_postgresql()
    elif kind != "sqlite":
        require_mysql(kind)
    control = mode not in {CANCELLED, PLAIN}
    with database(kind, folder, crashes=crashes) as bench:
        run = Torture(bench, folder, mode=mode, crashes=crashes, slow=slow)
        return run.run(5000 if control else ROWS, MINUTES * 60, until_caught=control)


@pytest.mark.timeout(MINUTES * 60 + 120)
@pytest.mark.parametrize("mode", [CANCELLED, PLAIN])
@pytest.mark.parametrize("kind", KINDS)
def test_no_work_counts_twice_under_kills_and_freezes(kind: str, mode: str, tmp_path: Path) -> None:
    found = tortured(kind, tmp_path, mode=mode)
    assert found.safe, found
    assert found.complete, found


@pytest.mark.timeout(MINUTES * 60 + 120)
@pytest.mark.parametrize("kind", KINDS[1:])
def test_no_work_counts_twice_where_the_server_crashes_and_forgets_claims(kind: str, tmp_path: Path) -> None:
    found = tortured(kind, tmp_path, mode=CANCELLED, crashes=True)
    assert found.faults["crashes"], found
    assert found.safe, found
    assert found.complete, found


@pytest.mark.timeout(MINUTES * 60 + 120)
@pytest.mark.parametrize(("mode", "crashes"), CONTROLS)
def test_the_judge_catches_what_is_written_by_hand(mode: str, crashes: bool, tmp_path: Path) -> None:
    """A finish without a compare, a token that a crash sets back, and a renewal that takes the row back."""
    found = tortured("postgresql", tmp_path, mode=mode, crashes=crashes, slow=0.1)
    assert not found.safe, found
