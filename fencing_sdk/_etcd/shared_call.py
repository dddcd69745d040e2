"""One call that serves all who want the same thing at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Generic, TypeVar

T = TypeVar("T")

__all__ = ["SharedCall", "ended"]


class SharedCall(Generic[T]):
    """
    A call on its way, and how many wait for it.

    It runs in a task of its own, in an empty context, and goes on when one of those who wait is
    cancelled; when the last of them is, it is cancelled too, so that a member that hangs is left.
    """

    def __init__(self, call: Callable[[], Coroutine[Any, Any, T]], started: float) -> None:
        self.started = started
        self._waiting = 0
        self._task: asyncio.Task[T] = asyncio.get_running_loop().create_task(call(), context=Context())
        self._task.add_done_callback(_retrieve, context=Context())

    def takes(self, since: float) -> bool:
        """Whether one who needs a call that began no earlier than *since* may join this one, in this loop."""
        task = self._task
        return not task.done() and self.started >= since and task.get_loop() is asyncio.get_running_loop()

    async def join(self) -> T:
        """Wait for the outcome."""
        self._waiting += 1
        try:
            return await asyncio.shield(self._task)
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._task.cancel()

    async def aclose(self) -> None:
        """End it."""
        if self._task.get_loop() is asyncio.get_running_loop():
            await ended(self._task)


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


async def ended(task: asyncio.Task[Any]) -> None:
    """Cancel *task* of this loop and see it end; its outcome is not looked at."""
    task.cancel()
    await asyncio.wait((task,))
    _retrieve(task)
