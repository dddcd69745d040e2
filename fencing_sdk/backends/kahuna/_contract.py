"""
The REST contract of Kahuna: what a request says and what an answer means. No I/O happens here.

An owner is bytes to Kahuna, and `get-info` shows them. So the metadata of a claim travels behind
its owner id, as one text: for Kahuna it is a part of who holds the lock.
"""

from __future__ import annotations

import json
import math
from base64 import b64decode, b64encode
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import IntEnum, unique

from fencing_sdk._values.claim import TOKEN_LIMIT, Claim, Holder, holder_of

__all__ = [
    "DURABILITY",
    "GET_INFO",
    "TRY_EXTEND",
    "TRY_LOCK",
    "TRY_UNLOCK",
    "Answer",
    "Kind",
    "UnreadableError",
    "Wording",
]

TRY_LOCK = "/v1/locks/try-lock"
TRY_EXTEND = "/v1/locks/try-extend"
TRY_UNLOCK = "/v1/locks/try-unlock"
GET_INFO = "/v1/locks/get-info"

DURABILITY = {"persistent": 1, "ephemeral": 0}
"""As numbers. A server that is told nothing takes 0, so this is never left out."""

_LAST_MOMENT = 2**53
"""Milliseconds since 1970 from which on a moment is no moment any more."""
_DATE_SPAN = 2.0
"""Seconds that a server's clock may be ahead of its Date header: cut to whole seconds, and renewed once a second."""


@unique
class Kind(IntEnum):
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


_to_json = json.JSONEncoder(separators=(",", ":")).encode  # made once: json.dumps would make one for each call
_KINDS = {kind.value: kind for kind in Kind}


class UnreadableError(ValueError):
    """What came back is no answer of Kahuna. It says nothing about what was done."""


class Wording:
    """Writes requests, all of one durability."""

    def __init__(self, durability: str) -> None:
        self._durability = DURABILITY[durability]

    def of_claim(self, claim: Claim) -> bytes:
        """The body of a request to lock or extend: the ttl is rounded up to whole milliseconds."""
        return self._written(resource=claim.name, owner=_owner_text(claim), expiresMs=math.ceil(claim.ttl * 1000))

    def of_release(self, claim: Claim) -> bytes:
        """The body of a request to unlock."""
        return self._written(resource=claim.name, owner=_owner_text(claim))

    def of_name(self, name: str) -> bytes:
        """The body of a request for information."""
        return self._written(resource=name)

    def _written(self, **fields: str | int) -> bytes:
        return _to_json({**fields, "durability": self._durability}).encode()


def _owner_text(claim: Claim) -> str:
    text = claim.owner if claim.metadata is None else f"{claim.owner}\0{claim.metadata}"
    return b64encode(text.encode("utf-8", "surrogatepass")).decode()


@dataclass(frozen=True, slots=True)
class Answer:
    """A readable answer, and what is known of the way to it."""

    kind: Kind
    fields: dict[str, object]
    date: str | None = None
    """The Date header."""
    retried: bool = False
    """An earlier try of the same call was answered with `Kind.MUST_RETRY`."""
    after_loss: bool = False
    """An earlier try of the same call was sent and lost: it may still be carried out."""

    @classmethod
    def read(cls, body: bytes, date: str | None = None) -> Answer:
        """
        Read the body of an HTTP 200.

        Raises:
            UnreadableError: it is not JSON, or not what the contract says.
        """
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as error:
            msg = "the answer is not JSON"
            raise UnreadableError(msg) from error
        if not isinstance(fields, dict):
            msg = "the answer is not a JSON object"
            raise UnreadableError(msg)
        code = fields.get("type")
        kind = _KINDS.get(code) if isinstance(code, int) and not isinstance(code, bool) else None
        if kind is None:
            msg = "the answer has no known type"
            raise UnreadableError(msg)
        return cls(kind, fields, date)

    @property
    def token(self) -> int:
        """
        The fencing token; the first one of a name is 0.

        Raises:
            UnreadableError: there is none.
        """
        token = self.fields.get("fencingToken")
        if isinstance(token, int) and not isinstance(token, bool) and 0 <= token < TOKEN_LIMIT:
            return token
        msg = "the answer has no fencing token from 0 to below 2**53"
        raise UnreadableError(msg)

    def remaining(self, wall: float) -> float:
        """
        Seconds until the holder's grant ends; *wall* is our clock, which the server's Date corrects.

        Raises:
            UnreadableError: the answer does not tell.
        """
        expires = self.fields.get("expires")
        physical = expires.get("l") if isinstance(expires, dict) else None
        if isinstance(physical, int) and not isinstance(physical, bool) and 0 <= physical < _LAST_MOMENT:
            return max(0.0, physical / 1000 - self._server_clock(wall))
        msg = "the answer does not tell when the grant ends"
        raise UnreadableError(msg)

    def _server_clock(self, wall: float) -> float:
        """Our clock as long as the server's Date header does not contradict it: that one shows whole seconds only."""
        try:
            seen = parsedate_to_datetime(self.date or "").timestamp()
        except (ValueError, OverflowError):
            return wall
        return min(max(wall, seen), seen + _DATE_SPAN)

    def holder(self, name: str, wall: float) -> Holder:
        """
        Who holds *name*, without the owner id.

        Raises:
            UnreadableError: the answer does not tell.
        """
        encoded = self.fields.get("owner")
        try:
            raw = b64decode(encoded if isinstance(encoded, str) else "", validate=True)
        except ValueError:
            raw = b""
        if not raw:
            msg = "the answer does not tell the owner"
            raise UnreadableError(msg)
        owner, metadata = _owner_and_metadata(raw)
        return Holder(name, self.token, holder_of(owner), self.remaining(wall), metadata)


def _owner_and_metadata(raw: bytes) -> tuple[str, str | None]:
    try:
        text = raw.decode()
    except UnicodeDecodeError:  # another kind of client, whose owner ids are any bytes
        return raw.hex(), None
    owner, behind, metadata = text.partition("\0")
    return owner, metadata if behind else None
