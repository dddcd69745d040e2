"""The ZooKeeper backend keeps the contract: on one server, and on an ensemble of three."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from zookeeper_server import ZooKeeperServer, fresh_root, require_zookeeper

from fencing_sdk.abc import Backend
from fencing_sdk.backends.zookeeper import ZooKeeperBackend, from_url
from fencing_sdk.testing import BackendSuite
from fencing_sdk.testing.backend_promises.backend_under_test import Reopen

pytest_plugins = ["zookeeper_fixtures"]


@pytest.fixture(scope="module")
def own_zookeeper() -> Iterator[ZooKeeperServer]:
    """A server for this module, which the tests kill."""
    require_zookeeper()
    with ZooKeeperServer() as server:
        yield server


class Bench(BackendSuite):
    queues = True
    shares = True
    notices = True
    lists = revokes = True
    keeps_alone = False  # a node lasts as long as its session, whose timeout was fixed when it began
    expiry_lag = 0.5
    patience = 30.0

    @pytest.fixture
    def reopen(self, url: str) -> Callable[[], ZooKeeperBackend]:
        return lambda: from_url(url)

    @pytest.fixture
    async def backend(self, reopen: Callable[[], ZooKeeperBackend]) -> AsyncIterator[ZooKeeperBackend]:
        made = reopen()
        yield made
        await made.aclose()

    async def revoke(self, backend: Backend, name: str) -> None:
        """Delete the node, as an operator would, by way of another session."""
        assert isinstance(backend, ZooKeeperBackend)
        operator = from_url(self.own_url)
        session = operator._sessions.any()
        await session.ready()
        for node in await operator._recipe.look(session, name):
            await operator._recipe.remove(session, operator._recipe.paths.node(name, node))
        await operator.aclose()


class TestZooKeeperBackend(Bench):
    @pytest.fixture(autouse=True)
    def url(self, own_zookeeper: ZooKeeperServer) -> str:
        self.own_server = own_zookeeper
        self.own_url = f"{own_zookeeper.url}{fresh_root()}?connect_timeout=0.5"
        return self.own_url

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
