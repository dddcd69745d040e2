"""
Connections that belong to the event loop and the process that opened them.

Another loop, or a forked child, opens some of its own with its next call.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

import aiohttp

from fencing_sdk._values.ownership import LoopOwner
from fencing_sdk._values.process import generation

__all__ = ["Pools", "inherited"]

_KEEP_ALIVE = 60.0
"""Seconds that an idle connection is kept: longer than most heartbeats, and half of what servers allow."""

inherited: list[object] = []
"""Pools that a fork brought along. They are the parent's, so they are neither used nor closed, nor collected."""


class Pools:
    """The pool of the running loop, opened by the first request."""

    def __init__(
        self,
        *,
        tls: ssl.SSLContext | None,
        connections: int,
        limits: aiohttp.ClientTimeout,
        headers: Mapping[str, str],
    ) -> None:
        self.tls = tls
        self.connections = connections
        self.limits = limits
        self._headers = headers
        self.pool: _Pool | None = None

    async def session(self) -> aiohttp.ClientSession:
        """The session of this loop and process."""
        pool = self.pool
        if pool is None or not pool.owner.is_current:
            pool = await self._reopen(pool)
        return pool.session

    async def _reopen(self, left: _Pool | None) -> _Pool:
        connector = _Connector(
            limit=self.connections, keepalive_timeout=_KEEP_ALIVE, ssl=True if self.tls is None else self.tls
        )
        session = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            timeout=self.limits,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        pool = self.pool = _Pool(session, connector)
        if left is not None:
            await left.leave()
        return pool

    async def aclose(self) -> None:
        """Close the connections; the next request opens new ones."""
        pool, self.pool = self.pool, None
        if pool is not None:
            await pool.leave()


class _Connector(aiohttp.TCPConnector):
    """Connections that are not closed behind the parent's back when a forked child collects its garbage."""

    def __init__(self, *, limit: int, keepalive_timeout: float, ssl: ssl.SSLContext | bool) -> None:
        super().__init__(limit=limit, keepalive_timeout=keepalive_timeout, ssl=ssl)
        self._made_in = generation()

    def __del__(self, *arguments: Any) -> None:
        if self._made_in == generation():
            super().__del__(*arguments)


class _Pool:
    """A session, and the loop and process that it belongs to."""

    def __init__(self, session: aiohttp.ClientSession, connector: _Connector) -> None:
        self.session = session
        self._connector = connector
        self.owner = LoopOwner()

    async def leave(self) -> None:
        """Close it, or have it closed by its own loop, or, in a forked child, leave it to the parent."""
        owner = self.owner
        if not owner.in_this_process:
            self.session.detach()
            inherited.append(self._connector)
        elif owner.is_current or owner.loop.is_closed():
            await self.session.close()
        else:
            owner.loop.call_soon_threadsafe(lambda: owner.loop.create_task(self.session.close()))
