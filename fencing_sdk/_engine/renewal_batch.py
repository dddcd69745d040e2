"""
Leases that are renewed together, scheduled as one entry.

A batch knows which leases belong together and which of them are still held. The heartbeat decides when
they are renewed, and what an answer means for them.
"""

from __future__ import annotations

from collections.abc import Collection

from fencing_sdk._engine.lease_state import LeaseState

_OPEN_FOR = 1 / 16
"""Part of an interval for which a new lease joins the batch of those that began before it."""


class RenewalBatch:
    """Leases that are due together."""

    __slots__ = ("members", "sent")

    def __init__(self, members: Collection[LeaseState], *, sent: bool = False) -> None:
        self.members = members
        self.sent = sent
        """Whether their renewal is on its way, so that only their end is waited for meanwhile."""

    def living(self, now: float) -> list[LeaseState]:
        """The members that are held; one that has expired meanwhile learns it here."""
        return [lease for lease in self.members if lease.held_at(now)]


class OpenBatch(RenewalBatch):
    """Leases of one interval that began almost together. Most of them are released before their first renewal."""

    __slots__ = ("by_owner", "interval", "when")

    def __init__(self, interval: float, when: float) -> None:
        self.by_owner: dict[str, LeaseState] = {}
        self.interval = interval
        self.when = when
        super().__init__(self.by_owner.values())

    def takes(self, when: float) -> bool:
        """Whether a lease that is due at *when* may be renewed with these."""
        return 0 <= when - self.when <= self.interval * _OPEN_FOR
