"""
The random numbers of the package: pauses, and orders in which servers are tried.

They come from a generator of their own. A program that seeds `random` gets the same numbers whether or not a client
works in a background thread meanwhile. The system draws each of them, so that the copies of a process (forks, snapshots
that were restored) do not pause in step.
"""

from __future__ import annotations

import random

__all__ = ["JITTER"]


class _Jitter(random.SystemRandom):
    """Draws from the system, or from *drawn_from*, by which a test repeats a run."""

    drawn_from: random.Random | None = None

    def random(self) -> float:
        """See `random.Random.random`."""
        return super().random() if self.drawn_from is None else self.drawn_from.random()

    def getrandbits(self, k: int) -> int:
        """See `random.Random.getrandbits`."""
        return super().getrandbits(k) if self.drawn_from is None else self.drawn_from.getrandbits(k)


JITTER = _Jitter()
