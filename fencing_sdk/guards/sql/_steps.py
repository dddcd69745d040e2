"""
A guard's work as steps: what it says next to the database, given the answers so far.

Pure, so that one text is walked by drivers that block and by drivers that are awaited. A step is a
statement with its parameters; its answer is the rows, or the driver's error, thrown in where it was
asked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Row: TypeAlias = Sequence[object]
Parameters: TypeAlias = tuple[object, ...]
Steps: TypeAlias = Generator[tuple[str, Parameters], Sequence[Row], T]
Fetch: TypeAlias = Callable[[str, Parameters], Sequence[Row]]
AsyncFetch: TypeAlias = Callable[[str, Parameters], Awaitable[Sequence[Row]]]


def walk(steps: Steps[T], fetch: Fetch) -> T:
    """Take *steps* to their end, and return what they come to."""
    try:
        step = next(steps)
        while True:
            try:
                rows = fetch(*step)
            except Exception as error:  # noqa: BLE001  (the steps decide which errors they can go on from)
                step = steps.throw(error)
            else:
                step = steps.send(rows)
    except StopIteration as end:
        return _result(end)


async def walk_awaiting(steps: Steps[T], fetch: AsyncFetch) -> T:
    """The same with a driver that is awaited. A cancellation is no answer and leaves at once."""
    try:
        step = next(steps)
        while True:
            try:
                rows = await fetch(*step)
            except Exception as error:  # noqa: BLE001  (as above)
                step = steps.throw(error)
            else:
                step = steps.send(rows)
    except StopIteration as end:
        return _result(end)


def _result(end: StopIteration) -> T:  # type: ignore[type-var]  # StopIteration.value has no type of its own
    result: T = end.value
    return result
