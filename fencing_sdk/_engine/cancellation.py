"""
The cancel scope of a lease: cancels the body at once, and again only after growing pauses.

A plain anyio scope that is cancelled repeats the cancellation in every turn of the event loop until the body has
ended. A body that cleans up would occupy a processor meanwhile, and a driver that asks its server to stop a query
would be cancelled in the middle of that. `asyncio.timeout` cancels once, and a body that swallows it goes on.
The pauses here are short enough that such a body is cancelled again within the safety buffer.

anyio has no public way to set the pace, so one private method is overridden. With an anyio that has other names for
what is read there, the scope is a plain one: as safe, but with the cost described above. Shields in the body are
anyio's, and are respected.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from contextvars import Context
from types import TracebackType

from fencing_sdk._values.scopes import SteadyScope, new_scope, scope_class

_SHORTEST_PAUSE = 0.02
_LONGEST_PAUSE = 1.0
"""Seconds between two cancellations; each pause is twice the one before."""
_TRIES_IN_A_ROW = 3
"""Turns of the loop in a row in which a cancellation is tried that the task cannot take, before the scope pauses."""
_LOOK_AGAIN = 0.01
"""Seconds between the tries from then on: a shield is in the way."""


def paced_scope(pause: float) -> PlainScope:
    """Make a cancel scope that cancels at once, again after *pause* seconds, and then after ever longer pauses."""
    scope = new_scope(_best_kind())
    scope.pause = pause
    return scope


@functools.cache
def _best_kind() -> type[PlainScope]:
    """Look once whether anyio has what a `PacedScope` reads."""
    scope = scope_class()()
    return PacedScope if all(hasattr(scope, name) for name in _PRIVATE) else PlainScope


async def outlast_cancellation(
    wait: Callable[[], Awaitable[object]], finished: Callable[[], bool]
) -> asyncio.CancelledError | None:
    """
    Await *wait* until *finished*, whatever cancels the caller, by anyio or by asyncio.

    Returns a cancellation that came meanwhile, for the caller to raise.
    """
    cancelled = None
    if finished():  # as most releases are by now: a scope would cost more than the look
        return cancelled
    with scope_class()(shield=True):
        while not finished():
            try:
                await wait()
            except asyncio.CancelledError as error:
                cancelled = error
    return cancelled


class PlainScope(SteadyScope):
    """Cancels its task in every turn of the loop until the body has ended, as anyio does."""

    pause: float
    """Seconds until a body that goes on is cancelled again."""
    _given_up = False

    def give_up(self) -> None:
        """Cancel nothing from now on: the scope cannot be left in order any more."""
        self._given_up = True

    def cancel(self, reason: str | None = None) -> None:
        """See `anyio.CancelScope.cancel`."""
        if not self._given_up:
            super().cancel(reason)


_PRIVATE = ("_cancel_called", "_cancel_handle", "_deliver_cancellation", "_host_task", "_pending_uncancellations")


class PacedScope(PlainScope):
    """Sets the pace."""

    _failed_tries = 0
    _cancel_called: bool
    _cancel_handle: asyncio.Handle | None
    _host_task: asyncio.Task[object] | None
    _pending_uncancellations: int

    def give_up(self) -> None:
        """Take back every cancellation, and cancel nothing from now on: the scope cannot be left in order any more."""
        super().give_up()
        self._stop()
        self._cancel_handle = None
        self._cancel_called = False  # or what asks anyio for a cancellation would wait for one that never comes
        while self._host_task is not None and self._pending_uncancellations:
            self._host_task.uncancel()
            self._pending_uncancellations -= 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        swallowed = super().__exit__(kind, error, traceback)
        if self._cancel_handle is not None:
            self._stop()
        return swallowed

    def _deliver_cancellation(self, origin: object) -> bool:
        if self._given_up and origin is self:  # one of a scope around this one still reaches what is inside
            return False
        before = self._pending_uncancellations
        unfinished: bool = super()._deliver_cancellation(origin)  # type: ignore[misc]
        if origin is self and self._cancel_handle is not None:
            self._repeat_later(delivered=self._pending_uncancellations != before)
        return unfinished

    def _repeat_later(self, *, delivered: bool) -> None:
        """Replace the next try, which anyio has planned for the next turn of the loop."""
        if delivered:
            self._failed_tries = 0
            pause = min(max(self.pause, _SHORTEST_PAUSE), _LONGEST_PAUSE)
            self.pause = 2 * pause
        elif self._failed_tries < _TRIES_IN_A_ROW:
            self._failed_tries += 1
            return
        else:
            pause = _LOOK_AGAIN
        self._stop()
        loop = asyncio.get_running_loop()
        self._cancel_handle = loop.call_later(pause, self._deliver_cancellation, self, context=Context())

    def _stop(self) -> None:
        if self._cancel_handle is not None:
            self._cancel_handle.cancel()
