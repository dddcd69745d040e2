"""
The database of an application in a world: SQLite in memory, which the clients of the world reach by messages.

Its statements are those of SQLite files. No thread runs them, and its clock is that of the world.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from fencing_sdk._values.clock import Clock
from fencing_sdk.backends._shared.error_translation import ErrorTranslation
from fencing_sdk.backends.sqlite.file import PATIENCE, SYNCHRONOUS
from fencing_sdk.errors import BackendUnavailableError
from fencing_sdk.rows._sqlite import RowFile, SqliteRows, translated_of
from fencing_sdk.rows._table import STORE
from fencing_sdk.testing._kernel import Link
from fencing_sdk.testing._loop import Timeline

T = TypeVar("T")

_BEGINNING = 1_767_225_600.0
"""Seconds since 1970 when a world begins: the first moment of 2026."""
_PAUSE = 0.01
"""Seconds between two tries for the write lock."""


class WorldDatabase:
    """
    A database in memory, for `WorldClient.row_client` and for your own SQL. Made by `World.database`.

    Like a file of SQLite it has one writer: while a transaction is open, all others wait, of whatever client.
    """

    def __init__(self, timeline: Timeline, name: str) -> None:
        self.name = name
        self.connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        """The one connection. Its ``unixepoch()`` is the time of the world."""
        self._clock = _WallClock(timeline)
        self._file = _WorldFile(self.connection, self._clock)
        self.connection.create_function("unixepoch", 0, lambda: int(self._clock.now()))
        weakref.finalize(self, self.connection.close)

    def __repr__(self) -> str:
        return f"<WorldDatabase {self.name}>"

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[sqlite3.Connection]:
        """Open a transaction when no other one is open; commit it, or roll it back if the block raises an error."""
        while self.connection.in_transaction:  # noqa: ASYNC110  (an event of one loop wakes no task of another)
            await asyncio.sleep(_PAUSE)
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield self.connection
        except BaseException:
            self.connection.rollback()
            raise
        self.connection.commit()

    def _carry_out(self, operation: str, do: Callable[[RowFile], T]) -> T:
        """Run statements of a client, unless a transaction of the application is open."""
        if self.connection.in_transaction:
            raise BackendUnavailableError(STORE, operation, "a transaction has the write lock")
        with ErrorTranslation(partial(translated_of, self.name), operation):
            return do(self._file)


class _WallClock:
    """Seconds since 1970 in a world."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def now(self) -> float:
        """See `fencing_sdk._values.clock.Clock.now`."""
        return _BEGINNING + self._timeline.now


class _WorldFile(RowFile):
    """A connection that is open, in the place of a file."""

    def __init__(self, connection: sqlite3.Connection, clock: Clock) -> None:
        self._connection, self._clock = connection, clock
        self._durable = SYNCHRONOUS["normal"]
        self._busy = self._never = threading.Event()

    def execute(self, statement: str, **values: object) -> sqlite3.Cursor:
        """See `LockFile.execute`. Rows are plain, whatever the application has set."""
        cursor = self._connection.cursor()
        cursor.row_factory = None
        return cursor.execute(statement, values)


class WorldRows(SqliteRows):
    """Statements that travel to a database over the link of a client."""

    def __init__(self, link: Link, database: WorldDatabase) -> None:
        self._link = link
        self._database = database

    async def aclose(self) -> None:
        """Nothing is open."""

    async def _ask(self, operation: Any, do: Callable[[RowFile], T], *, urgent: bool = False) -> T:
        del urgent  # nothing waits in a line here
        loop = asyncio.get_running_loop()
        end = loop.time() + PATIENCE
        carry_out = self._database._carry_out  # noqa: SLF001  (of this module)
        while True:
            try:
                return await self._link.ask(self._database.name, operation, "rows", lambda _: carry_out(operation, do))
            except BackendUnavailableError:
                if loop.time() >= end:
                    raise
            await asyncio.sleep(_PAUSE)
