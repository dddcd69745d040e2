"""
Lease: the handle of a held lock, and the lease of the code that runs now.

A context variable follows tasks and `asyncio.to_thread`; `loop.run_in_executor` does not carry it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Self, cast

from fencing_sdk._lease_state import LeaseState, raise_end
from fencing_sdk._lease_ticket import LeaseTicket
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.observers import logger
from fencing_sdk._values.timing import Seconds, check_ttl
from fencing_sdk._values.token import Token, token_headers
from fencing_sdk.errors import LossReason, NoLeaseError, StaleTokenError, shown


class AnyLease(Uncopied):
    """
    Properties that the `Lease` of a task shares with that of a thread. Any thread may read them.

    It is the type for functions that code of both kinds calls.
    """

    __slots__ = ("__weakref__", "_state")

    def __init__(self, state: LeaseState) -> None:
        self._state = state

    def __repr__(self) -> str:
        return repr(self._state)

    @property
    def name(self) -> str:
        """Name of the lock, without the client's namespace."""
        return self._state.name

    @property
    def resource(self) -> str:
        """Resource of this lease to a guard: the name of the lock, or ``name/permit`` for a permit."""
        return self._state.resource(self._state.name)

    @property
    def token(self) -> Token:
        """
        The fencing token: an int to send with every write. Read it at the last moment.

        Raises:
            LeaseLostError: the lease is over. The clock is looked at now, at this very read.
        """
        return self._state.token

    @property
    def owner(self) -> str:
        """The secret id of this acquisition. It is enough to release the lock: never send or log it."""
        return self._state.owner

    @property
    def holder(self) -> str:
        """A short public digest of the owner id, safe to send and log."""
        return self._state.holder

    @property
    def label(self) -> str | None:
        """The text that `LockClient.inspect` shows to others."""
        return self._state.claim.label

    @property
    def ttl(self) -> float:
        """Seconds the store keeps the lock after the last renewal."""
        return self._state.timing.ttl

    @property
    def remaining(self) -> float:
        """Seconds until the deadline as it stands now; 0 when the lease is over."""
        return self._state.remaining

    @property
    def held(self) -> bool:
        """True if the lease may be used at this moment."""
        return self._state.held

    @property
    def lost_reason(self) -> LossReason | None:
        """Why the lease was lost; None while it is held, or when it was released in time."""
        return self._state.lost_reason

    def check(self) -> None:
        """
        Do nothing while the lease is held. Sprinkle it through long work that does not await.

        Raises:
            LeaseLostError: the lease is over.
        """
        self._state.check()

    def headers(self) -> dict[str, str]:
        """
        The HTTP headers that carry the token to a guarded service.

        Raises:
            LeaseLostError: the lease is over.
        """
        return token_headers(self.token)


