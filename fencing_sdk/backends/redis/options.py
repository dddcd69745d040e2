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
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl

from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection

from fencing_sdk._values.options import read_seconds, read_switch
from fencing_sdk._values.url import StoreUrl, decoded, read_database, refuse_url, split_url
from fencing_sdk.backends.redis.connection.client_settings import servers_of_client
from fencing_sdk.backends.redis.connection.dial import RedisDialer, ServerDialer, ServerSettings
from fencing_sdk.backends.redis.connection.topology import Address, SentinelDialer, SentinelService, SlotMap
from fencing_sdk.errors import ConfigurationError

DEFAULT_PORT = 6379
_SENTINEL_PORT = 26379


@dataclass(frozen=True, slots=True, repr=False)
class RedisTopology:
    """The servers with the locks: one server, the master of a service, or the nodes of a cluster."""

    servers: RedisDialer | SlotMap


@dataclass(frozen=True, slots=True)
class RedisUrlKind:
    """What a scheme says: how servers are reached, and which options of the driver are refused, by their beginnings."""

    kind: type[AbstractConnection]
    refused: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Scheme(RedisUrlKind):
    read: Callable[[RedisUrlParts], RedisTopology]


@dataclass(frozen=True, slots=True, repr=False)
class RedisUrlParts:
    """A URL, and the arguments for the driver that it stands for."""

    kind: type[AbstractConnection]
    arguments: dict[str, object]
    url: StoreUrl

    def addresses(self, port: int) -> list[Address]:
        """Read the hosts, separated by commas."""
        return [address.at(port) for address in self.url.addresses()]

    def server(self) -> ServerSettings:
        """How to connect to the servers, apart from their addresses."""
        return ServerSettings(self.kind, self.arguments)

    def take_database(self, text: str) -> None:
        """Read the number of the database in the path. It must not stand in the query too."""
        number = read_database(text)
        if number is None:
            return
        if "db" in self.arguments:
            refuse_url("names the database twice, in its path and as db")
        self.arguments["db"] = number


def topology_from_url(url: str, options: Mapping[str, object] | None = None) -> RedisTopology:
    """
    Read *url*.

    Args:
        url: One of the forms at the top of this module.

        options: The driver's options, named in `DRIVER_OPTIONS`. Without this argument they are read from
            the query of *url*, and its other names are ignored.

    Raises:
        ConfigurationError: the URL or an option cannot be used.
    """
    parts = read_url(url, options, SCHEMES)
    return SCHEMES[url.partition("://")[0]].read(parts)


def read_url(url: str, options: Mapping[str, object] | None, schemes: Mapping[str, RedisUrlKind]) -> RedisUrlParts:
    """
    Split *url*, which begins with one of *schemes*, into its parts.

    Raises:
        ConfigurationError: the URL or an option cannot be used.
    """
    scheme = url.partition("://")[0]
    if scheme not in schemes:
        msg = f"url must begin with one of {', '.join(f'{known}://' for known in schemes)}"
        raise ConfigurationError(msg)
    parts = split_url(url)
    if options is None:
        options = {
            name: value for name, value in parse_qsl(parts.query, keep_blank_values=True) if name in DRIVER_OPTIONS
        }
    found = schemes[scheme]
    arguments = _with_login(parts, driver_arguments(options, refused=found.refused))
    return RedisUrlParts(found.kind, arguments, parts)


def topology_from_client(client: object) -> RedisTopology:
    """
    Read how *client* makes its connections. The client itself is not used.

    Raises:
        ConfigurationError: it is not an asyncio client of redis-py or valkey-py, or it connects to replicas.
    """
    return RedisTopology(servers_of_client(client))


def _single(parts: RedisUrlParts) -> RedisTopology:
    if "," in parts.url.hosts:
        refuse_url("names several hosts; for Sentinels write redis+sentinel://, for a cluster redis+cluster://")
    [address] = parts.addresses(DEFAULT_PORT) if parts.url.hosts else [("localhost", DEFAULT_PORT)]
    parts.take_database(parts.url.path)
    return RedisTopology(ServerDialer(parts.server().at(*address)))


