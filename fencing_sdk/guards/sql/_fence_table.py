"""
A table of fences: its names, the one condition that admits a token, the methods of each dialect, and SQLite's.

Names are checked, so that the database never reads a part of them as SQL. A new dialect is a module with one more
`FenceTable`, named in `DIALECTS` of `_databases`; `_transaction` recognises its drivers.
"""

from __future__ import annotations

import re
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from fencing_sdk._values.token import Token, token_of_parts
from fencing_sdk.errors import BackendRefusedError, ConfigurationError, shown
from fencing_sdk.guards import refusal
from fencing_sdk.guards.sql._transaction import SQLITE, Parameters, Row, Transaction

_NAME = r"[A-Za-z_][A-Za-z0-9_]{0,62}"
_PLAIN = re.compile(_NAME, re.ASCII)
_WITH_SCHEMA = re.compile(rf"{_NAME}(\.{_NAME})?", re.ASCII)


def check_identifier(name: object, *, parameter: str, schema: bool = False) -> str:
    """Return *name* if it names a table or a column unescaped and uncut. With *schema*, it may be ``schema.name``."""
    if not isinstance(name, str) or not (_WITH_SCHEMA if schema else _PLAIN).fullmatch(name):
        forms = "'name' or 'schema.name'" if schema else "a name"
        msg = f"{parameter} must be {forms} of ASCII letters, digits and _, got {shown(name)}"
        raise ConfigurationError(msg)
    return name


def quoted(name: str, mark: str = '"') -> str:
    """Quote a *name* that was checked. Upper and lower case then count, and reserved words are allowed."""
    return ".".join(f"{mark}{part}{mark}" for part in name.split("."))


_GUARD = "SqlGuard"


def stored_fence(resource: str, number: object, holder: object) -> Token:
    """Return the fence of *resource*, as its row has it. Refuse a row that another program has written."""
    token = None
    if not isinstance(number, (str, bytes)) and isinstance(holder, str | None):
        token = token_of_parts(str(number), holder)
    if token is None:
        detail = f"the row of {shown(resource)} is not a fence: another program has written it"
        raise BackendRefusedError(_GUARD, "highest", detail)
    return token


IF_ADMITTED = """\
ON CONFLICT (resource) DO UPDATE SET
    holder = CASE WHEN excluded.token > fence.token THEN excluded.holder
             ELSE coalesce(excluded.holder, fence.holder) END,
    token = excluded.token
WHERE excluded.token > fence.token
   OR (excluded.token = fence.token
       AND coalesce(excluded.holder = fence.holder, TRUE))
RETURNING """
"""Decides as `fencing_sdk.guards.admitted`. A row is returned for each token that is admitted."""


