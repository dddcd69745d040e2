"""
The sessions of one backend: one for each ttl in use, shared by all locks of that ttl.

The timeout of a session is fixed when it is opened, and it is what frees the locks of a process
that died. So locks of different ttls have different sessions, up to a number.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection

from fencing_sdk._values.process import generation
from fencing_sdk._values.timing import DEFAULT_TTL
from fencing_sdk.backends.zookeeper._driver import Settings
from fencing_sdk.backends.zookeeper._session import Session

__all__ = ["MOST_SESSIONS", "Sessions"]

MOST_SESSIONS = 8
"""Each costs a connection and a thread. Locks of more different ttls share the sessions that are there."""


class Sessions:
    """Opens sessions when they are needed, and finds the one for a ttl."""

    def __init__(
        self, settings: Settings, *, on_resumed: Callable[[Session], None], on_ended: Callable[[Session], None]
    ) -> None:
        self._settings = settings
        self._on_resumed = on_resumed
        self._on_ended = on_ended
        self._by_ttl: dict[int, Session] = {}
        self._generation = generation()

    def forked(self) -> bool:
        """Whether this process is a fork that was not noticed yet; its parent's sessions are then forgotten."""
        if self._generation == generation():
            return False
        self._generation = generation()
        self._by_ttl.clear()  # not even closed: the server would take that for the parent's word
        return True

    def of(self, ttl: float) -> Session:
        """The session for locks of *ttl*; one that has ended is replaced."""
        wanted = math.ceil(ttl * 1000)
        session = self._by_ttl.get(wanted)
        if session is not None and session.error is None:
            return session
        if session is None and len(self._by_ttl) >= MOST_SESSIONS:
            return self._most_like(wanted)
        session = Session(self._settings, wanted / 1000, on_resumed=self._on_resumed, on_ended=self._on_ended)
        self._by_ttl[wanted] = session
        return session

    def _most_like(self, wanted: int) -> Session:
        """The shortest session that is long enough, else the longest."""
        longer = [ttl for ttl in self._by_ttl if ttl >= wanted]
        ttl = min(longer) if longer else max(self._by_ttl)
        return self.of(ttl / 1000)

    def any(self) -> Session:
        """A session for questions: one that is connected, if there is one."""
        living = [session for session in self._by_ttl.values() if session.error is None]
        connected = [session for session in living if session.connected]
        return (connected or living or [self.of(DEFAULT_TTL)])[0]

    async def aclose(self, *, keep: Collection[Session]) -> None:
        """Close all, and disconnect without closing those that still have grants to *keep*."""
        if self._generation != generation():
            return
        sessions = list(self._by_ttl.values())
        self._by_ttl = {ttl: session for ttl, session in self._by_ttl.items() if session in keep}
        await asyncio.gather(*(session.aclose(close_session=session not in keep) for session in sessions))
