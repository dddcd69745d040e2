"""
From a URL to a database, and to the leased rows of some tables for ``fencing ls``, ``show``, ``break`` and ``doctor``.

    rows+postgresql://localhost/app?table=jobs&table=imports&key=id

What else stands in the query is for the database.
"""

from __future__ import annotations

from urllib.parse import unquote_plus

from fencing_sdk._values.timing import Timing
from fencing_sdk.backends import take_options
from fencing_sdk.errors import ConfigurationError
from fencing_sdk.rows._store import RowDatabase, RowStore
from fencing_sdk.rows._table import Table

_OPTIONS = ("table", "key")
_TTL = 30.0
"""No row is claimed, so it only has to be valid."""


def from_url(url: str, **options: object) -> RowStore:
    """
    Make a store of the leased rows in the tables that the URL names: ``rows+sqlite:///app.db?table=jobs,imports``.

    Rows are claimed by `row_client` alone.

    Raises:
        ConfigurationError: the URL cannot be used, or names no table.
    """
    address, _, query = url.removeprefix("rows+").partition("?")
    parts = [part.partition("=") for part in query.split("&") if part]
    others = "&".join("".join(part) for part in parts if part[0] not in _OPTIONS)
    chosen = [(name, unquote_plus(text)) for name, _, text in parts if name in _OPTIONS]
    chosen += [(name, str(text)) for name, text in take_options("", options, _OPTIONS).items()]
    keys = [text for name, text in chosen if name == "key"] or ["id"]
    names = [each for name, text in chosen if name == "table" for each in text.split(",")]
    try:
        (key,) = keys
        tables = [Table(name, key, "true", key, "", {}, Timing.build(ttl=_TTL), 0.0) for name in names]
    except ValueError:
        tables = []  # and not its own error, as the name may be a part of a password
    if not tables:
        msg = (
            "name the tables of leased rows by ?table=jobs,imports in the url, each 'name' or 'schema.name', and once "
            "their key, if it is not id: &key=uuid (a '?' or '&' in a password is written %3F, %26)"
        )
        raise ConfigurationError(msg)
    return RowStore(database_at(address + (f"?{others}" if others else "")), tables)


def database_at(url: str) -> RowDatabase:
    """
    Make the statements for the database at *url*.

    Raises:
        ConfigurationError: the URL cannot be used, or the driver is missing.
    """
    given: object = url
    scheme = given.partition("://")[0] if isinstance(given, str) else ""
    try:
        if scheme in {"postgresql", "postgres"}:
            from fencing_sdk.rows._postgresql import PostgresqlRows  # noqa: PLC0415  (the drivers of the others)

            return PostgresqlRows(url)
        if scheme == "sqlite":
            from fencing_sdk.rows._sqlite import SqliteRows  # noqa: PLC0415

            return SqliteRows(url)
        if scheme in {"mysql", "mariadb"}:
            from fencing_sdk.rows._mysql import MysqlRows  # noqa: PLC0415

            return MysqlRows(url)
    except ModuleNotFoundError as error:  # which names what to install
        raise ConfigurationError(str(error)) from error
    msg = "url must be that of the application's database: postgresql://, mysql://, mariadb:// or sqlite:///"
    raise ConfigurationError(msg)
