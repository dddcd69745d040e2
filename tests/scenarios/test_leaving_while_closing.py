"""
A client closes while one of its tasks gives up waiting, or releases a lock: the store forgets both (P5).

Each story is told once, on every store, behind a network that takes a while: what the client has not said when it
closes, the store never hears.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from event_log import CLOCK
from fault_proxy import FaultProxy
from mysql_programs import flavours
from mysql_proxy import MysqlProxy
from postgresql_proxy import PostgresqlProxy
from redis_server import RedisServer
from zookeeper_server import fresh_root

from fencing_sdk import Lease, LockClient, LossReason, connect
from fencing_sdk._engine import engine, releases

pytest_plugins = [
    "etcd_fixtures",
    "kahuna_fixtures",
    "mysql_fixtures",
    "postgresql_fixtures",
    "redis_fixtures",
    "zookeeper_fixtures",
]

TTL = 30.0
SLOW = 0.05
"""Seconds that a message takes in each direction."""
SOON = 2.5
"""Seconds in which a free lock is granted; a waiter that left a line without a word blocks it for 5."""


@dataclass
class Road:
    """A store, and a way to it that may be slow or break."""

    url: str
    far_url: str
    slow: Callable[[], None]
    cut: Callable[[], None] | None = None


def _by_proxy(url: str, proxy: FaultProxy, far_url: str) -> Road:
    return Road(url, far_url, lambda: proxy.delay(requests=SLOW, replies=SLOW), proxy.cut)


@asynccontextmanager
async def _redis(request: pytest.FixtureRequest, _: Path) -> AsyncIterator[Road]:
    from redis_fixtures import require  # pytest loads it as a plug-in, and wants to be the first

    require("redis-server")
    with RedisServer() as server:
        async with FaultProxy(server.port) as proxy:
            yield _by_proxy(server.url, proxy, proxy.url)


@asynccontextmanager
async def _postgresql(request: pytest.FixtureRequest, _: Path) -> AsyncIterator[Road]:
    server = request.getfixturevalue("postgresql_server")
    async with PostgresqlProxy(server) as proxy:
        yield _by_proxy(server.url, proxy, proxy.url)


@asynccontextmanager
async def _mysql(request: pytest.FixtureRequest, _: Path, *, flavour: str) -> AsyncIterator[Road]:
    with request.getfixturevalue("shared_mysql")(flavour).fresh_database() as server:
        async with MysqlProxy(server) as proxy:
            yield _by_proxy(server.url, proxy, proxy.url)


@asynccontextmanager
async def _etcd(request: pytest.FixtureRequest, _: Path) -> AsyncIterator[Road]:
    server = request.getfixturevalue("etcd_server")
    async with FaultProxy(server.members[0].port) as proxy:
        yield _by_proxy(server.url, proxy, f"etcd://127.0.0.1:{proxy.port}")


@asynccontextmanager
async def _zookeeper(request: pytest.FixtureRequest, _: Path) -> AsyncIterator[Road]:
    server, root = request.getfixturevalue("zookeeper_server"), fresh_root()
    async with FaultProxy(server.port) as proxy:
        yield _by_proxy(f"{server.url}{root}", proxy, f"zk://127.0.0.1:{proxy.port}{root}")


@asynccontextmanager
async def _kahuna(request: pytest.FixtureRequest, _: Path) -> AsyncIterator[Road]:
    server = request.getfixturevalue("kahuna_server")
    async with FaultProxy(int(server.url.rpartition(":")[2])) as proxy:
        yield _by_proxy(server.url, proxy, f"kahuna://127.0.0.1:{proxy.port}")


@asynccontextmanager
async def _sqlite(_: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Road]:
    """Its network is a file that another process keeps locked for a moment."""
    path = folder / "locks.db"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)

    def slow() -> None:
        other.execute("BEGIN IMMEDIATE")
        asyncio.get_running_loop().call_later(SLOW, other.execute, "COMMIT")

    url = f"sqlite:///{path}"
    with contextlib.closing(other):
        yield Road(url, url, slow)


INSTALLED = {
    "redis": _redis,
    "postgresql": _postgresql,
    **{flavour: partial(_mysql, flavour=flavour) for flavour in flavours()},
    "etcd": _etcd,
    "zookeeper": _zookeeper,
}
SERVERS = {**INSTALLED, "kahuna": _kahuna}
STORES = {**SERVERS, "sqlite": _sqlite}


def _named(names: Iterable[str]) -> list[object]:
    """The parameters of a test, those that ask for an installed server marked."""
    return [pytest.param(name, marks=[pytest.mark.server] if name in INSTALLED else []) for name in names]


on_servers = pytest.mark.parametrize("road", _named(SERVERS), indirect=True)
"""For what a file has not: a connection that breaks."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up nothing that a slow machine would still do: the limits of a closing are for a store that is gone."""
    monkeypatch.setattr(engine, "_CALL_LIMIT", 20.0)
    monkeypatch.setattr(releases, "RELEASE_LIMIT", 15.0)


