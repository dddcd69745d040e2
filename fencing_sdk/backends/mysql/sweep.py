"""Deletes names that have been free for long, and what is left of clients that were killed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from fencing_sdk._mysql.driver import Rows
from fencing_sdk._values.clock import JITTER, TICK, BootClock
from fencing_sdk.abc.line import Line
from fencing_sdk.backends._shared.background_task import BackgroundTask
from fencing_sdk.backends._shared.tokens import FIRST_HYBRID
from fencing_sdk.backends.mysql.connection import NOW, SECOND, MysqlSession
from fencing_sdk.backends.mysql.store import MysqlStore, RowTakenError

# ruff: noqa: S608  (all values are numbers or hexadecimal literals)

RETENTION = 7 * 86400.0
"""Seconds for which a name must have been free before its row is deleted."""
_EVERY = 600.0
"""Seconds between two walks of one client through the tables."""
_SOON = 5.0
"""Seconds until the next sweep where the last one has left rows."""
_AT_ONCE = 1000
"""Rows of a table that one sweep looks at, or deletes, at most: renewals wait for it."""
_MESSAGES = 60
"""Seconds after which a message is of no use: its client looks at the table every few seconds."""
_CLOCK = BootClock()


class Sweeper:
    """
    Deletes names that have been free for `RETENTION`, tickets that are dead, and old messages.

    It walks through the names in their order, page by page, from a name in use on: many clients live for minutes. An
    index by their age would cost each renewal a write, and without one a table of millions would be read as a whole.

    A counter starts again when the row of its name is gone, so that names whose token is one stay. A hybrid token that
    is ahead of the clock stays until the clock has passed it.
    """

    def __init__(self, store: MysqlStore) -> None:
        self._store = store
        self._due = _CLOCK.now() + _EVERY * JITTER.uniform(0.05, 1.0)
        self.task = BackgroundTask()
        self._after: bytes | None = None
        """The last name of the page before."""

    def start_if_due(self, name: str) -> None:
        """Sweep in a task, if the last sweep was long ago."""
        if _CLOCK.now() >= self._due:
            self._after = name.encode() if self._after is None else self._after
            self._due = _CLOCK.now() + _EVERY * JITTER.uniform(0.5, 1.0)
            self.task.start(self._run)

    async def _run(self) -> None:
        with suppress(Exception):  # a later sweep deletes the same rows
            if await self._store.connection.run(self.sweep):
                self._due = _CLOCK.now() + _SOON

    async def sweep(self, session: MysqlSession) -> bool:
        """
        Delete old rows; return whether there are more rows to look at.

        Raises:
            Exception: the driver's error.
        """
        more = self._store.hybrid and await self._sweep_names(session)
        for table, key, old in (
            ("fencing_ticket", "name, number", f"dies < {NOW}"),
            ("fencing_bell", "id", f"sent < {_ago(_MESSAGES)}"),
        ):
            (found,) = await session.ask(f"SELECT {key} FROM {table} WHERE {old} LIMIT {_AT_ONCE}")
            await self._delete(session, table, key, old, found)
            more = more or len(found) == _AT_ONCE
        return more

    async def _sweep_names(self, session: MysqlSession) -> bool:
        free = f"dies < {NOW} AND last * {TICK} < {_ago(RETENTION)} AND (last = 0 OR last >= {FIRST_HYBRID})"
        page = f"WHERE name > {_literal(self._after or b'')} ORDER BY name LIMIT {_AT_ONCE}"
        (found,) = await session.ask(f"SELECT name, {free}, others FROM fencing_line {page}")
        for name, is_free, others in found:
            if is_free and others:  # a later walk deletes it, if all others were dead
                with suppress(RowTakenError):
                    await self._store.step(name.decode(), Line.settle, (), session)
        old = [(name,) for name, is_free, others in found if is_free and not others]
        await self._delete(session, "fencing_line", "name", f"{free} AND others = 0", old)
        self._after = found[-1][0] if len(found) == _AT_ONCE else b""
        return bool(self._after)

    @staticmethod
    async def _delete(session: MysqlSession, table: str, key: str, old: str, found: Rows) -> None:
        """Delete row by row: for one statement the server may read the whole table, and wait for others' rows."""
        columns = key.split(", ")

        def at(row: Sequence[int | bytes]) -> str:
            return " AND ".join(f"{column} = {_literal(value)}" for column, value in zip(columns, row, strict=True))

        async def deletions(answers: Sequence[Rows]) -> tuple[list[str], None]:
            return [f"DELETE FROM {table} WHERE {at(row)}" for (row,) in filter(None, answers)], None

        if found:
            locked = [f"SELECT {key} FROM {table} WHERE {at(row)} AND {old} FOR UPDATE SKIP LOCKED" for row in found]
            await session.transact(locked, deletions)


def _literal(value: int | bytes) -> str:
    return f"{value:d}" if isinstance(value, int) else f"x'{value.hex()}'"


def _ago(seconds: float) -> str:
    return f"{NOW} - {int(seconds * SECOND):d}"
