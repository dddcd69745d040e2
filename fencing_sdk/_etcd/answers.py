"""
What an answer of a member means, and what each failure says about the request.

What an error means is decided by its gRPC code, never by its text.
"""

from __future__ import annotations

import json
from enum import Enum, auto, unique

import aiohttp

from fencing_sdk._etcd.json_codec import Json, UnreadableError
from fencing_sdk.errors import shown

__all__ = [
    "INVALID",
    "NOT_FOUND",
    "NOT_NOW",
    "UNAUTHENTICATED",
    "Fate",
    "MemberError",
    "member_error",
    "read_body",
    "read_line",
]

BODY_LIMIT = 4 * 1024 * 1024
"""Bytes of an answer: what etcd itself sends at most, twice."""
INVALID, NOT_FOUND, DENIED, EXHAUSTED, NOT_NOW, UNIMPLEMENTED, UNAUTHENTICATED = 3, 5, 7, 8, 9, 12, 16


@unique
class Fate(Enum):
    UNSENT = auto()
    """It surely did nothing: no connection could be made, or etcd said so. Another try may help."""
    LOST = auto()
    """It was sent. It may have been carried out, or may still be."""
    REJECTED = auto()
    """It was turned down; another try will not help."""


class MemberError(Exception):
    def __init__(self, fate: Fate, detail: str, code: int = 0) -> None:
        super().__init__(detail)
        self.fate = fate
        self.detail = detail
        self.code = code
        """That of gRPC; 0 when it was not etcd that spoke."""


async def read_body(response: aiohttp.ClientResponse) -> bytes:
    body = await response.content.readany()
    while chunk := await response.content.readany():
        body += chunk
        if len(body) > BODY_LIMIT:
            response.close()
            msg = f"the answer is longer than {BODY_LIMIT} bytes"
            raise UnreadableError(msg)
    return body


def read_line(body: bytes, status: int) -> Json:
    """
    Read one answer. Those of a stream stand in ``result``.

    Raises:
        MemberError: it tells of an error.
        UnreadableError: it is no answer of etcd.
    """
    try:
        fields = json.loads(body.decode())
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        if 300 <= status < 500:  # noqa: PLR2004
            raise MemberError(Fate.REJECTED, f"HTTP {status}; is this an etcd 3.4 or newer, and its client port?")
        msg = "the answer is not a JSON object" if status == 200 else f"HTTP {status}"  # noqa: PLR2004
        raise UnreadableError(msg)
    error = fields.get("error")
    detail = error if isinstance(error, dict) else fields
    code = detail.get("code", detail.get("grpc_code"))
    if error is not None or status != 200:  # noqa: PLR2004
        raise told(code if isinstance(code, int) else 0, status, str(detail.get("message", "")))
    result = fields.get("result", fields)
    return result if isinstance(result, dict) else {}


_VERDICTS = {
    INVALID: (Fate.REJECTED, "etcd does not accept the request, or wants a user and a password"),
    NOT_FOUND: (Fate.REJECTED, "the lease does not exist"),
    DENIED: (Fate.REJECTED, "the user may not read and write the keys; see the page of the backend for its role"),
    EXHAUSTED: (Fate.UNSENT, "etcd accepts no more: its space is used up (NOSPACE), or it is overloaded"),
    NOT_NOW: (Fate.REJECTED, "etcd cannot do this in its state"),
    UNIMPLEMENTED: (Fate.REJECTED, "etcd cannot do this; is it 3.4 or newer?"),
    UNAUTHENTICATED: (Fate.REJECTED, "etcd does not accept the token of the login"),
}


def told(code: int, status: int, message: str) -> MemberError:
    """What etcd said; nothing is known to be undone after a code that is not in the table."""
    fate, detail = _VERDICTS.get(code, (Fate.LOST, f"HTTP {status}"))
    return MemberError(fate, f"{detail} ({shown(message)})" if message else detail, code)


def member_error(error: aiohttp.ClientError | OSError) -> MemberError:
    """By class, most specific first. What is not known to be unsent counts as sent."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return MemberError(Fate.REJECTED, "its certificate is not trusted; name its authority with ca=/path/to/ca.pem")
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return MemberError(Fate.UNSENT, f"no connection ({type(error).__name__})")
    return MemberError(Fate.LOST, f"the answer was lost ({type(error).__name__})")
