"""
A table of leased rows: its names, the SQL of the user, and the steps inside the user's transaction.

Safety is the token: a finish compares it in the transaction of the work. The database's clock decides only when a row
may be claimed again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from fencing_sdk._values.claim import LOCK, UNKNOWN, LockName, Seen
from fencing_sdk._values.clock import TICK
from fencing_sdk._values.observers import logger
from fencing_sdk._values.timing import Timing
from fencing_sdk.errors import BackendRefusedError, ConfigurationError, StaleTokenError, UsageError, shown
from fencing_sdk.guards.sql._fence_table import check_identifier, quoted
from fencing_sdk.guards.sql._transaction import MYSQL, POSTGRESQL, SQLITE, Row, Transaction, dialect_of

# ruff: noqa: S608  (names are checked, and the rest is the application's own SQL)

STORE = "RowStore"
"""Name of the store in errors."""
UNTIL, TOKEN, BY = "leased_until", "lease_token", "leased_by"
"""The columns of a lease. The last one is optional."""
NEVER = {POSTGRESQL: "TIMESTAMPTZ 'epoch'", SQLITE: "0", MYSQL: "'1970-01-01 00:00:00'"}
"""Moment in the column of a row that is free. Drivers read no infinity."""
_VALUE = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|::|:([A-Za-z_][A-Za-z0-9_]*)")
"""A text, a quoted name or a cast, which stay as they are; or a value by its name."""


class ClaimedRow(NamedTuple):
    """One row under its token."""

    key: Any
    token: int
    row: Mapping[str, Any]


@dataclass(eq=False)
class Table:
    """A table, and which of its rows are claimed in which order. All SQL is the application's own."""

    name: str
    key: str
    where: str
    order: str
    on_claim: str
    values: Mapping[str, object]
    timing: Timing
    rest: float
    """Seconds for which a row stays leased after an error of its work."""
    notify: str | None = None
    """Channel on which PostgreSQL notifies of new rows."""
    by: bool = field(default=False, init=False)
    """True if it has the column `leased_by`; known once it was checked."""
    key_type: str = field(default="", init=False)
    """The database's name of the type of the key; known once the table was checked."""
    hint: str = field(default="", init=False)
    """Hint behind the name in MySQL: without it a small table would be read, and so locked, as a whole."""
    checked: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_identifier(self.name, parameter="table", schema=True)
        check_identifier(self.key, parameter="key")
        for parameter in ("where", "order", "on_claim"):
            text = getattr(self, parameter)
            if not isinstance(text, str) or (";" in text) or "\0" in text or "--" in text:
                msg = f"{parameter} must be a part of one SQL statement, without ';' and comments, got {shown(text)}"
                raise ConfigurationError(msg)
        if self.notify is not None:
            check_identifier(self.notify, parameter="notify")
        used = {name for text in (self.where, self.order, self.on_claim) for name in names_of_values(text)}
        if used != self.values.keys():
            lacking, surplus = used - self.values.keys(), self.values.keys() - used
            what = f"lacks {', '.join(sorted(lacking))}" if lacking else f"has {', '.join(sorted(surplus))} in surplus"
            msg = f"values {what}: it gives each ':name' in where, order and on_claim its value"
            raise ConfigurationError(msg)

    def names(self, mark: str = '"') -> tuple[str, str]:
        return quoted(self.name, mark), quoted(self.key, mark)

    def lease_name(self, rows: Sequence[ClaimedRow] = ()) -> LockName:
        """Name a lease by its row, or by the first of several, and a claim by the table. Metrics keep no row apart."""
        more = f" and {len(rows) - 1} more" if rows[1:] else ""
        name = f"{self.name}/{rows[0].key}{more}" if rows else self.name
        return LockName(name, f"{self.name}/{{{self.key}}}", "row")


def names_of_values(text: str) -> list[str]:
    return [found[1] for found in _VALUE.finditer(text) if found[1]]


def with_values(text: str, write: Callable[[str], str]) -> str:
    """Replace each value in a part of a statement by what *write* makes of its name."""
    return _VALUE.sub(lambda found: write(found[1]) if found[1] else found[0], text)


