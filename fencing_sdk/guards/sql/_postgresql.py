"""
What SqlGuard says to PostgreSQL.

The condition stands in the statement that writes. Its upsert takes the lock of the fence's row and
keeps it until the transaction ends, so the transactions of one resource follow one another, and the
tokens along them never go down. What happens when another transaction has changed the row meanwhile:

    READ COMMITTED       the condition is looked at again, with the row as it is now
    REPEATABLE READ      PostgreSQL refuses the statement with 40001 (serialization_failure): the
    SERIALIZABLE         transaction is to be tried again, and is judged by the new fence then

PostgreSQL spoils a whole transaction for one failed statement. So a missing table is asked for before
it could fail, once for each connection. The answer tells also where the table is: a transaction whose
``search_path`` leads to another one than the guard's own must not pass by the fences that were raised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

from fencing_sdk._values.claim import Token
from fencing_sdk.errors import UsageError, shown
from fencing_sdk.guards._verdict import refusal
from fencing_sdk.guards.sql._names import quoted
from fencing_sdk.guards.sql._steps import Parameters, Row, Steps
from fencing_sdk.guards.sql._width import refuse_narrow, type_of_column

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fencing_sdk.guards.sql._transaction import Transaction

UNDEFINED_TABLE = "42P01"
"""The SQLSTATE of a statement about a table that is not there."""
_UNDEFINED_SCHEMA = "3F000"
_NOT_PERMITTED = "42501"

# COLLATE "C": equality is that of the bytes, and an update of the system's locales cannot break the index, which
# would let a second fence for one resource in. A fence is rewritten often: fillfactor leaves room to do so in place.
_DDL = """\
CREATE TABLE IF NOT EXISTS {table} (
    resource text COLLATE "C" NOT NULL PRIMARY KEY,
    token bigint NOT NULL,
    holder text
) WITH (fillfactor = 50)"""

# CREATE TABLE IF NOT EXISTS is no protection against others who do the same now: the second one waits until the first
# has committed, and fails then, on a unique index of the catalogs. A block with a handler is a savepoint by itself.
_CREATE = """\
DO $fencing$
BEGIN
    {ddl};
EXCEPTION WHEN unique_violation OR duplicate_table OR duplicate_object THEN
    NULL;
END
$fencing$"""

# Whether the table is there, in which transaction that is asked, in which database and schema it is, or will be, and of
# which type its tokens are.
_WHERE = """\
SELECT there.oid IS NOT NULL, txid_current_if_assigned(), current_database()::text,
    coalesce(there.relnamespace::regnamespace::text, current_schema()::text),
    ({kind})
FROM (VALUES (to_regclass('{table}'))) AS named (oid)
LEFT JOIN pg_catalog.pg_class AS there ON there.oid = named.oid"""

_ADMIT = """\
INSERT INTO {table} AS fence (resource, token, holder)
{row}
ON CONFLICT (resource) DO UPDATE SET
    holder = CASE WHEN excluded.token > fence.token THEN excluded.holder
             ELSE coalesce(excluded.holder, fence.holder) END,
    token = excluded.token
WHERE excluded.token > fence.token
   OR (excluded.token = fence.token
       AND coalesce(excluded.holder = fence.holder, TRUE))