@pytest.fixture(params=_named(STORES))
async def road(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Road]:
    async with STORES[request.param](request, tmp_path) as road:
        yield road


@pytest.fixture
async def others(road: Road) -> AsyncIterator[LockClient]:
    """A client of the same store that is near to it."""
    async with connect(road.url) as client:
        yield client


async def cancelled(task: asyncio.Task[object]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def granted_soon(client: LockClient) -> None:
    """See that nothing of the closed client stands in the way."""
    began = CLOCK.now()
    async with client.lock("a", ttl=TTL, wait=20):
        took = CLOCK.now() - began
    assert took < SOON, f"granted after {took:.2f} s"


async def in_line(client: LockClient) -> asyncio.Task[Lease]:
    """A task that waits for the lock, and has had the time to stand in line."""
    task = asyncio.create_task(client.lock("a", ttl=TTL).acquire())
    await asyncio.sleep(0.4)
    assert not task.done()
    return task


async def test_a_waiter_that_gives_up_before_its_client_closes_leaves_the_line(road, others):
    holder = await others.lock("a", ttl=TTL).acquire()
    async with connect(road.far_url) as client:
        waiter = await in_line(client)
        road.slow()
        await cancelled(waiter)
        await asyncio.sleep(0.01)  # its leaving is under way
    await holder.release()
    await granted_soon(others)


async def test_a_waiter_whose_client_closes_leaves_the_line(road, others):
    holder = await others.lock("a", ttl=TTL).acquire()
    async with connect(road.far_url) as client:
        waiter = await in_line(client)
        road.slow()
    with contextlib.suppress(Exception):
        await waiter
    await holder.release()
    await granted_soon(others)


@pytest.mark.slow
async def test_a_waiter_that_gives_up_while_it_joins_leaves_the_line(road, others):
    holder = await others.lock("a", ttl=TTL).acquire()
    for moment in (SLOW / 2, 3 * SLOW, 5 * SLOW):
        async with connect(road.far_url) as client:
            road.slow()
            waiter = asyncio.create_task(client.lock("a", ttl=TTL).acquire())
            await asyncio.sleep(moment)
            await cancelled(waiter)
            await asyncio.sleep(0.01)
    await holder.release()
    await granted_soon(others)


async def test_a_request_that_is_given_up_before_its_client_closes_leaves_no_grant(road, others):
    async with connect(road.far_url) as client:
        async with client.lock("b", ttl=TTL):
            pass  # connected
        road.slow()
        asking = asyncio.create_task(client.lock("a", ttl=TTL).acquire())
        await asyncio.sleep(SLOW / 2)
        await cancelled(asking)
    await granted_soon(others)


async def test_a_lease_that_is_held_when_its_client_closes_is_released(road, others):
    async with connect(road.far_url) as client:
        lease = await client.lock("a", ttl=TTL).acquire()
        road.slow()
    assert lease.lost_reason is LossReason.CLOSED
    await granted_soon(others)


async def test_a_release_that_is_under_way_when_its_client_closes_is_finished(road, others):
    async with connect(road.far_url) as client:
        lease = await client.lock("a", ttl=TTL).acquire()
        road.slow()
        releasing = asyncio.create_task(lease.release())
        await asyncio.sleep(SLOW / 2)
    await releasing
    await granted_soon(others)


@on_servers
@pytest.mark.parametrize("breaks", ["before it leaves", "while it leaves"])
async def test_a_waiter_whose_connection_breaks_as_its_client_closes_leaves_the_line(road, others, breaks):
    holder = await others.lock("a", ttl=TTL).acquire()
    async with connect(road.far_url) as client:
        waiter = await in_line(client)
        road.slow()
        if breaks == "before it leaves":
            road.cut()
        await cancelled(waiter)
        await asyncio.sleep(SLOW / 2)
        if breaks == "while it leaves":
            road.cut()
    await holder.release()
    await granted_soon(others)


@on_servers
async def test_a_lease_whose_connection_breaks_as_its_client_closes_is_released(road, others):
    async with connect(road.far_url) as client:
        lease = await client.lock("a", ttl=TTL).acquire()
        road.slow()
        asyncio.get_running_loop().call_later(SLOW / 2, road.cut)
    assert lease.lost_reason is LossReason.CLOSED
    await granted_soon(others)


@on_servers
async def test_a_request_whose_connection_breaks_as_its_client_closes_leaves_no_grant(road, others):
    async with connect(road.far_url) as client:
        async with client.lock("b", ttl=TTL):
            pass  # connected
        road.slow()
        asking = asyncio.create_task(client.lock("a", ttl=TTL).acquire())
        await asyncio.sleep(SLOW / 2)
        await cancelled(asking)
        asyncio.get_running_loop().call_later(SLOW, road.cut)  # the request has arrived by then
    await granted_soon(others)
