"""The Redis backend keeps the contract: on one server, through Sentinels, and on a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from redis_cluster import Cluster
from redis_server import RedisServer

from fencing_sdk._values.claim import READER, Claim, Held, Permit
from fencing_sdk.abc import Backend
from fencing_sdk.backends.redis import RedisBackend, from_url
from fencing_sdk.errors import BackendRefusedError
from fencing_sdk.testing import BackendSuite
from fencing_sdk.testing.backend_promises.backend_under_test import Reopen

pytest_plugins = ["redis_fixtures"]


@pytest.fixture(scope="module")
def durable_redis(redis_binary: str) -> Iterator[RedisServer]:
    """A server whose data outlives it, for this module."""
    with RedisServer(binary=redis_binary, appendonly=True, appendfsync="always") as server:
        yield server


class TestRedisBackend(BackendSuite):
    queues = hands_over = True
    shares = True
    notices = True
    lists = revokes = True

    @pytest.fixture(autouse=True)
    def server(self, durable_redis: RedisServer) -> RedisServer:
        durable_redis.ask_all(["FLUSHALL"], ["SCRIPT", "FLUSH"])
        self.own_server = durable_redis
        return durable_redis

    @pytest.fixture
    def url(self, server: RedisServer) -> str:
        return server.url

    @pytest.fixture
    def reopen(self, url: str) -> Callable[[], RedisBackend]:
        return lambda: from_url(url)

    @pytest.fixture
    async def backend(self, reopen: Callable[[], RedisBackend]) -> AsyncIterator[RedisBackend]:
        made = reopen()
        yield made
        await made.aclose()

    @asynccontextmanager
    async def break_store(self, backend: Backend) -> AsyncIterator[None]:
        """Kill the server."""
        await asyncio.to_thread(self.own_server.kill)
        try:
            yield
        finally:
            await asyncio.to_thread(self.own_server.start)

    async def restart(self, backend: Backend, reopen: Reopen) -> Backend:
        """Restart the server too, by force."""
        await asyncio.to_thread(self.own_server.kill)
        await asyncio.to_thread(self.own_server.start)
        return await super().restart(backend, reopen)

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
        assert isinstance(outcome, Held)
        assert 0 < outcome.retry_after <= 9.0


@pytest.fixture(scope="module")
def durable_cluster(redis_binary: str) -> Iterator[Cluster]:
    """Three masters whose data outlives them, for this module."""
    with Cluster(binary=redis_binary, appendonly=True, appendfsync="always") as cluster:
        yield cluster


class TestRedisCluster(BackendSuite):
    queues = hands_over = True
    shares = True
    notices = True
    lists = revokes = True

    @pytest.fixture(autouse=True)
    def cluster(self, durable_cluster: Cluster) -> Cluster:
        durable_cluster.heal()
        for node in durable_cluster.nodes:
            node.ask_all(["FLUSHALL"], ["SCRIPT", "FLUSH"])
        self.own_cluster = durable_cluster
        return durable_cluster

    @pytest.fixture
    def url(self, cluster: Cluster) -> str:
        return cluster.url.replace("redis://", "redis+cluster://")

    @pytest.fixture
    def reopen(self, url: str) -> Callable[[], RedisBackend]:
        return lambda: from_url(url)

    @pytest.fixture
    async def backend(self, reopen: Callable[[], RedisBackend]) -> AsyncIterator[RedisBackend]:
        made = reopen()
        yield made
        await made.aclose()

    @asynccontextmanager
    async def break_store(self, backend: Backend) -> AsyncIterator[None]:
        """Kill every server."""
        for node in self.own_cluster.nodes:
            await asyncio.to_thread(node.kill)
        try:
            yield
        finally:
            await asyncio.to_thread(self.own_cluster.heal)

    async def revoke(self, backend: Backend, name: str) -> None:
        """Delete the lease, as an operator would."""
        assert isinstance(backend, RedisBackend)
        key = backend._requests.lease(name)
        await self.own_cluster.node_of(key).command("DEL", key)


async def test_a_server_of_a_cluster_is_not_taken_for_a_single_one(durable_cluster: Cluster):
    backend = from_url(durable_cluster.url)
    with pytest.raises(BackendRefusedError, match=r"redis\+cluster://"):
        await backend.open()
    await backend.aclose()
