"""
A table of fences in PostgreSQL: its statements, and the steps that run them.

One statement checks the token and writes the fence. Its upsert locks the row of the fence until the transaction ends,
so the transactions of one resource run one after the other, and their tokens never go down. If another transaction
changed the row meanwhile:

    READ COMMITTED       PostgreSQL checks the condition again, on the row as it is now
    REPEATABLE READ      PostgreSQL refuses the statement with 40001 (serialization_failure): the
    SERIALIZABLE         caller tries the transaction again, and the new fence decides then

A failed statement fails the whole transaction in PostgreSQL. So the guard looks for the table before it uses it, once
for each connection. The answer also says in which schema the table is. If the ``search_path`` of a transaction leads to
another table than the one in which the guard raises fences, the transaction would miss those fences, and is refused, as
long as that table exists: a rollback or a migration may have taken it away. A ``search_path`` may change, so each
statement returns which table it has written, and if that is not the table which the connection has found, the guard
looks again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

from fencing_sdk._values.token import Token
from fencing_sdk.errors import UsageError, shown
from fencing_sdk.guards.sql._fence_table import IF_ADMITTED, FenceTable, quoted
from fencing_sdk.guards.sql._protocols import POSTGRESQL
from fencing_sdk.guards.sql._transaction import Parameters, Row, Steps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fencing_sdk.guards.sql._transaction import Transaction

UNDEFINED_TABLE = "42P01"
"""The SQLSTATE of a statement on a table that is missing."""
_UNDEFINED_SCHEMA = "3F000"
_NOT_PERMITTED = "42501"

# COLLATE "C" compares bytes, so an update of the system's locales cannot break the index; a broken index would allow a
# second fence for one resource. fillfactor leaves room in the page, because fences are rewritten often.
_DDL = """\
CREATE TABLE IF NOT EXISTS {table} (
    resource text COLLATE "C" NOT NULL PRIMARY KEY,
    token bigint NOT NULL,
    holder text
) WITH (fillfactor = 50)"""

# If two transactions run CREATE TABLE IF NOT EXISTS, the second waits until the first has committed, and then fails on
# a unique index of the catalogs. A block with an exception handler is a savepoint.
_CREATE = """\
DO $fencing$
BEGIN
    {ddl};
EXCEPTION WHEN unique_violation OR duplicate_table OR duplicate_object THEN
    NULL;
END
$fencing$"""

# The table, if it exists; the current transaction; the database and schema in which the table is, or would be created;
# and the type of its tokens.
_LOOK_FOR_TABLE = """\
SELECT named.oid::oid, txid_current_if_assigned(), current_database()::text,
    coalesce(there.relnamespace::regnamespace::text, current_schema()::text),
    ({kind})
