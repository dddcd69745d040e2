"""
Reads the URLs of stores and the options of their backends, without I/O.

    scheme://[user[:password]@]host[:port][,host[:port]...][/path][?query]

All backends and guards, and the command line, read their URLs here. `urllib.parse.urlsplit` knows one host only, and
the security releases of Python refuse a list of hosts that contains an IPv6 address. The drivers read URLs with it, so
they get the parts instead. A password that was not percent-encoded may end up in any part of a URL: an error names the
part and never repeats it.

A ``postgresql://`` URL is read as libpq has it, also with hosts, user and database in its query. asyncpg gets the
parts, and reads only the options of the query itself. It takes what is missing from the environment variables of libpq.

The constructor of a backend declares its options: names, types and defaults. The query of a URL has the same options as
texts, so the constructor reads texts too, by the functions at the end. A text may be a password in the wrong place.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from ipaddress import IPv6Address
from typing import NamedTuple, NoReturn
from urllib.parse import parse_qsl, quote, unquote, urlencode

from fencing_sdk.errors import ConfigurationError, shown

_PORTS = range(1, 65536)
_LONGEST_PORT = 5
_LONGEST_DATABASE = 10
_IPV6 = re.compile(r"(?P<address>[0-9A-Fa-f:.]{2,45})(?:%(?!25\Z)(?:25)?(?P<zone>[A-Za-z0-9._~-]{1,64}))?")
"""An address and its zone. The '%' between them is written %25 in a URL."""
_NOT_IN_A_HOST = frozenset('[]<>@,?#\\^`{|}"')
_HOST_FIRST = re.compile(r"(?:\[[^]]*]|[^:,\[]+)(?::[0-9]{1,5})?,")


class HostAddress(NamedTuple):
    """One host of a list, decoded and without brackets, and its port if the text names one."""

    host: str
    port: int | None

    def at(self, port: int) -> tuple[str, int]:
        """The host with its port, or with *port* if the text names none."""
        return self.host, self.port or port


@dataclass(frozen=True, slots=True, repr=False)
class StoreUrl:
    """The parts of a URL. There is no repr, because most of them may hold a password."""

    scheme: str
    """Empty if the text is not a URL."""
    user: str | None
    """Decoded; None if there is no ``@``."""
    password: str | None
    """Decoded; None if there is no ``:`` before the ``@``."""
    hosts: str
    """As it stands in the URL; see `addresses`."""
    path: str
    """As it stands in the URL, with its first slash."""
    query: str

    def addresses(self) -> tuple[HostAddress, ...]:
        """Read the hosts, separated by commas."""
        return read_hosts(self.hosts.split(","), "url")

    def host_texts(self) -> list[str]:
        """Return the hosts as the arguments of a backend have them, if all of them can be read."""
        self.addresses()
        return self.hosts.split(",")


def split_url(url: str) -> StoreUrl:
    """
    Split *url*.

    Raises:
        ConfigurationError: two parts run into each other, or one is not UTF-8 when it is decoded.
    """
    scheme, mark, rest = url.partition("://")
    if not mark:
        return StoreUrl("", None, None, "", "", "")
    if "#" in rest:
        refuse_url("has a '#', and nothing after it would be read; write %23 for a literal one")
    rest, _, query = rest.partition("?")
    authority, slash, path = rest.partition("/")
    login, at, hosts = authority.rpartition("@")
    if hosts and "@" in path:
        refuse_url("has a '/' before an '@'; in user and password write %2F for '/', in a path %40 for '@'")
    if "@" in login:
        refuse_url("has two '@'; user and password stand once, before all hosts, with %40 for an '@' in them")
    if _HOST_FIRST.match(login):
        refuse_url("has a host before the user; user and password stand once, before all hosts, with %2C for a ','")
    user, colon, password = login.partition(":")
    return StoreUrl(
        scheme,
        user=decoded(user, "user") if at else None,
        password=decoded(password, "password") if colon else None,
        hosts=hosts,
        path=slash + path,
        query=query,
    )


def read_hosts(texts: Iterable[object], parameter: str, *, sockets: bool = False) -> tuple[HostAddress, ...]:
    """
    Read ``host``, ``host:port`` or ``[address]:port`` of each text.

    Args:
        texts: They stand in *parameter*, which errors name.

        parameter: Such as ``"url"``.

        sockets: Whether a host may be the folder of a Unix socket.

    Raises:
        ConfigurationError: one of the texts cannot be read.
    """
    return tuple(_host(text, f"host {number} of {parameter}", sockets) for number, text in enumerate(texts, 1))


def _host(text: object, which: str, sockets: bool) -> HostAddress:  # noqa: FBT001  (private)
    if not isinstance(text, str):
        _refuse(which, f"must be a str such as 'host:port', not {type(text).__name__}")
    if any(char.isspace() for char in text):
        _refuse(which, "has a space or a line break; write commas alone between hosts")
    if text.startswith("["):
        host, port = _bracketed(text, which)
    else:
        host, colon, number = text.partition(":")
        if ":" in number:
            _refuse(which, "has an IPv6 address without brackets, as in [::1]:80, or a ':' that is not percent-encoded")
        port = number if colon else None
        host = _name(host, which, sockets=sockets)
    return HostAddress(host, None if port is None else read_port(port, which))


def _name(text: str, which: str, *, sockets: bool) -> str:
    name = _decoded(text)
    if name is None:
        _refuse(which, "has bytes that are not UTF-8")
    if not name:
        _refuse(which, "is empty; is there a ',' or a ':' too many?")
    if _has_control(name) or any(char.isspace() for char in name):
        _refuse(which, "has a space or a control character")
    if _NOT_IN_A_HOST & set(name) or ("/" in name and not (sockets and name.startswith("/"))):
        _refuse(which, "has a character that cannot be in a host; is one in user or password not percent-encoded?")
    return name if "/" in name else name.lower()


def _bracketed(text: str, which: str) -> tuple[str, str | None]:
    inside, bracket, rest = text[1:].partition("]")
    match = _IPV6.fullmatch(inside)
    if not bracket or rest[:1] not in {"", ":"} or match is None or not is_ipv6(match["address"]):
        _refuse(which, "has brackets, but no IPv6 address in them; write [::1]:80 or [fe80::1%25eth0]:80")
    zone = f"%{match['zone']}" if match["zone"] else ""
    return match["address"].lower() + zone, rest[1:] if rest else None


def is_ipv6(text: str) -> bool:
    """Return whether *text* is an IPv6 address without brackets and zone."""
    try:
        IPv6Address(text)
    except ValueError:
        return False
    return True


def read_port(text: str, which: str) -> int:
    """
    Return the number of a port.

    Raises:
        ConfigurationError: it is none; the error begins with *which*, the name of the parameter.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= _LONGEST_PORT and int(text) in _PORTS):
        _refuse(which, "has a port that is not a number from 1 to 65535")
    return int(text)


