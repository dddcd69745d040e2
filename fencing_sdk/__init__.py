"""Distributed locks for asyncio: leases that cancel the work in time, and tokens that fence it off."""

from fencing_sdk._client import LockClient
from fencing_sdk._connect import connect
from fencing_sdk._current_lease import current_lease, current_token
from fencing_sdk._lease import Lease, PermitLease
from fencing_sdk._lock import Lock
from fencing_sdk._values.claim import Holder, Token
from fencing_sdk._values.client_status import Status
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
    StaleTokenError,
    UnsupportedError,
    UsageError,
)
from fencing_sdk.events import (
    Acquired,
    Acquiring,
    Event,
    FenceRaised,
    JobEnded,
    JobOutcome,
    Lost,
    NotAcquired,
    NotAcquiredReason,
    Observer,
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
from fencing_sdk.recipes.rwlock import ReadWriteLock
from fencing_sdk.recipes.semaphore import Semaphore

__version__ = "0.1.0"

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
