"""Deletes the rows of locks that have been free for long: rarely, in the background, and without blocking a call."""

from __future__ import annotations

import contextlib

from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.jitter import JITTER
from fencing_sdk.backends._shared.background_task import BackgroundTask
from fencing_sdk.backends.postgresql.connection.request_queue import PostgresqlConnection

_EVERY = 600.0
"""Seconds between two sweeps of one client. The server runs at most one a minute for all clients together."""

_CLOCK = BootClock()


class Sweep:
    """
    Asks the server to delete the rows, some time after a grant.

    Args:
        connection: Where to ask.

        statement: The statement.

        retention: Seconds for which a lock must have been free.
    """

    def __init__(self, connection: PostgresqlConnection, statement: str, retention: float) -> None:
        self._connection = connection
        self._statement = statement
        self._retention = retention
        self._due = _CLOCK.now() + _EVERY * JITTER.uniform(0.05, 1.0)
        self._task = BackgroundTask()

    def start_if_due(self) -> None:
        """Start a sweep if one is due."""
        if _CLOCK.now() >= self._due:
            self._due = _CLOCK.now() + _EVERY * JITTER.uniform(0.5, 1.0)
            self._task.start(self._run)

    async def _run(self) -> None:
        with contextlib.suppress(Exception):  # a later sweep deletes the same rows
            await self._connection.ask(self._statement, (self._retention,))

    async def aclose(self) -> None:
        """Cancel a sweep that is under way."""
        await self._task.aclose()
