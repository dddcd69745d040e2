"""
From a client that the user already has to what a backend connects to.

The client's own connections are never used, changed or closed: only how it makes them is copied.
One of valkey-py is copied into redis-py's, so that there is one driver, with one set of errors.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection

from fencing_sdk.backends._known_driver import DIFFERS, KnownDriver
from fencing_sdk.backends.redis._cluster import SlotMap
from fencing_sdk.backends.redis._dial import BACKEND, REDIS_PY, Dialer, Server, ServerDialer
from fencing_sdk.backends.redis._sentinel import SentinelDialer, Service
from fencing_sdk.errors import ConfigurationError

__all__ = ["database_identity"]

VALKEY_PY = KnownDriver("valkey", ">=6.1,<7", backend=BACKEND)

_NOT_OURS = {
    "encoder_class",
    "event_dispatcher",
    "legacy_responses",
    "parser_class",
    "retry_on_error",
    "retry_on_timeout",
}
_UPKEEP = ("driver_info", "himport_", "lib_", "maint", "orig_", "oss_")
"""What a client has for its own connections: decoding, resends, moves of the server, prepared imports, its name."""

_KINDS: Mapping[str, type[AbstractConnection]] = {
    kind.__name__: kind for kind in (UnixDomainSocketConnection, SSLConnection, Connection)
}


def database_identity(client: object) -> Dialer | SlotMap:
    """
    Read where *client* connects to, and how.

    Raises:
        ConfigurationError: it is no asyncio client of redis-py or valkey-py, or one for replicas.
    """
    kind = type(client)
    try:
        if isinstance(client, tuple(_clients("Redis", "Valkey"))) and not hasattr(client, "command_stack"):
            return _of_pool(client.connection_pool)  # type: ignore[attr-defined]
        if isinstance(client, tuple(_clients("RedisCluster", "ValkeyCluster"))):
            return _of_cluster(client.nodes_manager)  # type: ignore[attr-defined]
    except DIFFERS as error:
        driver = VALKEY_PY if any(parent.__module__.startswith("valkey.") for parent in kind.__mro__) else REDIS_PY
        msg = f"client cannot be read, pass a URL: {driver.described(error)}"
        raise ConfigurationError(msg) from error
    msg = (
        "client must be a redis.asyncio.Redis or RedisCluster, or those of valkey.asyncio; "
        f"got {kind.__name__} of {kind.__module__}"
    )
    raise ConfigurationError(msg)


def _clients(*names: str) -> Iterator[type]:
    yield from (kind for kind in (Redis, RedisCluster) if kind.__name__ in names)
    valkey = sys.modules.get("valkey.asyncio")  # who has made a client has imported it
    yield from (getattr(valkey, name) for name in names if hasattr(valkey, name))


def _of_pool(pool: Any) -> Dialer:
    server = _server(pool)
    sentinel = getattr(pool, "sentinel_manager", None)
    if sentinel is None:
        return ServerDialer(server)
    if not pool.is_master:
        msg = "client is one for replicas, which take no locks; pass that of Sentinel.master_for"
        raise ConfigurationError(msg)
    return SentinelDialer(
        server,
        Service(
            pool.service_name,
            [_server(one.connection_pool) for one in sentinel.sentinels],
            peers=sentinel.min_other_sentinels,
            host=getattr(sentinel, "_force_master_ip", None),
        ),
    )


def _of_cluster(nodes: Any) -> SlotMap:
    arguments = dict(nodes.connection_kwargs)
    arguments.pop("redis_connect_func", None)  # it asks the nodes for reads from replicas
    kind = arguments.pop("connection_class", Connection)
    seeds = [(node.host, int(node.port)) for node in nodes.startup_nodes.values()]
    return SlotMap(_copied(kind, arguments), seeds=seeds, remap=getattr(nodes, "address_remap", None))


def _server(pool: Any) -> Server:
    return _copied(pool.connection_class, pool.connection_kwargs)


def _copied(kind: type, arguments: Mapping[str, object]) -> Server:
    plain = _plain_kind(kind)
    known = _parameters(plain) - _NOT_OURS
    copied = {name: value for name, value in arguments.items() if name in known and not name.startswith(_UPKEEP)}
    if arguments.get("valkey_connect_func") is not None:
        copied["redis_connect_func"] = arguments["valkey_connect_func"]
    if copied.get("password") and not copied.get("username"):
        copied["username"] = "default"  # as in RESP3, where a server without a password takes any
    return Server(plain, copied)


def _plain_kind(kind: type) -> type[AbstractConnection]:
    """Find the class of redis-py that connects like *kind*; one that the user has derived from it stays as it is."""
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
