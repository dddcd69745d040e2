"""
The network between the members of one etcd cluster, which a test may cut between any two of them.

A member announces one address to all others, so what they dial does not say who dials. Here each
member therefore goes out through a proxy of its own (etcd honours HTTP_PROXY between members), and
the address it asks for says where to: every pair can be told apart. The addresses are those that are
set aside for documentation, so a member that went around its proxy would reach no host at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from local_ports import HOST


class PeerNetwork:
    """
    Passes on what members say to each other, until it is asked not to.

    As in TCP, what is held back arrives late, when the network heals, unless either end has given up. It runs in a
    thread of its own, so the loop of a test may wait for a member, and it outlives that loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="peer-network", daemon=True)
        self._doors: dict[str, asyncio.Server] = {}  # by the address of the member that goes out by it
        self._ports: dict[str, int] = {}
        self._open: dict[frozenset[str], asyncio.Event] = {}
        self._links: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    def admit(self, port: int) -> str:
        """Give the member that listens at *port* an address."""
        address = f"192.0.2.{len(self._ports) + 1}"
        asyncio.run_coroutine_threadsafe(self._admit(address, port), self._loop).result(20)
        return address

    def door(self, address: str) -> str:
        """The proxy by which the member with this address goes out."""
        return f"http://{HOST}:{self._doors[address].sockets[0].getsockname()[1]}"

    def cut(self, one: str, other: str) -> None:
        """Nothing arrives between these two, in either direction. Connections stay open, without an error."""
        self._loop.call_soon_threadsafe(self._open[frozenset((one, other))].clear)

    def isolate(self, address: str) -> None:
        """Cut a member off from all others."""
        for other in self._ports:
            if other != address:
                self.cut(address, other)

    @contextlib.contextmanager
    def isolated(self, address: str) -> Iterator[None]:
        """`isolate` for the length of a block."""
        self.isolate(address)
        try:
            yield
        finally:
            self.heal()

    def heal(self) -> None:
        """Deliver what was held back, and all that follows."""
        for way in self._open.values():
            self._loop.call_soon_threadsafe(way.set)

    # In the thread

    async def _admit(self, address: str, port: int) -> None:
        for other in self._ports:
            way = self._open[frozenset((address, other))] = asyncio.Event()
            way.set()
        self._ports[address] = port

        async def enter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            link = asyncio.ensure_future(self._link(address, reader, writer))
            self._links.add(link)
            link.add_done_callback(self._links.discard)

        self._doors[address] = await asyncio.start_server(enter, HOST, 0)

    async def _link(self, source: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request, whose answer may go on for ever: each has a connection of its own to whom it is for."""
        ends = [writer]
        try:
            line, _, rest = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
            target = str(urlsplit(line.split()[1].decode()).hostname)
            way = self._open[frozenset((source, target))]
            await way.wait()
            answers, requests = await asyncio.open_connection(HOST, self._ports[target])
            ends.append(requests)
            requests.write(line + b"\r\nConnection: close\r\n" + rest)
            await _until_one_ends(_pass(reader, requests, way), _pass(answers, writer, way))
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            for end in ends:
                end.close()

    async def _close(self) -> None:
        for door in self._doors.values():
            door.close()
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)
        await asyncio.sleep(0)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: asyncio.Event) -> None:
    while data := await reader.read(65536):
        await way.wait()
        writer.write(data)
        await writer.drain()


async def _until_one_ends(*ways: Coroutine[Any, Any, None]) -> None:
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
