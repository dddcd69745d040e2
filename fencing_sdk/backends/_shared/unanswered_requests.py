"""Which claims have a request under way whose outcome is unknown."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["UnansweredRequests"]


class UnansweredRequests:
    """
    Owners with a request that was not clearly answered: the store may have carried it out, or still may.

    Requests of one owner may overlap, so they are counted: the answer to one tells nothing about another.
    The table is bounded: owners that have not asked for the longest time have given up, and are forgotten.
    """

    LIMIT = 100_000

    def __init__(self) -> None:
        self._owners: OrderedDict[str, int] = OrderedDict()

    def begin(self, owner: str) -> bool:
        """Count a request of *owner* until `answered` or `end`; return whether an earlier one is unanswered."""
        unanswered = self._owners.get(owner, 0)
        self._owners[owner] = unanswered + 1
        if unanswered:
            self._owners.move_to_end(owner)
        elif len(self._owners) > self.LIMIT:
            self._owners.popitem(last=False)
        return unanswered > 0

    def answered(self, owner: str) -> None:
        """Take note that one request of *owner* was answered."""
        unanswered = self._owners.pop(owner, 0) - 1
        if unanswered > 0:
            self._owners[owner] = unanswered

    def end(self, owner: str) -> None:
        """Take note that every request of *owner* was answered."""
        self._owners.pop(owner, None)

    def has(self, owner: str) -> bool:
        """Whether a request of *owner* may still arrive."""
        return owner in self._owners
