"""What observers are told of an acquisition before there is a lease: its beginning, and its end without one."""

from __future__ import annotations

import asyncio

from fencing_sdk._values.claim import Claim
from fencing_sdk._values.clock import Clock
from fencing_sdk._values.observers import Observers, stale_rejected
from fencing_sdk.errors import (
    AcquireTimeoutError,
    BackendRefusedError,
    BackendUnavailableError,
    LockHeldError,
    StaleTokenError,
    UsageError,
)
from fencing_sdk.events import Acquiring, NotAcquired, NotAcquiredReason

_REASONS: dict[type[BaseException], NotAcquiredReason] = {
    LockHeldError: NotAcquiredReason.HELD,
    AcquireTimeoutError: NotAcquiredReason.TIMED_OUT,
    StaleTokenError: NotAcquiredReason.STALE,
    BackendUnavailableError: NotAcquiredReason.UNAVAILABLE,
    BackendRefusedError: NotAcquiredReason.REFUSED,
    asyncio.CancelledError: NotAcquiredReason.CANCELLED,
    GeneratorExit: NotAcquiredReason.CANCELLED,  # the task was collected while it waited
}


class AcquisitionReport:
    """Reports on one acquisition, or on one after the other of the same caller. Nothing is computed for no observer."""

    __slots__ = ("_claim", "_clock", "_name", "_observers", "began_at")

    _claim: Claim
    began_at: float

    def __init__(self, observers: Observers, clock: Clock, name: str) -> None:
        self._observers = observers
        self._clock = clock
        self._name = name

    def began(self, claim: Claim) -> None:
        """Tell that an acquisition with the owner id of *claim* begins."""
        self._claim, self.began_at = claim, self._clock.now()
        if self._observers:
            self._observers.emit(Acquiring(name=self._name, at=self.began_at, holder=claim.holder))

    def failed(self, error: BaseException, unanswered: int, *, closing: bool) -> None:
        """Tell that the acquisition ended by *error*."""
        if not self._observers:
            return
        if isinstance(error, StaleTokenError):
            now = self._clock.now()
            self._observers.emit(stale_rejected(error, name=self._name, at=now, holder=self._claim.holder))
        closed = closing and isinstance(error, UsageError)
        reasons = (reason for kind, reason in _REASONS.items() if isinstance(error, kind))
        self.ended(NotAcquiredReason.CLOSED if closed else next(reasons, NotAcquiredReason.FAILED), unanswered)

    def ended(self, reason: NotAcquiredReason, unanswered: int) -> None:
        """Tell that the acquisition ended without a lease, with so many requests without an answer."""
        if self._observers:
            now, holder = self._clock.now(), self._claim.holder
            waited = now - self.began_at
            self._observers.emit(
                NotAcquired(name=self._name, at=now, holder=holder, reason=reason, waited=waited, unanswered=unanswered)
            )
