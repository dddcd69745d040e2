"""
A guard inside the caller's own SQL transaction: fence and data are committed together, or neither.

    async with session.begin():                                 # one transaction
        await guard.admit(session, "seats/42", lease.token)     # first: it locks the fence until the commit
        await session.execute(update(Seat)...)

Or the fence as a column of your own table: one statement checks the token and writes, and there is no other table.

    seats = FenceColumn("seats", key="seat")

    statement = update(Seat).values(who="Ada", fence=token).where(Seat.seat == 42, Seat.fence <= token)
    done = await session.execute(statement)
    if not await seats.written(session, 42, token, done): ...   # there is no such seat

For SQLite 3.35 or newer, through `sqlite3`, aiosqlite or SQLAlchemy; for PostgreSQL, through asyncpg, psycopg 3 or
SQLAlchemy; for MySQL 8 and MariaDB 10.6 or newer, through asyncmy, aiomysql, PyMySQL, mysqlclient or SQLAlchemy. This
module imports none of them unless a URL needs it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from fencing_sdk._values.claim import check_name
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.token import Token, check_token
from fencing_sdk.errors import ConfigurationError, UnsupportedError, UsageError, shown
from fencing_sdk.events import Observer
from fencing_sdk.guards import Reports, check_token_of, check_tokens, refusal
from fencing_sdk.guards.sql._databases import (
    DIALECTS,
    WRITER_PATIENCE,
    EngineDatabase,
    MysqlDatabase,
    Work,
    own_database,
)
from fencing_sdk.guards.sql._fence_table import FenceTable, check_identifier
from fencing_sdk.guards.sql._postgresql import PostgresqlFences
from fencing_sdk.guards.sql._transaction import POSTGRESQL, SQLITE, T, Transaction, dialect_of, perform, perform_sync

__all__ = ["FenceColumn", "SqlGuard"]


class SqlGuard(Uncopied):
    """
    Keeps fences in a table of the database that holds the data: SQLite, PostgreSQL, MySQL or MariaDB.

    Admit as the *first* statement of a transaction. On SQLite it takes the write lock, on the others
    the lock of this resource's fence, so no other writer can come between the check and the commit.
    If a transaction has read before, the database may refuse it, because what it read is
    outdated: "database is locked" on SQLite, SQLSTATE 40001 at PostgreSQL's levels REPEATABLE READ
    and SERIALIZABLE, the errors 1213 and 1020 on MySQL and MariaDB. Roll back and try again. If the transaction
    has read before the lock is taken with ``fences=[guard]``, MariaDB 11.6 or newer raises 1020 at each try: end it
    before you take the lock. A rollback also undoes the fence, and so does a rollback to an earlier savepoint. Read
    after `admit` what you decide by: what was read before may be outdated.

    The guard raises errors of the database unchanged. Not promised: anything about writes to this data
    that do not admit, or that go to another database than *connect*.

    Args:
        connect: The database in which `raise_to` and `highest` run short transactions of their own: the
            path of an SQLite file, a URL such as ``"sqlite:///app.db"``, ``"postgresql://host/app"`` or
            ``"mysql://user@host/app"``, or SQLAlchemy's AsyncEngine. Of several hosts the guard uses the first that
            takes writes, for `highest`, too. Without it the guard can `admit`, in
            transactions of every dialect, but cannot be used in ``fences=[...]``.

        table: The table, ``"name"`` or ``"schema.name"``. Without a schema PostgreSQL looks for it
            along the ``search_path`` of each transaction, and MySQL in its database: name it where those differ.

        create: Whether to create the table if it is missing. If not, run `ddl` in a migration. On MySQL and MariaDB
            the guard creates it on a connection of its own, so it needs *connect* for that, and `admit_sync` does not.

        observers: Callables that receive `StaleRejected` for every refusal and `FenceRaised` for
            every successful `raise_to`.

    Raises:
        ConfigurationError: an argument cannot work. No I/O happens before the first call.
    """

    def __init__(
        self,
        connect: object = None,
        *,
        table: str = "fencing_fence",
        create: bool = True,
        observers: Sequence[Observer] = (),
    ) -> None:
        table = check_identifier(table, parameter="table", schema=True)
        self._database = own_database(connect)
        self._fences = {dialect: kind(table, create=create) for dialect, kind in DIALECTS.items()}
        self._fences[POSTGRESQL] = self._postgresql = PostgresqlFences(table, create=create)
        self._reports = Reports(observers)

    @property
    def database(self) -> str | None:
        """
        The database on a server that the guard's own URL names: ``user@host:5432/name``, without a password.

        None if there is no such URL, or if the URL does not determine the database.
        """
        return None if self._database is None else self._database.identity

    def ddl(self, dialect: str | None = None) -> str:
        """
        Return the statement that creates the table, for a migration.

        Args:
            dialect: ``"sqlite"``, ``"postgresql"`` or ``"mysql"``, which is MariaDB's, too. The default is the
                dialect of the guard's own database, or SQLite if it has none.

        Raises:
            ConfigurationError: *dialect* is another one.
        """
        own = SQLITE if self._database is None else self._database.dialect
        chosen = self._fences.get(dialect_of(dialect or own))
        if chosen is None:
            msg = f"dialect must be one of {', '.join(self._fences)}, got {shown(dialect or own)}"
            raise ConfigurationError(msg)
        return chosen.ddl

    async def admit(self, transaction: object, resource: str, token: int) -> None:
        """
        Check *token* and write it as the fence, in your *transaction*. Your writes follow in the same one.

        *transaction* is a connection of asyncpg, psycopg, aiosqlite, asyncmy or aiomysql, or SQLAlchemy's AsyncSession
        or AsyncConnection. With what `admit_sync` takes, this method blocks the event loop.

        Raises:
            StaleTokenError: the resource has seen a later token. Roll back; nothing was changed.
            UsageError: *transaction* is not a connection or session, or it commits every statement by itself,
                or it uses another table of fences than the one in which this guard has raised fences.
            UnsupportedError: SqlGuard does not support the database or its driver.
            ConfigurationError: *resource* or *token* is not one.
        """
        await self.admit_all(transaction, check_token_of(resource, token))

    def admit_sync(self, transaction: object, resource: str, token: int) -> None:
        """
        Do the same as `admit` without an event loop.

        *transaction* is a connection of sqlite3, psycopg, PyMySQL or mysqlclient, or a Session or Connection of
        SQLAlchemy.

        Raises:
            StaleTokenError, UsageError, UnsupportedError, ConfigurationError: as `admit`.
        """
        self.admit_all_sync(transaction, check_token_of(resource, token))

    async def admit_all(self, transaction: object, tokens: Mapping[str, int]) -> None:
        """
        Check the token of each resource and write all of them as fences, in your *transaction*, in one step.

        The servers lock the fences in the order of their names, so two transactions that need the same ones do not wait
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
        with self._reports.of_verdict(checked):
            await self._with_a_table(
                lambda: perform(transaction, lambda opened: self._of(opened).admit(opened, checked))
            )

    def admit_all_sync(self, transaction: object, tokens: Mapping[str, int]) -> None:
        """
        Do the same as `admit_all` without an event loop.

        Raises:
            StaleTokenError, UsageError, UnsupportedError, ConfigurationError: as `admit_all`.
        """
        checked = check_tokens(tokens)
        with self._reports.of_verdict(checked):
            perform_sync(transaction, lambda opened: self._of(opened).admit(opened, checked))

    async def raise_to(self, resource: str, token: int) -> None:
        """
        See `fencing_sdk.abc.Guard.raise_to`. Waits up to 30 s for a transaction that is writing now.

        Raises:
            StaleTokenError: the resource has seen a later token.
            UsageError: the ``search_path`` leads to another table of fences than before.
            UnsupportedError: the guard was built without a database, or other servers take writes beside this one.
        """
        resource, checked = check_name(resource, parameter="resource"), check_token(token)
        with self._reports.of_verdict({resource: checked}):
            if self._database is not None and self._database.dialect == POSTGRESQL and not self._postgresql.is_known:
                await self._run(self._postgresql.prepare)  # the transaction that locks a row creates nothing then
            await self._with_a_table(partial(self._raise_patiently, resource, checked))
        self._reports.raised({resource: checked})

    async def raise_in(self, transaction: object, resource: str, token: int, *, wait: float = 5.0) -> None:
        """
        Raise the fence in your *transaction*: it counts once you commit.

        Unlike `admit` it waits for a bounded time, and makes the commit survive a crash of the server: on
        PostgreSQL it sets ``lock_timeout`` and ``synchronous_commit`` until the transaction ends. MySQL and MariaDB
        wait for whole seconds, and what survives a crash is a setting of the server. It does not
        report `FenceRaised`, because the fence is not raised before the commit.

        On a server a guard with a database has one table, and refuses to raise fences in another. For a table in
        the schema of each tenant, use ``SqlGuard()`` without a database and run ``ddl("postgresql")`` in each schema,
        or use a guard for each schema, with ``table="schema.fencing_fence"``.

        Args:
            transaction: Yours, as for `admit`.

            resource: The guarded resource.

            token: The token to raise its fence to.

            wait: Seconds to wait for a transaction that holds the fence. Then PostgreSQL raises
                55P03 (lock_not_available), MySQL 1205. On SQLite the timeout of the connection decides.

        Raises:
            StaleTokenError, UsageError, UnsupportedError, ConfigurationError: as `admit`.
        """
        resource, checked = check_name(resource, parameter="resource"), check_token(token)
        # A guard with a database has one table; one without may raise fences wherever a transaction leads.
        own = self._database is not None
        with self._reports.of_verdict({resource: checked}):
            await self._with_a_table(
                lambda: perform(
                    transaction, lambda opened: self._of(opened).raise_fence(opened, resource, checked, wait, own=own)
                )
            )

    async def highest(self, resource: str) -> Token | None:
        """
        See `fencing_sdk.abc.Guard.highest`.

        Raises:
            UnsupportedError: the guard was built without a database.
        """
        resource = check_name(resource, parameter="resource")
        return await self._run(lambda opened: self._of(opened).highest(opened, resource))

    async def _raise_patiently(self, resource: str, token: Token) -> None:
        """Wait for another writer in several tries, where the server does not notice that a try was abandoned."""
        fences = None if self._database is None else self._fences[self._database.dialect]
        left = tries = 1 if fences is None else fences.tries
        while True:
            left -= 1
            try:
                return await self._run(
                    lambda opened: self._of(opened).raise_fence(
                        opened, resource, token, WRITER_PATIENCE / tries, own=True
                    )
                )
            except Exception as error:
                if not left or fences is None or not fences.has_waited(error):
                    raise

    async def _run(self, work: Work[T]) -> T:
        if self._database is None:
            msg = (
                "SqlGuard() has no database of its own; pass SqlGuard('sqlite:///app.db'), "
                "SqlGuard('postgresql://host/app'), SqlGuard('mysql://user@host/app') or SqlGuard(async_engine)"
            )
            raise UnsupportedError(msg)
        return await self._database.run(work)

    async def _with_a_table(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Make the *attempt*. If it lacks a table that its transaction cannot create, create it and try again."""
        try:
            return await attempt()
        except Exception as error:
            database = self._database
            if not isinstance(database, MysqlDatabase | EngineDatabase):
                raise
            fences = self._fences.get(database.dialect)
            if fences is None or not fences.has_to_be_created(error):
                raise
        try:
            await database.create(fences.ddl)
        except Exception as error:
            error.add_note("fencing_sdk: SqlGuard cannot create its table; as another user, run the statement of ddl()")
            raise
        return await attempt()

    def _of(self, transaction: Transaction) -> FenceTable:
        return self._fences[transaction.dialect]


class FenceColumn:
    """
    The outcome of a write that checks by itself: ``SET ..., fence = :token WHERE ... AND fence <= :token``.

    The column is BIGINT NOT NULL DEFAULT 0 (SQLAlchemy: ``mapped_column(BigInteger, server_default="0")``).
    The statement needs both parts: without the condition a stale write gets in, and without the
    assignment the next stale write does.

    Commit before the lock is released, because the check covers the write and nothing that you read before. The
    lock is outside and the transaction inside. Nothing refuses the other order.

    Not promised: that it distinguishes two holders of the same token (the column keeps no holder), and that
    it refuses an old holder before the new one's first write. For that, write the token alone before you read:
    ``UPDATE seats SET fence = :token WHERE seat = :seat AND fence <= :token``. Or use `SqlGuard`.

    Args:
        table: The table, ``"name"`` or ``"schema.name"``, as the database spells it.

        key: The column that identifies a row.

        column: The column that stores the fence.

        observers: Callables that receive `StaleRejected` for every refusal.

    Raises:
        ConfigurationError: a name has other characters than ASCII letters, digits and _.
    """

    def __init__(self, table: str, *, key: str, column: str = "fence", observers: Sequence[Observer] = ()) -> None:
        self._table = check_identifier(table, parameter="table", schema=True)
        self._key = check_identifier(key, parameter="key")
        self._column = check_identifier(column, parameter="column")
        self._wide_enough = False
        self._reports = Reports(observers)

    async def written(self, transaction: object, key: object, token: int, outcome: object) -> bool:
        """
        Return whether the statement with this *outcome* changed the row. Call it in the same *transaction*.

        *outcome* is what the driver returned for the UPDATE: a cursor or result, a count, asyncpg's "UPDATE 1", or rows
        of RETURNING.

        False means that the row is missing, or that another condition of your statement excluded it. On
        PostgreSQL and MySQL the first call also checks that the column can store every token.

        Connect to MySQL and MariaDB with ``client_flag=CLIENT.FOUND_ROWS``, as SQLAlchemy and Django do. Without it
        they do not count a row that the statement finds and leaves as it is.

        Raises:
            StaleTokenError: nothing was changed, because the row has seen a later token.
            UsageError: *transaction* is not a transaction, *outcome* is not one or is of several rows, the fence of the
                row is NULL, its column is too narrow for a token, or the count may mean two things. Roll back.
            UnsupportedError: SqlGuard does not support the database or its driver.
            ConfigurationError: *token* is not one.
        """
        checked, count = check_token(token), _count(outcome)
        if count and self._wide_enough:
            return True
        with self._reports.of_verdict(checked):
            return await perform(transaction, lambda opened: self._written(opened, key, checked, count))

    def written_sync(self, transaction: object, key: object, token: int, outcome: object) -> bool:
        """
        Do the same as `written` without an event loop.

        Raises:
            StaleTokenError, UsageError, UnsupportedError, ConfigurationError: as `written`.
        """
        checked, count = check_token(token), _count(outcome)
        if count and self._wide_enough:
            return True
        with self._reports.of_verdict(checked):
            return perform_sync(transaction, lambda opened: self._written(opened, key, checked, count))

    async def _written(self, transaction: Transaction, key: object, token: Token, count: int) -> bool:
        """
        Find out why no row was changed, if none was. A fence never goes down, so one that refused the write is there.

        Raises:
            StaleTokenError: the fence has refused it.
        """
        dialect, names = DIALECTS[transaction.dialect], (self._table, self._key, self._column)
        if not self._wide_enough:
            await dialect.check_column(transaction, self._table, self._column)
            self._wide_enough = True
        if count:
            return True
        rows = await transaction.fetch(dialect.fence_of_row(*names).format(transaction.placeholder), (key,))
        for (fence,) in rows:
            if fence is None:
                msg = f"the fence of {shown(key)} in {self._table} is NULL; declare the column NOT NULL DEFAULT 0"
                raise UsageError(msg)
            if token < fence:
                resource = f"{self._table}/{key}"
                raise refusal(resource, token, Token(fence))
            if token == fence and not await dialect.counts_found_rows(transaction, names, key):
                msg = (
                    f"the UPDATE of {shown(key)} in {self._table} has changed nothing, and this connection does not "
                    "count the rows that it has found: the row may be written already, or excluded by another "
                    "condition; connect with client_flag=CLIENT.FOUND_ROWS"
                )
                raise UsageError(msg)
        return False


def _count(outcome: object) -> int:
    """
    Return the number of rows in *outcome*.

    Raises:
        UsageError: it has no number, or there are several.
    """
    count: object = outcome
    if hasattr(outcome, "rowcount"):
        count = outcome.rowcount
    elif isinstance(outcome, str):
        count = int(last) if (last := outcome.rpartition(" ")[2]).isdecimal() else None
    elif isinstance(outcome, Sequence):
        count = len(outcome)
    if isinstance(count, int) and not isinstance(count, bool) and count >= 0:
        if count > 1:
            msg = f"the UPDATE has changed {count} rows, and a fence is checked for one at a time; roll back"
            raise UsageError(msg)
        return count
    if count == -1 and hasattr(outcome, "pgresult"):
        msg = "in psycopg's pipeline mode the outcome is not known yet; call pipeline.sync() before"
        raise UsageError(msg)
    msg = f"outcome must be what the driver returned for the UPDATE: a cursor, 'UPDATE 1', rows; not {shown(outcome)}"
    raise UsageError(msg)
