"""
Leased rows in an SQLite file: short transactions of a thread of their own, which read the clock under the write lock.

SQLite has one writer: a write transaction of the application that is longer than the safety buffer stops all renewals.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fencing_sdk._values.claim import HELD, Seen
from fencing_sdk._values.clock import TICK, wall_seconds
from fencing_sdk.backends._shared.error_translation import ErrorTranslation, one_line
from fencing_sdk.backends.sqlite.file import LockFile, translated
from fencing_sdk.backends.sqlite.thread import SqlThread
from fencing_sdk.errors import BackendError, BackendRefusedError
from fencing_sdk.guards.sql._databases import path_of
from fencing_sdk.guards.sql._transaction import SQLITE
from fencing_sdk.rows._store import Outcome, Renewal
from fencing_sdk.rows._table import BY, STORE, TOKEN, UNTIL, Column, RowFacts, Table, fate, seen_lease, take_shape

T = TypeVar("T")

_KINDS = {UNTIL: ("REAL", "FLOAT", "DOUBLE"), TOKEN: ("INTEGER", "BIGINT", "INT")}


class WallClock:
    """Seconds since 1970, which other processes read too."""

    def now(self) -> float:
        """See `fencing_sdk._values.clock.Clock.now`."""
        return wall_seconds()


class RowFile(LockFile):
    """The application's file, of which nothing is changed but rows."""

    def _prepare(self) -> None:
        self._connection.execute("PRAGMA schema_version")  # which reads the file

    def look(self, statement: str, **values: object) -> list[tuple[Any, ...]]:
        """Read rows without the write lock; ``:now`` is the time."""
        return self._patiently(partial(self.execute, statement, now=self._clock.now(), **values)).fetchall()


class SqliteRows:
    """
    Statements for leased rows in an SQLite file.

    Args:
        url: ``sqlite:///relative.db`` or ``sqlite:////absolute.db``.
    """

    dialect = SQLITE

    def __init__(self, url: str) -> None:
        self._path = Path(path_of(url)).absolute()
        self._thread = SqlThread(partial(RowFile, self._path, synchronous="normal", clock=WallClock()))

    async def open(self) -> None:
        """See `fencing_sdk.rows._store.RowDatabase.open`."""
        await self._ask("open", lambda _: None)

    async def check(self, table: Table) -> None:
        """See `fencing_sdk.rows._store.RowDatabase.check`."""
        await self._ask("open", partial(_check, table))

    async def claim(self, table: Table, count: int, label: str | None) -> Sequence[Mapping[str, Any]]:
        """See `fencing_sdk.rows._store.RowDatabase.claim`."""
        return await self._ask("acquire", partial(_claim, table, count, label))

    async def renew(self, table: Table, rows: Sequence[Renewal]) -> Sequence[Outcome]:
        """See `fencing_sdk.rows._store.RowDatabase.renew`."""
        return await self._ask("renew", partial(_renew, table, rows), urgent=True)

    async def give_back(self, table: Table, rows: Sequence[Renewal]) -> int:
        """See `fencing_sdk.rows._store.RowDatabase.give_back`."""
        return await self._ask("release", partial(_give_back, table, rows))

    async def leased(
        self, table: Table, keys: Sequence[str] | None, after: str | None, limit: int
    ) -> Mapping[str, Seen]:
        """See `fencing_sdk.rows._store.RowDatabase.leased`."""
        return await self._ask("list" if keys is None else "inspect", partial(_leased, table, keys, after, limit))

    async def end(self, table: Table, key: str, token: int) -> bool:
        """See `fencing_sdk.rows._store.RowDatabase.end`."""
        return await self._ask("revoke", partial(_end, table, key, token))

    async def facts(self) -> RowFacts:
        """See `fencing_sdk.rows._store.RowDatabase.facts`."""
        ((journal,),) = await self._ask("diagnose", lambda file: file.look("PRAGMA journal_mode"))
        return RowFacts(path=self._path, journal=journal)

    def listen(self, channel: str, ring: Callable[[], None]) -> None:
        """See `fencing_sdk.rows._store.RowDatabase.listen`."""

    async def aclose(self) -> None:
        """See `fencing_sdk.rows._store.RowDatabase.aclose`."""
        if (closed := self._thread.close()) is not None:
            await asyncio.wrap_future(closed)

    async def _ask(self, operation: str, do: Callable[[RowFile], T], *, urgent: bool = False) -> T:
        with ErrorTranslation(partial(translated_of, self._path), operation):
            return await asyncio.wrap_future(self._thread.submit(do, urgent=urgent))


