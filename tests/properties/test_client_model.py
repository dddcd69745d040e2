"""Clients do what a simple model of them says, on every backend; and the model would notice if not."""

import asyncio
import contextlib
import itertools
import json
import sqlite3
import urllib.request
from pathlib import Path

import pytest
from campaigns import amount
from client_model import PATIENCE, Bench, SteppedClock, Store, check
from etcd_server import EtcdCluster
from hypothesis.errors import FlakyFailure
from inside import memory_on
from kahuna_server import KahunaServer
from mysql_server import MysqlServer
from postgresql_server import PostgresqlServer
from redis_quorum import Quorum
from redis_server import RedisServer
from zookeeper_server import ZooKeeperServer, fresh_root

from fencing_sdk._values.claim import safe_segment
from fencing_sdk.abc import Grant, Renewal
from fencing_sdk.backends import BUILTIN, from_url
from fencing_sdk.backends._shared.row_table import RowTable
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.backends.sqlite import SqliteBackend
from fencing_sdk.backends.sqlite import store as sqlite_store
from fencing_sdk.backends.zookeeper import ZooKeeperBackend
from fencing_sdk.errors import StaleTokenError

pytest_plugins = [
    "etcd_fixtures",
    "kahuna_fixtures",
    "mysql_fixtures",
    "postgresql_fixtures",
    "redis_fixtures",
    "zookeeper_fixtures",
]


pytestmark = pytest.mark.campaign


def in_memory(clock: SteppedClock, kind: type[MemoryBackend] = MemoryBackend):
    shared = memory_on(clock, kind, tokens="counter")

    async def revoke(name: str) -> None:
        shared.take_away(name)

    return Bench(lambda: shared, revoke)


def test_clients_of_memory_behave_as_the_model():
    check(Store(in_memory, examples=amount(200, short=20), steps=40))


def test_clients_of_sqlite_behave_as_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = itertools.count()

    def make(clock: SteppedClock):
        monkeypatch.setattr(sqlite_store, "BootClock", lambda: clock)
        file = tmp_path / f"{next(files)}.db"

        async def revoke(name: str) -> None:
            with contextlib.closing(sqlite3.connect(file, isolation_level=None, timeout=PATIENCE)) as operator:
                operator.execute("DELETE FROM fencing_lock WHERE name = ?", (name,))

        return Bench(lambda: SqliteBackend(file, synchronous="normal"), revoke)

    check(Store(make, examples=amount(60, short=6), steps=25))


def check_on_server(make):
    """Check a server, which has its own clock; looking for the shortest story would take too long."""
    examples = amount(60, short=5)
    check(Store(make, follows=False, patience=PATIENCE, examples=examples, steps=25), shrink=False)


def test_clients_of_redis_behave_as_the_model(redis_server: RedisServer):
    def make(_: SteppedClock):
        redis_server.ask_all(["FLUSHALL"])

        async def revoke(name: str) -> None:
            redis_server.ask("DEL", f"{{fencing:{name}}}:l")

        return Bench(lambda: from_url(redis_server.url), revoke)

    check_on_server(make)


def test_clients_of_kahuna_behave_as_the_model(kahuna_server: KahunaServer):
    def ask(call: str, **fields: object) -> dict[str, object]:
        url = f"http://127.0.0.1:{kahuna_server.ports[0]}/v1/locks/{call}"
        body = json.dumps({**fields, "durability": 1}).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.loads(answer.read())

    def make(_: SteppedClock):
        kahuna_server.reset()

        async def revoke(name: str) -> None:
            ask("try-unlock", resource=name, owner=ask("get-info", resource=name)["owner"])

        return Bench(lambda: from_url(kahuna_server.url), revoke)

    check_on_server(make)


def test_clients_of_postgresql_behave_as_the_model(postgresql_server: PostgresqlServer):
    def make(_: SteppedClock):
        postgresql_server.ask("DROP SCHEMA IF EXISTS fencing CASCADE")

        async def revoke(name: str) -> None:
            postgresql_server.ask(
                "UPDATE fencing.fencing_lock SET expires_at = clock_timestamp() WHERE name = $1", name
            )

        return Bench(lambda: from_url(postgresql_server.url), revoke)

    check_on_server(make)


def test_clients_of_mysql_behave_as_the_model(mysql_server: MysqlServer):
    def make(_: SteppedClock):
        for (table,) in mysql_server.ask("SHOW TABLES LIKE 'fencing%'"):
            mysql_server.ask(f"DELETE FROM {table}")

        async def revoke(name: str) -> None:
            mysql_server.ask("UPDATE fencing_lock SET grants = '[]' WHERE name = %s", name)

        return Bench(lambda: from_url(mysql_server.url), revoke)

    check_on_server(make)


