"""The ZooKeeper backend keeps the contract, on one server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from zookeeper_promises import AsksAgain, ZooKeeperPromises, asking_again
from zookeeper_server import ZooKeeperServer, fresh_root, require_zookeeper

from fencing_sdk.abc import Backend
from fencing_sdk.backends.zookeeper import ZooKeeperBackend
from fencing_sdk.testing import BackendSuite
from fencing_sdk.testing.backend_promises.backend_under_test import Reopen

pytest_plugins = ["zookeeper_fixtures"]


@pytest.fixture(scope="module")
def own_zookeeper() -> Iterator[ZooKeeperServer]:
    """A server for this module, which the tests kill."""
    require_zookeeper()
    with ZooKeeperServer() as server:
        yield server


class TestZooKeeperBackend(ZooKeeperPromises, BackendSuite):
    make = staticmethod(asking_again)

    @pytest.fixture(autouse=True)
    def url(self, own_zookeeper: ZooKeeperServer) -> str:
        self.own_server = own_zookeeper
        self.own_url = f"{own_zookeeper.url}{fresh_root()}?connect_timeout=0.5"
        return self.own_url

    @asynccontextmanager
    async def break_store(self, backend: ZooKeeperBackend) -> AsyncIterator[None]:
        """Kill the server, and ask in vain once only: each time takes a second."""
        assert isinstance(backend, AsksAgain)
        await asyncio.to_thread(self.own_server.kill)
        backend.tries = 1
        try:
            yield
        finally:
            await asyncio.to_thread(self.own_server.start)
            backend.tries = AsksAgain.tries

    async def restart(self, backend: Backend, reopen: Reopen) -> Backend:
        """Restart the server too, by force."""
        await asyncio.to_thread(self.own_server.kill)
        await asyncio.to_thread(self.own_server.start)
        return await super().restart(backend, reopen)
