"""
A table of fences in PostgreSQL: its statements, and the steps that run them.

One statement checks the token and writes the fence. Its upsert locks the row of the fence until the transaction ends,
so the transactions of one resource run one after the other, and their tokens never go down. If another transaction
changed the row meanwhile:

    READ COMMITTED       PostgreSQL checks the condition again, on the row as it is now
    REPEATABLE READ      PostgreSQL refuses the statement with 40001 (serialization_failure): the
    SERIALIZABLE         caller tries the transaction again, and the new fence decides then

A failed statement fails the whole transaction in PostgreSQL. So a guard that creates its table looks for it first, once
for each connection. Each statement returns which table it has written. If the ``search_path`` of a transaction leads to
another table than the one in which the guard raises fences, the transaction would miss those fences, and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakSet

from fencing_sdk._values.token import Token, conflicting
from fencing_sdk.errors import UsageError
from fencing_sdk.guards import refusal
from fencing_sdk.guards.sql._fence_table import IF_ADMITTED, FenceTable, quoted, stored_fence
from fencing_sdk.guards.sql._transaction import POSTGRESQL, Parameters, Row, Transaction

_UNDEFINED_TABLE, _UNDEFINED_SCHEMA, _NOT_PERMITTED = "42P01", "3F000", "42501"

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

# A transaction that has an id already may have created the table, and may roll back.
_LOOK_FOR_TABLE = "SELECT to_regclass('{table}')::oid, txid_current_if_assigned() IS NULL"

# The table is a constant of the plan. PostgreSQL plans again when the search_path is another one.
_ADMIT = (
    "INSERT INTO {table} AS fence (resource, token, holder)\n{row}\n"
    + IF_ADMITTED
    + "fence.resource, '{table}'::regclass::oid, current_database()::text"
)

_ADMITTED_ROW = "VALUES ({p[0]}, {p[1]}, {p[2]})"

# In one order for all transactions, whatever the collation of the database: each row is locked when its turn comes, and
# two transactions that lock the same rows in opposite orders would wait for each other.
_ADMITTED_ROWS = """\
SELECT asked.resource, asked.token, asked.holder
FROM unnest({p[0]}::text[], {p[1]}::bigint[], {p[2]}::text[]) AS asked (resource, token, holder)
ORDER BY asked.resource COLLATE "C" ASC"""

# A row is returned for a token that is refused, too: nothing is left to ask while the row is locked.
_RAISE = """\
INSERT INTO {table} AS fence (resource, token, holder)
{row}
ON CONFLICT (resource) DO UPDATE SET
    holder = CASE WHEN excluded.token > fence.token THEN excluded.holder
             WHEN excluded.token = fence.token THEN coalesce(fence.holder, excluded.holder)
             ELSE fence.holder END,
    token = greatest(fence.token, excluded.token)
