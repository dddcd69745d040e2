"""
The caller's own transaction, made with any of the drivers or with SQLAlchemy, and a guard's work in it.

A guard recognises their objects by their methods, so that callers install only the driver that they use. Statements
go to the driver directly, past the ORM's unit of work. The work is written as `Steps`, so that the same code runs on
drivers that block and on drivers that are awaited.
"""

from __future__ import annotations

import inspect
import sqlite3
import weakref
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol, TypeAlias, TypeGuard, TypeVar, cast

from fencing_sdk._values.drivers import KnownDriver
from fencing_sdk.errors import UnsupportedError, UsageError
from fencing_sdk.guards.sql import _mysql_drivers as mysql
from fencing_sdk.guards.sql._protocols import (
    MARIADB,
    MYSQL,
    POSTGRESQL,
    SQLITE,
    AlchemyAsync,
    AlchemyConnection,
    AlchemySession,
    AsyncpgConnection,
    AwaitedMysqlConnection,
    BlockingMysqlConnection,
)

T = TypeVar("T")

Row: TypeAlias = Sequence[object]
Parameters: TypeAlias = tuple[object, ...]
Steps: TypeAlias = Generator[tuple[str, Parameters], Sequence[Row], T]
Fetch: TypeAlias = Callable[[str, Parameters], Sequence[Row]]
AsyncFetch: TypeAlias = Callable[[str, Parameters], Awaitable[Sequence[Row]]]


def run_steps(steps: Steps[T], fetch: Fetch) -> T:
    """Run *steps* on a driver that blocks, and return their result."""
    try:
        step = next(steps)
        while True:
            try:
                rows = fetch(*step)
            except Exception as error:  # noqa: BLE001  (the steps decide after which errors they go on)
                step = steps.throw(error)
            else:
                step = steps.send(rows)
    except StopIteration as end:
        return _result(end)


async def run_steps_async(steps: Steps[T], fetch: AsyncFetch) -> T:
    """Run *steps* on a driver that is awaited. A cancellation ends them at once."""
    try:
        step = next(steps)
        while True:
            try:
                rows = await fetch(*step)
            except Exception as error:  # noqa: BLE001  (as above)
                step = steps.throw(error)
            else:
                step = steps.send(rows)
    except StopIteration as end:
        return _result(end)


def _result(end: StopIteration) -> T:  # type: ignore[type-var]  # StopIteration.value has no type of its own
    result: T = end.value
    return result


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
    return shows_status(connection) and hasattr(connection, "pgconn")


def shows_status(connection: object) -> TypeGuard[_PsycopgConnection]:
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
    """Return a callable that returns whether *connection*, of either driver, is in a transaction."""
    if is_asyncpg(connection):
        return connection.is_in_transaction
    return lambda: cast("_PsycopgConnection", connection).info.transaction_status not in _NOT_OPEN


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


class Transaction:
    """A transaction of the caller. This class never begins, commits or rolls back."""

    __slots__ = ("awaiting", "begins", "begun", "dialect", "driver", "fetching", "placeholder")

    dialect: str
    """SQLAlchemy's name of the dialect."""
    driver: object
    """The driver's own connection."""
    fetching: Fetch | None
    awaiting: AsyncFetch | None
    """One of `fetching` and `awaiting` is set; it runs a statement and returns its rows."""
    placeholder: str
    """How a statement writes its first parameter: $1, %s or ?."""
    begins: bool
    """True if the driver begins a transaction by itself, with the first statement."""
    begun: Callable[[], bool]
    """Returns whether a transaction is open now, by the server's last word to the driver. Not set for SQLite."""

    def __init__(self, transaction: object) -> None:
        """
        Recognise *transaction*.

        Raises:
            UsageError: it is not a connection or session, or it is an asynchronous one of SQLAlchemy.
            UnsupportedError: SqlGuard does not support its database or its driver.
        """
        self.fetching, self.awaiting, self.placeholder = None, None, "%s"
        if is_asyncpg(transaction):
            self.dialect, self.driver, self.begins = POSTGRESQL, own_connection(transaction), False
            self.awaiting, self.placeholder = fetch_from_asyncpg(transaction), "$1"
            self.begun = transaction.is_in_transaction
        elif isinstance(transaction, sqlite3.Connection):
            self.dialect, self.driver, self.begins = SQLITE, transaction, True
            self.fetching, self.placeholder = _fetch_from_sqlite3(transaction), "?"
        elif is_psycopg(transaction):
            self.dialect, self.driver, self.begins = POSTGRESQL, transaction, not transaction.autocommit
            self.begun = begun_by(transaction)
            if inspect.iscoroutinefunction(getattr(transaction, "commit", None)):
                self.awaiting = fetch_from_psycopg_awaiting(transaction)
            else:
                self.fetching = fetch_from_psycopg(transaction)
        elif mysql.is_awaited(transaction):
            self._use_mysql(transaction)
            self.awaiting = mysql.fetch_awaiting(transaction)
        elif mysql.is_blocking(transaction):
            self._use_mysql(transaction)
            self.fetching = mysql.fetch_blocking(transaction)
        else:
            self._recognise_alchemy(_alchemy_connection(transaction))

    def _recognise_alchemy(self, alchemy: AlchemyConnection) -> None:
        self.dialect = dialect_of(alchemy.dialect.name)
        if self.dialect not in {SQLITE, POSTGRESQL, MYSQL}:
            msg = f"SqlGuard supports SQLite, PostgreSQL, MySQL and MariaDB, not {self.dialect}"
            raise UnsupportedError(msg)
        pooled = alchemy.connection
        self.driver = pooled.driver_connection
        self.fetching = _fetch_from_alchemy(alchemy)
        if self.dialect == SQLITE:
            self.placeholder, self.begins = "?", True
            return
        if self.dialect == MYSQL:
            if not mysql.is_mysql(self.driver):
                msg = (
                    "SqlGuard supports asyncmy, aiomysql, PyMySQL and mysqlclient; it cannot see what "
                    f"{type(self.driver).__module__} commits"
                )
                raise UnsupportedError(msg)
            self._use_mysql(self.driver)
            return
        if not (is_asyncpg(self.driver) or shows_status(self.driver)):
            msg = f"SqlGuard supports asyncpg and psycopg; it cannot see what {type(self.driver).__module__} commits"
            raise UnsupportedError(msg)
        self.begins = not getattr(pooled.dbapi_connection, "autocommit", False)
        self.begun = begun_by(self.driver)
        if alchemy.dialect.paramstyle == "numeric_dollar":
            self.placeholder = "$1"

    def _use_mysql(self, driver: AwaitedMysqlConnection | BlockingMysqlConnection) -> None:
        self.dialect, self.driver = MYSQL, driver
        self.begins, self.begun = not driver.get_autocommit(), mysql.begun_by(driver)


