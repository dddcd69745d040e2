"""
asyncpg and psycopg as far as a guard uses them: whether a transaction is open, and rows for a statement.

Neither is imported: their connections are known by what they can do. Both keep the state of the
transaction from the server's last answer, so asking for it sends nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol, TypeGuard, cast

from fencing_sdk.guards.sql._accepted import AsyncpgConnection
from fencing_sdk.guards.sql._steps import AsyncFetch, Fetch, Parameters, Row

_IDLE = 0
"""`TransactionStatus.IDLE` of psycopg: connected, and in no transaction."""


class _Info(Protocol):
    @property
    def transaction_status(self) -> int: ...


class _Cursor(Protocol):
    @property
    def description(self) -> object: ...

    def execute(self, query: str, params: Parameters, /) -> object: ...

    def fetchall(self) -> Sequence[Row]: ...


class _AsyncCursor(Protocol):
    @property
    def description(self) -> object: ...

    async def execute(self, query: str, params: Parameters, /) -> object: ...

    async def fetchall(self) -> Sequence[Row]: ...


class _PsycopgConnection(Protocol):
    """What `psycopg.Connection` and `psycopg.AsyncConnection` have in common."""

    @property
    def autocommit(self) -> bool: ...

    @property
    def info(self) -> _Info: ...


_TupleRows = Callable[[object], Callable[[Sequence[object]], Row]]


class _BlockingConnection(Protocol):
    def cursor(self, *, row_factory: _TupleRows) -> AbstractContextManager[_Cursor]: ...


class _AwaitedConnection(Protocol):
    def cursor(self, *, row_factory: _TupleRows) -> AbstractAsyncContextManager[_AsyncCursor]: ...


def is_asyncpg(connection: object) -> TypeGuard[AsyncpgConnection]:
    """Whether this is a connection of asyncpg. A pool is none: it would take another one for every statement."""
    return hasattr(connection, "is_in_transaction") and hasattr(connection, "fetch")


def is_psycopg(connection: object) -> TypeGuard[_PsycopgConnection]:
    """Whether this is a connection of psycopg 3, blocking or asynchronous."""
    return tells_status(connection) and hasattr(connection, "pgconn")


def tells_status(connection: object) -> TypeGuard[_PsycopgConnection]:
    """Whether this is a connection of psycopg 3 or psycopg2. SQLAlchemy's has an ``info`` too, another one."""
    return (
        not hasattr(connection, "exec_driver_sql")
        and hasattr(connection, "cursor")
        and hasattr(getattr(connection, "info", None), "transaction_status")
    )


def own_connection(connection: AsyncpgConnection) -> object:
    """The connection itself where this is a pool's proxy, which is a new one each time."""
    return getattr(connection, "_con", connection)


def begun_by(connection: AsyncpgConnection | _PsycopgConnection) -> Callable[[], bool]:
    """What tells whether *connection*, of either driver, is in a transaction."""
    if is_asyncpg(connection):
        return connection.is_in_transaction
    return lambda: cast("_PsycopgConnection", connection).info.transaction_status != _IDLE


def fetch_from_asyncpg(connection: AsyncpgConnection) -> AsyncFetch:
    """Fetch rows through *connection*."""

    def fetch(statement: str, parameters: Parameters) -> Awaitable[Sequence[Row]]:
        return connection.fetch(statement, *parameters)

    return fetch


def fetch_from_psycopg(connection: object) -> Fetch:
    """Fetch rows through a blocking *connection*, as tuples, whatever its own rows are."""

    def fetch(statement: str, parameters: Parameters) -> Sequence[Row]:
        with cast("_BlockingConnection", connection).cursor(row_factory=_tuples) as cursor:
            cursor.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else ()

    return fetch


def fetch_from_psycopg_awaiting(connection: object) -> AsyncFetch:
    """The same through an asynchronous *connection*."""

    async def fetch(statement: str, parameters: Parameters) -> Sequence[Row]:
        async with cast("_AwaitedConnection", connection).cursor(row_factory=_tuples) as cursor:
            await cursor.execute(statement, parameters)
            return await cursor.fetchall() if cursor.description else ()

    return fetch


def _tuples(cursor: object) -> Callable[[Sequence[object]], Row]:  # noqa: ARG001  (psycopg's RowFactory)
    return tuple
