"""
When the outcome of an HTTP request is unknown.

There are three cases for a request without a usable answer:

1. ``UNSENT``: no connection could be made, or the store says so: it has done nothing. Another node may help.
2. ``UNKNOWN``: the request was sent. The store may have carried it out, or may still do so.
3. ``REJECTED``: the store has read the request and turned it down. Another try will not help.

A failure that is not surely 1 or 3 is 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto, unique

import aiohttp

__all__ = ["RequestFailedError", "RequestOutcome", "any_unknown", "request_failed"]


@unique
class RequestOutcome(Enum):
    """What became of a request without a usable answer: see the top of this module."""

    UNSENT = auto()
    UNKNOWN = auto()
    REJECTED = auto()


class RequestFailedError(Exception):
    """One node gave no usable answer to one request."""

    def __init__(self, outcome: RequestOutcome, detail: str, code: int = 0, *, again: bool = False) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail
        self.code = code
        """The store's own error code; 0 if the error is not the store's."""
        self.again = again
        """Whether the store says that another try, at any node, will help."""


def request_failed(error: aiohttp.ClientError | OSError) -> RequestFailedError:
    """Translate an error of aiohttp by its class, the most specific class first."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        detail = "its certificate is not trusted; name its authority with ca=/path/to/ca.pem"
        return RequestFailedError(RequestOutcome.REJECTED, detail)
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        where = f" to {error.host}:{error.port}" if isinstance(error, aiohttp.ClientConnectorError) else ""
        return RequestFailedError(RequestOutcome.UNSENT, f"no connection{where} ({type(error).__name__})")
    return RequestFailedError(RequestOutcome.UNKNOWN, f"the answer was lost ({type(error).__name__})")


def any_unknown(failures: Iterable[RequestFailedError]) -> bool:
    """Whether one of the failed requests may still be carried out."""
    return any(failure.outcome is RequestOutcome.UNKNOWN for failure in failures)
