"""
Real processes on real servers, with real faults, judged by the checker of histories.

``pytest --campaigns`` has a short run on every backend, and ``python -m tests.fire --minutes 30 --backend redis`` is
a long one.
"""

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet
from etcd_fixtures import require_etcd
from fire_alone import Sqlite
from fire_command import OK, UNKNOWN, VIOLATED, burn, code, heard, say
from fire_run import Outcome, play
from fire_stores import STORES
from mysql_fixtures import require_mysql
from postgresql_fixtures import require_postgresql
from redis_fixtures import require
from zookeeper_server import require_zookeeper

from fencing_sdk.backends import BUILTIN

LEAST = 25
"""Acquisitions: a tenth of what the run shows on two quick cores that do nothing else."""

SHARING = ("sqlite", "redis", "postgresql", "mysql", "etcd", "zookeeper")

NEEDS = {
    "redis": lambda: require("redis-server"),
    "redis-quorum": lambda: require("redis-server"),
    "redis-sentinel": lambda: require("redis-sentinel"),
    "postgresql": require_postgresql,
    "mysql": require_mysql,
    "etcd": require_etcd,
    "zookeeper": require_zookeeper,
}


def each(stores: Iterable[str]) -> list[ParameterSet]:
    """The stores as parameters, marked where they need a server."""
    return [pytest.param(store, marks=[pytest.mark.server] if store in NEEDS else []) for store in stores]


def shown(outcome: Outcome, seed: int) -> str:
    return "\n".join([f"seed {seed}", *heard(outcome, least=LEAST)])


def test_every_backend_that_is_outside_the_process_goes_through_the_fire():
    modules = {builtin.module.removeprefix("fencing_sdk.backends.").partition(".")[0] for builtin in BUILTIN.values()}
    assert {name.partition("-")[0] for name in STORES} == modules - {"memory"}


@pytest.mark.slow
@pytest.mark.parametrize("backend", each(STORES))
async def test_promises_hold_under_real_fire(backend: str, tmp_path: Path):
    NEEDS.get(backend, lambda: None)()
    seed = random.SystemRandom().randrange(2**32)
    outcome = await burn(backend, tmp_path / "fire", seed=seed, seconds=10.0, workers=4, least=LEAST)
    say(shown(outcome, seed))
    assert code(outcome, least=LEAST) == OK, shown(outcome, seed)
    assert len(outcome.faults) >= 6
    assert outcome.lines["write_refused"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", each(SHARING))
async def test_promises_hold_for_permits_readers_and_writers(backend: str, tmp_path: Path):
    NEEDS.get(backend, lambda: None)()
    seed = random.SystemRandom().randrange(2**32)
    outcome = await burn(backend, tmp_path / "fire", seed=seed, seconds=10.0, workers=4, least=LEAST, shares=True)
    say(shown(outcome, seed))
    assert not outcome.failures, shown(outcome, seed)
    assert not outcome.report.violations, shown(outcome, seed)
    assert outcome.report.observed["acquisitions"] >= LEAST
    assert len(outcome.faults) >= 6


@pytest.mark.slow
async def test_a_resource_without_a_guard_is_found_out(tmp_path: Path):
    store = Sqlite(tmp_path, random.Random(1))
    outcome = Outcome()
    for number in range(8):
        outcome.add(await play(store, tmp_path / f"{number}", seed=number, seconds=4.0, workers=4, guarded=False))
        if outcome.report.violations:
            break
    assert "P3" in {violation.promise for violation in outcome.report.violations}, shown(outcome, 0)
    assert code(outcome, least=1) == VIOLATED


def test_a_run_that_has_seen_too_little_is_no_pass():
    assert code(Outcome(), least=1) == UNKNOWN
