"""
The lease of the code that runs now, without passing it around.

A context variable follows tasks and `asyncio.to_thread`; `loop.run_in_executor` does not carry it.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import cast

from fencing_sdk._engine.lease_state import LeaseState
from fencing_sdk._lease import AnyLease, Lease, state_of
from fencing_sdk._values.claim import Token
from fencing_sdk.errors import NoLeaseError

_leases: ContextVar[tuple[AnyLease, ...]] = ContextVar("fencing_sdk_leases", default=())


class WaitingThread:
    """A thread that uses a client of ``fencing_sdk.sync``, as that client's loop knows it."""

    __slots__ = ("in_transactions", "inside", "name", "runs_a_loop")

    def __init__(self, name: str) -> None:
        self.name = name
        self.inside: list[LeaseState] = []
        """The leases whose blocks it is inside, in whatever context: also those of other coroutines that it runs."""
        self.in_transactions: tuple[object, ...] = ()
        """The transactions that are open in it while it waits, as far as they can be seen: see `open_writes.looks`."""
        self.runs_a_loop = False
        """Whether it runs an event loop, which stands still while it waits."""


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

    The lease may be over; its token tells. In a thread that holds a lock of ``fencing_sdk.sync`` it is a lease of that
    module: import `fencing_sdk.sync.current_lease` there.

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
