"""The etcd backend keeps the contract, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from etcd_server import EtcdCluster

from fencing_sdk.abc import Backend
from fencing_sdk.backends.etcd import EtcdBackend, from_url
from fencing_sdk.testing import BackendSuite
from fencing_sdk.testing.backend_promises.backend_under_test import Reopen

pytest_plugins = ["etcd_fixtures"]


@pytest.fixture(scope="module")
def own_etcd(etcd_binary: str) -> Iterator[EtcdCluster]:
    """A server for this module, which is killed and started again."""
    with EtcdCluster() as cluster:
        yield cluster


class TestEtcdBackend(BackendSuite):
    queues = True
    shares = True
    notices = True
    lists = revokes = True
    ttl = 0.5
    expiry_lag = 1.5  # a lease of whole seconds is half a second longer, and etcd looks twice a second
    patience = 20.0

    @pytest.fixture(autouse=True)
    def server(self, own_etcd: EtcdCluster) -> EtcdCluster:
        own_etcd.clear()
        self.own_server = own_etcd
        return own_etcd

    @pytest.fixture
    def url(self, server: EtcdCluster) -> str:
        return server.url

    @pytest.fixture
    def reopen(self, url: str) -> Callable[[], EtcdBackend]:
        return lambda: from_url(url)

    @pytest.fixture
    async def backend(self, reopen: Callable[[], EtcdBackend]) -> AsyncIterator[EtcdBackend]:
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
        """Delete the keys of the lock, as an operator does."""
        assert isinstance(backend, EtcdBackend)
        await asyncio.to_thread(self.own_server.delete, backend._keys.line(name)[0].decode())

    async def purge(self, backend: Backend) -> None:
        """Let etcd forget its history."""
        await asyncio.to_thread(self.own_server.compact)
