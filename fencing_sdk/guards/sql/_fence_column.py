"""
The fence as a column of your own table: one statement checks the token and writes, and there is no other table.

    seats = FenceColumn("seats", key="seat")

    statement = update(Seat).values(who="Ada", fence=token).where(Seat.seat == 42, Seat.fence <= token)
    done = await session.execute(statement)
    if not await seats.written(session, 42, token, done): ...   # there is no such seat

The same on PostgreSQL and SQLite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, cast, runtime_checkable

from fencing_sdk._values.claim import Token, writes_of
from fencing_sdk._values.token_wire import check_token
from fencing_sdk.errors import UsageError, shown
from fencing_sdk.events import Observer
from fencing_sdk.guards._verdict import Reports, refusal
from fencing_sdk.guards.sql._identifiers import POSTGRESQL, check_identifier, quoted
from fencing_sdk.guards.sql._steps import Steps
from fencing_sdk.guards.sql._token_width import refuse_narrow, type_of_column
from fencing_sdk.guards.sql._transaction import Transaction, perform, perform_sync


@runtime_checkable
class HasRowCount(Protocol):
    """A cursor of any driver, or a result of SQLAlchemy."""

    @property
    def rowcount(self) -> int: ...


Outcome: TypeAlias = "HasRowCount | int | str | Sequence[object]"
"""What a driver returns for an UPDATE: a cursor or result, a count, asyncpg's "UPDATE 1", or rows of RETURNING."""


class FenceColumn:
    """
    Tells the outcome of a write that checks by itself: ``SET ..., fence = :token WHERE ... AND fence <= :token``.

    The column is BIGINT NOT NULL DEFAULT 0 (SQLAlchemy: ``mapped_column(BigInteger, server_default="0")``).
    The statement needs both parts: without the condition a stale write gets in, and without the
    assignment the next stale write does.

    Commit before the lock is given back, because the check covers the write and nothing that you read before. The
    lock is outside and the transaction inside. The end of the lock's block refuses a transaction that is open there.

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
        key, column = check_identifier(key, parameter="key"), check_identifier(column, parameter="column")
        self._column = column
        self._type = type_of_column(table, column)
        self._wide_enough = False
        self._select = f"SELECT {quoted(column)} FROM {quoted(table)} WHERE {quoted(key)} = "  # noqa: S608  (checked)
        self._reports = Reports(observers)

    async def written(self, transaction: object, key: object, token: int, outcome: Outcome) -> bool:
        """
        Return whether the statement with this *outcome* changed the row. Call it in the same *transaction*.

        False means that the row is missing, or that another condition of your statement excluded it. On
        PostgreSQL the first call also does what `check` does.

        Commit before the lock is given back. The end of its block raises `UsageError` if the transaction is still open
        there, unless a `SqlGuard` has admitted the token in it before.

        Raises:
            StaleTokenError: nothing was changed, because the row has seen a later token.
            UsageError: *transaction* is no transaction, *outcome* is no outcome or of several rows, the fence of the
                row is NULL, or its column is too narrow for a token. Roll back.
            UnsupportedError: the database is neither SQLite nor PostgreSQL.
            ConfigurationError: *token* is not one.
        """
        checked, count = check_token(token), _count(outcome)
        if count and self._wide_enough and writes_of(checked) is None:
            return True
        with self._reports.of_refusals(checked):
            return await perform(transaction, lambda opened: self._written(opened, key, checked, count))

    def written_sync(self, transaction: object, key: object, token: int, outcome: Outcome) -> bool:
        """
        Do the same as `written` without an event loop.

        Raises:
            StaleTokenError, UsageError, UnsupportedError, ConfigurationError: as `written`.
        """
        checked, count = check_token(token), _count(outcome)
        if count and self._wide_enough and writes_of(checked) is None:
            return True
        with self._reports.of_refusals(checked):
            return perform_sync(transaction, lambda opened: self._written(opened, key, checked, count))

    async def check(self, transaction: object) -> None:
        """
        Check that the column can store every token. Call it once, when a program starts, before the first write.

        Without it, an UPDATE with a token that is too large raises the driver's error, which names neither
        the column nor the fix.

        Raises:
            UsageError: the column is too narrow, such as PostgreSQL's INTEGER, or *transaction* is no transaction.
            UnsupportedError: the database is neither SQLite nor PostgreSQL.
        """
        await perform(transaction, self._check)

    def check_sync(self, transaction: object) -> None:
        """
        Do the same as `check` without an event loop.

        Raises:
            UsageError, UnsupportedError: as `check`.
        """
        perform_sync(transaction, self._check)

    def _check(self, transaction: Transaction) -> Steps[None]:
        if transaction.dialect == POSTGRESQL:
            for (found,) in (yield self._type, ()):
                refuse_narrow(self._table, self._column, found)
        self._wide_enough = True

    def _written(self, transaction: Transaction, key: object, token: Token, count: int) -> Steps[bool]:
        if not self._wide_enough:
            yield from self._check(transaction)
        if not count:
            return (yield from self._why(transaction, key, token))
        transaction.note(token, admitted=False)
        return True

    def _why(self, transaction: Transaction, key: object, token: Token) -> Steps[bool]:
        """
        Find out why no row was changed. A fence never goes down, so one that refused the write is still there.

        Raises:
            StaleTokenError: the fence has refused it.
        """
        rows = yield self._select + transaction.placeholder, (key,)
        for (fence,) in rows:
            if fence is None:
                msg = f"the fence of {shown(key)} in {self._table} is NULL; declare the column NOT NULL DEFAULT 0"
                raise UsageError(msg)
            if token < cast("int", fence):
                resource = f"{self._table}/{key}"
                raise refusal(resource, token, Token(cast("int", fence)))
        return False


def _count(outcome: object) -> int:
    """
    Return the number of rows in *outcome*.

    Raises:
        UsageError: it has no number, or there are several.
    """
    count: object = outcome
    if isinstance(outcome, HasRowCount):
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
    msg = f"outcome must be what the driver returned for the UPDATE: a cursor, 'UPDATE 1', rows; not {shown(outcome)}"
    raise UsageError(msg)
