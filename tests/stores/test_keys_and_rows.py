"""docs/operations.md names every key and every table that a store keeps, and none that it does not keep."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sqlite3
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from etcd_server import EtcdCluster
from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError
from mysql_server import MysqlServer
from postgresql_server import PostgresqlServer
from redis_quorum import Quorum
from redis_server import RedisServer
from zookeeper_server import ZooKeeperServer

from fencing_sdk.abc import LOCK, READER, WRITER, Claim, Mode, Permit, Place
from fencing_sdk.backends import from_url

pytest_plugins = ["etcd_fixtures", "mysql_fixtures", "postgresql_fixtures", "redis_fixtures", "zookeeper_fixtures"]

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
PARTS = {
    "NAME": "[^/:]+",
    "OWNER": "[0-9a-f]{32}",
    "DIGEST": "[0-9a-f]{32}",
    "SESSION": "[0-9a-f]+",
    "NUMBER": "[0-9]+",
}
LABEL = "host 7"


def heard(store: str) -> list[str]:
    """The keys or tables in the section of *store*."""
    section = re.search(rf"^### {re.escape(store)}\n(.*?)(?=^###|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None, f"{PAGE.name} has no section {store!r}"
    return re.findall(r"^\| `([^`]+)` \|", section[1], re.MULTILINE)


def check(store: str, found: Iterable[str]) -> None:
    """Every key that was *found* has a line of its own, and every line has a key."""
    seen = set()
    for key in found:
        lines = [line for line in heard(store) if re.fullmatch(_pattern(line), key)]
        assert len(lines) == 1, f"{key} is named by {lines}"
        seen.add(lines[0])
    assert seen == set(heard(store))


def _pattern(line: str) -> str:
    pattern = re.escape(line)
    for word, part in PARTS.items():
        pattern = pattern.replace(word, part)
    return pattern


@asynccontextmanager
async def in_use(url: str) -> AsyncIterator[Any]:
    """A store with holders, waiters, shares, a ticket that stays for a while, and one that was ended."""
    async with aclosing(from_url(url)) as backend, AsyncExitStack() as bells:

        async def draw(name: str, mode: Mode = LOCK, *, waits: bool = False) -> Place:
            claim = Claim(name, 60.0, label=LABEL, mode=mode)
            if backend.rings:
                bells.callback(backend.listen(claim, print))
            place = await backend.draw(claim, only_if_it_holds=not waits)
            assert isinstance(place, Place)
            return place

        await draw("a")
        if "reader" in backend.modes:
            for _ in range(2):
                for share in (("b", READER), ("c", Permit(2))):
                    await draw(*share)
            await draw("e", WRITER)
        if backend.rings:
            for waiter in (("a", LOCK), ("b", WRITER), ("c", Permit(2))):
                await draw(*waiter, waits=True)
        parked = Claim("f", 60.0)
        await backend.draw(parked, only_if_it_holds=True)
        await backend.give_back(parked, after=60.0)
        place = await draw("d")
        assert place.token is not None
        assert await backend.end("d", place.token, "a test")
        yield backend


REDIS = "Redis, with Sentinel, on a cluster"


async def test_the_names_that_redis_keeps(redis_server: RedisServer):
    async with in_use(redis_server.url):
        check(REDIS, await redis_server.command("KEYS", "*"))


async def test_a_quorum_of_redis_masters(redis_quorum: Quorum):
    async with in_use(redis_quorum.url):
        found = [key for node in redis_quorum.nodes for key in await node.command("KEYS", "*")]
        check("A quorum of Redis masters", found)  # of all nodes: a quorum goes on without one that answers late


async def test_the_names_that_etcd_keeps(etcd_server: EtcdCluster):
    async with in_use(etcd_server.url):
        check("etcd", await asyncio.to_thread(etcd_server.keys))


async def test_the_names_that_zookeeper_keeps(zookeeper_server: ZooKeeperServer, zookeeper_url: str):
    root = "/" + zookeeper_url.rsplit("/", 1)[1]

    def walk(operator: KazooClient, path: str) -> list[str]:
        try:
            children = operator.get_children(path)
        except NoNodeError:  # a waiter has put another node in its place
            return []
        return [path, *(found for child in children for found in walk(operator, f"{path}/{child}"))]

    def look() -> list[str]:
        operator = KazooClient(zookeeper_server.address)
        operator.start()
        try:
            return walk(operator, root)
        finally:
            operator.stop()
            operator.close()

    async with in_use(zookeeper_url):
        found = await asyncio.to_thread(look)
        check("ZooKeeper", [key.replace(root, "/fencing", 1) for key in found])


async def test_the_names_that_postgresql_keeps(postgresql_server: PostgresqlServer):
    async with in_use(postgresql_server.url):
        rows = postgresql_server.ask("SELECT schemaname, tablename FROM pg_tables WHERE tablename LIKE 'fencing%'")
        check("PostgreSQL", {str(table) for _, table in rows})
        assert all(postgresql_server.ask(f"SELECT count(*) FROM {schema}.{table}")[0][0] for schema, table in rows)


async def test_the_names_that_mysql_keeps(mysql_server: MysqlServer):
    async with in_use(mysql_server.url):
        tables = {str(table) for (table,) in mysql_server.ask("SHOW TABLES")}
        check("MySQL, MariaDB", tables)
        assert all(mysql_server.ask(f"SELECT count(*) FROM {table}")[0][0] for table in tables)


async def test_the_names_that_sqlite_keeps(tmp_path: Path):
    async with in_use(f"sqlite:///{tmp_path / 'locks.db'}"):
        with contextlib.closing(sqlite3.connect(tmp_path / "locks.db")) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            check("SQLite", tables)
            assert all(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables)
