"""
One request to one node: the connection pool, its limits, and what each failure says about the request.

A session belongs to the event loop and the process that opened it. Another loop, or a forked
child, opens one of its own with its next call.
"""

from __future__ import annotations

import asyncio
import ssl
from enum import Enum, auto, unique
from typing import Any

import aiohttp
from yarl import URL

from fencing_sdk._fork import generation
from fencing_sdk.backends.kahuna._contract import Answer, UnreadableError

__all__ = ["Fate", "Http", "NodeError"]

ANSWER_LIMIT = 30.0
"""Seconds after which nobody waits for an answer any more. The engine's limits are far shorter."""
BODY_LIMIT = 65_536
"""Bytes of an answer. The longest that Kahuna has to say is an owner with its metadata, some 6 KiB."""
_KEEP_ALIVE = 60.0
"""Seconds that an idle connection is kept: longer than most heartbeats, and half of what the server allows."""

_HEADERS = {
    "Accept": "application/json",
    "Accept-Encoding": "identity",
    "Content-Type": "application/json",
    "User-Agent": "fencing-sdk",
}

_inherited: list[object] = []
"""Pools that a fork brought along. They are the parent's, so they are neither used nor closed, nor collected."""


@unique
class Fate(Enum):
    """What became of a request that got no answer."""

    UNSENT = auto()
    """It surely did not leave: no connection could be made."""
    LOST = auto()
    """It was sent. It may have been carried out, or may still be."""
    REJECTED = auto()
    """It was read and turned down; another try will not help."""


class NodeError(Exception):
    """A node gave no answer; ``fate`` tells what became of the request."""

    def __init__(self, fate: Fate, detail: str) -> None:
        super().__init__(detail)
        self.fate = fate
        self.detail = detail


class Http:
    """A bounded pool of connections to all nodes, opened by the first request."""

    def __init__(self, *, tls: ssl.SSLContext | None, connect_timeout: float, connections: int) -> None:
        self._tls = tls
        self._connections = connections
        self._limits = aiohttp.ClientTimeout(total=ANSWER_LIMIT, sock_connect=connect_timeout)
        self._pool: _Pool | None = None

    async def post(self, url: URL, body: bytes) -> Answer:
        """
        Send *body* and read the answer.

        Raises:
            NodeError: there is none that can be understood.
        """
        pool = self._pool
        if pool is None or not pool.is_ours():
            pool = await self._reopen(pool)
        try:
            # A redirect would carry the owner id to whomever it names.
            async with pool.session.post(url, data=body, allow_redirects=False) as response:
                _check_status(response.status)
                return Answer.read(await _read(response), response.headers.get("Date"))
        except UnreadableError as error:
            raise NodeError(Fate.LOST, str(error)) from error
        except (aiohttp.ClientError, OSError) as error:  # among them every TimeoutError
            raise _node_error(error) from error

    async def _reopen(self, left: _Pool | None) -> _Pool:
        connector = _Connector(
            limit=self._connections, keepalive_timeout=_KEEP_ALIVE, ssl=True if self._tls is None else self._tls
        )
        session = aiohttp.ClientSession(
            connector=connector,
            headers=_HEADERS,
            timeout=self._limits,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        pool = self._pool = _Pool(session, connector)
        if left is not None:
            await left.leave()
        return pool

    async def aclose(self) -> None:
        """Close the connections; the next request opens new ones."""
        pool, self._pool = self._pool, None
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
        self._loop = asyncio.get_running_loop()
        self._generation = generation()

    def is_ours(self) -> bool:
        """Whether the running loop of this process has opened it."""
        return self._loop is asyncio.get_running_loop() and self._generation == generation()

    async def leave(self) -> None:
        """Close it, or have it closed by its own loop, or, in a forked child, leave it to the parent."""
        if self._generation != generation():
            self.session.detach()
            _inherited.append(self._connector)
        elif self.is_ours() or self._loop.is_closed():
            await self.session.close()
        else:
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self.session.close()))


def _check_status(status: int) -> None:
    if status == 200:  # noqa: PLR2004
        return
    if 300 <= status < 400:  # noqa: PLR2004
        detail = f"HTTP {status}, a redirect, which is not followed; name the nodes themselves"
        raise NodeError(Fate.REJECTED, detail)
    if 400 <= status < 500 and status not in {408, 429}:  # noqa: PLR2004
        raise NodeError(Fate.REJECTED, f"HTTP {status}; is this a Kahuna, and at its HTTP port?")
    raise NodeError(Fate.LOST, f"HTTP {status}")


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = await response.content.readany()
    while chunk := await response.content.readany():
        body += chunk
        if len(body) > BODY_LIMIT:
            break
    if len(body) > BODY_LIMIT:
        response.close()
        msg = f"the answer is longer than {BODY_LIMIT} bytes"
        raise UnreadableError(msg)
    return body


def _node_error(error: aiohttp.ClientError | OSError) -> NodeError:
    """By class, most specific first. What is not known to be unsent counts as sent."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return NodeError(Fate.REJECTED, "its certificate is not trusted; name its authority with ca=/path/to/ca.pem")
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return NodeError(Fate.UNSENT, f"no connection ({type(error).__name__})")
    return NodeError(Fate.LOST, f"the answer was lost ({type(error).__name__})")
