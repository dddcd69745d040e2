"""
The answer to a refused request, as both sides write and read it: RFC 9457, ``application/problem+json``.

    428   no token, and one is required
    400   a header that is not a token, a path that names no resource, or InvalidNameError
    409   StaleTokenError (or 412, where chosen)
    423   the lock that the handler needs is held by another holder; with Retry-After
    503   the handler lost its own lease on the way; with Retry-After
    503   this process drains, so the client should try another one; with Retry-After
    503   the store of a lock did not answer, with Retry-After; it refused, without

A stale token is never a 5xx: what retries those would retry it. Neither owners nor the names of
locks leave the house; the name of a resource does.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fencing_sdk._values.claim import NAME_LIMIT, check_name
from fencing_sdk._values.observers import logger
from fencing_sdk._values.token import ACCEPTED_HEADERS, check_token, parse_one_token
from fencing_sdk.errors import (
    AcquireError,
    BackendError,
    BackendUnavailableError,
    ConfigurationError,
    DrainingError,
    FencingError,
    InvalidNameError,
    LeaseLostError,
    LockHeldError,
    StaleTokenError,
)

MEDIA_TYPE = "application/problem+json"
STALE_STATUSES = (409, 412)
BODY_LIMIT = 16_384
"""Bytes of an answer that are looked at; a problem about the longest resource name needs a quarter of it."""

_STALE = "urn:fencing-sdk:problem:stale-token"
_MISSING = "urn:fencing-sdk:problem:token-required"
_MALFORMED = "urn:fencing-sdk:problem:malformed-token"
_NO_RESOURCE = "urn:fencing-sdk:problem:no-such-resource"
_LOCKED = "urn:fencing-sdk:problem:locked"
_LOST = "urn:fencing-sdk:problem:lease-lost"
_DRAINING = "urn:fencing-sdk:problem:draining"
_NO_STORE = "urn:fencing-sdk:problem:lock-store-unavailable"
_OUTAGE = 5
"""Seconds after which a caller may ask again for a lock whose store is down."""


class RequestRefused(FencingError):  # noqa: N818  (it is the request that erred)
    """A request cannot be judged: its token is missing or malformed, or its path names no resource."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.problem.status} {self.problem.title}: {self.problem.detail}"


MAPPED = (StaleTokenError, RequestRefused, InvalidNameError, LeaseLostError, AcquireError, BackendError)
"""The exceptions that have an answer. All others stay errors."""


@dataclass(frozen=True, slots=True)
class Problem:
    """The answer to an error: its ``status``, ``headers`` and ``body`` are what a handler sends."""

    status: int
    type: str
    title: str
    detail: str
    members: Mapping[str, str | int] = field(default_factory=dict)
    retry_after: int | None = None

    @property
    def body(self) -> bytes:
        """The JSON document, in ASCII."""
        document = {"type": self.type, "title": self.title, "status": self.status, "detail": self.detail}
        return json.dumps({**document, **self.members}).encode()

    @property
    def headers(self) -> dict[str, str]:
        """The headers: Content-Type, Cache-Control and perhaps Retry-After, without the length of the body."""
        headers = {"Content-Type": MEDIA_TYPE, "Cache-Control": "no-store"}
        return headers if self.retry_after is None else {**headers, "Retry-After": str(self.retry_after)}


def refusals(stale_status: int) -> dict[int, str]:
    """Return the answers of a guarded endpoint, for its documentation."""
    return {
        400: "The token is malformed, or the path names no resource",
        stale_status: "The token is stale: a later holder was here. Do not retry",
        428: "The token is missing",
    }


def missing_token() -> Problem:
    """The answer to a request without a token, where one is required."""
    return Problem(428, _MISSING, "Fencing token required", "send the header Fencing-Token with the token of the lease")


def malformed_token(detail: str) -> Problem:
    """The answer to a request whose token cannot be read, or can be read in two ways."""
    return Problem(400, _MALFORMED, "Malformed fencing token", detail)


