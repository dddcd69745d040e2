"""Futures and tasks that no other task awaits."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["cancel_and_wait", "retrieve"]


def retrieve(future: asyncio.Future[Any]) -> None:
    """
    Read the outcome of *future*, as a done callback, where no task awaits it.

    Else asyncio logs "exception was never retrieved" for an error that was handled elsewhere, or concerns no caller.
    """
    if not future.cancelled():
        future.exception()


async def cancel_and_wait(task: asyncio.Task[Any], *, limit: float | None = None) -> None:
    """Cancel *task* of the running loop and wait for its end, at most *limit* seconds. Its outcome is dropped."""
    task.cancel()
    await asyncio.wait((task,), timeout=limit)
    if task.done():
        retrieve(task)
