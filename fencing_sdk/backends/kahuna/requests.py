"""
The REST contract of Kahuna: what a request says and what an answer means. No I/O happens here.

For Kahuna an owner is a sequence of bytes, which `get-info` shows. So the owner of a request is one text: the
owner id of the claim, followed by its label.

Any other answer becomes an error: `BackendRefusedError` if it is permanent *and* certainly took no lock.
Everything else is a `BackendUnavailableError`: the outcome is unknown until Kahuna answers another request.
"""

from __future__ import annotations

import json
import math
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import IntEnum, unique

from fencing_sdk._http.outcomes import RequestFailedError, RequestOutcome, UnreadableAnswerError, to_json
from fencing_sdk._values.claim import Claim, Holder, holder_of
from fencing_sdk._values.token import TOKEN_LIMIT
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError

__all__ = [
    "BACKEND",
    "DURABILITY",
    "GET_INFO",
    "TRY_EXTEND",
    "TRY_LOCK",
    "TRY_UNLOCK",
    "AnswerType",
    "KahunaAnswer",
    "RequestWriter",
    "error_of_answer",
    "error_of_failures",
]

TRY_LOCK = "/v1/locks/try-lock"
TRY_EXTEND = "/v1/locks/try-extend"
TRY_UNLOCK = "/v1/locks/try-unlock"
GET_INFO = "/v1/locks/get-info"

DURABILITY = {"persistent": 1, "ephemeral": 0}
"""As numbers. Every request has one, because a server takes 0 where it is left out."""

_MOMENT_LIMIT = 2**53
"""Milliseconds since 1970 that no expiry reaches: more is not a moment."""
_DATE_SPAN = 2.0
"""Seconds that a server's clock may be ahead of its Date header, which has whole seconds and is a second old."""


@unique
class AnswerType(IntEnum):
    """The ``type`` of an answer."""

    LOCKED = 0
    BUSY = 1
    EXTENDED = 2
    UNLOCKED = 3
    GOT = 4
    WAITING_FOR_REPLICATION = 10
    ERRORED = 99
    INVALID_INPUT = 100
    MUST_RETRY = 101
    LOCK_DOES_NOT_EXIST = 102
    INVALID_OWNER = 103
    ABORTED = 104


_TYPES = {type_.value: type_ for type_ in AnswerType}


class RequestWriter:
    """Writes the bodies of requests, all with one durability."""

    def __init__(self, durability: str) -> None:
        self._durability = DURABILITY[durability]

    def of_claim(self, claim: Claim) -> bytes:
        """The body of a request to lock or extend, with the ttl rounded up to whole milliseconds."""
        return self._body(resource=claim.name, owner=_owner_text(claim), expiresMs=math.ceil(claim.ttl * 1000))

    def of_release(self, claim: Claim) -> bytes:
        """The body of a request to unlock."""
        return self._body(resource=claim.name, owner=_owner_text(claim))

    def of_name(self, name: str) -> bytes:
        """The body of a request for information."""
        return self._body(resource=name)

    def _body(self, **fields: str | int) -> bytes:
        return to_json({**fields, "durability": self._durability})


def _owner_text(claim: Claim) -> str:
    text = claim.owner if claim.label is None else f"{claim.owner}\0{claim.label}"
    return b64encode(text.encode("utf-8", "surrogatepass")).decode()