class Lease(AnyLease):
    """
    A lock that is held, until its deadline.

    The deadline moves with every confirmed renewal. Past it every use of the token raises, even
    when the process slept for an hour and nothing else noticed. Safe to read from any thread;
    `renew`, `release` and `wait_lost` belong to the event loop that acquired it.

    A plain handle may be left to a block: ``async with await lock.acquire() as lease`` releases it at the
    end. The end may run in another task than the beginning, and nothing is cancelled when the lease is lost; the end
    raises `LeaseLostError` then.

    Not promised: that a thread, a shielded block or C code under the lease stops. The token, and a
    guard at the resource, are for those.
    """

    __slots__ = ()

    def __del__(self, interpreter_ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if interpreter_ends():  # by its own reference: the globals of a module may be gone by then
            return
        try:
            state = self._state
        except AttributeError:  # it was made of nothing
            return
        if state.released or state.pid != os.getpid():
            return
        lost = state.lost  # before the loop, in another thread, begins to release the lease
        with contextlib.suppress(RuntimeError):  # the loop is closed: the ttl will free the lock
            state.loop.call_soon_threadsafe(_release_dropped, state)
        if lost is None:
            message = f"lease on {shown(state.name)} (token {state.number:d}) was dropped without release"
            warnings.warn(message, ResourceWarning, source=self, stacklevel=2)

    async def __aenter__(self) -> Self:
        if self._state.released:
            raise self._state.loss()
        self._state.block = asyncio.current_task()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._state.block = None
        await end_block(self, raised)
        raise_end(self._state, raised)

    async def wait_lost(self) -> LossReason | None:
        """Wait until the lease is over; return why it was lost, or None when it was released."""
        return await self._state.wait_lost()

    async def renew(self) -> None:
        """
        Renew now, besides the heartbeat.

        Raises:
            LeaseLostError: the lease is over, or the store refused.
            BackendUnavailableError: the store did not answer; the lease goes on until its deadline.
        """
        self._state.check_loop()
        self._state.check()
        await self._state.keeper.renew(self._state)

    async def release(self) -> None:
        """
        Release the lock. Idempotent, shielded from cancellation and bounded; never touches another's grant.

        It raises no `LeaseLostError`, which could hide an error of yours: look at `lost_reason` afterwards to see
        whether the lock was lost before, also where only this release has found that.

        Raises:
            LeaseLostError: in the body of a job, whose lock stays taken: the store did not confirm that.
        """
        if self._state.pid != os.getpid():
            return
        self._state.check_loop()
        await self._state.keeper.release(self._state)

    async def detach(self, keep: Seconds | None = None) -> LeaseTicket:
        """
        End the lease here without a release, and return a ticket by which another process goes on with it.

        The store keeps the lock for the ticket, and those who wait keep their places: see `LockClient.resume`. This
        lease is over at once: its token raises `LeaseLostError` with `LossReason.HANDED_OVER`. Its block ends without
        an error. A caller that is cancelled meanwhile gets no ticket, and the lock is given back.

        Args:
            keep: Seconds for which the store keeps the lock without a renewal, at most one day. The ttl by default.

        Raises:
            ConfigurationError: *keep* is out of range.
            LeaseLostError: the lease is over, or the store did not confirm until its deadline that the ticket holds.
            BackendRefusedError: the store will not, whatever is tried; the lock is given back.
            UnsupportedError: the tickets of the store do not change hands. The lease goes on.
            UsageError: the lease is that of a job, or has an old lock beside it. The lease goes on.
        """
        state = self._state
        seconds = state.timing.ttl if keep is None else check_ttl(keep, "keep")
        state.check_loop()
        return await state.keeper.detach(state, seconds)


def _release_dropped(state: LeaseState) -> None:
    """Release a lease whose handle is gone, and log that: Python shows a `ResourceWarning` in its development mode."""
    if state.held:
        logger.warning(
            "lease on %s (token %d) was dropped without release, so others may get the lock now; keep the handle that "
            "acquire() returns, or write: async with lock",
            shown(state.name),
            state.number,
        )
    state.keeper.abandon(state)


class PermitLease(Lease):
    """A permit of a `Semaphore` that is held, until its deadline."""

    __slots__ = ()

    @property
    def permit(self) -> int:
        """The number of the permit: from 0 to below the number of permits. No other holder has it at the same time."""
        return self._state.permit or 0


async def end_block(lease: Lease, raised: BaseException | None) -> None:
    """Release a plain handle at the end of a block, which *raised*. For this package alone."""
    if isinstance(raised, StaleTokenError):
        state_of(lease).report_stale(raised)
    await lease.release()


def state_of(lease: AnyLease) -> LeaseState:
    """Return what the engine knows about *lease*. For this package alone: its calls can make a lease unsafe."""
    return lease._state  # noqa: SLF001  (the one door to it)


_leases: ContextVar[tuple[AnyLease, ...]] = ContextVar("fencing_sdk_leases", default=())


class WaitingThread:
    """A thread that uses a client of ``fencing_sdk.sync``, as that client's loop knows it."""

    __slots__ = ("in_transactions", "inside", "name", "runs_a_loop")

    def __init__(self, name: str) -> None:
        self.name = name
        self.inside: list[LeaseState] = []
        """The leases whose blocks it is inside, in whatever context: also those of other coroutines that it runs."""
        self.in_transactions: tuple[object, ...] = ()
        """The transactions that are open in it while it waits, as far as they can be seen: see `_values.token`."""
        self.runs_a_loop = False
        """True if it runs an event loop, which stands still while it waits."""


_caller: ContextVar[WaitingThread | None] = ContextVar("fencing_sdk_caller", default=None)


def waiting_thread() -> WaitingThread | None:
    """Return the thread that waits until this task has ended. None where no thread does."""
    return _caller.get()


def run_for(thread: WaitingThread) -> None:
    """Note that *thread* waits for what runs in this context."""
    _caller.set(thread)


def current_lease(name: str | None = None) -> Lease:
    """
    Return the innermost lease of this context that is held alone, or the innermost one of any kind on *name*.

    Without *name*, permits of semaphores and leases of readers are passed over: a semaphore around a write bounds how
    many write, and the resource knows the lock. The writer of a read/write lock holds alone.

    May return a lease that has ended; reading `Lease.token` then raises. In a thread that holds a lock of
    ``fencing_sdk.sync`` it is a lease of that module: import `fencing_sdk.sync.current_lease` there.

    Raises:
        NoLeaseError: this code does not run under such a lock.
    """
    return cast("Lease", innermost(name))


def innermost(name: str | None) -> AnyLease:
    """
    Do the same for a lease of either world.

    Raises:
        NoLeaseError: this code does not run under such a lock.
    """
    leases = _leases.get()
    for lease in reversed(leases):
        if lease.name == name or (name is None and not state_of(lease).claim.mode.shared):
            return lease
    raise NoLeaseError(name, leases[-1].name if name is None and leases else None)


def current_token(name: str | None = None) -> Token:
    """
    Return the fencing token of `current_lease`, checked against the clock at this moment.

    Without *name* it is never that of a permit or a reader: ``current_token("gpu-pool")`` asks for one.

    Raises:
        NoLeaseError: this code does not run under such a lock.
        LeaseLostError: it does, and the lease is over.
    """
    return innermost(name).token


def held_here() -> tuple[AnyLease, ...]:
    """Every lease this context was entered under, outermost first."""
    return _leases.get()


def push(lease: AnyLease) -> None:
    """Make *lease* the innermost one of this context."""
    _leases.set((*_leases.get(), lease))


def pop(lease: AnyLease) -> tuple[AnyLease, ...]:
    """
    Take *lease* out of this context, wherever it stands, and return those that were entered after it.

    Silently does nothing where this is another context than its own.
    """
    leases = _leases.get()
    if leases and leases[-1] is lease:
        _leases.set(leases[:-1])
        return ()
    if lease not in leases:
        return ()
    place = leases.index(lease)
    _leases.set(leases[:place] + leases[place + 1 :])
    return leases[place + 1 :]
