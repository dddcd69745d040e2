"""Asks several servers at once: one that swallows packets must not hide the others, after a failover least of all."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

__all__ = ["first_success"]

T = TypeVar("T")


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
                begun.append(asyncio.ensure_future(left.pop(0)()))
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
        if begun and patience != 0:
            await asyncio.wait(begun, timeout=patience)
    except asyncio.CancelledError:
        if chosen is not None and discard is not None:  # the caller will not get it
            discard(chosen.result())
        raise
