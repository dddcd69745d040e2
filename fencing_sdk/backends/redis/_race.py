"""Ask several servers the same thing, and take the first answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from fencing_sdk.backends.redis._unreachable import UnreachableError

__all__ = ["first"]

T = TypeVar("T")

AT_ONCE = 3
"""How many are asked at the same time: enough that a silent one costs nothing, few enough for a large cluster."""


async def first(questions: Sequence[Callable[[], Awaitable[T]]]) -> T:
    """
    Return the first answer to any of *questions*. Those that nobody needs any more are cancelled and waited for.

    Raises:
        UnreachableError: no server was reached; it names all of them.
        Exception: every one failed; this is the error of one that was reached.
    """
    left = list(reversed(questions))
    asked: set[asyncio.Task[T]] = set()
    errors: list[BaseException] = []
    try:
        while left or asked:
            while left and len(asked) < AT_ONCE:
                asked.add(asyncio.ensure_future(_asked(left.pop())))
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


async def _asked(question: Callable[[], Awaitable[T]]) -> T:
    return await question()


def _most_telling(errors: Sequence[BaseException]) -> BaseException:
    """What a server said tells more than that another one is down."""
    silent = [error for error in errors if isinstance(error, UnreachableError)]
    return next((error for error in errors if error not in silent), None) or UnreachableError.of_all(silent)
