"""
The caller's own transaction, made with any of the drivers or with SQLAlchemy, and a guard's work in it.

A guard needs two methods of a connection: one runs a statement and returns the rows, the other returns whether a
transaction is open. It finds the driver by the methods that the connection has, so callers install only the driver that
they use. Statements go to the driver directly, past the ORM's unit of work.

A guard's work is a coroutine. With a driver that blocks it never waits, so `perform_sync` needs no event loop.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from typing import Any, TypeAlias, TypeVar

from fencing_sdk._values.drivers import KnownDriver
from fencing_sdk.errors import UnsupportedError, UsageError

SQLITE, POSTGRESQL, MYSQL, MARIADB = "sqlite", "postgresql", "mysql", "mariadb"
"""SQLAlchemy's names of the dialects. The two last are one to the guard."""

T = TypeVar("T")

Row: TypeAlias = Sequence[Any]
Parameters: TypeAlias = tuple[object, ...]
Fetch: TypeAlias = Callable[[str, Parameters], Awaitable[Sequence[Row]]]

_ASYNCPG = KnownDriver("asyncpg", user="SqlGuard")
_IDLE = 0
"""libpq's status of a connection without a transaction."""
_IN_TRANSACTION = 1
"""The bit SERVER_STATUS_IN_TRANS of MySQL's protocol."""
_LEGACY_TRANSACTION_CONTROL = -1
"""`sqlite3.LEGACY_TRANSACTION_CONTROL`, which Python has since 3.12: the driver begins transactions by itself."""
_MYSQL_METHODS = ("get_server_info", "get_autocommit", "cursor")


