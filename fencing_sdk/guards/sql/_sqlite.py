"""
A table of fences in SQLite: its statements, and the steps that run them.

One statement checks the token and writes the fence, so no other writer comes between. It also takes the write lock of
the database, so the caller's writes that follow in the transaction are covered too.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from fencing_sdk._values.claim import Token
from fencing_sdk.errors import UsageError
from fencing_sdk.guards._verdict import refusal
from fencing_sdk.guards.sql._identifiers import quoted
from fencing_sdk.guards.sql._protocols import SqliteDriverConnection
from fencing_sdk.guards.sql._steps import Parameters, Row, Steps
from fencing_sdk.guards.sql._token_width import stored_fence

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fencing_sdk.guards.sql._transaction import Transaction

_LEGACY_TRANSACTION_CONTROL = -1
"""`sqlite3.LEGACY_TRANSACTION_CONTROL`, which Python has since 3.12: the driver begins transactions by itself."""

_DDL = """\
CREATE TABLE IF NOT EXISTS {table} (
    resource TEXT NOT NULL PRIMARY KEY,
    token INTEGER NOT NULL,
    holder TEXT
) WITHOUT ROWID"""

_ADMIT = """\
INSERT INTO {table} AS fence (resource, token, holder) VALUES {rows}
ON CONFLICT (resource) DO UPDATE SET
    holder = CASE WHEN excluded.token > fence.token THEN excluded.holder
             ELSE coalesce(excluded.holder, fence.holder) END,
    token = excluded.token
WHERE excluded.token > fence.token
   OR (excluded.token = fence.token
       AND coalesce(excluded.holder = fence.holder, TRUE))
RETURNING resource"""

_ROW = "(?, ?, ?)"

_FENCE = "SELECT token, holder FROM {table} WHERE resource = ?"


@dataclass(frozen=True, slots=True)
class SqliteFenceStatements:
    """The statements on one table of fences."""

    ddl: str
    fence: str
    """Parameter: resource. Token and holder of the fence, if there is one."""
    table: str

    @classmethod
    def for_table(cls, table: str) -> SqliteFenceStatements:
        """Write the statements for a *table* whose name was checked."""
        name = quoted(table)
        return cls(_DDL.format(table=name), _FENCE.format(table=name), name)

    def admit(self, count: int) -> str:
        """Parameters: resource, token and holder, *count* times. One row for each token that is admitted."""
        return _ADMIT.format(table=self.table, rows=", ".join([_ROW] * count))


class SqliteFences:
    """The fences in one table of SQLite."""

    def __init__(self, table: str, *, create: bool) -> None:
        self._statements = SqliteFenceStatements.for_table(table)
        self._create = create

    def ddl(self) -> str:
        """Return the statement that creates the table."""
        return self._statements.ddl

    def admit(self, transaction: Transaction, resource: str, token: Token) -> Steps[None]:
        """Check *token* and write it as the fence: see `admit_all`."""
        return self.admit_all(transaction, {resource: token})

    def admit_all(self, transaction: Transaction, tokens: Mapping[str, Token]) -> Steps[None]:
        """
        Check the token of each resource and write it as the fence.

        Raises:
            StaleTokenError: one of the resources has seen a later token.
            UsageError: the connection commits every statement by itself.
        """
        driver = cast("SqliteDriverConnection", transaction.driver)
        refuse_autocommit(driver)
        rows = tuple(part for resource, token in tokens.items() for part in (resource, int(token), token.holder))
        admitted = yield from self._fetch(self._statements.admit(len(tokens)), rows)
        refuse_committed(driver)
        if len(admitted) < len(tokens):
            passed = {row[0] for row in admitted}
            resource = next(resource for resource in tokens if resource not in passed)
            fence = yield from self.highest(transaction, resource)
            assert fence is not None  # it has just refused the token in this transaction
            raise refusal(resource, tokens[resource], fence)

    def raise_fence(
        self,
        transaction: Transaction,
        resource: str,
        token: Token,
        wait: float,  # noqa: ARG002
        *,
        own: bool = False,  # noqa: ARG002
    ) -> Steps[None]:
        """Do the same as `admit`. The timeout of the connection decides how long SQLite waits for another writer."""
        return self.admit(transaction, resource, token)

    def highest(self, transaction: Transaction, resource: str) -> Steps[Token | None]:  # noqa: ARG002
        """Return the fence of *resource*, if it has one."""
        for token, holder in (yield from self._fetch(self._statements.fence, (resource,))):
            return stored_fence(resource, token, holder)
        return None

    def _fetch(self, statement: str, parameters: Parameters) -> Steps[Sequence[Row]]:
        """Fetch rows. If the table is missing, create it and fetch again."""
        try:
            return (yield statement, parameters)
        except Exception as error:
            if not lacks_a_table(error):
                raise
            if not self._create:
                error.add_note("fencing_sdk: create the table of SqlGuard with the statement of ddl()")
                raise
        # Not before the first try: a read that looks for the table may make the write after it fail as outdated.
        yield self._statements.ddl, ()
        return (yield statement, parameters)


def refuse_autocommit(driver: SqliteDriverConnection) -> None:
    """
    Raise unless the next write will be part of a transaction.

    Raises:
        UsageError: each statement would be a transaction of its own.
    """
    if driver.in_transaction:
        return
    begins_by_itself = getattr(driver, "autocommit", _LEGACY_TRANSACTION_CONTROL) == _LEGACY_TRANSACTION_CONTROL
    if driver.isolation_level is None or not begins_by_itself:
        raise UsageError(_AUTOCOMMIT)


def refuse_committed(driver: SqliteDriverConnection) -> None:
    """
    Raise if the statement before was not part of an open transaction.

    Raises:
        UsageError: the driver hides its mode, and has committed the statement.
    """
    if not driver.in_transaction:
        raise UsageError(_AUTOCOMMIT)


_AUTOCOMMIT = (
    "this SQLite connection commits every statement by itself, so the check and your write would be two "
    "transactions; begin one first: connection.execute('BEGIN IMMEDIATE')"
)


def lacks_a_table(error: Exception) -> bool:
    """Return whether *error*, of SQLite or of SQLAlchemy around it, may come from a missing table."""
    original = getattr(error, "orig", error)
    return isinstance(original, sqlite3.OperationalError) and original.sqlite_errorcode == sqlite3.SQLITE_ERROR
