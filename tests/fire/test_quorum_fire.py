"""A quorum of Redis masters under real faults: no token repeats or falls. The judge notices when one does."""

from __future__ import annotations

from pathlib import Path

import pytest
from quorum_fire import QuorumFire
from quorum_judge import Judgement, Used, judge
from required_program import require_program

pytest_plugins = ["redis_fixtures"]

GRANTS = 200


def used(*grants: tuple[int, float, float, float]) -> list[Used]:
    return [Used("a", *grant) for grant in grants]


@pytest.mark.parametrize(
    ("grants", "judgement"),
    [
        (used((1, 0, 1, 2), (2, 2, 3, 4)), Judgement(2)),
        (used((1, 0, 1, 2), (1, 2, 3, 4)), Judgement(2, duplicates=1, fallen=1)),
        (used((5, 0, 1, 2), (4, 2, 3, 4)), Judgement(2, fallen=1)),
        (used((5, 0, 1, 2), (4, 0.5, 3, 4)), Judgement(2)),  # asked for before the other was known
        (used((1, 0, 1, 3.5), (2, 2, 3, 4)), Judgement(2, overlaps=1)),
        ([Used("a", 5, 0, 1, 9), Used("b", 5, 2, 3, 9)], Judgement(2)),
    ],
)
def test_the_judge_sees_what_is_wrong(grants: list[Used], judgement: Judgement):
    assert judge(grants) == judgement


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "forgetful", "clocks"), [(3, False, False), (5, False, False), (3, True, False), (5, False, True)]
)
async def test_tokens_hold_under_fire(nodes: int, forgetful: bool, clocks: bool, tmp_path: Path, redis_binary: str):
    require_program("cc", "gcc libc6-dev")
    fire = QuorumFire(tmp_path, nodes=nodes, forgetful=forgetful, clocks=clocks, seed=nodes, binary=redis_binary)
    found = await fire.run("fenced", 20.0, enough=lambda judged: judged.grants >= GRANTS)
    assert found.grants >= GRANTS
    assert found.tokens_hold, found
    assert clocks or not found.overlaps, found
    assert len(fire.faults) >= 3


@pytest.mark.slow
async def test_the_highest_of_the_counters_does_not_hold_under_the_same_fire(tmp_path: Path, redis_binary: str):
    fire = QuorumFire(tmp_path, nodes=3, forgetful=False, clocks=False, seed=1, binary=redis_binary)
    found = await fire.run("published", 20.0, enough=lambda judged: not judged.tokens_hold)
    assert not found.tokens_hold, found