FROM (VALUES (to_regclass('{table}'))) AS named (oid)
LEFT JOIN pg_catalog.pg_class AS there ON there.oid = named.oid"""

# The name of the guard's own table, or its number if there is no such table now; then the table, if it exists now. A
# query of pg_class would show what the snapshot of the transaction knows, which may be older than the tables.
_LOOK_FOR_OWN = "SELECT {own}::oid::regclass::text, to_regclass('{table}')::oid"
_SCHEMA_OF_OWN = "SELECT schema FROM pg_identify_object('pg_class'::regclass, {own}, 0)"

# The table is a constant of the plan. PostgreSQL plans again when the search_path is another one.
_ADMIT = (
    "INSERT INTO {table} AS fence (resource, token, holder)\n{row}\n"
    + IF_ADMITTED
    + "fence.resource, '{table}'::regclass::oid"
)

_ADMITTED_ROW = "VALUES ({p[0]}, {p[1]}, {p[2]})"

# In one order for all transactions, whatever the collation of the database: each row is locked when its turn comes, and
# two transactions that lock the same rows in opposite orders would wait for each other.
_ADMITTED_ROWS = """\
SELECT asked.resource, asked.token, asked.holder
FROM unnest({p[0]}::text[], {p[1]}::bigint[], {p[2]}::text[]) AS asked (resource, token, holder)
ORDER BY asked.resource COLLATE "C" ASC"""

# The holder relies on a fence that was raised, so it must survive a crash of the server. The settings end with the
# transaction. PostgreSQL evaluates the WHERE before it inserts the row, and so before it waits for a locked one.
_RAISED_ROW = """\
SELECT {p[0]}::text, {p[1]}::bigint, {p[2]}::text
WHERE set_config('lock_timeout', {p[3]}, TRUE) IS NOT NULL
  AND CASE WHEN current_setting('synchronous_commit') IN ('off', 'local')
      THEN set_config('synchronous_commit', 'on', TRUE) ELSE '' END IS NOT NULL"""

_FENCE = "SELECT token, holder FROM {table} WHERE resource = {p[0]}"

_NUMBERED = ("$1", "$2", "$3", "$4")
_FORMATTED = ("%s",) * 4


_NARROW = {"smallint", "integer", "real"}

# For a domain, its base type.
_TYPE = """\
SELECT format_type(coalesce(nullif(kind.typbasetype, 0), kind.oid), NULL)
FROM pg_catalog.pg_attribute AS known JOIN pg_catalog.pg_type AS kind ON kind.oid = known.atttypid
WHERE known.attrelid = to_regclass('{table}') AND known.attname = '{column}'"""


def _type_of_column(table: str, column: str) -> str:
    """Return the query for the type of a *column*. The names were checked. A missing column gives no row."""
    return _TYPE.format(table=quoted(table), column=column)


def _refuse_narrow(table: str, column: str, found: object) -> None:
    if found in _NARROW:
        msg = (
            f"column {column} of table {table} is {str(found).upper()}, and a token needs 64 bits; "
            f"run: ALTER TABLE {quoted(table)} ALTER COLUMN {quoted(column)} TYPE BIGINT"
        )
        raise UsageError(msg)


@dataclass(frozen=True, slots=True)
class PostgresqlFenceStatements:
    """The statements on one table of fences, for drivers that write parameters the same way."""

    admit: str
    """Parameters: resource, token, holder. A row if the token is admitted: the resource, and the table. Else none."""
    admit_all: str
    """Parameters: arrays of resources, tokens and holders. One row for each token that is admitted."""
    raise_fence: str
    """As for `admit`, and a fourth parameter: how long to wait for the row, in PostgreSQL's notation."""
    fence: str
    """Parameter: resource. Token and holder of the fence, if there is one."""

    @classmethod
    def for_table(cls, table: str, placeholders: Sequence[str]) -> PostgresqlFenceStatements:
        """Write the statements for a *table* that is quoted."""

        def filled(text: str) -> str:
            return text.format(table=table, p=placeholders)

        return cls(
            admit=_ADMIT.format(table=table, row=filled(_ADMITTED_ROW)),
            admit_all=_ADMIT.format(table=table, row=filled(_ADMITTED_ROWS)),
            raise_fence=_ADMIT.format(table=table, row=filled(_RAISED_ROW)),
            fence=filled(_FENCE),
        )


@dataclass(frozen=True, slots=True)
class _Found:
    """The table that a connection has found."""

    table: object
    """What PostgreSQL calls it by: its oid."""
    database: object
    schema: object
    creator: object
    """The transaction that has created the table and may still be rolled back, or None."""


