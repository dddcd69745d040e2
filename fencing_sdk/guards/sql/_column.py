"""
The fence as a column of the caller's own table: check and write are one statement, and there is no other table.

    seats = FenceColumn("seats", key="seat")

    statement = update(Seat).values(who="Ada", fence=token).where(Seat.seat == 42, Seat.fence <= token)
    done = await session.execute(statement)
    if not await seats.written(session, 42, token, done): ...   # there is no such seat

PostgreSQL and SQLite alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, cast, runtime_checkable

from fencing_sdk._claim import Token
from fencing_sdk._events import Observer
from fencing_sdk._wire import check_token
from fencing_sdk.errors import UsageError, shown
from fencing_sdk.guards._verdict import Reports, refusal
from fencing_sdk.guards.sql._names import check_identifier, quoted
from fencing_sdk.guards.sql._steps import Steps
from fencing_sdk.guards.sql._transaction import Transaction, perform, perform_sync


@runtime_checkable
class HasRowCount(Protocol):
    """A cursor of any driver, or SQLAlchemy's result."""

    @property
    def rowcount(self) -> int: ...


Outcome: TypeAlias = "HasRowCount | int | str | Sequence[object]"
"""What a driver returns for an UPDATE: a cursor or result, a count, asyncpg's "UPDATE 1", or the rows RETURNING."""


class FenceColumn:
    """
    Tells what became of a write that carries its own check: ``SET ..., fence = :token WHERE ... AND fence <= :token``.

    The column is an integer of 64 bits, NOT NULL with default 0. Both halves have to be in the
    statement: without the condition a stale write gets in, without the assignment the next one does.

    Not promised: that two holders of one number are told apart (the column keeps no holder), and that
    an old holder is refused before the new one's first write; write the token alone, before you read:
    ``UPDATE seats SET fence = :token WHERE seat = :seat AND fence <= :token``.

    Args:
        table: The table, ``"name"`` or ``"schema.name"``, as it is spelled in the database.

        key: The column that names a row.

        column: The column with the fence.

        observers: Callables that receive `StaleRejected` for every refusal.

    Raises:
        ConfigurationError: a name has other characters than ASCII letters, digits and _.
    """

    def __init__(self, table: str, *, key: str, column: str = "fence", observers: Sequence[Observer] = ()) -> None:
        self._table = check_identifier(table, parameter="table", schema=True)
        key, column = check_identifier(key, parameter="key"), check_identifier(column, parameter="column")
        self._select = f"SELECT {quoted(column)} FROM {quoted(table)} WHERE {quoted(key)} = "  # noqa: S608  (checked)
        self._reports = Reports(observers)

    async def written(self, transaction: object, key: object, token: int, outcome: Outcome) -> bool:
        """
        Return whether the statement with this *outcome* has changed the row. Ask in the same *transaction*.

        False is for a row that is not there, or that another condition of yours has left out.

        Raises:
            StaleTokenError: nothing was changed, because the row has seen a later token.
            UsageError: *transaction* or *outcome* is none, or the fence of the row is NULL.
            UnsupportedError: the database is neither SQLite nor PostgreSQL.
            ConfigurationError: *token* is not one.
        """
        checked = check_token(token)
        if _count(outcome):
            return True
        with self._reports.of_refusals():
            return await perform(transaction, lambda opened: self._why(opened, key, checked))

    def written_sync(self, transaction: object, key: object, token: int, outcome: Outcome) -> bool:
        """
        `written` for code without an event loop.

        Raises:
            StaleTokenError, UsageError, UnsupportedError, ConfigurationError: as `written`.
        """
        checked = check_token(token)
        if _count(outcome):
            return True
        with self._reports.of_refusals():
            return perform_sync(transaction, lambda opened: self._why(opened, key, checked))

    def _why(self, transaction: Transaction, key: object, token: Token) -> Steps[bool]:
        """
        Tell why no row was changed. Fences never go down, so one that stood in the way is still to be seen.

        Raises:
            StaleTokenError: because of the fence.
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
    The number of rows in *outcome*.

    Raises:
        UsageError: it tells no number.
    """
    count: object = outcome
    if isinstance(outcome, HasRowCount):
        count = outcome.rowcount
    elif isinstance(outcome, str):
        count = int(last) if (last := outcome.rpartition(" ")[2]).isdecimal() else None
    elif isinstance(outcome, Sequence):
        count = len(outcome)
    if isinstance(count, int) and not isinstance(count, bool) and count >= 0:
        return count
    msg = f"outcome must be what the driver returned for the UPDATE: a cursor, 'UPDATE 1', rows; not {shown(outcome)}"
    raise UsageError(msg)
