"""Until when grants last by this host's clock, to tell a refusal that cannot be right."""

from __future__ import annotations

from collections import OrderedDict

from fencing_sdk._values.claim import Claim
from fencing_sdk._values.clock import BootClock

__all__ = ["KnownGrants"]


class KnownGrants:
    """
    The grants that were made or renewed by this object, and not given back.

    The table is bounded: beyond its limit the grant that was renewed longest ago is forgotten, and a refusal of it is
    believed at once.
    """

    LIMIT = 100_000

    def __init__(self) -> None:
        self._clock = BootClock()
        self._ends: OrderedDict[str, float] = OrderedDict()

    def now(self) -> float:
        """The moment to remember when a request is sent."""
        return self._clock.now()

    def keep(self, claim: Claim, sent_at: float) -> None:
        """A request that was sent at *sent_at* has granted or renewed *claim*."""
        self._ends[claim.owner] = sent_at + claim.ttl
        self._ends.move_to_end(claim.owner)
        if len(self._ends) > self.LIMIT:
            self._ends.popitem(last=False)

    def forget(self, claim: Claim) -> None:
        """*claim* was given back or lost."""
        self._ends.pop(claim.owner, None)

    def lives(self, claim: Claim) -> bool:
        """Whether *claim* should still hold."""
        return self.left(claim) > 0

    def ended(self, claim: Claim) -> bool:
        """Whether *claim* was granted, and its ttl has passed since."""
        return float("-inf") < self.left(claim) <= 0

    def left(self, claim: Claim) -> float:
        """Seconds until *claim* ends unless it is renewed; 0 or less if it has ended, or is not known."""
        return self._ends.get(claim.owner, float("-inf")) - self._clock.now()
