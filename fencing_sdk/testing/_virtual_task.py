"""
Tasks that are numbered and hash by their number.

A set of tasks, as `asyncio.wait`, `asyncio.TaskGroup` and a cancel scope keep one, is then walked in
the same order in every run. The default hash is an address, which differs from run to run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTask(asyncio.Task[T]):
    """A task whose hash is its number, not its address."""

    def __init__(self, number: int, coro: Generator[Any, None, T] | Coroutine[Any, Any, T], **options: Any) -> None:
        self._number = number  # first: registering the task hashes it
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number

    @property
    def unseen(self) -> bool:
        """Whether the task failed and its outcome was never retrieved."""
        return self._log_traceback  # what asyncio itself reports a lost exception by

    @property
    def failed(self) -> bool:
        """Whether the task ended with an error. Asking does not count as having seen it."""
        return self._exception is not None