class Transaction:
    """A transaction of the caller. This class never begins, commits or rolls back."""

    __slots__ = ("begins", "dialect", "driver", "fetch", "is_awaited", "is_open", "placeholder")

    dialect: str
    """SQLAlchemy's name of the dialect."""
    driver: object
    """The driver's own connection."""
    fetch: Fetch
    """Runs a statement and returns its rows."""
    is_awaited: bool
    """False if `fetch` never waits."""
    placeholder: str
    """First parameter, as a statement writes it: $1, %s or ?."""
    begins: bool
    """True if the driver begins a transaction by itself, with the first statement."""
    is_open: Callable[[], bool]
    """Returns whether a transaction is open now, by the server's last word to the driver."""

    def __init__(self, transaction: Any) -> None:
        """
        Recognise *transaction*.

        Raises:
            UsageError: it is not a connection or session.
            UnsupportedError: SqlGuard does not support its database or its driver.
        """
        if hasattr(transaction, "flush") and hasattr(transaction, "connection"):
            transaction = transaction.connection()  # of SQLAlchemy's Session
        if hasattr(transaction, "ensure_connection"):  # Django's
            transaction.ensure_connection()
            transaction = transaction.connection
        if hasattr(transaction, "exec_driver_sql"):
            self._recognise_alchemy(transaction)
        elif not self._recognise(transaction) or (self.dialect == POSTGRESQL and _is_psycopg2(transaction)):
            package = type(transaction).__module__.partition(".")[0]
            msg = (
                "a transaction must be a connection of sqlite3, aiosqlite, asyncpg, psycopg 3, asyncmy, aiomysql, "
                "PyMySQL or mysqlclient, Django's connection, or SQLAlchemy's (Async)Session or (Async)Connection, "
                f"also over psycopg2, not {type(transaction).__name__} of {package}"
            )
            raise UsageError(msg)

    def _recognise(self, driver: Any) -> bool:
        """Return whether *driver* is a connection of a driver that is supported."""
        self.driver, self.placeholder, self.is_awaited = driver, "%s", False
        if hasattr(driver, "is_in_transaction") and hasattr(driver, "fetch"):  # a pool has no transaction
            self.dialect, self.placeholder, self.is_awaited = POSTGRESQL, "$1", True
            self.driver = _without_proxy(driver)
            self.begins, self.is_open = False, driver.is_in_transaction
            self.fetch = lambda statement, parameters: driver.fetch(statement, *parameters)
        elif hasattr(driver, "in_transaction") and hasattr(driver, "isolation_level"):
            self.dialect, self.placeholder, self.is_awaited = SQLITE, "?", hasattr(driver, "execute_fetchall")
            begins_by_itself = getattr(driver, "autocommit", _LEGACY_TRANSACTION_CONTROL) == _LEGACY_TRANSACTION_CONTROL
            self.begins = driver.isolation_level is not None and begins_by_itself
            self.is_open = lambda: driver.in_transaction
            self.fetch = (_awaiting if self.is_awaited else _blocking)(driver.cursor, plain=True)
        elif hasattr(driver, "cursor") and hasattr(getattr(driver, "info", None), "transaction_status"):
            self.dialect, self.is_awaited = POSTGRESQL, inspect.iscoroutinefunction(driver.commit)
            self.begins, self.is_open = not driver.autocommit, lambda: driver.info.transaction_status != _IDLE
            self.fetch = (_awaiting if self.is_awaited else _blocking)(partial(_cursor_of_psycopg, driver))
        elif all(hasattr(driver, name) for name in _MYSQL_METHODS):
            self.dialect, self.is_awaited = MYSQL, hasattr(driver, "get_transaction_status")
            self.begins = not driver.get_autocommit()
            if self.is_awaited:  # asyncmy and aiomysql
                self.is_open = driver.get_transaction_status
            elif hasattr(driver, "server_status"):  # PyMySQL
                self.is_open = lambda: bool(driver.server_status & _IN_TRANSACTION)
            else:  # mysqlclient hides it: with autocommit off, as Django sets it, a transaction is taken to be open
                self.is_open = lambda: not driver.get_autocommit()
            self.fetch = (_awaiting if self.is_awaited else _blocking)(driver.cursor)
        else:
            return False
        return True

    def _recognise_alchemy(self, connection: Any) -> None:
        dialect = dialect_of(connection.dialect.name)
        if dialect not in _AUTOCOMMIT:
            msg = f"fencing_sdk supports SQLite, PostgreSQL, MySQL and MariaDB, not {dialect}"
            raise UnsupportedError(msg)
        pooled = connection.connection
        if not self._recognise(pooled.driver_connection) or self.dialect != dialect:
            msg = f"fencing_sdk cannot see what {type(pooled.driver_connection).__module__} commits; use another driver"
            raise UnsupportedError(msg)
        if dialect == POSTGRESQL:
            self.begins = not getattr(pooled.dbapi_connection, "autocommit", False)
            self.placeholder = "$1" if connection.dialect.paramstyle == "numeric_dollar" else "%s"

        async def fetch(statement: str, parameters: Parameters) -> Sequence[Row]:
            result = connection.exec_driver_sql(statement, parameters)
            rows: Sequence[Row] = result.fetchall() if result.returns_rows else ()
            return rows

        self.fetch, self.is_awaited = fetch, False

    def refuse_autocommit(self) -> None:
        """
        Refuse a connection on which the next statement would be a transaction of its own.

        Raises:
            UsageError: it is one.
        """
        if not (self.begins or self.is_open()):
            raise UsageError(_AUTOCOMMIT[self.dialect])

    def refuse_committed(self) -> None:
        """
        Refuse a driver that hides its mode, and has committed the statement before.

        Raises:
            UsageError: it has.
        """
        if not self.is_open():
            raise UsageError(_AUTOCOMMIT[self.dialect])


_AUTOCOMMIT = {
    SQLITE: (
        "this SQLite connection commits every statement by itself, so the check and your write would be two "
        "transactions; begin one first: connection.execute('BEGIN IMMEDIATE')"
    ),
    POSTGRESQL: (
        "this PostgreSQL connection commits every statement by itself, so the check and your write would be two "
        "transactions; begin one first: connection.transaction(), or with SQLAlchemy session.begin() without AUTOCOMMIT"
    ),
    MYSQL: (
        "this MySQL connection commits every statement by itself, so the check and your write would be two "
        "transactions; turn autocommit off, or begin one first: connection.begin(), which asyncmy and aiomysql await "
        "(mysqlclient needs autocommit off), or with SQLAlchemy session.begin() without AUTOCOMMIT"
    ),
}


