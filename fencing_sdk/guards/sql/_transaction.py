"""
The caller's own transaction, made with any of the drivers or with SQLAlchemy.

A guard recognises their objects by their methods, so that callers install only the driver that they use. Statements
go to the driver directly, past the ORM's unit of work.
"""

from __future__ import annotations

import inspect
import sqlite3
from collections.abc import Callable, Sequence
from typing import TypeGuard, TypeVar, cast

from fencing_sdk._values.claim import Token, writes_of
from fencing_sdk.errors import UnsupportedError, UsageError
from fencing_sdk.guards.sql._drivers import (
    begun_by,
    fetch_from_asyncpg,
    fetch_from_psycopg,
    fetch_from_psycopg_awaiting,
    is_asyncpg,
    is_pooled,
    is_psycopg,
    own_connection,
    tells_status,
)
from fencing_sdk.guards.sql._identifiers import POSTGRESQL, SQLITE
from fencing_sdk.guards.sql._protocols import (
    AlchemyAsync,
    AlchemyConnection,
    AlchemySession,
    HasTransaction,
    SqliteDriverConnection,
)
from fencing_sdk.guards.sql._steps import AsyncFetch, Fetch, Parameters, Row, Steps, run_steps, run_steps_async

T = TypeVar("T")


class Transaction:
    """A transaction of the caller. This class never begins, commits or rolls back."""

    __slots__ = ("_alchemy", "awaiting", "begins", "begun", "dialect", "driver", "fetching", "placeholder")

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
    """Whether the driver begins a transaction by itself, with the first statement."""
    begun: Callable[[], bool]
    """Tells whether a transaction is open now, as PostgreSQL has told the driver. Not set for SQLite."""

    def __init__(self, transaction: object) -> None:
        """
        Recognise *transaction*.

        Raises:
            UsageError: it is no connection or session, or it is an asynchronous one of SQLAlchemy.
            UnsupportedError: SqlGuard does not support its database or its driver.
        """
        self.fetching, self.awaiting, self.placeholder = None, None, "%s"
        self._alchemy: HasTransaction | None = None
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
        else:
            self._recognise_alchemy(_alchemy_connection(transaction))
            self._alchemy = cast("HasTransaction", transaction() if callable(transaction) else transaction)

    def note(self, token: Token, *, admitted: bool) -> None:
        """
        Have the lease of *token*, if it is one of this process, look for the end of this transaction.

        *admitted*: the fence of the token is locked until then.
        """
        writes, hidden = writes_of(token), is_pooled(self.driver)  # then it may be open later for another caller
        if writes is not None and (admitted or not hidden) and self.is_open():  # else the driver has committed at once
            # SQLAlchemy's own: that of a session may end before that of its connection.
            end = None if self._alchemy is None else self._alchemy.get_transaction()
            writes.note(self.driver, self.is_open if end is None else lambda: end.is_active, admitted=admitted)

    def is_open(self) -> bool:
        """Whether a transaction is open on the connection now."""
        try:
            if self.dialect == SQLITE:
                return cast("SqliteDriverConnection", self.driver).in_transaction
            return self.begun()
        except Exception:  # noqa: BLE001  (of any driver: the connection was closed, or a pool took it back)
            return False

    def _recognise_alchemy(self, alchemy: AlchemyConnection) -> None:
        self.dialect = alchemy.dialect.name
        if self.dialect not in {SQLITE, POSTGRESQL}:
            msg = f"SqlGuard supports SQLite and PostgreSQL, not {self.dialect}"
            raise UnsupportedError(msg)
        pooled = alchemy.connection
        self.driver = pooled.driver_connection
        self.fetching = _fetch_from_alchemy(alchemy)
        if self.dialect == SQLITE:
            self.placeholder, self.begins = "?", True
            return
        if not (is_asyncpg(self.driver) or tells_status(self.driver)):
            msg = f"SqlGuard supports asyncpg and psycopg; it cannot see what {type(self.driver).__module__} commits"
            raise UnsupportedError(msg)
        self.begins = not getattr(pooled.dbapi_connection, "autocommit", False)
        self.begun = begun_by(self.driver)
        if alchemy.dialect.paramstyle == "numeric_dollar":
            self.placeholder = "$1"


async def perform(transaction: object, work: Callable[[Transaction], Steps[T]]) -> T:
    """
    Run *work* in a *transaction* of any kind.

    Raises:
        UsageError, UnsupportedError: as `Transaction`.
    """
    if _is_alchemy_async(transaction):
        result: T = await transaction.run_sync(perform_sync, work)
        return result
    opened = Transaction(transaction)
    if opened.awaiting is not None:
        return await run_steps_async(work(opened), opened.awaiting)
    assert opened.fetching is not None
    return run_steps(work(opened), opened.fetching)


def perform_sync(transaction: object, work: Callable[[Transaction], Steps[T]]) -> T:
    """
    Run *work* in a *transaction* of a driver that blocks.

    Raises:
        UsageError, UnsupportedError: as `Transaction`. An asynchronous transaction is a UsageError.
    """
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
        rows: Sequence[Row] = connection.execute(statement, parameters).fetchall()
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
    if tells_status(transaction):
        msg = (
            f"a transaction cannot be a connection of {_package(transaction)} itself; pass a connection of psycopg 3 "
            "(pip install psycopg) or asyncpg, or SQLAlchemy's Session or Connection over the driver that you have"
        )
        raise UsageError(msg)
    msg = (
        "a transaction must be a sqlite3.Connection, a connection of asyncpg or psycopg, or SQLAlchemy's "
        f"(Async)Session or (Async)Connection, not {type(transaction).__name__}"
    )
    raise UsageError(msg)


def _package(driver: object) -> str:
    return type(driver).__module__.partition(".")[0]
