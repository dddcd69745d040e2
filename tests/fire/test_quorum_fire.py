"""A quorum of Redis masters under real faults: no token repeats or falls."""

from __future__ import annotations

from pathlib import Path

import pytest
from quorum_fire import QuorumFire
from required_program import require_program

from tests.simulation.judge import Verdict

pytest_plugins = ["redis_fixtures"]

GRANTS = 200
TOKENS = {"shared_token", "token_fell"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "forgetful", "clocks"), [(3, False, False), (5, False, False), (3, True, False), (5, False, True)]
)
async def test_tokens_hold_under_fire(nodes: int, forgetful: bool, clocks: bool, tmp_path: Path, redis_binary: str):
    require_program("cc", "gcc libc6-dev")
    fire = QuorumFire(tmp_path, nodes=nodes, forgetful=forgetful, clocks=clocks, seed=nodes, binary=redis_binary)
    found = await fire.run("fenced", 20.0, enough=lambda report: report.observed["acquisitions"] >= GRANTS)
    assert found.observed["acquisitions"] >= GRANTS
    assert found.of("P4") is Verdict.OK, found.violations
    assert clocks or found.of("P1") is Verdict.OK, found.violations
    assert len(fire.faults) >= 3


@pytest.mark.slow
async def test_the_highest_of_the_counters_does_not_hold_under_the_same_fire(tmp_path: Path, redis_binary: str):
    fire = QuorumFire(tmp_path, nodes=3, forgetful=False, clocks=False, seed=1, binary=redis_binary)
    found = await fire.run("published", 20.0, enough=lambda report: bool(report.rules & TOKENS))
    assert found.rules & TOKENS
