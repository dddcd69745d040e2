"""
Opens a connection: from the settings of a server to a transport that is logged in and speaks RESP3.

redis-py connects and logs in: TLS, credential providers, AUTH, SELECT. Then this module takes the transport from
redis-py's connection. It is the only module that uses the private parts of that connection, and it knows nothing of
locks.

A `dial` that returns has lost no byte of the transport. A `dial` that raises, or is cancelled, leaves no
socket open.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

from fencing_sdk._values.drivers import imported_from

with imported_from("redis", "redis"):
    from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from fencing_sdk._http.tls import complaint_about, wants_certificate
from fencing_sdk._values.drivers import KnownDriver
from fencing_sdk.backends._shared.background_task import first_success
from fencing_sdk.backends._shared.error_translation import NoConnectionError, reason_of
from fencing_sdk.errors import BackendRefusedError

T = TypeVar("T")

BACKEND = "RedisBackend"
REDIS_PY = KnownDriver("redis", user=BACKEND)
_PYTHON = KnownDriver("Python", user=BACKEND)
CLIENT_NAME = "fencing-sdk"
CONNECT_TIMEOUT = 4.0
"""Seconds. The engine waits longer for its store to open, so that the error can name the silent server."""
OLDEST = (6, 2)
REPLICA = {b"slave", b"replica"}
"""Roles of a server that grants no locks, in its reply to HELLO."""
AT_ONCE = 3
"""Servers that are asked the same question at once: a silent one costs no time, and many are not flooded."""

_TOO_OLD = "the server does not speak RESP3, or is older than 6.2; Redis 6.2 or newer, or Valkey, is needed"
_MISMATCHES = {62, 64}
"""OpenSSL's codes for a certificate of another host name, or of another IP address."""
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_A_SENTINEL = "this is a Sentinel, not a server; write redis+sentinel://host:26379/service"


class UnreachableError(NoConnectionError, RedisConnectionError):
    """No server answers at the given addresses. It is one of the driver's errors as well."""


class ReplicaError(ReadOnlyError):
    """The server at *address* is a replica. *source* says where the address comes from, if not from the user."""

    def __init__(self, address: str, source: str | None) -> None:
        if source is None:
            super().__init__(
                f"{address} is a replica, not a master, and grants no locks; "
                "name the master, or its Sentinels with redis+sentinel://"
            )
        else:
            super().__init__(f"{address}, {source}, is a replica, which grants no locks; the next call asks again")


class OpenConnection(NamedTuple):
    """An open connection, logged in, that speaks RESP3."""

    transport: asyncio.Transport
    """Hands its bytes to the protocol passed to `ServerDialer.dial`, and that protocol closes it."""

    version: tuple[int, ...]
    """The version of the server, such as (7, 0, 15)."""

    address: str
    """``host:port``, or the path of a socket."""

    cluster: bool = False
    """True if the server is a node of a cluster: it answers MOVED for the slots of others."""


@dataclass(frozen=True, slots=True, repr=False)
class ServerSettings:
    """The class and the arguments of redis-py's connections to one server. They hold secrets, so the repr is empty."""

    kind: type[AbstractConnection]
    arguments: Mapping[str, object]

    def at(self, host: str, port: int) -> ServerSettings:
        """The settings of another server with the same credentials, TLS and options."""
        return ServerSettings(self.kind, {**self.arguments, "host": host, "port": port})

    @property
    def address(self) -> str:
        """``host:port``, or the path of a socket."""
        if issubclass(self.kind, UnixDomainSocketConnection):
            return str(self.arguments.get("path", ""))
        host, port = self.arguments.get("host", "localhost"), self.arguments.get("port", 6379)
        return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"

    def connection(self) -> Any:
        """Make a connection that is not open yet. Opening it is tried once."""
        patience = self.arguments.get("socket_connect_timeout") or self.arguments.get("socket_timeout")
        chosen: dict[str, Any] = {
            **self.arguments,
            "socket_connect_timeout": patience or CONNECT_TIMEOUT,
            "socket_timeout": None,  # else redis-py uses asyncio.wait_for, which loses cancellations before 3.12
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,  # `_speak_resp3` changes to RESP3, so that its refusal differs from all others
            "decode_responses": False,
            "health_check_interval": 0,
        }
        if issubclass(self.kind, Connection) and chosen.get("socket_keepalive") is None:
            chosen["socket_keepalive"] = True
        with REDIS_PY.known("connect"):
            return self.kind(**chosen)

    async def ask(self, *command: str) -> object:
        """Log in, send one command, and disconnect."""
        async with _logged_in(self) as connection:
            return await _ask(connection, *command)

    async def ask_all(self, *commands: Sequence[str]) -> list[object]:
        """Log in, send the commands one after the other, and disconnect. A refused one is an item of the list."""
        replies: list[object] = []
        async with _logged_in(self) as connection:
            for command in commands:
                try:
                    replies.append(await _ask(connection, *command))
                except ResponseError as error:
                    replies.append(error)
        return replies


class AddressSource(NamedTuple):
    """Where an address comes from, if not from the user."""

    where: str
    """The end of a sentence about the server at that address."""

    names: str
    """Option that makes the source answer with host names, for which certificates are made, instead of IP addresses."""


