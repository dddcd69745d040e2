"""
Reads a URL or a client: which servers the backend connects to, and how. Opens no connection, and reads no file.

    redis://[[user]:password@]host[:port][/db]            rediss:// with TLS; valkey://, valkeys:// are the same
    unix://[[user]:password@]/path/to/socket[?db=1]       also redis+unix://
    redis+sentinel://[[user]:password@]host[:port],.../service[/db]
    redis+cluster://[[user]:password@]host[:port],...
    redis+quorum://[[user]:password@]host[:port],host[:port],host[:port][/db]

User and password are those of the servers; the ones of the Sentinels are options in the query. An error never
repeats a part of the URL: a mistyped password may stand in any of them. The options of redis-py in the query are read
strictly: a typing error must not turn TLS off.

Of a client that the user has made, the backend copies the settings with which the client makes its connections. It does
not use, change or close them. It copies those of valkey-py into redis-py, so that there is one driver, with one set of
errors.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection

from fencing_sdk._values.drivers import DIFFERS, KnownDriver
from fencing_sdk._values.url import StoreUrl, decoded, read_database, read_seconds, read_switch, refuse_url, split_url
from fencing_sdk.backends.redis.connection.dial import (
    BACKEND,
    REDIS_PY,
    SentinelDialer,
    SentinelService,
    ServerDialer,
    ServerSettings,
)
from fencing_sdk.backends.redis.connection.router import SlotMap
from fencing_sdk.errors import ConfigurationError

Servers: TypeAlias = ServerDialer | SentinelDialer | SlotMap
"""One server, the master of a service, or the nodes of a cluster."""

DEFAULT_PORT, _SENTINEL_PORT = 6379, 26379
_FEWEST, _MOST = 3, 7
"""Nodes of a quorum."""

Schemes: TypeAlias = Mapping[str, tuple[type[AbstractConnection], tuple[str, ...]]]
"""Ways to the servers, and the beginnings of the driver's options that a scheme refuses."""

_PLAIN, _TLS = ("ssl_", "sentinel_"), ("sentinel_",)
_SCHEMES: Schemes = {
    "redis": (Connection, _PLAIN),
    "rediss": (SSLConnection, _TLS),
    "valkey": (Connection, _PLAIN),
    "valkeys": (SSLConnection, _TLS),
    "unix": (UnixDomainSocketConnection, _PLAIN),
    "redis+unix": (UnixDomainSocketConnection, _PLAIN),
    "redis+sentinel": (Connection, ("ssl_",)),
    "rediss+sentinel": (SSLConnection, ()),
    "redis+cluster": (Connection, _PLAIN),
    "rediss+cluster": (SSLConnection, _TLS),
}
_QUORUM_SCHEMES: Schemes = {"redis+quorum": (Connection, _PLAIN), "rediss+quorum": (SSLConnection, _TLS)}


def servers_of_url(url: str, options: Mapping[str, object]) -> Servers:
    """
    Read *url* with the driver's *options*, named in `DRIVER_OPTIONS`.

    Raises:
        ConfigurationError: the URL or an option cannot be used.
    """
    parts, kind, arguments = _read_url(url, options, _SCHEMES)
    form, path = parts.scheme.rpartition("+")[2], parts.path.strip("/")
    if form == "unix":
        if parts.hosts or not path:
            refuse_url("must look like unix:///path/to/socket?db=0, with three slashes, because a socket has no host")
        return ServerDialer(ServerSettings(kind, {**arguments, "path": decoded(parts.path, "path")}))
    if form == "sentinel":
        service, _, database = path.partition("/")
        if not parts.hosts or not service:
            refuse_url(
                "must look like redis+sentinel://host:26379,host:26379/service, with the service the Sentinels watch"
            )
        _take_database(database, arguments)
        login = {name: arguments.pop(f"sentinel_{name}", None) for name in ("username", "password")}
        shared = {name: value for name, value in arguments.items() if name.startswith(("ssl_", "socket_"))}
        sentinel = ServerSettings(kind, {**shared, **login})
        sentinels = [sentinel.at(*address.at(_SENTINEL_PORT)) for address in parts.addresses()]
        return SentinelDialer(ServerSettings(kind, arguments), SentinelService(decoded(service, "path"), sentinels))
    if form == "cluster":
        if not parts.hosts:
            refuse_url("must look like redis+cluster://host:6379,host:6379")
        if path or arguments.get("db"):
            refuse_url("names a database, but a cluster has only one; leave it out")
        seeds = [address.at(DEFAULT_PORT) for address in parts.addresses()]
        return SlotMap(ServerSettings(kind, arguments), seeds=seeds)
    if "," in parts.hosts:
        refuse_url("names several hosts; for Sentinels write redis+sentinel://, for a cluster redis+cluster://")
    [address] = [one.at(DEFAULT_PORT) for one in parts.addresses()] if parts.hosts else [("localhost", DEFAULT_PORT)]
    _take_database(parts.path, arguments)
    return ServerDialer(ServerSettings(kind, arguments).at(*address))


