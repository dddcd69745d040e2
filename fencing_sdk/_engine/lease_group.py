"""
Leases of one interval that began almost together, and the schedule of what is due.

Such leases are renewed together, and one timer of the event loop watches over their deadlines: the heartbeat may hang
or fail, and each of them ends in time all the same. A renewal that moves a deadline leaves the timer where it is. A
timer that fires too early is set again: about once in each span of validity, and not at each renewal.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Hashable
from contextvars import Context
from typing import Generic, TypeVar

from fencing_sdk._lease_state import LeaseState
from fencing_sdk._values.clock import Clock

K = TypeVar("K", bound=Hashable)

_OPEN_FOR = 1 / 16
"""Part of an interval for which a new lease joins those that began before it."""
_SWEEP_ABOVE = 64


class LeaseGroup:
    """The leases that are neither released nor lost."""

    __slots__ = ("_clock", "_loop", "_timer", "_watched_until", "due", "interval", "members", "open_until", "since")

    def __init__(self, clock: Clock, interval: float, since: float) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._watched_until = math.inf  # when the timer fires, on the client's clock
        self.members: dict[str, LeaseState] = {}
        self.interval = interval
        self.since = since
        """When the first lease of the group is due. One that is due between this moment and `open_until` may join."""
        self.open_until = since + interval * _OPEN_FOR
        self.due = math.inf
        """When the heartbeat looks at them next."""

    def add(self, lease: LeaseState) -> None:
        """Renew *lease* with the others, and end it at its deadline."""
        self.members[lease.claim.owner] = lease
        lease.group = self
        if lease.deadline < self._watched_until:
            self._watch(lease.deadline)

    def remove(self, lease: LeaseState) -> None:
        """It was released or lost."""
        lease.group = None
        del self.members[lease.claim.owner]

    def stop(self) -> None:
        """Cancel the timer. Call only when the group is empty and closed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._watched_until = math.inf

    def next_look(self) -> float:
        """When the first of them is to be renewed, or ends if its renewal is on its way or would not help."""
        leases = self.members.values()
        return min([min(lease.next_beat, lease.deadline) for lease in leases], default=math.inf)

    def end_expired(self, now: float) -> None:
        """End what has passed its deadline. Each lease that is lost leaves the group."""
        for lease in [lease for lease in self.members.values() if lease.deadline <= now]:
            lease.end()

    def look(self) -> None:
        """End what has passed its deadline, and look again at the next one."""
        self.end_expired(self._clock.now())
        self.stop()
        if self.members:
            self._watch(min([lease.deadline for lease in self.members.values()]))

    def _watch(self, deadline: float) -> None:
        """Set the timer: to a delay, because the loop's clock is not the one by which leases are measured."""
        if self._timer is not None:
            self._timer.cancel()
        self._watched_until = deadline
        self._timer = self._loop.call_later(deadline - self._clock.now(), self.look, context=Context())


class Schedule(Generic[K]):
    """
    When something is due: a heap of moments, one for each key at most, without a clock, a task or a store.

    Keys are put at a moment and come out once it has passed. Putting a key again moves it; the entry left behind in the
    heap is skipped when it surfaces, and swept when such entries outnumber the living ones.
    """

    __slots__ = ("_heap", "_sequence", "_when")

    def __init__(self) -> None:
        self._when: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._when)

    def __contains__(self, key: K) -> bool:
        return key in self._when

    def put(self, key: K, when: float) -> None:
        """Make *key* due at *when*, whatever it was due at before."""
        self._sequence += 1
        self._when[key] = (when, self._sequence)
        heapq.heappush(self._heap, (when, self._sequence, key))
        self._sweep_if_crowded()

    def drop(self, key: K) -> None:
        """Forget *key*; it need not be known."""
        self._when.pop(key, None)
        self._sweep_if_crowded()

    def next(self) -> float | None:
        """The earliest moment, or None when nothing is scheduled."""
        self._skip_dead()
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[tuple[K, float]]:
        """Take out what is due at *now*, earliest first, each with its moment."""
        taken: list[tuple[K, float]] = []
        while self._heap and self._heap[0][0] <= now:
            when, sequence, key = heapq.heappop(self._heap)
            if self._when.get(key) == (when, sequence):
                del self._when[key]
                taken.append((key, when))
        return taken

    def _skip_dead(self) -> None:
        while self._heap and self._when.get(self._heap[0][2]) != self._heap[0][:2]:
            heapq.heappop(self._heap)

    def _sweep_if_crowded(self) -> None:
        if len(self._heap) <= _SWEEP_ABOVE + 2 * len(self._when):
            return
        self._heap = [(when, sequence, key) for key, (when, sequence) in self._when.items()]
        heapq.heapify(self._heap)
