"""The verbs of the contract, on one server and on a cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from own_server import OwnServer
from redis_cluster import Cluster
from redis_server import RedisServer

from fencing_sdk.backends.redis import from_url
from fencing_sdk.errors import BackendRefusedError
from fencing_sdk.testing import BackendSuite

pytest_plugins = ["redis_fixtures"]


@pytest.fixture(scope="module")
def one_server(redis_binary: str) -> Iterator[RedisServer]:
    with RedisServer(binary=redis_binary, appendonly=True, appendfsync="always") as server:
        yield server


@pytest.fixture(scope="module")
def one_cluster(redis_binary: str) -> Iterator[Cluster]:
    with Cluster(binary=redis_binary, appendonly=True, appendfsync="always") as cluster:
        yield cluster


class TestRedisBackend(OwnServer, BackendSuite):
    ttl = 0.5
    expiry_lag = 0.05
    passes_on = True

    @pytest.fixture(autouse=True)
    def server(self, one_server: RedisServer) -> RedisServer:
        one_server.ask_all(["FLUSHALL"], ["SCRIPT", "FLUSH"])
        self.own_server = one_server
        return one_server


class TestRedisCluster(TestRedisBackend):
    bell_lag = 0.4

    @pytest.fixture(autouse=True)
    def server(self, one_cluster: Cluster) -> Cluster:
        one_cluster.heal()
        for node in one_cluster.nodes:
            node.ask_all(["FLUSHALL"], ["SCRIPT", "FLUSH"])
        self.own_server = one_cluster
        return one_cluster

    @pytest.fixture
    def url(self, server: Cluster) -> str:
        return server.url.replace("redis://", "redis+cluster://")

    restart = BackendSuite.restart  # by the client alone: a cluster takes seconds to come back

    def kill(self) -> None:
        for node in self.own_server.nodes:
            node.kill()

    def start(self) -> None:
        self.own_server.heal()


async def test_a_server_of_a_cluster_is_not_taken_for_a_single_one(one_cluster: Cluster):
    backend = from_url(one_cluster.url)
    with pytest.raises(BackendRefusedError, match=r"redis\+cluster://"):
        await backend.open()
    await backend.aclose()
