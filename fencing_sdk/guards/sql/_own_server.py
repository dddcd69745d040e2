"""
Short transactions on a PostgreSQL server, through asyncpg: one connection for each.

The connection waits behind whoever holds the fence. A caller that is cancelled meanwhile is let go:
the statement is cancelled at the server, and what it did is not committed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar, cast

import anyio

from fencing_sdk._values.database_identity import database_identity
from fencing_sdk.errors import ConfigurationError
from fencing_sdk.guards.sql._accepted import AsyncpgConnection
from fencing_sdk.guards.sql._names import POSTGRESQL
from fencing_sdk.guards.sql._steps import Steps
from fencing_sdk.guards.sql._transaction import Transaction, perform

T = TypeVar("T")

_CONNECTING = 30.0
"""Seconds until a server that does not answer is given up."""
LEAVING = 1.0
"""Seconds for the server to hear that a statement is cancelled, and that we leave."""


class _Connection(AsyncpgConnection, Protocol):
    async def execute(self, query: str, /) -> object: ...

    async def close(self) -> None: ...


class _Connect(Protocol):
    async def __call__(self, dsn: str, /, *, timeout: float, statement_cache_size: int) -> _Connection: ...


class Server:
    """The database that a ``postgresql://`` URL names."""

    dialect = POSTGRESQL

    def __init__(self, url: str) -> None:
        """
        Look at *url*. Nothing is sent.

        Raises:
            ConfigurationError: it cannot be read, or asyncpg is missing. The URL is never repeated.
        """
        self.place = database_identity(url)
        self._url = url
        self._connect = _driver()

    async def run(self, work: Callable[[Transaction], Steps[T]]) -> T:
        """Run *work* in a transaction."""
        # Through a proxy that pools transactions, a statement that was prepared may be another client's.
        connection = await self._connect(self._url, timeout=_CONNECTING, statement_cache_size=0)
        try:
            # The level at which a fence is never refused because of a change that was committed meanwhile.
            await connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
            result = await perform(connection, work)
            await connection.execute("COMMIT")  # after an error, closing rolls back
            return result
        finally:
            await _close(connection)


async def _close(connection: _Connection) -> None:
    with anyio.move_on_after(LEAVING, shield=True):
        await connection.close()  # a statement that is under way is cancelled at the server first


def _driver() -> _Connect:
    try:
        import asyncpg  # noqa: PLC0415  (those who use SQLite need not have it)
    except ModuleNotFoundError as error:
        msg = f"{error.name} is not installed; run: pip install 'fencing-sdk[postgresql]'"
        raise ConfigurationError(msg) from error
    return cast("_Connect", asyncpg.connect)