class FenceTable(ABC):
    """The fences in one table. Its methods work in a transaction of the caller."""

    dialect: ClassVar[str]
    """SQLAlchemy's name of the dialect."""
    creation: ClassVar[str]
    """The statement that creates ``{table}``."""
    quote: ClassVar[str] = '"'
    tries: ClassVar[int] = 1
    """Tries in which the guard waits for another writer: one that is abandoned may wait on at the server."""

    def __init__(self, table: str, *, create: bool) -> None:
        self._table = table
        self._name = quoted(table, self.quote)
        self._create = create
        self.ddl = self.creation.format(table=self._name)
        """The statement that creates the table."""

    @classmethod  # noqa: B027  (a default)
    async def check_column(cls, transaction: Transaction, table: str, column: str) -> None:
        """
        Check that a *column* of a table of the caller can store every token. By default, the dialect's can.

        Raises:
            UsageError: it cannot; the message has the statement that widens the column.
        """

    @classmethod
    def fence_of_row(cls, table: str, key: str, column: str) -> str:
        """Return the query for the fence in a *column* of the caller's row as it is now; {} stands for its *key*."""
        table, key, column = (quoted(name, cls.quote) for name in (table, key, column))
        return f"SELECT {column} FROM {table} WHERE {key} = {{}}"  # noqa: S608  (checked)

    @classmethod
    async def counts_found_rows(cls, transaction: Transaction, names: tuple[str, str, str], key: object) -> bool:  # noqa: ARG003
        """Return whether an UPDATE counts rows that it leaves as they are. By default, it does."""
        return True

    def has_waited(self, error: Exception) -> bool:  # noqa: ARG002
        """Return whether a statement failed with *error* because it has waited too long for a row."""
        return False

    def has_to_be_created(self, error: Exception) -> bool:  # noqa: ARG002
        """
        Return whether a statement failed with *error* because the table is missing, and may be created elsewhere.

        By default, the table is created in the transaction that needs it.
        """
        return False

    @abstractmethod
    async def admit(self, transaction: Transaction, tokens: Mapping[str, Token]) -> None:
        """
        Check the token of each resource and write it as the fence. Several rows are locked in one order.

        Raises:
            StaleTokenError: one of the resources has seen a later token.
            UsageError: the connection commits every statement by itself.
        """

    @abstractmethod
    async def raise_fence(
        self, transaction: Transaction, resource: str, token: Token, wait: float, *, own: bool
    ) -> None:
        """
        Do the same for one *resource*, but wait at most *wait* seconds for another transaction.

        *own*: the table that the transaction uses is the one in which the guard raises fences.
        """

    async def highest(self, transaction: Transaction, resource: str) -> Token | None:
        """Return the fence of *resource*, if it has one."""
        for token, holder in await self._fence(transaction, resource):
            return stored_fence(resource, token, holder)
        return None

    @abstractmethod
    async def _fence(self, transaction: Transaction, resource: str) -> Sequence[Row]:
        """Return token and holder of the fence, if there is one."""

    async def _refuse_others(
        self, transaction: Transaction, tokens: Mapping[str, Token], admitted: Sequence[Row]
    ) -> None:
        """Raise for the first of the *tokens* whose resource has no row among those that were *admitted*."""
        if len(admitted) == len(tokens):  # however the connection makes rows and texts
            return
        passed = {row[0] for row in admitted}
        for resource, token in tokens.items():
            if resource not in passed:
                fence = await self.highest(transaction, resource)
                assert fence is not None  # it has just refused the token in this transaction
                raise refusal(resource, token, fence)


class SqliteFences(FenceTable):
    """
    The fences in one table of SQLite. Its INTEGER has 64 bits, enough for every token.

    One statement checks the token and writes the fence, so no other writer comes between. It also takes the write lock
    of the database, so the caller's writes that follow in the transaction are covered too.
    """

    dialect = SQLITE
    creation = """\
CREATE TABLE IF NOT EXISTS {table} (
    resource TEXT NOT NULL PRIMARY KEY,
    token INTEGER NOT NULL,
    holder TEXT
) WITHOUT ROWID"""

    async def admit(self, transaction: Transaction, tokens: Mapping[str, Token]) -> None:
        """See `FenceTable`."""
        transaction.refuse_autocommit()
        rows = ", ".join(["(?, ?, ?)"] * len(tokens))
        statement = f"INSERT INTO {self._name} AS fence (resource, token, holder) VALUES {rows}\n{IF_ADMITTED}resource"  # noqa: S608
        parameters = tuple(part for resource, token in tokens.items() for part in (resource, int(token), token.holder))
        admitted = await self._fetch(transaction, statement, parameters)
        transaction.refuse_committed()
        await self._refuse_others(transaction, tokens, admitted)

    async def raise_fence(
        self,
        transaction: Transaction,
        resource: str,
        token: Token,
        wait: float,  # noqa: ARG002
        *,
        own: bool,  # noqa: ARG002
    ) -> None:
        """See `FenceTable`. The timeout of the connection decides how long SQLite waits for another writer."""
        await self.admit(transaction, {resource: token})

    async def _fence(self, transaction: Transaction, resource: str) -> Sequence[Row]:
        statement = f"SELECT token, holder FROM {self._name} WHERE resource = ?"  # noqa: S608
        return await self._fetch(transaction, statement, (resource,))

    async def _fetch(self, transaction: Transaction, statement: str, parameters: Parameters) -> Sequence[Row]:
        """Fetch rows. If the table is missing, create it and fetch again."""
        try:
            return await transaction.fetch(statement, parameters)
        except Exception as error:
            original = getattr(error, "orig", error)  # SQLAlchemy's has the driver's
            if not isinstance(original, sqlite3.OperationalError) or original.sqlite_errorcode != sqlite3.SQLITE_ERROR:
                raise
            if not self._create:
                error.add_note("fencing_sdk: create the table of SqlGuard with the statement of ddl()")
                raise
        # Not before the first try: a read that looks for the table may make the write after it fail as outdated.
        await transaction.fetch(self.ddl, ())
        return await transaction.fetch(statement, parameters)
