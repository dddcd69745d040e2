"""One call that serves all callers that want the same thing at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Generic, TypeVar

from fencing_sdk._values.futures import cancel_and_wait, retrieve

T = TypeVar("T")

__all__ = ["SharedCall"]


class SharedCall(Generic[T]):
    """
    A call that is under way, and the number of callers that wait for it.

    The call runs in its own task, in an empty context. It goes on when one caller is cancelled. When the last
    caller is cancelled, the call is cancelled too: most often its member hangs, and another one is asked next.
    """

    def __init__(self, call: Callable[[], Coroutine[Any, Any, T]], started: float) -> None:
        self.started = started
        self._callers = 0
        self._task: asyncio.Task[T] = asyncio.get_running_loop().create_task(call(), context=Context())
        self._task.add_done_callback(retrieve, context=Context())

    def can_join(self, since: float) -> bool:
        """Whether this call serves a caller of the running loop that needs one begun at *since* or later."""
        task = self._task
        return not task.done() and self.started >= since and task.get_loop() is asyncio.get_running_loop()

    async def join(self) -> T:
        """Wait for the outcome."""
        self._callers += 1
        try:
            return await asyncio.shield(self._task)
        finally:
            self._callers -= 1
            if not self._callers:
                self._task.cancel()

    async def aclose(self) -> None:
        """Cancel the call and wait for its end."""
        if self._task.get_loop() is asyncio.get_running_loop():
            await cancel_and_wait(self._task)
