"""
A guard's work as steps, so that the same code runs on drivers that block and on drivers that are awaited.

`Steps` is a generator without I/O. It yields a step, a statement with its parameters, and receives the rows. If the
driver raises an error, the generator receives it at the same place.
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


def run_steps(steps: Steps[T], fetch: Fetch) -> T:
    """Run *steps* on a driver that blocks, and return their result."""
    try:
        step = next(steps)
        while True:
            try:
                rows = fetch(*step)
            except Exception as error:  # noqa: BLE001  (the steps decide after which errors they go on)
                step = steps.throw(error)
            else:
                step = steps.send(rows)
    except StopIteration as end:
        return _result(end)


async def run_steps_async(steps: Steps[T], fetch: AsyncFetch) -> T:
    """Run *steps* on a driver that is awaited. A cancellation ends them at once."""
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