def test_clients_of_etcd_behave_as_the_model(etcd_server: EtcdCluster):
    def make(_: SteppedClock):
        etcd_server.clear()

        async def revoke(name: str) -> None:
            etcd_server.delete(f"fencing/{safe_segment(name)}/")

        return Bench(lambda: from_url(etcd_server.url), revoke)

    check_on_server(make)


def test_clients_of_zookeeper_behave_as_the_model(zookeeper_server: ZooKeeperServer):
    def make(_: SteppedClock):
        url = f"{zookeeper_server.url}{fresh_root()}?connect_timeout=5"

        async def revoke(name: str) -> None:
            operator = from_url(url)
            assert isinstance(operator, ZooKeeperBackend)
            await operator.open()
            session, recipe = operator._sessions.any(), operator._recipe
            for node in await recipe.look(session, name):
                await recipe.remove(session, recipe.paths.node(name, node))
            await operator.aclose()

        return Bench(lambda: from_url(url), revoke)

    check_on_server(make)


def test_clients_of_quorum_behave_as_the_model(redis_binary: str):
    with Quorum(3, binary=redis_binary) as nodes:

        def make(_: SteppedClock):
            nodes.forget()
            asyncio.run(nodes.init())

            async def revoke(name: str) -> None:
                for node in nodes.nodes:
                    node.ask("DEL", f"{{fencing:{name}}}:h")

            return Bench(lambda: from_url(nodes.url), revoke)

        check_on_server(make)


def test_no_backend_is_left_out():
    for builtin in BUILTIN.values():
        assert f"test_clients_of_{builtin.module.rpartition('.')[2]}_behave_as_the_model" in globals()


# The model would notice.


class ReleasesAnybodys(MemoryBackend):
    async def release(self, claim):
        self._table.revoke(claim.name, self._clock.now())


class RenewsWithoutEffect(MemoryBackend):
    async def renew(self, claims):
        return [Renewal.RENEWED for _ in claims]


class NeverExpires(MemoryBackend):
    async def acquire(self, claim):
        self._clock.at, now = 0.0, self._clock.at
        try:
            return await super().acquire(claim)
        finally:
            self._clock.at = now


class GrantsEverybody(MemoryBackend):
    async def acquire(self, claim):
        self._table.revoke(claim.name, self._clock.now())
        return await super().acquire(claim)


class RepeatsTokens(MemoryBackend):
    async def acquire(self, claim):
        outcome = await super().acquire(claim)
        return Grant(1) if isinstance(outcome, Grant) else outcome


class ForgetsItsCounter(MemoryBackend):
    async def release(self, claim):
        await super().release(claim)
        if not self._table.grants:
            self._table = RowTable(lambda last: last + 1)


class LosesReleases(MemoryBackend):
    async def release(self, claim): ...


class LetsNobodyKnow(MemoryBackend):
    """Keeps a revocation to itself, which is not a fault: the next renewal tells."""

    def take_away(self, name):
        self._table.revoke(name, self._clock.now())


class RenewsWhatWasTakenAway(LetsNobodyKnow):
    async def renew(self, claims):
        return [Renewal.RENEWED for _ in claims]


def check_broken(kind: type[MemoryBackend], *, follows: bool):
    """
    A false alarm does no harm here, so that waiting for a lock that stays held need not take long.

    What was found on a machine that does much else may not be found a second time in the same way.
    """
    store = Store(lambda clock: in_memory(clock, kind), follows=follows, waiting=1.0, examples=100, steps=30)
    with pytest.raises((AssertionError, StaleTokenError, FlakyFailure)):
        check(store, shrink=False)


@pytest.mark.parametrize(
    "broken",
    [
        ReleasesAnybodys,
        RenewsWithoutEffect,
        NeverExpires,
        GrantsEverybody,
        RepeatsTokens,
        ForgetsItsCounter,
        LosesReleases,
    ],
)
def test_a_broken_store_is_noticed(broken: type[MemoryBackend]):
    check_broken(broken, follows=True)


def test_a_renewal_of_what_was_taken_away_is_noticed_while_the_clock_does_not_jump():
    check_broken(RenewsWhatWasTakenAway, follows=False)


def test_a_lock_that_is_taken_away_in_silence_is_no_fault():
    check(Store(lambda clock: in_memory(clock, LetsNobodyKnow), follows=False, examples=amount(100, short=10)))
