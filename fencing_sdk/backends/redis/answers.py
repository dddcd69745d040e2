"""How the answers of the scripts are read. No I/O."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from fencing_sdk._values.claim import LOCK, READER, WRITER, Busy, Grant, Holder, Permit, Renewal, holder_of
from fencing_sdk._values.token import TOKEN_LIMIT
from fencing_sdk.backends._shared.rules import age_of
from fencing_sdk.backends.redis.connection.node import CallOutcome
from fencing_sdk.backends.redis.connection.pipe import Reply, ReplyError
from fencing_sdk.backends.redis.requests import WRITES

NO_HOLDER = holder_of("")
"""The digest of the owner that the lease of a shared name has."""

_TOKEN_DIGITS = len(str(TOKEN_LIMIT))
_REFUSED_RELEASES = {0: Renewal.REFUSED, -1: Renewal.TAKEN_OVER}
_RENEWALS = {ord("1"): Renewal.RENEWED, ord("0"): Renewal.REFUSED, ord("x"): Renewal.TAKEN_OVER}


def read_token(reply: bytes) -> int:
    """
    Read a token.

    Raises:
        ValueError: the reply is not a token; it is unknown whether the lock was granted.
    """
    if reply.isdigit() and len(reply) <= _TOKEN_DIGITS and (number := int(reply)) < TOKEN_LIMIT:
        return number
    msg = "not a token"
    raise ValueError(msg)


def read_renewals(outcome: CallOutcome, count: int) -> list[Renewal]:
    """Read the answer to a call that renews *count* leases; if it failed, their state is unknown."""
    if isinstance(outcome, bytes) and len(outcome) == count:
        return [_RENEWALS.get(code, Renewal.UNKNOWN) for code in outcome]
    return [Renewal.UNKNOWN] * count


def read_release(reply: Reply) -> Renewal | None:
    """Read the answer to a release: None if it has ended the owner's grant."""
    return _REFUSED_RELEASES.get(reply) if isinstance(reply, int) else None


def read_acquired(reply: Reply) -> Grant | Busy:
    """
    Read the answer to an acquisition.

    Raises:
        ValueError, TypeError: it is none; it is unknown whether the name was granted.
    """
    match reply:
        case bytes():
            return Grant(read_token(reply))
        case [bytes() as token, int() as permit]:
            return Grant(read_token(token), permit=None if permit < 0 else permit)
    return Busy(_seconds(reply))


def read_transfer(reply: Reply) -> Grant | Renewal:
    """
    Read the answer to a transfer: the grant of the heir, or why the former owner has none.

    Raises:
        ValueError, TypeError: it is none; it is unknown which of them holds.
    """
    if isinstance(reply, int) and (refusal := _REFUSED_RELEASES.get(reply)) is not None:
        return refusal
    if isinstance(answer := read_acquired(reply), Grant):
        return answer
    msg = "not an answer to a transfer"
    raise ValueError(msg)


class LineAnswer(NamedTuple):
    """What the server says about one line."""

    left: float | None
    """Seconds until the lease of the holder ends. None: it has no ttl, or the lock is free."""
    numbers: frozenset[int]
    """The positions, from 1, of the waiters that may ask; or of the one that has the lock now."""
    token: int | None
    """The token of the waiter that has the lock now."""


def read_line(answer: Reply) -> LineAnswer:
    """
    Read the answer to the signs of life of one line.

    Raises:
        ReplyError: the server refused them.
        ValueError, TypeError: it is not an answer.
    """
    if isinstance(answer, ReplyError):
        raise answer
    if not isinstance(answer, list):
        msg = "not an answer to a sign of life"
        raise TypeError(msg)
    left, token, *numbers = answer
    return LineAnswer(_seconds(left), frozenset(map(int, numbers)), read_token(token) if token else None)


def _seconds(left: Reply) -> float | None:
    """Convert milliseconds; a negative number means that the key has no ttl."""
    if not isinstance(left, int):
        msg = "not a number of milliseconds"
        raise TypeError(msg)
    return None if left < 0 else left / 1000


def read_holder(name: str, reply: Reply) -> Holder | None:
    """Read the holder of lock *name*; None if it is free."""
    if not isinstance(reply, list):
        return None
    lease, left, micros = reply
    remaining, now = _seconds(left), _micros(micros)
    try:
        owner, number, label = (lease if isinstance(lease, bytes) else b"").decode().split("\0", 2)
        token, text = read_token(number.encode()), label.removeprefix(WRITES)
        return Holder(
            name,
            token,
            holder_of(owner),
            math.inf if remaining is None else remaining,
            text[1:] if text else None,
            LOCK if text == label else WRITER,
            held_for=age_of(token, LOCK, now),
        )
    except ValueError:
        msg = "WRONGTYPE this is not a lease"  # the server's code for a key that is not a string
        raise ReplyError(msg) from None


def read_holders(name: str, reply: Reply) -> list[Holder]:
    """Read all who hold *name*, by their permits, or else by their tokens, and how many wait."""
    if not isinstance(reply, list):
        return []
    lease, left, counted, micros, *shares = reply
    waiters = counted if isinstance(counted, int) and counted >= 0 else None
    found = [] if (only := read_holder(name, [lease, left, micros])) is None else [only]
    if only is not None and only.id == NO_HOLDER:
        now = _micros(micros)
        found = [_read_share_of(name, now, *shares[place : place + 3]) for place in range(0, len(shares), 3)]
    ordered = sorted(found, key=lambda holder: (holder.permit or 0, holder.token))
    return [replace(holder, waiters=waiters) for holder in ordered]


def _micros(time: Reply) -> int:
    """Read the server's time, from which hybrid tokens come."""
    if not isinstance(time, bytes):
        msg = "not a time"
        raise TypeError(msg)
    return int(time)


def _read_share_of(name: str, now: int, owner: Reply, left: Reply, entry: Reply) -> Holder:
    remaining = _seconds(left) or 0.0
    try:
        words = (entry if isinstance(entry, bytes) else b"").decode().split(" ", 3)
        token, permit, permits, label = read_token(words[0].encode()), *words[1:]
        number = int(permit)
        mode = READER if number < 0 else Permit(of=int(permits))
        holder = holder_of((owner if isinstance(owner, bytes) else b"").decode())
        text = label[1:] if label else None
        age = age_of(token, mode, now)
        return Holder(name, token, holder, remaining, text, mode, None if number < 0 else number, held_for=age)
    except ValueError:
        msg = "WRONGTYPE this is not a share"
        raise ReplyError(msg) from None
