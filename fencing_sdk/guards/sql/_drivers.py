"""
Connections of asyncpg and psycopg: how to recognise one, ask whether a transaction is open, and fetch rows.

No driver is imported: a guard recognises connections by their methods. Both drivers know the state of the transaction
from the server's last answer, so asking for it sends nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol, TypeGuard, cast

from fencing_sdk._values.driver_versions import KnownDriver
from fencing_sdk.guards.sql._protocols import AsyncpgConnection
from fencing_sdk.guards.sql._steps import AsyncFetch, Fetch, Parameters, Row

_ASYNCPG = KnownDriver("asyncpg", user="SqlGuard")
_NOT_OPEN = {0, 4}
"""psycopg's `TransactionStatus.IDLE`: connected, and no transaction is open; and UNKNOWN: not connected."""


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
    """The part that `psycopg.Connection` and `psycopg.AsyncConnection` have in common."""

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
    """Return whether this is a connection of asyncpg. A pool is none: it may run each statement on another one."""
    return hasattr(connection, "is_in_transaction") and hasattr(connection, "fetch")


def is_psycopg(connection: object) -> TypeGuard[_PsycopgConnection]:
    """Return whether this is a connection of psycopg 3, blocking or asynchronous."""
    return tells_status(connection) and hasattr(connection, "pgconn")


def tells_status(connection: object) -> TypeGuard[_PsycopgConnection]:
    """Return whether this is a connection of psycopg 3 or psycopg2. SQLAlchemy's ``info`` is something else."""
    return (
        not hasattr(connection, "exec_driver_sql")
        and hasattr(connection, "cursor")
        and hasattr(getattr(connection, "info", None), "transaction_status")
    )


def own_connection(connection: AsyncpgConnection) -> object:
    """
    Return the connection behind a pool's proxy. The pool makes a new proxy each time it hands one out.

    Raises:
        BackendRefusedError: the installed asyncpg keeps the connection elsewhere.
    """
    own: object = getattr(connection, "_con", connection)
    with _ASYNCPG.known("admit"):
        weakref.ref(own)  # what is known of a connection ends with it; a proxy can have no weak reference
    return own


def begun_by(connection: AsyncpgConnection | _PsycopgConnection) -> Callable[[], bool]:
    """Return a callable that tells whether *connection*, of either driver, is in a transaction."""
    if is_asyncpg(connection):
        return connection.is_in_transaction
    return lambda: cast("_PsycopgConnection", connection).info.transaction_status not in _NOT_OPEN


def is_pooled(connection: object) -> bool:
    """Return whether this is a connection of psycopg's pool, which others use later. asyncpg's pool makes proxies."""
    return getattr(connection, "_pool", None) is not None


def fetch_from_asyncpg(connection: AsyncpgConnection) -> AsyncFetch:
    """Return a callable that fetches rows through *connection*."""

    def fetch(statement: str, parameters: Parameters) -> Awaitable[Sequence[Row]]:
        return connection.fetch(statement, *parameters)

    return fetch


def fetch_from_psycopg(connection: object) -> Fetch:
    """Do the same for a blocking *connection*. Rows are tuples, also where its own row factory makes others."""

    def fetch(statement: str, parameters: Parameters) -> Sequence[Row]:
        with cast("_BlockingConnection", connection).cursor(row_factory=_tuples) as cursor:
            cursor.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else ()

    return fetch


def fetch_from_psycopg_awaiting(connection: object) -> AsyncFetch:
    """Do the same for an asynchronous *connection*."""

    async def fetch(statement: str, parameters: Parameters) -> Sequence[Row]:
        async with cast("_AwaitedConnection", connection).cursor(row_factory=_tuples) as cursor:
            await cursor.execute(statement, parameters)
            return await cursor.fetchall() if cursor.description else ()

    return fetch


def _tuples(cursor: object) -> Callable[[Sequence[object]], Row]:  # noqa: ARG001  (psycopg's RowFactory)
    return tuple
