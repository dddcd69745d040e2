"""
How waiters share the polling of a store that wakes no waiter.

The waiters of one client for one lock stand in a line, first come, first served. There are three rules:

1. Only the head of a line asks the store. The others are refused here, without a request.
2. While a grant of this client holds the lock, the head is refused here too. The release of that grant wakes it at
   once; so does a head that leaves, whatever the reason.
3. While another client holds the lock, the head asks again after a pause: a quarter of the time between two grants, as
   the tokens show it, and less for each grant that passed the head over. If that quarter is unknown or longer than
   0.55 s, the pause is 0.55 s. The number of tries plays no part, so no waiter asks less often because it has waited
   for longer.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fencing_sdk._values.claim import Claim
from fencing_sdk._values.clock import JITTER, BootClock
from fencing_sdk._values.loop_owner import LoopOwner
from fencing_sdk.abc import PlaceInLine, WaiterNotice

__all__ = ["Pace", "PlaceToPoll", "PollingLine"]

_PART = 1 / 4
_LONGEST = 0.55
"""Seconds between two questions, on average, for a lock that changes hands slowly or at an unknown pace."""
_SHORTEST = 0.01
_JITTER = 0.25


@dataclass(slots=True)
class Pace:
    """How fast one lock changes hands, as far as its tokens were seen."""

    token: int = -1
    seen_at: float = 0.0
    """When its last change was seen."""
    between: float | None = None
    """Seconds between two grants; None before a change was seen."""

    def see(self, token: int, now: float) -> None:
        """*token* is that of the present holder."""
        if token <= self.token:
            return
        if self.token >= 0:
            seconds = (now - self.seen_at) / (token - self.token)
            self.between = seconds if self.between is None else (self.between + seconds) / 2
        self.token, self.seen_at = token, now

    def pause(self, now: float, passed_over: int) -> float:
        """Seconds until a waiter asks again, before which *passed_over* other clients got the lock."""
        if self.between is None:
            return _LONGEST
        pause = max(self.between, now - self.seen_at) * _PART
        return _LONGEST if pause >= _LONGEST else max(_SHORTEST, pause / (1 + passed_over))


class PlaceToPoll(PlaceInLine):
    """A waiter in the line."""

    polls = True

    def __init__(self, line: PollingLine, claim: Claim, notify: WaiterNotice, joined_at: int) -> None:
        self._line = line
        self.claim = claim
        self.notify = notify
        self.joined_at = joined_at
        """The token of the holder when this waiter joined."""
        self.woken = False
        """True if the waiter was woken. Then it asks for the lock without looking at it first."""

    def wake(self) -> None:
        """Let it try: it is the head, or the lock was released."""
        self.woken = True
        self.notify()

    def retry_after(self, advice: float) -> float:
        """See `fencing_sdk.abc.PlaceInLine.retry_after`."""
        return min(advice, self._line.pause_of(self))

    def leave(self) -> None:
        """See `fencing_sdk.abc.PlaceInLine.leave`."""
        self._line.remove(self)


@dataclass(slots=True)
class _Name:
    pace: Pace = field(default_factory=Pace)
    waiting: deque[PlaceToPoll] = field(default_factory=deque)
    holding: Claim | None = None
    """The grant of this client, until it is released."""


class PollingLine:
    """
    The lines of one backend object, one for each lock. Locks without waiters are forgotten, the oldest first.

    Args:
        left: Seconds until a grant of this client ends unless it is renewed; 0 or less when it has ended.
    """

    NAMES = 10_000

    def __init__(self, left: Callable[[Claim], float]) -> None:
        self._left = left
        self._clock = BootClock()
        self._names: OrderedDict[str, _Name] = OrderedDict()
        self._owner: LoopOwner | None = None

    def stand(self, claim: Claim, notify: WaiterNotice) -> PlaceToPoll:
        """Join the line for ``claim.name``."""
        self._forget_former_loop()
        name = self._name(claim.name)
        place = PlaceToPoll(self, claim, notify, name.pace.token)
        name.waiting.append(place)
        return place

    def _forget_former_loop(self) -> None:
        """Waiters of a loop that has ended, or of the parent process, wait no more, and refuse no claim."""
        if self._owner is None or not self._owner.is_current:
            self._owner = LoopOwner()
            for known in self._names.values():
                known.waiting.clear()

    def remove(self, place: PlaceToPoll) -> None:
        """Let *place* leave; the next one becomes the head."""
        name = self._name(place.claim.name)
        if place in name.waiting:
            was_head = name.waiting[0] is place
            name.waiting.remove(place)
            if was_head and name.waiting:
                name.waiting[0].wake()

    def refusal(self, claim: Claim) -> float | None:
        """
        Return the seconds until *claim* should ask the store, if it is refused here; None: it asks now.

        They are infinite for a waiter that is not the head of its line.
        """
        self._forget_former_loop()
        name = self._names.get(claim.name)
        if name is None or not name.waiting:
            return None
        if name.waiting[0].claim.owner != claim.owner:
            return float("inf")
        left = 0.0 if name.holding is None else self._left(name.holding)
        return left if left > 0 else None

    def looks_first(self, claim: Claim) -> bool:
        """Return whether the head of the line should look at the lock before asking for it, because nothing woke it."""
        name = self._names.get(claim.name)
        if name is None or not name.waiting or name.waiting[0].claim.owner != claim.owner:
            return False
        woken, name.waiting[0].woken = name.waiting[0].woken, False
        return not woken

    def waits(self, claim: Claim) -> bool:
        """Return whether *claim* stands in line."""
        name = self._names.get(claim.name)
        return name is not None and any(place.claim.owner == claim.owner for place in name.waiting)

    def pause_of(self, place: PlaceToPoll) -> float:
        """Seconds until *place* tries again although it was not woken."""
        name = self._name(place.claim.name)
        if self.refusal(place.claim) is not None:
            return float("inf")
        passed_over = max(0, name.pace.token - place.joined_at) if place.joined_at >= 0 else 0
        return name.pace.pause(self._clock.now(), passed_over) * JITTER.uniform(1 - _JITTER, 1 + _JITTER)

    def see(self, name: str, token: int) -> None:
        """Take note that *name* is held with *token*, by the store's answer."""
        self._name(name).pace.see(token, self._clock.now())

    def granted(self, claim: Claim, token: int) -> None:
        """*claim* was granted."""
        name = self._name(claim.name)
        name.pace.see(token, self._clock.now())
        name.holding = claim

    def ended(self, claim: Claim) -> None:
        """*claim* was released or lost: its lock may be free."""
        self._forget_former_loop()
        name = self._names.get(claim.name)
        if name is None or (name.holding is not None and name.holding.owner != claim.owner):
            return
        name.holding = None
        if name.waiting:
            name.waiting[0].wake()

    def _name(self, name: str) -> _Name:
        known = self._names.get(name)
        if known is None:
            known = self._names[name] = _Name()
            for _ in range(len(self._names) - self.NAMES):  # forgets no line in which a waiter stands
                oldest, found = next(iter(self._names.items()))
                if found.waiting:
                    self._names.move_to_end(oldest)
                else:
                    del self._names[oldest]
        else:
            self._names.move_to_end(name)
        return known