class ServerDialer:
    """Opens connections to one server. Errors name the *source* of its address, if that is not the user."""

    def __init__(self, server: ServerSettings, *, source: AddressSource | None = None) -> None:
        self.server = server
        self._source = source

    async def dial(self, protocol: asyncio.Protocol) -> OpenConnection:
        """
        Connect to the server, log in, and hand the transport to *protocol*.

        From then on, *protocol* receives the bytes. Its ``connection_made`` is not called.

        Raises:
            BackendRefusedError: the server is older than Redis 6.2, or is a Sentinel.
            UnreachableError: the server cannot be reached.
            redis.exceptions.RedisError: the server refuses the login, or is a replica.
            OSError: a certificate file cannot be read.
        """
        try:
            return await self._dial(protocol)
        except UnreachableError as error:
            if self._source is None:
                raise
            raise UnreachableError(*(f"{server}, {self._source.where}" for server in error.servers)) from error
        except ssl.SSLCertVerificationError as error:
            if self._source is None or error.verify_code not in _MISMATCHES:
                raise
            detail = (
                f"the certificate is not made for {self.server.address}, {self._source.where}; {self._source.names}"
            )
            raise BackendRefusedError(BACKEND, "connect", detail) from error

    async def _dial(self, protocol: asyncio.Protocol) -> OpenConnection:
        async with _logged_in(self.server) as connection:
            hello = await _speak_resp3(connection)
            version = tuple(map(int, re.findall(rb"\d+", bytes(hello.get(b"version", b"")))))  # type: ignore[call-overload]
            if version and version < OLDEST:
                raise BackendRefusedError(BACKEND, "connect", _TOO_OLD)
            if hello.get(b"mode") == b"sentinel":
                raise BackendRefusedError(BACKEND, "connect", _A_SENTINEL)
            in_cluster = hello[b"mode"] == b"cluster"
            if hello.get(b"role") in REPLICA:
                raise ReplicaError(self.server.address, None if self._source is None else self._source.where)
            return OpenConnection(_take_over(connection, protocol), version, self.server.address, in_cluster)


@asynccontextmanager
async def _logged_in(server: ServerSettings) -> AsyncIterator[Any]:
    """Open a connection for the body. Opening and body together must end within the connect timeout."""
    connection = server.connection()
    with REDIS_PY.known("connect"):
        patience = connection.socket_connect_timeout
        read_certificates = connection.ssl_context.get if isinstance(connection, SSLConnection) else None
    if read_certificates is not None:
        try:
            await asyncio.to_thread(read_certificates)  # it takes 20 ms and more
        except (OSError, ValueError) as error:  # which name no file
            files = [server.arguments.get(name) for name in _FILES]
            complaint = complaint_about(*files, names=_FILES, password=server.arguments.get("ssl_password"))
            if complaint is None:
                raise
            raise BackendRefusedError(BACKEND, "connect", complaint) from error
    try:
        async with asyncio.timeout(patience):
            await connection.connect()
            yield connection
    except (TimeoutError, RedisTimeoutError) as error:
        hint = "; does it speak TLS?" if isinstance(connection, SSLConnection) else ""
        raise UnreachableError.at(server.address, f"no answer within {patience:g} s{hint}") from error
    except InvalidResponse as error:
        raise UnreachableError.at(server.address, "the peer does not speak the protocol of Redis") from error
    except RedisConnectionError as error:
        inner = error.__context__
        if isinstance(inner, RedisError | ssl.SSLCertVerificationError):  # outside, only the text has the cause
            raise inner from None
        if type(error) is not RedisConnectionError:  # a subclass: the server refused the login
            raise
        raise _broken_off(connection, server.address, inner) from error
    finally:
        await _abort(connection)


def _broken_off(connection: Any, address: str, cause: BaseException | None) -> Exception:
    """Make the error for a server that was reached, or not, and has not answered."""
    if wants_certificate(cause):
        detail = (
            f"{address} wants a certificate of the client that it trusts; name it with ssl_certfile= and ssl_keyfile="
        )
        return BackendRefusedError(BACKEND, "connect", detail)
    tls, closed = isinstance(connection, SSLConnection), cause is None or isinstance(cause, ConnectionResetError)
    hint = ""
    if tls and isinstance(cause, ssl.SSLError):
        hint = "; does it speak TLS?"
    elif tls and closed:
        hint = "; does it want a certificate of the client, by ssl_certfile=?"
    elif closed and isinstance(connection, Connection):
        hint = "; is it Redis, does it want TLS, which is rediss://, and does it have a connection left (maxclients)?"
    return UnreachableError.at(address, reason_of(cause) + hint)


async def _speak_resp3(connection: Any) -> dict[bytes, object]:
    """Send HELLO: it changes to RESP3, returns the server's version, role and mode, and needs no permission."""
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
    """Return whether the server does not know the command: its code is ERR, which redis-py drops, or NOPROTO."""
    code = str(error).partition(" ")[0]
    return type(error) is ResponseError and (code == "NOPROTO" or not code.isupper())


