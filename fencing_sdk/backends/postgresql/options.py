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
from urllib.parse import parse_qsl, quote, urlencode

from fencing_sdk._values.url import PostgresqlUrl, read_postgresql_url
from fencing_sdk.errors import ConfigurationError

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


@dataclass(frozen=True, slots=True)
class PostgresqlOptions:
    """The options of the backend that several of its parts need, checked."""

    schema: str
    hybrid: bool
    create: bool
    pooled: bool
    connect_timeout: float


def read_url(url: object) -> PostgresqlUrl:
    """
    Read *url*.

    Raises:
        ConfigurationError: it cannot be used.
    """
    if not isinstance(url, str):
        msg = f"url must be a str, such as 'postgresql://localhost/app', not {type(url).__name__}"
        raise ConfigurationError(msg)
    return read_postgresql_url(url, known=DRIVER_OPTIONS)


def with_options(url: str, options: Mapping[str, object], ours: tuple[str, ...]) -> str:
    """
    Remove the options named *ours* from the query of *url*, and add the driver's *options*.

    Raises:
        ConfigurationError: the value of an option cannot be written in a URL.
    """
    for name, value in options.items():
        if not isinstance(value, str) or not value:
            msg = f"{name} must be a non-empty str"
            raise ConfigurationError(msg)
    rest, _, query = url.partition("?")
    pairs = [pair for pair in parse_qsl(query, keep_blank_values=True) if pair[0] not in {*ours, *options}]
    query = urlencode([*pairs, *options.items()], quote_via=quote, errors="surrogatepass")
    return f"{rest}?{query}" if query else rest
