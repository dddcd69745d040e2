"""The tables and functions of the backend: their text, and how they are created while others do the same."""

from __future__ import annotations

from pathlib import Path

from fencing_sdk.backends.postgresql._driver import Connection
from fencing_sdk.errors import ConfigurationError, shown

DEFAULT_SCHEMA = "fencing"
_LONGEST = 63
"""Bytes of an identifier; PostgreSQL would cut what is longer."""

_TEXT = (Path(__file__).parent / "schema.sql").read_text(encoding="utf-8")
_PLACE = ':"schema"'
_KEY = 0x66656E63696E67
"""Of the advisory lock under which the schema is created: "fencing" in ASCII."""


def check_schema(schema: object) -> str:
    """
    Return *schema* if it can name a schema. It is quoted wherever it is used, so that nearly every text can.

    Raises:
        ConfigurationError: it cannot.
    """
    if not isinstance(schema, str) or not schema or "\0" in schema:
        msg = f"schema must be the name of a schema, such as {DEFAULT_SCHEMA!r}, got {shown(schema)}"
        raise ConfigurationError(msg)
    if len(schema.encode("utf-8", "surrogatepass")) > _LONGEST or any("\ud800" <= char <= "\udfff" for char in schema):
        msg = f"schema {shown(schema)} must have {_LONGEST} bytes of UTF-8 at most"
        raise ConfigurationError(msg)
    if schema.startswith("pg_") or schema == "$user":
        msg = f"schema {shown(schema)} means something else to PostgreSQL; use another name"
        raise ConfigurationError(msg)
    return schema


def quoted(name: str) -> str:
    """Write *name* as an identifier."""
    return '"' + name.replace('"', '""') + '"'


def schema_sql(schema: str = DEFAULT_SCHEMA) -> str:
    """
    The statements that create what the backend needs, for those who migrate by hand.

    They may be run again, and then change nothing. Run them in one transaction.

    Raises:
        ConfigurationError: *schema* cannot name a schema.
    """
    return f"CREATE SCHEMA IF NOT EXISTS {quoted(check_schema(schema))};\n\n{objects_sql(schema)}"


def objects_sql(schema: str) -> str:
    """`schema_sql` for a schema that exists: creating one needs a permission even where it is there already."""
    return _TEXT.replace(_PLACE, quoted(schema))


def mark(schema: str) -> str:
    """The name of the function that is created last, so that all is there if it is; for ``to_regprocedure``."""
    return f"{quoted(schema)}.fencing_sweep_v1(double precision)"


async def create(connection: Connection, schema: str) -> None:
    """
    Create what is missing, in one transaction. Whoever does the same at the same time waits, and finds it done.

    Raises:
        Exception: whatever the driver raises.
    """
    await connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
    try:
        await connection.execute("SET LOCAL search_path = pg_catalog, pg_temp")  # text is the type, and no other
        await connection.execute(f"SELECT pg_catalog.pg_advisory_xact_lock({_KEY})")
        found = await connection.fetchrow(
            "SELECT to_regprocedure($1) IS NOT NULL, to_regnamespace($2) IS NOT NULL", mark(schema), quoted(schema)
        )
        assert found is not None
        complete, there = found[0], found[1]
        if not complete:
            await connection.execute(objects_sql(schema) if there else schema_sql(schema))
    except BaseException:
        if not connection.is_closed():
            await connection.execute("ROLLBACK")
        raise
    await connection.execute("COMMIT")
