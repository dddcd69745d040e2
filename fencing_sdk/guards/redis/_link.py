"""
The way to the server: the user's own client or one of ours, and how often a script may be sent.

redis-py and valkey-py send a command again when its answer is lost. That is right for raising a
fence, which is the same twice. It would be wrong for the caller's commands: an INCR would count
twice. So a guarded write is sent once, on the driver's own connection, and a lost answer is the
driver's error. Neither driver is imported here unless a URL asks for it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeAlias, cast

from fencing_sdk.errors import ConfigurationError
from fencing_sdk.guards.redis._commands import Argument
from fencing_sdk.guards.redis._script import Script

_Send: TypeAlias = Callable[..., Awaitable[object]]

_SINGLE = {"redis": "redis", "rediss": "rediss", "unix": "unix", "valkey": "redis", "valkeys": "rediss"}
_CLUSTER = {f"{scheme}+cluster": plain for scheme, plain in _SINGLE.items() if scheme != "unix"}

PATIENCE = 5.0
"""Seconds that a client of ours waits for an answer, unless the URL says otherwise."""
RESENDS = 3
"""How often a client of ours repeats what may be repeated. `Redis.from_url` by itself repeats nothing."""


class _Encoder(Protocol):
    def encode(self, value: Argument, /) -> bytes | memoryview: ...


class _Connection(Protocol):
    async def connect(self) -> None: ...

    async def disconnect(self) -> None: ...

    async def can_read(self) -> bool: ...

    async def send_command(self, *words: Argument) -> None: ...

    async def read_response(self) -> object: ...


class _Pool(Protocol):
    async def get_connection(self, *hint: str) -> _Connection: ...

    def make_connection(self) -> _Connection: ...

    async def release(self, connection: _Connection, /) -> None: ...


class _Client(Protocol):
    """The part of `redis.asyncio` and `valkey.asyncio` clients that is used here."""

    @property
    def connection_pool(self) -> _Pool: ...

    def get_encoder(self) -> _Encoder: ...

    async def execute_command(self, *words: Argument, **options: object) -> object: ...

    async def aclose(self) -> None: ...


class _Cluster(_Client, Protocol):
    async def initialize(self) -> object: ...

    def get_node_from_key(self, key: bytes, /) -> object: ...


class Link:
    """Sends scripts through a driver's client and encodes keys as that does."""

    __slots__ = ("_client", "_no_script", "_owned", "_send", "_send_once", "is_cluster")

    def __init__(self, client: _Client, *, owned: bool, family: str) -> None:
        self._client = client
        self._owned = owned
        self._no_script: type[Exception] = importlib.import_module(f"{family}.exceptions").NoScriptError
        self.is_cluster = hasattr(client, "get_node_from_key")
        self._send: _Send = client.execute_command
        self._send_once: _Send
        if self.is_cluster:
            self._send = _initialized(cast("_Cluster", client))
            self._send_once = _through_cluster(cast("_Cluster", client))
        else:
            # valkey-py wants to know what the connection is for; redis-py warns when it is told.
            self._send_once = _through_pool(client.connection_pool, () if family == "redis" else ("EVALSHA",))

    def encode(self, key: Argument) -> bytes:
        """The bytes of *key* as the client sends them."""
        return bytes(self._client.get_encoder().encode(key))

    async def evaluate(
        self, script: Script, keys: Sequence[bytes], arguments: Sequence[Argument], *, once: bool
    ) -> object:
        """
        Run *script* and return its reply; the last of *keys* says where.

        With *once* it is executed at most once. Without, the driver may send it again.
        """
        send = self._send_once if once else self._send
        words = (len(keys), *keys, *arguments)
        try:
            return await send("EVALSHA", script.sha, *words)
        except self._no_script:  # so it was not executed
            return await send("EVAL", script.text, *words)

    async def get(self, key: bytes) -> object:
        """Read one key. By a script, because a client may be set to send a GET to a replica."""
        return await self._send("EVAL", "return redis.call('GET', KEYS[1])", 1, key)

    async def aclose(self) -> None:
        """Close a client of ours; the user's own stays open."""
        if self._owned:
            await self._client.aclose()


