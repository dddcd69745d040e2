"""
From an address to an open, authenticated RESP3 transport whose bytes are ours.

redis-py opens the connection and logs in: DNS, TLS, credential providers, AUTH, SELECT. Then its
transport is taken out of its hands. What may live here: everything that knows redis-py's
connection from the inside, and nothing that knows locks.

Promise: a `dial` that returns hands over a transport of which no byte was read and thrown away; a
`dial` that raises, or is cancelled, leaves no socket open.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from fencing_sdk.backends._known_driver import KnownDriver
from fencing_sdk.backends.redis._unreachable import UnreachableError, reason_of
from fencing_sdk.errors import BackendRefusedError

__all__ = ["BACKEND", "CLIENT_NAME", "REDIS_PY", "Dialer", "Link", "Server", "ServerDialer", "is_unknown_to_server"]

BACKEND = "RedisBackend"
REDIS_PY = KnownDriver("redis", ">=7,<9", backend=BACKEND)
CLIENT_NAME = "fencing-sdk"
CONNECT_TIMEOUT = 4.0
"""Seconds; fewer than a client waits for its store to open, so that the error says which server is silent."""
OLDEST = (6, 2)

_TOO_OLD = "the server does not speak RESP3, or is older than 6.2; Redis 6.2 or newer, or Valkey, is needed"
_A_SENTINEL = "this is a Sentinel, not a server; write redis+sentinel://host:26379/service"


class Link(NamedTuple):
    """An open connection to a server that is logged in and speaks RESP3."""

    transport: asyncio.Transport
    """Its bytes go to the protocol that was passed to `Dialer.dial`; closing it is the protocol's affair."""

    version: tuple[int, ...]
    """The server's, such as (7, 0, 15)."""

    address: str
    """``host:port``, or the path of a socket."""

    cluster: bool = False
    """Whether the server is a node of a cluster: it answers MOVED for the slots of others."""


class Dialer(Protocol):
    """Knows where a server is, and how to log in there."""

    async def dial(self, protocol: asyncio.Protocol) -> Link:
        """
        Connect to a server that takes writes, log in, and hand the transport to *protocol*.

        The bytes that arrive go to *protocol* from then on. Its ``connection_made`` is not called.

        Raises:
            BackendRefusedError: the server is no Redis 6.2, or is a Sentinel.
            UnreachableError: the server cannot be reached.
            redis.exceptions.RedisError: the server refuses the login, or is a replica.
            OSError: a certificate file cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True, repr=False)
class Server:
    """How to make one of redis-py's connections. Knows secrets, so it shows nothing."""

    kind: type[AbstractConnection]
    arguments: Mapping[str, object]

    def at(self, host: str, port: int) -> Server:
        """Describe another server with the same credentials, TLS and options."""
        return Server(self.kind, {**self.arguments, "host": host, "port": port})

    @property
    def address(self) -> str:
        """``host:port``, or the path of a socket."""
        if issubclass(self.kind, UnixDomainSocketConnection):
            return str(self.arguments.get("path", ""))
        host, port = self.arguments.get("host", "localhost"), self.arguments.get("port", 6379)
        return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"

    def connection(self) -> Any:
        """Make a connection that is not open yet. It tries once and says what happened."""
        patience = self.arguments.get("socket_connect_timeout") or self.arguments.get("socket_timeout")
        chosen: dict[str, Any] = {
            **self.arguments,
            "socket_connect_timeout": patience or CONNECT_TIMEOUT,
            "socket_timeout": None,  # with one, redis-py uses asyncio.wait_for: it swallows cancellations before 3.12
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,  # the change to RESP3 is our own command, so that its refusal is told from all others
            "decode_responses": False,
            "health_check_interval": 0,
        }
        if issubclass(self.kind, Connection) and chosen.get("socket_keepalive") is None:
            chosen["socket_keepalive"] = True
        with REDIS_PY.known("connect"):
            return self.kind(**chosen)

    async def ask(self, *command: str) -> object:
        """Log in, ask one thing, and leave."""
        async with _logged_in(self) as connection:
            return await _ask(connection, *command)


class ServerDialer:
    """
    Dials one server.

    Args:
        server: How to connect.

        source: Who says that it is there, if not the user; for the error when it is not.
    """

    def __init__(self, server: Server, *, source: str = "") -> None:
        self.server = server
        self._source = source

    async def dial(self, protocol: asyncio.Protocol) -> Link:
        """See `Dialer.dial`."""
        try:
            return await self._dial(protocol)
        except UnreachableError as error:
            if not self._source:
                raise
            raise UnreachableError(*(f"{place}, {self._source}" for place in error.places)) from error

    async def _dial(self, protocol: asyncio.Protocol) -> Link:
        async with _logged_in(self.server) as connection:
            hello = await _speak_resp3(connection)
            version = _check(hello)
            return Link(_take_over(connection, protocol), version, self.server.address, hello[b"mode"] == b"cluster")


