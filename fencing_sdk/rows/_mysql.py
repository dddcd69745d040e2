"""
Leased rows in MySQL and MariaDB: the statements, on connections of their own, which no pool of the application starves.

A claim looks for free rows without a lock, and locks as many of them as it takes. A look that locks would lock every
row that it passes, those in flight too, until the transaction ends: no renewal would get through.

A step is a transaction of two texts: the first one locks rows, and passes over those that another transaction has
locked; the second one writes, and commits. Each statement reads the clock after its rows were locked. The time zone of
the session is UTC, also for ``NOW()`` in the conditions of the application.

The server may forget in a crash what it committed last: a claim that was forgotten costs a repetition of its work, and
tokens go on growing, because they follow the server's clock.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID

from fencing_sdk._mysql import ask_for, values_of
from fencing_sdk._mysql.driver import Rows, code_of, columns_of, hexadecimal
from fencing_sdk._mysql.url import read_mysql_query
from fencing_sdk._values.claim import Seen
from fencing_sdk._values.clock import TICK
from fencing_sdk.backends._shared.error_translation import ErrorTranslation, one_line
from fencing_sdk.backends._shared.request_queue import RequestConnection
from fencing_sdk.backends.mysql.connection import NOW, SECOND, MysqlDialer, MysqlSession
from fencing_sdk.backends.mysql.errors import translated
from fencing_sdk.backends.mysql.store import adapt
from fencing_sdk.errors import BackendError, BackendRefusedError
from fencing_sdk.guards.sql._fence_table import quoted
from fencing_sdk.guards.sql._transaction import MYSQL
from fencing_sdk.rows._store import Renewal
from fencing_sdk.rows._table import (
    BY,
    NEVER,
    STORE,
    TOKEN,
    UNTIL,
    Column,
    RowFacts,
    Table,
    seen_lease,
    take_shape,
    warn_of_triggers,
    with_values,
)

# ruff: noqa: S608  (names are checked, values are literals, and the rest is the application's own SQL)

_PATIENCE = 4.0
_SPARE, _MORE = 8, 200
"""Free rows that a claim looks at besides those that it wants, as others may have locked some: first, and then."""
_NOW = "NOW(6)"
_NEXT = f"GREATEST({TOKEN} + 1, {NOW} DIV {TICK})"
_LIMITS = ("idle_write_transaction_timeout", "idle_transaction_timeout", "wait_timeout")
"""Settings that end a transaction whose client is silent. A server has only some of them."""
_KINDS = {UNTIL: ("datetime(6)",), TOKEN: ("bigint", "bigint unsigned")}
_OF_THE_APPLICATION = {
    *(1048, 1052, 1054, 1062, 1064, 1109, 1111, 1142, 1143, 1146, 1176, 1241, 1242, 1264, 1267, 1292, 1305, 1364, 1365),
    *(1366, 1370, 1406, 1451, 1452, 1582, 1644, 1690, 3819, 4025),
}
"""Numbers of a mistake in the SQL, the values, the columns or the rights of the application."""


@dataclass(slots=True)
class _Sql:
    """Parts of the statements for one table."""

    free: str
    """Condition of a row that may be claimed."""
    order: str
    on_claim: str
    kept: str
    """Assignments that keep what the server itself would change at each renewal."""
    flows: bool = False
    """True if the last claim found a row."""


class MysqlRows:
    """Statements for leased rows on MySQL, from version 8.0 on, and MariaDB, from version 10.6 on."""

    dialect = MYSQL

    def __init__(self, url: str) -> None:
        self._dial = MysqlDialer(read_mysql_query(url), create=False, patience=_PATIENCE, tables=False).dial
        self._renewals = RequestConnection(self._dial, _adapt)
        self._claims = RequestConnection(self._dial, _adapt)
        self._sql: dict[Table, _Sql] = {}

    async def open(self) -> None:
        await self._ask("open", "DO 0")

    async def check(self, table: Table) -> None:
        schema, _, short = table.name.rpartition(".")
        database = f"'{schema}'" if schema else "DATABASE()"
        this = f"table_schema = {database} AND table_name = '{short}'"
        columns, parts, engines, triggers = await self._ask(
            "open",
            f"SELECT column_name, column_type, is_nullable, extra FROM information_schema.columns WHERE {this}",
            "SELECT index_name, column_name, non_unique, sub_part FROM information_schema.statistics "
            f"WHERE {this} ORDER BY index_name <> 'PRIMARY', index_name, seq_in_index",
            f"SELECT engine FROM information_schema.tables WHERE {this}",
            "SELECT trigger_name FROM information_schema.triggers WHERE event_manipulation = 'UPDATE' "
            f"AND event_object_schema = {database} AND event_object_table = '{short}'",
        )
        indexes: dict[str, list[str | None]] = {}
        unique: dict[str, bool] = {}
        for index, column, non_unique, cut in parts:
            indexes.setdefault(index, []).append(column)
            unique[index] = not non_unique and cut is None
        keys = {each[0]: index for index, each in reversed(indexes.items()) if len(each) == 1 and unique[index]}
        shape = {
            name: Column(
                re.sub(r"int\(\d+\)", "int", kind.lower()),
                nullable == "NO",
                any(name in each for each in indexes.values()),
                name in keys,
            )
            for name, kind, nullable, _ in columns
        }
        take_shape(table, shape, _KINDS)
        if (engine := str(engines[0][0])) != "InnoDB":
            detail = (
                f"table {table.name} has the engine {engine}, and only InnoDB locks rows; ALTER TABLE ... ENGINE=InnoDB"
            )
            raise BackendRefusedError(STORE, "open", detail)
        table.hint = " FORCE INDEX (`{}`)".format(keys[table.key].replace("`", "``"))
        warn_of_triggers(table, triggers, "let it do nothing where no other column differs")
        changing = [
            quoted(row[0], "`") for row in columns if "on update" in str(row[3]).lower() and row[0].isidentifier()
        ]
        self._sql[table] = _sql_of(table, "".join(f", {column} = {column}" for column in changing))

    async def claim(self, table: Table, count: int, label: str | None) -> Sequence[Mapping[str, Any]]:
        with ErrorTranslation(_translated, "acquire"):
            name, key = table.names("`")
            sql = self._sql[table]
            by = f", {BY} = {_literal(label)}" if table.by else ""
            sets = f"{sql.on_claim}{UNTIL} = {_in(table.timing.ttl)}, {TOKEN} = {_NEXT}{by}"

            def look(spare: int) -> str:
                free = f"{sql.free} AND {UNTIL} < {_NOW}"
                return (
                    f"SELECT {key} FROM (SELECT {key} AS fencing_key FROM {name} WHERE {free} ORDER BY {sql.order} "
                    f"LIMIT {count + spare}) AS fencing_free STRAIGHT_JOIN {name}{table.hint} ON {key} = fencing_key "
                    f"WHERE {free} LIMIT {count} FOR UPDATE SKIP LOCKED"
                )

            async def work(session: MysqlSession, found: Sequence[Rows]) -> tuple[list[str], Sequence[Any]]:
                if len(found[0]) < count and (found[0] or sql.flows):
                    found = await session.ask(look(_MORE))
                keys = [row[0] for row in found[0]]
                sql.flows = bool(keys)
                those = f"WHERE {_among(table, keys)}"
                texts = [f"UPDATE {name}{table.hint} SET {sets} {those}", f"SELECT * FROM {name}{table.hint} {those}"]
                return (texts if keys else []), keys

            keys, last = await self._claims.run(
                lambda session: session.transact([look(_SPARE)], partial(work, session))
            )
            if not keys:
                return []
            columns = columns_of(last[1])
            rows = {row[table.key]: row for row in (dict(zip(columns, row, strict=True)) for row in last[1])}
            return [rows[key] for key in keys]

    async def lease_for(self, table: Table, rows: Sequence[Renewal], *, running: bool) -> set[tuple[Any, int]]:
        name, key = table.names("`")
        asked = {(key, token): seconds for key, token, seconds in rows}

        async def work(found: Sequence[Rows]) -> tuple[list[str], set[tuple[Any, int]]]:
            mine = {(row[0], row[1]) for row in found[0]} & asked.keys()
            ends: dict[float, list[Any]] = {}
            for each in mine:
                ends.setdefault(asked[each], []).append(each[0])
            texts = []
            for seconds, keys in ends.items():
                sets = f"{UNTIL} = {_in(seconds) if seconds > 0 else NEVER[MYSQL]}{self._sql[table].kept}"
                texts.append(f"UPDATE {name}{table.hint} SET {sets} WHERE {_among(table, keys)}")
            return texts, mine

        with ErrorTranslation(_translated, "renew" if running else "release"):
            above = _NOW if running else NEVER[MYSQL]
            those = f"{_among(table, [key for key, _, _ in rows])} AND {UNTIL} > {above}"
            lock = f"SELECT {key}, {TOKEN} FROM {name}{table.hint} WHERE {those} FOR UPDATE SKIP LOCKED"
            done, _ = await self._renewals.run(lambda session: session.transact([lock], work), urgent=True)
        return done

    async def last_claims(self, table: Table, keys: Sequence[Any]) -> Mapping[Any, tuple[int, bool]]:
        name, key = table.names("`")
        look = f"SELECT {key}, {TOKEN}, {UNTIL} > {_NOW} FROM {name}{table.hint} WHERE {_among(table, keys)}"
        (seen,) = await self._ask("renew", look, urgent=True)
        return {row[0]: (row[1], bool(row[2])) for row in seen}

    async def leased(
        self, table: Table, keys: Sequence[str] | None, after: str | None, limit: int
    ) -> Mapping[str, Seen]:
        name, key = table.names("`")
        those = f" AND {key} IN ({', '.join(_key(table, each) for each in keys)})" if keys else ""
        if after is not None:
            those = f" AND {key} > {_key(table, after)}"
        (found,) = await self._ask(
            "list" if keys is None else "inspect",
            f"SELECT {key}, {TOKEN}, TIMESTAMPDIFF(MICROSECOND, {_NOW}, {UNTIL}), {NOW}, {BY if table.by else 'NULL'} "
            f"FROM {name} WHERE {UNTIL} > {_NOW}{those} ORDER BY {key} LIMIT {limit:d}",
        )
        return {
            str(key): seen_lease(token, remaining / SECOND, now / SECOND, by)
            for key, token, remaining, now, by in found
        }

    async def end(self, table: Table, key: str, token: int) -> bool:
        """Take a row away. Wait for a transaction that has it locked, but not long."""
        name, own = table.names("`")
        those = f"{own} = {_key(table, key)} AND {TOKEN} = {token:d} AND {UNTIL} > {_NOW}"
        ending = f"UPDATE {name} SET {UNTIL} = {_NOW}, {TOKEN} = {_NEXT} WHERE {those}"
        with ErrorTranslation(_translated, "revoke"):
            answers = await self._renewals.run(lambda session: session.change(ending, "SELECT ROW_COUNT()"))
        return bool(answers[-1][0][0])

    async def facts(self) -> RowFacts:
        limits, ((now,),) = await self._ask("diagnose", ask_for(*_LIMITS), f"SELECT {NOW}")
        return RowFacts(now / SECOND, {name: float(value) for name, value in values_of(limits).items()})

    def listen(self, channel: str, ring: Callable[[], None]) -> None: ...

    async def aclose(self) -> None:
        for connection in (self._claims, self._renewals):
            await connection.aclose()

    async def _ask(self, operation: str, *statements: str, urgent: bool = False) -> Sequence[Rows]:
        with ErrorTranslation(_translated, operation):
            return await self._renewals.run(lambda session: session.ask(*statements), urgent=urgent)


def _sql_of(table: Table, kept: str) -> _Sql:
    """Write the values into the SQL of the application. A comment in it ends with its line."""
    where, order, on_claim = (
        with_values(text, lambda value: _literal(table.values[value]))
        for text in (table.where, table.order, table.on_claim)
    )
    # The assignments run from left to right: those of the application see the lease as it was.
    return _Sql(f"({where}\n)", f"{order}\n", f"{on_claim}\n, " if on_claim else "", kept)


def _among(table: Table, keys: Sequence[Any]) -> str:
    _, key = table.names("`")
    return f"{key} IN ({', '.join(map(_literal, keys))})"


def _key(table: Table, text: str) -> str:
    """Write a key that someone has typed. A text that is no number would be compared as 0."""
    if "int" in table.key_type and not re.fullmatch(r"-?\d+", text, re.ASCII):
        return "NULL"
    return _literal(text)


def _in(seconds: float) -> str:
    return f"{_NOW} + INTERVAL {math.ceil(seconds * SECOND)} MICROSECOND"


def _literal(value: object) -> str:
    """
    Write *value* as a literal that no quoting mode can change.

    Raises:
        BackendRefusedError: it has another type than the values of SQL, or is no valid Unicode.
    """
    text = None
    match value:
        case None | bool():
            text = "NULL" if value is None else str(value).upper()
        case int():
            text = f"{value:d}"
        case float() if math.isfinite(value):
            text = float.__repr__(value)
            text += "" if "e" in text else "e0"  # without an exponent it would be decimal
        case Decimal() if value.is_finite():
            text = f"{value:f}"
        case str() | UUID():
            with suppress(UnicodeError):
                text = f"_utf8mb4 {hexadecimal(str.__str__(value) if isinstance(value, str) else str(value))}"
        case bytes() | bytearray() | memoryview():
            text = f"_binary x'{value.hex()}'"
        case datetime():
            moment = value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)
            text = f"TIMESTAMP '{moment.isoformat(' ', 'microseconds')}'"
        case date():
            text = f"DATE '{value.isoformat()}'"
    if text is None:
        detail = (
            f"a value of values= cannot be written in SQL ({type(value).__name__}): "
            "it takes numbers, valid Unicode, bytes, UUIDs, dates and times"
        )
        raise BackendRefusedError(STORE, "acquire", detail)
    return text


def _adapt(session: MysqlSession, error: Exception) -> bool:
    return code_of(error) not in _OF_THE_APPLICATION and adapt(session, error)


def _translated(operation: str, error: Exception) -> BackendError:
    if (code := code_of(error)) in _OF_THE_APPLICATION:
        return BackendRefusedError(STORE, operation, f"the database refuses: {one_line(*error.args[1:2])} ({code})")
    translation = translated(operation, error)
    return type(translation)(STORE, operation, translation.detail)
