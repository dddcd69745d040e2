"""The tasks of a backend: behind its calls they watch and clean up; or several ask servers, of which one is enough."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextvars import Context
from typing import Any, TypeGuard, TypeVar

from fencing_sdk._values.tasks import cancel_and_wait, start_task

__all__ = ["BackgroundTask", "BackgroundTasks", "first_success"]

T = TypeVar("T")


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

    def start(self, work: Callable[[], Coroutine[Any, Any, None]], name: str = "fencing-store") -> None:
        """Begin *work*, unless the task is running."""
        if not self.running:
            self._task = start_task(work(), name)

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

    def start(self, work: Coroutine[Any, Any, None], name: str = "fencing-store") -> asyncio.Task[None]:
        """
        Begin *work* in the running loop.

        Raises:
            RuntimeError: no loop runs, or the loop is closed: the caller is a task that is garbage-collected.
        """
        try:
            task = start_task(work, name)
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


async def first_success(
    attempts: Iterable[Callable[[], Coroutine[Any, Any, T]]],
    blame: Callable[[Sequence[Exception]], Exception],
    *,
    at_once: float = math.inf,
    final: type[Exception] | tuple[()] = (),
    discard: Callable[[T], object] | None = None,
    patience: float | None = None,
) -> T:
    """
    Make *attempts* side by side, *at_once* at most, and return what the first one returns that does not fail.

    The others are cancelled, and end within *patience* seconds. If one of them returns all the same, *discard* gets its
    result.

    Raises:
        Exception: one that is *final*; else what *blame* makes of the errors of all attempts, in their order.
    """
    left, begun = list(attempts), list[asyncio.Task[T]]()
    pending: set[asyncio.Task[T]] = set()
    chosen: asyncio.Task[T] | None = None
    try:
        while left or pending:
            while left and len(pending) < at_once:
                begun.append(start_task(left.pop(0)()))
                pending.add(begun[-1])
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (error := task.exception()) is None:
                    chosen = task
                    return task.result()
                if isinstance(error, final) or not isinstance(error, Exception):
                    raise error
        raise blame([error for task in begun if isinstance(error := task.exception(), Exception)])
    finally:
        await _end(begun, chosen, discard, patience)


async def _end(
    begun: Sequence[asyncio.Task[T]],
    chosen: asyncio.Task[T] | None,
    discard: Callable[[T], object] | None,
    patience: float | None,
) -> None:
    def drop(task: asyncio.Task[T]) -> None:
        if task is not chosen and not task.cancelled() and task.exception() is None and discard is not None:
            discard(task.result())

    for task in begun:
        task.cancel()
        task.add_done_callback(drop)
    try:
        if begun:
            await asyncio.wait(begun, timeout=patience)
    except asyncio.CancelledError:
        if chosen is not None and discard is not None:  # the caller will not get it
            discard(chosen.result())
        raise
