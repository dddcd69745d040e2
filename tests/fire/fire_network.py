"""The network of one worker: a proxy with faults before every server of the store, whatever protocol is spoken."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Self

from fault_proxy import FaultProxy, Link
from fire_ports import keep
from patience import until


class ByteProxy(FaultProxy):
    """Passes bytes on and reads nothing."""

    _keeper: socket.socket | None = None

    def _new_link(self) -> Link:
        link = Link(self)
        link.up.stream.give_up()
        link.down.stream.give_up()
        return link

    def refuse(self) -> None:
        super().refuse()
        if self.port and self._keeper is None:
            self._keeper = keep(self.port)

    def heal(self) -> None:
        super().heal()
        self._let_go()

    async def __aexit__(self, *error: Any) -> None:  # noqa: PYI036  (passed on)
        await super().__aexit__(*error)
        self._let_go()

    def _let_go(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None


async def at_least(seconds: float, until_true: Callable[[], bool]) -> None:
    """Wait *seconds*, or up to twice as long until something is true."""
    await asyncio.sleep(seconds)
    with contextlib.suppress(AssertionError):
        await until(until_true, what="somebody else goes on", within=seconds)


class Network:
    """Every way that one worker has to the store; what happens to it happens to all of them at once."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._proxies = [ByteProxy(port) for port in ports]
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for proxy in self._proxies:
            await self._stack.enter_async_context(proxy)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def ports(self) -> list[int]:
        return [proxy.port for proxy in self._proxies]

    @property
    def sent(self) -> int:
        """Bytes that the worker has sent, delivered or not."""
        return sum(proxy.bytes_up for proxy in self._proxies)

    @property
    def received(self) -> int:
        """Bytes that servers have sent, delivered or not."""
        return sum(proxy.bytes_down for proxy in self._proxies)

    @property
    def connections(self) -> int:
        return sum(proxy.connections for proxy in self._proxies)

    @property
    def accepted(self) -> int:
        return sum(proxy.accepted for proxy in self._proxies)

    def heal(self) -> None:
        for proxy in self._proxies:
            proxy.heal()

    # Faults. Each tells whether anybody was hit.

    async def reset(self, _seconds: float) -> bool:
        """All connections are reset, and new ones are taken."""
        hit = self.connections > 0
        self._cut()
        return hit

    async def unreachable(self, seconds: float, until_true: Callable[[], bool] = lambda: True) -> bool:
        """All connections are reset, and new ones are refused for a while."""
        hit = self.connections > 0
        for proxy in self._proxies:
            proxy.refuse()
        self._cut()
        await at_least(seconds, until_true)
        self.heal()
        return hit

    async def blackhole(self, seconds: float, until_true: Callable[[], bool] = lambda: True) -> bool:
        """Nothing arrives, and nobody is told; afterwards it arrives late."""
        before = self.sent
        for proxy in self._proxies:
            proxy.blackhole()
        await at_least(seconds, until_true)
        self.heal()
        return self.sent > before

    async def half_open(self, seconds: float) -> bool:
        """Requests arrive and are carried out, and the replies come late."""
        before = self.received
        for proxy in self._proxies:
            proxy.half_open()
        await asyncio.sleep(seconds)
        self.heal()
        return self.received > before

    async def lost_replies(self, seconds: float) -> bool:
        """Requests arrive and are carried out; then the connections break, and the replies are lost."""
        before = self.received
        for proxy in self._proxies:
            proxy.half_open()
        for _ in range(max(1, int(seconds / 0.01))):
            await asyncio.sleep(0.01)
            if self.received > before:
                break
        self._cut()
        self.heal()
        return self.received > before

    async def slow(self, seconds: float) -> bool:
        """Everything takes a while longer."""
        before = self.sent
        for proxy in self._proxies:
            proxy.delay(requests=seconds / 20, replies=seconds / 20)
        await asyncio.sleep(seconds)
        self.heal()
        return self.sent > before

    def _cut(self) -> None:
        for proxy in self._proxies:
            proxy.cut()


FAULTS = {
    "connections reset": Network.reset,
    "network cut": Network.unreachable,
    "blackhole": Network.blackhole,
    "half-open": Network.half_open,
    "replies lost": Network.lost_replies,
    "slow network": Network.slow,
}
