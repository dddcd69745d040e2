"""Which claims have a request on its way whose outcome nobody knows."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["UnansweredRequests"]


class UnansweredRequests:
    """
    Owners with a request that was not clearly answered: it may have been granted, or may still be.

    Requests of one owner may overlap, so they are counted: the answer to one says nothing of another.
    Bounded: those that have not asked for the longest time, and so have given up, are forgotten.
    """

    LIMIT = 100_000

    def __init__(self) -> None:
        self._owners: OrderedDict[str, int] = OrderedDict()

    def begin(self, owner: str) -> bool:
        """Doubt the next request of *owner* until `answered` or `end`; True when an earlier one is doubted already."""
        doubted = self._owners.get(owner, 0)
        self._owners[owner] = doubted + 1
        if doubted:
            self._owners.move_to_end(owner)
        elif len(self._owners) > self.LIMIT:
            self._owners.popitem(last=False)
        return doubted > 0

    def answered(self, owner: str) -> None:
        """One request of *owner* has its answer."""
        doubted = self._owners.pop(owner, 0) - 1
        if doubted > 0:
            self._owners[owner] = doubted

    def end(self, owner: str) -> None:
        """Every request of *owner* has its answer."""
        self._owners.pop(owner, None)

    def has(self, owner: str) -> bool:
        """Whether a request of *owner* may still arrive."""
        return owner in self._owners
