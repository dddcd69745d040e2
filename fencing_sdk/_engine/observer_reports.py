"""Reports to observers: on an acquisition until it ends, and on a lease until its release."""
# ruff: noqa: PLC0415  (a client without observers makes no event, and does not load them)

from __future__ import annotations

import asyncio

from fencing_sdk._lease_state import LeaseState
from fencing_sdk._values.claim import Claim, Permit
from fencing_sdk._values.clock import Clock
from fencing_sdk._values.observers import Observers
from fencing_sdk.errors import (
    AcquireTimeoutError,
    BackendRefusedError,
    BackendUnavailableError,
    DrainingError,
    LockHeldError,
    LossReason,
    NotAcquiredReason,
    StaleTokenError,
    UsageError,
)

_REASONS: dict[type[BaseException], NotAcquiredReason] = {
    LockHeldError: NotAcquiredReason.HELD,
    AcquireTimeoutError: NotAcquiredReason.TIMED_OUT,
    DrainingError: NotAcquiredReason.DRAINING,
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
        """Report that an acquisition with the owner id of *claim* begins."""
        self._claim, self.began_at = claim, self._clock.now()
        _report_beginning(self._observers, self._name, claim, self.began_at)

    def goes_on(self, claim: Claim, began_at: float) -> None:
        """Resume reporting the acquisition with the owner id of *claim*, whose start was already reported."""
        self._claim, self.began_at = claim, began_at

    def failed(self, error: BaseException, unanswered: int, *, closing: bool) -> None:
        """Report that the acquisition ended by *error*."""
        if not self._observers:
            return
        if isinstance(error, StaleTokenError):
            from fencing_sdk.events import stale_rejected

            now = self._clock.now()
            self._observers.emit(stale_rejected(error, name=self._name, at=now, holder=self._claim.holder))
        closed = closing and isinstance(error, UsageError)
        reasons = (reason for kind, reason in _REASONS.items() if isinstance(error, kind))
        self.ended(NotAcquiredReason.CLOSED if closed else next(reasons, NotAcquiredReason.FAILED), unanswered)

    def ended(self, reason: NotAcquiredReason, unanswered: int) -> None:
        """Report that the acquisition ended without a lease, with so many requests without an answer."""
        if self._observers:
            from fencing_sdk.events import NotAcquired

            now, holder = self._clock.now(), self._claim.holder
            waited = now - self.began_at
            self._observers.emit(
                NotAcquired(name=self._name, at=now, holder=holder, reason=reason, waited=waited, unanswered=unanswered)
            )


def _report_beginning(observers: Observers, name: str, claim: Claim, at: float) -> None:
    observers.measure("acquiring", name)
    if observers.others:
        from fencing_sdk.events import Acquiring

        observers.emit_to_others(Acquiring(name=name, at=at, holder=claim.holder))


class LeaseReport:
    """Reports on the leases of one client. False without observers: then nothing needs to be computed for one."""

    __slots__ = ("_clock", "_observers", "observed")

    def __init__(self, observers: Observers, clock: Clock) -> None:
        self._observers = observers
        self._clock = clock
        self.observed = bool(observers)
        """`bool(self)` as an attribute, because every lease reads it."""

    def __bool__(self) -> bool:
        return bool(self._observers)

    def acquiring(self, name: str, claim: Claim, at: float) -> None:
        """Report that the acquisition with the owner id of *claim* begins: its first request is about to be sent."""
        _report_beginning(self._observers, name, claim, at)

    def acquired(self, lease: LeaseState, waited: float) -> None:
        """Report that *lease* is held, *waited* seconds after its acquisition began."""
        self._observers.measure("acquired", lease.name, waited)
        if self._observers.others:
            from fencing_sdk.events import Acquired

            mode = lease.claim.mode
            self._observers.emit_to_others(
                Acquired(
                    name=lease.name,
                    at=self._clock.now(),
                    holder=lease.holder,
                    token=lease.number,
                    ttl=lease.timing.ttl,
                    waited=waited,
                    deadline=lease.deadline,
                    mode=mode.word,
                    permit=lease.permit,
                    permits=mode.of if isinstance(mode, Permit) else None,
                )
            )

    def renewed(self, lease: LeaseState, spare: float) -> None:
        """Report that the deadline was moved when *spare* seconds were left."""
        self._observers.measure("renewed", lease.name, spare)
        if self._observers.others:
            from fencing_sdk.events import Renewed

            now, token, deadline = self._clock.now(), lease.number, lease.deadline
            self._observers.emit_to_others(
                Renewed(name=lease.name, at=now, holder=lease.holder, token=token, spare=spare, deadline=deadline)
            )

    def late(self, lease: LeaseState, seconds: float, stack: str | None) -> None:
        """Report that the heartbeat came so many seconds too late."""
        if self:
            from fencing_sdk.events import RenewalLate

            now, token = self._clock.now(), lease.number
            self._observers.emit(
                RenewalLate(name=lease.name, at=now, holder=lease.holder, token=token, late=seconds, stack=stack)
            )

    def failed(self, lease: LeaseState, error: str) -> None:
        """Report that a renewal had no answer."""
        if self:
            from fencing_sdk.events import RenewalFailed

            now, token, left = self._clock.now(), lease.number, lease.remaining
            self._observers.emit(
                RenewalFailed(name=lease.name, at=now, holder=lease.holder, token=token, error=error, remaining=left)
            )

    def lost(self, lease: LeaseState, reason: LossReason) -> None:
        """Report that *lease* was lost before its holder released it."""
        if self:
            from fencing_sdk.events import Lost

            now, token = self._clock.now(), lease.number
            self._observers.emit(
                Lost(
                    name=lease.name,
                    at=now,
                    holder=lease.holder,
                    token=token,
                    reason=reason,
                    detail=lease.loss(reason).detail,
                )
            )

    def fence_raised(self, lease: LeaseState, resource: str, token: int) -> None:
        """Report that a guard of *resource* refuses every lower token."""
        if self:
            from fencing_sdk.events import FenceRaised

            now = self._clock.now()
            self._observers.emit(
                FenceRaised(name=lease.name, at=now, holder=lease.holder, token=token, resource=resource)
            )

    def stale(self, lease: LeaseState, error: StaleTokenError) -> None:
        """Report that a guard refused a write made under *lease*, or to raise its fence."""
        if self:
            from fencing_sdk.events import stale_rejected

            now = self._clock.now()
            self._observers.emit(stale_rejected(error, name=lease.name, at=now, holder=lease.holder))

    def released(self, lease: LeaseState, *, confirmed: bool, kept_for: float) -> None:
        """Report the end of *lease*."""
        held_for = lease.held_for
        self._observers.measure("released", lease.name, held_for)
        if self._observers.others:
            from fencing_sdk.events import Released

            self._observers.emit_to_others(
                Released(
                    name=lease.name,
                    at=self._clock.now(),
                    holder=lease.holder,
                    token=lease.number,
                    held_for=held_for,
                    confirmed=confirmed,
                    kept_for=kept_for,
                )
            )
