"""
Connections, the bodies of requests and answers, and when the outcome of a request is unknown.

There are three cases for a request without a usable answer:

1. ``UNSENT``: no connection could be made, or the store answered that it has done nothing. Another node may help.
2. ``UNKNOWN``: the request was sent. The store may have carried it out, or may still do so.
3. ``REJECTED``: the store has read the request and turned it down. Another try will not help.

A failure that is not surely 1 or 3 is 2.

Connections belong to the event loop and the process that opened them: the first request in another loop or in a forked
child opens new ones. A bounded number of calls is under way at once; releases and renewals go before all others. A call
that asks a second node, because the first one hangs, has its turn already.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from enum import Enum, auto, unique
from typing import Any

import aiohttp
from yarl import URL

from fencing_sdk._http.tls import TlsContext, distrust, wants_certificate
from fencing_sdk._values.loop_owner import LoopOwner
from fencing_sdk._values.tasks import Turns
from fencing_sdk._values.url import joined
from fencing_sdk.errors import ConfigurationError

_encode = json.JSONEncoder(separators=(",", ":")).encode  # made once: json.dumps would make one for each call


@unique
class RequestOutcome(Enum):
    """The three cases at the top of this module."""

    UNSENT = auto()
    UNKNOWN = auto()
    REJECTED = auto()


class RequestFailedError(Exception):
    """One node gave no usable answer to one request."""

    def __init__(
        self, outcome: RequestOutcome, detail: str, code: int = 0, *, again: bool = False, at_first: str = ""
    ) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail
        self.code = code
        """The store's own error code; 0 if the error is not the store's."""
        self.again = again
        """True if the store says that another try, at any node, will help."""
        self._at_first = at_first

    def sentence(self, operation: str) -> str:
        """The detail, with a hint at a wrong URL while the store is opened."""
        return self.detail + (self._at_first if operation == "open" else "")


def request_failed(error: aiohttp.ClientError | OSError, url: URL) -> RequestFailedError:
    """Translate an error of aiohttp, of a request to *url*, by its class, the most specific class first."""
    place = joined(url.host or "", url.port)
    inner = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error.__cause__
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        why = error.certificate_error
        reason = distrust(why, "ca") if isinstance(why, ssl.SSLCertVerificationError) else "its certificate is wrong"
        return RequestFailedError(RequestOutcome.REJECTED, f"{place}: {reason}")
    if wants_certificate(inner):
        detail = f"{place} wants a certificate of the client that it trusts; name it with cert= and key="
        return RequestFailedError(RequestOutcome.REJECTED, detail)
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        hint = ""
        if isinstance(inner, ssl.SSLError | ConnectionResetError):  # it broke in the middle of the handshake
            hint = "; does it speak TLS?" if url.scheme == "https" else ""
        elif inner is not None and isinstance(inner.__cause__, ConfigurationError):
            hint = f"; {inner}"  # a file that is being replaced
        return RequestFailedError(RequestOutcome.UNSENT, f"no connection to {place} ({type(error).__name__}{hint})")
    broken = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError) and url.scheme == "http"
    hint = "; is that the port of the store, and does it want TLS, which is +https://?" if broken else ""
    detail = f"{place}: the answer was lost ({type(error).__name__})"
    return RequestFailedError(RequestOutcome.UNKNOWN, detail, at_first=hint)


def any_unknown(failures: Iterable[RequestFailedError]) -> bool:
    """Return whether one of the failed requests may still be carried out."""
    return any(failure.outcome is RequestOutcome.UNKNOWN for failure in failures)


class UnreadableAnswerError(ValueError):
    """The answer cannot be read, so it is unknown what the store has done."""


def to_json(fields: dict[str, object]) -> bytes:
    """Write the body of a request."""
    return _encode(fields).encode()


async def read_body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """
    Read an answer to its end.

    Raises:
        UnreadableAnswerError: it is longer than *limit* bytes; the connection is closed.
    """
    body = await response.content.readany()
    while chunk := await response.content.readany():
        body += chunk
        if len(body) > limit:
            break
    if len(body) > limit:
        response.close()
        msg = f"the answer is longer than {limit} bytes"
        raise UnreadableAnswerError(msg)
    return body


CONNECTIONS = 32
"""Calls under way at once, and so the connections of a cluster that answers."""
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

        limits: The limits of a request that has none of its own.
    """

    def __init__(self, *, tls: TlsContext | None, limits: aiohttp.ClientTimeout) -> None:
        self._tls = tls
        self._first_context = True if tls is None else tls()
        self.limits = limits
        self._current: _LoopSession | None = None

    async def session(self) -> aiohttp.ClientSession:
        """The session of this loop and process."""
        return (await self._here()).session

    async def turn(self, operation: str) -> AbstractAsyncContextManager[None]:
        """Wait, in the block, until a call for *operation* may be made: a release or a renewal before all others."""
        return (await self._here()).turns.turn(hurry=operation in _URGENT)

    async def _here(self) -> _LoopSession:
        earlier = self._current
        if earlier is not None and earlier.owner.is_current:
            return earlier
        connector = _Connector(self._tls, self._first_context)
        session = aiohttp.ClientSession(
            connector=connector,
            headers=_HEADERS,
            timeout=self.limits,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        current = self._current = _LoopSession(session, connector, Turns(CONNECTIONS))
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
            owner.loop.call_soon_threadsafe(lambda: owner.loop.create_task(self.session.close(), name="fencing-close"))
