"""
Real Redis servers for tests; a test module asks for them with ``pytest_plugins = ["redis_fixtures"]``.

A machine without the binaries skips these tests and says what to install; with ``CI`` in the environment it fails.
``FENCING_TEST_REDIS_SERVERS`` names more binaries, separated by colons, on which all of them run as well; those may
lack TLS.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Protocol

import pytest
from fault_proxy import FaultProxy
from inside import LAST_CALL
from redis_cluster import Cluster
from redis_quorum import Quorum
from redis_sentinels import Sentinels
from redis_server import RedisServer, ServerError, Setting, version_of
from required_program import require_program
from throwaway_certificates import Certificates, make_certificates

BINARIES = ["redis-server", *filter(None, os.environ.get("FENCING_TEST_REDIS_SERVERS", "").split(os.pathsep))]


def require(binary: str) -> str:
    """Let the test run only where *binary* is."""
    return require_program(binary, "redis-server redis-sentinel openssl")


class StartRedis(Protocol):
    def __call__(self, *, tls: Certificates | None = None, **settings: Setting) -> RedisServer: ...


def _called(binary: str) -> str:
    version = version_of(binary) if shutil.which(binary) else ()
    return "-".join([Path(binary).name, ".".join(map(str, version))])


@pytest.fixture(scope="session", params=BINARIES, ids=_called)
def redis_binary(request: pytest.FixtureRequest) -> str:
    """The path of the server program."""
    return require(request.param)


@pytest.fixture(scope="session")
def _shared_redis(redis_binary: str) -> Iterator[RedisServer]:
    with RedisServer(binary=redis_binary) as server:
        yield server


@pytest.fixture
def redis_server(_shared_redis: RedisServer) -> RedisServer:
    """The one server that all quick tests share, empty, without scripts; a test that harms it takes `start_redis`."""
    if not _shared_redis.running:
        _shared_redis.start()
    _shared_redis.resume()
    _shared_redis.ask_all(["FLUSHALL"], ["SCRIPT", "FLUSH"], ["CLIENT", "UNPAUSE"])
    return _shared_redis


@pytest.fixture
def start_redis(redis_binary: str) -> Iterator[StartRedis]:
    """Start servers that belong to this test alone: ``start_redis(appendonly=True, appendfsync="always")``."""
    servers: list[RedisServer] = []

    def start(*, tls: Certificates | None = None, **settings: Setting) -> RedisServer:
        servers.append(RedisServer(binary=redis_binary, tls=tls, **settings))
        return servers[-1].start()

    yield start
    for server in servers:
        sys.stdout.write(f"--- log of the server on port {server.port}\n{server.log()}")  # shown if the test failed
        server.close()


@pytest.fixture(scope="session")
def certificates(redis_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """For TLS: ``start_redis(tls=certificates)``, then ``server.tls_url``."""
    require("openssl")
    made = make_certificates(tmp_path_factory.mktemp("certificates"))
    try:
        with RedisServer(binary=redis_binary, tls=made):
            return made
    except ServerError:
        if redis_binary == shutil.which(BINARIES[0]):
            raise
        pytest.skip(f"{redis_binary} was built without TLS")


@pytest.fixture
def answers_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine stands still for more than a second now and then: an attempt without patience waits for that."""
    monkeypatch.setattr(LAST_CALL, 60.0)


@pytest.fixture
async def proxy(redis_server: RedisServer) -> AsyncIterator[FaultProxy]:
    """A network with faults in front of the shared server."""
    async with FaultProxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def _shared_sentinels(redis_binary: str) -> Iterator[Sentinels]:
    with Sentinels(binary=redis_binary) as sentinels:
        yield sentinels


@pytest.fixture
def redis_sentinels(_shared_sentinels: Sentinels) -> Sentinels:
    """Three Sentinels, a master and a replica, all well and without data; the test may harm all of them."""
    _shared_sentinels.heal()
    _shared_sentinels.master.ask("FLUSHALL")
    return _shared_sentinels


@pytest.fixture(scope="session")
def _shared_cluster(redis_binary: str) -> Iterator[Cluster]:
    with Cluster(binary=redis_binary) as cluster:
        yield cluster


@pytest.fixture
def redis_cluster(_shared_cluster: Cluster) -> Cluster:
    """Three masters, all well and without data; the test may move slots, and kill or pause nodes."""
    _shared_cluster.heal()
    for node in _shared_cluster.nodes:
        node.ask_all(["FLUSHALL"], ["SCRIPT", "FLUSH"])
    return _shared_cluster


@pytest.fixture(scope="session")
def _shared_quorum(redis_binary: str) -> Iterator[Quorum]:
    with Quorum(3, binary=redis_binary, appendonly=True) as quorum:
        yield quorum


@pytest.fixture
async def redis_quorum(_shared_quorum: Quorum) -> Quorum:
    """Three independent masters, all well, without data and founded; the test may harm all of them."""
    await _shared_quorum.fresh()
    return _shared_quorum
