"""
Reads the connection settings of a client that the user has made.

The backend does not use, change or close the client's connections. It copies the settings with which the
client makes them. It copies those of valkey-py into redis-py, so that there is one driver, with one set of errors.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection

from fencing_sdk._values.drivers import DIFFERS, KnownDriver
from fencing_sdk.backends.redis.connection.dial import BACKEND, REDIS_PY, RedisDialer, ServerDialer, ServerSettings
from fencing_sdk.backends.redis.connection.topology import SentinelDialer, SentinelService, SlotMap
from fencing_sdk.errors import ConfigurationError

VALKEY_PY = KnownDriver("valkey", user=BACKEND)

_OWN_ARGUMENTS = {
    "encoder_class",
    "event_dispatcher",
    "legacy_responses",
    "parser_class",
    "retry_on_error",
    "retry_on_timeout",
}
_OWN_PREFIXES = ("driver_info", "himport_", "lib_", "maint", "orig_", "oss_")
"""Arguments for the client's own connections: decoding, resends, maintenance of the server, its name."""

_KINDS: Mapping[str, type[AbstractConnection]] = {
    kind.__name__: kind for kind in (UnixDomainSocketConnection, SSLConnection, Connection)
}


def servers_of_client(client: object) -> RedisDialer | SlotMap:
    """
    Read which servers *client* connects to, and how.

    Raises:
        ConfigurationError: it is not a client of redis-py or valkey-py, it connects to replicas, or its connections do
            what those of asyncio cannot.
    """
    kind = type(client)
    try:
        pipeline = hasattr(client, "command_stack")
        if isinstance(client, tuple(_clients("Redis", "Valkey"))) and not pipeline:
            return _servers_of_pool(client.connection_pool)  # type: ignore[attr-defined]
        if isinstance(client, tuple(_clients("RedisCluster", "ValkeyCluster"))) and not pipeline:
            return _slots_of_cluster(client.nodes_manager)  # type: ignore[attr-defined]
    except DIFFERS as error:
        driver = VALKEY_PY if _is_of_valkey(client) else REDIS_PY
        msg = f"client cannot be read, pass a URL: {driver.described(error)}"
        raise ConfigurationError(msg) from error
    msg = (
        "client must be a Redis or RedisCluster of redis.asyncio or redis, or those of valkey; "
        f"got {kind.__name__} of {kind.__module__}"
    )
    raise ConfigurationError(msg)


def _is_of_valkey(part: object) -> bool:
    return any(parent.__module__.startswith("valkey.") for parent in type(part).__mro__)


def _clients(*names: str) -> Iterator[type]:
    for package in ("redis", "redis.asyncio", "valkey", "valkey.asyncio"):
        module = sys.modules.get(package)  # the caller that made such a client has imported it
        yield from (getattr(module, name) for name in names if hasattr(module, name))


def _servers_of_pool(pool: Any) -> RedisDialer:
    server = _server(pool)
    if not any(kind.__name__ == "SentinelConnectionPool" for kind in type(pool).__mro__):
        return ServerDialer(server)
    sentinel = pool.sentinel_manager
    if not pool.is_master:
        msg = "client connects to replicas, which take no locks; pass the client of Sentinel.master_for"
        raise ConfigurationError(msg)
    return SentinelDialer(
        server,
        SentinelService(
            pool.service_name,
            [_server(one.connection_pool) for one in sentinel.sentinels],
            peers=sentinel.min_other_sentinels,
            host=None if _is_of_valkey(sentinel) else sentinel._force_master_ip,  # noqa: SLF001
        ),
    )


def _slots_of_cluster(nodes: Any) -> SlotMap:
    arguments = dict(nodes.connection_kwargs)
    for name in ("redis_connect_func", "valkey_connect_func"):
        arguments.pop(name, None)  # it sends READONLY, for reads from replicas
    plain = SSLConnection if arguments.pop("ssl", False) else Connection  # as a client for threads says it
    kind = arguments.pop("connection_class", plain)
    seeds = [(node.host, int(node.port)) for node in nodes.startup_nodes.values()]
    return SlotMap(_copied(kind, arguments), seeds=seeds, remap=nodes.address_remap)


def _server(pool: Any) -> ServerSettings:
    return _copied(pool.connection_class, pool.connection_kwargs)


def _copied(kind: type, arguments: Mapping[str, object]) -> ServerSettings:
    plain = _plain_kind(kind)
    known = _parameters(plain) - _OWN_ARGUMENTS
    copied = {name: value for name, value in arguments.items() if name in known and not name.startswith(_OWN_PREFIXES)}
    _check_copied(plain, kind, arguments)
    if not isinstance(copied.get("socket_keepalive_options"), Mapping):
        copied.pop("socket_keepalive_options", None)
    if arguments.get("valkey_connect_func") is not None:
        copied["redis_connect_func"] = arguments["valkey_connect_func"]
    if copied.get("password") and not copied.get("username"):
        copied["username"] = "default"  # as RESP3 does; a server without a password accepts any
    return ServerSettings(plain, copied)


def _check_copied(plain: type, kind: type, arguments: Mapping[str, object]) -> None:
    """Refuse what cannot be copied from a client for threads without making its connections less safe."""
    if any(parent.__module__.endswith(".asyncio.connection") for parent in kind.__mro__):
        return
    known = _parameters(plain)
    lost = [name for name, value in arguments.items() if name.startswith("ssl_") and value and name not in known]
    lost += [name for name in ("redis_connect_func", "valkey_connect_func") if arguments.get(name) is not None]
    if lost:
        msg = f"client has {', '.join(lost)}, which connections of asyncio cannot take; pass a client of redis.asyncio"
        raise ConfigurationError(msg)


def _plain_kind(kind: type) -> type[AbstractConnection]:
    """Find the class of redis-py that connects like *kind*. A class that the user has derived stays as it is."""
    by_sentinel = any(ancestor.__name__ == "SentinelManagedConnection" for ancestor in kind.__mro__)
    if issubclass(kind, AbstractConnection) and not kind.__module__.startswith("redis.") and not by_sentinel:
        return kind
    for ancestor in kind.__mro__:
        if ancestor.__name__ in _KINDS:
            return _KINDS[ancestor.__name__]
    msg = f"client has connections of an unknown kind, {kind.__name__}; pass a URL"
    raise ConfigurationError(msg)


def _parameters(kind: type) -> set[str]:
    makers = [vars(ancestor)["__init__"] for ancestor in kind.__mro__ if "__init__" in vars(ancestor)]
    return {name for maker in makers for name in inspect.signature(maker).parameters}
