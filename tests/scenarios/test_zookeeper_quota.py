"""A quota on the root that is used up: ZooKeeper enforces it from 3.7 on, if ``zookeeper.enforceQuota`` is set."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from kazoo.client import KazooClient
from stays import opened
from zookeeper_server import ZooKeeperServer, fresh_root, require_zookeeper
from zookeeper_stage import operating

from fencing_sdk._values.claim import Claim, Grant, Held, Renewal
from fencing_sdk.backends.zookeeper import from_url
from fencing_sdk.errors import BackendRefusedError

pytest_plugins = ["zookeeper_fixtures"]

SetQuota = Callable[[str], None]


@pytest.fixture(scope="module")
def _strict_server() -> Iterator[ZooKeeperServer]:
    require_zookeeper()
    with ZooKeeperServer(jvm=["-Dzookeeper.enforceQuota=true"]) as server:
        yield server


@pytest.fixture
def strict_url(_strict_server: ZooKeeperServer) -> str:
    return f"{_strict_server.url}{fresh_root()}"


@pytest.fixture
def set_quota(_strict_server: ZooKeeperServer, strict_url: str) -> Iterator[SetQuota]:
    """``setquota -N`` or ``-B`` of ZooKeeper's shell: a hard limit, such as ``count=3``, on the root of the test."""
    folder = f"/zookeeper/quota/{strict_url.rpartition('/')[2]}"
    client = KazooClient(_strict_server.address)
    client.start()

    def set_quota(limit: str) -> None:
        kind, _, number = limit.partition("=")
        hard = {"count": -1, "byte": -1, kind: int(number)}
        data = f"count=-1,bytes=-1=;byteHardLimit={hard['byte']};countHardLimit={hard['count']}".encode()
        if client.exists(folder):
            client.set(f"{folder}/zookeeper_limits", data)
        else:
            client.create(f"{folder}/zookeeper_limits", data, makepath=True)
            client.create(f"{folder}/zookeeper_stats", b"count=0,bytes=0")
            client.set(f"{folder}/zookeeper_limits", data)

    yield set_quota
    client.stop()
    client.close()


@pytest.mark.parametrize("limit", ["count=3", "byte=20"])
async def test_who_is_above_the_quota_is_refused_and_leaves_nothing_behind(limit, strict_url, set_quota):
    """The root, the folder and the node of the holder are allowed, and 20 bytes of data: not a second node."""
    backend, other, claim, waiter = from_url(strict_url), from_url(strict_url), Claim("a", 20.0), Claim("a", 20.0)
    async with operating(strict_url) as operator:
        assert isinstance(await backend.acquire(claim), Grant)
        line = await operator.line("a")
        await asyncio.to_thread(set_quota, limit)
        with pytest.raises(BackendRefusedError, match="quota of the root is used up"):
            await other.acquire(waiter)
        with pytest.raises(BackendRefusedError, match="quota of the root is used up"):
            async with other.queue(waiter):
                pytest.fail("there is no place for it")
        assert await operator.line("a") == line
        assert await backend.renew([claim]) == [Renewal.RENEWED]
        await backend.release(claim)
        assert isinstance(await other.acquire(waiter), Grant)
    await other.aclose()
    await backend.aclose()


async def test_a_lock_for_which_there_is_no_folder_left_is_refused_until_the_quota_is_lifted(strict_url, set_quota):
    async with opened(strict_url) as (locks, _), operating(strict_url) as operator:
        async with locks.lock("a", ttl=20):
            await asyncio.to_thread(set_quota, "count=3")
            with pytest.raises(BackendRefusedError, match="quota of the root is used up"):
                await locks.lock("b", ttl=20).acquire()
            assert not await operator.has_folder("b")
            await asyncio.to_thread(set_quota, "count=9")
            async with locks.lock("b", ttl=20):
                pass


async def test_a_waiter_that_finds_a_place_again_when_the_quota_is_lifted_keeps_it(strict_url, set_quota):
    backend, other, claim, waiter = from_url(strict_url), from_url(strict_url), Claim("a", 20.0), Claim("a", 20.0)
    await backend.acquire(claim)
    await asyncio.to_thread(set_quota, "count=3")
    with pytest.raises(BackendRefusedError):
        await other.acquire(waiter)
    await asyncio.to_thread(set_quota, "count=9")
    async with other.queue(waiter) as turn:
        assert isinstance(await other.acquire(waiter), Held)
        await backend.release(claim)
        async with asyncio.timeout(60):
            await turn.wait()
        assert isinstance(await other.acquire(waiter), Grant)
    await other.release(waiter)
    await other.aclose()
    await backend.aclose()