RETURNING fence.token"""

_ADMITTED_ROW = "VALUES ({p[0]}, {p[1]}, {p[2]})"

# A fence that was raised is told to the holder, who relies on it: it has to survive a crash of the server. The settings
# end with the transaction. The condition is looked at before there is a row to insert, and so before the wait for it.
_RAISED_ROW = """\
SELECT {p[0]}::text, {p[1]}::bigint, {p[2]}::text
WHERE set_config('lock_timeout', {p[3]}, TRUE) IS NOT NULL
  AND CASE WHEN current_setting('synchronous_commit') IN ('off', 'local')
      THEN set_config('synchronous_commit', 'on', TRUE) ELSE '' END IS NOT NULL"""

_FENCE = "SELECT token, holder FROM {table} WHERE resource = {p[0]}"

_NUMBERED = ("$1", "$2", "$3", "$4")
_FORMATTED = ("%s",) * 4


@dataclass(frozen=True, slots=True)
class Statements:
    """The statements about one table of fences, for drivers of one way to write parameters."""

    admit: str
    """Parameters: resource, token, holder. One row when the token is admitted, none when it is refused."""
    raise_fence: str
    """The same; a fourth parameter is how long to wait for the row, as PostgreSQL writes it."""
    fence: str
    """Parameter: resource. The token and the holder of the fence, if there is one."""

    @classmethod
    def about(cls, table: str, placeholders: Sequence[str]) -> Statements:
        """Fill in a *table* that is quoted."""

        def filled(text: str) -> str:
            return text.format(table=table, p=placeholders)

        return cls(
            admit=_ADMIT.format(table=table, row=filled(_ADMITTED_ROW)),
            raise_fence=_ADMIT.format(table=table, row=filled(_RAISED_ROW)),
            fence=filled(_FENCE),
        )


class Fences:
    """The fences in one table, as steps in a transaction of PostgreSQL."""

    def __init__(self, table: str, *, create: bool) -> None:
        name = quoted(table)
        self._numbered = Statements.about(name, _NUMBERED)
        self._formatted = Statements.about(name, _FORMATTED)
        self._ddl = _DDL.format(table=name)
        self._where = _WHERE.format(table=name, kind=type_of_column(table, "token"))
        self._table = table
        self._create = create
        self._home: tuple[object, object] | None = None
        """The database and the schema where the guard's own transactions have found the table."""
        self._settled: WeakKeyDictionary[object, object] = WeakKeyDictionary()
        """Connections that have seen the table: True, or the transaction that has created it and may be rolled back."""

    def ddl(self) -> str:
        """The statement that creates the table."""
        return self._ddl

    def admit(self, transaction: Transaction, resource: str, token: Token) -> Steps[None]:
        """
        Check *token* and remember it, holding the fence until the transaction ends.

        Raises:
            StaleTokenError: the resource has seen a later token.
            UsageError: the connection commits every statement by itself.
        """
        if not (transaction.begun() and self._settled.get(transaction.driver) is True):
            yield from self._settle(transaction, at_home=False)
        statement = self._statements(transaction).admit
        yield from self._admit(transaction, resource, token, statement, (resource, int(token), token.holder))

    def raise_fence(
        self, transaction: Transaction, resource: str, token: Token, wait: float, *, at_home: bool = False
    ) -> Steps[None]:
        """
        As `admit`, waiting at most *wait* seconds for whoever holds the fence, and safe from a crash once committed.

        *at_home*: the transaction is the guard's own.

        Raises:
            StaleTokenError: the resource has seen a later token.
            UsageError: the connection commits every statement by itself.
        """
        statement = self._statements(transaction).raise_fence
        patience = f"{max(1, round(wait * 1000))}ms"  # 0 would be for ever
        yield from self._settle(transaction, at_home=at_home)
        yield from self._admit(transaction, resource, token, statement, (resource, int(token), token.holder, patience))

    def highest(self, transaction: Transaction, resource: str) -> Steps[Token | None]:
        """The fence of *resource*, if it has one. Nothing is created: this may be a standby."""
        ((there, *_),) = yield self._where, ()
        if self._create and not there:
            return None
        return (yield from self._fence(transaction, resource))

    def _admit(
        self, transaction: Transaction, resource: str, token: Token, statement: str, parameters: Parameters
    ) -> Steps[None]:
        admitted = yield from self._fetch(transaction, statement, parameters)
        if not transaction.begun():
            raise UsageError(_AUTOCOMMIT)  # a driver that hides its mode has committed it
        if not admitted:
            fence = yield from self._fence(transaction, resource)
            assert fence is not None  # it refused, and its row is locked
            raise refusal(resource, token, fence)

    def _fence(self, transaction: Transaction, resource: str) -> Steps[Token | None]:
        for token, holder in (yield from self._fetch(transaction, self._statements(transaction).fence, (resource,))):
            return Token(cast("int", token), cast("str | None", holder))
        return None

    def _fetch(self, transaction: Transaction, statement: str, parameters: Parameters) -> Steps[Sequence[Row]]:
        try:
            return (yield statement, parameters)
        except Exception as error:
            state = _sqlstate(error)
            if state == UNDEFINED_TABLE:
                self._settled.pop(transaction.driver, None)  # it was there: dropped, or the search_path has changed
                error.add_note(
                    f"fencing_sdk: SqlGuard's table {self._table} is missing; run the statement of ddl('postgresql')"
                )
            elif state == _NOT_PERMITTED:
                error.add_note(
                    f"fencing_sdk: SqlGuard needs the permissions SELECT, INSERT and UPDATE on {self._table}, "
                    "and USAGE on its schema"
                )
            raise

    def _settle(self, transaction: Transaction, *, at_home: bool) -> Steps[None]:
        """
        Make sure of a transaction, and of the table before a statement that would fail without.

        Raises:
            UsageError: there is no transaction, or it would use another table than the guard does, or the
                table's column is too narrow for tokens.
        """
        if not (transaction.begun() or transaction.begins):
            raise UsageError(_AUTOCOMMIT)
        known = self._settled.get(transaction.driver)
        if known is True and not (at_home and self._home is None):
            return
        ((there, asking, *place, kind),) = yield self._where, ()
        self._check_place(place, at_home=at_home)
        if there:
            refuse_narrow(self._table, "token", kind)
            if known is None or known != asking:
                self._settled[transaction.driver] = True
        elif self._create:
            yield from self._create_table()
            ((_, creating, *_),) = yield self._where, ()
            self._settled[transaction.driver] = creating

    def _check_place(self, place: Sequence[object], *, at_home: bool) -> None:
        database, schema = place
        if at_home:
            self._home = database, schema
        elif self._home and self._home != (database, schema) and not ("." in self._table and self._home[0] == database):
            msg = (
                f"the fences of this transaction would be in schema {shown(schema)} of database {shown(database)}, "
                f"and SqlGuard raises them in {shown(self._home[1])} of {shown(self._home[0])}; "
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

    def _statements(self, transaction: Transaction) -> Statements:
        return self._numbered if transaction.placeholder in _NUMBERED else self._formatted


def _sqlstate(error: Exception) -> str | None:
    """The SQLSTATE of *error*, PostgreSQL's own or SQLAlchemy's around it."""
    original = getattr(error, "orig", error)
    return cast("str | None", getattr(original, "sqlstate", None) or getattr(original, "pgcode", None))


_AUTOCOMMIT = (
    "this PostgreSQL connection commits every statement by itself, so the check and your write would be two "
    "transactions; begin one first: async with connection.transaction()"
)
