"""
A table of fences: its names, the one condition that admits a token, and what each dialect does in its own way.

Names are checked, so that the database never reads a part of them as SQL. A new dialect is a module with one more
`FenceTable`, named in `DIALECTS` of `_databases`; `_transaction` recognises its drivers.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from fencing_sdk._values.token import Token, token_of_parts
from fencing_sdk.errors import BackendRefusedError, ConfigurationError, shown
from fencing_sdk.guards._verdict import refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fencing_sdk.guards.sql._transaction import Row, Steps, Transaction

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
"""What `admitted` of `fencing_sdk.guards._verdict` decides. A row is returned for each token that is admitted."""


class FenceTable(ABC):
    """The fences in one table. Its methods are steps in a transaction of the caller."""

    dialect: ClassVar[str]
    """SQLAlchemy's name of the dialect."""
    creation: ClassVar[str]
    """The statement that creates ``{table}``."""
    quote: ClassVar[str] = '"'
    """What stands around names."""

    def __init__(self, table: str, *, create: bool) -> None:
        self._table = table
        self._create = create
        self._ddl = self.creation.format(table=quoted(table, self.quote))

    @classmethod
    def check_column(cls, table: str, column: str) -> Steps[None]:  # noqa: ARG003
        """
        Check that a *column* of a table of the caller can store every token. By default, the dialect's can.

        Raises:
            UsageError: it cannot; the message has the statement that widens the column.
        """
        yield from ()

    @classmethod
    def fence_of_row(cls, table: str, key: str, column: str) -> str:
        """Return the query for the fence in a *column* of the caller's row as it is now; {} stands for its *key*."""
        names = {"table": table, "key": key, "column": column}
        return (
            "SELECT {column} FROM {table} WHERE {key} = ".format(  # noqa: S608  (checked)
                **{what: quoted(name, cls.quote) for what, name in names.items()}
            )
            + "{}"
        )

    @classmethod
    def counts_what_it_finds(cls, table: str, key: str, column: str, value: object) -> Steps[bool]:  # noqa: ARG003
        """Return whether an UPDATE counts rows that it leaves as they are. By default, it does."""
        yield from ()
        return True

    def has_to_be_created(self, error: Exception) -> bool:  # noqa: ARG002
        """
        Return whether a statement failed with *error* because the table is missing, and may be created elsewhere.

        By default, the table is created in the transaction that needs it.
        """
        return False

    def ddl(self) -> str:
        """Return the statement that creates the table."""
        return self._ddl

    @abstractmethod
    def admit(self, transaction: Transaction, tokens: Mapping[str, Token]) -> Steps[None]:
        """
        Check the token of each resource and write it as the fence.

        Raises:
            StaleTokenError: one of the resources has seen a later token.
            UsageError: the connection commits every statement by itself.
        """

    @abstractmethod
    def raise_fence(
        self, transaction: Transaction, resource: str, token: Token, wait: float, *, own: bool = False
    ) -> Steps[None]:
        """
        Do the same for one *resource*, but wait at most *wait* seconds for another transaction.

        *own*: the table that the transaction uses is that in which the guard raises fences.
        """

    @abstractmethod
    def highest(self, transaction: Transaction, resource: str) -> Steps[Token | None]:
        """Return the fence of *resource*, if it has one."""

    @abstractmethod
    def _fence(self, transaction: Transaction, resource: str) -> Steps[Sequence[Row]]:
        """Return token and holder of the fence, if there is one."""

    def _stored(self, transaction: Transaction, resource: str) -> Steps[Token | None]:
        for token, holder in (yield from self._fence(transaction, resource)):
            return stored_fence(resource, token, holder)
        return None

    def _refuse_others(
        self, transaction: Transaction, tokens: Mapping[str, Token], admitted: Sequence[Row]
    ) -> Steps[None]:
        """Raise for the first of the *tokens* whose resource has no row among those that were *admitted*."""
        if len(admitted) == len(tokens):  # however the connection makes rows and texts
            return
        passed = {row[0] for row in admitted}
        for resource, token in tokens.items():
            if resource not in passed:
                fence = yield from self._stored(transaction, resource)
                assert fence is not None  # it has just refused the token in this transaction
                raise refusal(resource, token, fence)
