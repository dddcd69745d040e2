"""The tables and functions of the backend: their text, and how several clients create them at the same time."""

from __future__ import annotations

import itertools
import uuid

from fencing_sdk._values.drivers import IDLE_LIMIT, packed_text
from fencing_sdk.backends.postgresql.driver import DriverConnection
from fencing_sdk.errors import ConfigurationError, shown

DEFAULT_SCHEMA = "fencing"
_LONGEST = 63
"""Bytes of an identifier; PostgreSQL would truncate a longer one."""

_TEXT = packed_text(__package__, "schema.sql")
_SCHEMA_VARIABLE = ':"schema"'
_BODY_MARK = "$fencing$"
"""Encloses the body of each function."""
_KEY = 0x66656E63696E67
"""The key of the advisory lock under which clients create the schema: "fencing" in ASCII."""


def check_schema(schema: object) -> str:
    """
    Return *schema* if it can name a schema. Nearly every text can, because statements quote it.

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
    """Return *name* as a quoted identifier."""
    return '"' + name.replace('"', '""') + '"'


def schema_sql(schema: str = DEFAULT_SCHEMA) -> str:
    """
    Return the statements that create the tables and functions, for a migration.

    Run them in one transaction. They may be run again, and then change nothing.

    Raises:
        ConfigurationError: *schema* cannot name a schema.
    """
    return f"CREATE SCHEMA IF NOT EXISTS {quoted(check_schema(schema))};\n\n{objects_sql(schema)}"


def objects_sql(schema: str) -> str:
    """Return `schema_sql` without CREATE SCHEMA, which needs a permission even if the schema exists."""
    name = quoted(schema)
    marks = (f"$fencing{number}$" for number in itertools.count(1))
    mark = next(mark for mark in marks if mark not in name)  # a body ends where its mark is found
    return _TEXT.replace(_BODY_MARK, mark).replace(_SCHEMA_VARIABLE, name)


def newest_function(schema: str) -> str:
    """Return a function that no earlier version has, for ``to_regprocedure``. One transaction creates all of them."""
    return f"{quoted(schema)}.fencing_sweep(bigint)"


async def create(connection: DriverConnection, schema: str) -> None:
    """
    Create what is missing, in one transaction. Another client that does the same waits, and finds it done.

    Raises:
        Exception: the driver's error.
    """
    await connection.execute(f"BEGIN ISOLATION LEVEL READ COMMITTED; {IDLE_LIMIT}")
    try:
        await connection.execute("SET LOCAL search_path = pg_catalog, pg_temp")  # "text" is the built-in type
        # Parsed before the lock: IDLE_LIMIT does not count between the parsing of a statement and its execution.
        look = await connection.prepare(
            "SELECT to_regprocedure($1) IS NOT NULL, to_regnamespace($2) IS NOT NULL",
            name=f"fencing_{uuid.uuid4().hex}",
        )
        await connection.execute(f"SELECT pg_catalog.pg_advisory_xact_lock({_KEY})")
        found = await look.fetchrow(newest_function(schema), quoted(schema))
        assert found is not None
        complete, schema_exists = found[0], found[1]
        if not complete:
            await connection.execute(objects_sql(schema) if schema_exists else schema_sql(schema))
    except BaseException:
        if not connection.is_closed():
            await connection.execute("ROLLBACK")
        raise
    await connection.execute("COMMIT")


async def missing_right(connection: DriverConnection, schema: str) -> str:
    """
    Return which right `create` lacks, and how to grant it.

    Raises:
        Exception: the driver's error.
    """
    found = await connection.fetchrow(
        "SELECT to_regnamespace($1) IS NOT NULL, current_database(), current_user, "
        "coalesce(has_schema_privilege(to_regnamespace($1), 'CREATE'), false)",
        quoted(schema),
    )
    assert found is not None
    exists, database, user, may_create = found
    what = f"schema {shown(schema)}" if exists else f"database {shown(database)}"
    place = f"SCHEMA {quoted(schema)}" if exists else f"DATABASE {quoted(database)}"
    if may_create:
        return f"role {shown(user)} does not own the tables or functions of {what}; run this as the role that does"
    grant = f"GRANT CREATE ON {place} TO {quoted(user)}"
    return f"role {shown(user)} lacks CREATE on {what}; run this as its owner, or: {grant}"