class PostgresqlFences(FenceTable):
    """The fences in one table of PostgreSQL."""

    dialect, creation = POSTGRESQL, _DDL

    def __init__(self, table: str, *, create: bool) -> None:
        super().__init__(table, create=create)
        name = quoted(table)
        self._numbered = PostgresqlFenceStatements.for_table(name, _NUMBERED)
        self._formatted = PostgresqlFenceStatements.for_table(name, _FORMATTED)
        self._look_for_table = _LOOK_FOR_TABLE.format(table=name, kind=_type_of_column(table, "token"))
        self._own: _Found | None = None
        """The table in which the guard raises fences, once it has raised one."""
        self._seen_by: WeakKeyDictionary[object, _Found] = WeakKeyDictionary()
        """By the connection."""

    @classmethod
    def check_column(cls, table: str, column: str) -> Steps[None]:
        """See `FenceTable`. A token has up to 53 bits, and the type that SQLAlchemy chooses for an ``int`` has 32."""
        for (found,) in (yield _type_of_column(table, column), ()):
            _refuse_narrow(table, column, found)

    def admit(self, transaction: Transaction, tokens: Mapping[str, Token]) -> Steps[None]:
        """Do so, and keep the rows locked until the transaction ends; several rows are locked in one order."""
        if not (transaction.begun() and self._knows(transaction)):
            yield from self._ensure_table(transaction)
        statements = self._statements(transaction)
        rows = [(resource, int(token), token.holder) for resource, token in tokens.items()]
        if len(rows) == 1:
            yield from self._admit(transaction, tokens, statements.admit, rows[0])
        else:
            columns = tuple(list(column) for column in zip(*rows, strict=True))
            yield from self._admit(transaction, tokens, statements.admit_all, columns)

    def raise_fence(
        self, transaction: Transaction, resource: str, token: Token, wait: float, *, own: bool = False
    ) -> Steps[None]:
        """Do so, and make the commit durable. See `FenceTable`."""
        statement = self._statements(transaction).raise_fence
        patience = f"{max(1, round(wait * 1000))}ms"  # 0 would mean no limit
        yield from self._ensure_table(transaction)
        parameters = (resource, int(token), token.holder, patience)
        yield from self._admit(transaction, {resource: token}, statement, parameters, own=own)
        if own:
            self._own = self._seen_by[transaction.driver]

    def highest(self, transaction: Transaction, resource: str) -> Steps[Token | None]:
        """Return the fence of *resource*, if it has one. Create no table, because the server may be a standby."""
        ((table, *_),) = yield self._look_for_table, ()
        if self._create and table is None:
            return None
        return (yield from self._stored(transaction, resource))

    def _admit(
        self,
        transaction: Transaction,
        tokens: Mapping[str, Token],
        statement: str,
        parameters: Parameters,
        *,
        own: bool = False,
    ) -> Steps[None]:
        admitted = yield from self._fetch(transaction, statement, parameters)
        if not transaction.begun():
            raise UsageError(_AUTOCOMMIT)  # the driver hides its mode, and has committed the statement
        if admitted and (own or self._own is not None):
            seen = self._seen_by.get(transaction.driver)
            if seen is None or seen.table != admitted[0][1] or not self._is_own(seen):
                yield from self._find(transaction)  # the statement may have written another table than the guard's
        yield from self._refuse_others(transaction, tokens, admitted)

    def _fence(self, transaction: Transaction, resource: str) -> Steps[Sequence[Row]]:
        return self._fetch(transaction, self._statements(transaction).fence, (resource,))

    def _fetch(self, transaction: Transaction, statement: str, parameters: Parameters) -> Steps[Sequence[Row]]:
        try:
            return (yield statement, parameters)
        except Exception as error:
            state = _sqlstate(error)
            if state == UNDEFINED_TABLE:
                self._seen_by.pop(transaction.driver, None)  # it was dropped, or the search_path has changed
                error.add_note(
                    f"fencing_sdk: SqlGuard's table {self._table} is missing; run the statement of ddl('postgresql')"
                    + self._perhaps_passed()
                )
            elif state == _NOT_PERMITTED:
                error.add_note(
                    f"fencing_sdk: SqlGuard needs the permissions SELECT, INSERT and UPDATE on {self._table}, "
                    "and USAGE on its schema"
                )
            raise

    def _perhaps_passed(self) -> str:
        """Return what else may be wrong if a table is missing: the transaction failed, so the guard cannot look."""
        if self._own is None or "." in self._table:
            return ""
        return (
            f", unless the search_path of this transaction leads past schema {shown(self._own.schema)}, "
            "in which SqlGuard has raised fences"
        )

    def _ensure_table(self, transaction: Transaction) -> Steps[None]:
        """
        Ensure a transaction, and ensure the table before a statement that would fail without it.

        Raises:
            UsageError: there is no transaction, or it would use another table than the guard does, or the
                table's column is too narrow for tokens.
        """
        if not (transaction.begun() or transaction.begins):
            raise UsageError(_AUTOCOMMIT)
        if self._knows(transaction):
            return
        exists = yield from self._find(transaction)
        if self._create and not exists:
            yield from self._create_table()
            yield from self._find(transaction, created=True)

    def _knows(self, transaction: Transaction) -> bool:
        """Return whether the connection has found the table for good, in the place where the guard raises fences."""
        seen = self._seen_by.get(transaction.driver)
        return seen is not None and seen.creator is None and self._is_own(seen)

    def _find(self, transaction: Transaction, *, created: bool = False) -> Steps[bool]:
        """
        Look for the table, note where it is, and return whether there is one.

        *created*: by this transaction, perhaps.

        Raises:
            UsageError: it is another table than the guard's, or its column is too narrow for tokens.
        """
        ((table, current, database, schema, kind),) = yield self._look_for_table, ()
        found = _Found(table, database, schema, None)
        yield from self._refuse_other(found)
        if table is None:
            return False
        _refuse_narrow(self._table, "token", kind)
        seen = self._seen_by.get(transaction.driver)
        if created or (seen is not None and seen.creator == current):
            found = replace(found, creator=current)
        self._seen_by[transaction.driver] = found
        return True

    def _is_own(self, found: _Found) -> bool:
        """Return whether *found* is the table in which the guard raises fences, as far as the guard knows one."""
        own = self._own
        return own is None or (own.database, own.table) == (found.database, found.table)

    def _refuse_other(self, found: _Found) -> Steps[None]:
        """Refuse a transaction that uses another table than that in which the guard raises fences."""
        own = self._own
        if own is None or self._is_own(found):
            return
        place = own.schema
        if own.database == found.database:
            ((place, table),) = yield _LOOK_FOR_OWN.format(own=own.table, table=quoted(self._table)), ()
            if table == own.table:
                return  # it was created meanwhile
            asked, _, asked_name = self._table.rpartition(".")
            shown_schema, _, name = str(place).rpartition(".")
            if name.strip('"') != asked_name:
                return  # it was dropped or renamed, or its creation was rolled back or is not committed yet
            if table is None:
                schema: object = shown_schema
                if asked and not schema:  # the search_path has it
                    ((schema,),) = yield _SCHEMA_OF_OWN.format(own=own.table), ()
                if str(schema).strip('"') == asked:
                    return  # it is committed, and the session has not heard yet that the name leads to it
        msg = (
            f"the fences of this transaction would be in schema {shown(found.schema)} of database "
            f"{shown(found.database)}, and SqlGuard raises them in {shown(place)} of {shown(own.database)}; "
            "pass it the database of your transactions, and name the schema: table='schema.fencing_fence'"
        )
        raise UsageError(msg)

    def _create_table(self) -> Steps[None]:
        try:
            yield _CREATE.format(ddl=self._ddl), ()
        except Exception as error:
            schema = self._table.rpartition(".")[0]
            if _sqlstate(error) == _UNDEFINED_SCHEMA and schema:
                advice = f"run CREATE SCHEMA {quoted(schema)}, and then the statement of SqlGuard.ddl('postgresql')"
            else:
                advice = "to do it by hand, as another role, run the statement of SqlGuard.ddl('postgresql')"
            error.add_note(f"fencing_sdk: SqlGuard cannot create its table {self._table}; {advice}")
            raise

    def _statements(self, transaction: Transaction) -> PostgresqlFenceStatements:
        return self._numbered if transaction.placeholder in _NUMBERED else self._formatted


def _sqlstate(error: Exception) -> str | None:
    """Return the SQLSTATE of *error*, of a driver or of SQLAlchemy around it."""
    original = getattr(error, "orig", error)
    return cast("str | None", getattr(original, "sqlstate", None) or getattr(original, "pgcode", None))


_AUTOCOMMIT = (
    "this PostgreSQL connection commits every statement by itself, so the check and your write would be two "
    "transactions; begin one first: connection.transaction(), or with SQLAlchemy session.begin() without AUTOCOMMIT"
)
