"""
Reads a ``postgresql://`` URL, as libpq has it, without I/O.

    postgresql://[user[:password]@]host[:port][,host[:port]...]/database[?option=value&...]

asyncpg is given the parts, and reads only the options of the query itself. It takes what is missing from the
environment variables of libpq. A backend and a guard compare identities to learn whether they use the same database.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from getpass import getuser
from urllib.parse import parse_qsl, quote, urlencode

from fencing_sdk._values.store_url import (
    HostAddress,
    decoded,
    is_ipv6,
    joined,
    read_hosts,
    read_port,
    refuse_url,
    split_url,
)

__all__ = ["LIBPQ_OPTIONS", "SCHEMES", "TLS_FILES", "PostgresqlUrl", "read_postgresql_url"]

SCHEMES = ("postgresql", "postgres")
_LIBPQ = (
    "channel_binding client_encoding fallback_application_name gssdelegation gssencmode gsslib hostaddr keepalives "
    "keepalives_count keepalives_idle keepalives_interval krbsrvname load_balance_hosts max_protocol_version "
    "min_protocol_version replication require_auth requirepeer requiressl service sslcertmode sslcompression sslcrldir "
    "sslkeylogfile sslnegotiation sslsni tcp_user_timeout"
)
TLS_FILES = ("sslrootcert", "sslcert", "sslkey")
"""Options with the paths of an authority, of a certificate, and of its key."""
LIBPQ_OPTIONS = frozenset(_LIBPQ.split())
"""Options that a URL for libpq may have and a URL here may not. An error names them: no password reads like that."""
_PORT = 5432
_ELSEWHERE = {"service", "options", "search_path"}
"""Options of a URL that may lead to a database or schema that the rest of the URL does not name."""


@dataclass(frozen=True, slots=True, repr=False)
class PostgresqlUrl:
    """The parts of a URL. What it does not name is None or empty, and asyncpg looks for it in the environment."""

    addresses: tuple[HostAddress, ...]
    port: int | None
    """The port of a URL without hosts."""
    user: str | None
    password: str | None
    database: str | None
    options: Mapping[str, str]
    """The rest of the query."""

    def each_host(self) -> tuple[PostgresqlUrl, ...]:
        """The same database at each of the hosts."""
        return tuple(replace(self, addresses=(address,)) for address in self.addresses) or (self,)

    @property
    def address(self) -> tuple[str, int] | None:
        """The first host, which may be the folder of a Unix socket, and its port."""
        return self.addresses[0].at(_default_port()) if self.addresses else None

    @property
    def place(self) -> str:
        """The first host with its port, without the login."""
        return "the Unix socket" if self.address is None else joined(*self.address)

    def file(self, option: str) -> str | None:
        """The path that *option* has in the URL or in the environment of libpq: ``sslrootcert``, ``sslcert``."""
        return self.options.get(option) or os.environ.get(f"PG{option.upper()}")

    @property
    def options_dsn(self) -> str | None:
        """A URL with the options alone: asyncpg takes some of them from no argument."""
        return f"postgresql://?{urlencode(self.options, quote_via=quote)}" if self.options else None

    def arguments(self) -> dict[str, object]:
        """The arguments of ``asyncpg.connect``, apart from `options_dsn`."""
        given: dict[str, object] = {"user": self.user, "password": self.password, "database": self.database}
        given["port"] = self.port
        if self.addresses:
            given["host"] = [address.host for address in self.addresses]
            if any(address.port for address in self.addresses):
                given["port"] = [address.at(_default_port())[1] for address in self.addresses]
        return {name: value for name, value in given.items() if value is not None}

    def identity(self) -> str | None:
        """
        Return ``user@host:port,host:port/database``, each part percent-encoded, or None if a part is unknown.

        Raises:
            ConfigurationError: an environment variable of libpq cannot be read.
        """
        user = self.user or os.environ.get("PGUSER") or _login()
        database = self.database or os.environ.get("PGDATABASE") or user
        addresses = self.addresses
        if not addresses and (hosts := os.environ.get("PGHOST")):
            addresses = read_hosts(hosts.split(","), "PGHOST", sockets=True)
        if self.options.keys() & _ELSEWHERE or "PGSERVICE" in os.environ or not (user and database and addresses):
            return None
        ports = str(self.port or os.environ.get("PGPORT") or _PORT)
        servers = ",".join(_identity_of(*address) for address in _with_ports(addresses, ports, "PGPORT"))
        return f"{quote(user, safe='')}@{servers}/{quote(database, safe='')}"


def _default_port() -> int:
    default = os.environ.get("PGPORT", "")
    return read_port(default, "PGPORT") if default and "," not in default else _PORT


def _identity_of(host: str, port: int | None) -> str:
    if host.startswith("/"):  # the folder of a Unix socket
        return f"{quote(host, safe='')}:{port}"
    return joined(quote(host, safe=":"), port)


def read_postgresql_url(url: str, *, known: Collection[str] | None = None) -> PostgresqlUrl:
    """
    Read *url*.

    Args:
        url: A password in it may be percent-encoded.

        known: The names that options in its query may have; None for any.

    Raises:
        ConfigurationError: a part cannot be read, or an option is not *known*. The URL is never repeated.
    """
    parts = split_url(url)
    if parts.scheme not in SCHEMES:
        refuse_url("must begin with postgresql:// or postgres://")
    options = _read_options(parts.query)
    if known is not None and (named := sorted(options.keys() & LIBPQ_OPTIONS - set(known))):
        refuse_url(f"has the option {named[0]}, which asyncpg does not take, remove it; known are {', '.join(known)}")
    if known is not None and not options.keys() <= set(known):
        refuse_url(f"has an unknown option in its query; known are {', '.join(known)}")
    hosts, ports = options.pop("host", ""), options.pop("port", "")
    if parts.hosts and hosts:
        refuse_url("names the hosts twice, before the path and as host in its query")
    addresses = read_hosts(parts.hosts.split(","), "url", sockets=True) if parts.hosts else _hosts_of_option(hosts)
    by_name = {name: options.pop(name, None) for name in ("user", "password", "dbname", "database")}
    return PostgresqlUrl(
        addresses=_with_ports(addresses, ports, "url"),
        port=read_port(ports, "url") if ports and not addresses else None,
        user=parts.user or by_name["user"],
        password=parts.password or by_name["password"],
        database=decoded(parts.path.removeprefix("/"), "path") or by_name["dbname"] or by_name["database"],
        options=options,
    )


def _read_options(query: str) -> dict[str, str]:
    if not query:
        return {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True)
    except ValueError:  # its message may quote the query
        pairs = []
    if not pairs or not all(name and value for name, value in pairs):
        refuse_url("has a query that cannot be read, or an option without a value; write ?option=value&option=value")
    if len(dict(pairs)) < len(pairs):
        refuse_url("names an option twice")
    return dict(pairs)


def _hosts_of_option(hosts: str) -> tuple[HostAddress, ...]:
    """Read the option ``host`` of libpq, in which an IPv6 address may stand without brackets."""
    texts = [f"[{host}]" if is_ipv6(host) else host for host in hosts.split(",")] if hosts else []
    return read_hosts(texts, "url", sockets=True)


def _with_ports(addresses: Sequence[HostAddress], ports: str, parameter: str) -> tuple[HostAddress, ...]:
    """Give each address that has no port one of *ports*: one for all, or one for each."""
    each = ports.split(",")
    if len(each) == 1:
        each *= len(addresses)
    if not ports or not addresses:
        return tuple(addresses)
    if len(each) != len(addresses):
        refuse_url(f"must name as many hosts as there are ports in {parameter}, or one port for all")
    return tuple(
        HostAddress(address.host, address.port or read_port(port, parameter))
        for address, port in zip(addresses, each, strict=True)
    )


def _login() -> str | None:
    try:
        return getuser()
    except (KeyError, OSError):
        return None
