"""
The caller's own transaction, whatever it was made with.

SQLAlchemy is recognised by what its objects can do, so that nobody who does not use it has to
install it. Statements go to the driver as they are: the ORM's unit of work is not involved.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Protocol, cast

from fencing_sdk.errors import UnsupportedError, UsageError
from fencing_sdk.guards.sql import _sqlite

Row = Sequence[object]


class _Cursor(Protocol):
    def fetchall(self) -> Sequence[Row]: ...


class _Pooled(Protocol):
    """SQLAlchemy's view of a driver's connection."""

    @property
    def driver_connection(self) -> _sqlite.Driver: ...


class _Dialect(Protocol):
    @property
    def name(self) -> str: ...


class _AlchemyConnection(Protocol):
    """The part of `sqlalchemy.Connection` that is used here."""

    @property
    def connection(self) -> _Pooled: ...

    @property
    def dialect(self) -> _Dialect: ...

    def exec_driver_sql(self, statement: str, parameters: tuple[object, ...], /) -> _Cursor: ...


class _AlchemySession(Protocol):
    """The part of `sqlalchemy.orm.Session` that is used here."""

    def connection(self) -> _AlchemyConnection: ...


class _Execute(Protocol):
    def __call__(self, statement: str, parameters: tuple[object, ...], /) -> _Cursor: ...


class Transaction:
    """An open transaction of the caller. Nothing here begins, commits or rolls back."""

    __slots__ = ("_execute", "driver")

    def __init__(self, transaction: object) -> None:
        """
        Recognise *transaction*.

        Raises:
            UsageError: it is no connection or session, or it is an asynchronous one.
            UnsupportedError: its database is not SQLite.
        """
        self._execute, self.driver = _recognised(transaction)

    def fetch(self, statement: str, *parameters: object) -> Sequence[Row]:
        """Execute *statement* to its end and return its rows."""
        return self._execute(statement, parameters).fetchall()

    def run(self, statement: str) -> None:
        """Execute a *statement* that returns no rows."""
        self._execute(statement, ())


def is_asynchronous(transaction: object) -> bool:
    """Whether *transaction* is an AsyncSession or AsyncConnection of SQLAlchemy."""
    return hasattr(transaction, "run_sync")


def _recognised(transaction: object) -> tuple[_Execute, _sqlite.Driver]:
    if isinstance(transaction, sqlite3.Connection):
        return transaction.execute, transaction
    if is_asynchronous(transaction):
        msg = f"{type(transaction).__name__} is asynchronous: await guard.admit(...) instead of admit_sync"
        raise UsageError(msg)
    alchemy = _alchemy_connection(transaction)
    if alchemy.dialect.name != _sqlite.NAME:
        msg = f"SqlGuard speaks SQLite, not {alchemy.dialect.name}"
        raise UnsupportedError(msg)
    return alchemy.exec_driver_sql, alchemy.connection.driver_connection


def _alchemy_connection(transaction: object) -> _AlchemyConnection:
    if hasattr(transaction, "exec_driver_sql"):
        return cast("_AlchemyConnection", transaction)
    if hasattr(transaction, "flush") and hasattr(transaction, "connection"):
        return cast("_AlchemySession", transaction).connection()
    msg = (
        "a transaction must be a sqlite3.Connection or SQLAlchemy's (Async)Session or (Async)Connection, "
        f"not {type(transaction).__name__}"
    )
    raise UsageError(msg)
