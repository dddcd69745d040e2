"""The clean-up of rows that nobody has needed for long: rarely, in the background, and never in anybody's way."""

from __future__ import annotations

import asyncio
import contextlib
import random
from contextvars import Context

from fencing_sdk._values.clock import BootClock
from fencing_sdk.backends.postgresql._link import Link

_EVERY = 600.0
"""Seconds between the sweeps of one client. The server lets one client a minute sweep, of however many there are."""

_CLOCK = BootClock()


class Sweep:
    """Asks the server to clean up, some time after a grant."""

    def __init__(self, link: Link, statement: str, retention: float) -> None:
        self._link = link
        self._statement = statement
        self._retention = retention
        self._due = _CLOCK.now() + _EVERY * random.uniform(0.05, 1.0)
        self._task: asyncio.Task[None] | None = None

    def now_and_then(self) -> None:
        """Begin a sweep if one is due."""
        if _CLOCK.now() >= self._due:
            self._due = _CLOCK.now() + _EVERY * random.uniform(0.5, 1.0)
            self._task = asyncio.get_running_loop().create_task(self._sweep(), context=Context())

    async def _sweep(self) -> None:
        with contextlib.suppress(Exception):  # there will be others
            await self.run()

    async def run(self) -> int:
        """Sweep once; return how many rows were deleted."""
        row = await self._link.ask(self._statement, (self._retention,))
        return 0 if row is None else int(row[0])

    async def aclose(self) -> None:
        """Give up a sweep that is under way."""
        task, self._task = self._task, None
        if task is not None and task.get_loop() is asyncio.get_running_loop():
            task.cancel()
            await asyncio.wait((task,))
