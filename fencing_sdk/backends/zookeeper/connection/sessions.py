"""
The sessions of one backend: one for each ttl in use, shared by all locks of that ttl.

The timeout of a session is fixed when it is opened, and it is what frees the locks of a process
that died. So locks of different ttls have different sessions, up to a number.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection

from fencing_sdk._values.loop_owner import ForkDetector
from fencing_sdk._values.timing import DEFAULT_TTL
from fencing_sdk.backends.zookeeper.connection.driver import ZooKeeperSettings
from fencing_sdk.backends.zookeeper.connection.session import ZooKeeperSession

__all__ = ["MOST_SESSIONS", "ZooKeeperSessions"]

MOST_SESSIONS = 8
"""Each costs a connection and a thread. Locks of more different ttls share the sessions that are there."""


class ZooKeeperSessions:
    """Opens sessions when they are needed, and finds the one for a ttl."""

    def __init__(
        self,
        settings: ZooKeeperSettings,
        *,
        on_resumed: Callable[[ZooKeeperSession], None],
        on_ended: Callable[[ZooKeeperSession], None],
    ) -> None:
        self._settings = settings
        self._on_resumed = on_resumed
        self._on_ended = on_ended
        self._by_ttl: dict[int, ZooKeeperSession] = {}
        self._fork = ForkDetector()

    def forked(self) -> bool:
        """Whether this process is a fork that was not noticed yet; its parent's sessions are then forgotten."""
        if not self._fork.forked():
            return False
        self._by_ttl.clear()  # not even closed: the server would end the parent's session
        return True

    def of(self, ttl: float) -> ZooKeeperSession:
        """The session for locks of *ttl*; one that has ended is replaced."""
        wanted = math.ceil(ttl * 1000)
        session = self._by_ttl.get(wanted)
        if session is not None and session.error is None:
            return session
        if session is None and len(self._by_ttl) >= MOST_SESSIONS:
            return self._most_like(wanted)
        session = ZooKeeperSession(self._settings, wanted / 1000, on_resumed=self._on_resumed, on_ended=self._on_ended)
        self._by_ttl[wanted] = session
        return session

    def _most_like(self, wanted: int) -> ZooKeeperSession:
        """The shortest session that is long enough, else the longest."""
        longer = [ttl for ttl in self._by_ttl if ttl >= wanted]
        ttl = min(longer) if longer else max(self._by_ttl)
        return self.of(ttl / 1000)

    def any(self) -> ZooKeeperSession:
        """A session for questions: one that is connected, if there is one."""
        living = [session for session in self._by_ttl.values() if session.error is None]
        connected = [session for session in living if session.connected]
        return (connected or living or [self.of(DEFAULT_TTL)])[0]

    async def aclose(self, *, keep: Collection[ZooKeeperSession]) -> None:
        """Close all, and disconnect without closing those that still have grants to *keep*."""
        sessions = list(self._by_ttl.values())
        self._by_ttl = {ttl: session for ttl, session in self._by_ttl.items() if session in keep}
        await asyncio.gather(*(session.aclose(close_session=session not in keep) for session in sessions))
