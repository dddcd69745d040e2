"""Distributed locks for asyncio: leases that cancel the work in time, and tokens that fence it off."""

import importlib
import typing

from fencing_sdk._client import LockClient
from fencing_sdk._connect import connect
from fencing_sdk._lease import Lease, PermitLease, current_lease, current_token
from fencing_sdk._lock import Lock
from fencing_sdk._values.claim import Holder
from fencing_sdk._values.observers import Event, Observer
from fencing_sdk._values.reports import Status
from fencing_sdk._values.token import Token
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
    NoLeaseError,
    NotAcquiredReason,
    StaleTokenError,
    UnsupportedError,
    UsageError,
)

if typing.TYPE_CHECKING:
    from fencing_sdk.events import (
        Acquired,
        Acquiring,
        FenceRaised,
        JobEnded,
        JobOutcome,
        Lost,
        NotAcquired,
        Released,
        RenewalFailed,
        RenewalLate,
        Renewed,
        StaleRejected,
    )
    from fencing_sdk.recipes.election import Election, ElectionStanding
    from fencing_sdk.recipes.election_term import ElectionTerm
    from fencing_sdk.recipes.holding import holding
    from fencing_sdk.recipes.jobs import Ran, Skipped
    from fencing_sdk.recipes.multilock import HeldLocks, MultiLock
    from fencing_sdk.recipes.shares import ReadWriteLock, Semaphore

__version__ = "1.0.0rc1"

__all__ = [
    "AcquireCancelledError",
    "AcquireError",
    "AcquireTimeoutError",
    "Acquired",
    "Acquiring",
    "BackendError",
    "BackendRefusedError",
    "BackendUnavailableError",
    "ConfigurationError",
    "DrainingError",
    "Election",
    "ElectionStanding",
    "ElectionTerm",
    "Event",
    "FenceRaised",
    "FencingError",
    "HeldLocks",
    "Holder",
    "InvalidNameError",
    "JobEnded",
    "JobOutcome",
    "Lease",
    "LeaseLostError",
    "Lock",
    "LockClient",
    "LockHeldError",
    "LossReason",
    "Lost",
    "MultiLock",
    "NoLeaseError",
    "NotAcquired",
    "NotAcquiredReason",
    "Observer",
    "PermitLease",
    "Ran",
    "ReadWriteLock",
    "Released",
    "RenewalFailed",
    "RenewalLate",
    "Renewed",
    "Semaphore",
    "Skipped",
    "StaleRejected",
    "StaleTokenError",
    "Status",
    "Token",
    "UnsupportedError",
    "UsageError",
    "connect",
    "current_lease",
    "current_token",
    "holding",
]

_WHEN_USED = {
    "Acquired": "events",
    "Acquiring": "events",
    "Election": "recipes.election",
    "ElectionStanding": "recipes.election",
    "ElectionTerm": "recipes.election_term",
    "FenceRaised": "events",
    "HeldLocks": "recipes.multilock",
    "JobEnded": "events",
    "JobOutcome": "events",
    "Lost": "events",
    "MultiLock": "recipes.multilock",
    "NotAcquired": "events",
    "Ran": "recipes.jobs",
    "ReadWriteLock": "recipes.shares",
    "Released": "events",
    "RenewalFailed": "events",
    "RenewalLate": "events",
    "Renewed": "events",
    "Semaphore": "recipes.shares",
    "Skipped": "recipes.jobs",
    "StaleRejected": "events",
    "holding": "recipes.holding",
}
"""The names that most programs do without, each with the module that is imported when it is first read."""


_MODULES = ("backends", "diagnosis", "events", "recipes")
"""Modules that are read as attributes of this one, likewise."""


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"fencing_sdk.{name}")
    if name not in _WHEN_USED:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    found: object = getattr(importlib.import_module(f"fencing_sdk.{_WHEN_USED[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