def _through_pool(pool: _Pool, hint: tuple[str, ...]) -> _Send:
    async def send(*words: Argument) -> object:
        connection = await pool.get_connection(*hint)
        try:
            if hasattr(connection, "can_read"):
                await _freshen(connection)
            await connection.send_command(*words)
            return await connection.read_response()
        finally:
            await pool.release(connection)

    return send


async def _freshen(connection: _Connection) -> None:
    """
    Connect anew where the server has closed the connection meanwhile, as long as nothing is sent.

    A pool of redis-py 8 does not look while it listens for notices of maintenance; earlier ones and
    valkey-py's do, and have no such method.
    """
    if await connection.can_read():
        await connection.disconnect()
        await connection.connect()


def _initialized(cluster: _Cluster) -> _Send:
    """
    Send by key from the first command on.

    redis-py sends what comes before it knows the nodes to any of them, and breaks off what is under
    way when it is redirected five times.
    """

    async def send(*words: Argument) -> object:
        await cluster.initialize()
        return await cluster.execute_command(*words)

    return send


def _through_cluster(cluster: _Cluster) -> _Send:
    async def send(verb: str, script: str, number: int, *words: Argument) -> object:
        await cluster.initialize()
        # To a node that is named, a cluster's client sends once; where the slot has moved, it was not executed.
        node = cluster.get_node_from_key(cast("bytes", words[number - 1]))
        return await cluster.execute_command(verb, script, number, *words, target_nodes=node)

    return send


def link_to(client_or_url: object) -> Link:
    """
    Link to the user's own client, or to one that is made for a URL. Nothing is sent.

    Raises:
        ConfigurationError: it is neither, or the driver is missing. The URL is never repeated.
    """
    if isinstance(client_or_url, str):
        return Link(_client_for(client_or_url), owned=True, family="redis")
    return Link(cast("_Client", client_or_url), owned=False, family=_check_client(client_or_url))


def _check_client(client: object) -> str:
    """Return which driver the *client* is of."""
    modules = {parent.__module__.partition(".")[0] for parent in type(client).__mro__}
    families = modules & {"redis", "valkey"}
    if not families or not inspect.iscoroutinefunction(getattr(client, "execute_command", None)):
        msg = (
            "client must be a Redis or RedisCluster of redis.asyncio (or valkey.asyncio) or a URL such as "
            f"'redis://localhost', not {type(client).__name__}; of a Sentinel pass sentinel.master_for(service)"
        )
        raise ConfigurationError(msg)
    return families.pop()


def _client_for(url: str) -> _Client:
    scheme, colon, rest = url.partition("://")
    plain = _SINGLE.get(scheme) or _CLUSTER.get(scheme)
    if not colon or plain is None:
        msg = f"url must begin with one of {', '.join([*_SINGLE, *_CLUSTER])}; for Sentinel pass a client"
        raise ConfigurationError(msg)
    try:
        from redis.asyncio import Redis, RedisCluster  # noqa: PLC0415  (a client of your own may be valkey-py's)
        from redis.asyncio.retry import Retry  # noqa: PLC0415
        from redis.backoff import ExponentialWithJitterBackoff  # noqa: PLC0415
    except ModuleNotFoundError as error:
        msg = f"{error.name} is not installed; run: pip install 'fencing-sdk[redis]'"
        raise ConfigurationError(msg) from error
    with suppress(TypeError, ValueError, AttributeError):  # the driver may quote the url, so not even in the chain
        if scheme in _CLUSTER:
            return cast("_Client", RedisCluster.from_url(f"{plain}://{rest}", socket_timeout=PATIENCE))
        retry = Retry(ExponentialWithJitterBackoff(base=0.05, cap=1), RESENDS)
        client = cast("_Client", Redis.from_url(f"{plain}://{rest}", socket_timeout=PATIENCE, retry=retry))
        client.connection_pool.make_connection()  # it knows the options, and does not connect
        return client
    msg = "url cannot be used: its host cannot be read, or an option in its query is unknown or has a wrong value"
    raise ConfigurationError(msg)
