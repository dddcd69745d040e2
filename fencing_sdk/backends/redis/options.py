"""
Reads a URL or a client: which servers the backend connects to, and how. Opens no connection, and reads no file.

    redis://[[user]:password@]host[:port][/db]            rediss:// with TLS; valkey://, valkeys:// are the same
    unix://[[user]:password@]/path/to/socket[?db=1]       also redis+unix://
    redis+sentinel://[[user]:password@]host[:port],.../service[/db]
    redis+cluster://[[user]:password@]host[:port],...

User and password are those of the servers; the ones of the Sentinels are options in the query. An error never
repeats a part of the URL: a mistyped password may stand in any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import parse_qsl, unquote

from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection

from fencing_sdk.backends.redis.connection.client_settings import servers_of_client
from fencing_sdk.backends.redis.connection.cluster import Address, SlotMap
from fencing_sdk.backends.redis.connection.dial import RedisDialer, ServerDialer, ServerSettings
from fencing_sdk.backends.redis.connection.driver_options import DRIVER_OPTIONS, driver_arguments
from fencing_sdk.backends.redis.connection.sentinel import SentinelDialer, SentinelService
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
    """The parts of a URL, decoded except for the hosts and the path."""

    kind: type[AbstractConnection]
    arguments: dict[str, object]
    hosts: str
    path: str

    def refuse(self, how: str) -> NoReturn:
        """Say what is wrong with the URL."""
        msg = f"url {how}"
        raise ConfigurationError(msg)

    def addresses(self, port: int) -> list[Address]:
        """Read the hosts, separated by commas."""
        return [_address(host, port) for host in self.hosts.split(",")]

    def server(self) -> ServerSettings:
        """How to connect to the servers, apart from their addresses."""
        return ServerSettings(self.kind, self.arguments)

    def take_database(self, text: str) -> None:
        """Read the number of the database in the path. It must not stand in the query too."""
        if not text:
            return
        if "db" in self.arguments:
            self.refuse("names the database twice, in its path and as db")
        self.arguments["db"] = _number(text, "its path must be the number of a database, such as /0", range(2**31))


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
    scheme, _, rest = url.partition("://")
    if scheme not in schemes:
        msg = f"url must begin with one of {', '.join(f'{known}://' for known in schemes)}"
        raise ConfigurationError(msg)
    if "#" in rest:
        msg = "url has a '#', after which nothing would be read; write %23 where it is meant"
        raise ConfigurationError(msg)
    rest, _, query = rest.partition("?")
    if options is None:
        options = {name: value for name, value in parse_qsl(query, keep_blank_values=True) if name in DRIVER_OPTIONS}
    authority, slash, path = rest.partition("/")
    login, _, hosts = authority.rpartition("@")
    found = schemes[scheme]
    if "@" in path and found.kind is not UnixDomainSocketConnection:
        msg = "url has a '/' before an '@'; percent-encode user and password: write %2F for '/'"
        raise ConfigurationError(msg)
    arguments = _with_login(login, driver_arguments(options, refused=found.refused))
    return RedisUrlParts(found.kind, arguments, hosts, slash + path)


def topology_from_client(client: object) -> RedisTopology:
    """
    Read how *client* makes its connections. The client itself is not used.

    Raises:
        ConfigurationError: it is no asyncio client of redis-py or valkey-py, or it connects to replicas.
    """
    return RedisTopology(servers_of_client(client))


def _single(parts: RedisUrlParts) -> RedisTopology:
    if "," in parts.hosts:
        parts.refuse("names several hosts; for Sentinels write redis+sentinel://, for a cluster redis+cluster://")
    parts.take_database(parts.path.strip("/"))
    return RedisTopology(ServerDialer(parts.server().at(*_address(parts.hosts or "localhost", DEFAULT_PORT))))


def _unix(parts: RedisUrlParts) -> RedisTopology:
    if parts.hosts or not parts.path.strip("/"):
        parts.refuse("must look like unix:///path/to/socket?db=0, with three slashes, because a socket has no host")
    parts.arguments["path"] = _name(parts.path)
    return RedisTopology(ServerDialer(parts.server()))


def _sentinel(parts: RedisUrlParts) -> RedisTopology:
    service, _, database = parts.path.strip("/").partition("/")
    if not parts.hosts or not service:
        parts.refuse(
            "must look like redis+sentinel://host:26379,host:26379/service, with the service the Sentinels watch"
        )
    parts.take_database(database)
    login = {name: parts.arguments.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    shared = {name: value for name, value in parts.arguments.items() if name.startswith(("ssl_", "socket_"))}
    sentinel = ServerSettings(parts.kind, {**shared, **login})
    sentinels = [sentinel.at(*address) for address in parts.addresses(_SENTINEL_PORT)]
    return RedisTopology(SentinelDialer(parts.server(), SentinelService(_name(service), sentinels)))


def _cluster(parts: RedisUrlParts) -> RedisTopology:
    if not parts.hosts:
        parts.refuse("must look like redis+cluster://host:6379,host:6379")
    if parts.path.strip("/") or parts.arguments.get("db"):
        parts.refuse("names a database, but a cluster has only one; leave it out")
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
"""The schemes of this backend."""


def _with_login(text: str, arguments: dict[str, object]) -> dict[str, object]:
    """Add the user and the password that stand before the host."""
    user, _, password = text.partition(":")
    found = {name: _decoded(part) for name, part in (("username", user), ("password", password)) if part}
    if found.keys() & arguments.keys():
        msg = "url names the user or the password twice, before the host and in the query"
        raise ConfigurationError(msg)
    login = arguments | found
    if "password" in login:
        login.setdefault("username", "default")  # as RESP3 does; a server without a password accepts any
    elif "username" in login:
        msg = "url names a user without a password; write user:password@host, or :password@host"
        raise ConfigurationError(msg)
    return login


def _address(text: str, port: int) -> Address:
    host, colon, number = text.rpartition(":")
    if not colon or text.endswith("]"):  # the colons of an IPv6 address are in brackets
        host, number = text, str(port)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif set(host) & set(":[]"):
        msg = "url has an IPv6 address without brackets, or a ':' or '@' that is not percent-encoded; write [::1]:6379"
        raise ConfigurationError(msg)
    if not host:
        msg = "url has an empty host"
        raise ConfigurationError(msg)
    return _name(host), _number(number, "a port must be a number from 1 to 65535", range(1, 65536))


def _number(text: str, rule: str, allowed: range) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 10 and int(text) in allowed:  # noqa: PLR2004
        return int(text)
    msg = f"url: {rule}"
    raise ConfigurationError(msg)


def _decoded(text: str) -> str:
    try:
        decoded = unquote(text, errors="strict")
        decoded.encode()
    except UnicodeError:  # its text quotes the URL, so it must not become the cause
        decoded = None
    if decoded is None:
        msg = "url has bytes that are not UTF-8; percent-encode special characters as UTF-8"
        raise ConfigurationError(msg)
    return decoded


def _name(text: str) -> str:
    """Decode a host, a path or the name of a service."""
    name = _decoded(text)
    if any(letter < " " or letter == "\x7f" for letter in name):
        msg = "url has a control character in a host, a path or the name of a service"
        raise ConfigurationError(msg)
    return name