def unnamed_resource(detail: str) -> Problem:
    """The answer to a request whose path names no resource."""
    return Problem(400, _NO_RESOURCE, "Not a resource", detail)


def as_problem(error: FencingError, *, stale_status: int) -> Problem:  # noqa: PLR0911  (a return for each kind)
    """Return the answer to one of `MAPPED`."""
    match error:
        case RequestRefused(problem=problem):
            return problem
        case StaleTokenError():
            plain = {"token": int(error.token), "fence": int(error.fence), "conflict": error.conflict}
            return Problem(
                stale_status, _STALE, "Stale fencing token", str(error), {"resource": error.resource, **plain}
            )
        case InvalidNameError():  # its message may contain the name of a lock, or the namespace
            return unnamed_resource("the request makes no valid name: empty, too long, or with control characters")
        case DrainingError():
            text = "this process is about to end and begins nothing that needs a lock; another one may answer"
            return Problem(503, _DRAINING, "Draining", text, retry_after=1)
        case AcquireError():
            left = error.retry_after if isinstance(error, LockHeldError) else None
            seconds = 1 if left is None else math.ceil(min(max(left, 1), 3600))  # whole ones; 0 would ask for a storm
            text = "another holder has the lock that this request needs"
            return Problem(423, _LOCKED, "Locked", text, retry_after=seconds)
        case BackendError():  # logged, which a framework does for a 500 alone, and answered without its details
            outage = isinstance(error, BackendUnavailableError)
            logger.log(logging.WARNING if outage else logging.ERROR, "a request is answered with 503: %s", error)
            text = "a store of locks or fences that this request needs cannot be used; what it did may be incomplete"
            return Problem(503, _NO_STORE, "Lock store unavailable", text, retry_after=_OUTAGE if outage else None)
    text = "the lease that this request worked under is over; what it did may be incomplete"
    return Problem(503, _LOST, "Lease lost", text, retry_after=1)


def check_stale_status(status: object) -> int:
    """Return *status* if it may answer a stale token."""
    if status in STALE_STATUSES and isinstance(status, int):
        return status
    msg = f"stale_status must be 409 or 412, not {status!r:.20}"
    raise ConfigurationError(msg)


def may_be_stale(status: int, content_type: str) -> bool:
    """Return whether an answer with this head can be a refusal, so that its body is worth reading."""
    return status in STALE_STATUSES and content_type.partition(";")[0].strip().lower() == MEDIA_TYPE


class SentHeaders(Protocol):
    """Headers that are on their way already; names are compared without case."""

    def __contains__(self, name: object, /) -> bool: ...

    def __getitem__(self, name: str, /) -> str: ...


def raise_if_stale(status: int, body: bytes, *, headers: SentHeaders, path: str) -> None:
    """
    Raise the `StaleTokenError` that an answer carries, if it carries one.

    Its ``type`` makes it a refusal. A member that is missing is what can be known without it: the token is the one that
    was sent, the resource is the path of the request, and the fence is the lowest that refuses that token. An
    inconsistent member, or another token, makes it a problem of another service.

    Args:
        status: Of the answer, like *body*.

        body: The document.

        headers: Of the request, like *path*.

        path: As it was sent.

    Raises:
        StaleTokenError: the answer is the refusal of a guarded service.
    """
    if len(body) > BODY_LIMIT:
        return
    try:
        document = json.loads(body)
        sent = parse_one_token(*([headers[name]] if name in headers else [] for name in ACCEPTED_HEADERS))
        if not isinstance(document, dict) or document.get("type") != _STALE or document.get("status", status) != status:
            return
        resource = check_name(document.get("resource", path[:NAME_LIMIT]))
        token = check_token(document.get("token", sent))
        fence = check_token(document.get("fence", token + (document.get("conflict") is not True)))
    except (ValueError, RecursionError):  # a ConfigurationError is a ValueError
        return
    conflict = document.get("conflict", token == fence)
    if isinstance(conflict, bool) and token <= fence and conflict == (token == fence) and sent in {None, token}:
        raise StaleTokenError(resource, int(token), int(fence), conflict=conflict)
