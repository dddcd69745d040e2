"""
A Kahuna cluster for tests; a test module asks for it with ``pytest_plugins = ["kahuna_fixtures"]``.

It is a stand-in, because a real one needs .NET. ``FENCING_TEST_KAHUNA_URL``, one URL such as ``http://localhost:2070``
or several with commas between them, puts those nodes behind it, and the very same tests run against a real Kahuna.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from kahuna_server import UPSTREAMS, KahunaServer

from fencing_sdk.backends.kahuna import KahunaBackend, from_url


@pytest.fixture(scope="session")
def _shared_kahuna(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KahunaServer]:
    with KahunaServer(tmp_path_factory.mktemp("kahuna"), upstreams=UPSTREAMS) as server:
        yield server


@pytest.fixture
def kahuna_server(_shared_kahuna: KahunaServer) -> KahunaServer:
    """One node, empty and without faults."""
    _shared_kahuna.reset()
    return _shared_kahuna


@pytest.fixture(scope="session")
def _shared_kahuna_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KahunaServer]:
    with KahunaServer(tmp_path_factory.mktemp("kahuna-cluster"), nodes=3, upstreams=UPSTREAMS) as server:
        yield server


@pytest.fixture
def kahuna_cluster(_shared_kahuna_cluster: KahunaServer) -> Iterator[KahunaServer]:
    """Three nodes; what a test takes down comes up again."""
    _shared_kahuna_cluster.reset()
    yield _shared_kahuna_cluster
    _shared_kahuna_cluster.kill()  # an own process for each test: nodes that are down, connections that hang


@pytest.fixture
async def kahuna(kahuna_server: KahunaServer) -> AsyncIterator[KahunaBackend]:
    """A backend on the one node."""
    backend = from_url(kahuna_server.url, connect_timeout=20.0)
    yield backend
    await backend.aclose()
