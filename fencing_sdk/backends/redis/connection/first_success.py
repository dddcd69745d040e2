"""Ask several servers the same question, and take the first answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from fencing_sdk.backends.redis.connection.unreachable import UnreachableError

T = TypeVar("T")

AT_ONCE = 3
"""Servers that are asked at the same time: a silent one costs no time, and a large cluster is not flooded."""


async def first_success(questions: Sequence[Callable[[], Awaitable[T]]]) -> T:
    """
    Return the first answer to any of *questions*. The others are cancelled, and have ended then.

    Raises:
        UnreachableError: no server was reached; the error names all of them.
        Exception: every question failed; this is the error of a server that was reached.
    """
    left = list(reversed(questions))
    asked: set[asyncio.Task[T]] = set()
    errors: list[BaseException] = []
    try:
        while left or asked:
            while left and len(asked) < AT_ONCE:
                asked.add(asyncio.ensure_future(_ask(left.pop())))
            done, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            failed = {task: task.exception() for task in done}
            for task, error in failed.items():
                if error is None:
                    return task.result()
                errors.append(error)
        raise _most_telling(errors)
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def _ask(question: Callable[[], Awaitable[T]]) -> T:
    return await question()


def _most_telling(errors: Sequence[BaseException]) -> BaseException:
    """Prefer what a server replied to the news that another server is down."""
    unreached = [error for error in errors if isinstance(error, UnreachableError)]
    return next((error for error in errors if error not in unreached), None) or UnreachableError.of_all(unreached)
