"""The ZooKeeper backend keeps the contract, on one server and on an ensemble of three."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

import pytest
from inside import LAST_CALL
from patience import until
from zookeeper_server import ZooKeeperServer, fresh_root, require_zookeeper

from fencing_sdk.abc import Backend, Busy, Claim, Grant, Holder, Listing, Renewal, Revoked, Waiting
from fencing_sdk.backends.zookeeper import ZooKeeperBackend, from_url
from fencing_sdk.errors import BackendUnavailableError
from fencing_sdk.testing import BackendSuite
from fencing_sdk.testing.promises.under_test import Reopen

pytest_plugins = ["zookeeper_fixtures"]


# What the promises of a backend need of ZooKeeper, alone or as an ensemble: a class to inherit from.


T = TypeVar("T")


class AsksAgain(ZooKeeperBackend):
    """
    A backend whose calls are made again when the connection broke under them, as the engine does.

    A server that owes an answer for a while is left for another connection. A busy machine makes servers owe answers.
    """

    tries = 3

    async def acquire(self, claim: Claim) -> Grant | Busy:
        return await self._again(lambda: super(AsksAgain, self).acquire(claim))

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal | Revoked]:
        return await self._again(lambda: super(AsksAgain, self).renew(claims))

    async def release(self, claim: Claim) -> Renewal | Revoked | None:
        return await self._again(lambda: super(AsksAgain, self).release(claim))

    async def inspect(self, name: str) -> Holder | None:
        return await self._again(lambda: super(AsksAgain, self).inspect(name))

    async def holders(self, name: str) -> Sequence[Holder]:
        return await self._again(lambda: super(AsksAgain, self).holders(name))

    async def list_holders(self, prefix: str, cursor: str | None, limit: int) -> Listing:
        return await self._again(lambda: super(AsksAgain, self).list_holders(prefix, cursor, limit))

    async def list_waiters(self, name: str) -> Sequence[Waiting]:
        return await self._again(lambda: super(AsksAgain, self).list_waiters(name))

    async def _again(self, call: Callable[[], Awaitable[T]]) -> T:
        for _ in range(self.tries - 1):
            with contextlib.suppress(BackendUnavailableError):
                return await call()
        return await call()


def asking_again(url: str) -> ZooKeeperBackend:
    made = from_url(url)
    made.__class__ = AsksAgain
    return made


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

    @pytest.fixture(autouse=True)
    def a_request_may_take_longer_than_the_patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A server of a busy machine stands still for more than a second now and then, which is not a refusal."""
        monkeypatch.setattr(LAST_CALL, 60.0)

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
            assert await session.settled()
            for node in await operator._recipe.look(session, name):
                await operator._recipe.remove(session, operator._recipe.paths.node(name, node))


# The ZooKeeper backend keeps the contract, on one server.


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
