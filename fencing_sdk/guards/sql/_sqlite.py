"""
What SqlGuard says to SQLite. Everything that another database would need in other words is here.

The condition stands in the statement that writes, so the check and the new fence are one step, and
that statement takes the database's write lock: whatever follows in the transaction is part of it.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Protocol

from fencing_sdk.errors import UsageError

NAME = "sqlite"
"""SQLAlchemy's name of the dialect."""

_LEGACY_TRANSACTION_CONTROL = -1
"""`sqlite3.LEGACY_TRANSACTION_CONTROL`, which Python has since 3.12: the driver begins by itself."""

_DDL = """\
CREATE TABLE IF NOT EXISTS {table} (
    resource TEXT NOT NULL PRIMARY KEY,
    token INTEGER NOT NULL,
    holder TEXT
) WITHOUT ROWID"""

_ADMIT = """\
INSERT INTO {table} AS fence (resource, token, holder) VALUES (?, ?, ?)
ON CONFLICT (resource) DO UPDATE SET
    holder = CASE WHEN excluded.token > fence.token THEN excluded.holder
             ELSE coalesce(excluded.holder, fence.holder) END,
    token = excluded.token
WHERE excluded.token > fence.token
   OR (excluded.token = fence.token
       AND coalesce(excluded.holder = fence.holder, TRUE))
RETURNING token"""

_FENCE = "SELECT token, holder FROM {table} WHERE resource = ?"


@dataclass(frozen=True, slots=True)
class Statements:
    """The statements about one table of fences."""

    ddl: str
    admit: str
    """Parameters: resource, token, holder. One row when the token is admitted, none when it is refused."""
    fence: str
    """Parameter: resource. The token and the holder of the fence, if there is one."""

    @classmethod
    def about(cls, table: str) -> Statements:
        """Fill in a *table* whose name was checked."""
        quoted = ".".join(f'"{part}"' for part in table.split("."))
        return cls(*(text.format(table=quoted) for text in (_DDL, _ADMIT, _FENCE)))


class Driver(Protocol):
    """What `sqlite3.Connection` and `aiosqlite.Connection` tell about themselves, from any thread."""

    @property
    def in_transaction(self) -> bool: ...

    @property
    def isolation_level(self) -> str | None: ...


def refuse_autocommit(driver: Driver) -> None:
    """
    Raise unless the next statement that writes is part of a transaction.

    Raises:
        UsageError: each statement would be a transaction of its own.
    """
    if driver.in_transaction:
        return
    begins_by_itself = getattr(driver, "autocommit", _LEGACY_TRANSACTION_CONTROL) == _LEGACY_TRANSACTION_CONTROL
    if driver.isolation_level is None or not begins_by_itself:
        raise UsageError(_AUTOCOMMIT)


def refuse_committed(driver: Driver) -> None:
    """
    Raise if the statement that was just made is not part of an open transaction.

    Raises:
        UsageError: a driver that hides its mode has committed it.
    """
    if not driver.in_transaction:
        raise UsageError(_AUTOCOMMIT)


_AUTOCOMMIT = (
    "this SQLite connection commits every statement by itself, so the check and your write would be two "
    "transactions; begin one first: connection.execute('BEGIN IMMEDIATE')"
)


def lacks_a_table(error: Exception) -> bool:
    """Whether *error*, SQLite's own or SQLAlchemy's around it, may come from a missing table."""
    original = getattr(error, "orig", error)
    return isinstance(original, sqlite3.OperationalError) and original.sqlite_errorcode == sqlite3.SQLITE_ERROR
