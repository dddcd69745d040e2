"""Tickets that one backend object has drawn: Kahuna's answers alone do not say how old a grant is."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from fencing_sdk._values.clock import BootClock

__all__ = ["KnownTickets"]

_NEVER = float("-inf")


@dataclass(slots=True)
class _Known:
    unanswered: int = 0
    """Draws without a clear answer, counted because they may overlap."""
    ends: float = _NEVER
    """Until when the ticket lives at least; `_NEVER`: it was not seen to hold."""
    parked: bool = False
    """True if it was given back, and only stands there until it ends."""


class KnownTickets:
    """
    Tickets by their owners, which were drawn by this object and are not known to be gone.

    The table is bounded: beyond its limit the one that was heard of longest ago is forgotten. A refusal of it is
    believed at once then, and a draw that finds it takes it for new.
    """

    LIMIT = 100_000

    def __init__(self) -> None:
        self._clock = BootClock()
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def now(self) -> float:
        """The moment to remember when a request is sent."""
        return self._clock.now()

    def begin(self, owner: str) -> bool:
        """Count a draw of *owner*; return whether what it finds may be older than this draw."""
        known = self._enter(owner)
        known.unanswered += 1
        return known.unanswered > 1 or known.ends > _NEVER

    def refused(self, owner: str) -> None:
        """The only draw of *owner* was refused, for certain."""
        known = self._known.get(owner)
        if known is not None and known.unanswered <= 1 and known.ends == _NEVER:
            del self._known[owner]

    def holds(self, owner: str, sent_at: float, ttl: float) -> None:
        """A request that was sent at *sent_at* was answered: the ticket holds, for *ttl* seconds from then on."""
        known = self._enter(owner)
        known.unanswered, known.ends = 0, max(known.ends, sent_at + ttl)

    def park(self, owner: str, ends: float) -> None:
        """Note that the ticket stays until *ends*, and is no longer kept."""
        known = self._enter(owner)
        known.parked, known.ends = True, ends

    def forget(self, owner: str) -> None:
        """The ticket is gone."""
        self._known.pop(owner, None)

    def was_held(self, owner: str) -> bool:
        """Return whether *owner* had a ticket here, of which this object has not yet seen that it is gone."""
        known = self._known.get(owner)
        return known is not None and known.ends > _NEVER

    def left(self, owner: str) -> float:
        """Seconds until the ticket dies unless it is kept; 0 or less if it is dead, or not known."""
        known = self._known.get(owner)
        return _NEVER if known is None else known.ends - self._clock.now()

    def lives(self, owner: str) -> bool:
        """Return whether the ticket should still be there."""
        return self.left(owner) > 0

    def is_parked(self, owner: str) -> bool:
        """Return whether the ticket was given back, and still stands there."""
        known = self._known.get(owner)
        return known is not None and known.parked and self.lives(owner)

    def _enter(self, owner: str) -> _Known:
        known = self._known.get(owner)
        if known is None:
            known = self._known[owner] = _Known()
            if len(self._known) > self.LIMIT:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(owner)
        return known
