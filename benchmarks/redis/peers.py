"""
What our locks are compared with.

`BareLock` is the least that a Python client can do: a hiredis parser on an asyncio protocol, two
commands for each cycle, all requests of one turn of the loop in one write. It has no token, no
line, no renewal, and its connection may break only once. redis-py's `Lock` is used as it comes.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import deque

import hiredis
import redis.asyncio

from benchmarks.redis.server import HOST, OwnServer

TTL = 10.0

_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end"
_RENEW = (
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) else return 0 end"
)
_MORE = object()


class BareConnection(asyncio.Protocol):
    """Commands out, replies in, in order."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(notEnoughData=_MORE)
        self._waiting: deque[asyncio.Future[object]] = deque()
        self._out: list[bytes] = []
        self._transport: asyncio.Transport

    @classmethod
    async def open(cls, port: int) -> BareConnection:
        _, connection = await asyncio.get_running_loop().create_connection(cls, HOST, port)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def call(self, *words: str | bytes | int) -> asyncio.Future[object]:
        future = self._loop.create_future()
        self._waiting.append(future)
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(hiredis.pack_command(words))  # type: ignore[arg-type]  # its stub knows one word
        return future

    def _flush(self) -> None:
        self._transport.write(b"".join(self._out))
        self._out.clear()

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not _MORE:
            future = self._waiting.popleft()
            if isinstance(reply, Exception):
                future.set_exception(reply)
            else:
                future.set_result(reply)

    def close(self) -> None:
        self._transport.abort()


class BareLock:
    """SET NX PX, then compare and delete."""

    def __init__(self, connection: BareConnection, hashes: dict[str, str]) -> None:
        self.connection = connection
        self._hashes = hashes

    @classmethod
    async def open(cls, port: int) -> BareLock:
        connection = await BareConnection.open(port)
        for script in (_RELEASE, _RENEW):
            await connection.call("SCRIPT", "LOAD", script)
        return cls(connection, {script: hashlib.sha1(script.encode()).hexdigest() for script in (_RELEASE, _RENEW)})

    async def cycle(self, name: str) -> None:
        owner = secrets.token_hex(16)
        if await self.acquire(name, owner):
            await self.connection.call("EVALSHA", self._hashes[_RELEASE], 1, name, owner)

    def acquire(self, name: str, owner: str) -> asyncio.Future[object]:
        return self.connection.call("SET", name, owner, "NX", "PX", int(TTL * 1000))

    def renew(self, name: str, owner: str) -> asyncio.Future[object]:
        """One script for one lock: also the round trip with which times are compared."""
        return self.connection.call("EVALSHA", self._hashes[_RENEW], 1, name, owner, int(TTL * 1000))

    def close(self) -> None:
        self.connection.close()


def shipped_client(server: OwnServer) -> redis.asyncio.Redis:
    """redis-py as it comes: a task that finds no free connection gets an error."""
    return redis.asyncio.Redis(host=HOST, port=server.port)


def patient_client(server: OwnServer, *, connections: int = 50) -> redis.asyncio.Redis:
    """redis-py with a pool whose users wait for a free connection."""
    pool = redis.asyncio.BlockingConnectionPool(host=HOST, port=server.port, max_connections=connections, timeout=None)
    return redis.asyncio.Redis.from_pool(pool)


async def redis_py_cycle(client: redis.asyncio.Redis, name: str) -> None:
    lock = client.lock(name, timeout=TTL)
    await lock.acquire(blocking=False)
    await lock.release()
