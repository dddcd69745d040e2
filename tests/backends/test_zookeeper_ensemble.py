"""The ZooKeeper backend keeps the contract on an ensemble of three."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from zookeeper_server import ZooKeeperEnsemble, fresh_root

from fencing_sdk.abc import Backend
from fencing_sdk.backends.zookeeper import ZooKeeperBackend, from_url
from fencing_sdk.testing import BackendSuite

pytest_plugins = ["zookeeper_fixtures"]


class TestZooKeeperEnsemble(BackendSuite):
    queues = True
    shares = True
    lists = revokes = True
    notices = True
    keeps_alone = False  # a node lasts as long as its session, whose timeout was fixed when it began
    ttl = 3.0
    """A connection that owes an answer for a twelfth of it is left, so that a busy machine must not need as long."""
    expiry_lag = 0.5
    patience = 30.0

    @pytest.fixture(autouse=True)
    def url(self, zookeeper_ensemble: ZooKeeperEnsemble) -> str:
        self.own_ensemble = zookeeper_ensemble
        self.own_url = f"{zookeeper_ensemble.url}{fresh_root()}?connect_timeout=0.5"
        return self.own_url

    @pytest.fixture
    def reopen(self, url: str) -> Callable[[], ZooKeeperBackend]:
        return lambda: from_url(url)

    @pytest.fixture
    async def backend(self, reopen: Callable[[], ZooKeeperBackend]) -> AsyncIterator[ZooKeeperBackend]:
        made = reopen()
        yield made
        await made.aclose()

    @asynccontextmanager
    async def break_store(self, backend: Backend) -> AsyncIterator[None]:
        """Kill all members."""
        for member in self.own_ensemble.members:
            await asyncio.to_thread(member.kill)
        try:
            yield
        finally:
            await asyncio.to_thread(self.own_ensemble.heal)

    async def revoke(self, backend: Backend, name: str) -> None:
        """Delete the node by way of another session, perhaps on another member."""
        assert isinstance(backend, ZooKeeperBackend)
        operator = from_url(self.own_url)
        session = operator._sessions.any()
        await session.ready()
        for node in await operator._recipe.look(session, name):
            await operator._recipe.remove(session, operator._recipe.paths.node(name, node))
        await operator.aclose()
