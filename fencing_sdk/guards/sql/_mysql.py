"""
A table of fences in MySQL or MariaDB: its statements, and the steps that run them.

Two statements in the caller's transaction. The first one raises the fences that have to be raised and locks the rows,
also those that it leaves as they are. The second one reads the rows as they are now, whatever the snapshot of the
transaction shows, and the guard compares: the number of rows that the first one affects is the same for a token that
is equal to the fence and for a lower one. The rows stay locked until the transaction ends, so the transactions of one
resource run one after the other, and their tokens never go down.

Resources and holders are bytes, and travel as hexadecimal digits. The texts of these servers would compare ``a``,
``A`` and ``a `` as equal, each by a collation of its own, and the drivers write bytes in different ways.

CREATE TABLE commits the transaction in which it stands. So the guard creates its table on a connection of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencing_sdk._mysql import VARIABLES, ask_for, several_writers, values_of
from fencing_sdk._values.token import Token, conflicting
from fencing_sdk.errors import UnsupportedError, UsageError, shown
from fencing_sdk.guards._verdict import refusal
from fencing_sdk.guards.sql._fence_table import FenceTable, quoted, stored_fence
from fencing_sdk.guards.sql._protocols import MYSQL
from fencing_sdk.guards.sql._transaction import Parameters, Row, Steps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fencing_sdk.guards.sql._transaction import Transaction

NO_SUCH_TABLE = 1146
_DENIED = {1142, 1143}
"""The user may not do that with the table, or with a column of it."""
_NARROW = {"tinyint", "smallint", "mediumint", "int", "float"}

_DDL = """\
CREATE TABLE IF NOT EXISTS {table} (
    resource varbinary(512) NOT NULL PRIMARY KEY,
    token bigint NOT NULL,
    holder varbinary(64)
) ENGINE=InnoDB"""

_ASKED = "SELECT UNHEX(%s) AS resource, %s AS token, UNHEX(%s) AS holder"

# The assignments run from left to right, so the holder is decided by the token from before. The rows are locked in the
# order of their names: two transactions that lock the same rows in opposite orders would wait for each other.
_RAISE = """\
INSERT INTO {table} (resource, token, holder)
SELECT resource, token, holder FROM ({asked}) AS asked ORDER BY resource
ON DUPLICATE KEY UPDATE
    holder = CASE WHEN asked.token > {table}.token THEN asked.holder
             WHEN asked.token = {table}.token THEN COALESCE({table}.holder, asked.holder)
             ELSE {table}.holder END,
    token = GREATEST({table}.token, asked.token)"""

# By the key, one row at a time: a list of keys might be looked up by reading, and locking, the whole table.
_LOOK = "(SELECT HEX(resource), token, HEX(holder), DATABASE() FROM {table} WHERE resource = UNHEX(%s) FOR UPDATE)"

_FENCE = "SELECT token, HEX(holder) FROM {table} WHERE resource = UNHEX(%s)"

_SHORTER_WAIT = "SET @fencing_wait = @@SESSION.innodb_lock_wait_timeout, SESSION innodb_lock_wait_timeout = {seconds:d}"
_FORMER_WAIT = "SET SESSION innodb_lock_wait_timeout = @fencing_wait"

_TYPE = """\
SELECT data_type FROM information_schema.columns
WHERE table_schema = {schema} AND table_name = '{table}' AND column_name = '{column}'"""


class MysqlFences(FenceTable):
    """The fences in one table of MySQL or MariaDB."""

    dialect, creation, quote = MYSQL, _DDL, "`"

    def __init__(self, table: str, *, create: bool) -> None:
        super().__init__(table, create=create)
        self._name = quoted(table, self.quote)
        self._own: object = None
        """The database in which the guard raises fences, once it has raised one."""
        self._writes_alone = False

    @classmethod
    def check_column(cls, table: str, column: str) -> Steps[None]:
        """See `FenceTable`. A token has up to 53 bits."""
        schema, _, name = table.rpartition(".")
        where = f"'{schema}'" if schema else "DATABASE()"
        for (found,) in (yield _TYPE.format(schema=where, table=name, column=column), ()):
            kind = _text(found)
            if kind in _NARROW:
                msg = (
                    f"column {column} of table {table} is {kind.upper()}, and a token needs 64 bits; run: ALTER TABLE "
                    f"{quoted(table, cls.quote)} MODIFY {quoted(column, cls.quote)} BIGINT NOT NULL DEFAULT 0"
                )
                raise UsageError(msg)

    @classmethod
    def fence_of_row(cls, table: str, key: str, column: str) -> str:
        """See `FenceTable`. A plain SELECT would show the row as it was when the transaction began to read."""
        return super().fence_of_row(table, key, column) + " FOR UPDATE"

    @classmethod
    def counts_what_it_finds(cls, table: str, key: str, column: str, value: object) -> Steps[bool]:
        """
        See `FenceTable`.

        These servers count the rows that an UPDATE has changed. Only with the flag FOUND_ROWS of the connection, which
        SQLAlchemy and Django set, they count the rows that it has found.
        """
        name = quoted(column, cls.quote)
        found = f"UPDATE {quoted(table, cls.quote)} SET {name} = {name} WHERE {quoted(key, cls.quote)} = %s"  # noqa: S608
        yield found, (value,)
        ((count,),) = yield "SELECT ROW_COUNT()", ()
        return count != 0

    def has_to_be_created(self, error: Exception) -> bool:
        """See `FenceTable`."""
        return self._create and code_of(error) == NO_SUCH_TABLE

    def admit(self, transaction: Transaction, tokens: Mapping[str, Token]) -> Steps[None]:
        """Do so, and keep the rows locked until the transaction ends; several rows are locked in one order."""
        yield from self._admit(transaction, tokens, own=False)

    def raise_fence(
        self, transaction: Transaction, resource: str, token: Token, wait: float, *, own: bool = False
    ) -> Steps[None]:
        """
        Do so, and set the session's time to wait for a row back afterwards, which has whole seconds.

        With ``own`` the connection may be the guard's, and lead to another node than that of the writers.
        """
        self._refuse_autocommit(transaction)
        if own and not self._writes_alone:
            yield from self._refuse_several_writers()
        yield _SHORTER_WAIT.format(seconds=max(1, round(wait))), ()
        try:
            database = yield from self._admit(transaction, {resource: token}, own=own)
        except Exception as error:
            yield from self._wait_as_before(error)
            raise
        yield _FORMER_WAIT, ()
        if own:
            self._own = database

    def highest(self, transaction: Transaction, resource: str) -> Steps[Token | None]:
        """Return the fence of *resource*, if it has one. Create no table, because the server may be a replica."""
        try:
            return (yield from self._stored(transaction, resource))
        except Exception as error:
            if self.has_to_be_created(error):
                return None
            raise

    def _admit(self, transaction: Transaction, tokens: Mapping[str, Token], *, own: bool) -> Steps[object]:
        """Do so, and return the name of the database."""
        self._refuse_autocommit(transaction)
        asked = " UNION ALL ".join([_ASKED] * len(tokens))
        parameters: list[object] = []
        for resource, token in tokens.items():
            parameters += [_digits(resource), int(token), token.holder and _digits(token.holder)]
        yield from self._fetch(_RAISE.format(table=self._name, asked=asked), tuple(parameters))
        if not transaction.begun():
            raise UsageError(_AUTOCOMMIT)  # the transaction has ended unseen, and the statement was committed
        look = " UNION ALL ".join([_LOOK.format(table=self._name)] * len(tokens))
        rows = yield from self._fetch(look, tuple(map(_digits, tokens)))
        fences = {_undigits(row[0]): stored_fence(_undigits(row[0]), row[1], _holder(row[2])) for row in rows}
        for resource, token in tokens.items():
            fence = fences[resource]
            if token < fence or conflicting(token, fence):
                raise refusal(resource, token, fence)
        database = _text(rows[0][3])
        if own or self._own is not None:
            self._refuse_other(database)
        return database

    def _refuse_several_writers(self) -> Steps[None]:
        values = values_of((yield ask_for(*VARIABLES), ()))
        if (why := several_writers(values)) is not None:
            msg = f"SqlGuard raises no fence that other nodes may miss: {why}"
            raise UnsupportedError(msg)
        self._writes_alone = True

    def _fence(self, transaction: Transaction, resource: str) -> Steps[Sequence[Row]]:  # noqa: ARG002
        rows = yield from self._fetch(_FENCE.format(table=self._name), (_digits(resource),))
        return [(number, _holder(holder)) for number, holder in rows]

    def _fetch(self, statement: str, parameters: Parameters) -> Steps[Sequence[Row]]:
        try:
            return (yield statement, parameters)
        except Exception as error:
            code = code_of(error)
            if code == NO_SUCH_TABLE:
                error.add_note(
                    f"fencing_sdk: SqlGuard's table {self._table} is missing; run the statement of ddl('mysql') in a "
                    "migration: in a transaction it would commit what was written before"
                )
            elif code in _DENIED:
                error.add_note(f"fencing_sdk: SqlGuard needs the rights SELECT, INSERT and UPDATE on {self._table}")
            raise

    @staticmethod
    def _wait_as_before(error: Exception) -> Steps[None]:
        try:
            yield _FORMER_WAIT, ()
        except Exception as also:  # noqa: BLE001  (the connection has ended, and with it the setting)
            error.add_note(f"fencing_sdk: afterwards, {type(also).__name__}")

    @staticmethod
    def _refuse_autocommit(transaction: Transaction) -> None:
        if not (transaction.begun() or transaction.begins):
            raise UsageError(_AUTOCOMMIT)

    def _refuse_other(self, database: str) -> None:
        """Refuse a transaction that uses another table than that in which the guard raises fences."""
        if "." in self._table or self._own in {None, database}:
            return
        msg = (
            f"the fences of this transaction would be in database {shown(database)}, and SqlGuard raises them in "
            f"{shown(self._own)}; pass it the database of your transactions, or name it: "
            "table='database.fencing_fence'"
        )
        raise UsageError(msg)


def code_of(error: Exception) -> object:
    """Return the number of *error*, of a driver or of SQLAlchemy around it; None if it has none."""
    original = getattr(error, "orig", error)
    return original.args[0] if getattr(original, "args", ()) else None


def _digits(text: str) -> str:
    return text.encode().hex()


def _undigits(digits: object) -> str:
    return bytes.fromhex(_text(digits)).decode()


def _holder(digits: object) -> str | None:
    return None if digits is None else bytes.fromhex(_text(digits)).decode(errors="replace")


def _text(value: object) -> str:
    """Some drivers return bytes, by the character set of the connection."""
    return value.decode() if isinstance(value, bytes | bytearray) else str(value)


_AUTOCOMMIT = (
    "this MySQL connection commits every statement by itself, so the check and your write would be two transactions; "
    "turn autocommit off, or begin one first: connection.begin(), which asyncmy and aiomysql await (mysqlclient needs "
    "autocommit off), or with SQLAlchemy session.begin() without AUTOCOMMIT"
)
