"""Deletes the rows that no call asks for again, without waiting for a row that another transaction has locked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from fencing_sdk._mysql.driver import Rows
from fencing_sdk._values.clock import JITTER, TICK, BootClock
from fencing_sdk.backends._shared import rules
from fencing_sdk.backends._shared.background_task import BackgroundTask
from fencing_sdk.backends._shared.request_queue import RequestConnection
from fencing_sdk.backends.mysql.rows import NOW, SECOND
from fencing_sdk.backends.mysql.session import MysqlSession

_EVERY = 600.0
"""Seconds between two walks of one client through the tables."""
_SOON = 5.0
"""Seconds until the next sweep where the last one has left rows."""
_AT_ONCE = 1000
"""Rows of a table that one sweep looks at, or deletes, at most: renewals wait for it."""
_MESSAGES = 60
"""Seconds after which a message is of no use: its client looks at the table every few seconds."""
_SIGNS = 600
"""Seconds without a sign of life after which waiters are gone for sure. They lost their places long before."""
_CLOCK = BootClock()


class Sweeper:
    """
    Deletes locks that have been free for *retention* seconds, and what is left of clients that were killed.

    It walks through the locks in the order of their names, page by page. An index by their age would cost each renewal
    a write, and without one a table of millions would be read as a whole, while renewals wait.

    Args:
        connection: On which it runs.

        retention: None deletes no locks. A counter starts again when the row of its lock is gone, so one that another
            client has written stays. Hybrid tokens keep growing, and one that is ahead of the clock stays until the
            clock has passed it.
    """

    def __init__(self, connection: RequestConnection[MysqlSession], retention: float | None) -> None:
        self._connection = connection
        self._retention = retention
        self._due = _CLOCK.now() + _EVERY * JITTER.uniform(0.05, 1.0)
        self._task = BackgroundTask()
        self._after: bytes | None = None
        """The last name of the page before. The first page begins at a name in use: many clients live for minutes."""
        self._from_middle = False
        """True until the end of the table is reached: the names before the first page have not been looked at."""

    def start_if_due(self, name: str) -> None:
        """Sweep in a task, if the last sweep was long ago."""
        if _CLOCK.now() >= self._due:
            if self._after is None:
                self._after, self._from_middle = name.encode(), True
            self._due = _CLOCK.now() + _EVERY * JITTER.uniform(0.5, 1.0)
            self._task.start(self._run)

    async def aclose(self) -> None:
        """End the task."""
        await self._task.aclose()

    async def _run(self) -> None:
        with suppress(Exception):  # a later sweep deletes the same rows
            if await self._connection.run(self.sweep):
                self._due = _CLOCK.now() + _SOON

    async def sweep(self, session: MysqlSession) -> bool:
        """
        Delete old rows; return whether there are more rows to look at.

        Raises:
            Exception: the driver's error.
        """
        more = self._retention is not None and await self._sweep_locks(session, self._retention)
        dead = f"since < {_ago(_SIGNS)} AND waiter_group NOT IN (SELECT waiter_group FROM fencing_sign)"  # noqa: S608
        for table, key, old in (
            ("fencing_revoked", "name, owner", f"until < {NOW}"),
            ("fencing_bell", "id", f"sent < {_ago(_MESSAGES)}"),
            ("fencing_sign", "waiter_group", f"seen < {_ago(_SIGNS)}"),
            ("fencing_waiter", "number", dead),
        ):
            (found,) = await session.ask(f"SELECT {key} FROM {table} WHERE {old} LIMIT {_AT_ONCE}")  # noqa: S608
            await _delete(session, table, key, old, found)
            more = more or len(found) == _AT_ONCE
        return more

    async def _sweep_locks(self, session: MysqlSession, retention: float) -> bool:
        hybrid = f"(token = 0 OR token >= {rules.FIRST_HYBRID})"
        old = f"held_until < {_ago(retention)} AND token * {TICK} < {NOW} AND {hybrid}"
        page = f"WHERE name > {_literal(self._after or b'')} ORDER BY name LIMIT {_AT_ONCE}"
        (found,) = await session.ask(f"SELECT name, {old} FROM fencing_lock {page}")  # noqa: S608
        await _delete(session, "fencing_lock", "name", old, [(name,) for name, is_old in found if is_old])
        at_end = len(found) < _AT_ONCE
        more = not at_end or self._from_middle
        self._from_middle = self._from_middle and not at_end
        self._after = b"" if at_end else found[-1][0]
        return more


async def _delete(session: MysqlSession, table: str, key: str, old: str, rows: Rows) -> None:
    if rows:
        among = f"({key}) IN ({', '.join(map(_row, rows))}) AND {old}"
        free = f"SELECT {key} FROM {table} WHERE {among} FOR UPDATE SKIP LOCKED"  # noqa: S608
        await session.transact([free], partial(_deletions, table, key))


async def _deletions(table: str, key: str, answers: Sequence[Rows]) -> tuple[list[str], None]:
    """Delete row by row: for one statement the server may read the whole table, and wait for the rows of others."""
    (free,) = answers
    columns = key.split(", ")
    rows = [[f"{column} = {_literal(value)}" for column, value in zip(columns, row, strict=True)] for row in free]
    return [f"DELETE FROM {table} WHERE {' AND '.join(row)}" for row in rows], None  # noqa: S608


def _row(values: Sequence[Any]) -> str:
    return f"({', '.join(map(_literal, values))})"


def _literal(value: int | bytes) -> str:
    return f"{value:d}" if isinstance(value, int) else f"x'{value.hex()}'"


def _ago(seconds: float) -> str:
    return f"{NOW} - {int(seconds * SECOND):d}"
