"""
The end of a client: once, in a task of its own, however many callers ask for it and are cancelled.

A caller that is cancelled meanwhile still waits for the end, which is bounded, and raises its
cancellation afterwards: half a closing would leave the heartbeat, a thread and connections behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context
from typing import Any

from fencing_sdk._engine.cancellation import outlast_cancellation
from fencing_sdk._engine.lease_state import LeaseState
from fencing_sdk._values.scopes import move_on_after

Unreleased = Mapping[str, LeaseState]
"""By owner: the leases that were not given back."""


class Closing:
    """Begins once, and lets every caller wait for its end."""

    def __init__(self, unreleased: Unreleased) -> None:
        self.begun = False
        self.over = False
        self._unreleased = unreleased
        self._ended = asyncio.Event()
        self._changed = asyncio.Event()
        self._callers: set[asyncio.Task[Any] | None] = set()
        self._task: asyncio.Task[None] | None = None

    async def join(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """
        Have *close* run unless it does already, and wait for its end.

        Raises:
            asyncio.CancelledError: the caller was cancelled while it waited. The closing has ended all the same.
        """
        self._callers.add(asyncio.current_task())
        self.look_again()
        if not self.begun:
            self.begun = True  # before the task: an eager one runs observers, and those may close the client too
            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._run(close), context=Context(), name="fencing-closing")
        cancelled = await outlast_cancellation(self._ended.wait, lambda: self.over)
        if cancelled is not None:
            raise cancelled
        if self._task is not None and not self._task.cancelled():
            self._task.result()

    async def wait(self) -> None:
        """Wait for the end. Nothing begins by this, and a cancellation passes."""
        await self._ended.wait()

    async def _run(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await close()
        finally:
            self.over = True
            self._ended.set()

    def look_again(self) -> None:
        """A lease was released, or a body closes the client itself."""
        self._changed.set()

    async def await_bodies(self, limit: float) -> frozenset[str]:
        """
        Let the bodies that were cancelled end and give their locks back; return the owners whose body did not.

        Their locks are left to the ttl: given back, another client could hold one while the body goes on.
        """
        with move_on_after(limit):
            while self._inside():
                self._changed.clear()
                await self._changed.wait()
        return self._inside()

    def _inside(self) -> frozenset[str]:
        """The owners of leases whose ``async with`` is entered, except by a task that waits for this closing."""
        return frozenset(owner for owner, lease in self._unreleased.items() if self._runs(lease.task))

    def _runs(self, task: asyncio.Task[object] | None) -> bool:
        return task is not None and task not in self._callers and not task.done() and not task.get_loop().is_closed()