RETURNING fence.token, fence.holder"""

# The holder relies on a fence that was raised, so it must survive a crash of the server. The settings end with the
# transaction. PostgreSQL evaluates the WHERE before it inserts the row, and so before it waits for a locked one.
_RAISED_ROW = """\
SELECT {p[0]}::text, {p[1]}::bigint, {p[2]}::text
WHERE set_config('lock_timeout', {p[3]}, TRUE) IS NOT NULL
  AND CASE WHEN current_setting('synchronous_commit') IN ('off', 'local')
      THEN set_config('synchronous_commit', 'on', TRUE) ELSE '' END IS NOT NULL"""

_NARROW = {"smallint", "integer", "real"}

# For a domain, its base type.
_TYPE = """\
SELECT format_type(coalesce(nullif(kind.typbasetype, 0), kind.oid), NULL)
FROM pg_catalog.pg_attribute AS known JOIN pg_catalog.pg_type AS kind ON kind.oid = known.atttypid
WHERE known.attrelid = to_regclass('{table}') AND known.attname = '{column}'"""


class PostgresqlFences(FenceTable):
    """The fences in one table of PostgreSQL."""

    dialect, creation = POSTGRESQL, _DDL

    def __init__(self, table: str, *, create: bool) -> None:
        super().__init__(table, create=create)
        self._own: tuple[str, int] | None = None
        """The database and the oid of the table in which the guard raises fences, once it has raised one."""
        self._seen_by: WeakSet[object] = WeakSet()
        """Connections that have found the table, committed."""

    @classmethod
    async def check_column(cls, transaction: Transaction, table: str, column: str) -> None:
        """See `FenceTable`. A token has up to 53 bits, and the type that SQLAlchemy chooses for an ``int`` has 32."""
        for (found,) in await transaction.fetch(_TYPE.format(table=quoted(table), column=column), ()):
            if found in _NARROW:
                msg = (
                    f"column {column} of table {table} is {found.upper()}, and a token needs 64 bits; "
                    f"run: ALTER TABLE {quoted(table)} ALTER COLUMN {quoted(column)} TYPE BIGINT"
                )
                raise UsageError(msg)

    async def admit(self, transaction: Transaction, tokens: Mapping[str, Token]) -> None:
        """See `FenceTable`. The rows stay locked until the transaction ends."""
        rows = [(resource, int(token), token.holder) for resource, token in tokens.items()]
        if len(rows) == 1:
            await self._admit(transaction, tokens, _ADMITTED_ROW, rows[0])
        else:
            columns = tuple(list(column) for column in zip(*rows, strict=True))
            await self._admit(transaction, tokens, _ADMITTED_ROWS, columns)

    async def raise_fence(
        self, transaction: Transaction, resource: str, token: Token, wait: float, *, own: bool
    ) -> None:
        """See `FenceTable`. The commit is durable."""
        statement = _RAISE + ", '{table}'::regclass::oid, current_database()::text"
        parameters = (resource, int(token), token.holder, f"{max(1, round(wait * 1000))}ms")  # 0 would mean no limit
        ((number, holder, *table),) = await self._write(transaction, statement, _RAISED_ROW, parameters)
        await self._check_table(transaction, (table[1], table[0]))
        fence = stored_fence(resource, number, holder)
        if token < fence or conflicting(token, fence):
            raise refusal(resource, token, fence)
        if own:
            self._own = table[1], table[0]

    @property
    def is_known(self) -> bool:
        """True if the guard has raised a fence, or creates no table."""
        return self._own is not None or not self._create

    async def prepare(self, transaction: Transaction) -> None:
        """Create the table if it is missing."""
        await self._ensure_table(transaction)

    async def highest(self, transaction: Transaction, resource: str) -> Token | None:
        """See `FenceTable`. Create no table, because the server may be a standby."""
        if self._create:
            ((table, _),) = await transaction.fetch(_LOOK_FOR_TABLE.format(table=self._name), ())
            if table is None:
                return None
        return await super().highest(transaction, resource)

    async def _admit(
        self, transaction: Transaction, tokens: Mapping[str, Token], row: str, parameters: Parameters
    ) -> None:
        """
        Write the fences of a *row*.

        Raises:
            StaleTokenError: one of the resources has seen a later token.
            UsageError: there is no transaction, or it uses another table than the guard does.
        """
        admitted = await self._write(transaction, _ADMIT, row, parameters)
        if admitted:
            await self._check_table(transaction, (admitted[0][2], admitted[0][1]))
        await self._refuse_others(transaction, tokens, admitted)

    async def _write(self, transaction: Transaction, statement: str, row: str, parameters: Parameters) -> Sequence[Row]:
        """
        Run a *statement* that writes fences. The table is there then.

        Raises:
            UsageError: there is no transaction.
        """
        transaction.refuse_autocommit()
        if self._create and not (transaction.is_open() and transaction.driver in self._seen_by):
            await self._ensure_table(transaction)
        statement = statement.format(table=self._name, row=row.format(p=_placeholders(transaction)))
        written = await self._fetch(transaction, statement, parameters)
        transaction.refuse_committed()
        return written

    async def _fence(self, transaction: Transaction, resource: str) -> Sequence[Row]:
        parameter, *_ = _placeholders(transaction)
        statement = f"SELECT token, holder FROM {self._name} WHERE resource = {parameter}"  # noqa: S608  (checked)
        return await self._fetch(transaction, statement, (resource,))

    async def _fetch(self, transaction: Transaction, statement: str, parameters: Parameters) -> Sequence[Row]:
        try:
            return await transaction.fetch(statement, parameters)
        except Exception as error:
            state = _sqlstate(error)
            if state == _UNDEFINED_TABLE:
                self._seen_by.discard(transaction.driver)  # it was dropped, or the search_path has changed
                error.add_note(
                    f"fencing_sdk: SqlGuard's table {self._table} is missing; run the statement of ddl('postgresql'), "
                    "unless the search_path of this transaction leads past the schema that has it"
                )
            elif state == _NOT_PERMITTED:
                error.add_note(
                    f"fencing_sdk: SqlGuard needs the permissions SELECT, INSERT and UPDATE on {self._table}, "
                    "and USAGE on its schema"
                )
            raise

    async def _ensure_table(self, transaction: Transaction) -> None:
        """Create the table if it is missing, before a statement that would fail without it."""
        ((table, has_written_nothing),) = await transaction.fetch(_LOOK_FOR_TABLE.format(table=self._name), ())
        if table is not None:
            if has_written_nothing:
                self._seen_by.add(transaction.driver)
            return
        try:
            await transaction.fetch(_CREATE.format(ddl=self.ddl), ())
        except Exception as error:
            schema = self._table.rpartition(".")[0]
            if _sqlstate(error) == _UNDEFINED_SCHEMA and schema:
                advice = f"run CREATE SCHEMA {quoted(schema)}, and then the statement of SqlGuard.ddl('postgresql')"
            else:
                advice = "to do it by hand, as another role, run the statement of SqlGuard.ddl('postgresql')"
            error.add_note(f"fencing_sdk: SqlGuard cannot create its table {self._table}; {advice}")
            raise

    async def _check_table(self, transaction: Transaction, table: tuple[str, int]) -> None:
        """Refuse a transaction that has written another *table* than the one in which the guard raises fences."""
        if self._own is None or self._own == table:
            return
        database, _ = table
        own_database, own = self._own
        own_name = self._table
        if own_database == database:
            ((own_name,),) = await transaction.fetch(f"SELECT {own}::oid::regclass::text", ())
            if own_name.rpartition(".")[2].strip('"') != self._table.rpartition(".")[2]:
                return  # the own one was dropped, its creation was rolled back (then its name is a number), or renamed
        msg = (
            f"SqlGuard raises fences in {own_name} of database {own_database}, and this transaction has its own in "
            f"another table {self._table}, of database {database}; pass it the database of your transactions, and "
            "name the schema: table='schema.fencing_fence'"
        )
        raise UsageError(msg)


def _placeholders(transaction: Transaction) -> Sequence[str]:
    return ("$1", "$2", "$3", "$4") if transaction.placeholder == "$1" else ("%s",) * 4


def _sqlstate(error: Exception) -> object:
    """Return the SQLSTATE of *error*, of a driver or of SQLAlchemy around it."""
    original = getattr(error, "orig", error)
    return getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
