"""What observers are told of a lease, from `Acquired` to `Released`."""

from __future__ import annotations

from fencing_sdk._engine.lease_state import LeaseState
from fencing_sdk._values.clock import Clock
from fencing_sdk._values.observers import Observers, stale_rejected
from fencing_sdk.errors import LossReason, StaleTokenError
from fencing_sdk.events import Acquired, FenceRaised, Lost, Released, RenewalFailed, RenewalLate, Renewed


class LeaseReport:
    """Reports on the leases of one client. False without observers: then nothing needs to be computed for one."""

    __slots__ = ("_clock", "_observers")

    def __init__(self, observers: Observers, clock: Clock) -> None:
        self._observers = observers
        self._clock = clock

    def __bool__(self) -> bool:
        return bool(self._observers)

    def acquired(self, lease: LeaseState, waited: float) -> None:
        """Tell that *lease* is held, *waited* seconds after its acquisition began."""
        if self:
            self._observers.emit(
                Acquired(
                    name=lease.name,
                    at=self._clock.now(),
                    holder=lease.holder,
                    token=lease.number,
                    ttl=lease.timing.ttl,
                    waited=waited,
                    deadline=lease.deadline,
                )
            )

    def renewed(self, lease: LeaseState, spare: float) -> None:
        """Tell that the deadline was moved when *spare* seconds were left."""
        if self:
            now, token, deadline = self._clock.now(), lease.number, lease.deadline
            self._observers.emit(
                Renewed(name=lease.name, at=now, holder=lease.holder, token=token, spare=spare, deadline=deadline)
            )

    def late(self, lease: LeaseState, seconds: float, stack: str | None) -> None:
        """Tell that the heartbeat came so many seconds too late."""
        if self:
            now, token = self._clock.now(), lease.number
            self._observers.emit(
                RenewalLate(name=lease.name, at=now, holder=lease.holder, token=token, late=seconds, stack=stack)
            )

    def failed(self, lease: LeaseState, error: str) -> None:
        """Tell that a renewal had no answer."""
        if self:
            now, token, left = self._clock.now(), lease.number, lease.remaining
            self._observers.emit(
                RenewalFailed(name=lease.name, at=now, holder=lease.holder, token=token, error=error, remaining=left)
            )

    def lost(self, lease: LeaseState, reason: LossReason) -> None:
        """Tell that *lease* is over against the will of its holder."""
        if self:
            now, token = self._clock.now(), lease.number
            self._observers.emit(Lost(name=lease.name, at=now, holder=lease.holder, token=token, reason=reason))

    def fence_raised(self, lease: LeaseState, resource: str, token: int) -> None:
        """Tell that a guard of *resource* refuses every lower token."""
        if self:
            now = self._clock.now()
            self._observers.emit(
                FenceRaised(name=lease.name, at=now, holder=lease.holder, token=token, resource=resource)
            )

    def stale(self, lease: LeaseState, error: StaleTokenError) -> None:
        """Tell that a guard refused a write made under *lease*, or to raise its fence."""
        if self:
            now = self._clock.now()
            self._observers.emit(stale_rejected(error, name=lease.name, at=now, holder=lease.holder))

    def released(self, lease: LeaseState, *, confirmed: bool) -> None:
        """Tell the end of *lease*."""
        if self:
            self._observers.emit(
                Released(
                    name=lease.name,
                    at=self._clock.now(),
                    holder=lease.holder,
                    token=lease.number,
                    held_for=lease.held_for,
                    confirmed=confirmed,
                )
            )