Part: TypeAlias = tuple[str, Mapping[str, object]]
"""A part of a statement, and the values that it has by their names."""


def parts_of_model(
    model: type, dialect: str, key: str | None, parts: Mapping[str, object]
) -> tuple[str, str, dict[str, Any], dict[str, object]]:
    """
    Write what is claimed of a model as SQL: its table, its key, the parts of statements, and the values in them.

    Its mixin has ``__leased_rows__(dialect)``: the table, its ``keys``, a method for each part, and their ``faults``.

    Raises:
        ConfigurationError: it has no mixin, or no key of one column, or its framework refuses a part.
    """
    if (mixed_in := getattr(model, "__leased_rows__", None)) is None:
        msg = (
            f"model {model.__name__} has no LeasedRow among its bases, from fencing_sdk.rows.sqlalchemy or "
            "fencing_sdk.rows.django; or pass the name of its table"
        )
        raise ConfigurationError(msg)
    sql, texts = mixed_in(dialect), dict(parts)
    if key is None and len(sql.keys) != 1:
        msg = f"the key of model {model.__name__} is not one column: name a unique column by key="
        raise ConfigurationError(msg)
    values: dict[str, object] = {}
    for parameter, part in parts.items():
        if part is None or isinstance(part, str):
            continue
        if parameter == "on_claim" and not isinstance(part, Mapping):
            msg = f"on_claim of model {model.__name__} must map columns to their new values, got {shown(part)}"
            raise ConfigurationError(msg)
        listed = [part] if parameter == "order" and not isinstance(part, Sequence) else part
        try:
            text, own = getattr(sql, parameter)(listed)
        except (TypeError, *sql.faults) as error:
            msg = f"{parameter} of model {model.__name__} cannot be written as SQL: {type(error).__name__}: {error}"
            raise ConfigurationError(msg) from error
        texts[parameter] = with_values(text, f":fencing_{parameter}_{{}}".format)
        values |= {f"fencing_{parameter}_{name}": value for name, value in own.items()}
    return sql.table, key or sql.keys[0], texts, values


class Column(NamedTuple):
    """A column as the database describes it."""

    kind: str
    not_null: bool
    indexed: bool
    unique: bool
    """True if an index on this column alone lets a value occur once."""


def take_shape(table: Table, columns: Mapping[str, Column], kinds: Mapping[str, Sequence[str]]) -> None:
    """
    Refuse a table whose *columns* cannot have leases, and fill in what is known of it.

    Without any column the table is not there. *kinds* are the types that the columns of a lease may have here.

    Raises:
        BackendRefusedError: the table has to be changed, and how.
    """
    problem = _problem_with_key(table, columns)
    for name, types in kinds.items():
        problem = problem or _problem_with(table, name, columns.get(name), types)
    if problem is not None:
        raise BackendRefusedError(STORE, "open", problem)
    table.by, table.key_type = BY in columns, columns[table.key].kind


def _problem_with_key(table: Table, columns: Mapping[str, Column]) -> str | None:
    if not columns:
        return f"there is no table {table.name} where this user looks for tables"
    if table.key not in columns:
        return f"table {table.name} has no column {table.key}; name its key by key="
    if not columns[table.key].unique:
        return f"column {table.key} of table {table.name} is no key: give it a unique index"
    return None


def _problem_with(table: Table, name: str, column: Column | None, types: Sequence[str]) -> str | None:
    where = f"table {table.name}"
    if column is None:
        return f"{where} has no column {name}; add the columns that schema_sql() returns"
    if column.kind not in types:
        return f"column {name} of {where} must be of type {types[0]}, and is of type {column.kind}"
    if not column.not_null:
        return f"column {name} of {where} must be NOT NULL, with a default as schema_sql() has it"
    if column.indexed:
        logger.warning("rows: an index of %s has column %s, so that each renewal writes it; drop it", where, name)
    return None


def warn_of_triggers(table: Table, triggers: Sequence[Sequence[object]], cure: str) -> None:
    """Warn of the first of the *triggers* that each renewal fires."""
    for (name,) in triggers[:1]:
        logger.warning("rows: trigger %s of table %s runs at each renewal; %s", shown(str(name)), table.name, cure)


