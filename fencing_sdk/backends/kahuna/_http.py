"""One request to one node: its limits, and what each failure says about the request."""

from __future__ import annotations

import ssl
from enum import Enum, auto, unique

import aiohttp
from yarl import URL

from fencing_sdk._http.pool import Pools
from fencing_sdk.backends.kahuna._contract import Answer, UnreadableError

__all__ = ["Fate", "Http", "NodeError"]

ANSWER_LIMIT = 30.0
"""Seconds after which nobody waits for an answer any more. The engine's limits are far shorter."""
BODY_LIMIT = 65_536
"""Bytes of an answer. The longest that Kahuna has to say is an owner with its metadata, some 6 KiB."""

_HEADERS = {
    "Accept": "application/json",
    "Accept-Encoding": "identity",
    "Content-Type": "application/json",
    "User-Agent": "fencing-sdk",
}


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
        limits = aiohttp.ClientTimeout(total=ANSWER_LIMIT, sock_connect=connect_timeout)
        self._pools = Pools(tls=tls, connections=connections, limits=limits, headers=_HEADERS)

    async def post(self, url: URL, body: bytes) -> Answer:
        """
        Send *body* and read the answer.

        Raises:
            NodeError: there is none that can be understood.
        """
        session = await self._pools.session()
        try:
            # A redirect would carry the owner id to whomever it names.
            async with session.post(url, data=body, allow_redirects=False) as response:
                _check_status(response.status)
                return Answer.read(await _read(response), response.headers.get("Date"))
        except UnreadableError as error:
            raise NodeError(Fate.LOST, str(error)) from error
        except (aiohttp.ClientError, OSError) as error:  # among them every TimeoutError
            raise _node_error(error) from error

    async def aclose(self) -> None:
        """Close the connections; the next request opens new ones."""
        await self._pools.aclose()


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
