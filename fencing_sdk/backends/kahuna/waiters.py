"""
Waiters: Kahuna wakes none, so a waiter asks again, and those of one client share the asking.

`fencing_sdk.backends._shared.polling_line` decides who asks, and when. Here is what Kahuna adds:

1. The head of a line that was not woken looks at the lock first. A look is one request, and returns the token, which
   shows the pace of the lock; a refused try is another request, and
   shows nothing.
2. Claims of one client that ask for a lock at the same time send one request: the first one asks, and its refusal,
   or its grant, refuses the others.
3. Until when the grants of this client last, by this host's clock: a refusal that cannot be right is not believed.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from fencing_sdk._values.claim import Busy, Claim, Holder
from fencing_sdk._values.clock import JITTER, BootClock
from fencing_sdk._values.tasks import move_on_after
from fencing_sdk.backends._shared.polling_line import PollingLine
from fencing_sdk.backends._shared.waiters import FirstAsks
from fencing_sdk.errors import BackendError

__all__ = ["KahunaWaiters", "KnownGrants"]

_LOOK_LIMIT = 0.5
"""Seconds that asking for the holder's remaining time may take: the refusal is known already."""
_LOOK_PART = 1 / 8
"""Part of a ttl that it may take: a third of what the engine waits for an answer, which would then be lost."""
_SHORTEST_WAIT = 0.05
"""Seconds that a waiter waits for an expiry at least: clocks of two machines differ, and it must not spin."""
_SPREAD = 0.05
"""Seconds over which the tries of several waiters for the same expiry are spread."""


class KahunaWaiters:
    """
    The waiters of one backend object.

    Args:
        look: Asks who has the lock of a claim.

        left: Seconds that a grant of this client still lasts.
    """

    def __init__(self, look: Callable[[Claim], Awaitable[Holder | None]], left: Callable[[Claim], float]) -> None:
        self._look_at = look
        self._left = left
        self.line = PollingLine(left)
        self.first_asks = FirstAsks()

    async def refusal(self, claim: Claim) -> Busy | None:
        """Refuse *claim* without a try, if that would fail."""
        if not self.line.waits(claim) and (busy := await self.first_asks.refusal(claim)) is not None:
            return busy
        seconds = self.line.refusal(claim)
        if seconds is not None:
            return Busy(seconds if math.isfinite(seconds) else None)
        holder = await self._look(claim) if self.line.looks_first(claim) else None
        return None if holder is None or holder.id == claim.holder else _held(holder)

    async def refused(self, claim: Claim) -> Busy:
        """Make the refusal of *claim*: with a look for the end of the grant, unless the line looks anyway."""
        return Busy(None) if self.line.waits(claim) else _held(await self._look(claim))

    async def _look(self, claim: Claim) -> Holder | None:
        """Who holds the lock; None if it is free, or if that is not known soon."""
        holder = None
        with move_on_after(min(_LOOK_LIMIT, claim.ttl * _LOOK_PART)), contextlib.suppress(BackendError):
            holder = await self._look_at(claim)
        if holder is not None:
            self.line.see(claim.name, holder.token)
        return holder


def _held(holder: Holder | None) -> Busy:
    """A refusal with the time for the next try: the end of the holder's grant, if that is known."""
    return Busy(None if holder is None else max(_SHORTEST_WAIT, holder.remaining) + JITTER.uniform(0, _SPREAD))


class KnownGrants:
    """
    The grants that were made or renewed by this object, and not released.

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
        """*claim* was released or lost."""
        self._ends.pop(claim.owner, None)

    def lives(self, claim: Claim) -> bool:
        """Return whether *claim* should still hold."""
        return self.left(claim) > 0

    def ended(self, claim: Claim) -> bool:
        """Return whether *claim* was granted, and its ttl has passed since."""
        return float("-inf") < self.left(claim) <= 0

    def left(self, claim: Claim) -> float:
        """Seconds until *claim* ends unless it is renewed; 0 or less if it has ended, or is not known."""
        return self._ends.get(claim.owner, float("-inf")) - self._clock.now()
