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

from collections.abc import Mapping, Sequence

from fencing_sdk._mysql import VARIABLES, ask_for, several_writers, values_of
from fencing_sdk._values.token import Token, conflicting
from fencing_sdk.errors import UnsupportedError, UsageError, shown
from fencing_sdk.guards import refusal
from fencing_sdk.guards.sql._fence_table import FenceTable, quoted, stored_fence
from fencing_sdk.guards.sql._transaction import MYSQL, Parameters, Row, Transaction

_NO_SUCH_TABLE = 1146
_LOCK_WAIT = 1205
_OUTDATED = 1020
"""MariaDB's error with ``innodb_snapshot_isolation``: the row has changed since the transaction first read."""
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

    dialect, creation, quote, tries = MYSQL, _DDL, "`", 10

    def __init__(self, table: str, *, create: bool) -> None:
        super().__init__(table, create=create)
        self._own: str | None = None
        """The database in which the guard raises fences, once it has raised one."""
        self._writes_alone = False

    @classmethod
    async def check_column(cls, transaction: Transaction, table: str, column: str) -> None:
        """See `FenceTable`. A token has up to 53 bits."""
        schema, _, name = table.rpartition(".")
        where = f"'{schema}'" if schema else "DATABASE()"
        for (found,) in await transaction.fetch(_TYPE.format(schema=where, table=name, column=column), ()):
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
    async def counts_found_rows(cls, transaction: Transaction, names: tuple[str, str, str], key: object) -> bool:
        """
        See `FenceTable`.

        These servers count the rows that an UPDATE has changed. Only with the flag FOUND_ROWS of the connection, which
        SQLAlchemy and Django set, they count the rows that it has found.
        """
        table, key_column, column = (quoted(name, cls.quote) for name in names)
        await transaction.fetch(f"UPDATE {table} SET {column} = {column} WHERE {key_column} = %s", (key,))  # noqa: S608
        ((count,),) = await transaction.fetch("SELECT ROW_COUNT()", ())
        return bool(count)

    def has_waited(self, error: Exception) -> bool:
        """See `FenceTable`."""
        return _code_of(error) == _LOCK_WAIT

    def has_to_be_created(self, error: Exception) -> bool:
        """See `FenceTable`."""
        return self._create and _code_of(error) == _NO_SUCH_TABLE

    async def admit(self, transaction: Transaction, tokens: Mapping[str, Token]) -> None:
        """See `FenceTable`. The rows stay locked until the transaction ends."""
        await self._admit(transaction, tokens)

    async def raise_fence(
        self, transaction: Transaction, resource: str, token: Token, wait: float, *, own: bool
    ) -> None:
        """
        See `FenceTable`. The session's time to wait for a row has whole seconds, and is set back afterwards.

        With *own* the connection may be the guard's, and lead to another node than that of the writers.
        """
        transaction.refuse_autocommit()
        if own and not self._writes_alone:
            values = values_of(await transaction.fetch(ask_for(*VARIABLES), ()))
            if (why := several_writers(values)) is not None:
                msg = f"SqlGuard raises no fence that other nodes may miss: {why}"
                raise UnsupportedError(msg)
            self._writes_alone = True
        await transaction.fetch(_SHORTER_WAIT.format(seconds=max(1, round(wait))), ())
        try:
            database = await self._admit(transaction, {resource: token})
        except Exception as error:
            try:
                await transaction.fetch(_FORMER_WAIT, ())
            except Exception as also:  # noqa: BLE001  (the connection has ended, and with it the setting)
                error.add_note(f"fencing_sdk: afterwards, {type(also).__name__}")
            raise
        await transaction.fetch(_FORMER_WAIT, ())
        if own:
            self._own = database

    async def highest(self, transaction: Transaction, resource: str) -> Token | None:
        """See `FenceTable`. Create no table, because the server may be a replica."""
        try:
            return await super().highest(transaction, resource)
        except Exception as error:
            if self.has_to_be_created(error):
                return None
            raise

    async def _admit(self, transaction: Transaction, tokens: Mapping[str, Token]) -> str:
        """Check the tokens, write the fences, and return the name of the database."""
        transaction.refuse_autocommit()
        asked = " UNION ALL ".join([_ASKED] * len(tokens))
        parameters: list[object] = []
        for resource, token in tokens.items():
            parameters += [_digits(resource), int(token), token.holder and _digits(token.holder)]
        await self._fetch(transaction, _RAISE.format(table=self._name, asked=asked), tuple(parameters))
        transaction.refuse_committed()
        look = " UNION ALL ".join([_LOOK.format(table=self._name)] * len(tokens))
        rows = await self._fetch(transaction, look, tuple(map(_digits, tokens)))
        for digits, number, holder, _ in rows:
            resource = bytes.fromhex(_text(digits)).decode()
            token, fence = tokens[resource], stored_fence(resource, number, _holder(holder))
            if token < fence or conflicting(token, fence):
                raise refusal(resource, token, fence)
        database = _text(rows[0][3])
        if "." not in self._table and self._own not in {None, database}:
            msg = (
                f"the fences of this transaction would be in database {shown(database)}, and SqlGuard raises them in "
                f"{shown(self._own)}; pass it the database of your transactions, or name it: "
                "table='database.fencing_fence'"
            )
            raise UsageError(msg)
        return database

    async def _fence(self, transaction: Transaction, resource: str) -> Sequence[Row]:
        rows = await self._fetch(transaction, _FENCE.format(table=self._name), (_digits(resource),))
        return [(number, _holder(holder)) for number, holder in rows]

    async def _fetch(self, transaction: Transaction, statement: str, parameters: Parameters) -> Sequence[Row]:
        try:
            return await transaction.fetch(statement, parameters)
        except Exception as error:
            code = _code_of(error)
            if code == _NO_SUCH_TABLE:
                error.add_note(
                    f"fencing_sdk: SqlGuard's table {self._table} is missing; run the statement of ddl('mysql') in a "
                    "migration: in a transaction it would commit what was written before"
                )
            elif code in _DENIED:
                error.add_note(f"fencing_sdk: SqlGuard needs the rights SELECT, INSERT and UPDATE on {self._table}")
            elif code == _OUTDATED:
                error.add_note(
                    "fencing_sdk: this transaction has read before the fence was raised, and innodb_snapshot_isolation "
                    "is on; with fences=[guard] every try fails so: end the transaction before you take the lock"
                )
            raise


def _code_of(error: Exception) -> object:
    """Return the number of *error*, of a driver or of SQLAlchemy around it; None if it has none."""
    original = getattr(error, "orig", error)
    return original.args[0] if getattr(original, "args", ()) else None


def _digits(text: str) -> str:
    return text.encode().hex()


def _holder(digits: object) -> str | None:
    return None if digits is None else bytes.fromhex(_text(digits)).decode(errors="replace")


def _text(value: object) -> str:
    """Some drivers return bytes, by the character set of the connection."""
    return value.decode() if isinstance(value, bytes | bytearray) else str(value)
