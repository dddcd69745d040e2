"""
One task's stay inside ``async with lock``: what the body sees, and what leaves afterwards.

    body ends cleanly, lease held            nothing
    body ends cleanly, lease over            LeaseLostError
    body cancelled by the lease              LeaseLostError
    body raises, lease held or over          the body's error, with a note when the lease was lost too
    somebody else cancelled the task         CancelledError: an outer cancellation wins

The scope lives in the task that entered. Leaving in another task (a fixture, a generator closed
by the garbage collector) cannot close it, so that is an error that names the plain handle.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from fencing_sdk._current import pop, push
from fencing_sdk._lease import Lease
from fencing_sdk.errors import LeaseLostError, LossReason, UsageError, shown


class Departure(NamedTuple):
    """How a body ended, judged before the lock is given back."""

    raised: BaseException | None
    """What is still on its way out, after the scope took its own cancellation back."""
    swallowed: bool
    """Whether the scope took back the cancellation that it had caused."""
    outer: bool
    """Whether somebody else cancelled the task meanwhile."""
    lost: LossReason | None


class Tenure:
    """A lease, the task that entered with it, and the scope that cancels that task."""

    __slots__ = ("_cancelling", "_mark", "_scope", "lease", "task")

    def __init__(self, lease: Lease) -> None:
        task = asyncio.current_task()
        assert task is not None  # an async with runs in a task
        self.lease = lease
        self.task = task
        self._cancelling = task.cancelling()
        lease.host = task
        self._mark = push(lease)
        self._scope = lease.open_scope()  # last: nothing may fail after it

    def leave(self, raised: BaseException | None) -> Departure:
        """Close the scope in the task that opened it and judge what happened."""
        lost = self.lease.lost_reason  # the clock, once more: a body that finished too late was not covered
        swallowed = False
        try:
            traceback = None if raised is None else raised.__traceback__
            swallowed = bool(self._scope.__exit__(type(raised) if raised else None, raised, traceback))
        except BaseException as rest:  # noqa: BLE001  (the part of a group that was not ours; it leaves below)
            raised = rest
        outer = self.task.cancelling() > self._cancelling
        self._let_go()
        return Departure(raised, swallowed, outer, lost)

    def conclude(self, departure: Departure, original: BaseException | None) -> None:
        """
        Raise what has to leave the ``async with`` instead of *original*; return to let *original* leave.

        Raises:
            LeaseLostError: the lease is over and the body raised nothing of its own.
        """
        raised, lost = departure.raised, departure.lost
        if departure.swallowed and departure.outer:
            raise asyncio.CancelledError
        nothing_of_its_own = raised is None or isinstance(raised, GeneratorExit)
        if departure.swallowed or (nothing_of_its_own and lost is not None):
            raise self.lease.loss(lost or LossReason.EXPIRED) from None
        if lost is not None and isinstance(raised, Exception) and not self._says_so(raised):
            raised.add_note(
                f"fencing_sdk: the lease on {shown(self.lease.name)} "
                f"(token {self.lease.last_token:d}) was lost too: {lost.value}"
            )
        if raised is not original and raised is not None:
            raise raised

    def abort(self) -> UsageError:
        """Disarm a scope that can no longer be closed, and return the error that explains it."""
        self._let_go()
        return UsageError(
            f"lock {shown(self.lease.name)} was entered in one task and left in another (a fixture or a "
            "generator?); there use the plain handle: lease = await lock.acquire() ... await lease.release()"
        )

    def _let_go(self) -> None:
        self.lease.forget_scope()
        self.lease.host = None
        pop(self._mark)

    def _says_so(self, raised: Exception) -> bool:
        mine = (self.lease.name, self.lease.last_token)
        return isinstance(raised, LeaseLostError) and (raised.name, raised.token) == mine
