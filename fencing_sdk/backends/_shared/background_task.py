"""The task that works behind the calls of a backend: it watches, cleans up, or reads a map anew."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeGuard

from fencing_sdk._values.futures import cancel_and_wait

__all__ = ["BackgroundTask"]


class BackgroundTask:
    """
    At most one task at a time, in an empty context, in whichever loop calls `start`.

    The task of an earlier loop, or of the parent of a forked child, will never end. It is forgotten.
    """

    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether the task is under way in the running loop."""
        return self._of_this_loop(self._task) and not self._task.done()

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin *work*, unless the task is running."""
        if not self.running:
            self._task = asyncio.get_running_loop().create_task(work(), context=Context())

    async def aclose(self, *, limit: float | None = None) -> None:
        """Cancel the task and wait for its end, at most *limit* seconds."""
        task, self._task = self._task, None
        if self._of_this_loop(task):
            await cancel_and_wait(task, limit=limit)

    @staticmethod
    def _of_this_loop(task: asyncio.Task[None] | None) -> TypeGuard[asyncio.Task[None]]:
        return task is not None and task.get_loop() is asyncio.get_running_loop()