@asynccontextmanager
async def _logged_in(server: Server) -> AsyncIterator[Any]:
    """Open a connection for what the body does with it, all within the connect timeout."""
    connection = server.connection()
    with REDIS_PY.known("connect"):
        patience = connection.socket_connect_timeout
        read_certificates = connection.ssl_context.get if isinstance(connection, SSLConnection) else None
    if read_certificates is not None:
        await asyncio.to_thread(read_certificates)  # for 20 ms and more
    try:
        async with asyncio.timeout(patience):
            await _log_in(connection)
            yield connection
    except (TimeoutError, RedisTimeoutError) as error:
        raise UnreachableError.at(server.address, f"no answer within {patience:g} s") from error
    except RedisConnectionError as error:
        if type(error) is not RedisConnectionError:  # a refusal of the login is one as well
            raise
        raise UnreachableError.at(server.address, reason_of(error.__context__)) from error
    finally:
        await _abort(connection)


async def _log_in(connection: Any) -> None:
    try:
        await connection.connect()
    except RedisConnectionError as error:
        inner = error.__context__
        if isinstance(inner, RedisError | ssl.SSLCertVerificationError):  # else only a text would tell
            raise inner from None
        raise


async def _speak_resp3(connection: Any) -> dict[bytes, object]:
    """Change to RESP3, which also gives the server's version, role and mode, and needs no permission."""
    named = () if connection.client_name else ("SETNAME", CLIENT_NAME)
    try:
        hello = await _ask(connection, "HELLO", 3, *named)
    except ResponseError as error:
        if not is_unknown_to_server(error):
            raise
        raise BackendRefusedError(BACKEND, "connect", _TOO_OLD) from error
    if not isinstance(hello, dict) or hello.get(b"proto") != 3:  # noqa: PLR2004
        raise BackendRefusedError(BACKEND, "connect", _TOO_OLD)
    return hello


def is_unknown_to_server(error: ResponseError) -> bool:
    """Whether the server does not know the command at all: ERR, which redis-py leaves out, or NOPROTO."""
    code = str(error).partition(" ")[0]
    return type(error) is ResponseError and (code == "NOPROTO" or not code.isupper())


def _check(hello: Mapping[bytes, object]) -> tuple[int, ...]:
    """Refuse a server that cannot keep locks, and tell its version."""
    version = tuple(map(int, re.findall(rb"\d+", bytes(hello.get(b"version", b"")))))  # type: ignore[call-overload]
    if version and version < OLDEST:
        raise BackendRefusedError(BACKEND, "connect", _TOO_OLD)
    if hello.get(b"mode") == b"sentinel":
        raise BackendRefusedError(BACKEND, "connect", _A_SENTINEL)
    if hello.get(b"role") in {b"slave", b"replica"}:
        msg = "You can't write against a read only replica."
        raise ReadOnlyError(msg)
    return version


async def _ask(connection: Any, *command: object) -> object:
    """Send one *command* on an open connection of redis-py and wait for its reply."""
    with REDIS_PY.known("connect"):
        await connection.send_command(*command, check_health=False)
        return await connection.read_response()


class _NoTransport:
    """What redis-py's writer holds after the takeover: nothing that it could close, or warn about."""

    def is_closing(self) -> bool:
        return True

    def close(self) -> None:
        pass


def _take_over(connection: Any, protocol: asyncio.Protocol) -> asyncio.Transport:
    """
    Take the transport out of redis-py's hands, without a suspension.

    A server sends nothing that was not asked for, so what is left over at this moment can only be
    the end of the connection, which *protocol* would never hear of, or a reply out of order.
    """
    with REDIS_PY.known("connect"):
        return _taken_over(connection, protocol)


def _taken_over(connection: Any, protocol: asyncio.Protocol) -> asyncio.Transport:
    reader, writer, parser = connection._reader, connection._writer, connection._parser  # noqa: SLF001
    transport: asyncio.Transport = writer.transport
    if reader.at_eof() or reader.exception() is not None or transport.is_closing():
        msg = "Connection closed by server."
        raise RedisConnectionError(msg)
    if reader._buffer or parser._reader.has_data():  # noqa: SLF001
        msg = "The server sent what nobody asked for."
        raise RedisConnectionError(msg)
    transport.set_protocol(protocol)
    writer._transport = _NoTransport()  # noqa: SLF001
    connection._reader = connection._writer = None  # noqa: SLF001
    return transport


async def _abort(connection: Any) -> None:
    """Close an open connection of redis-py at once. One that was taken over is left alone."""
    try:
        writer = connection._writer  # noqa: SLF001
        connection._reader = connection._writer = None  # noqa: SLF001
        if writer is not None:
            writer.transport.abort()
    except AttributeError:  # another version: an error says so already, and its own way must do
        await connection.disconnect(nowait=True)
