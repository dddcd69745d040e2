"""A lease in the hands of a thread: what `Lease` says, and calls that wait."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self

import anyio

from fencing_sdk._current_lease import pop, push
from fencing_sdk._engine.lease_scope import tell_loss
from fencing_sdk._engine.lease_state import LeaseState
from fencing_sdk._lease import AnyLease, Lease, state_of
from fencing_sdk._values.observers import logger
from fencing_sdk._values.timing import Seconds, seconds
from fencing_sdk.errors import ConfigurationError, LossReason, shown
from fencing_sdk.sync._loop_thread import LoopThread
from fencing_sdk.sync._thread_call import ClosedMeanwhileError, this_thread

LossCallback = Callable[[LossReason], object]
"""Called in a thread of its own with the reason of the loss."""


class SyncLease(AnyLease):
    """
    A lock that a thread holds, until its deadline.

    The client's own thread renews it, also while this one computes or blocks. When it is lost, nothing stops the
    code that runs: every read of `token` raises then, and so do `check` and the end of the ``with``. Safe to use
    from any thread. A plain handle may be left to a block: ``with lock.acquire() as lease`` releases it at the end.
    """

    __slots__ = ("_bridge", "_handle", "_thread")

    def __init__(self, handle: Lease, bridge: LoopThread) -> None:
        super().__init__(state_of(handle))
        self._handle = handle
        self._bridge = bridge
        self._thread: int | None = None  # that is inside a block by this lease

    def __enter__(self) -> Self:
        if self._state.released:
            raise self._state.loss()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._give_back(raised)

    def wait_lost(self, timeout: Seconds | None = None) -> LossReason | None:
        """
        Wait until the lease is over, at most *timeout* seconds; return why it was lost.

        None means that it was released, or that it is held still: `held` tells which.
        """
        limit = None if timeout is None else seconds(timeout, "timeout")
        if self.held and limit != 0:
            with contextlib.suppress(ClosedMeanwhileError):
                self._bridge.call(partial(_over, self._state, limit), only=self._state.loop)
        return self.lost_reason

    def on_lost(self, callback: LossCallback) -> None:
        """
        Have *callback* called with the reason when the lease is lost, in a thread of its own, within milliseconds.

        It is not called for a lease that is released in time. What it raises is logged.

        Raises:
            ConfigurationError: *callback* is no plain callable.
        """
        _check_callback(callback)
        try:
            self._bridge.watch(partial(_watch, self._state, callback), self._state.loop)
        except ClosedMeanwhileError:
            _tell(self._state, callback)

    def renew(self) -> None:
        """
        Renew now, besides the heartbeat.

        Raises:
            LeaseLostError: the lease is over, or the store refused.
            BackendUnavailableError: the store did not answer; the lease goes on until its deadline.
        """
        self.check()
        try:
            self._bridge.call(self._handle.renew, only=self._state.loop)
        except ClosedMeanwhileError:
            raise self._state.loss() from None

    def release(self) -> None:
        """Give the lock back. Idempotent and bounded; never touches another's grant."""
        self._give_back(None)

    def _give_back(self, raised: BaseException | None) -> None:
        with contextlib.suppress(ClosedMeanwhileError):  # whatever closed the client has given it back
            self._bridge.call(partial(self._handle.__aexit__, None, raised, None), only=self._state.loop)

    def _enter(self) -> None:
        self._thread = threading.get_ident()
        this_thread().inside.append(self._state)
        push(self)

    def _leave(self, raised: BaseException | None) -> None:
        lost = self.lost_reason  # the clock, once more: a body that finished too late was not covered
        pop(self)
        this_thread().inside.remove(self._state)
        self._give_back(raised)
        if lost is not None:
            tell_loss(self._state, lost, raised)


class SyncPermitLease(SyncLease):
    """A permit of a `SyncSemaphore` that is held, until its deadline."""

    __slots__ = ()

    @property
    def permit(self) -> int:
        """The number of the permit: from 0 to below the number of permits. No other holder has it at the same time."""
        return self._state.permit or 0


def enter(lease: SyncLease) -> None:
    """Make *lease* the current one of this thread. For this package alone: the caller leaves it."""
    lease._enter()  # noqa: SLF001  (the one door to it)


def leave(lease: SyncLease, raised: BaseException | None) -> None:
    """
    End a block under *lease*, whose body *raised*: give it back, and say if it was lost. For this package alone.

    Raises:
        LeaseLostError: the lease is over, and the body raised nothing of its own.
    """
    lease._leave(raised)  # noqa: SLF001  (the one door to it)


async def give_back(handle: Lease | None) -> None:
    """Undo an acquisition whose thread was interrupted. For this package alone."""
    if handle is not None:
        await handle.release()


def bridge_of(lease: SyncLease) -> LoopThread:
    """Return what keeps *lease*. For this package alone."""
    return lease._bridge  # noqa: SLF001  (another door to it)


def _check_callback(callback: object) -> None:
    if not callable(callback) or inspect.iscoroutinefunction(callback):
        msg = f"on_lost() takes a plain function, which gets the reason, not {shown(callback)}"
        raise ConfigurationError(msg)


def is_inside(lease: SyncLease) -> bool:
    """Whether this thread is inside a block by *lease*. For this package alone."""
    return lease._thread == threading.get_ident()  # noqa: SLF001  (another door to it)


async def _over(state: LeaseState, limit: float | None) -> None:
    with anyio.move_on_after(limit):
        await state.wait_lost()


async def _watch(state: LeaseState, callback: LossCallback) -> None:
    await state.wait_lost()
    _tell(state, callback)


def _tell(state: LeaseState, callback: LossCallback) -> None:
    reason = state.lost_reason
    if reason is None:
        return
    try:  # a thread, as the heartbeat of all other leases must not wait for a callback
        threading.Thread(target=_call, args=(callback, reason), name="fencing-on-lost", daemon=True).start()
    except RuntimeError:  # Python 3.12 starts no thread while the interpreter ends
        _call(callback, reason)


def _call(callback: LossCallback, reason: LossReason) -> None:
    try:
        callback(reason)
    except Exception:  # noqa: BLE001  (of the user's, and no other thread waits for it)
        logger.exception("a callback of on_lost failed")
