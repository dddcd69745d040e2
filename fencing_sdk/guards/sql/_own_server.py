"""
The guard's own transactions on a PostgreSQL server, through asyncpg: one connection for each.

The statement may wait for a transaction that holds the fence. If the caller is cancelled meanwhile, the driver cancels
the statement at the server, and nothing is committed.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

from fencing_sdk._dialing import DialingLoop
from fencing_sdk._http.tls import complaint_about
from fencing_sdk._values.extras import install
from fencing_sdk._values.postgresql_url import TLS_FILES, read_postgresql_url
from fencing_sdk._values.scopes import move_on_after
from fencing_sdk.errors import ConfigurationError
from fencing_sdk.guards.sql._identifiers import POSTGRESQL
from fencing_sdk.guards.sql._protocols import AsyncpgConnection
from fencing_sdk.guards.sql._steps import Steps
from fencing_sdk.guards.sql._transaction import Transaction, perform

T = TypeVar("T")

_CONNECT_PATIENCE = 30.0
"""Seconds that the opening of a connection may take."""
CLOSE_PATIENCE = 1.0
"""Seconds for telling the server that a statement is cancelled and the connection is closed."""


class _OwnConnection(AsyncpgConnection, Protocol):
    async def execute(self, query: str, /) -> object: ...

    async def close(self) -> None: ...


class _Connect(Protocol):
    async def __call__(
        self, dsn: str | None, /, *, loop: DialingLoop, timeout: float, statement_cache_size: int, **parts: object
    ) -> _OwnConnection: ...


class PostgresqlDatabase:
    """The database that a ``postgresql://`` URL names."""

    dialect = POSTGRESQL

    def __init__(self, url: str) -> None:
        """
        Read *url*, without I/O.

        Raises:
            ConfigurationError: it cannot be read, or asyncpg is missing. The message never repeats the URL.
        """
        self._url = read_postgresql_url(url)
        self.identity = self._url.identity()
        self._connect = _driver()

    async def run(self, work: Callable[[Transaction], Steps[T]]) -> T:
        """
        Run *work* in a transaction of its own.

        Raises:
            ConfigurationError: a file that the URL names for TLS cannot be used.
        """
        # Behind a proxy that pools transactions, a prepared statement may be another client's, so none is cached.
        try:
            connection = await self._connect(
                self._url.options_dsn,
                loop=DialingLoop(),
                timeout=_CONNECT_PATIENCE,
                statement_cache_size=0,
                **self._url.arguments(),
            )
        except (FileNotFoundError, ssl.SSLError) as error:  # which name no file
            password = self._url.file("sslpassword")
            complaint = complaint_about(*map(self._url.file, TLS_FILES), names=TLS_FILES, password=password)
            if complaint is None:
                raise
            raise ConfigurationError(complaint) from error
        try:
            # At other levels PostgreSQL refuses to raise a fence that another transaction raised meanwhile.
            await connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
            result = await perform(connection, work)
            await connection.execute("COMMIT")  # after an error, closing rolls back
            return result
        finally:
            await _close(connection)


async def _close(connection: _OwnConnection) -> None:
    with move_on_after(CLOSE_PATIENCE, shield=True):
        await connection.close()  # if a statement is under way, the driver first cancels it at the server


def _driver() -> _Connect:
    try:
        import asyncpg  # noqa: PLC0415  (a user of SQLite may not have it)
    except ModuleNotFoundError as error:
        msg = f"{error.name} is not installed; run: {install('postgresql')}"
        raise ConfigurationError(msg) from error
    return cast("_Connect", asyncpg.connect)
