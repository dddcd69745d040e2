"""
Keys that nobody holds or waits with any more, and that may still be there.

Locks share leases, so a key that was forgotten would live as long as any other lock of its lease.
What is owed here is therefore deleted again and again for as long as this client keeps a lease
alive; where it keeps none, etcd ends them all by itself.
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

    def __contains__(self, key: bytes) -> bool:
        return key in self._owed

    def owe(self, key: bytes, now: float, *, stray: bool = False, modified: int | None = None) -> None:
        """The key is to go. With *stray* it may come back: a request that writes it is still on its way."""
        self._owed[key] = _Debt(now + STRAY if stray else now, modified, now)
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

    def waive(self, key: bytes) -> None:
        """Its owner came back, and wants it."""
        self._owed.pop(key, None)

    def clear(self) -> None:
        self._owed.clear()
