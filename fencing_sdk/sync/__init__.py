"""
Locks for threads: the words of `fencing_sdk` without ``async``.

    from fencing_sdk.sync import connect

    locks = connect("redis://localhost")
    with locks.lock("report/42", ttl=15) as lease:
        write(lease.token)

The client, the engine and the backends are those of `fencing_sdk`, run by one background thread for each client. What
differs is the loss: no thread can be cancelled. The code that runs on has to ask, and a guard refuses what it writes.

Whatever `fencing_sdk` and `fencing_sdk.recipes` offer to tasks is here for threads, under the same name. Errors and
values are the same objects.
"""

from __future__ import annotations

from collections.abc import Sequence

from fencing_sdk._connect import connect as _connect
from fencing_sdk._lease import AnyLease, current_token
from fencing_sdk._lease import innermost as _innermost
from fencing_sdk._lease_ticket import LeaseTicket
from fencing_sdk._values.claim import Holder, Waiting
from fencing_sdk._values.observers import Observer
from fencing_sdk._values.reports import Status
from fencing_sdk._values.timing import Seconds
from fencing_sdk._values.token import Token
from fencing_sdk.abc import Backend
from fencing_sdk.errors import (
    AcquireCancelledError,
    AcquireError,
    AcquireTimeoutError,
    BackendError,
    BackendRefusedError,
    BackendUnavailableError,
    ConfigurationError,
    DrainingError,
    FencingError,
    InvalidNameError,
    LeaseLostError,
    LockHeldError,
    LossReason,
    StaleTokenError,
    TicketRefusedError,
    UsageError,
)
from fencing_sdk.recipes.election import ElectionStanding
from fencing_sdk.recipes.jobs import Ran, Skipped
from fencing_sdk.recipes.old_locks import KazooLock, OldLock, PythonRedisLock, RedisPyLock, RedissonLock, ShedLockRow
from fencing_sdk.recipes.precondition import holding
from fencing_sdk.sync._client import LockClient
from fencing_sdk.sync._lease import Lease, PermitLease
from fencing_sdk.sync._lock import (
    Election,
    ElectionTerm,
    HeldLocks,
    Lock,
    MultiLock,
    ReadWriteLock,
    Semaphore,
    beside,
)

__all__ = [
    "AcquireCancelledError",
    "AcquireError",
    "AcquireTimeoutError",
    "AnyLease",
    "BackendError",
    "BackendRefusedError",
    "BackendUnavailableError",
    "ConfigurationError",
    "DrainingError",
    "Election",
    "ElectionStanding",
    "ElectionTerm",
    "FencingError",
    "HeldLocks",
    "Holder",
    "InvalidNameError",
    "KazooLock",
    "Lease",
    "LeaseLostError",
    "LeaseTicket",
    "Lock",
    "LockClient",
    "LockHeldError",
    "LossReason",
    "MultiLock",
    "OldLock",
    "PermitLease",
    "PythonRedisLock",
    "Ran",
    "ReadWriteLock",
    "RedisPyLock",
    "RedissonLock",
    "Semaphore",
    "ShedLockRow",
    "Skipped",
    "StaleTokenError",
    "Status",
    "TicketRefusedError",
    "Token",
    "UsageError",
    "Waiting",
    "beside",
    "connect",
    "current_lease",
    "current_token",
    "holding",
]


def connect(
    url: str | Backend | None = None,
    *,
    namespace: str = "",
    observers: Sequence[Observer] = (),
    drain: Seconds | None = None,
    open_wait: Seconds | None = 0.0,
    label: str | None = None,
    **options: object,
) -> LockClient:
    """
    Make a client for threads. No I/O happens here, so it is fine at import time, and before a fork.

    Arguments are those of `fencing_sdk.connect`. Observers are called in the client's own thread, so one that blocks
    delays the heartbeat of every lease. *open_wait* counts for ``with client``. Where no ``with`` opens the client, the
    ``wait`` of the first lock counts for both.

    Raises:
        ConfigurationError: there is no such backend, its driver is missing, or an option is unknown.
        UnsupportedError: gevent or eventlet has replaced the threads of this process, or this is a subinterpreter.
    """
    given = {"observers": observers, "drain": drain, "open_wait": open_wait, "label": label}
    return LockClient(_connect(url, namespace=namespace, **given, **options))  # type: ignore[arg-type]  # of this signature


def current_lease(name: str | None = None) -> AnyLease:
    """
    Return the innermost lease of this thread that is held alone, or the innermost one of any kind on *name*.

    Without *name*, permits of semaphores and leases of readers are passed over. May return a lease that has ended;
    reading its ``token`` then raises. A thread that another one has started does not see the leases of that one: pass
    them on.

    Raises:
        NoLeaseError: this code does not run under such a lock.
    """
    return _innermost(name)
