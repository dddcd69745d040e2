"""
Leases that are renewed together, scheduled as one entry.

What may live here: who belongs together, and who of them is still held. When they beat, and what an
answer means for them, is the heartbeat's.
"""

from __future__ import annotations

from collections.abc import Collection

from fencing_sdk._engine.lease_state import LeaseState

_GATHERING = 1 / 16
"""Part of an interval for which new leases join those that came before them."""


class RenewalBatch:
    """Leases that are due together."""

    __slots__ = ("in_flight", "members")

    def __init__(self, members: Collection[LeaseState], *, in_flight: bool = False) -> None:
        self.members = members
        self.in_flight = in_flight
        """Whether their renewal is on its way, so that only their end is waited for meanwhile."""

    def living(self, now: float) -> list[LeaseState]:
        """The members that are held; one that has expired meanwhile learns it here."""
        return [lease for lease in self.members if lease.held_at(now)]


class OpenBatch(RenewalBatch):
    """Leases of one interval that began almost together; most are gone before their first beat."""

    __slots__ = ("by_owner", "interval", "when")

    def __init__(self, interval: float, when: float) -> None:
        self.by_owner: dict[str, LeaseState] = {}
        self.interval = interval
        self.when = when
        super().__init__(self.by_owner.values())

    def takes(self, when: float) -> bool:
        """Whether a lease that is due at *when* may beat with these."""
        return 0 <= when - self.when <= self.interval * _GATHERING
