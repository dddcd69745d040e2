"""
Connections belong to the event loop and the process that opened them.

The first request in another loop or in a forked child opens new connections.

So many calls are under way at once; the others wait for their turn, and releases and renewals go before all others. A
call that asks a second node, because the first one hangs, has its turn already.
"""

from __future__ import annotations

import os
import ssl
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp

from fencing_sdk._http.tls import TlsContext
from fencing_sdk._values.loop_owner import LoopOwner
from fencing_sdk._values.tasks import Turns
from fencing_sdk.errors import ConfigurationError, shown

__all__ = ["HttpPool", "inherited"]

_MOST_CONNECTIONS = 1000

_KEEP_ALIVE = 60.0
"""Seconds that an idle connection is kept: longer than most heartbeats, and half of what servers allow."""

_HEADERS = {
    "Accept": "application/json",
    "Accept-Encoding": "identity",
    "Content-Type": "application/json",
    "User-Agent": "fencing-sdk",
}

inherited: list[object] = []
"""
Connectors that a forked child has inherited. They share sockets with the parent, so the child must neither use nor
close them; this list keeps the garbage collector from closing them.
"""


_URGENT = {"release", "renew"}
_ANY_NUMBER = 0  # for aiohttp


class HttpPool:
    """
    The connections of the running loop, opened by the first request.

    Args:
        tls: None for plain HTTP.

        connections: How many calls have a `turn` at once, and so the connections of a cluster that answers.

        limits: The limits of a request that has none of its own.
    """

    def __init__(
        self,
        *,
        tls: TlsContext | None,
        connections: object,
        limits: aiohttp.ClientTimeout,
    ) -> None:
        self._tls = tls
        self._first_context = True if tls is None else tls()
        self.connections = _read_connections(connections)
        self.limits = limits
        self._current: _LoopSession | None = None

    async def session(self) -> aiohttp.ClientSession:
        """The session of this loop and process."""
        return (await self._here()).session

    async def turn(self, operation: str) -> AbstractAsyncContextManager[None]:
        """Wait, in the block, until a call for *operation* may be made: a release or a renewal before all others."""
        return (await self._here()).turns.turn(hurry=operation in _URGENT)

    async def _here(self) -> _LoopSession:
        current = self._current
        if current is None or not current.owner.is_current:
            current = await self._replace(current)
        return current

    async def _replace(self, earlier: _LoopSession | None) -> _LoopSession:
        connector = _Connector(self._tls, self._first_context)
        session = aiohttp.ClientSession(
            connector=connector,
            headers=_HEADERS,
            timeout=self.limits,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        current = self._current = _LoopSession(session, connector, Turns(self.connections))
        if earlier is not None:
            await earlier.aclose()
        return current

    async def aclose(self) -> None:
        """Close the connections; the next request opens new ones."""
        current, self._current = self._current, None
        if current is not None:
            await current.aclose()


class _Connector(aiohttp.TCPConnector):
    """
    A connector that reads the certificates for each new connection.

    If a later aiohttp does not call `_get_ssl_context`, the certificates that were read first are used.
    A forked child does not close a connector when it collects its garbage: the parent uses the sockets.
    """

    def __init__(self, tls: TlsContext | None, first_context: ssl.SSLContext | bool) -> None:  # noqa: FBT001  (aiohttp's)
        super().__init__(limit=_ANY_NUMBER, keepalive_timeout=_KEEP_ALIVE, ssl=first_context)
        self._tls = tls
        self._made_in = os.getpid()

    def __del__(self, *arguments: Any) -> None:
        if self._made_in == os.getpid():
            super().__del__(*arguments)

    def _get_ssl_context(self, req: aiohttp.ClientRequest) -> ssl.SSLContext | None:
        try:
            return None if self._tls is None else self._tls()
        except OSError as error:
            raise aiohttp.ClientConnectorError(req.connection_key, error) from error


class _LoopSession:
    """A session, and the loop and process that it belongs to."""

    def __init__(self, session: aiohttp.ClientSession, connector: _Connector, turns: Turns) -> None:
        self.session = session
        self.turns = turns
        self._connector = connector
        self.owner = LoopOwner()

    async def aclose(self) -> None:
        """
        Close the session, in one of three ways.

        1. A forked child leaves the session to its parent.
        2. In its own loop, or after the end of that loop, the session is closed here.
        3. Another thread runs its loop: the session is closed there.
        """
        owner = self.owner
        if not owner.in_this_process:
            self.session.detach()
            inherited.append(self._connector)
        elif owner.is_current or owner.loop.is_closed():
            await self.session.close()
        else:
            owner.loop.call_soon_threadsafe(lambda: owner.loop.create_task(self.session.close()))


def _read_connections(connections: object) -> int:
    """
    Return how many connections may be open at once.

    Raises:
        ConfigurationError: *connections* is not a whole number in range.
    """
    number = connections if isinstance(connections, int) and not isinstance(connections, bool) else 0
    if isinstance(connections, str) and connections.isascii() and connections.isdigit() and len(connections) < 9:  # noqa: PLR2004
        number = int(connections)
    if not 1 <= number <= _MOST_CONNECTIONS:
        msg = f"connections must be a whole number from 1 to {_MOST_CONNECTIONS}, got {shown(connections)}"
        raise ConfigurationError(msg)
    return number
