"""
A guard inside the caller's own SQL transaction: fence and data are committed together, or neither.

    async with session.begin():                                 # one transaction
        await guard.admit(session, "seats/42", lease.token)     # first: it locks the fence until the commit
        await session.execute(update(Seat)...)

    SqlGuard      keeps the fences in a table of its own
    FenceColumn   for a fence that is a column of your table, and a write that checks it by itself

For SQLite 3.35 or newer, through `sqlite3` or SQLAlchemy, and for PostgreSQL, through asyncpg,
psycopg 3 or SQLAlchemy. None of them is imported here unless a URL asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from fencing_sdk._values.claim import Token
from fencing_sdk._values.names import check_name
from fencing_sdk._values.wire import check_token
from fencing_sdk.errors import ConfigurationError, shown
from fencing_sdk.events import Observer
from fencing_sdk.guards._verdict import Reports
from fencing_sdk.guards.sql import _postgresql, _sqlite
from fencing_sdk.guards.sql._accepted import AlchemyAsyncEngine, AsyncTransaction, SyncTransaction
from fencing_sdk.guards.sql._column import FenceColumn
from fencing_sdk.guards.sql._database import PATIENCE, database
from fencing_sdk.guards.sql._names import POSTGRESQL, SQLITE, check_identifier
from fencing_sdk.guards.sql._steps import Steps
from fencing_sdk.guards.sql._transaction import Transaction, perform, perform_sync

__all__ = ["FenceColumn", "SqlGuard"]


class _Fences(Protocol):
    """The fences in one table, in the words of one kind of database."""

    def ddl(self) -> str: ...

    def admit(self, transaction: Transaction, resource: str, token: Token) -> Steps[None]: ...

    def raise_fence(
        self, transaction: Transaction, resource: str, token: Token, wait: float, *, at_home: bool = False
    ) -> Steps[None]: ...

    def highest(self, transaction: Transaction, resource: str) -> Steps[Token | None]: ...


class SqlGuard:
    """
    Keeps fences in a table of the database that holds the data: SQLite or PostgreSQL.

    Admit as the *first* statement of a transaction. On SQLite it takes the write lock, on PostgreSQL
    the lock of this resource's fence, so nobody can come between the check and the commit. A
    transaction that has read before may be refused by the database, because what it read is
    outdated: "database is locked" on SQLite, SQLSTATE 40001 at PostgreSQL's levels REPEATABLE READ
    and SERIALIZABLE. Roll back and try again. Rolling back takes the fence back, too, also to a
    savepoint that was made before.

    Errors of the database leave as they are. Not promised: anything about writes to this data
    that do not admit, or that go to another database than *connect*.

    Args:
        connect: Where `raise_to` and `highest` open a short transaction of their own: the path of
            an SQLite file, a URL such as ``"sqlite:///app.db"`` or ``"postgresql://host/app"``, or
            SQLAlchemy's AsyncEngine. Without it the guard can `admit`, in the transactions of
            either database, and cannot stand in ``fences=[...]``.

        table: The table, ``"name"`` or ``"schema.name"``. Without a schema PostgreSQL looks for it
            along the ``search_path`` of each connection: name it where those differ.

        create: Create the table when it is missing. If not, run `ddl` in a migration.

        observers: Callables that receive `StaleRejected` for every refusal and `FenceRaised` for
            every successful `raise_to`.

    Raises:
        ConfigurationError: an argument cannot work. No I/O happens before the first call.
    """

    def __init__(
        self,
        connect: AlchemyAsyncEngine | str | os.PathLike[str] | None = None,
        *,
        table: str = "fencing_fence",
        create: bool = True,
        observers: Sequence[Observer] = (),
    ) -> None:
        table = check_identifier(table, parameter="table", schema=True)
        self._database = database(connect)
        self._fences: dict[str, _Fences] = {
            SQLITE: _sqlite.Fences(table, create=create),
            POSTGRESQL: _postgresql.Fences(table, create=create),
        }
        self._reports = Reports(observers)

    @property
    def database(self) -> str | None:
        """
        The PostgreSQL database that the guard's own URL means, and as who: ``user@host:5432/name``, never a password.

        None when there is no such URL, or it leaves open which one: then nothing is known.
        """
        return self._database.place

    def ddl(self, dialect: str | None = None) -> str:
        """
        The statement that creates the table, for those who migrate by hand.

        Args:
            dialect: ``"sqlite"`` or ``"postgresql"``; without it that of the guard's own database,
                or of SQLite if it has none.

        Raises:
            ConfigurationError: *dialect* is another one.
        """
        chosen = self._fences.get(dialect or self._database.dialect)
        if chosen is None:
            msg = f"dialect must be one of {', '.join(self._fences)}, got {shown(dialect or self._database.dialect)}"
            raise ConfigurationError(msg)
        return chosen.ddl()

    async def admit(self, transaction: AsyncTransaction | SyncTransaction, resource: str, token: int) -> None:
        """
        Check *token* and remember it, in the caller's *transaction*. Your writes follow in the same one.

        Which database it is in is seen from the transaction. One that blocks is used in this very
        thread; in a worker thread, call `admit_sync`.

        Raises:
            StaleTokenError: the resource has seen a later token. Roll back; nothing was changed.
            UsageError: the connection commits every statement by itself, or is none, or leads to other
                fences than those that this guard has raised.
            UnsupportedError: the database is neither SQLite nor PostgreSQL.
            ConfigurationError: *resource* or *token* is not one.
        """
        resource, checked = check_name(resource, parameter="resource"), check_token(token)
        with self._reports.of_refusals(checked):
            await perform(transaction, lambda opened: self._of(opened).admit(opened, resource, checked))

    def admit_sync(self, transaction: SyncTransaction, resource: str, token: int) -> None:
        """
        `admit` for code without an event loop: sqlite3, psycopg, or a sync Connection or Session of SQLAlchemy.

        Raises:
            StaleTokenError, UsageError, UnsupportedError, ConfigurationError: as `admit`.
        """
        resource, checked = check_name(resource, parameter="resource"), check_token(token)
        with self._reports.of_refusals(checked):
            perform_sync(transaction, lambda opened: self._of(opened).admit(opened, resource, checked))

    async def raise_to(self, resource: str, token: int) -> None:
        """
        See `fencing_sdk.abc.Guard.raise_to`. Waits up to 30 s for a transaction that is writing now.

        Raises:
            StaleTokenError: the resource has seen a later token.
            UnsupportedError: the guard was built without a database.
        """
        resource, checked = check_name(resource, parameter="resource"), check_token(token)
        with self._reports.of_refusals(checked):
            await self._database.run(
                lambda opened: self._of(opened).raise_fence(opened, resource, checked, PATIENCE, at_home=True)
            )
        self._reports.raised(resource, checked)

    async def raise_in(
        self, transaction: AsyncTransaction | SyncTransaction, resource: str, token: int, *, wait: float = 5.0
    ) -> None:
        """
        Raise the fence in a *transaction* of yours: it stands once that is committed.

        Unlike `admit` it bounds its waiting, and makes the commit one that survives a crash of the
        server: on PostgreSQL ``lock_timeout`` and ``synchronous_commit`` are set until the
        transaction ends. `FenceRaised` is not reported, because nothing is raised yet.

        Args:
            transaction: Yours, as for `admit`.

            resource: What is guarded.

            token: The token to raise its fence to.

            wait: Seconds to wait for a transaction that holds the fence; then PostgreSQL's error
                55P03 (lock_not_available). SQLite waits as its connection is set to.

        Raises:
            StaleTokenError, UsageError, UnsupportedError, ConfigurationError: as `admit`.
        """
        resource, checked = check_name(resource, parameter="resource"), check_token(token)
        with self._reports.of_refusals(checked):
            await perform(transaction, lambda opened: self._of(opened).raise_fence(opened, resource, checked, wait))

    async def highest(self, resource: str) -> Token | None:
        """
        See `fencing_sdk.abc.Guard.highest`.

        Raises:
            UnsupportedError: the guard was built without a database.
        """
        resource = check_name(resource, parameter="resource")
        return await self._database.run(lambda opened: self._of(opened).highest(opened, resource))

    def _of(self, transaction: Transaction) -> _Fences:
        return self._fences[transaction.dialect]
