"""The quorum of Redis masters keeps the contract: with three and five nodes, all up or as many down as may be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager

import pytest
from patience import until
from redis_quorum import Quorum
from redis_server import RedisServer

from fencing_sdk.abc import Backend
from fencing_sdk.backends.redis.quorum import RedisQuorumBackend, from_url
from fencing_sdk.testing import BackendSuite
from fencing_sdk.testing.backend_promises.backend_under_test import DRIFT, Reopen

pytest_plugins = ["redis_fixtures"]


@pytest.fixture(scope="module")
def three_nodes(redis_binary: str) -> Iterator[Quorum]:
    """Three masters whose data outlives them, for this module."""
    with Quorum(3, binary=redis_binary, appendonly=True, appendfsync="always") as quorum:
        yield quorum


@pytest.fixture(scope="module")
def five_nodes(redis_binary: str) -> Iterator[Quorum]:
    """Five masters whose data outlives them, for this module."""
    with Quorum(5, binary=redis_binary, appendonly=True, appendfsync="always") as quorum:
        yield quorum


class QuorumSuite(BackendSuite):
    queues = True
    notices = True
    lists = revokes = True
    expiry_lag = 3.0
    """The holds of a grant end one after the other, as they began, and a try in between is undone first: so is one
    that a node does not answer at once, on a busy machine."""
    stopped = 0
    """Nodes that are down throughout."""

    @pytest.fixture
    async def quorum(self, three_nodes: Quorum) -> Quorum:
        await three_nodes.fresh()
        self.stop_some(three_nodes)
        return three_nodes

    def stop_some(self, quorum: Quorum) -> None:
        self.own_quorum = quorum
        self.up = quorum.nodes[self.stopped :]
        for node in quorum.nodes[: self.stopped]:
            node.kill()

    @pytest.fixture
    def url(self, quorum: Quorum) -> str:
        return quorum.url

    @pytest.fixture
    def reopen(self, url: str) -> Callable[[], RedisQuorumBackend]:
        return lambda: from_url(url)

    @pytest.fixture
    async def backend(self, reopen: Callable[[], RedisQuorumBackend]) -> AsyncIterator[RedisQuorumBackend]:
        async with aclosing(reopen()) as made:
            await self.all_vote(made)
            yield made

    async def expire(self, ttl: float) -> None:
        """Wait until the holds have ended on every node: on a busy machine some nodes begin a ttl later than others."""
        await self.pass_time(ttl * (1 + DRIFT))
        within = self.expiry_lag + self.patience
        await until(lambda: not any(_ends_within(node, ttl) for node in self.up), what="no hold is left", within=within)

    @asynccontextmanager
    async def break_store(self, backend: Backend) -> AsyncIterator[None]:
        """Kill nodes until the others are no majority, when all of them have what was granted."""
        await self.granted_everywhere()
        killed = self.up[: len(self.up) - self.own_quorum.majority + 1]
        for node in killed:
            await asyncio.to_thread(node.kill)
        try:
            yield
        finally:
            for node in killed:
                await asyncio.to_thread(node.start)

    async def restart(self, backend: Backend, reopen: Reopen) -> Backend:
        """Restart the nodes too, by force, when all of them have what was granted."""
        await self.granted_everywhere()
        for node in self.up:
            await asyncio.to_thread(node.kill)
        for node in self.up:
            await asyncio.to_thread(node.start)
        restarted = await super().restart(backend, reopen)
        await self.all_vote(restarted)
        return restarted

    async def all_vote(self, backend: Backend) -> None:
        """Wait until the client knows all nodes that are up: an open client may know a majority, and asks no others."""
        await until(lambda: _voters(backend) == len(self.up), what="all nodes vote that are up")

    async def granted_everywhere(self) -> None:
        """Wait for the nodes that a grant did not wait for: one that never hears of it is given a hold later."""
        await until(lambda: len({_holds(node) for node in self.up}) == 1, what="all nodes have the same holds")

    async def revoke(self, backend: Backend, name: str) -> None:
        """Delete the holds of a majority, as an operator would."""
        assert isinstance(backend, RedisQuorumBackend)
        for node in self.up:
            await node.command("DEL", backend._requests.hold(name))


def _voters(backend: Backend) -> int:
    assert isinstance(backend, RedisQuorumBackend)
    voters = backend._nodes.voters()
    return 0 if voters is None else len(voters.nodes)


def _holds(node: RedisServer) -> frozenset[object]:
    """The keys of the locks that are held on *node*."""
    return frozenset(node.ask("KEYS", "*}:h"))


def _ends_within(node: RedisServer, seconds: float) -> bool:
    """Whether a lock is held on *node* that ends in so many seconds at most."""
    lefts = node.ask_all(*(["PTTL", hold] for hold in node.ask("KEYS", "*}:h")))
    return any(0 <= left <= seconds * 1000 for left in lefts)


class TestThreeNodes(QuorumSuite):
    """All nodes are up."""


@pytest.mark.campaign(only=True)  # as few nodes as may be are up in five of which two are down, too
class TestThreeNodesOneDown(QuorumSuite):
    stopped = 1


class OnFiveNodes(QuorumSuite):
    @pytest.fixture
    async def quorum(self, five_nodes: Quorum) -> Quorum:
        await five_nodes.fresh()
        self.stop_some(five_nodes)
        return five_nodes


@pytest.mark.campaign(only=True)  # between three nodes that are up and five of which two are down there is little room
class TestFiveNodes(OnFiveNodes):
    """All nodes are up."""


class TestFiveNodesTwoDown(OnFiveNodes):
    stopped = 2
