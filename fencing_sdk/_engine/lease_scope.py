"""
One task's stay inside ``async with lock``: what the body sees, and what leaves afterwards.

    body ends cleanly, lease held            nothing
    body ends cleanly, lease over            LeaseLostError, also if only its release finds that
    body cancelled by the lease              LeaseLostError
    body raises, lease held or over          the body's error, with a note when the lease was lost too
    the task cancelled from outside          CancelledError: an outer cancellation wins

The scope lives in the task that entered. Three cases of leaving it:

1. It is the task's innermost scope: it is closed.
2. The task is still inside other locks that it entered later (two exit stacks, left first in, first out): it
   stays open, no longer cancels, and is closed after them.
3. A scope of another library lies inside it, or another task leaves (a fixture, a generator closed by the garbage
   collector): it can never be closed. The exit releases the lock, and raises `UsageError` from the body's error.

The cancel scope cancels the body at once, and again only after growing pauses. A plain anyio scope that is cancelled
repeats the cancellation in every turn of the event loop until the body has ended. A body that cleans up would occupy a
processor meanwhile, and a driver that asks its server to stop a query would be cancelled in the middle of that.
`asyncio.timeout` cancels once, and a body that swallows it goes on. The pauses here are short enough that such a body
is cancelled again within the safety buffer.

anyio has no public way to set the pace, so one private method is overridden. With an anyio that has other names for
what is read there, the scope is a plain one: as safe, but with the cost described above. Shields in the body are
anyio's, and are respected.
"""

from __future__ import annotations

import asyncio
import functools
from contextvars import Context
from types import TracebackType
from typing import Any, NamedTuple

from fencing_sdk._lease import AnyLease, Lease, pop, push, state_of
from fencing_sdk._lease_state import raise_end
from fencing_sdk._values.tasks import SteadyScope, new_scope, scope_class
from fencing_sdk.errors import LossReason, UsageError, shown

_PAUSE = 1 / 2
"""Part of the safety buffer after which a body that swallows its cancellation is cancelled again."""

_left_open: dict[asyncio.Task[Any], list[PlainScope]] = {}
"""The scopes of case 2, by task: to be closed as soon as they are the innermost."""


class ScopeExit(NamedTuple):
    """End of a body, judged before the lock is released."""

    raised: BaseException | None
    """The error that leaves the block, after the scope took its own cancellation back."""
    swallowed: bool
    """True if the scope took back the cancellation that it had caused."""
    outer: bool
    """True if the task was cancelled from outside meanwhile."""


class LeaseScope:
    """A lease, the task that entered with it, and the scope that cancels that task."""

    __slots__ = ("_scope", "lease", "state", "task")

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.state = state = state_of(lease)
        scope = self._scope = paced_scope(state.timing.safety_buffer * _PAUSE, asyncio.current_task(state.loop))
        self.task = state.task = scope.task
        push(lease)
        scope.__enter__()
        state.watch(scope)  # last: nothing may fail after it

    def leave(self, raised: BaseException | None) -> ScopeExit | None:
        """
        Close the scope in the task that opened it and judge what happened: None if the body ended as it should.

        Raises:
            UsageError: the scope cannot be closed: case 3.
        """
        lost = self.state.lost_reason  # the clock, once more: a body that finished too late was not covered
        later = self._let_go()
        try:
            traceback = None if raised is None else raised.__traceback__
            swallowed = self._scope.__exit__(None if raised is None else type(raised), raised, traceback)
        except RuntimeError:  # another scope is inside this one; it was not touched
            self._scope.give_up()
            if not any(state_of(lease).task is self.task for lease in later):  # no lock that this task entered later
                msg = (
                    f"lock {shown(self.lease.name)} was left while the task was still inside a cancel scope or task "
                    "group that it entered later; leave the inner one first, or use the plain handle: "
                    "async with await lock.acquire() as lease"
                )
                raise UsageError(msg) from raised
            if self.task not in _left_open:
                _left_open[self.task] = []
                self.task.add_done_callback(lambda task: _left_open.pop(task, None), context=Context())
            _left_open[self.task].append(self._scope)
            swallowed = lost is not None and isinstance(raised, asyncio.CancelledError)
        except BaseException as rest:  # noqa: BLE001  (a group without our cancellation; it leaves below)
            raised, swallowed = rest, False
        while _left_open and (left_open := _left_open.get(self.task)):
            try:
                left_open[-1].__exit__(None, None, None)
            except RuntimeError:  # it is not the innermost yet
                break
            left_open.pop()
        outer = self.task.cancelling() > self._scope.cancelled_before
        if raised is None and lost is None and not swallowed and not outer:
            return None
        return ScopeExit(raised, swallowed, outer)

    def conclude(self, end: ScopeExit | None, original: BaseException | None) -> None:
        """
        Raise what has to leave the ``async with`` instead of *original*; return to let *original* leave.

        The lock was released: *end* is how the body ended, and a loss may have been found since.

        Raises:
            LeaseLostError: the lease is over and the body raised nothing of its own.
            UsageError: the body has left a transaction open in which it wrote.
        """
        raised = None if end is None else end.raised
        if end is not None and end.swallowed:
            if end.outer:
                raise asyncio.CancelledError
            raise self.state.loss(self.state.lost or LossReason.EXPIRED) from None
        raise_end(self.state, raised)
        if raised is not original and raised is not None:
            raise raised

    def abort(self) -> UsageError:
        """Give up a scope that another task leaves, and return the error that explains it."""
        self._let_go()
        self._scope.give_up()
        return UsageError(
            f"lock {shown(self.lease.name)} was entered in one task and left in another (a fixture or a "
            "generator?); there use the plain handle: async with await lock.acquire() as lease"
        )

    def _let_go(self) -> tuple[AnyLease, ...]:
        """Stop cancelling, and return the leases that this context entered later."""
        self.state.forget_scope()
        self.state.task = None
        return pop(self.lease)


_SHORTEST_PAUSE = 0.02
_LONGEST_PAUSE = 1.0
"""Seconds between two cancellations; each pause is twice the one before."""
_TRIES_IN_A_ROW = 3
"""Turns of the loop in a row in which a cancellation is tried that the task cannot take, before the scope pauses."""
_LOOK_AGAIN = 0.01
"""Seconds between the tries from then on: a shield is in the way."""


def paced_scope(pause: float, task: asyncio.Task[object] | None = None) -> PlainScope:
    """Make a cancel scope that cancels at once, again after *pause* seconds, and then after ever longer pauses."""
    scope = new_scope(_kind_of_scope(), task)
    scope.pause = pause
    return scope


@functools.cache
def _kind_of_scope() -> type[PlainScope]:
    """Look once whether anyio has what a `PacedScope` reads."""
    scope = scope_class()()
    return PacedScope if all(hasattr(scope, name) for name in _PRIVATE) else PlainScope


class PlainScope(SteadyScope):
    """Cancels its task in every turn of the loop until the body has ended, as anyio does."""

    pause: float
    """Seconds until a body that goes on is cancelled again."""
    _given_up = False

    def give_up(self) -> None:
        """Stop cancelling: the scope can no longer be left in order."""
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
        """Take back every cancellation and stop cancelling: the scope can no longer be left in order."""
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