def nodes_of_url(url: str, options: Mapping[str, object]) -> list[ServerDialer]:
    """
    Read the *url* of a quorum, as `servers_of_url`.

    Raises:
        ConfigurationError: the URL or an option cannot be used.
    """
    parts, kind, arguments = _read_url(url, options, _QUORUM_SCHEMES)
    if not parts.hosts:
        refuse_url("must look like redis+quorum://host:6379,host:6379,host:6379")
    addresses = [address.at(DEFAULT_PORT) for address in parts.addresses()]
    _take_database(parts.path.strip("/"), arguments)
    if len(set(addresses)) < len(addresses):
        refuse_url("names one server twice: it would vote twice")
    return [ServerDialer(ServerSettings(kind, arguments).at(*address)) for address in addresses]


def _read_url(
    url: str, options: Mapping[str, object], schemes: Schemes
) -> tuple[StoreUrl, type[AbstractConnection], dict[str, object]]:
    """Return the parts of *url*, the class of its connections, and their arguments, apart from the addresses."""
    scheme = url.partition("://")[0]
    if scheme not in schemes:
        msg = f"url must begin with one of {', '.join(f'{known}://' for known in schemes)}"
        raise ConfigurationError(msg)
    parts, (kind, refused) = split_url(url), schemes[scheme]
    arguments: dict[str, object] = {}
    for name, value in options.items():
        if refused and name.startswith(refused):
            msg = f"{name} needs another scheme: write rediss:// for TLS, redis+sentinel:// for Sentinels"
            raise ConfigurationError(msg)
        arguments[name] = _READERS[name](name, value)
    login = {name: text for name, text in (("username", parts.user), ("password", parts.password)) if text}
    if login.keys() & arguments.keys():
        refuse_url("names the user or the password twice, before the host and in the query")
    arguments |= login
    if "password" in arguments:
        arguments.setdefault("username", "default")  # as RESP3 does; a server without a password accepts any
    elif "username" in arguments:
        refuse_url("names a user without a password; write user:password@host, or :password@host")
    return parts, kind, arguments


def _take_database(text: str, arguments: dict[str, object]) -> None:
    number = read_database(text)
    if number is not None and "db" in arguments:
        refuse_url("names the database twice, in its path and as db")
    if number is not None:
        arguments["db"] = number


def nodes_of_clients(clients: object) -> list[ServerDialer]:
    """
    Read how *clients* connect, each to one node of a quorum; those of a URL are dialers already.

    Raises:
        ConfigurationError: they are not clients of redis-py or valkey-py, not each of one server, or too few.
    """
    if not isinstance(clients, Sequence) or isinstance(clients, str | bytes):
        msg = "clients must be a list of asyncio clients of redis-py or valkey-py, one for each node"
        raise ConfigurationError(msg)
    servers = [client if isinstance(client, ServerDialer) else servers_of_client(client) for client in clients]
    dialers = [server for server in servers if isinstance(server, ServerDialer)]
    if len(dialers) < len(servers):
        msg = "clients must lead to one server each, not to a cluster, nor to a service of Sentinels: it may fail over"
        raise ConfigurationError(msg)
    if not _FEWEST <= len(dialers) <= _MOST:
        msg = f"a quorum needs {_FEWEST} to {_MOST} independent servers, not {len(dialers)}; for one: redis://"
        raise ConfigurationError(msg)
    return dialers


VALKEY_PY = KnownDriver("valkey", user=BACKEND)

_OWN_PREFIXES = (
    *("encoder_class", "event_dispatcher", "legacy_responses", "parser_class", "retry_on_"),
    *("driver_info", "himport_", "lib_", "maint", "orig_", "oss_"),
)
"""Arguments for the client's own connections: decoding, resends, maintenance of the server, its name."""


def servers_of_client(client: object) -> Servers:
    """
    Read which servers *client* connects to, and how.

    Raises:
        ConfigurationError: it is not a client of redis-py or valkey-py, it connects to replicas, or its connections do
            what those of asyncio cannot.
    """
    kind = type(client)
    try:
        if not hasattr(client, "command_stack"):  # a pipeline has one
            if isinstance(client, _classes("Redis", "Valkey")):
                return _servers_of_pool(client.connection_pool)  # type: ignore[attr-defined]
            if isinstance(client, _classes("RedisCluster", "ValkeyCluster")):
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


def _classes(*names: str) -> tuple[type, ...]:
    packages = ("redis", "redis.asyncio", "valkey", "valkey.asyncio")
    modules = [sys.modules.get(package) for package in packages]  # the caller that made such a client has imported it
    return tuple(getattr(module, name) for module in modules for name in names if hasattr(module, name))


