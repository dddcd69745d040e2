"""
When the nodes of a session have to go, whatever its event loop does.

The driver's thread keeps the session alive, and with it every node. An event loop that is blocked renews no lease, and
lets no waiter take the turn that has come. So the thread itself deletes what the loop has not prolonged for a ttl. A
node has an end from the moment of its creation, except while it is a waiter's that watches another node.
"""

from __future__ import annotations

import math
import threading

from fencing_sdk._values.clock import BootClock

__all__ = ["NodeEnds"]

_CLOCK = BootClock()
_AT_ONCE = 100
"""Nodes that are deleted at once: the driver is woken by a byte for each, and its pipe takes few."""

_PAUSE = 0.1
"""Seconds until nodes that could not be deleted are due again."""


class NodeEnds:
    """The ends of the nodes of one session. The loop and the driver's thread use it."""

    def __init__(self) -> None:
        self._ends: dict[str, tuple[float, float]] = {}
        """By path: the ttl, and the end."""
        self._first = math.inf
        """No node ends earlier."""
        self._going: set[str] = set()
        self._lock = threading.Lock()

    def begin(self, path: str, ttl: float) -> None:
        """Let a node end in *ttl* seconds, unless it is prolonged."""
        with self._lock:
            self._set(path, ttl, _CLOCK.now() + ttl)

    def prolong(self, path: str, ttl: float) -> bool:
        """Let a node end in *ttl* seconds from now on; False: the thread has given it up."""
        with self._lock:
            known = path in self._ends
            if known:
                self._set(path, ttl, _CLOCK.now() + ttl)
            return known

    def suspend(self, path: str) -> None:
        """Let a node stay: its waiter watches another one."""
        with self._lock:
            if path in self._ends:
                self._ends[path] = self._ends[path][0], math.inf

    def resume_all(self) -> None:
        """Let every node that stays end in its ttl: the watches have ended with their connection."""
        now = _CLOCK.now()
        with self._lock:
            for path, (ttl, end) in list(self._ends.items()):
                if math.isinf(end):
                    self._set(path, ttl, now + ttl)

    def _set(self, path: str, ttl: float, end: float) -> None:
        self._ends[path] = ttl, end
        self._first = min(self._first, end)

    def drop(self, path: str) -> None:
        """Forget a node: it is deleted, or has another name."""
        with self._lock:
            self._ends.pop(path, None)

    def take_due(self) -> tuple[list[str], float]:
        """Give up the nodes that are to go now; also return the seconds until the next look."""
        with self._lock:
            now = _CLOCK.now()
            if now < self._first:
                return [], self._first - now
            due = [path for path, (_, end) in self._ends.items() if end <= now][: max(0, _AT_ONCE - len(self._going))]
            for path in due:
                del self._ends[path]
            self._going.update(due)
            self._first = min((end for _, end in self._ends.values()), default=math.inf)
            return due, max(_PAUSE, self._first - now)

    def gone(self, path: str) -> None:
        """A node that was given up is deleted."""
        with self._lock:
            self._going.discard(path)

    def stays(self, path: str) -> None:
        """A node that was given up could not be deleted: it is due again."""
        with self._lock:
            self._going.discard(path)
            if path not in self._ends:
                self._set(path, 0.0, _CLOCK.now() + _PAUSE)