def read_database(path: str) -> int | None:
    """Return the number of a Redis database, which is the *path* of a URL; None if the path is empty."""
    text = path.strip("/")
    if text and not (text.isascii() and text.isdigit() and len(text) <= _LONGEST_DATABASE and int(text) < 2**31):
        refuse_url("must have the number of a database as its path, such as /0")
    return int(text) if text else None


def decoded(text: str, part: str) -> str:
    """Decode the percent-encoded *part* of a URL, which has to be UTF-8 without control characters."""
    plain = _decoded(text)
    if plain is None:
        refuse_url(f"has bytes in its {part} that are not UTF-8; percent-encode special characters as UTF-8")
    if _has_control(plain):
        refuse_url(f"has a control character in its {part}, such as a line break at the end")
    return plain


def _decoded(text: str) -> str | None:
    try:
        plain = unquote(text, errors="strict")
        plain.encode()  # no lone surrogate
    except UnicodeError:  # it quotes the text, so it must not become the context of an error
        return None
    return plain


def _has_control(text: str) -> bool:
    return any(char < " " or char == "\x7f" for char in text)


def joined(host: str, port: int | None) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    shown = f"[{host}]" if ":" in host else host
    return shown if port is None else f"{shown}:{port}"


def refuse_url(how: str) -> NoReturn:
    """Raise a `ConfigurationError` that says what is wrong with the URL."""
    _refuse("url", how)


def _refuse(which: str, how: str) -> NoReturn:
    msg = f"{which} {how}"
    raise ConfigurationError(msg)


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
    if known is not None and (unknown := [name for name in options if name not in known]):
        refuse_url(f"has an unknown option in its query{nearest(unknown[0], known)}; known are {', '.join(known)}")
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
        from getpass import getuser  # noqa: PLC0415  (it loads termios, for PostgreSQL alone)

        return getuser()
    except (KeyError, OSError):
        return None


_SWITCHES = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_THIRTY_YEARS = 1e9


def option_names(backend: Callable[..., object], *, besides: Collection[str] = ()) -> tuple[str, ...]:
    """Return the options of a *backend*: the keyword arguments of its class, *besides* those that are not options."""
    parameters = inspect.signature(backend).parameters.values()
    return tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.name not in besides)


def nearest(name: str, known: Collection[str]) -> str:
    """
    Return a question for an error: which of the *known* names is meant by *name*, which is mistyped.

    It is empty if none is near. It never contains *name*, which may be a part of a password.
    """
    from difflib import get_close_matches  # noqa: PLC0415  (most programs have no such error)

    name = name.lower()
    # Each driver has one of these words for the same thing, with or without it before the names of the files.
    spellings = (name, name.replace("ssl", "tls"), name.replace("tls", "ssl"), name.removeprefix("ssl_"))
    found = [near for each in spellings for near in get_close_matches(each, known, n=1)]
    return f" (did you mean {found[0]}?)" if found else ""


def read_switch(parameter: str, value: object) -> bool:
    """
    Return whether an option is on.

    Raises:
        ConfigurationError: *value* is neither a bool nor one of the texts true, yes, 1, false, no, 0.
    """
    text = str(value).lower() if isinstance(value, str | bool) else ""
    if text not in _SWITCHES:
        msg = f"{parameter} must be True or False"
        raise ConfigurationError(msg)
    return _SWITCHES[text]


def read_seconds(parameter: str, value: object) -> float:
    """
    Return seconds above 0: a number, its text, or a timedelta.

    Raises:
        ConfigurationError: *value* is not a valid number, or more than thirty years.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if isinstance(value, bool) or not 0 < seconds < _THIRTY_YEARS:
        msg = f"{parameter} must be a number of seconds above 0 and below 1e9"
        raise ConfigurationError(msg)
    return seconds


def read_hybrid(tokens: object) -> bool:
    """
    Return whether tokens are hybrid.

    Raises:
        ConfigurationError: *tokens* is neither ``"hybrid"`` nor ``"counter"``.
    """
    if not isinstance(tokens, str) or tokens not in {"hybrid", "counter"}:
        msg = f"tokens must be 'hybrid' or 'counter', got {shown(tokens)}"
        raise ConfigurationError(msg)
    return tokens == "hybrid"
