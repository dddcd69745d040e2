"""
Refuses what is no fence: columns of PostgreSQL that are too narrow for a token, and rows that another program wrote.

A token is below 2**53, and a hybrid token is about 2**50 from the start. PostgreSQL's ``integer``, which SQLAlchemy
chooses for a plain ``int``, ends at 2**31. SQLite's INTEGER has 64 bits, so there is nothing to check.
"""

from __future__ import annotations

from fencing_sdk._values.claim import Token
from fencing_sdk._values.token_wire import token_of_parts
from fencing_sdk.errors import BackendRefusedError, UsageError, shown
from fencing_sdk.guards.sql._identifiers import quoted

_GUARD = "SqlGuard"
_NARROW = {"smallint", "integer", "real"}

# For a domain, its base type.
_TYPE = """\
SELECT format_type(coalesce(nullif(kind.typbasetype, 0), kind.oid), NULL)
FROM pg_catalog.pg_attribute AS known JOIN pg_catalog.pg_type AS kind ON kind.oid = known.atttypid
WHERE known.attrelid = to_regclass('{table}') AND known.attname = '{column}'"""


def type_of_column(table: str, column: str) -> str:
    """Return the query for the type of a *column*. The names were checked. A missing column gives no row."""
    return _TYPE.format(table=quoted(table), column=column)


def refuse_narrow(table: str, column: str, found: object) -> None:
    """
    Raise if *found*, the type of the column, cannot store every token.

    Raises:
        UsageError: it cannot; the message has the statement that widens the column.
    """
    if found in _NARROW:
        msg = (
            f"column {column} of table {table} is {str(found).upper()}, and a token needs 64 bits; "
            f"run: ALTER TABLE {quoted(table)} ALTER COLUMN {quoted(column)} TYPE BIGINT"
        )
        raise UsageError(msg)


def stored_fence(resource: str, number: object, holder: object) -> Token:
    """
    Return the fence of *resource*, as its row has it.

    Raises:
        BackendRefusedError: the row has the grammar of no fence.
    """
    token = None
    if not isinstance(number, (str, bytes)) and isinstance(holder, str | None):
        token = token_of_parts(str(number), holder)
    if token is None:
        detail = f"the row of {shown(resource)} is no fence: another program has written it"
        raise BackendRefusedError(_GUARD, "highest", detail)
    return token
