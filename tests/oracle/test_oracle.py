"""Every store answers random histories as the rules say."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Protocol

import pytest
from campaigns import amount
from etcd_server import EtcdCluster
from kahuna_server import KahunaServer
from mysql_server import MysqlServer
from postgresql_server import PostgresqlServer
from redis_quorum import Quorum
from redis_server import RedisServer

from tests.oracle.benches import (
    Change,
    KahunaOracle,
    MemoryOracle,
    MysqlOracle,
    NodesOracle,
    PostgresqlOracle,
    QuorumOracle,
    RedisOracle,
    SqliteOracle,
)
from tests.oracle.client_time import ClientTimeLoop
from tests.oracle.histories import histories, shrunk
from tests.oracle.planted import ETCD, KAHUNA, MEMORY, MYSQL, POSTGRESQL, QUORUM, REDIS, SQLITE, ZOOKEEPER, Planted
from tests.oracle.player import Bench, Player
from tests.oracle.reference import Differs

pytest_plugins = [
    "etcd_fixtures",
    "kahuna_fixtures",
    "mysql_fixtures",
    "postgresql_fixtures",
    "redis_fixtures",
    "zookeeper_fixtures",
]

PATIENCE = 20.0


def seeds(full: int, *, short: int) -> range:
    """As many as ``FENCING_TEST_HISTORIES`` says, or else as a campaign or a quick run plays."""
    return range(int(os.environ.get("FENCING_TEST_HISTORIES", "0")) or amount(full, short=short))


def play_all(bench: Bench, seeds: range) -> int:
    """Play the histories of *seeds*; fail with the shortest history that differs."""

    async def play() -> int:
        async with Player(bench, patience=PATIENCE) as player:
            for number, steps in enumerate(histories(seeds, bench.cast), 1):
                if difference := await differs(player, steps):
                    pytest.fail(f"history {number}: {difference}\n\n{await small(steps)}")
            return player.grants

    async def small(steps: list[str]) -> str:
        async with Player(bench, patience=0.5) as quick:
            fewer = await shrunk(steps, lambda fewer: differs(quick, fewer))
            return "\n".join([await differs(quick, fewer) or "(not when it is played again)", *fewer])

    with asyncio.Runner(loop_factory=ClientTimeLoop if bench.timed else None) as runner:
        return runner.run(play())


async def differs(player: Player, steps: list[str]) -> str:
    """Play one history, and return in what it differs."""
    try:
        await player.play(steps)
    except Differs as error:
        return str(error)
    return ""


@pytest.mark.campaign
def test_memory_answers_as_the_rules_say():
    assert play_all(MemoryOracle(), seeds(800, short=100))


@pytest.mark.slow
@pytest.mark.campaign
def test_sqlite_answers_as_the_rules_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert play_all(SqliteOracle(tmp_path / "locks.db", monkeypatch), seeds(200, short=20))


@pytest.mark.campaign
def test_postgresql_answers_as_the_rules_say(postgresql_server: PostgresqlServer, monkeypatch: pytest.MonkeyPatch):
    assert play_all(PostgresqlOracle(postgresql_server, monkeypatch), seeds(60, short=8))


@pytest.mark.campaign
def test_mysql_answers_as_the_rules_say(mysql_server: MysqlServer, monkeypatch: pytest.MonkeyPatch):
    assert play_all(MysqlOracle(mysql_server, monkeypatch), seeds(60, short=8))


class MakeRedis(Protocol):
    def __call__(self, change: Change = ...) -> RedisOracle: ...


@pytest.fixture
def on_redis(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRedis]:
    with ExitStack() as stack:

        def make(change: Change = lambda text: text) -> RedisOracle:
            return stack.enter_context(closing(RedisOracle(redis_server.url, [redis_server], monkeypatch, change)))

        yield make


@pytest.fixture
def on_quorum(redis_quorum: Quorum, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRedis]:
    with ExitStack() as stack:

        def make(change: Change = lambda text: text) -> RedisOracle:
            return stack.enter_context(closing(QuorumOracle(redis_quorum.url, redis_quorum.nodes, monkeypatch, change)))

        yield make


@pytest.mark.campaign
def test_redis_answers_as_the_rules_say(on_redis: MakeRedis):
    assert play_all(on_redis(), seeds(80, short=12))


@pytest.mark.campaign
def test_redis_quorum_answers_as_the_rules_say(on_quorum: MakeRedis):
    assert play_all(on_quorum(), seeds(60, short=8))


@pytest.mark.campaign
def test_etcd_answers_as_the_rules_say(etcd_server: EtcdCluster):
    assert play_all(NodesOracle(etcd_server.url), seeds(15, short=3))


@pytest.mark.campaign
def test_zookeeper_answers_as_the_rules_say(zookeeper_url: str):
    assert play_all(NodesOracle(zookeeper_url), seeds(40, short=5))


@pytest.mark.campaign
def test_kahuna_answers_as_the_rules_say(kahuna_server: KahunaServer):
    assert play_all(KahunaOracle(kahuna_server.url), seeds(200, short=20))


def catch(bench: Bench, planted: Planted, seeds: range) -> None:
    """Play until a history differs."""

    async def play() -> bool:
        async with Player(bench, patience=1.0) as player:
            for steps in histories(seeds, planted.cast or bench.cast):
                if await differs(player, steps):
                    return True
            return False

    with asyncio.Runner(loop_factory=ClientTimeLoop if bench.timed else None) as runner:
        assert runner.run(play()), "no history differs"


@pytest.mark.parametrize("planted", MEMORY, ids=lambda planted: planted.what)
def test_a_change_of_memory_is_caught(planted: Planted, monkeypatch: pytest.MonkeyPatch):
    planted.plant(monkeypatch)
    catch(MemoryOracle(), planted, range(500))


@pytest.mark.slow
@pytest.mark.parametrize("planted", SQLITE, ids=lambda planted: planted.what)
def test_a_change_of_sqlite_is_caught(planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    planted.plant(monkeypatch)
    catch(SqliteOracle(tmp_path / "locks.db", monkeypatch), planted, range(100))


@pytest.mark.parametrize("planted", POSTGRESQL, ids=lambda planted: planted.what)
def test_a_change_of_postgresql_is_caught(
    planted: Planted, postgresql_server: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
):
    catch(PostgresqlOracle(postgresql_server, monkeypatch, planted.in_text()), planted, range(100))


@pytest.mark.slow
@pytest.mark.parametrize("planted", MYSQL, ids=lambda planted: planted.what)
def test_a_change_of_mysql_is_caught(planted: Planted, mysql_server: MysqlServer, monkeypatch: pytest.MonkeyPatch):
    planted.plant(monkeypatch)
    catch(MysqlOracle(mysql_server, monkeypatch), planted, range(100))


@pytest.mark.parametrize("planted", REDIS, ids=lambda planted: planted.what)
def test_a_change_of_redis_is_caught(planted: Planted, on_redis: MakeRedis):
    catch(on_redis(planted.in_text()), planted, range(100))


@pytest.mark.parametrize("planted", QUORUM, ids=lambda planted: planted.what)
def test_a_change_of_the_quorum_is_caught(planted: Planted, on_quorum: MakeRedis):
    catch(on_quorum(planted.in_text()), planted, range(50))


@pytest.mark.parametrize("planted", ETCD, ids=lambda planted: planted.what)
def test_a_change_of_etcd_is_caught(planted: Planted, etcd_server: EtcdCluster, monkeypatch: pytest.MonkeyPatch):
    planted.plant(monkeypatch)
    catch(NodesOracle(etcd_server.url), planted, range(20))


@pytest.mark.parametrize("planted", ZOOKEEPER, ids=lambda planted: planted.what)
def test_a_change_of_zookeeper_is_caught(planted: Planted, zookeeper_url: str, monkeypatch: pytest.MonkeyPatch):
    planted.plant(monkeypatch)
    catch(NodesOracle(zookeeper_url), planted, range(40))


@pytest.mark.slow
@pytest.mark.parametrize("planted", KAHUNA, ids=lambda planted: planted.what)
def test_a_change_of_kahuna_is_caught(planted: Planted, kahuna_server: KahunaServer, monkeypatch: pytest.MonkeyPatch):
    planted.plant(monkeypatch)
    catch(KahunaOracle(kahuna_server.url), planted, range(50))
