"""What tests of a dial have in common: somebody who gets the bytes, and a proof that nothing stays open."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import hiredis
from redis_server import RedisServer

from fencing_sdk.backends import take_options
from fencing_sdk.backends.redis.connection.dial import OpenConnection, RedisDialer
from fencing_sdk.backends.redis.connection.router import SlotMap
from fencing_sdk.backends.redis.options import DRIVER_OPTIONS, Servers, servers_of_url

PATIENCE = 60.0


class Ears(asyncio.Protocol):
    """Who gets the bytes after the takeover."""

    def __init__(self) -> None:
        self.made = False
        self.lost = asyncio.Event()
        self.heard: asyncio.Queue[object] = asyncio.Queue()
        self._reader = hiredis.Reader(notEnoughData=self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.made = True

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not self:
            self.heard.put_nowait(reply)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set()


def servers(url: str, **options: object) -> Servers:
    return servers_of_url(url, take_options(url, options, DRIVER_OPTIONS))


def dialer(url: str) -> RedisDialer:
    place = servers(url)
    assert not isinstance(place, SlotMap)
    return place


@contextlib.asynccontextmanager
async def dialled(where: str | RedisDialer) -> AsyncIterator[tuple[OpenConnection, Ears]]:
    """A link, and afterwards the proof that it can be closed."""
    ears = Ears()
    link = await (dialer(where) if isinstance(where, str) else where).dial(ears)
    try:
        yield link, ears
    finally:
        link.transport.close()
        async with asyncio.timeout(PATIENCE):
            await ears.lost.wait()


async def ask(link: OpenConnection, ears: Ears, *command: str) -> object:
    link.transport.write(hiredis.pack_command(command))
    async with asyncio.timeout(PATIENCE):
        return await ears.heard.get()


async def client_info(link: OpenConnection, ears: Ears) -> dict[str, str]:
    line = await ask(link, ears, "CLIENT", "INFO")
    assert isinstance(line, bytes)
    return dict(field.split("=", 1) for field in line.decode().split())


async def until_nobody_is_connected(server: RedisServer) -> None:
    async with asyncio.timeout(PATIENCE):
        while len(str(await server.command("CLIENT", "LIST")).splitlines()) > 1:  # noqa: ASYNC110  (a server is asked)
            await asyncio.sleep(0.01)
