"""
Real ZooKeeper servers for tests; a test module asks for them with ``pytest_plugins = ["zookeeper_fixtures"]``.

A machine without them skips these tests and says what to install; with ``CI`` in the environment it fails.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Protocol

import pytest
from fault_proxy import FaultProxy
from zookeeper_server import ZooKeeperEnsemble, ZooKeeperServer, fresh_root, require_zookeeper


class StartZooKeeper(Protocol):
    def __call__(self, *, settings: Sequence[str] = (), jvm: Sequence[str] = ()) -> ZooKeeperServer: ...


@pytest.fixture(scope="session")
def _shared_zookeeper() -> Iterator[ZooKeeperServer]:
    require_zookeeper()
    with ZooKeeperServer() as server:
        yield server


@pytest.fixture
def zookeeper_server(_shared_zookeeper: ZooKeeperServer) -> ZooKeeperServer:
    """The one server that all quick tests share; use `fresh_root`. A test may kill or pause it."""
    if not _shared_zookeeper.running:
        _shared_zookeeper.start()
    _shared_zookeeper.resume()
    return _shared_zookeeper.await_ready()


@pytest.fixture
def zookeeper_url(zookeeper_server: ZooKeeperServer) -> str:
    """The URL of an empty store on the shared server."""
    return f"{zookeeper_server.url}{fresh_root()}"


@pytest.fixture
def start_zookeeper() -> Iterator[StartZooKeeper]:
    """Start servers that belong to this test alone."""
    require_zookeeper()
    servers: list[ZooKeeperServer] = []

    def start(*, settings: Sequence[str] = (), jvm: Sequence[str] = ()) -> ZooKeeperServer:
        servers.append(ZooKeeperServer(settings=settings, jvm=jvm))
        return servers[-1].start()

    yield start
    for server in servers:
        sys.stdout.write(f"--- log of the server on port {server.port}\n{server.log()}")  # shown if the test failed
        server.close()


@pytest.fixture
async def zookeeper_proxy(zookeeper_server: ZooKeeperServer) -> AsyncIterator[FaultProxy]:
    """A network with faults in front of the shared server."""
    async with FaultProxy(zookeeper_server.port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def _shared_ensemble() -> Iterator[ZooKeeperEnsemble]:
    require_zookeeper()
    with ZooKeeperEnsemble() as ensemble:
        yield ensemble


@pytest.fixture
def zookeeper_ensemble(_shared_ensemble: ZooKeeperEnsemble) -> ZooKeeperEnsemble:
    """Three members, all well; a test may harm all of them."""
    _shared_ensemble.heal()
    return _shared_ensemble
