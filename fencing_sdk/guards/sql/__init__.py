"""
A guard inside the caller's own SQL transaction: fence and data are committed together, or neither.

    async with session.begin():                                 # one transaction
        await guard.admit(session, "seats/42", lease.token)     # first: it locks the fence until the commit
        await session.execute(update(Seat)...)

    SqlGuard      keeps the fences in a table of its own
    FenceColumn   for a fence that is a column of your table, and a write that checks it by itself

For SQLite 3.35 or newer, through `sqlite3` or SQLAlchemy, and for PostgreSQL, through asyncpg,
psycopg 3 or SQLAlchemy. This module imports none of them unless a URL needs it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Protocol

from fencing_sdk._values.claim import Token
from fencing_sdk._values.names import check_name
from fencing_sdk._values.token_wire import check_token
from fencing_sdk._values.uncopied import Uncopied
from fencing_sdk.errors import ConfigurationError, shown
from fencing_sdk.events import Observer
from fencing_sdk.guards._verdict import Reports, check_tokens
from fencing_sdk.guards.sql._fence_column import FenceColumn
from fencing_sdk.guards.sql._identifiers import POSTGRESQL, SQLITE, check_identifier
from fencing_sdk.guards.sql._own_database import WRITER_PATIENCE, NoDatabase, own_database
from fencing_sdk.guards.sql._postgresql import PostgresqlFences
from fencing_sdk.guards.sql._protocols import AlchemyAsyncEngine, AsyncTransaction, SyncTransaction
from fencing_sdk.guards.sql._sqlite import SqliteFences
from fencing_sdk.guards.sql._steps import Steps
from fencing_sdk.guards.sql._transaction import Transaction, perform, perform_sync

__all__ = ["FenceColumn", "SqlGuard"]


class _FenceTable(Protocol):
    """The fences in one table, in one dialect."""

    def ddl(self) -> str: ...

    def admit(self, transaction: Transaction, resource: str, token: Token) -> Steps[None]: ...

    def admit_all(self, transaction: Transaction, tokens: Mapping[str, Token]) -> Steps[None]: ...

    def raise_fence(
        self, transaction: Transaction, resource: str, token: Token, wait: float, *, own: bool = False
    ) -> Steps[None]: ...

    def highest(self, transaction: Transaction, resource: str) -> Steps[Token | None]: ...


class SqlGuard(Uncopied):
    """
    Keeps fences in a table of the database that holds the data: SQLite or PostgreSQL.

    Admit as the *first* statement of a transaction. On SQLite it takes the write lock, on PostgreSQL
    the lock of this resource's fence, so no other writer can come between the check and the commit.
    If a transaction has read before, the database may refuse it, because what it read is
    outdated: "database is locked" on SQLite, SQLSTATE 40001 at PostgreSQL's levels REPEATABLE READ
    and SERIALIZABLE. Roll back and try again. A rollback also undoes the fence, and so does a
    rollback to an earlier savepoint. Read after `admit` what you decide by: what was read before may be outdated.

    The guard raises errors of the database unchanged. Not promised: anything about writes to this data
    that do not admit, or that go to another database than *connect*.

    Args:
        connect: The database in which `raise_to` and `highest` run short transactions of their own: the
            path of an SQLite file, a URL such as ``"sqlite:///app.db"`` or ``"postgresql://host/app"``, or
            SQLAlchemy's AsyncEngine. Without it the guard can `admit`, in transactions of either
            dialect, but cannot be used in ``fences=[...]``.

        table: The table, ``"name"`` or ``"schema.name"``. Without a schema PostgreSQL looks for it
            along the ``search_path`` of each transaction: name it where those differ.

        create: Whether to create the table if it is missing. If not, run `ddl` in a migration.

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
        self._database = own_database(connect)
        self._fences: dict[str, _FenceTable] = {
            SQLITE: SqliteFences(table, create=create),
            POSTGRESQL: PostgresqlFences(table, create=create),
        }
        self._reports = Reports(observers)

    @property
    def database(self) -> str | None:
        """
        The PostgreSQL database of the guard's own URL, with the user: ``user@host:5432/name``, without a password.

        None if there is no such URL, or if the URL does not determine the database.
        """
        return self._database.identity

    def ddl(self, dialect: str | None = None) -> str:
        """
        Return the statement that creates the table, for a migration.

        Args:
            dialect: ``"sqlite"`` or ``"postgresql"``. The default is the dialect of the guard's own
                database, or SQLite if it has none.

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
        Check *token* and write it as the fence, in your *transaction*. Your writes follow in the same one.

        The guard recognises the database by the transaction. With a driver that blocks, this method blocks the
        event loop; call `admit_sync` in a worker thread instead.

        Raises:
            StaleTokenError: the resource has seen a later token. Roll back; nothing was changed.
            UsageError: *transaction* is no connection or session, or it commits every statement by itself,
                or it uses another table of fences than the one in which this guard has raised fences.
            UnsupportedError: the database is neither SQLite nor PostgreSQL.
            ConfigurationError: *resource* or *token* is not one.
        """
        resource, checked = check_name(resource, parameter="resource"), check_token(token)
        with self._reports.of_refusals(checked):
            await perform(transaction, lambda opened: self._admit(opened, resource, checked))

    def admit_sync(self, transaction: SyncTransaction, resource: str, token: int) -> None:
        """
        Do the same as `admit` without an event loop, for sqlite3, psycopg, or a Connection or Session of SQLAlchemy.

        Raises:
            StaleTokenError, UsageError, UnsupportedError, ConfigurationError: as `admit`.
        """
        resource, checked = check_name(resource, parameter="resource"), check_token(token)
        with self._reports.of_refusals(checked):
            perform_sync(transaction, lambda opened: self._admit(opened, resource, checked))

    async def admit_all(self, transaction: AsyncTransaction | SyncTransaction, tokens: Mapping[str, int]) -> None:
        """
        Check the token of each resource and write all of them as fences, in your *transaction*, by one statement.

        PostgreSQL locks the fences in the order of their names, so two transactions that need the same ones do not wait
        for each other in a circle. Call it once for all, as several calls of `admit` would lock them in any order.

        Args:
            transaction: Yours, as for `admit`.

            tokens: The token of each resource, such as ``held.tokens`` of a `MultiLock`.

        Raises:
            StaleTokenError: one of the resources has seen a later token, and the error names it. Roll back; else
                the fences of the others are raised.
            UsageError, UnsupportedError, ConfigurationError: as `admit`.
        """
        checked = check_tokens(tokens)
        with self._reports.of_refusals(checked):
            await perform(transaction, lambda opened: self._admit_all(opened, checked))

    def admit_all_sync(self, transaction: SyncTransaction, tokens: Mapping[str, int]) -> None:
        """
        Do the same as `admit_all` without an event loop.

        Raises:
            StaleTokenError, UsageError, UnsupportedError, ConfigurationError: as `admit_all`.
        """
        checked = check_tokens(tokens)
        with self._reports.of_refusals(checked):
            perform_sync(transaction, lambda opened: self._admit_all(opened, checked))

    async def raise_to(self, resource: str, token: int) -> None:
        """
        See `fencing_sdk.abc.Guard.raise_to`. Waits up to 30 s for a transaction that is writing now.

        Raises:
            StaleTokenError: the resource has seen a later token.
            UsageError: the ``search_path`` leads to another table of fences than before.
            UnsupportedError: the guard was built without a database.
        """
        resource, checked = check_name(resource, parameter="resource"), check_token(token)
        with self._reports.of_refusals(checked):
            await self._database.run(
                lambda opened: self._of(opened).raise_fence(opened, resource, checked, WRITER_PATIENCE, own=True)
            )
        self._reports.raised(resource, checked)

    async def raise_in(
        self, transaction: AsyncTransaction | SyncTransaction, resource: str, token: int, *, wait: float = 5.0
    ) -> None:
        """
        Raise the fence in your *transaction*: it counts once you commit.

        Unlike `admit` it waits for a bounded time, and makes the commit survive a crash of the server: on
        PostgreSQL it sets ``lock_timeout`` and ``synchronous_commit`` until the transaction ends. It does not
        report `FenceRaised`, because the fence is not raised before the commit.

        On PostgreSQL a guard with a database has one table, and refuses to raise fences in another. For a table in
        the schema of each tenant, use ``SqlGuard()`` without a database and run ``ddl("postgresql")`` in each schema,
        or use a guard for each schema, with ``table="schema.fencing_fence"``.

        Args:
            transaction: Yours, as for `admit`.

            resource: The guarded resource.

            token: The token to raise its fence to.

            wait: Seconds to wait for a transaction that holds the fence. Then PostgreSQL raises
                55P03 (lock_not_available). On SQLite the timeout of the connection decides.

        Raises:
            StaleTokenError, UsageError, UnsupportedError, ConfigurationError: as `admit`.
        """
        resource, checked = check_name(resource, parameter="resource"), check_token(token)
        # A guard with a database has one table; one without may raise fences wherever a transaction leads.
        own = not isinstance(self._database, NoDatabase)
        with self._reports.of_refusals(checked):
            await perform(
                transaction, lambda opened: self._of(opened).raise_fence(opened, resource, checked, wait, own=own)
            )

    async def highest(self, resource: str) -> Token | None:
        """
        See `fencing_sdk.abc.Guard.highest`.

        Raises:
            UnsupportedError: the guard was built without a database.
        """
        resource = check_name(resource, parameter="resource")
        return await self._database.run(lambda opened: self._of(opened).highest(opened, resource))

    def _admit(self, transaction: Transaction, resource: str, token: Token) -> Steps[None]:
        yield from self._of(transaction).admit(transaction, resource, token)
        transaction.note(token, admitted=True)

    def _admit_all(self, transaction: Transaction, tokens: Mapping[str, Token]) -> Steps[None]:
        yield from self._of(transaction).admit_all(transaction, tokens)
        for token in tokens.values():
            transaction.note(token, admitted=True)

    def _of(self, transaction: Transaction) -> _FenceTable:
        return self._fences[transaction.dialect]
