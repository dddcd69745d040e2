"""
The objects that a guard takes as a transaction, as protocols of what it uses of them.

They import no driver. Otherwise a type checker could not resolve the parameters of `SqlGuard.admit` where a driver is
not installed, and would report every call.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeAlias

SQLITE = "sqlite"
POSTGRESQL = "postgresql"
MYSQL = "mysql"
MARIADB = "mariadb"
"""SQLAlchemy's names of the dialects. The two last are one to the guard."""


class SqliteDriverConnection(Protocol):
    """The state that any thread may read from `sqlite3.Connection` and `aiosqlite.Connection`."""

    @property
    def in_transaction(self) -> bool: ...

    @property
    def isolation_level(self) -> str | None: ...


class AsyncpgConnection(Protocol):
    """The part of `asyncpg.Connection` that a guard uses. The proxy that a pool hands out has it, too."""

    def is_in_transaction(self) -> bool: ...

    def fetch(self, query: str, /, *args: Any) -> Awaitable[Any]: ...


class AsyncpgProxy(Protocol):
    """The proxy that asyncpg's pool hands out. A type checker cannot see its methods, which it gets at run time."""

    _con: Any
    _holder: Any


class _Psycopg(Protocol):
    @property
    def pgconn(self) -> object: ...

    @property
    def autocommit(self) -> bool: ...


class PsycopgConnection(_Psycopg, Protocol):
    """A `psycopg.Connection`."""

    def commit(self) -> None: ...


class PsycopgAsyncConnection(_Psycopg, Protocol):
    """A `psycopg.AsyncConnection`."""

    async def commit(self) -> None: ...


class _Mysql(Protocol):
    """The part that the connections of all of MySQL's drivers have in common."""

    def get_server_info(self) -> Any: ...

    def get_autocommit(self) -> Any: ...


class AwaitedMysqlConnection(_Mysql, Protocol):
    """A connection of asyncmy or aiomysql."""

    def get_transaction_status(self) -> bool: ...

    def cursor(self) -> Any: ...


class BlockingMysqlConnection(_Mysql, Protocol):
    """A connection of PyMySQL or mysqlclient."""

    def commit(self) -> None: ...

    def cursor(self) -> Any: ...


class AlchemyResult(Protocol):
    """The part of `sqlalchemy.CursorResult` that a guard uses."""

    @property
    def returns_rows(self) -> bool: ...

    def fetchall(self) -> Sequence[Any]: ...


class AlchemyDialect(Protocol):
    """The part of `sqlalchemy.Dialect` that a guard uses."""

    @property
    def name(self) -> str: ...

    @property
    def paramstyle(self) -> str: ...


class AlchemyPooled(Protocol):
    """SQLAlchemy's view of a driver's connection."""

    @property
    def driver_connection(self) -> object: ...

    @property
    def dbapi_connection(self) -> object: ...


class AlchemyTransaction(Protocol):
    """A `sqlalchemy.RootTransaction`, or the `SessionTransaction` of a session."""

    @property
    def is_active(self) -> bool: ...


class HasTransaction(Protocol):
    """A connection or session of SQLAlchemy, which returns its transaction."""

    def get_transaction(self) -> AlchemyTransaction | None: ...


class AlchemyConnection(Protocol):
    """A `sqlalchemy.Connection`."""

    @property
    def connection(self) -> AlchemyPooled: ...

    @property
    def dialect(self) -> AlchemyDialect: ...

    def exec_driver_sql(self, statement: str, parameters: Any = ..., /) -> AlchemyResult: ...


class AlchemySession(Protocol):
    """A `sqlalchemy.orm.Session` or `scoped_session`."""

    def flush(self) -> None: ...

    def connection(self) -> AlchemyConnection: ...


class AlchemyAsync(Protocol):
    """An `AsyncSession` or `AsyncConnection` of SQLAlchemy."""

    @property
    def run_sync(self) -> Callable[..., Awaitable[Any]]: ...


class AlchemyAsyncEngine(Protocol):
    """The part of `sqlalchemy.ext.asyncio.AsyncEngine` that a guard uses."""

    @property
    def sync_engine(self) -> object: ...

    @property
    def dialect(self) -> AlchemyDialect: ...

    def begin(self) -> AbstractAsyncContextManager[AlchemyAsync]: ...


SyncTransaction: TypeAlias = (
    sqlite3.Connection | PsycopgConnection | BlockingMysqlConnection | AlchemyConnection | AlchemySession
)
AsyncTransaction: TypeAlias = (
    AsyncpgConnection | AsyncpgProxy | PsycopgAsyncConnection | AwaitedMysqlConnection | AlchemyAsync
)
