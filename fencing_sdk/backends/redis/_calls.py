"""What the scripts are asked, and what their answers mean: words and milliseconds there, values here."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fencing_sdk._values.claim import TOKEN_LIMIT, Claim, Holder, Renewal, holder_of
from fencing_sdk.backends.redis._keys import Keys, lease_key, line_keys, token_key
from fencing_sdk.backends.redis._node import Outcome
from fencing_sdk.backends.redis._pipe import Reply, ReplyError
from fencing_sdk.backends.redis._script import ACQUIRE, INSPECT, JOIN, LEAVE, RELEASE, RENEW, Call, Word
from fencing_sdk.errors import ConfigurationError, shown

DEFAULT_RETENTION = 7 * 86400.0
_MOST_REPLICAS = 100
_TOKEN_DIGITS = len(str(TOKEN_LIMIT))
_OUTCOMES = {ord("1"): Renewal.RENEWED, ord("0"): Renewal.REFUSED, ord("x"): Renewal.TAKEN_OVER}


class Calls:
    """
    Makes the calls of one backend.

    Args:
        keys: The keys of its prefix.

        tokens: ``"hybrid"`` or ``"counter"``.

        fair: Whether a free lock goes to the head of the line alone.

        retention: Seconds that an idle counter is kept; a plain counter is kept for ever.

        min_replicas: Replicas that must have a grant or a renewal before it counts.

    Raises:
        ConfigurationError: an argument cannot work.
    """

    def __init__(self, keys: Keys, *, tokens: object, fair: object, retention: object, min_replicas: object) -> None:
        if not isinstance(tokens, str) or tokens not in {"hybrid", "counter"}:
            msg = f"tokens must be 'hybrid' or 'counter', got {shown(tokens)}"
            raise ConfigurationError(msg)
        kept = milliseconds(_check_retention(retention)) if tokens == "hybrid" else 0
        self._keys = keys
        self._terms: tuple[Word, ...] = (str(tokens), kept, "fair" if _check_switch(fair, "fair") else "barge")
        self._replicas = _check_replicas(min_replicas)

    def lease(self, name: str) -> str:
        """The key of a lease."""
        return lease_key(self._keys.tag(name))

    def acquire(self, claim: Claim) -> Call:
        """Ask for a grant; the reply is the token, or ``[ms left, whether in line]``."""
        tag = self._keys.tag(claim.name)
        keys = (lease_key(tag), token_key(tag), *line_keys(tag))
        words = (claim.owner, milliseconds(claim.ttl), _stored(claim.metadata), *self._terms)
        return Call(ACQUIRE, keys, words, self._replicas, follow=keys[0])

    def renew(self, claims: Sequence[Claim]) -> Call:
        """Renew leases of one slot."""
        words: list[Word] = []
        for claim in claims:
            words += (claim.owner, milliseconds(claim.ttl))
        return Call(RENEW, [self.lease(claim.name) for claim in claims], words, self._replicas)

    def release(self, claim: Claim) -> Call:
        """Give a lock back."""
        return Call(RELEASE, self._lease_and_line(claim), (claim.owner,))

    def release_alone(self, claim: Claim) -> Call:
        """Give a lock back without a look at its line."""
        return Call(RELEASE, (self.lease(claim.name),), (claim.owner,))

    def join(self, claim: Claim, command: str, channel: str, ticket: int) -> Call:
        """Stand in line, and be woken by *command* on *channel* with *ticket*."""
        return Call(JOIN, self._lease_and_line(claim), (claim.owner, command, channel, ticket))

    def leave(self, claim: Claim) -> Call:
        """Leave the line."""
        return Call(LEAVE, self._lease_and_line(claim), (claim.owner,))

    def inspect(self, name: str) -> Call:
        """Ask who holds a lock."""
        return Call(INSPECT, (self.lease(name),), ())

    def _lease_and_line(self, claim: Claim) -> tuple[str, ...]:
        tag = self._keys.tag(claim.name)
        return (lease_key(tag), *line_keys(tag))


def milliseconds(seconds: float) -> int:
    """Round up: the store may keep a grant for longer than was asked, never for less."""
    return math.ceil(seconds * 1000)


def token_of(reply: bytes) -> int:
    """
    Read a token.

    Raises:
        ValueError: it is none, and whether something was granted is not known.
    """
    if reply.isdigit() and len(reply) <= _TOKEN_DIGITS and (number := int(reply)) < TOKEN_LIMIT:
        return number
    msg = "not a token"
    raise ValueError(msg)


def renewals(outcome: Outcome, count: int) -> list[Renewal]:
    """Read the answer to a call that renews *count* leases; without one, nothing is known of them."""
    if isinstance(outcome, bytes) and len(outcome) == count:
        return [_OUTCOMES.get(sign, Renewal.UNKNOWN) for sign in outcome]
    return [Renewal.UNKNOWN] * count


def seconds_left(reply: Reply) -> tuple[float | None, bool]:
    """Read a refusal: seconds until the lock may be free, None if it never expires, and whether we are in line."""
    left, in_line = reply if isinstance(reply, list) else (-1, 0)
    return _seconds(left), bool(in_line)


def _seconds(left: Reply) -> float | None:
    """Seconds of *left* milliseconds; below 0 the server says that there is no end."""
    if not isinstance(left, int):
        msg = "not a number of milliseconds"
        raise TypeError(msg)
    return None if left < 0 else left / 1000


def holder(name: str, reply: Reply) -> Holder | None:
    """Read who holds *name*."""
    if not isinstance(reply, list):
        return None
    lease, left = reply
    remaining = _seconds(left)
    try:
        owner, number, metadata = (lease if isinstance(lease, bytes) else b"").decode().split("\0", 2)
        return Holder(
            name,
            token_of(number.encode()),
            holder_of(owner),
            math.inf if remaining is None else remaining,
            metadata[1:] if metadata else None,
        )
    except ValueError:
        msg = "WRONGTYPE this is no lease"  # as the server says of what is no text
        raise ReplyError(msg) from None


def _stored(metadata: str | None) -> str:
    """Tell none from an empty text."""
    return "" if metadata is None else f"={metadata}"


def _check_retention(retention: object) -> float:
    try:
        value = float(retention)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        value = math.nan
    if isinstance(retention, bool) or not 1.0 <= value <= 100 * 365 * 86400.0:
        msg = f"retention must be a number of seconds from 1 to a hundred years, got {shown(retention)}"
        raise ConfigurationError(msg)
    return value


def _check_switch(value: object, parameter: str) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    chosen = value if isinstance(value, bool) else words.get(str(value).lower()) if isinstance(value, str) else None
    if chosen is None:
        msg = f"{parameter} must be True or False, got {shown(value)}"
        raise ConfigurationError(msg)
    return chosen


def _check_replicas(value: object) -> int:
    text = str(value)
    if isinstance(value, bool) or not isinstance(value, int | str) or not (text.isascii() and text.isdigit()):
        count = -1
    else:
        count = int(text[:9])
    if not 0 <= count <= _MOST_REPLICAS:
        msg = f"min_replicas must be a whole number from 0 to {_MOST_REPLICAS}, got {shown(value)}"
        raise ConfigurationError(msg)
    return count