async def _ask(connection: Any, *command: object) -> object:
    """Send one *command* on an open connection of redis-py and wait for its reply."""
    with REDIS_PY.known("connect"):
        await connection.send_command(*command, check_health=False)
        return await connection.read_response()


class _NoTransport:
    """Takes the place of the transport in redis-py's writer, so that the writer can neither close it nor warn."""

    def is_closing(self) -> bool:
        return True

    def close(self) -> None:
        pass


def _take_over(connection: Any, protocol: asyncio.Protocol) -> asyncio.Transport:
    """
    Take the transport from redis-py's connection, without an ``await``.

    At this moment the server has answered every command. Bytes left over would be a reply out of order, and
    *protocol* would never see the end of a connection that has ended already.
    """
    with REDIS_PY.known("connect"):
        reader, writer = connection._reader, connection._writer  # noqa: SLF001
        left_over = connection._parser._reader.has_data()  # noqa: SLF001
    with _PYTHON.known("connect"):
        transport: asyncio.Transport = writer._transport  # noqa: SLF001  (the public name cannot be set)
        left_over = left_over or reader._buffer  # noqa: SLF001
    if reader.at_eof() or reader.exception() is not None or transport.is_closing():
        msg = "Connection closed by server."
        raise RedisConnectionError(msg)
    if left_over:
        msg = "The server sent a reply to no command."
        raise RedisConnectionError(msg)
    transport.set_protocol(protocol)
    writer._transport = _NoTransport()  # noqa: SLF001
    connection._reader = connection._writer = None  # noqa: SLF001
    return transport


async def _abort(connection: Any) -> None:
    """Close a connection of redis-py at once, unless its transport was taken."""
    try:
        writer = connection._writer  # noqa: SLF001
        connection._reader = connection._writer = None  # noqa: SLF001
        if writer is not None:
            writer.transport.abort()
    except AttributeError:  # another version of redis-py, which an error reports already
        await connection.disconnect(nowait=True)


async def first_answer(questions: Iterable[Callable[[], Coroutine[Any, Any, T]]]) -> T:
    """
    Return the first answer to any of *questions*. The others are cancelled, and have ended then.

    If all fail, raise the error of a server that was reached, or else an UnreachableError that names all of them.
    """

    def most_telling(errors: Sequence[Exception]) -> Exception:  # prefers a reply to the news that a server is down
        unreached = [error for error in errors if isinstance(error, UnreachableError)]
        return next((error for error in errors if error not in unreached), None) or UnreachableError.of_all(unreached)

    return await first_success(questions, most_telling, at_once=AT_ONCE)


_NO_SENTINEL = "the server is not a Sentinel; the hosts of redis+sentinel:// are Sentinels, mostly on port 26379"
_FROM_SENTINELS = AddressSource(
    "the master's address by the Sentinels",
    "set 'sentinel resolve-hostnames yes' and 'sentinel announce-hostnames yes', and let them monitor a host name",
)
_DOWN = {b"s_down", b"o_down"}


@dataclass(frozen=True, slots=True, repr=False)
class SentinelService:
    """A service, and the Sentinels that watch it."""

    name: str
    sentinels: Sequence[ServerSettings]

    peers: int = 0
    """Other Sentinels that a Sentinel must know. The answer of one that knows fewer does not count."""

    host: str | None = None
    """The host of its servers, if the one that the Sentinels name cannot be reached from here."""

    async def master(self) -> tuple[str, int]:
        """Ask for the address of the master. Raise MasterNotFoundError if the Sentinels know none that is up."""
        return await first_answer([partial(self._ask, sentinel) for sentinel in self.sentinels])

    async def _ask(self, sentinel: ServerSettings) -> tuple[str, int]:
        try:
            masters = await sentinel.ask("SENTINEL", "MASTERS")
        except ResponseError as error:
            if not is_unknown_to_server(error):
                raise
            raise BackendRefusedError(BACKEND, "connect", _NO_SENTINEL) from error
        assert isinstance(masters, list)
        for fields in masters:
            state = dict(zip(fields[::2], fields[1::2], strict=True))
            flags = set(state[b"flags"].split(b","))
            is_up = b"master" in flags and not flags & _DOWN and int(state[b"num-other-sentinels"]) >= self.peers
            if is_up and state[b"name"] == self.name.encode(errors="surrogateescape"):
                return self.host or state[b"ip"].decode(), int(state[b"port"])
        msg = "The Sentinel knows no master of this service that is up"
        raise MasterNotFoundError(msg)


class SentinelDialer:
    """Opens connections to the master of a service."""

    def __init__(self, server: ServerSettings, service: SentinelService) -> None:
        self.server = server
        self.service = service

    async def dial(self, protocol: asyncio.Protocol) -> OpenConnection:
        """See `ServerDialer.dial`. Each call asks the Sentinels; their answer may be out of date, and is not kept."""
        server = self.server.at(*await self.service.master())
        return await ServerDialer(server, source=_FROM_SENTINELS).dial(protocol)


RedisDialer: TypeAlias = ServerDialer | SentinelDialer
"""Opens connections to one server, or to the master that Sentinels name."""
