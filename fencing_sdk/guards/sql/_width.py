"""
Columns of PostgreSQL that are too narrow for a token.

A token is a number below 2**53, and a hybrid one is about 2**50 from the start. ``integer``, which is what
SQLAlchemy makes of a plain ``int``, ends at 2**31. SQLite's INTEGER has 64 bits, so nothing is asked there.
"""

from __future__ import annotations

from fencing_sdk.errors import UsageError
from fencing_sdk.guards.sql._names import quoted

_NARROW = {"smallint", "integer", "real"}

# A domain counts as the type that it is made of.
_TYPE = """\
SELECT format_type(coalesce(nullif(kind.typbasetype, 0), kind.oid), NULL)
FROM pg_catalog.pg_attribute AS known JOIN pg_catalog.pg_type AS kind ON kind.oid = known.atttypid
WHERE known.attrelid = to_regclass('{table}') AND known.attname = '{column}'"""


def type_of_column(table: str, column: str) -> str:
    """The query for the type of a *column*, by names that were checked. No row if it is not there."""
    return _TYPE.format(table=quoted(table), column=column)


def refuse_narrow(table: str, column: str, found: object) -> None:
    """
    Raise if *found*, the type of the column, cannot keep every token.

    Raises:
        UsageError: it cannot.
    """
    if found in _NARROW:
        msg = (
            f"column {column} of table {table} is {str(found).upper()}, and a token needs 64 bits; "
            f"run: ALTER TABLE {quoted(table)} ALTER COLUMN {quoted(column)} TYPE BIGINT"
        )
        raise UsageError(msg)
