"""
Sends scripts through the user's client, or through a client that the guard makes for a URL.

redis-py and valkey-py send a command again when its answer is lost. Raising a fence twice does no harm. But
the caller's commands must not run twice: an INCR would count twice. So a guarded write is sent once, on a
connection of the driver, and a lost answer is an error of the driver. This module imports a driver only for a URL.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias, cast
from urllib.parse import parse_qsl

from fencing_sdk._http.tls import complaint_about
from fencing_sdk._values.drivers import install
from fencing_sdk._values.url import StoreUrl, decoded, read_database, refuse_url, split_url
from fencing_sdk.errors import ConfigurationError
from fencing_sdk.guards.redis._scripts import Argument, CheckedScript

_Send: TypeAlias = Callable[..., Awaitable[object]]

_SINGLE = {"redis": "redis", "rediss": "rediss", "unix": "unix", "valkey": "redis", "valkeys": "rediss"}
_CLUSTER = {f"{scheme}+cluster": plain for scheme, plain in _SINGLE.items() if scheme != "unix"}

_PORT = 6379
PATIENCE = 5.0
"""Seconds that a client for a URL waits for an answer, unless the URL sets another limit."""
TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
RESENDS = 3
"""How often a client for a URL repeats what may be repeated. `Redis.from_url` sets no retries."""


class _Encoder(Protocol):
    def encode(self, value: Argument, /) -> bytes | memoryview: ...


class _RedisConnection(Protocol):
    async def connect(self) -> None: ...

    async def disconnect(self) -> None: ...

    async def can_read(self) -> bool: ...

    async def send_command(self, *words: Argument) -> None: ...

    async def read_response(self) -> object: ...


class _RedisPool(Protocol):
    async def get_connection(self, *hint: str) -> _RedisConnection: ...

    def make_connection(self) -> _RedisConnection: ...

    async def release(self, connection: _RedisConnection, /) -> None: ...


class _RedisClient(Protocol):
    """The part of `redis.asyncio` and `valkey.asyncio` clients that is used here."""

    @property
    def connection_pool(self) -> _RedisPool: ...

    def get_encoder(self) -> _Encoder: ...

    async def execute_command(self, *words: Argument, **options: object) -> object: ...

    async def aclose(self) -> None: ...


class _RedisClusterClient(_RedisClient, Protocol):
    async def initialize(self) -> object: ...

    def get_node_from_key(self, key: bytes, /) -> object: ...


class GuardConnection:
    """Sends scripts through a client of the driver, and encodes keys as the client does."""

    __slots__ = ("_client", "_files", "_no_script", "_owned", "_send", "_send_once", "is_cluster")

    def __init__(
        self, client: _RedisClient, *, owned: bool, family: str, files: Mapping[str, str] | None = None
    ) -> None:
        self._client = client
        self._files = files or {}
        self._owned = owned
        self._no_script: type[Exception] = importlib.import_module(f"{family}.exceptions").NoScriptError
        self.is_cluster = hasattr(client, "get_node_from_key")
        self._send: _Send = client.execute_command
        self._send_once: _Send
        if self.is_cluster:
            self._send = _initialized(cast("_RedisClusterClient", client))
            self._send_once = _through_cluster(cast("_RedisClusterClient", client))
        else:
            # valkey-py requires the name of the command; redis-py warns about it.
            self._send_once = _through_pool(client.connection_pool, () if family == "redis" else ("EVALSHA",))

    def encode(self, key: Argument) -> bytes:
        """Encode *key* as the client does."""
        return bytes(self._client.get_encoder().encode(key))

    async def evaluate(
        self, script: CheckedScript, keys: Sequence[bytes], arguments: Sequence[Argument], *, once: bool
    ) -> object:
        """
        Run *script* on the server with the last of *keys*; return its reply.

        With *once* it runs at most once. Without, the driver may send it again.

        Raises:
            ConfigurationError: a file that the URL names for TLS cannot be used.
            Exception: the driver's error.
        """
        send = self._send_once if once else self._send
        words = (len(keys), *keys, *arguments)
        try:
            return await send("EVALSHA", script.sha, *words)
        except self._no_script:  # the server has not run it
            return await send("EVAL", script.text, *words)
        except Exception as error:  # the driver's names no file
            files = (self._files.get(name) for name in TLS_FILES)
            if self._files and (complaint := complaint_about(*files, names=TLS_FILES)) is not None:
                raise ConfigurationError(complaint) from error
            raise

    async def get(self, key: bytes) -> object:
        """Read one key. A client may send GET to a replica, so a script reads it."""
        return await self._send("EVAL", "return redis.call('GET', KEYS[1])", 1, key)

    async def aclose(self) -> None:
        """Close the client if the guard has made it."""
        if self._owned:
            await self._client.aclose()


def _through_pool(pool: _RedisPool, hint: tuple[str, ...]) -> _Send:
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


async def _freshen(connection: _RedisConnection) -> None:
    """
    Connect again if the server has closed the connection, before anything is sent.

    A pool of redis-py 8 does not check this while it listens for notices of maintenance. Earlier pools and
    valkey-py's check it, and their connections have no ``can_read``.
    """
    if await connection.can_read():
        await connection.disconnect()
        await connection.connect()


def _initialized(cluster: _RedisClusterClient) -> _Send:
    """
    Let the client read the map of the cluster before the first command.

    Without a map, redis-py sends commands to any node, and after five redirections it breaks off all that
    are under way.
    """

    async def send(*words: Argument) -> object:
        await cluster.initialize()
        return await cluster.execute_command(*words)

    return send


def _through_cluster(cluster: _RedisClusterClient) -> _Send:
    async def send(verb: str, script: str, number: int, *words: Argument) -> object:
        await cluster.initialize()
        # With target_nodes, the client sends the command once. If the slot has moved, the server has not run it.
        node = cluster.get_node_from_key(cast("bytes", words[number - 1]))
        return await cluster.execute_command(verb, script, number, *words, target_nodes=node)

    return send


def connection_to(client_or_url: object) -> GuardConnection:
    """
    Use the user's client, or make one for a URL. No I/O happens.

    Raises:
        ConfigurationError: the argument is neither, or the driver is missing. The URL is never repeated.
        BackendRefusedError: the argument is a URL, and the installed redis-py lacks what the guard uses of it.
    """
    if isinstance(client_or_url, str):
        client, files = _client_for(client_or_url)
        return GuardConnection(client, owned=True, family="redis", files=files)
    return GuardConnection(cast("_RedisClient", client_or_url), owned=False, family=_check_client(client_or_url))


def _check_client(client: object) -> str:
    """Return the name of the driver that *client* belongs to."""
    modules = {parent.__module__.partition(".")[0] for parent in type(client).__mro__}
    families = modules & {"redis", "valkey"}
    if not families or not inspect.iscoroutinefunction(getattr(client, "execute_command", None)):
        msg = (
            "client must be a Redis or RedisCluster of redis.asyncio (or valkey.asyncio) or a URL such as "
            f"'redis://localhost', not {type(client).__name__}; of a Sentinel pass sentinel.master_for(service)"
        )
        raise ConfigurationError(msg)
    return families.pop()


def _client_for(url: str) -> tuple[_RedisClient, Mapping[str, str]]:
    """Make a client for *url*, and return it with the paths of its files for TLS."""
    scheme, colon, _ = url.partition("://")
    if not colon or not (scheme in _SINGLE or scheme in _CLUSTER):
        msg = f"url must begin with one of {', '.join([*_SINGLE, *_CLUSTER])}; for Sentinel pass a client"
        raise ConfigurationError(msg)
    parts = split_url(url)
    try:
        from fencing_sdk.guards.redis._dialed import option_kinds  # noqa: PLC0415  (a client may be valkey-py's)
    except ModuleNotFoundError as error:
        msg = f"{error.name} is not installed; run: {install('redis')}"
        raise ConfigurationError(msg) from error
    kinds = option_kinds()
    place, texts = _place(_SINGLE.get(scheme, ""), parts), _options(parts)
    if place.keys() & texts.keys():
        refuse_url("names the server or the database twice, also in its query")
    with suppress(TypeError, ValueError, AttributeError):  # they may quote the url, so they must not become the cause
        options = {name: kinds.get(name, str)(text) for name, text in texts.items()}
        arguments = {"socket_timeout": PATIENCE, **options, **place}
        files = {name: texts[name] for name in TLS_FILES if name in texts}
        if scheme in _CLUSTER:
            addresses = [address.at(_PORT) for address in parts.addresses()]
            return _cluster_client(addresses, _CLUSTER[scheme], arguments), files
        return _single_client(_SINGLE[scheme], arguments), files
    msg = "url cannot be used: an option in its query is unknown or has a wrong value"
    raise ConfigurationError(msg)


def _place(kind: str, parts: StoreUrl) -> dict[str, object]:
    """Return what the driver needs to find a server and its database; nothing for a cluster."""
    if kind == "unix":
        if parts.hosts or not parts.path.strip("/"):
            refuse_url("must look like unix:///path/to/socket?db=0, with three slashes, because a socket has no host")
        return {"path": decoded(parts.path, "path")}
    database = read_database(parts.path)
    if not kind:
        if not parts.hosts or database:
            refuse_url("must look like redis+cluster://host:6379,host:6379, without a database: a cluster has only one")
        return {}
    if "," in parts.hosts:
        refuse_url("names several hosts; for a cluster write redis+cluster://")
    [(host, port)] = [address.at(_PORT) for address in parts.addresses()] if parts.hosts else [("localhost", _PORT)]
    return {"host": host, "port": port} | ({} if database is None else {"db": database})


def _options(parts: StoreUrl) -> dict[str, str]:
    """Return the login and the query, each as the text it is. Refuse a name that occurs twice."""
    login = [(name, text) for name, text in (("username", parts.user), ("password", parts.password)) if text]
    given = [*login, *parse_qsl(parts.query, keep_blank_values=True)]
    if len(dict(given)) < len(given):
        refuse_url("gives the user, the password or an option twice")
    return dict(given)


def _cluster_client(addresses: Sequence[tuple[str, int]], kind: str, arguments: Mapping[str, Any]) -> _RedisClient:
    from redis.asyncio.cluster import ClusterNode, RedisCluster  # noqa: PLC0415

    from fencing_sdk.guards.redis._dialed import REDIS_PY, DialedConnection, DialedTlsConnection  # noqa: PLC0415

    nodes = [ClusterNode(*address) for address in addresses]
    cluster = RedisCluster(startup_nodes=nodes, ssl=kind == "rediss", **arguments)
    # The client takes no class for its connections. It makes each node that it finds with these arguments.
    sort = DialedTlsConnection if kind == "rediss" else DialedConnection
    with REDIS_PY.known("connect"):
        cluster.get_connection_kwargs()["connection_class"] = sort
        for node in cluster.startup_nodes:
            node.connection_class = sort
    return cast("_RedisClient", cluster)


def _single_client(kind: str, arguments: Mapping[str, Any]) -> _RedisClient:
    from redis.asyncio import Redis, connection  # noqa: PLC0415
    from redis.asyncio.retry import Retry  # noqa: PLC0415
    from redis.backoff import ExponentialWithJitterBackoff  # noqa: PLC0415

    from fencing_sdk.guards.redis._dialed import DialedConnection, DialedTlsConnection  # noqa: PLC0415

    sorts = {"unix": connection.UnixDomainSocketConnection, "rediss": DialedTlsConnection}
    chosen = {"retry": Retry(ExponentialWithJitterBackoff(base=0.05, cap=1), RESENDS), **arguments}
    pool = connection.ConnectionPool(sorts.get(kind, DialedConnection), **chosen)
    client = cast("_RedisClient", Redis.from_pool(pool))
    client.connection_pool.make_connection()  # checks the options, and does not connect
    return client
