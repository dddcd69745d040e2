"""
Keys that no claim holds or waits with any more, and that may still exist.

Locks share leases, so a forgotten key would live as long as any other lock of its lease. Its deletion is therefore
sent again and again while this client keeps a lease alive. If the client keeps none, the leases end, and etcd
deletes their keys.

A claim that has left the line may come back and put its key again while deletions of the earlier key are under
way. No deletion deletes a key that was created after the last of them was sent. A key that was created before
that moment must not be used.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

__all__ = ["LATE_ARRIVAL", "PendingDeletes"]

LATE_ARRIVAL = 600.0
"""Seconds for which a request without an answer may still arrive: longer than any kernel sends it again."""
_FIRST_PAUSE = 0.25
_LAST_PAUSE = 5.0
_LIMIT = 100_000


@dataclass(slots=True)
class _PendingDelete:
    since: float
    until: float
    """Before this moment, a confirmed deletion does not prove that the key stays away."""
    modified: int | None
    """Delete the key only at this revision: another client may have adopted it since."""
    due: float
    pause: float = _FIRST_PAUSE
    held: bool = False
    """Whether it is that of a lock that was given back."""
    deleted: bool = False
    """A deletion was confirmed, and only a request that puts the key again may still arrive."""


class PendingDeletes:
    """The keys to delete, and when each deletion is sent next."""

    def __init__(self) -> None:
        self._pending: OrderedDict[bytes, _PendingDelete] = OrderedDict()
        self._cancelled: OrderedDict[bytes, int] = OrderedDict()
        """For each key that is wanted again: the last revision of creation that a deletion may still reach."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._pending

    def add(
        self,
        key: bytes,
        now: float,
        *,
        may_return: bool = False,
        modified: int | None = None,
        sending: bool = False,
        held: bool = False,
    ) -> None:
        """
        Delete *key*. With *may_return*, a request that puts the key may still arrive, for `LATE_ARRIVAL`.

        With *sending*, the caller sends the first deletion at once. *held* is for the key of a lock that is given back.
        """
        due = now + _FIRST_PAUSE if sending else now
        until = now + LATE_ARRIVAL if may_return else now
        self._pending[key] = _PendingDelete(now, until, modified, due, held=held)
        if len(self._pending) > _LIMIT:
            self._pending.popitem(last=False)

    def was_held(self, key: bytes) -> bool:
        """Whether *key*, which is pending, is that of a lock that was given back."""
        return key in self._pending and self._pending[key].held

    def due(self, now: float) -> dict[bytes, int | None]:
        """The keys to delete now, each with the revision that it must have; their next turn is later."""
        due = {key: pending for key, pending in self._pending.items() if pending.due <= now}
        for pending in due.values():
            pending.due = now + pending.pause
            pending.pause = min(pending.pause * 2, _LAST_PAUSE)
        return {key: pending.modified for key, pending in due.items()}

    def sent_once(self, key: bytes) -> bool:
        """Whether no deletion of *key* was due besides the one that its caller sends."""
        pending = self._pending.get(key)
        return pending is not None and pending.pause == _FIRST_PAUSE

    def confirmed(self, key: bytes, now: float) -> None:
        """Take note that etcd has confirmed a deletion that was sent at *now* or later."""
        pending = self._pending.get(key)
        if pending is None:
            return
        pending.deleted = True
        if pending.until <= now:
            del self._pending[key]
            self._cancelled.pop(key, None)

    def never_confirmed(self) -> list[bytes]:
        """The keys of which no deletion was confirmed, apart from those that may be another client's by now."""
        return [key for key, pending in self._pending.items() if not pending.deleted and pending.modified is None]

    def cancel(self, key: bytes, since: float, revision: int) -> None:
        """Stop deleting *key*, which its owner puts again: what was pending at *since* was deleted up to *revision*."""
        pending = self._pending.get(key)
        if pending is None or pending.since > since:
            return
        del self._pending[key]
        self._cancelled[key] = revision
        if len(self._cancelled) > _LIMIT:
            self._cancelled.popitem(last=False)

    def may_delete(self, key: bytes, created: int) -> bool:
        """Whether a deletion may delete, or has deleted, the key that was created at this revision."""
        return key in self._pending or created <= self._cancelled.get(key, 0)

    def clear(self) -> None:
        """Forget all keys."""
        self._pending.clear()
        self._cancelled.clear()
