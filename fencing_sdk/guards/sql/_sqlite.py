"""
A table of fences in SQLite: its statements, and the steps that run them.

One statement checks the token and writes the fence, so no other writer comes between. It also takes the write lock of
the database, so the caller's writes that follow in the transaction are covered too.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, cast

from fencing_sdk._values.token import Token
from fencing_sdk.errors import UsageError
from fencing_sdk.guards.sql._fence_table import IF_ADMITTED, FenceTable, quoted
from fencing_sdk.guards.sql._protocols import SQLITE, SqliteDriverConnection
from fencing_sdk.guards.sql._transaction import Parameters, Row, Steps

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

_ADMIT = "INSERT INTO {table} AS fence (resource, token, holder) VALUES {rows}\n" + IF_ADMITTED + "resource"  # noqa: S608

_FENCE = "SELECT token, holder FROM {table} WHERE resource = ?"


class SqliteFences(FenceTable):
    """The fences in one table of SQLite. Its INTEGER has 64 bits, enough for every token."""

    dialect, creation = SQLITE, _DDL

    def admit(self, transaction: Transaction, tokens: Mapping[str, Token]) -> Steps[None]:
        """Do so in one statement. See `FenceTable`."""
        driver = cast("SqliteDriverConnection", transaction.driver)
        refuse_autocommit(driver)
        statement = _ADMIT.format(table=quoted(self._table), rows=", ".join(["(?, ?, ?)"] * len(tokens)))
        rows = tuple(part for resource, token in tokens.items() for part in (resource, int(token), token.holder))
        admitted = yield from self._fetch(statement, rows)
        refuse_committed(driver)
        yield from self._refuse_others(transaction, tokens, admitted)

    def raise_fence(
        self,
        transaction: Transaction,
        resource: str,
        token: Token,
        wait: float,  # noqa: ARG002
        *,
        own: bool = False,  # noqa: ARG002
    ) -> Steps[None]:
        """Do so. The timeout of the connection decides how long SQLite waits for another writer."""
        return self.admit(transaction, {resource: token})

    def highest(self, transaction: Transaction, resource: str) -> Steps[Token | None]:
        """See `FenceTable`."""
        return self._stored(transaction, resource)

    def _fence(self, transaction: Transaction, resource: str) -> Steps[Sequence[Row]]:  # noqa: ARG002
        return self._fetch(_FENCE.format(table=quoted(self._table)), (resource,))

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
        yield self._ddl, ()
        return (yield statement, parameters)


def refuse_autocommit(driver: SqliteDriverConnection) -> None:
    """Refuse a connection on which the next write would be a transaction of its own."""
    if driver.in_transaction:
        return
    begins_by_itself = getattr(driver, "autocommit", _LEGACY_TRANSACTION_CONTROL) == _LEGACY_TRANSACTION_CONTROL
    if driver.isolation_level is None or not begins_by_itself:
        raise UsageError(_AUTOCOMMIT)


def refuse_committed(driver: SqliteDriverConnection) -> None:
    """Refuse a driver that hides its mode, and has committed the statement before."""
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
