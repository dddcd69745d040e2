"""The Redis backend keeps the contract: on one server and on a cluster, for clients of several versions."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import redis.asyncio
from inside import holder_of
from own_server import OwnServer
from redis_cluster import Cluster
from redis_server import RedisServer
from stays import PATIENCE, opened

from fencing_sdk.abc import READER, Backend, Busy, Claim, Permit
from fencing_sdk.backends.redis import RedisBackend, from_url
from fencing_sdk.errors import BackendRefusedError
from fencing_sdk.testing import BackendSuite

pytest_plugins = ["redis_fixtures"]


# The Redis backend keeps the contract: on one server, through Sentinels, and on a cluster.


@pytest.fixture(scope="module")
def durable_redis(redis_binary: str) -> Iterator[RedisServer]:
    """A server whose data outlives it, for this module."""
    with RedisServer(binary=redis_binary, appendonly=True, appendfsync="always") as server:
        yield server


class TestRedisBackend(OwnServer, BackendSuite):
    queues = hands_over = True
    shares = True
    notices = True
    lists = revokes = transfers = True

    @pytest.fixture(autouse=True)
    def server(self, durable_redis: RedisServer) -> RedisServer:
        durable_redis.ask_all(["FLUSHALL"], ["SCRIPT", "FLUSH"])
        self.own_server = durable_redis
        return durable_redis

    async def revoke(self, backend: Backend, name: str) -> None:
        """Delete the lease, as an operator would."""
        assert isinstance(backend, RedisBackend)
        await self.own_server.command("DEL", backend._requests.lease(name))

    async def test_a_reader_is_refused_in_the_millisecond_in_which_the_last_permit_ends(self, backend: RedisBackend):
        """The permits are counted by another clock than the one by which the server lets their lease expire."""
        permit = Claim("a", 9.0, "permit", mode=Permit(2))
        await backend.acquire(permit)
        await self.own_server.command("DEL", backend._requests.acquire(permit).keys[4])
        outcome = await backend.acquire(Claim("a", 9.0, "reader", mode=READER))
        assert isinstance(outcome, Busy)
        assert 0 < outcome.retry_after <= 9.0


@pytest.fixture(scope="module")
def durable_cluster(redis_binary: str) -> Iterator[Cluster]:
    """Three masters whose data outlives them, for this module."""
    with Cluster(binary=redis_binary, appendonly=True, appendfsync="always") as cluster:
        yield cluster


class TestRedisCluster(OwnServer, BackendSuite):
    queues = hands_over = True
    shares = True
    notices = True
    lists = revokes = transfers = True

    @pytest.fixture(autouse=True)
    def server(self, durable_cluster: Cluster) -> Cluster:
        durable_cluster.heal()
        for node in durable_cluster.nodes:
            node.ask_all(["FLUSHALL"], ["SCRIPT", "FLUSH"])
        self.own_server = durable_cluster
        return durable_cluster

    @pytest.fixture
    def url(self, server: Cluster) -> str:
        return server.url.replace("redis://", "redis+cluster://")

    restart = BackendSuite.restart  # by the client alone: a cluster takes seconds to come back

    def kill(self) -> None:
        for node in self.own_server.nodes:
            node.kill()

    def start(self) -> None:
        self.own_server.heal()

    async def revoke(self, backend: Backend, name: str) -> None:
        """Delete the lease, as an operator would."""
        assert isinstance(backend, RedisBackend)
        key = backend._requests.lease(name)
        await self.own_server.node_of(key).command("DEL", key)


async def test_a_server_of_a_cluster_is_not_taken_for_a_single_one(durable_cluster: Cluster):
    backend = from_url(durable_cluster.url)
    with pytest.raises(BackendRefusedError, match=r"redis\+cluster://"):
        await backend.open()
    await backend.aclose()


# Clients of several versions hold and wait for the same locks: what they write is read as they wrote it.


LEASE, LAST, LINE, SIGNS = (f"{{fencing:a}}:{key}" for key in "ltqw")
OWNER, CHANNEL, TICKET = "5e2a64fecf718495e9acf4185b4bbdbc", "{fencing}:wake:c13f97af32284b399f0453db61ad602f", "42"


async def test_the_lease_of_a_client_of_another_version_is_waited_for_and_shown(redis_server):
    await redis_server.command("SET", LAST, "1795678693419940")
    await redis_server.command("SET", LEASE, f"{OWNER}\x001795678693419940\x00=worker 3", "PX", 700)
    async with opened(redis_server.url) as (locks, _):
        holder = await locks.inspect("a")
        assert holder is None or (holder.id, holder.label) == (holder_of(OWNER), "worker 3")
        async with locks.lock("a", wait=PATIENCE) as lease:
            assert lease.token > 1795678693419940


async def test_a_waiter_of_another_version_is_handed_the_lock_by_a_release(redis_server):
    client = redis.asyncio.Redis.from_url(redis_server.url)
    hears = client.pubsub()
    await hears.subscribe(CHANNEL)
    assert await hears.get_message(timeout=PATIENCE)  # it listens
    async with opened(redis_server.url) as (locks, _):
        async with locks.lock("a", wait=PATIENCE, ttl=60) as lease:
            soon = time.time_ns() // 1_000_000 + 2_500  # so that the sign is fresh also if this machine stands still
            sign = f"{soon} direct lock 0 4194193 15000 {TICKET} PUBLISH {CHANNEL}\0=worker 3"
            await redis_server.command("HSET", SIGNS, OWNER, sign)
            await redis_server.command("ZADD", LINE, 1, OWNER)
            last = lease.token
        owner, token, label = (await redis_server.command("GET", LEASE)).split("\0")
        assert (owner, label) == (OWNER, "=worker 3")
        assert int(token) > last
        message = await hears.get_message(timeout=PATIENCE)
        assert message["data"].decode() == f"{TICKET} 4194193 {token}"
    await hears.aclose()
    await client.aclose()


async def test_a_waiter_of_a_version_that_gives_other_signs_holds_up_no_one(redis_server):
    """It finds the lock free, or held, when it asks by itself."""
    async with opened(redis_server.url) as (locks, _):
        async with locks.lock("a", wait=PATIENCE, ttl=60) as lease:
            await redis_server.command("ZADD", LINE, 1, OWNER)
            last = lease.token
        async with locks.lock("a", wait=PATIENCE) as lease:
            assert lease.token > last