def seen_lease(token: int, remaining: float, now: float, by: str | None) -> Seen:
    """Return the lease of a row for those who look, *now* by the clock of the database. No row knows its owner."""
    return Seen(UNKNOWN, LOCK, token, None, remaining, max(0.0, now - token * TICK / 1e6), by)


@dataclass(frozen=True, slots=True)
class RowFacts:
    """A database, as a diagnosis sees it."""

    now: float | None = None
    """Seconds since 1970 by the clock of the server; None where that is this machine's."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Settings of which each ends a transaction whose client is silent for so many seconds; 0: never."""
    pooled: bool = False
    """True if a proxy gives the statements of one client to several sessions."""
    path: Path | None = None
    journal: str = "wal"

    @property
    def silence(self) -> float:
        """Seconds after which a transaction whose client is silent ends; 0: never."""
        return min(filter(None, self.limits.values()), default=0.0)

    @property
    def settings(self) -> str:
        """Names of the settings."""
        return ", ".join(self.limits)


Settling = Callable[[Transaction], Coroutine[Any, Any, None]]
"""Work in the user's transaction."""


def finishing(table: Table, rows: Sequence[ClaimedRow], columns: Mapping[str, object]) -> Settling:
    """
    End the leases of *rows* and write *columns* into all of them, if each claim is the last one of its row.

    No clock is read. The last condition makes it once: a COMMIT of unknown outcome that is tried again is refused.
    """
    for column in columns:
        check_identifier(column, parameter="a column of finish()")
        if column in {UNTIL, TOKEN, table.key}:
            msg = f"finish() writes {column} by itself; leave it out"
            raise ConfigurationError(msg)

    async def finish(opened: Transaction) -> None:
        claims = _Claims(table, rows, opened)
        sets = [*(f"{quoted(column, claims.mark)} = ?" for column in columns), f"{claims.until} = {claims.never}"]
        update = f"UPDATE {claims.name} SET {', '.join(sets)} {claims.where}"
        if opened.dialect == MYSQL:  # where an UPDATE returns no rows
            await claims.lock()
            await claims.ask(update, *columns.values(), *claims.values)
        else:
            await claims.require_all(f"{update} RETURNING {claims.key}", *columns.values())

    return finish


def admitting(table: Table, rows: Sequence[ClaimedRow]) -> Settling:
    """Lock *rows* in the user's transaction, if each claim is the last one of its row."""
    return lambda opened: _Claims(table, rows, opened).lock()


