"""
A backup of the store is put back: in which stores tokens fall, what guards do then, and what raises the tokens again.

The page "Upgrade and roll back" says so.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from kazoo.client import KazooClient
from mysql_programs import flavours
from mysql_server import MysqlServer
from redis_server import RedisServer
from stays import PATIENCE

from fencing_sdk import StaleTokenError, connect
from fencing_sdk.guards.memory import MemoryGuard

pytest_plugins = ["etcd_fixtures", "mysql_fixtures", "postgresql_fixtures", "redis_fixtures", "zookeeper_fixtures"]

LOST = 5
"""Grants after the backup."""


def _servers(*stores: str) -> list[Any]:
    return [pytest.param(store, marks=pytest.mark.server) for store in stores]


_WITH_TOKENS = ["sqlite", *_servers("redis", "postgresql", *flavours())]
"""The stores that count the grants of each lock."""
_WITH_NUMBERS = _servers("etcd", "zookeeper")
"""Those whose own number of a write is the token."""


class Store(NamedTuple):
    """A store that can be stopped, and whose files are in a folder."""

    url: str
    data: Path
    stop: Callable[[], object]
    start: Callable[[], object]
    write: Callable[[], object] | None = None
    """A write of another program, which raises the number behind the tokens."""

    @contextmanager
    def stopped(self) -> Iterator[Path]:
        self.stop()
        yield self.data.with_name(f"{self.data.name}-backup")
        self.start()

    def back_up(self) -> None:
        with self.stopped() as backup:
            subprocess.run(["cp", "-a", self.data, backup], check=True)

    def restore(self) -> None:
        with self.stopped() as backup:
            shutil.rmtree(self.data)
            backup.rename(self.data)

    async def grant(self, *, tokens: str | None = None) -> int:
        async with connect(self.url, **({} if tokens is None else {"tokens": tokens})) as locks:
            async with locks.lock("seats/42", ttl=60, wait=PATIENCE) as lease:
                return lease.token


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    start: Any = None
    if request.param in {"postgresql", "etcd", "zookeeper"}:
        start = request.getfixturevalue(f"start_{request.param}")
    if request.param == "sqlite":
        folder = tmp_path / "locks"
        folder.mkdir()
        yield Store(f"sqlite:///{folder}/locks.db", folder, lambda: None, lambda: None)
    elif request.param == "redis":
        from redis_fixtures import require

        with RedisServer(binary=require("redis-server"), appendonly=True, appendfsync="always") as server:
            yield Store(server.url, server.folder, server.stop, server.start)
    elif request.param == "postgresql":
        server = start()
        yield Store(server.url, server.data, server.stop, server.start)
    elif request.param in flavours():
        from mysql_fixtures import require_mysql

        require_mysql(request.param)
        with MysqlServer(request.param) as database:
            yield Store(database.url, database.data, database.stop, database.start)
    elif request.param == "etcd":
        server = start()
        put = {"key": "b3RoZXI=", "value": "eA=="}
        yield Store(
            server.url,
            server.members[0].folder / "data",
            server.kill,
            server.start,
            lambda: server.ask("kv/put", put),
        )
    else:
        server = start()

        def write() -> None:
            operator = KazooClient(server.address)
            operator.start(PATIENCE)
            operator.ensure_path("/other")
            operator.set("/other", b"x")
            operator.stop()
            operator.close()

        yield Store(server.url, server.folder / "data", server.kill, server.start, write)


async def restored(store: Store, tokens: str | None) -> tuple[int, MemoryGuard]:
    """Put a backup back that has not seen the last grants; return the last of their tokens, and a guard that has."""
    first = await store.grant(tokens=tokens)
    store.back_up()
    later = [await store.grant(tokens=tokens) for _ in range(LOST)]
    assert first < later[0] < later[-1]
    guard = MemoryGuard()
    await guard.raise_to("seats/42", later[-1])
    store.restore()
    return later[-1], guard


@pytest.mark.parametrize("store", _WITH_TOKENS, indirect=True)
async def test_hybrid_tokens_grow_when_a_backup_is_restored(store: Store):
    last, guard = await restored(store, "hybrid")
    token = await store.grant(tokens="hybrid")
    assert token > last
    guard.write("seats/42", token, str)


@pytest.mark.parametrize("store", _WITH_TOKENS, indirect=True)
async def test_counters_fall_when_a_backup_is_restored_and_hybrid_tokens_raise_them(store: Store):
    last, guard = await restored(store, "counter")
    for _ in range(LOST - 1):
        token = await store.grant(tokens="counter")
        assert token < last
        with pytest.raises(StaleTokenError):
            guard.write("seats/42", token, str)
    token = await store.grant(tokens="hybrid")
    assert token > last
    guard.write("seats/42", token, str)


@pytest.mark.parametrize("store", _WITH_NUMBERS, indirect=True)
async def test_numbers_of_the_store_fall_when_a_backup_is_restored_and_writes_raise_them(store: Store):
    last, guard = await restored(store, None)
    token = await store.grant()
    assert token < last
    with pytest.raises(StaleTokenError):
        guard.write("seats/42", token, str)
    for _ in range(last - token):
        assert store.write is not None
        store.write()
    token = await store.grant()
    assert token > last
    guard.write("seats/42", token, str)