def dialect_of(name: str) -> str:
    """Return what the guard calls the dialect that has this *name* in SQLAlchemy."""
    return MYSQL if name == MARIADB else name


async def perform(transaction: object, work: Callable[[Transaction], Steps[T]]) -> T:
    """Run *work* in a *transaction* of any kind. Errors are those of `Transaction`."""
    if _is_alchemy_async(transaction):
        result: T = await transaction.run_sync(perform_sync, work)
        return result
    opened = Transaction(transaction)
    if opened.awaiting is not None:
        return await run_steps_async(work(opened), opened.awaiting)
    assert opened.fetching is not None
    return run_steps(work(opened), opened.fetching)


def perform_sync(transaction: object, work: Callable[[Transaction], Steps[T]]) -> T:
    """Run *work* in a *transaction* of a driver that blocks. Errors are those of `Transaction`."""
    opened = None if _is_alchemy_async(transaction) else Transaction(transaction)
    if opened is None or opened.fetching is None:
        msg = f"{type(transaction).__name__} is asynchronous: await guard.admit(...) instead of admit_sync"
        raise UsageError(msg)
    return run_steps(work(opened), opened.fetching)


def _is_alchemy_async(transaction: object) -> TypeGuard[AlchemyAsync]:
    """Return whether *transaction* is an AsyncSession or AsyncConnection of SQLAlchemy."""
    return hasattr(transaction, "run_sync")


def _fetch_from_sqlite3(connection: sqlite3.Connection) -> Fetch:
    def fetch(statement: str, parameters: Parameters) -> Sequence[Row]:
        cursor = connection.cursor()
        cursor.row_factory = None  # rows are tuples, also where the connection makes others
        rows: Sequence[Row] = cursor.execute(statement, parameters).fetchall()
        return rows

    return fetch


def _fetch_from_alchemy(connection: AlchemyConnection) -> Fetch:
    def fetch(statement: str, parameters: Parameters) -> Sequence[Row]:
        result = connection.exec_driver_sql(statement, parameters)
        return result.fetchall() if result.returns_rows else ()

    return fetch


def _alchemy_connection(transaction: object) -> AlchemyConnection:
    if hasattr(transaction, "exec_driver_sql"):
        return cast("AlchemyConnection", transaction)
    if hasattr(transaction, "flush") and hasattr(transaction, "connection"):
        return cast("AlchemySession", transaction).connection()
    if shows_status(transaction):
        package = type(transaction).__module__.partition(".")[0]
        msg = (
            f"a transaction cannot be a connection of {package} itself; pass a connection of psycopg 3 "
            "(pip install psycopg) or asyncpg, or SQLAlchemy's Session or Connection over the driver that you have"
        )
        raise UsageError(msg)
    msg = (
        "a transaction must be a sqlite3.Connection, a connection of asyncpg, psycopg, asyncmy, aiomysql, PyMySQL or "
        f"mysqlclient, or SQLAlchemy's (Async)Session or (Async)Connection, not {type(transaction).__name__}"
    )
    raise UsageError(msg)
