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
    TicketRefusedError,
    UsageError,
)

_REASONS: dict[type[BaseException], NotAcquiredReason] = {
    LockHeldError: NotAcquiredReason.HELD,
    AcquireTimeoutError: NotAcquiredReason.TIMED_OUT,
    DrainingError: NotAcquiredReason.DRAINING,
    TicketRefusedError: NotAcquiredReason.REFUSED,
    BackendUnavailableError: NotAcquiredReason.UNAVAILABLE,
    BackendRefusedError: NotAcquiredReason.REFUSED,
    asyncio.CancelledError: NotAcquiredReason.CANCELLED,
    GeneratorExit: NotAcquiredReason.CANCELLED,  # the task was collected while it waited
}


def report_beginning(observers: Observers, name: str, claim: Claim, at: float) -> None:
    """Report that the acquisition with the owner id of *claim* begins."""
    observers.measure("acquiring", name)
    if observers.others:
        from fencing_sdk.events import Acquiring

        observers.emit_to_others(Acquiring(name=name, at=at, holder=claim.holder))


def report_end(  # noqa: PLR0917  (an event's parts)
    observers: Observers,
    name: str,
    claim: Claim,
    at: float,
    waited: float,
    why: BaseException | NotAcquiredReason,
    unanswered: int,
    *,
    closing: bool = False,
) -> None:
    """Report that an acquisition ended without a lease, with so many requests without an answer."""
    from fencing_sdk.events import NotAcquired

    if isinstance(why, NotAcquiredReason):
        reason = why
    elif closing and isinstance(why, UsageError):
        reason = NotAcquiredReason.CLOSED
    else:
        reasons = (reason for kind, reason in _REASONS.items() if isinstance(why, kind))
        reason = next(reasons, NotAcquiredReason.FAILED)
    ended = NotAcquired(name=name, at=at, holder=claim.holder, reason=reason, waited=waited, unanswered=unanswered)
    observers.emit(ended)


class LeaseReport:
    """Reports on the leases of one client."""

    __slots__ = ("_clock", "_observers", "observed")

    def __init__(self, observers: Observers, clock: Clock) -> None:
        self._observers = observers
        self._clock = clock
        self.observed = observers.any
        """False without observers: then nothing needs to be computed for one."""

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
                    resumed_from=lease.resumed_from,
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
        if self.observed:
            from fencing_sdk.events import RenewalLate

            now, token = self._clock.now(), lease.number
            self._observers.emit(
                RenewalLate(name=lease.name, at=now, holder=lease.holder, token=token, late=seconds, stack=stack)
            )

    def failed(self, lease: LeaseState, error: str) -> None:
        """Report that a renewal had no answer."""
        if self.observed:
            from fencing_sdk.events import RenewalFailed

            now, token, left = self._clock.now(), lease.number, lease.remaining
            self._observers.emit(
                RenewalFailed(name=lease.name, at=now, holder=lease.holder, token=token, error=error, remaining=left)
            )

    def lost(self, lease: LeaseState, reason: LossReason) -> None:
        """Report that *lease* was lost before its holder released it."""
        if self.observed:
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
        if self.observed:
            from fencing_sdk.events import FenceRaised

            now = self._clock.now()
            self._observers.emit(
                FenceRaised(name=lease.name, at=now, holder=lease.holder, token=token, resource=resource)
            )

    def stale(self, lease: LeaseState, error: StaleTokenError) -> None:
        """Report that a guard refused a write made under *lease*, or to raise its fence."""
        if self.observed:
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
                    handed_to=lease.handed_to,
                )
            )