def _check(table: Table, file: RowFile) -> None:
    name, _ = table.names()
    found = file.execute(f"PRAGMA table_info({name})").fetchall()
    primary = [row[1] for row in found if row[5]]
    indexes = [(True, primary)]
    for index in file.execute(f"PRAGMA index_list({name})").fetchall():
        columns = [row[2] for row in file.execute("SELECT * FROM pragma_index_info(:index)", index=index[1])]
        indexes.append((bool(index[2]) and not index[4], columns))
    shape = {
        column: Column(
            kind.upper(),
            bool(not_null),
            any(column in columns for _, columns in indexes),
            any(unique and columns == [column] for unique, columns in indexes),
        )
        for _, column, kind, not_null, *_ in found
    }
    take_shape(table, shape, _KINDS)


def _claim(table: Table, count: int, label: str | None, file: RowFile) -> list[dict[str, Any]]:
    name, key = table.names()
    more = (f", {BY} = :fencing_by" if table.by else "") + (f", {table.on_claim}" if table.on_claim else "")
    statement = f"""
        UPDATE {name} SET leased_until = :fencing_now + :fencing_ttl,
            lease_token = max(lease_token + 1, :fencing_ticks){more}
        WHERE {key} IN (SELECT {key} FROM {name} WHERE ({table.where}) AND leased_until < :fencing_now
            ORDER BY {table.order} LIMIT :fencing_count) RETURNING *"""  # noqa: S608
    with file.transaction() as now:
        values = {
            "fencing_now": now,
            "fencing_ttl": table.timing.ttl,
            "fencing_ticks": int(now * 1e6) // TICK,
            "fencing_by": label,
            "fencing_count": count,
        }
        cursor = file.execute(statement, **values, **table.values)
        columns = [column[0] for column in cursor.description]
        return [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]


def _renew(table: Table, rows: Sequence[Renewal], file: RowFile) -> list[Outcome]:
    name, key = table.names()
    renewal = f"""UPDATE {name} SET leased_until = :now + :ttl
        WHERE {key} = :key AND lease_token = :token AND leased_until > :now"""  # noqa: S608
    looking = f"SELECT lease_token, leased_until > :now FROM {name} WHERE {key} = :key"  # noqa: S608
    answers: list[Outcome] = []
    with file.transaction() as now:
        for each, token, ttl in rows:
            if file.execute(renewal, now=now, ttl=ttl, key=each, token=token).rowcount:
                answers.append(HELD)
            else:
                answers.append(fate(token, file.execute(looking, now=now, key=each).fetchone()))
    return answers


def _give_back(table: Table, rows: Sequence[Renewal], file: RowFile) -> int:
    name, key = table.names()
    statement = f"""UPDATE {name} SET leased_until = CASE WHEN :after > 0 THEN :now + :after ELSE 0 END
        WHERE {key} = :key AND lease_token = :token AND leased_until > 0"""  # noqa: S608
    with file.transaction() as now:
        return sum(
            file.execute(statement, now=now, after=after, key=each, token=token).rowcount for each, token, after in rows
        )


def _leased(table: Table, keys: Sequence[str] | None, after: str | None, limit: int, file: RowFile) -> dict[str, Seen]:
    name, key = table.names()
    looking = f"""SELECT CAST({key} AS TEXT), lease_token, leased_until - :now, :now, {BY if table.by else "NULL"}
        FROM {name} WHERE leased_until > :now AND"""  # noqa: S608
    if keys is None:
        rows = file.look(f"{looking} (:after IS NULL OR {key} > :after) ORDER BY {key} LIMIT :n", after=after, n=limit)
    else:
        rows = [row for each in keys for row in file.look(f"{looking} {key} = :key", key=each)]
    return {row[0]: seen_lease(*row[1:]) for row in rows}


def _end(table: Table, key: str, token: int, file: RowFile) -> bool:
    name, own = table.names()
    statement = f"""UPDATE {name} SET leased_until = :now, lease_token = max(lease_token + 1, :ticks)
        WHERE {own} = :key AND lease_token = :token AND leased_until > :now"""  # noqa: S608
    with file.transaction() as now:
        return file.execute(statement, now=now, ticks=int(now * 1e6) // TICK, key=key, token=token).rowcount > 0


def translated_of(path: object, operation: str, error: Exception) -> BackendError:
    """Return the error of the contract for *error*; a mistake in the application's SQL is a refusal."""
    code = getattr(error, "sqlite_errorcode", 0)
    if code == sqlite3.SQLITE_ERROR or isinstance(error, sqlite3.ProgrammingError | sqlite3.InterfaceError):
        return BackendRefusedError(STORE, operation, f"the database refuses: {one_line(error)}")
    translation = translated(path, operation, error)
    return type(translation)(STORE, operation, translation.detail)
