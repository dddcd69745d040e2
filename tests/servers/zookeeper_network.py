"""
The network between the members of an ensemble, which a test may split.

Each member reaches each other one through a port of this network, for the traffic of the quorum and
for that of elections. Who is called for an election is told the caller's address, to call back there;
so addresses are replaced on the way, by others of the same length.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterable, Iterator
from functools import partial

from local_ports import HOST, free_port

Pair = tuple[int, int]


class MemberNetwork:
    """Passes everything on between *members*, until it is split. It lives in a thread of its own."""

    def __init__(self, members: Iterable[int]) -> None:
        self.members = list(members)
        self._real = {member: (_long_port(), _long_port()) for member in self.members}
        self._ways = {
            (one, other): (_long_port(), _long_port()) for one in self.members for other in self.members if one != other
        }
        self._servers: list[asyncio.Server] = []
        self._split: set[Pair] = set()
        self._links: list[tuple[Pair, asyncio.StreamWriter]] = []
        self._healed = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="member-network", daemon=True)
        self._thread.start()
        for way in self._ways:
            asyncio.run_coroutine_threadsafe(self._listen(way), self._loop).result(20)

    def lines(self, member: int) -> list[str]:
        """The servers as *member* is to see them: itself as it is, and the others through this network."""
        ports = {other: self._real[other] if other == member else self._ways[member, other] for other in self.members}
        return [f"server.{other}={HOST}:{quorum}:{election}" for other, (quorum, election) in ports.items()]

    def split(self, *alone: int) -> None:
        """Deliver nothing between *alone* and the others; connections stay open, and new ones are taken."""
        pairs = {pair for pair in self._ways if (pair[0] in alone) != (pair[1] in alone)}
        self._loop.call_soon_threadsafe(self._split.update, pairs)

    def heal(self) -> None:
        """Deliver again; what was open while it was split is reset."""
        asyncio.run_coroutine_threadsafe(self._heal(), self._loop).result(20)

    def close(self) -> None:
        """End it, when the members have ended."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)

    # The inside

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _listen(self, way: Pair) -> None:
        for port, real in zip(self._ways[way], self._real[way[1]], strict=True):
            self._servers.append(await asyncio.start_server(partial(self._link, way, real), HOST, port))

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for _, writer in self._links:
            writer.transport.abort()
        for task in tasks:
            task.cancel()
        await asyncio.wait([asyncio.ensure_future(asyncio.sleep(0.01)), *tasks])

    async def _heal(self) -> None:
        for pair, writer in self._links:
            if pair in self._split:
                writer.transport.abort()
        self._split.clear()
        self._healed.set()
        self._healed = asyncio.Event()

    async def _link(self, way: Pair, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._links = [(pair, open_) for pair, open_ in self._links if not open_.is_closing()]
        self._links.append((way, writer))
        with contextlib.suppress(OSError, asyncio.CancelledError):  # else asyncio complains when it is closed
            await self._delivering(way)
            far_reader, far_writer = await self._connect(port)
            self._links.append((way, far_writer))
            ends = [
                asyncio.ensure_future(self._pass_on(way, reader, far_writer)),
                asyncio.ensure_future(self._pass_on(way, far_reader, writer)),
            ]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            far_writer.close()
            for end in ends:
                end.cancel()
        writer.close()

    async def _connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """
        Connect, if need be a moment later.

        A follower takes a connection that is made and closed for a leader that has failed, and both would waste
        seconds. Without this network it is refused until the new leader listens, and tries again.
        """
        for _ in range(200):
            with contextlib.suppress(ConnectionRefusedError):
                return await asyncio.open_connection(HOST, port)
            await asyncio.sleep(0.02)
        return await asyncio.open_connection(HOST, port)

    async def _pass_on(self, way: Pair, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._delivering(way)
                for real, seen in self._addresses(way):
                    data = data.replace(real, seen)
                writer.write(data)
                await writer.drain()

    async def _delivering(self, way: Pair) -> None:
        while way in self._split:
            await self._healed.wait()

    def _addresses(self, way: Pair) -> Iterator[tuple[bytes, bytes]]:
        """The election address of each end, and the one by which the other end is to call it."""
        for one, other in (way, way[::-1]):
            yield f"{HOST}:{self._real[one][1]}".encode(), f"{HOST}:{self._ways[other, one][1]}".encode()


def _long_port() -> int:
    """One of five digits, so that an address can be replaced by any other."""
    while (port := free_port()) < 10_000:
        pass
    return port
