"""One request to one Kahuna node, and the meaning of each failure: for the backend and the guard."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import aiohttp
from yarl import URL

from fencing_sdk._http.nodes import EndpointRules
from fencing_sdk._http.requests import (
    HttpPool,
    RequestFailedError,
    RequestOutcome,
    UnreadableAnswerError,
    read_body,
    request_failed,
)
from fencing_sdk._http.tls import TlsContext
from fencing_sdk._values.url import read_seconds, refuse_url, split_url

__all__ = ["NodeClient", "nodes_of_url", "rules_for"]

T = TypeVar("T")

ANSWER_LIMIT = 30.0
"""Seconds that a request may take, if its caller does not give up earlier. The engine's limits are far shorter."""

REPORT_LIMIT = 4_000_000
"""Limit in bytes of a node's report on its cluster, which has a line for each partition and replica."""


def rules_for(*paths: str) -> EndpointRules:
    """Return the rules for nodes that are asked at *paths*."""
    return EndpointRules(
        example="kahuna://localhost:2070",
        plain_port=2070,
        tls_port=2071,
        paths=paths,
    )


def nodes_of_url(url: str) -> tuple[Sequence[str], bool]:
    """
    Return the endpoints that *url* names, and whether its scheme asks for TLS.

    Raises:
        ConfigurationError: the URL names something that Kahuna does not have, or a host that cannot be read.
    """
    parts = split_url(url)
    if parts.path not in {"", "/"}:
        refuse_url("has a path, which Kahuna does not have; write kahuna://host:port,host:port")
    if parts.user is not None:
        refuse_url("has a user or a password, which Kahuna does not have; write kahuna://host:port,host:port")
    return parts.host_texts(), parts.scheme == "kahuna+https"


class NodeClient(Generic[T]):
    """
    Sends requests over a bounded pool of connections to all nodes, opened by the first request.

    Args:
        read: Reads the body of an HTTP 200 and the Date header; raises `UnreadableAnswerError`.

        body_limit: The most bytes of an answer.

        tls: None for plain HTTP.

        connect_timeout: Seconds in which a node must accept a connection.

    Raises:
        ConfigurationError: *connect_timeout* cannot be read.
    """

    def __init__(
        self,
        read: Callable[[bytes, str | None], T],
        *,
        body_limit: int,
        tls: TlsContext | None,
        connect_timeout: object,
    ) -> None:
        self._read = read
        self._body_limit = body_limit
        limits = aiohttp.ClientTimeout(
            total=ANSWER_LIMIT, sock_connect=read_seconds("connect_timeout", connect_timeout)
        )
        self.pool = HttpPool(tls=tls, limits=limits)

    async def post(self, url: URL, body: bytes) -> T:
        """
        Send *body* and read the answer.

        Raises:
            RequestFailedError: the answer is missing or cannot be understood.
        """
        session = await self.pool.session()
        try:
            # A redirect is not followed: it could carry the owner id to any host.
            async with session.post(url, data=body, allow_redirects=False) as response:
                status = response.status
                if 300 <= status < 400:  # noqa: PLR2004
                    detail = f"HTTP {status}, a redirect, which is not followed; name the nodes themselves"
                    raise RequestFailedError(RequestOutcome.REJECTED, detail)
                if 400 <= status < 500 and status not in {408, 429}:  # noqa: PLR2004
                    detail = f"HTTP {status}; is this the HTTP port of a Kahuna? With TLS, write kahuna+https://"
                    raise RequestFailedError(RequestOutcome.REJECTED, detail)
                if status != 200:  # noqa: PLR2004
                    raise RequestFailedError(RequestOutcome.UNKNOWN, f"HTTP {status}")
                return self._read(await read_body(response, self._body_limit), response.headers.get("Date"))
        except UnreadableAnswerError as error:
            raise RequestFailedError(RequestOutcome.UNKNOWN, str(error)) from error
        except (aiohttp.ClientError, OSError) as error:  # every TimeoutError is an OSError
            raise request_failed(error, url) from error

    async def get(self, url: URL) -> dict[str, object]:
        """
        Return the members of the JSON object at *url* of a node; an empty dict if the node does not know *url*.

        Raises:
            RequestFailedError: there is no answer.
        """
        session = await self.pool.session()
        try:
            async with session.get(url, allow_redirects=False) as response:
                report = json.loads(await read_body(response, REPORT_LIMIT)) if response.status in {200, 503} else None
        except (ValueError, RecursionError):
            return {}
        except (aiohttp.ClientError, OSError) as error:
            raise request_failed(error, url) from error
        return report if isinstance(report, dict) else {}
