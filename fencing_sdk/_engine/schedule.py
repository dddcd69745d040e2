"""
When something is due: pure, without a clock, a task or a store.

Keys are put at a moment and come out once it has passed. Putting a key again moves it; the entry
left behind in the heap is skipped when it surfaces, and swept when such entries outnumber the
living ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_SWEEP_ABOVE = 64


class Schedule(Generic[K]):
    """A heap of moments, one for each key at most."""

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
