"""
The body of a request, the body of its answer, and when its outcome is unknown.

There are three cases for a request without a usable answer:

1. ``UNSENT``: no connection could be made, or the store answered that it has done nothing. Another node may help.
2. ``UNKNOWN``: the request was sent. The store may have carried it out, or may still do so.
3. ``REJECTED``: the store has read the request and turned it down. Another try will not help.

A failure that is not surely 1 or 3 is 2.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterable
from enum import Enum, auto, unique

import aiohttp
from yarl import URL

from fencing_sdk._http.tls import distrust, wants_certificate
from fencing_sdk._values.url import joined
from fencing_sdk.errors import ConfigurationError

__all__ = [
    "RequestFailedError",
    "RequestOutcome",
    "UnreadableAnswerError",
    "any_unknown",
    "read_body",
    "request_failed",
    "to_json",
]

_encode = json.JSONEncoder(separators=(",", ":")).encode  # made once: json.dumps would make one for each call


@unique
class RequestOutcome(Enum):
    """What became of a request without a usable answer: see the top of this module."""

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
        """The detail; to who opens the store with what a wrong URL leads to, because later it was right."""
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
    """The answer is none of this store. It says nothing about what the store has done."""


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
