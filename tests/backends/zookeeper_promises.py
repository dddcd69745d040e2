"""What the promises of a backend need of ZooKeeper, alone or as an ensemble: a class to inherit from."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import pytest
from patience import until

from fencing_sdk.abc import Backend
from fencing_sdk.backends.zookeeper import ZooKeeperBackend
from fencing_sdk.testing import BackendSuite


class ZooKeeperPromises(BackendSuite):
    """A subclass provides `make`, the fixture ``url``, and in ``own_url`` the same."""

    make: Callable[[str], ZooKeeperBackend]
    own_url: str

    queues = True
    shares = True
    notices = True
    lists = revokes = True
    keeps_alone = False  # a node lasts as long as its session, whose timeout was fixed when it began
    expiry_lag = 4.0  # the client deletes the node at once; the rest is for a machine that stands still
    patience = 60.0

    @pytest.fixture
    def reopen(self, url: str) -> Callable[[], ZooKeeperBackend]:
        self.made: list[ZooKeeperBackend] = []

        def make() -> ZooKeeperBackend:
            self.made.append(self.make(url))
            return self.made[-1]

        return make

    @pytest.fixture
    async def backend(self, reopen: Callable[[], ZooKeeperBackend]) -> AsyncIterator[ZooKeeperBackend]:
        made = reopen()
        yield made
        await made.aclose()

    async def expire(self, ttl: float) -> None:
        """Let the ttl pass, and the clients see the nodes deleted whose grants have ended."""
        await self.pass_time(ttl)
        own_nodes = [backend._own_nodes for backend in self.made]
        await until(
            lambda: all(node.held or node.ends_at is None for nodes in own_nodes for node in nodes.all()),
            what="the nodes are deleted",
            within=self.patience,
        )

    async def revoke(self, backend: Backend, name: str) -> None:
        """Delete the node, as an operator would, by way of another session, perhaps on another member."""
        async with aclosing(self.make(self.own_url)) as operator:
            session = operator._sessions.any()
            await session.ready()
            for node in await operator._recipe.look(session, name):
                await operator._recipe.remove(session, operator._recipe.paths.node(name, node))
