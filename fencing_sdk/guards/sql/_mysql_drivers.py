"""
The connections of MySQL's drivers: asyncmy and aiomysql, which are awaited, PyMySQL and mysqlclient, which block.

All of them know from the server's last word whether a transaction is open, and asyncmy, aiomysql and PyMySQL return it.
mysqlclient does not: with autocommit off, which is how Django makes a transaction, one is taken to be open.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeGuard

from fencing_sdk.guards.sql._protocols import AwaitedMysqlConnection, BlockingMysqlConnection

_IN_TRANSACTION = 1
"""The protocol's bit SERVER_STATUS_IN_TRANS."""

Row = Sequence[object]
Parameters = tuple[object, ...]


def is_mysql(connection: object) -> TypeGuard[AwaitedMysqlConnection | BlockingMysqlConnection]:
    """Return whether this is a connection of one of the drivers. Django's and SQLAlchemy's own are something else."""
    return all(hasattr(connection, name) for name in ("get_server_info", "get_autocommit", "cursor"))


def is_awaited(connection: object) -> TypeGuard[AwaitedMysqlConnection]:
    """Return whether this is a connection of asyncmy or aiomysql."""
    return is_mysql(connection) and hasattr(connection, "get_transaction_status")


def is_blocking(connection: object) -> TypeGuard[BlockingMysqlConnection]:
    """Return whether this is a connection of PyMySQL or mysqlclient."""
    return is_mysql(connection) and not is_awaited(connection)


def hides_its_transaction(connection: object) -> bool:
    """Return whether this is a connection of mysqlclient: whether a transaction has ended cannot be seen."""
    return is_blocking(connection) and not hasattr(connection, "server_status")


def begun_by(connection: AwaitedMysqlConnection | BlockingMysqlConnection) -> Callable[[], bool]:
    """Return a callable that returns whether *connection* is in a transaction."""
    if is_awaited(connection):
        return lambda: _is_connected(connection) and connection.get_transaction_status()
    if hides_its_transaction(connection):
        return lambda: _is_connected(connection) and not connection.get_autocommit()
    return lambda: _is_connected(connection) and bool(getattr(connection, "server_status", 0) & _IN_TRANSACTION)


def _is_connected(connection: object) -> bool:
    """Return whether the connection has not been closed: what the server has said last stays known."""
    if hasattr(connection, "connected"):  # asyncmy
        return bool(connection.connected)
    return bool(getattr(connection, "open", not getattr(connection, "closed", False)))  # aiomysql has `closed` alone


def fetch_awaiting(connection: AwaitedMysqlConnection) -> Callable[[str, Parameters], Awaitable[Sequence[Row]]]:
    """Return a callable that fetches rows through a *connection* that is awaited."""

    async def fetch(statement: str, parameters: Parameters) -> Sequence[Row]:
        async with connection.cursor() as cursor:
            await cursor.execute(statement, parameters)
            return _tuples(await cursor.fetchall()) if cursor.description else ()

    return fetch


def fetch_blocking(connection: BlockingMysqlConnection) -> Callable[[str, Parameters], Sequence[Row]]:
    """Return a callable that fetches rows through a *connection* that blocks."""

    def fetch(statement: str, parameters: Parameters) -> Sequence[Row]:
        with connection.cursor() as cursor:
            cursor.execute(statement, parameters)
            return _tuples(cursor.fetchall()) if cursor.description else ()

    return fetch


def _tuples(rows: Sequence[Row | Mapping[str, object]]) -> Sequence[Row]:
    """Return rows without names, also where the connection makes dictionaries."""
    return [tuple(row.values()) if isinstance(row, Mapping) else row for row in rows]
