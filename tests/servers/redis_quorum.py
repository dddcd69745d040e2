"""Independent Redis masters that a quorum is founded on."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, ExitStack
from types import TracebackType
from typing import Self

from fault_proxy import FaultProxy
from local_ports import HOST
from redis_server import RedisServer, Setting


class Quorum:
    """``with Quorum(5, appendonly=True, appendfsync="always") as quorum``: settings go to every node."""

    def __init__(self, nodes: int = 3, *, binary: str = "redis-server", **settings: Setting) -> None:
        self.nodes = [RedisServer(binary=binary, tls=None, **settings) for _ in range(nodes)]
        self.majority = nodes // 2 + 1
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for node in self.nodes:
                stack.enter_context(node)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        return self.url_at([node.port for node in self.nodes])

    @staticmethod
    def url_at(ports: list[int]) -> str:
        return "redis+quorum://" + ",".join(f"{HOST}:{port}" for port in ports)

    def heal(self) -> None:
        """Let every node run and answer."""
        for node in self.nodes:
            if not node.running:
                node.start()
            node.resume()

    def forget(self) -> None:
        """Take everything from every node, the epoch too."""
        for node in self.nodes:
            node.ask_all(["FLUSHALL"], ["SCRIPT", "FLUSH"], ["CLIENT", "UNPAUSE"])

    async def init(self) -> str:
        """Found the quorum, or let forgetful nodes vote again, as ``fencing init`` does."""
        from fencing_sdk.backends.redis.quorum import from_url

        backend = from_url(self.url)
        try:
            return await backend.init()
        finally:
            await backend.aclose()

    async def fresh(self) -> None:
        """Let every node run, without data, and found the quorum."""
        await asyncio.to_thread(self.heal)
        await asyncio.to_thread(self.forget)
        await self.init()


class QuorumNetwork:
    """A `FaultProxy` before each node; what is done to the network is done to all of them."""

    def __init__(self, quorum: Quorum) -> None:
        self.proxies = [FaultProxy(node.port) for node in quorum.nodes]
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for proxy in self.proxies:
            await self._stack.enter_async_context(proxy)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def url(self) -> str:
        return Quorum.url_at([proxy.port for proxy in self.proxies])

    @property
    def connections(self) -> int:
        """How many connections are open to the node that has most of them."""
        return max(proxy.connections for proxy in self.proxies)

    @property
    def accepted(self) -> int:
        """How many connections the node was asked for that was asked for the fewest."""
        return min(proxy.accepted for proxy in self.proxies)

    def blackhole(self) -> None:
        self._each("blackhole")

    def half_open(self) -> None:
        self._each("half_open")

    def forget(self) -> None:
        self._each("forget")

    def cut_forgotten(self) -> None:
        self._each("cut_forgotten")

    def cut(self) -> None:
        self._each("cut")

    def lose_replies(self) -> None:
        self._each("lose_replies")

    def refuse(self) -> None:
        self._each("refuse")

    def heal(self) -> None:
        self._each("heal")

    def _each(self, what: str) -> None:
        for proxy in self.proxies:
            getattr(proxy, what)()