class _Claims:
    """Claims of rows as the user's transaction sees them. A statement writes each value as ``?``."""

    def __init__(self, table: Table, rows: Sequence[ClaimedRow], opened: Transaction) -> None:
        opened.refuse_autocommit()
        self._table, self._rows, self._opened = table, rows, opened
        self.mark = "`" if opened.dialect == MYSQL else '"'
        self.name, self.key = table.names(self.mark)
        self.name += table.hint
        self.token, self.until = quoted(TOKEN, self.mark), quoted(UNTIL, self.mark)
        self.never = NEVER[opened.dialect]
        self.values = [value for row in rows for value in (row.key, row.token)]
        mine = f"{self.key} = ? AND {self.token} = ?"
        if rows[1:]:
            pairs = ", ".join(["(?, ?)"] * len(rows))
            listed = f"(VALUES {pairs})" if opened.dialect == SQLITE else f"({pairs})"
            mine = f"({self.key}, {self.token}) IN {listed}"
            if opened.dialect == MYSQL:  # which finds rows by pairs in an index of both columns alone
                mine = f"{self.key} IN ({', '.join('?' * len(rows))}) AND {mine}"
                self.values = [*(row.key for row in rows), *self.values]
        self.where = f"WHERE {mine} AND {self.until} > {self.never}"

    async def ask(self, statement: str, *values: object) -> Sequence[Row]:
        own, numbers = self._opened.placeholder, count(1)
        written = re.sub(r"\?", lambda _: f"${next(numbers)}" if own == "$1" else own, statement)
        return await self._opened.fetch(written, values)

    async def lock(self) -> None:
        if self._opened.dialect == SQLITE:  # which has one lock for the file, and takes it by a write
            locking = f"UPDATE {self.name} SET {self.token} = {self.token} {self.where} RETURNING {self.key}"
        else:
            lock = "FOR UPDATE" if self._opened.dialect == MYSQL else "FOR NO KEY UPDATE"
            locking = f"SELECT {self.key} FROM {self.name} {self.where} {lock}"
        await self.require_all(locking)

    async def require_all(self, statement: str, *values: object) -> None:
        """
        Run a statement that ends with the condition of the rows. Refuse the transaction unless it finds all of them.

        Raises:
            StaleTokenError: another claim came later.
            UsageError: a row was finished before, or is gone.
        """
        if len(await self.ask(statement, *values, *self.values)) == len(self._rows):
            return
        look = f"SELECT {self.token} FROM {self.name} WHERE {self.key} = ?"
        if self._opened.dialect == MYSQL:  # a plain SELECT would show the row as it was when the transaction began
            look += " FOR UPDATE"
        for row in self._rows:
            name = self._table.lease_name([row])
            found = await self.ask(look, row.key)
            if not found:
                msg = f"row {shown(name)} was deleted while it was leased; roll back"
                raise UsageError(msg)
            if found[0][0] != row.token:
                raise StaleTokenError(name, row.token, found[0][0])
        msg = (
            f"row {shown(self._table.lease_name(self._rows))} was finished or given back already under token "
            f"{self._rows[0].token}: the commit of an earlier try may have succeeded although its answer was lost; "
            "roll back"
        )
        raise UsageError(msg)


_COLUMNS = {
    POSTGRESQL: ("TIMESTAMPTZ NOT NULL DEFAULT 'epoch'", "BIGINT NOT NULL DEFAULT 0"),
    SQLITE: ("REAL NOT NULL DEFAULT 0", "INTEGER NOT NULL DEFAULT 0"),
    MYSQL: ("DATETIME(6) NOT NULL DEFAULT '1970-01-01 00:00:00'", "BIGINT NOT NULL DEFAULT 0"),
}


_NOTIFYING = """
CREATE FUNCTION {channel}_notify() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_catalog.pg_notify('{channel}', '');
    RETURN NULL;
END $$
"""


def schema_sql(table: str, *, dialect: str, notify: str | None = None) -> Sequence[str]:
    """
    Return the statements that add the columns of a lease to *table*, for a migration.

    The defaults are constants, so no row is rewritten. Give neither column an index: each renewal would write it.

    Args:
        table: Its name, ``"jobs"`` or ``"schema.jobs"``.

        dialect: ``"postgresql"``, ``"sqlite"``, ``"mysql"`` or ``"mariadb"``.

        notify: Channel on which PostgreSQL is to notify the clients that wait for rows, once for each statement that
            inserts some: the ``notify`` of `RowClient.rows`.

    Raises:
        ConfigurationError: an argument cannot be used.
    """
    dialect = dialect_of(dialect)
    if dialect not in _COLUMNS:
        msg = f"dialect must be 'postgresql', 'sqlite', 'mysql' or 'mariadb', got {shown(dialect)}"
        raise ConfigurationError(msg)
    name = quoted(check_identifier(table, parameter="table", schema=True), "`" if dialect == MYSQL else '"')
    columns = zip((UNTIL, TOKEN), _COLUMNS[dialect], strict=True)
    statements = [f"ALTER TABLE {name} ADD COLUMN {column} {kind}" for column, kind in columns]
    if notify is not None:
        refuse_notify_elsewhere(dialect)
        channel = check_identifier(notify, parameter="notify")
        when = f"AFTER INSERT ON {name} FOR EACH STATEMENT EXECUTE FUNCTION {channel}_notify()"
        statements += [_NOTIFYING.format(channel=channel), f"CREATE TRIGGER {channel} {when}"]
    return statements


def refuse_notify_elsewhere(dialect: str) -> None:
    if dialect != POSTGRESQL:
        msg = f"notify is for PostgreSQL; on {dialect} clients look for rows every poll seconds"
        raise ConfigurationError(msg)
