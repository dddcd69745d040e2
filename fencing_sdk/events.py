"""
Events of locks, reported to observers as frozen values.

Every acquisition has one beginning and one end, and all its events have its ``holder``:

    Acquiring -> NotAcquired
    Acquiring -> Acquired -> Renewed, RenewalLate, RenewalFailed, Lost, ... -> Released
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, unique
from typing import ClassVar

from fencing_sdk._values.observers import Event, Observer
from fencing_sdk.errors import LossReason, NotAcquiredReason, StaleTokenError

__all__ = [
    "Acquired",
    "Acquiring",
    "Event",
    "FenceRaised",
    "JobEnded",
    "JobOutcome",
    "Lost",
    "NotAcquired",
    "NotAcquiredReason",
    "Observer",
    "Released",
    "RenewalFailed",
    "RenewalLate",
    "Renewed",
    "StaleRejected",
    "TokenMissing",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClientEvent(Event):
    """An event of a client, which always knows the acquisition."""

    holder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquiring(_ClientEvent):
    """An acquisition begins. It ends with one `NotAcquired`, or with one `Acquired` and later one `Released`."""

    kind: ClassVar[str] = "acquiring"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotAcquired(_ClientEvent):
    """An acquisition ended without a lease."""

    kind: ClassVar[str] = "not_acquired"
    reason: NotAcquiredReason
    waited: float
    """Seconds since the acquisition began."""
    unanswered: int
    """Requests whose outcome is not known: the lock is released in the background, in case one was granted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquired(_ClientEvent):
    """A lease is held."""

    kind: ClassVar[str] = "acquired"
    token: int
    ttl: float
    waited: float
    """Seconds since the acquisition began."""
    deadline: float
    mode: str = "lock"
    """Mode in which it is held: ``lock``, ``permit``, ``reader`` or ``writer``."""
    permit: int | None = None
    """The number of the permit, where it is one."""
    permits: int | None = None
    """Number of permits, as the holder believes."""
    resumed_from: str | None = None
    """The ``holder`` of the ticket that this lease goes on with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed(_ClientEvent):
    """The store confirmed a renewal."""

    kind: ClassVar[str] = "renewed"
    token: int
    spare: float
    """Seconds that were left of the old deadline when the answer came: the early warning."""
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalLate(_ClientEvent):
    """The heartbeat woke too late: the event loop was blocked or the process did not run."""

    kind: ClassVar[str] = "renewal_late"
    token: int
    late: float
    """Seconds after the moment the renewal was due."""
    stack: str | None
    """Stack of the loop's thread meanwhile, innermost call last; None where it was not seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalFailed(_ClientEvent):
    """A renewal had no answer. It is tried again until the deadline."""

    kind: ClassVar[str] = "renewal_failed"
    token: int
    error: str
    remaining: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(_ClientEvent):
    """The lease was lost before its holder released it; its work is being cancelled. `Released` follows."""

    kind: ClassVar[str] = "lost"
    token: int
    reason: LossReason
    detail: str = ""
    """Detail beyond the reason: the last renewal without an answer, or the operator's note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Released(_ClientEvent):
    """
    The end of a lease: released, dropped, or left to its ttl by a client that was closed.

    It follows every `Acquired` once, after `Lost` too.
    """

    kind: ClassVar[str] = "released"
    token: int
    held_for: float
    confirmed: bool
    """
    True if the store answered in time that it has ended the grant, or after a loss that the grant has gone.

    If not, its ttl frees the lock at the latest. False also where this very answer showed that the lease was lost:
    then `Lost` comes just before.
    """
    kept_for: float = 0.0
    """
    Seconds for which the store keeps the lock nevertheless: after a job for the rest of ``at_least_for``, and for a
    ticket.
    """
    handed_to: str | None = None
    """The ``holder`` of the ticket, if the lease was detached."""


@unique
class JobOutcome(StrEnum):
    """Outcome of one call of a job. The value is the word used in recordings and metrics."""

    RAN = "ran"
    """The function returned while the lock was held."""

    SKIPPED = "skipped"
    """The lock was held, by a run that goes on or for the rest of ``at_least_for``: the function was not called."""

    LOST = "lost"
    """The lease was lost while the function ran, or before the store had confirmed that it keeps the lock."""

    FAILED = "failed"
    """The function raised an error and the lock stays taken, or the call could not ask for the lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded(Event):
    """A call of a job ended: see `LockClient.job`. Every call has one, unless its process was killed."""

    kind: ClassVar[str] = "job_ended"
    outcome: JobOutcome
    token: int | None = None
    """None where the function was not called."""
    held_for: float = 0.0
    """Seconds from the grant to the end of the function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceRaised(Event):
    """A guard refuses every lower token from now on."""

    kind: ClassVar[str] = "fence_raised"
    token: int
    resource: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleRejected(Event):
    """A guard refused a write made under this lock, or refused to raise its fence."""

    kind: ClassVar[str] = "stale_rejected"
    token: int
    resource: str
    fence: int
    conflict: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMissing(Event):
    """A request carried no token. ``name`` and ``resource`` are empty where the middleware names no resource."""

    kind: ClassVar[str] = "token_missing"
    resource: str
    required: bool
    """True if the request was refused for it."""


def stale_rejected(error: StaleTokenError, *, name: str, at: float, holder: str | None) -> StaleRejected:
    """The event that reports *error*."""
    return StaleRejected(
        name=name,
        at=at,
        holder=holder,
        token=error.token,
        resource=error.resource,
        fence=error.fence,
        conflict=error.conflict,
    )
