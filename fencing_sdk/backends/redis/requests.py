"""
The requests of the backend as calls of scripts, and how their answers are read. No I/O.

The keys of a lock are all in one slot of a Redis Cluster:

    {fencing:invoices/42}:l    the lease: owner NUL token NUL, 'w' if it is a writer's, then '=' and the label, if any;
                               of shares see `shares.lua`
    {fencing:invoices/42}:t    the last token granted
    {fencing:invoices/42}:q    the line: the owners that wait, in the order of arrival
    {fencing:invoices/42}:w    the line: the last sign of life of each owner, and what a grant and a message need
    {fencing:invoices/42}:e    permits and readers: the owners that hold, by the time at which they end
    {fencing:invoices/42}:h    permits and readers: the token, the permit and the label of each owner
    {fencing:invoices/42}:x    owner -> why its grant was revoked, for as long as that would have lasted
    {fencing:invoices/42}:n    never written: a server of a cluster refuses a script that names it as a whole while the
                               slot moves. Otherwise the script would begin if all its other keys were there, and fail
                               in its middle: such a server refuses every command for a key that it does not have, even
                               if the script itself has just emptied it

A hash tag ends at the first closing brace, so braces in a name are percent-encoded. Otherwise two
names could have the same tag, or a tag could be empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from fencing_sdk._values.claim import (
    LOCK,
    READER,
    WRITER,
    Busy,
    Claim,
    Grant,
    Holder,
    Permit,
    Renewal,
    check_name,
    holder_of,
)
from fencing_sdk._values.token import TOKEN_LIMIT
from fencing_sdk._values.url import read_hybrid
from fencing_sdk.backends._shared.rules import age_of, handed_over
from fencing_sdk.backends.redis.connection.node import CallOutcome
from fencing_sdk.backends.redis.connection.pipe import Reply, ReplyError
from fencing_sdk.backends.redis.scripts import (
    ACQUIRE,
    CHECK_SHARES,
    HOLDERS,
    INSPECT,
    LISTED,
    RELEASE,
    RENEW,
    RENEW_SHARES,
    REVOKE,
    REVOKED,
    STAND,
    TRANSFER,
    WAITING,
    Argument,
    ScriptCall,
)
from fencing_sdk.errors import ConfigurationError, shown

DEFAULT_PREFIX = "fencing"
LEASE = ":l"
_WRITES = "w"
"""Stands in a lease before the label if its owner is a writer."""
_PLAIN, _SHARED = "ltqw", "ltqweh"
"""The keys of a lock and its line; with those of shares."""
_MOST_REPLICAS = 100
_ESCAPED = str.maketrans({"%": "%25", "{": "%7B", "}": "%7D"})
_GLOB = str.maketrans({char: f"\\{char}" for char in "\\*?[]"})
"""Escapes what has a meaning in the pattern of SCAN."""


def check_prefix(prefix: object) -> str:
    """Return *prefix* if the keys of locks can begin with it. Raise ConfigurationError if not."""
    prefix = check_name(prefix, parameter="prefix")
    if "{" in prefix or "}" in prefix:
        msg = "prefix must have no braces: the backend sets its own hash tag around prefix and name"
        raise ConfigurationError(msg)
    return prefix


class RedisKeys:
    """The keys that begin with one prefix."""

    __slots__ = ("_prefix",)

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def tag(self, name: str) -> str:
        """The hash tag with which all keys of a lock begin, braces included."""
        if "{" not in name and "}" not in name and "%" not in name:  # translate() is slow, and mostly changes nothing
            return f"{{{self._prefix}:{name}}}"
        return f"{{{self._prefix}:{name.translate(_ESCAPED)}}}"

    def leases(self, prefix: str, *, ending: str = LEASE) -> str:
        """The pattern of SCAN for the leases of all locks whose name begins with *prefix*."""
        return f"{{{self._prefix}:{prefix.translate(_ESCAPED)}".translate(_GLOB) + "*}" + ending

    def name(self, lease: bytes, *, ending: str = LEASE) -> str | None:
        """The lock of a key that `leases` has found; None for a key of another program."""
        try:
            tag = lease.decode().removesuffix(ending)
        except UnicodeDecodeError:
            return None
        escaped = tag.removeprefix(f"{{{self._prefix}:").removesuffix("}")
        name = escaped.replace("%7B", "{").replace("%7D", "}").replace("%25", "%")
        return name if self.tag(name) == tag else None

    def wake_channel(self, client: str) -> str:
        """The channel on which one client receives the messages for its waiters, whichever locks they wait for."""
        return f"{{{self._prefix}}}:wake:{client}"


class WaiterSign(NamedTuple):
    """A sign of life: what the server keeps of a waiter, so that a release can hand it the lock or wake it."""

    claim: Claim
    way: str
    """``"direct"``, ``"silent"`` or ``"wake"``: see `line.lua`."""
    sent_at: int
    """Milliseconds on a clock of this client, which a message repeats: a grant counts from this moment."""
    ticket: str
    command: str
    channel: str

    def stored(self) -> str:
        """Return the text that the server keeps, behind its own time."""
        claim = self.claim
        asks = f"{self.way} {claim.mode.word} {_permits(claim)} {self.sent_at} {milliseconds(claim.ttl)}"
        return f"{asks} {self.ticket} {self.command} {self.channel}\0{stored(claim.label)}"


class RedisRequests:
    """
    Makes the calls of scripts for one backend. *sharded*: the keys of a lock may move to another server of a cluster.

    Raises:
        ConfigurationError: an argument has a wrong type or value.
    """

    def __init__(self, keys: RedisKeys, *, tokens: object, min_replicas: object, sharded: bool = False) -> None:
        self._sharded = sharded
        self.hybrid = read_hybrid(tokens)
        self._keys = keys
        self._kind = str(tokens)
        text = str(min_replicas)
        is_number = isinstance(min_replicas, int | str) and not isinstance(min_replicas, bool)
        self.replicas = int(text[:9]) if is_number and text.isascii() and text.isdigit() else -1
        """Replicas that must have a grant or a renewal before it counts."""
        if not 0 <= self.replicas <= _MOST_REPLICAS:
            msg = f"min_replicas must be a whole number from 0 to {_MOST_REPLICAS}, got {shown(min_replicas)}"
            raise ConfigurationError(msg)

    def lease(self, name: str) -> str:
        """The key of the lease of lock *name*."""
        return f"{self._keys.tag(name)}{LEASE}"

    def _at(self, name: str, kinds: str) -> tuple[str, ...]:
        tag = self._keys.tag(name)
        return tuple([f"{tag}:{kind}" for kind in kinds])

    def _whole(self, name: str, kinds: str) -> tuple[str, ...]:
        """The keys of a script that may empty one of them and then touch it again: it runs whole or not at all."""
        return self._at(name, f"{kinds}n" if self._sharded else kinds)

    def acquire(self, claim: Claim) -> ScriptCall:
        """Ask for a grant; the reply is what `read_acquired` reads."""
        arguments: tuple[Argument, ...] = (self._kind, claim.owner, milliseconds(claim.ttl), _label_of(claim))
        if not claim.mode.shared:
            keys = self._at(claim.name, _PLAIN)
            return ScriptCall(ACQUIRE, keys, arguments, self.replicas, follow=keys[:1])
        keys, arguments = self._whole(claim.name, _SHARED), (*arguments, claim.mode.word, _permits(claim))
        return ScriptCall(ACQUIRE, keys, arguments, self.replicas, follow=keys[:1], untracked=True)

    def renew(self, claims: Sequence[Claim]) -> ScriptCall:
        """Renew leases, all in one slot on a cluster, and either all of them shares or none."""
        spans = {ttl: milliseconds(ttl) for ttl in {claim.ttl for claim in claims}}  # there are few
        arguments: list[Argument] = [word for claim in claims for word in (claim.owner, spans[claim.ttl])]
        if claims[0].mode.shared:
            keys = [key for claim in claims for key in self._at(claim.name, "leh")]
            return ScriptCall(RENEW_SHARES, keys, arguments, self.replicas, tuple(keys[::3]), untracked=True)
        return ScriptCall(RENEW, [self.lease(claim.name) for claim in claims], arguments, self.replicas)

    def release(self, claim: Claim, *, waits: bool = False) -> ScriptCall:
        """Release a name and serve its line. *waits*: the owner may stand in the line, and leaves it."""
        keys = self._whole(claim.name, _SHARED if claim.mode.shared or waits else _PLAIN)
        arguments: tuple[Argument, ...] = (self._kind, claim.owner)
        if claim.mode.shared:
            arguments += (int(claim.mode != READER or claim.label is not None),)
        return ScriptCall(RELEASE, keys, arguments, untracked=claim.mode.shared)

    def leave(self, claim: Claim) -> ScriptCall:
        """Take a waiter out of the line, and serve the line. A grant that its owner got meanwhile stays."""
        return self.release(claim, waits=True)._replace(arguments=(self._kind, claim.owner, 0, "leave"))

    def release_alone(self, claim: Claim) -> ScriptCall:
        """
        Release what stands in the lease, without access to the line: its waiters notice at their next sign of life.

        The error is TRYAGAIN for a share that does not stand there, because another share has joined it.
        """
        return self.release(claim)._replace(keys=(self.lease(claim.name),))

    def renew_share_alone(self, claim: Claim) -> tuple[ScriptCall, ...]:
        """Renew a share with fewer keys: it stands in the lease, or is that of a reader without a label."""
        call = self.renew((claim,))
        return tuple(call._replace(keys=call.keys[:count]) for count in ((1, 2) if claim.mode == READER else (1,)))

    def stand(self, lines: Sequence[Sequence[WaiterSign]]) -> ScriptCall:
        """Give signs of life for waiters, those of one name after the other, all in one slot on a cluster."""
        keys: list[str] = []
        arguments: list[Argument] = [self._kind]
        shares = any(sign.claim.mode.shared for signs in lines for sign in signs)
        for signs in lines:
            name = signs[0].claim.name
            # While a slot moves, its locks do without the keys of shares.
            of_name = self._whole(name, _SHARED) if shares or not self._sharded else self._at(name, _PLAIN)
            keys += of_name
            arguments += (len(of_name), len(signs))
            for sign in signs:
                arguments += (sign.claim.owner, sign.stored())
        return ScriptCall(STAND, keys, arguments, untracked=shares)

    def check_shares(self, claims: Sequence[Claim]) -> ScriptCall:
        """
        Ask whether shares of one name are still held.

        The reply is that of `renew`, and client tracking follows the lease.
        """
        keys, owners = self._at(claims[0].name, "le"), [claim.owner for claim in claims]
        return ScriptCall(CHECK_SHARES, keys, owners, follow=keys[:1], untracked=True)

    def holders(self, name: str) -> ScriptCall:
        """Ask for all who hold a name, and how many wait for it."""
        return ScriptCall(HOLDERS, self._at(name, "lqweh"), (), untracked=True)

    def inspect(self, name: str) -> ScriptCall:
        """Ask who holds a lock."""
        return ScriptCall(INSPECT, (self.lease(name),), (), untracked=True)

    def listed(self, names: Sequence[str]) -> ScriptCall:
        """Ask for the holders of locks, all in one slot on a cluster, and how many wait for each."""
        return ScriptCall(LISTED, [key for name in names for key in self._at(name, "lqweh")], (), untracked=True)

    def waiting(self, name: str, after: str, most: int) -> ScriptCall:
        """Ask for the waiters that came after one in the line of a name."""
        return ScriptCall(WAITING, self._at(name, "qw"), (after, most), untracked=True)

    def revoke(self, name: str, token: int, reason: str) -> ScriptCall:
        """End the grants with a token; the reply is 1 if there were any."""
        keys = self._whole(name, f"{_SHARED}x")
        return ScriptCall(REVOKE, keys, (self._kind, token, reason), self.replicas, untracked=True)

    def transfer(self, of: Claim, to: Claim) -> ScriptCall:
        """Pass the grant of one claim to another; the reply is what `read_transfer` reads."""
        heir = (to.owner, milliseconds(to.ttl), _label_of(to), handed_over(to))
        keys = self._whole(of.name, f"{_SHARED}x")
        return ScriptCall(TRANSFER, keys, (self._kind, of.owner, *heir), self.replicas, untracked=True)

    def revoked(self, claim: Claim) -> ScriptCall:
        """Ask for the reason for which the grant of a claim was revoked."""
        return ScriptCall(REVOKED, self._at(claim.name, "x"), (claim.owner,), untracked=True)


def milliseconds(seconds: float) -> int:
    """Round up: the server may keep a grant for longer than its ttl, never for less."""
    return math.ceil(seconds * 1000)


def _permits(claim: Claim) -> int:
    return claim.mode.of if isinstance(claim.mode, Permit) else 0


def _label_of(claim: Claim) -> str:
    return stored(claim.label) if claim.mode != WRITER else f"{_WRITES}{stored(claim.label)}"


def stored(label: str | None) -> str:
    """Mark a label, so that an empty text differs from None."""
    return "" if label is None else f"={label}"


NO_HOLDER = holder_of("")
"""The digest of the owner that the lease of a shared name has."""

_TOKEN_DIGITS = len(str(TOKEN_LIMIT))
_REFUSED_RELEASES = {0: Renewal.REFUSED, -1: Renewal.TAKEN_OVER}
_RENEWALS = {ord("1"): Renewal.RENEWED, ord("0"): Renewal.REFUSED, ord("x"): Renewal.TAKEN_OVER}


def read_token(reply: bytes) -> int:
    """Read a token. Raise ValueError if the reply is malformed; the lock may have been granted."""
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
    """Read the answer to an acquisition. Raise ValueError or TypeError if it is malformed."""
    match reply:
        case bytes():
            return Grant(read_token(reply))
        case [bytes() as token, int() as permit]:
            return Grant(read_token(token), permit=None if permit < 0 else permit)
    return Busy(_seconds(reply))


def read_transfer(reply: Reply) -> Grant | Renewal:
    """
    Read the answer to a transfer: the grant of the heir, or why the former owner has none.

    Raise ValueError or TypeError if it is malformed; either owner may hold the name.
    """
    if isinstance(reply, int) and (refusal := _REFUSED_RELEASES.get(reply)) is not None:
        return refusal
    if isinstance(answer := read_acquired(reply), Grant):
        return answer
    msg = "not an answer to a transfer"
    raise ValueError(msg)


class LineAnswer(NamedTuple):
    """The server's answer about one line."""

    left: float | None
    """Seconds until the lease of the holder ends. None: it has no ttl, or the lock is free."""
    numbers: frozenset[int]
    """The positions, from 1, of the waiters that may ask; or of the one that has the lock now."""
    token: int | None
    """The token of the waiter that has the lock now."""


def read_line(answer: Reply) -> LineAnswer:
    """Read the answer to the signs of life of one line. Raise the server's ReplyError, ValueError or TypeError."""
    if isinstance(answer, ReplyError):
        raise answer
    if not isinstance(answer, list):
        msg = "not an answer to a sign of life"
        raise TypeError(msg)
    left, token, *numbers = answer
    return LineAnswer(_seconds(left), frozenset(map(int, numbers)), read_token(token) if token else None)


def _seconds(left: Reply) -> float | None:
    """Convert milliseconds; None if the key has no ttl."""
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
        token, text = read_token(number.encode()), label.removeprefix(_WRITES)
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