def dialect_of(name: str) -> str:
    """Return the guard's name of the dialect that has this *name* in SQLAlchemy."""
    return MYSQL if name == MARIADB else name


async def perform(transaction: Any, work: Callable[[Transaction], Coroutine[Any, Any, T]]) -> T:
    """Run *work* in a *transaction* of any kind. Errors are those of `Transaction`."""
    if hasattr(transaction, "run_sync"):  # an AsyncSession or AsyncConnection of SQLAlchemy
        result: T = await transaction.run_sync(perform_sync, work)
        return result
    return await work(Transaction(transaction))


def perform_sync(transaction: object, work: Callable[[Transaction], Coroutine[Any, Any, T]]) -> T:
    """Run *work* in a *transaction* of a driver that blocks. Errors are those of `Transaction`."""
    opened = None if hasattr(transaction, "run_sync") else Transaction(transaction)
    if opened is None or opened.is_awaited:
        msg = (
            f"{type(transaction).__name__} is asynchronous, and this call blocks: await guard.admit(...) instead of "
            "admit_sync(), or use fencing_sdk.rows instead of fencing_sdk.rows.sync"
        )
        raise UsageError(msg)
    try:
        work(opened).send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    msg = "the work waits, although the driver blocks"
    raise AssertionError(msg)


def _without_proxy(connection: object) -> object:
    """
    Return the connection of asyncpg behind a pool's proxy. The pool makes a new proxy each time it hands one out.

    Raises:
        BackendRefusedError: the installed asyncpg keeps the connection elsewhere.
    """
    own: object = getattr(connection, "_con", connection)
    with _ASYNCPG.known("admit"):
        weakref.ref(own)  # what is known of a connection ends with it; a proxy can have no weak reference
    return own


def _is_psycopg2(connection: object) -> bool:
    """Return whether a connection to PostgreSQL is of psycopg2, which knows no row_factory."""
    return not hasattr(connection, "pgconn") and not hasattr(connection, "is_in_transaction")


def _cursor_of_psycopg(driver: Any) -> Any:
    """Open a cursor of the plain kind: that of the connection's ``cursor_factory`` may have other placeholders."""
    psycopg = sys.modules["psycopg"]
    kind = psycopg.AsyncCursor if inspect.iscoroutinefunction(driver.commit) else psycopg.Cursor
    return kind(driver, row_factory=_row_factory)


def _row_factory(_: object) -> Callable[[Sequence[object]], Row]:
    """Make rows of psycopg tuples, also where the connection makes others."""
    return tuple


def _blocking(open_cursor: Callable[[], Any], *, plain: bool = False) -> Fetch:
    """With *plain* the rows are those of SQLite, also where the connection makes others."""

    async def fetch(statement: str, parameters: Parameters) -> Sequence[Row]:
        with closing(open_cursor()) as cursor:
            if plain:
                cursor.row_factory = None
            with _pipeline_of(cursor) or nullcontext():
                cursor.execute(statement, parameters)
            return _tuples(cursor.fetchall()) if cursor.description else ()

    return fetch


def _awaiting(open_cursor: Callable[[], Any], *, plain: bool = False) -> Fetch:
    """Do the same with a driver that is awaited."""

    async def fetch(statement: str, parameters: Parameters) -> Sequence[Row]:
        async with open_cursor() as cursor:
            if plain:
                cursor.row_factory = None
            async with _pipeline_of(cursor) or nullcontext():
                await cursor.execute(statement, parameters)
            return _tuples(await cursor.fetchall()) if cursor.description else ()

    return fetch


def _pipeline_of(cursor: Any) -> Any:
    """
    Return a block of psycopg's pipeline mode, if the connection is in that mode.

    At its end the results are there. Without it ``cursor.description`` is None, as if the statement had no rows.
    """
    info = getattr(getattr(cursor, "connection", None), "info", None)
    return cursor.connection.pipeline() if getattr(info, "pipeline_status", 0) else None


def _tuples(rows: Sequence[Row | Mapping[str, object]]) -> Sequence[Row]:
    """Return rows without names, also where MySQL's connection makes dictionaries."""
    return [tuple(row.values()) if isinstance(row, Mapping) else row for row in rows]
