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

from fencing_sdk._values.claim import Seen
from fencing_sdk._values.clock import TICK, wall_seconds
from fencing_sdk.backends._shared.error_translation import ErrorTranslation, one_line
from fencing_sdk.backends.sqlite.file import LockFile, translated
from fencing_sdk.backends.sqlite.thread import SqlThread
from fencing_sdk.errors import BackendError, BackendRefusedError
from fencing_sdk.guards.sql._databases import path_of
from fencing_sdk.guards.sql._transaction import SQLITE
from fencing_sdk.rows._store import Renewal
from fencing_sdk.rows._table import BY, STORE, TOKEN, UNTIL, Column, RowFacts, Table, seen_lease, take_shape

# ruff: noqa: S608  (names are checked, and the rest is the application's own SQL)

T = TypeVar("T")

_KINDS = {UNTIL: ("REAL", "FLOAT", "DOUBLE"), TOKEN: ("INTEGER", "BIGINT", "INT")}


class WallClock:
    """Seconds since 1970, which other processes read too."""

    now = staticmethod(wall_seconds)


class RowFile(LockFile):
    """The application's file, of which nothing is changed but rows."""

    def _prepare(self) -> None:
        self._connection.execute("PRAGMA schema_version")  # which reads the file

    def look(self, statement: str, **values: object) -> list[tuple[Any, ...]]:
        """Read rows without the write lock; ``:now`` is the time."""
        return self._patiently(partial(self.execute, statement, now=self._clock.now(), **values)).fetchall()


class SqliteRows:
    """Statements for leased rows in an SQLite file."""

    dialect = SQLITE

    def __init__(self, url: str) -> None:
        self._path = Path(path_of(url)).absolute()
        self._thread = SqlThread(partial(RowFile, self._path, synchronous="normal", clock=WallClock()))

    async def open(self) -> None:
        await self._ask("open", lambda _: None)

    async def check(self, table: Table) -> None:
        name, _ = table.names()

        def look(file: RowFile) -> dict[str, Column]:
            found = file.execute(f"PRAGMA table_info({name})").fetchall()
            indexes = [(True, [row[1] for row in found if row[5]])]  # the primary key
            for index in file.execute(f"PRAGMA index_list({name})").fetchall():
                columns = [row[2] for row in file.execute("SELECT * FROM pragma_index_info(:index)", index=index[1])]
                indexes.append((bool(index[2]) and not index[4], columns))
            return {
                column: Column(
                    kind.upper(),
                    bool(not_null),
                    any(column in columns for _, columns in indexes),
                    any(unique and columns == [column] for unique, columns in indexes),
                )
                for _, column, kind, not_null, *_ in found
            }

        take_shape(table, await self._ask("open", look), _KINDS)

    async def claim(self, table: Table, count: int, label: str | None) -> Sequence[Mapping[str, Any]]:
        name, key = table.names()
        more = (f", {BY} = :fencing_by" if table.by else "") + (f", {table.on_claim}" if table.on_claim else "")
        statement = f"""
            UPDATE {name} SET leased_until = :fencing_now + :fencing_ttl,
                lease_token = max(lease_token + 1, :fencing_ticks){more}
            WHERE {key} IN (SELECT {key} FROM {name} WHERE ({table.where}) AND leased_until < :fencing_now
                ORDER BY {table.order} LIMIT :fencing_count) RETURNING *"""
        values = {**table.values, "fencing_ttl": table.timing.ttl, "fencing_by": label, "fencing_count": count}

        def claim(file: RowFile) -> list[dict[str, Any]]:
            with file.transaction() as now:
                cursor = file.execute(statement, fencing_now=now, fencing_ticks=int(now * 1e6) // TICK, **values)
                columns = [column[0] for column in cursor.description]
                return [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]

        return await self._ask("acquire", claim)

    async def lease_for(self, table: Table, rows: Sequence[Renewal], *, running: bool) -> set[tuple[Any, int]]:
        name, key = table.names()
        statement = f"""
            UPDATE {name} SET leased_until = CASE WHEN :seconds > 0 THEN :now + :seconds ELSE 0 END
            WHERE {key} = :key AND lease_token = :token AND leased_until > {":now" if running else 0}"""

        def write(file: RowFile) -> set[tuple[Any, int]]:
            with file.transaction() as now:
                return {
                    (each, token)
                    for each, token, seconds in rows
                    if file.execute(statement, now=now, seconds=seconds, key=each, token=token).rowcount
                }

        return await self._ask("renew" if running else "release", write, urgent=running)

    async def last_claims(self, table: Table, keys: Sequence[Any]) -> Mapping[Any, tuple[int, bool]]:
        name, key = table.names()
        looking = f"SELECT lease_token, leased_until > :now FROM {name} WHERE {key} = :key"

        def look(file: RowFile) -> dict[Any, tuple[int, bool]]:
            return {each: (row[0], bool(row[1])) for each in keys for row in file.look(looking, key=each)}

        return await self._ask("renew", look, urgent=True)

    async def leased(
        self, table: Table, keys: Sequence[str] | None, after: str | None, limit: int
    ) -> Mapping[str, Seen]:
        name, key = table.names()
        looking = f"""
            SELECT CAST({key} AS TEXT), lease_token, leased_until - :now, :now, {BY if table.by else "NULL"}
            FROM {name} WHERE leased_until > :now AND"""
        page = f"{looking} (:after IS NULL OR {key} > :after) ORDER BY {key} LIMIT :limit"

        def look(file: RowFile) -> dict[str, Seen]:
            if keys is None:
                rows = file.look(page, after=after, limit=limit)
            else:
                rows = [row for each in keys for row in file.look(f"{looking} {key} = :key", key=each)]
            return {row[0]: seen_lease(*row[1:]) for row in rows}

        return await self._ask("list" if keys is None else "inspect", look)

    async def end(self, table: Table, key: str, token: int) -> bool:
        name, own = table.names()
        statement = f"""
            UPDATE {name} SET leased_until = :now, lease_token = max(lease_token + 1, :ticks)
            WHERE {own} = :key AND lease_token = :token AND leased_until > :now"""

        def write(file: RowFile) -> bool:
            with file.transaction() as now:
                ticks = int(now * 1e6) // TICK
                return file.execute(statement, now=now, ticks=ticks, key=key, token=token).rowcount > 0

        return await self._ask("revoke", write)

    async def facts(self) -> RowFacts:
        ((journal,),) = await self._ask("diagnose", lambda file: file.look("PRAGMA journal_mode"))
        return RowFacts(path=self._path, journal=journal)

    def listen(self, channel: str, ring: Callable[[], None]) -> None: ...

    async def aclose(self) -> None:
        if (closed := self._thread.close()) is not None:
            await asyncio.wrap_future(closed)

    async def _ask(self, operation: str, do: Callable[[RowFile], T], *, urgent: bool = False) -> T:
        with ErrorTranslation(partial(translated_of, self._path), operation):
            return await asyncio.wrap_future(self._thread.submit(do, urgent=urgent))


def translated_of(path: object, operation: str, error: Exception) -> BackendError:
    """Return the error of the contract for *error*; a mistake in the application's SQL is a refusal."""
    code = getattr(error, "sqlite_errorcode", 0)
    if code == sqlite3.SQLITE_ERROR or isinstance(error, sqlite3.ProgrammingError | sqlite3.InterfaceError):
        return BackendRefusedError(STORE, operation, f"the database refuses: {one_line(error)}")
    translation = translated(path, operation, error)
    return type(translation)(STORE, operation, translation.detail)