def _unix(parts: RedisUrlParts) -> RedisTopology:
    if parts.url.hosts or not parts.url.path.strip("/"):
        refuse_url("must look like unix:///path/to/socket?db=0, with three slashes, because a socket has no host")
    parts.arguments["path"] = decoded(parts.url.path, "path")
    return RedisTopology(ServerDialer(parts.server()))


def _sentinel(parts: RedisUrlParts) -> RedisTopology:
    service, _, database = parts.url.path.strip("/").partition("/")
    if not parts.url.hosts or not service:
        refuse_url(
            "must look like redis+sentinel://host:26379,host:26379/service, with the service the Sentinels watch"
        )
    addresses = parts.addresses(_SENTINEL_PORT)
    parts.take_database(database)
    login = {name: parts.arguments.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    shared = {name: value for name, value in parts.arguments.items() if name.startswith(("ssl_", "socket_"))}
    sentinel = ServerSettings(parts.kind, {**shared, **login})
    sentinels = [sentinel.at(*address) for address in addresses]
    return RedisTopology(SentinelDialer(parts.server(), SentinelService(decoded(service, "path"), sentinels)))


def _cluster(parts: RedisUrlParts) -> RedisTopology:
    if not parts.url.hosts:
        refuse_url("must look like redis+cluster://host:6379,host:6379")
    if parts.url.path.strip("/") or parts.arguments.get("db"):
        refuse_url("names a database, but a cluster has only one; leave it out")
    return RedisTopology(SlotMap(parts.server(), seeds=parts.addresses(DEFAULT_PORT)))


_PLAIN = ("ssl_", "sentinel_")
_TLS = ("sentinel_",)
_SOCKET = ("ssl_", "sentinel_", "socket_keepalive")

SCHEMES: Mapping[str, _Scheme] = {
    "redis": _Scheme(Connection, _PLAIN, _single),
    "rediss": _Scheme(SSLConnection, _TLS, _single),
    "valkey": _Scheme(Connection, _PLAIN, _single),
    "valkeys": _Scheme(SSLConnection, _TLS, _single),
    "unix": _Scheme(UnixDomainSocketConnection, _SOCKET, _unix),
    "redis+unix": _Scheme(UnixDomainSocketConnection, _SOCKET, _unix),
    "redis+sentinel": _Scheme(Connection, ("ssl_",), _sentinel),
    "rediss+sentinel": _Scheme(SSLConnection, (), _sentinel),
    "redis+cluster": _Scheme(Connection, _PLAIN, _cluster),
    "rediss+cluster": _Scheme(SSLConnection, _TLS, _cluster),
}
"""The schemes of one server, a service of Sentinels, and a cluster."""


def _with_login(parts: StoreUrl, arguments: dict[str, object]) -> dict[str, object]:
    """Add the user and the password that stand before the host."""
    found = {name: text for name, text in (("username", parts.user), ("password", parts.password)) if text}
    if found.keys() & arguments.keys():
        refuse_url("names the user or the password twice, before the host and in the query")
    login = arguments | found
    if "password" in login:
        login.setdefault("username", "default")  # as RESP3 does; a server without a password accepts any
    elif "username" in login:
        refuse_url("names a user without a password; write user:password@host, or :password@host")
    return login


_FEWEST, _MOST = 3, 7
QUORUM_SCHEMES: Mapping[str, RedisUrlKind] = {
    "redis+quorum": RedisUrlKind(Connection, ("ssl_", "sentinel_")),
    "rediss+quorum": RedisUrlKind(SSLConnection, ("sentinel_",)),
}
"""The schemes of a quorum."""


@dataclass(frozen=True, slots=True, repr=False)
class QuorumTopology:
    """The nodes of a quorum."""

    dialers: Sequence[RedisDialer]

    def __post_init__(self) -> None:
        if not _FEWEST <= len(self.dialers) <= _MOST:
            msg = f"a quorum needs {_FEWEST} to {_MOST} independent servers, not {len(self.dialers)}; for one: redis://"
            raise ConfigurationError(msg)


def quorum_from_url(url: str, options: Mapping[str, object]) -> QuorumTopology:
    """
    Read *url*.

    Raises:
        ConfigurationError: the URL or an option cannot be used.
    """
    parts = read_url(url, options, QUORUM_SCHEMES)
    if not parts.url.hosts:
        refuse_url("must look like redis+quorum://host:6379,host:6379,host:6379")
    addresses = parts.addresses(DEFAULT_PORT)
    parts.take_database(parts.url.path.strip("/"))
    if len(set(addresses)) < len(addresses):
        refuse_url("names one server twice: it would vote twice")
    return QuorumTopology([ServerDialer(parts.server().at(*address)) for address in addresses])


def quorum_from_clients(clients: object) -> QuorumTopology:
    """
    Read how *clients* make their connections, each to one server. The clients themselves are not used.

    Raises:
        ConfigurationError: they are not asyncio clients of redis-py or valkey-py, or not each of one server.
    """
    if not isinstance(clients, Sequence) or isinstance(clients, str | bytes):
        msg = "clients must be a list of asyncio clients of redis-py or valkey-py, one for each node"
        raise ConfigurationError(msg)
    servers = [servers_of_client(client) for client in clients]
    dialers = [server for server in servers if isinstance(server, ServerDialer)]
    if len(dialers) < len(servers):
        msg = "clients must lead to one server each, not to a cluster, nor to a service of Sentinels: it may fail over"
        raise ConfigurationError(msg)
    return QuorumTopology(dialers)


Reader = Callable[[str, object], object]


def _text(name: str, value: object) -> object:
    if isinstance(value, str) and value:
        return value
    msg = f"{name} must be a non-empty text"
    raise ConfigurationError(msg)


def _client_name(name: str, value: object) -> object:
    text = _text(name, value)
    if all("!" <= letter <= "~" for letter in str(text)):
        return text
    msg = f"{name} must have no spaces, and no letters beyond ASCII: the server would refuse it"
    raise ConfigurationError(msg)


def _database(name: str, value: object) -> object:
    text = str(value)
    if not isinstance(value, str | int) or isinstance(value, bool) or not (text.isascii() and text.isdigit()):
        msg = f"{name} must be a whole number from 0"
        raise ConfigurationError(msg)
    if len(text) > 9:  # noqa: PLR2004
        msg = f"{name} is too large"
        raise ConfigurationError(msg)
    return int(text)


def _choice(choices: Mapping[str, object]) -> Reader:
    def read(name: str, value: object) -> object:
        text = str(value).lower()
        if not isinstance(value, str | bool) or text not in choices:  # None is not "none": it must not turn TLS off
            msg = f"{name} must be one of {', '.join(choices)}"
            raise ConfigurationError(msg)
        return choices[text]

    return read


_READERS: Mapping[str, Reader] = {
    "db": _database,
    "username": _text,
    "password": _text,
    "client_name": _client_name,
    "socket_connect_timeout": read_seconds,
    "socket_timeout": read_seconds,
    "socket_keepalive": read_switch,
    "sentinel_username": _text,
    "sentinel_password": _text,
    "ssl_ca_certs": _text,
    "ssl_ca_data": _text,
    "ssl_certfile": _text,
    "ssl_keyfile": _text,
    "ssl_ciphers": _text,
    "ssl_cert_reqs": _choice({"required": "required", "optional": "optional", "none": "none"}),
    "ssl_check_hostname": read_switch,
    "ssl_min_version": _choice({"tlsv1.2": ssl.TLSVersion.TLSv1_2, "tlsv1.3": ssl.TLSVersion.TLSv1_3}),
}

DRIVER_OPTIONS = tuple(_READERS)
"""The options of a URL's query, or of `connect`, that belong to the driver and not to the backend."""


def driver_arguments(options: Mapping[str, object], *, refused: tuple[str, ...] = ()) -> dict[str, object]:
    """
    Convert *options*, named in `DRIVER_OPTIONS`, to arguments of redis-py's connections.

    Args:
        options: Names and values; a value from a URL is a text.

        refused: Beginnings of names that have no meaning for the scheme.

    Raises:
        ConfigurationError: a value has a wrong type or range, or the scheme does not take the option.
    """
    for name in options:
        if refused and name.startswith(refused):
            msg = f"{name} needs another scheme: write rediss:// for TLS, redis+sentinel:// for Sentinels"
            raise ConfigurationError(msg)
    return {name: _READERS[name](name, value) for name, value in options.items()}