def _servers_of_pool(pool: Any) -> ServerDialer | SentinelDialer:
    server = _copied(pool.connection_class, pool.connection_kwargs)
    if not any(kind.__name__ == "SentinelConnectionPool" for kind in type(pool).__mro__):
        return ServerDialer(server)
    sentinel = pool.sentinel_manager
    if not pool.is_master:
        msg = "client connects to replicas, which take no locks; pass the client of Sentinel.master_for"
        raise ConfigurationError(msg)
    pools = [one.connection_pool for one in sentinel.sentinels]
    return SentinelDialer(
        server,
        SentinelService(
            pool.service_name,
            [_copied(pool.connection_class, pool.connection_kwargs) for pool in pools],
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


def _copied(kind: type, arguments: Mapping[str, object]) -> ServerSettings:
    """
    Copy the arguments of the user's connections for the class of redis-py that connects like *kind*.

    Raises:
        ConfigurationError: *kind* is unknown, or its connections would be less safe as those of asyncio.
    """
    ancestors = [ancestor.__name__ for ancestor in kind.__mro__]
    of_the_user = issubclass(kind, AbstractConnection) and not kind.__module__.startswith("redis.")
    if of_the_user and "SentinelManagedConnection" not in ancestors:
        plain: type[AbstractConnection] | None = kind
    else:
        kinds = (UnixDomainSocketConnection, SSLConnection, Connection)
        plain = next((each for each in kinds if each.__name__ in ancestors), None)
    if plain is None:
        msg = f"client has connections of an unknown kind, {kind.__name__}; pass a URL"
        raise ConfigurationError(msg)
    makers = [vars(ancestor)["__init__"] for ancestor in plain.__mro__ if "__init__" in vars(ancestor)]
    known = {name for maker in makers for name in inspect.signature(maker).parameters}
    if not any(ancestor.__module__.endswith(".asyncio.connection") for ancestor in kind.__mro__):
        lost = [name for name, value in arguments.items() if name.startswith("ssl_") and value and name not in known]
        lost += [name for name in ("redis_connect_func", "valkey_connect_func") if arguments.get(name) is not None]
        if lost:
            names = ", ".join(lost)
            msg = f"client has {names}, which connections of asyncio cannot take; pass a client of redis.asyncio"
            raise ConfigurationError(msg)
    copied = {name: value for name, value in arguments.items() if name in known and not name.startswith(_OWN_PREFIXES)}
    if not isinstance(copied.get("socket_keepalive_options"), Mapping):
        copied.pop("socket_keepalive_options", None)
    if arguments.get("valkey_connect_func") is not None:
        copied["redis_connect_func"] = arguments["valkey_connect_func"]
    if copied.get("password") and not copied.get("username"):
        copied["username"] = "default"  # as RESP3 does; a server without a password accepts any
    return ServerSettings(plain, copied)


def _text(name: str, value: object) -> object:
    if isinstance(value, str) and value:
        return value
    msg = f"{name} must be a non-empty text"
    raise ConfigurationError(msg)


def _client_name(name: str, value: object) -> object:
    if not all("!" <= letter <= "~" for letter in str(_text(name, value))):
        msg = f"{name} must have no spaces, and no letters beyond ASCII: the server would refuse it"
        raise ConfigurationError(msg)
    return value


def _database(name: str, value: object) -> object:
    text = str(value)
    if not isinstance(value, str | int) or isinstance(value, bool) or not (text.isascii() and text.isdigit()):
        msg = f"{name} must be a whole number from 0"
        raise ConfigurationError(msg)
    if len(text) > 9:  # noqa: PLR2004
        msg = f"{name} is too large"
        raise ConfigurationError(msg)
    return int(text)


def _cert_reqs(name: str, value: object) -> object:
    text = str(value).lower()
    if not isinstance(value, str) or text not in {"required", "optional", "none"}:  # None must not turn TLS off
        msg = f"{name} must be one of required, optional, none"
        raise ConfigurationError(msg)
    return text


_READERS: Mapping[str, Callable[[str, object], object]] = {
    "db": _database,
    "username": _text,
    "password": _text,
    "client_name": _client_name,
    "socket_connect_timeout": read_seconds,
    "socket_timeout": read_seconds,
    "sentinel_username": _text,
    "sentinel_password": _text,
    "ssl_ca_certs": _text,
    "ssl_certfile": _text,
    "ssl_keyfile": _text,
    "ssl_cert_reqs": _cert_reqs,
    "ssl_check_hostname": read_switch,
}

DRIVER_OPTIONS = tuple(_READERS)
"""The options of a URL's query, or of `connect`, that belong to the driver and not to the backend."""
