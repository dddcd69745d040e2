"""
Real etcd servers for tests; a test module asks for them with ``pytest_plugins = ["etcd_fixtures"]``.

A machine without the binary skips these tests and says what to install; with ``CI`` in the environment it fails.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator

import pytest
from etcd_network import PeerNetwork
from etcd_server import BINARY, EtcdCluster, StartEtcd
from fault_proxy import FaultProxy
from required_program import require_program
from throwaway_certificates import Certificates, make_certificates

from fencing_sdk.backends.etcd import EtcdBackend, from_url


def require_etcd(binary: str = BINARY) -> str:
    """Let the test run only where *binary* is; its absence must not go unnoticed in CI."""
    return require_program(binary, "etcd-server openssl")


@pytest.fixture(scope="session")
def etcd_binary() -> str:
    """The path of the server program."""
    return require_etcd()


# Members tell each other all the time that they are alive, and a new cluster is quick: so each module has its own.


@pytest.fixture(scope="module")
def _shared_etcd(etcd_binary: str) -> Iterator[EtcdCluster]:
    with EtcdCluster() as cluster:
        yield cluster


@pytest.fixture
def etcd_server(_shared_etcd: EtcdCluster) -> EtcdCluster:
    """The server that the quick tests of a module share, empty; a test that harms it for good takes `start_etcd`."""
    _shared_etcd.heal()
    _shared_etcd.clear()
    return _shared_etcd


@pytest.fixture(scope="module")
def _shared_etcd_cluster(etcd_binary: str) -> Iterator[EtcdCluster]:
    with EtcdCluster(3) as cluster:
        yield cluster


@pytest.fixture
def etcd_cluster(_shared_etcd_cluster: EtcdCluster) -> EtcdCluster:
    """Three members, all well and empty; the test may kill and pause them."""
    _shared_etcd_cluster.heal()
    _shared_etcd_cluster.clear()
    return _shared_etcd_cluster


@pytest.fixture(scope="module")
def _shared_partitioned_etcd(etcd_binary: str) -> Iterator[EtcdCluster]:
    with PeerNetwork() as network, EtcdCluster(3, network=network) as cluster:
        yield cluster


@pytest.fixture
def partitioned_etcd(_shared_partitioned_etcd: EtcdCluster) -> Iterator[EtcdCluster]:
    """Three members, all well and empty, whose `network` the test may cut."""
    cluster = _shared_partitioned_etcd
    cluster.heal()
    cluster.clear()
    yield cluster
    for member in cluster.members:
        sys.stdout.write(f"--- log of {member.name}\n{member.log()[-20_000:]}")  # shown if the test failed


@pytest.fixture
def start_etcd(etcd_binary: str) -> Iterator[StartEtcd]:
    """Start servers that belong to this test alone: ``start_etcd(quota_backend_bytes=2_000_000)``."""
    started: list[EtcdCluster] = []

    def start(members: int = 1, *, tls: Certificates | None = None, **settings: str | int) -> EtcdCluster:
        started.append(EtcdCluster(members, tls=tls, **settings))
        return started[-1].start()

    yield start
    for cluster in started:
        for member in cluster.members:
            sys.stdout.write(f"--- log of {member.name}\n{member.log()[-20_000:]}")  # shown if the test failed
        cluster.close()


@pytest.fixture(scope="session")
def etcd_certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    require_etcd("openssl")
    return make_certificates(tmp_path_factory.mktemp("etcd-certificates"))


@pytest.fixture
async def etcd_proxy(etcd_server: EtcdCluster) -> AsyncIterator[FaultProxy]:
    """A network with faults in front of the shared server."""
    async with FaultProxy(etcd_server.members[0].port) as proxy:
        yield proxy


@pytest.fixture
async def etcd(etcd_server: EtcdCluster) -> AsyncIterator[EtcdBackend]:
    """A backend on the shared server."""
    backend = from_url(etcd_server.url, connect_timeout=20.0)  # a machine may stand still
    yield backend
    await backend.aclose()
