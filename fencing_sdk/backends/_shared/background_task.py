"""The tasks that work behind the calls of a backend: they watch, clean up, or read a map anew."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeGuard

from fencing_sdk._values.tasks import cancel_and_wait

__all__ = ["BackgroundTask", "BackgroundTasks"]


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
        """True if the task is under way in the running loop."""
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


class BackgroundTasks:
    """Several tasks at a time, each in an empty context. They belong to the loops that started them."""

    __slots__ = ("_tasks",)

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """
        Begin *work* in the running loop.

        Raises:
            RuntimeError: no loop runs, or the loop is closed: the caller is a task that is garbage-collected.
        """
        try:
            task = asyncio.get_running_loop().create_task(work, context=Context())
        except RuntimeError:
            work.close()
            raise
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard, context=Context())
        return task

    def forget(self) -> None:
        """Forget all of them: in a forked child they are the parent's."""
        self._tasks.clear()

    async def aclose(self, *, patience: float) -> None:
        """Give the tasks of this loop *patience* seconds to end, then cancel them and wait for their ends."""
        loop = asyncio.get_running_loop()
        tasks = [task for task in self._tasks if task.get_loop() is loop]
        self._tasks.clear()
        if tasks:
            await asyncio.wait(tasks, timeout=patience)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
