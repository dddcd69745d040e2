"""
Keys that nobody holds or waits with any more, and that may still be there.

Locks share leases, so a key that was forgotten would live as long as any other lock of its lease.
What is owed here is therefore deleted again and again for as long as this client keeps a lease
alive; where it keeps none, etcd ends them all by itself.

A claim that left the line may come back and put its key again, while deletions of the earlier one are
on their way. None of those hits a key that was created after the last of them was sent: an earlier
one is not to be relied on.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

__all__ = ["Debts"]

STRAY = 600.0
"""Seconds for which a request without an answer may still arrive: longer than any kernel sends it again."""
_FIRST_PAUSE = 0.25
_LAST_PAUSE = 5.0
_LIMIT = 100_000


@dataclass(slots=True)
class _Debt:
    since: float
    until: float
    """Before this moment a deletion is no proof that the key stays away."""
    modified: int | None
    """Delete the key only as it was then: somebody else may have taken it over."""
    due: float
    pause: float = _FIRST_PAUSE


class Debts:
    """What is to be deleted, and when it is tried next."""

    def __init__(self) -> None:
        self._owed: OrderedDict[bytes, _Debt] = OrderedDict()
        self._waived: OrderedDict[bytes, int] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._owed

    def owe(self, key: bytes, now: float, *, stray: bool = False, modified: int | None = None) -> None:
        """The key is to go. With *stray* it may come back: a request that writes it is still on its way."""
        self._owed[key] = _Debt(now, now + STRAY if stray else now, modified, now)
        if len(self._owed) > _LIMIT:
            self._owed.popitem(last=False)

    def due(self, now: float) -> dict[bytes, int | None]:
        """What to delete now, each with the revision that it must have; the next time is later."""
        due = {key: debt for key, debt in self._owed.items() if debt.due <= now}
        for debt in due.values():
            debt.due = now + debt.pause
            debt.pause = min(debt.pause * 2, _LAST_PAUSE)
        return {key: debt.modified for key, debt in due.items()}

    def paid(self, key: bytes, now: float) -> None:
        """A deletion that was sent at *now* or later was confirmed."""
        debt = self._owed.get(key)
        if debt is not None and debt.until <= now:
            del self._owed[key]
            self._waived.pop(key, None)

    def waive(self, key: bytes, since: float, revision: int) -> None:
        """Its owner came back: what was owed at *since* was deleted, and no deletion reaches beyond *revision*."""
        debt = self._owed.get(key)
        if debt is None or debt.since > since:
            return
        del self._owed[key]
        self._waived[key] = revision
        if len(self._waived) > _LIMIT:
            self._waived.popitem(last=False)

    def doomed(self, key: bytes, created: int) -> bool:
        """Whether a deletion may hit the key that was created at this revision, or has hit it already."""
        return key in self._owed or created <= self._waived.get(key, 0)

    def clear(self) -> None:
        self._owed.clear()
        self._waived.clear()