@dataclass(frozen=True, slots=True)
class KahunaAnswer:
    """An answer that could be read, and what happened to earlier tries of the same call."""

    type: AnswerType
    fields: dict[str, object]
    date: str | None = None
    """The Date header."""
    retried: bool = False
    """An earlier try of the same call was answered with `AnswerType.MUST_RETRY` or `AnswerType.ERRORED`."""
    earlier_unknown: bool = False
    """The outcome of an earlier try of the same call is unknown: it may still be carried out."""
    node: object = None
    """Which node has answered."""

    @classmethod
    def read(cls, body: bytes, date: str | None = None) -> KahunaAnswer:
        """
        Read the body of an HTTP 200.

        Raises:
            UnreadableAnswerError: it is not JSON, or not what the contract says.
        """
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as error:
            msg = "the answer is not JSON"
            raise UnreadableAnswerError(msg) from error
        if not isinstance(fields, dict):
            msg = "the answer is not a JSON object"
            raise UnreadableAnswerError(msg)
        code = fields.get("type")
        known = _TYPES.get(code) if isinstance(code, int) and not isinstance(code, bool) else None
        if known is None:
            msg = "the answer has no known type"
            raise UnreadableAnswerError(msg)
        return cls(known, fields, date)

    @property
    def hint(self) -> object:
        """The ``host:port`` of the node that leads the lock's partition, if the server names it, as newer ones do."""
        route = self.fields.get("route")
        return route.get("endpoint") if isinstance(route, dict) else None

    @property
    def token(self) -> int:
        """
        The fencing token; the first one of a name is 0.

        Raises:
            UnreadableAnswerError: the answer has no token.
        """
        token = self.fields.get("fencingToken")
        if isinstance(token, int) and not isinstance(token, bool) and 0 <= token < TOKEN_LIMIT:
            return token
        msg = "the answer has no fencing token from 0 to below 2**53"
        raise UnreadableAnswerError(msg)

    def remaining(self, wall: float) -> float:
        """
        Seconds until the holder's grant ends; *wall* is this host's clock, which the server's Date corrects.

        Raises:
            UnreadableAnswerError: the answer does not say.
        """
        expires = self.fields.get("expires")
        physical = expires.get("l") if isinstance(expires, dict) else None
        if isinstance(physical, int) and not isinstance(physical, bool) and 0 <= physical < _MOMENT_LIMIT:
            return max(0.0, physical / 1000 - self._server_clock(wall))
        msg = "the answer does not say when the grant ends"
        raise UnreadableAnswerError(msg)

    def _server_clock(self, wall: float) -> float:
        """This host's clock, unless the server's Date header contradicts it: the header has whole seconds only."""
        try:
            seen = parsedate_to_datetime(self.date or "").timestamp()
        except (ValueError, OverflowError):
            return wall
        return min(max(wall, seen), seen + _DATE_SPAN)

    def holder(self, name: str, wall: float) -> Holder:
        """
        The holder of *name*, without the owner id.

        Raises:
            UnreadableAnswerError: the answer does not say.
        """
        encoded = self.fields.get("owner")
        try:
            raw = b64decode(encoded if isinstance(encoded, str) else "", validate=True)
        except ValueError:
            raw = b""
        if not raw:
            msg = "the answer does not name the owner"
            raise UnreadableAnswerError(msg)
        owner, label = _owner_and_label(raw)
        return Holder(name, self.token, holder_of(owner), self.remaining(wall), label)


def _owner_and_label(raw: bytes) -> tuple[str, str | None]:
    try:
        text = raw.decode()
    except UnicodeDecodeError:  # a client of another kind: its owner ids are any bytes
        return raw.hex(), None
    owner, separator, label = text.partition("\0")
    return owner, label if separator else None


BACKEND = "KahunaBackend"


def error_of_answer(answer: KahunaAnswer, operation: str) -> BackendError:
    """Make an error of an answer that is not one of the operation's outcomes."""
    if answer.type is AnswerType.INVALID_INPUT and not (answer.earlier_unknown or answer.retried):
        return BackendRefusedError(BACKEND, operation, "InvalidInput; is this a Kahuna older than 1.0.7?")
    type_name = "".join(part.capitalize() for part in answer.type.name.split("_"))
    unknown = ", and an earlier request may still be carried out" if answer.earlier_unknown else ""
    return BackendUnavailableError(BACKEND, operation, f"the answer was {type_name}{unknown}")


def error_of_failures(failures: Sequence[RequestFailedError], operation: str) -> BackendError:
    """Make an error of the failures of all nodes: refused only if every node has rejected the request."""
    decisive = next((failure for failure in failures if failure.outcome is not RequestOutcome.REJECTED), failures[0])
    text = decisive.sentence(operation)
    detail = text if len(failures) == 1 else f"none of {len(failures)} nodes: {text}"
    kind = BackendRefusedError if decisive.outcome is RequestOutcome.REJECTED else BackendUnavailableError
    error = kind(BACKEND, operation, detail)
    error.__cause__ = decisive.__cause__
    return error
