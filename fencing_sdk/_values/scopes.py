"""
Cancel scopes in which a cancellation from outside survives.

asyncio makes one error of two cancellations of a task in one turn of its loop. anyio before 4.16 takes that error for
its own when a scope has cancelled the task: whatever else cancelled it, such as the closing of a client or a caller's
`asyncio.timeout`, is lost. The scopes here count the cancellations of the task, as later versions of anyio do.
"""

from __future__ import annotations

import asyncio
import functools
from types import TracebackType
from typing import Any, TypeVar

import anyio

from fencing_sdk._values.loop_owner import running_loop

__all__ = ["SteadyScope", "move_on_after", "new_scope", "scope_class"]

S = TypeVar("S", bound="SteadyScope")


@functools.cache
def scope_class() -> type[anyio.CancelScope]:
    """The class behind `anyio.CancelScope`, which finds out at every call that this is asyncio."""
    asyncio.get_running_loop()  # elsewhere this fails and is not kept: trio's class would be returned for ever
    return type(anyio.CancelScope())


class SteadyScope(anyio.CancelScope):
    """Lets a cancellation from outside pass. `new_scope` combines it with anyio's scope for asyncio."""

    _task: asyncio.Task[object]
    _before: int
    """How often the task had been cancelled before."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        swallowed = super().__exit__(kind, error, traceback)
        return swallowed and self._task.cancelling() <= self._before


@functools.cache
def _combined(kind: type) -> Any:
    return type(kind.__name__, (kind, scope_class()), {})


def new_scope(kind: type[S]) -> S:
    """Make a scope of *kind*, to be entered at once by the task that runs."""
    scope: S = _combined(kind)()  # type: ignore[arg-type]  # a generic class is hashable too
    task = asyncio.current_task()
    assert task is not None  # what enters a scope runs in a task
    scope._task, scope._before = task, task.cancelling()  # noqa: SLF001  (their one maker)
    return scope


def move_on_after(seconds: float | None, *, shield: bool = False) -> anyio.CancelScope:
    """Do as `anyio.move_on_after`, and lose no cancellation. Enter it at once."""
    scope = new_scope(SteadyScope)
    scope.shield = shield
    if seconds is not None:
        scope.deadline = running_loop().time() + seconds
    return scope
