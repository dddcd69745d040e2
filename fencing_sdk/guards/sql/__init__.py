"""
A guard inside the caller's own SQL transaction: fence and data are committed together, or neither.

    with connection:                                            # one transaction
        guard.admit_sync(connection, "seats/42", lease.token)   # first: it takes the write lock
        connection.execute("UPDATE seats SET ...")

For SQLite 3.35 or newer, through `sqlite3` or SQLAlchemy. Nothing of SQLAlchemy is imported here.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

from fencing_sdk._claim import Token
from fencing_sdk._events import Observer
from fencing_sdk._names import check_name
from fencing_sdk._wire import check_token
from fencing_sdk.errors import ConfigurationError, shown
from fencing_sdk.guards._verdict import Reports, refusal
from fencing_sdk.guards.sql import _sqlite
from fencing_sdk.guards.sql._database import database
from fencing_sdk.guards.sql._transaction import Row, Transaction, is_asynchronous

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
    from sqlalchemy.orm import Session

__all__ = ["SqlGuard"]

SyncTransaction: TypeAlias = "sqlite3.Connection | Connection | Session"
AsyncTransaction: TypeAlias = "AsyncConnection | AsyncSession"

_TABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}(\.[A-Za-z_][A-Za-z0-9_]{0,62})?", re.ASCII)


class SqlGuard:
    """
    Keeps fences in a table of the database that holds the data.

    Admit as the *first* statement of a transaction. It takes the write lock, so nobody can come
    between the check and the commit; a transaction that has read before may be told "database is
    locked", because what it read is outdated. Rolling back takes the fence back, too.

    Errors of the database leave as they are. Not promised: anything about writes to this data
    that do not admit, or that go to another database than *connect*.

    Args:
        connect: Where `raise_to` and `highest` open a short transaction of their own: the path of
            an SQLite file, a URL such as ``"sqlite:///app.db"``, or SQLAlchemy's AsyncEngine.
            Without it the guard can `admit`, and cannot stand in ``fences=[...]``.

        table: The table, ``"name"`` or ``"schema.name"``.

        create: Create the table when it is missing. If not, run `ddl` in a migration.

        observers: Callables that receive `StaleRejected` for every refusal and `FenceRaised` for
            every successful `raise_to`.

    Raises:
        ConfigurationError: an argument cannot work. No I/O happens before the first call.
    """

    def __init__(
        self,
        connect: AsyncEngine | str | os.PathLike[str] | None = None,
        *,
        table: str = "fencing_fence",
        create: bool = True,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._database = database(connect)
        self._statements = _sqlite.Statements.about(_check_table(table))
        self._create = create
        self._reports = Reports(observers)

    def ddl(self) -> str:
        """The statement that creates the table, for those who migrate by hand."""
        return self._statements.ddl

    async def admit(self, transaction: AsyncTransaction | SyncTransaction, resource: str, token: int) -> None:
        """
        Check *token* and remember it, in the caller's *transaction*. Your writes follow in the same one.

        A `sqlite3.Connection` is used in this very thread and blocks it; in a worker thread, call
        `admit_sync`.

        Raises:
            StaleTokenError: the resource has seen a later token. Roll back; nothing was changed.
            UsageError: the connection commits every statement by itself, or is none.
            UnsupportedError: the database is not SQLite.
            ConfigurationError: *resource* or *token* is not one.
        """
        if is_asynchronous(transaction):
            session = cast("AsyncSession", transaction)
            await session.run_sync(self.admit_sync, resource, token)
        else:
            self.admit_sync(cast("SyncTransaction", transaction), resource, token)

    def admit_sync(self, transaction: SyncTransaction, resource: str, token: int) -> None:
        """
        `admit` for code without an event loop: sqlite3, or a sync Connection or Session of SQLAlchemy.

        Raises:
            StaleTokenError, UsageError, UnsupportedError, ConfigurationError: as `admit`.
        """
        resource, checked = check_name(resource, parameter="resource"), check_token(token)
        with self._reports.of_refusals():
            self._admit(Transaction(transaction), resource, checked)

    async def raise_to(self, resource: str, token: int) -> None:
        """
        See `fencing_sdk.abc.Guard.raise_to`. Waits for a transaction that is writing now.

        Raises:
            StaleTokenError: the resource has seen a later token.
            UnsupportedError: the guard was built without a database.
        """
        resource, checked = check_name(resource, parameter="resource"), check_token(token)
        with self._reports.of_refusals():
            await self._database.run(lambda transaction: self._admit(transaction, resource, checked))
        self._reports.raised(resource, checked)

    async def highest(self, resource: str) -> Token | None:
        """
        See `fencing_sdk.abc.Guard.highest`.

        Raises:
            UnsupportedError: the guard was built without a database.
        """
        resource = check_name(resource, parameter="resource")
        return await self._database.run(lambda transaction: self._fence(transaction, resource))

    def _admit(self, transaction: Transaction, resource: str, token: Token) -> None:
        _sqlite.refuse_autocommit(transaction.driver)
        admitted = self._fetch(transaction, self._statements.admit, resource, int(token), token.holder)
        _sqlite.refuse_committed(transaction.driver)
        if not admitted:
            fence = self._fence(transaction, resource)
            assert fence is not None  # it refused, in this very transaction
            raise refusal(resource, token, fence)

    def _fence(self, transaction: Transaction, resource: str) -> Token | None:
        for token, holder in self._fetch(transaction, self._statements.fence, resource):
            return Token(cast("int", token), cast("str | None", holder))
        return None

    def _fetch(self, transaction: Transaction, statement: str, *parameters: object) -> Sequence[Row]:
        """Fetch rows, and once more after the table was created, if it was missing."""
        try:
            return transaction.fetch(statement, *parameters)
        except Exception as error:
            if not _sqlite.lacks_a_table(error):
                raise
            if not self._create:
                error.add_note("fencing_sdk: create the table of SqlGuard with the statement of ddl()")
                raise
        # Only now: asking for the table first would be a read, and the write after it might find that outdated.
        transaction.run(self._statements.ddl)
        return transaction.fetch(statement, *parameters)


def _check_table(table: object) -> str:
    if not isinstance(table, str) or not _TABLE.fullmatch(table):
        msg = f"table must be 'name' or 'schema.name' of ASCII letters, digits and _, got {shown(table)}"
        raise ConfigurationError(msg)
    return table
