"""
Reads the URL and the options of the backend. No connection or file is opened.

    postgresql://[user[:password]@]host[:port][,host[:port]...]/database[?option=value&...]

The backend's own options are removed from the query. The options of libpq that asyncpg knows are passed to it
unchanged. Any other option is an error: asyncpg would take it for a setting of the server, and a typing error must not
turn TLS off. Messages never repeat a part of a URL, because any part may contain a password.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from fencing_sdk.backends._shared.option_values import read_hybrid, read_seconds, read_switch
from fencing_sdk.backends.postgresql.schema import check_schema
from fencing_sdk.errors import ConfigurationError

SCHEMES = ("postgresql", "postgres")
DRIVER_OPTIONS = (
    "host",
    "port",
    "dbname",
    "user",
    "password",
    "passfile",
    "sslmode",
    "sslcert",
    "sslkey",
    "sslrootcert",
    "sslcrl",
    "sslpassword",
    "ssl_min_protocol_version",
    "ssl_max_protocol_version",
    "target_session_attrs",
    "application_name",
    "options",
)
"""The options of a URL's query, or of `connect`, that belong to libpq and not to the backend."""

_PORTS = range(1, 65536)
_LONGEST_PORT = 5


@dataclass(frozen=True, slots=True, repr=False)
class PostgresqlAddress:
    """The address of the database: one URL for each host, without the options of the backend."""

    urls: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PostgresqlOptions:
    """The options of the backend, checked."""

    schema: str
    hybrid: bool
    create: bool
    pooled: bool
    retention: float
    connect_timeout: float


def address_from_url(url: object) -> PostgresqlAddress:
    """
    Read *url*.

    Raises:
        ConfigurationError: it cannot be used.
    """
    if not isinstance(url, str):
        msg = f"url must be a str, such as 'postgresql://localhost/app', not {type(url).__name__}"
        raise ConfigurationError(msg)
    scheme, mark, rest = url.partition("://")
    if scheme not in SCHEMES or not mark:
        _refuse("must begin with postgresql:// or postgres://")
    if "#" in rest:
        _refuse("has a '#', after which nothing would be read; write %23 where it is meant")
    rest, _, query = rest.partition("?")
    authority, slash, path = rest.partition("/")
    if "@" in path or authority.count("@") > 1:
        _refuse("has an '@' or '/' in user or password; percent-encode special characters: '@' is %40, '/' is %2F")
    login, at, hosts = authority.rpartition("@")
    _check_text(rest)
    options = _options(query)
    if not hosts and "host" in options:
        hosts = _hosts_of(options)
    tail = slash + path + (f"?{urlencode(options, quote_via=quote)}" if options else "")
    _check_hosts(hosts)
    return PostgresqlAddress(tuple(f"{scheme}://{login}{at}{host}{tail}" for host in hosts.split(",")))


def host_of(url: str) -> str:
    """Return the host and port of a *url*, without its login."""
    return urlsplit(url).netloc.rpartition("@")[2] or "the Unix socket"


def with_options(url: str, options: Mapping[str, object], ours: tuple[str, ...]) -> str:
    """
    Remove the options named *ours* from the query of *url*, and add the driver's *options*.

    Raises:
        ConfigurationError: the value of an option cannot be written in a URL.
    """
    for name, value in options.items():
        if not isinstance(value, str) or not value:
            msg = f"{name} must be a str that is not empty"
            raise ConfigurationError(msg)
    rest, _, query = url.partition("?")
    pairs = [pair for pair in parse_qsl(query, keep_blank_values=True) if pair[0] not in {*ours, *options}]
    query = urlencode([*pairs, *options.items()], quote_via=quote, errors="surrogatepass")
    return f"{rest}?{query}" if query else rest


def _options(query: str) -> dict[str, str]:
    if not query:
        return {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True)
    except ValueError:  # its message may quote the query
        pairs = []
    if not pairs or not all(name and value for name, value in pairs):
        _refuse("has a query that cannot be read, or an option without a value; write ?option=value&option=value")
    options = dict(pairs)
    if not options.keys() <= set(DRIVER_OPTIONS):
        _refuse(f"has an unknown option in its query; known are {', '.join(DRIVER_OPTIONS)}")
    if len(options) < len(pairs):
        _refuse("names an option twice")
    return options


def _hosts_of(options: dict[str, str]) -> str:
    """Take hosts and ports from the query, as libpq does."""
    hosts, ports = options.pop("host").split(","), options.pop("port", "").split(",")
    if len(ports) == 1:
        ports *= len(hosts)
    if len(ports) != len(hosts):
        _refuse("must name as many ports as hosts, or one for all")
    written = (quote(host, safe="[]") if not (":" in host and not host.startswith("[")) else host for host in hosts)
    return ",".join(f"{host}:{port}" if port else host for host, port in zip(written, ports, strict=True))


def _check_hosts(hosts: str) -> None:
    for host in hosts.split(","):
        name, colon, port = host.rpartition(":")
        if not colon or host.endswith("]"):
            name, port = host, "5432"
        if not name and hosts:
            _refuse("has an empty host")
        if set(name.removeprefix("[").removesuffix("]") if name.startswith("[") else name) & set("[]") or (
            ":" in name and not (name.startswith("[") and name.endswith("]"))
        ):
            _refuse("has an IPv6 address without brackets, or a ':' that is not percent-encoded; write [::1]:5432")
        if not (port.isascii() and port.isdigit() and len(port) <= _LONGEST_PORT and int(port) in _PORTS):
            _refuse("has a port that is no number from 1 to 65535")


def _check_text(text: str) -> None:
    try:
        plain = unquote(text, errors="strict")
        plain.encode()
    except UnicodeError:  # its message quotes the text
        plain = "\0"
    if any(char < " " or char == "\x7f" for char in plain):
        _refuse("has a control character, or bytes that are not UTF-8")


def _refuse(how: str) -> NoReturn:
    msg = f"url {how}"
    raise ConfigurationError(msg)


def read_options(options: Mapping[str, object]) -> PostgresqlOptions:
    """
    Read the backend's options. Values from a URL are texts.

    Raises:
        ConfigurationError: a value cannot be read.
    """
    return PostgresqlOptions(
        schema=check_schema(options["schema"]),
        hybrid=read_hybrid(options["tokens"]),
        create=read_switch("create", options["create"]),
        pooled=read_switch("pooled", options["pooled"]),
        retention=read_seconds("retention", options["retention"]),
        connect_timeout=read_seconds("connect_timeout", options["connect_timeout"]),
    )
