"""
The requests of the backend as calls of scripts. `answers.py` reads what comes back. No I/O.

The keys of a lock are all in one slot of a Redis Cluster:

    {fencing:invoices/42}:l    the lease: owner NUL token NUL, 'w' if it is a writer's, then '=' and the label, if any;
                               of shares see `shares.lua`
    {fencing:invoices/42}:t    the last token granted
    {fencing:invoices/42}:q    the line: the owners that wait, in the order of arrival
    {fencing:invoices/42}:w    the line: the last sign of life of each owner, and what a grant and a message need
    {fencing:invoices/42}:e    permits and readers: the owners that hold, by the time at which they end
    {fencing:invoices/42}:h    permits and readers: the token, the permit and the label of each owner
    {fencing:invoices/42}:x    owner -> why its grant was revoked, for as long as that would have lasted
    {fencing:invoices/42}:n    never written; see `never_key`

A hash tag ends at the first closing brace, so braces in a name are percent-encoded. Otherwise two
names could have the same tag, or a tag could be empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fencing_sdk._values.claim import (
    READER,
    WRITER,
    Claim,
    Permit,
    check_name,
)
from fencing_sdk._values.options import read_hybrid, read_switch
from fencing_sdk.backends._shared.rules import handed_over
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
WRITES = "w"
"""What stands in a lease before the label if its owner is a writer."""
_ESCAPED = str.maketrans({"%": "%25", "{": "%7B", "}": "%7D"})
_GLOB = str.maketrans({char: f"\\{char}" for char in "\\*?[]"})
"""What has a meaning in the pattern of SCAN."""


def check_prefix(prefix: object) -> str:
    """
    Return *prefix* if the keys of locks can begin with it.

    Raises:
        ConfigurationError: it is not a name, or it has braces.
    """
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


def lease_key(tag: str) -> str:
    """The key of the lease: the holder, its token and its label."""
    return f"{tag}{LEASE}"


def token_key(tag: str) -> str:
    """The key of the last token granted."""
    return f"{tag}:t"


def line_keys(tag: str) -> tuple[str, str]:
    """The keys of the line: the order of arrival, and the signs of life."""
    return f"{tag}:q", f"{tag}:w"


def share_keys(tag: str) -> tuple[str, str]:
    """The keys of shares: when each ends, and what it is."""
    return f"{tag}:e", f"{tag}:h"


def never_key(tag: str) -> str:
    """
    A key that never exists: a server of a cluster refuses a script with it as a whole while the slot moves.

    Otherwise the script would begin if all its other keys were there, and fail in its middle: such a server refuses
    every command for a key that it does not have, even if the script itself has just emptied it.
    """
    return f"{tag}:n"


def revoked_key(tag: str) -> str:
    """The key of the reasons for which grants were revoked."""
    return f"{tag}:x"


DEFAULT_RETENTION = 7 * 86400.0
_MOST_REPLICAS = 100


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
        """What the server keeps, behind its own time."""
        claim, ttl = self.claim, milliseconds(self.claim.ttl)
        asks = f"{self.way} {claim.mode.word} {_permits(claim)} {self.sent_at} {ttl}"
        return f"{asks} {self.ticket} {self.command} {self.channel}\0{stored(claim.label)}"


class RedisRequests:
    """
    Makes the calls of scripts for one backend.

    Args:
        keys: The keys of its prefix.

        tokens: ``"hybrid"`` or ``"counter"``.

        fair: Whether a free lock goes only to the head of the line.

        retention: Seconds that the last token of a free lock is kept; with ``"counter"`` it is kept for ever.

        min_replicas: Replicas that must have a grant or a renewal before it counts.

        sharded: Whether the keys of a lock may move to another server, as on a cluster.

    Raises:
        ConfigurationError: an argument has a wrong type or value.
    """

    def __init__(
        self,
        keys: RedisKeys,
        *,
        tokens: object,
        fair: object,
        retention: object,
        min_replicas: object,
        sharded: bool = False,
    ) -> None:
        self._sharded = sharded
        self.hybrid = read_hybrid(tokens)
        kept = milliseconds(_check_retention(retention)) if self.hybrid else 0
        self._keys = keys
        self._tokens: tuple[Argument, ...] = (str(tokens), kept)
        self.fair = read_switch("fair", fair)
        """True if a free lock goes only to the head of the line."""
        self.replicas = _check_replicas(min_replicas)
        """Replicas that must have a grant or a renewal before it counts."""

    def lease(self, name: str) -> str:
        """The key of the lease of lock *name*."""
        return lease_key(self._keys.tag(name))

    def acquire(self, claim: Claim) -> ScriptCall:
        """Ask for a grant; the reply is what `answers.read_acquired` reads."""
        tag = self._keys.tag(claim.name)
        keys = _lock_keys(tag)
        label = _label_of(claim)
        order = "fair" if self.fair else "barge"
        arguments = (*self._tokens, claim.owner, milliseconds(claim.ttl), label, order)
        if not claim.mode.shared:
            return ScriptCall(ACQUIRE, keys, arguments, self.replicas, follow=keys[:1])
        all_keys = self._whole(tag, *keys, *share_keys(tag))
        arguments += (claim.mode.word, _permits(claim))
        return ScriptCall(ACQUIRE, all_keys, arguments, self.replicas, follow=keys[:1], untracked=True)

    def renew(self, claims: Sequence[Claim]) -> ScriptCall:
        """Renew leases, all in one slot on a cluster, and either all of them shares or none."""
        spans = {ttl: milliseconds(ttl) for ttl in {claim.ttl for claim in claims}}  # there are few
        arguments: list[Argument] = [word for claim in claims for word in (claim.owner, spans[claim.ttl])]
        if claims[0].mode.shared:
            tags = [self._keys.tag(claim.name) for claim in claims]
            keys = [key for tag in tags for key in (lease_key(tag), *share_keys(tag))]
            return ScriptCall(RENEW_SHARES, keys, arguments, self.replicas, tuple(keys[::3]), untracked=True)
        return ScriptCall(RENEW, [self.lease(claim.name) for claim in claims], arguments, self.replicas)

    def release(self, claim: Claim, *, waits: bool = False) -> ScriptCall:
        """Release a name and serve its line. *waits*: the owner may stand in the line, and leaves it."""
        tag = self._keys.tag(claim.name)
        keys = _lock_keys(tag)
        arguments: tuple[Argument, ...] = (*self._tokens, claim.owner)
        if claim.mode.shared:
            arguments += (int(claim.mode != READER or claim.label is not None),)
        if claim.mode.shared or waits:
            keys += share_keys(tag)
        return ScriptCall(RELEASE, self._whole(tag, *keys), arguments, untracked=claim.mode.shared)

    def leave(self, claim: Claim) -> ScriptCall:
        """Take a waiter out of the line, and serve the line. A grant that its owner got meanwhile stays."""
        call = self.release(claim, waits=True)
        return call._replace(arguments=(*self._tokens, claim.owner, 0, "leave"))

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
        arguments: list[Argument] = [*self._tokens]
        shares = any(sign.claim.mode.shared for signs in lines for sign in signs)
        for signs in lines:
            tag = self._keys.tag(signs[0].claim.name)
            of_name = _lock_keys(tag)
            if shares or not self._sharded:  # while a slot moves, its locks do without the keys of shares
                of_name = self._whole(tag, *of_name, *share_keys(tag))
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
        tag = self._keys.tag(claims[0].name)
        keys, owners = (lease_key(tag), share_keys(tag)[0]), [claim.owner for claim in claims]
        return ScriptCall(CHECK_SHARES, keys, owners, follow=keys[:1], untracked=True)

    def holders(self, name: str) -> ScriptCall:
        """Ask for all who hold a name, and how many wait for it."""
        return ScriptCall(HOLDERS, self._described(name), (), untracked=True)

    def inspect(self, name: str) -> ScriptCall:
        """Ask who holds a lock."""
        return ScriptCall(INSPECT, (self.lease(name),), ())

    def listed(self, names: Sequence[str]) -> ScriptCall:
        """Ask for the holders of locks, all in one slot on a cluster, and how many wait for each."""
        return ScriptCall(LISTED, [key for name in names for key in self._described(name)], (), untracked=True)

    def _described(self, name: str) -> tuple[str, ...]:
        tag = self._keys.tag(name)
        return (lease_key(tag), *line_keys(tag), *share_keys(tag))

    def waiting(self, name: str, after: str, most: int) -> ScriptCall:
        """Ask for the waiters that came after one in the line of a name."""
        return ScriptCall(WAITING, line_keys(self._keys.tag(name)), (after, most), untracked=True)

    def revoke(self, name: str, token: int, reason: str) -> ScriptCall:
        """End the grants with a token; the reply is 1 if there were any."""
        tag = self._keys.tag(name)
        keys = (*_lock_keys(tag), *share_keys(tag), revoked_key(tag))
        arguments = (*self._tokens, token, reason)
        return ScriptCall(REVOKE, self._whole(tag, *keys), arguments, self.replicas, untracked=True)

    def transfer(self, of: Claim, to: Claim) -> ScriptCall:
        """Pass the grant of one claim to another; the reply is what `answers.read_transfer` reads."""
        tag = self._keys.tag(of.name)
        keys = self._whole(tag, *_lock_keys(tag), *share_keys(tag), revoked_key(tag))
        heir = (to.owner, milliseconds(to.ttl), _label_of(to), handed_over(to))
        return ScriptCall(TRANSFER, keys, (*self._tokens, of.owner, *heir), self.replicas, untracked=True)

    def revoked(self, claim: Claim) -> ScriptCall:
        """Ask for the reason for which the grant of a claim was revoked."""
        return ScriptCall(REVOKED, (revoked_key(self._keys.tag(claim.name)),), (claim.owner,), untracked=True)

    def _whole(self, tag: str, *keys: str) -> tuple[str, ...]:
        """The keys of a script that may empty one of them and then touch it again: it runs whole or not at all."""
        return (*keys, never_key(tag)) if self._sharded else keys


def _lock_keys(tag: str) -> tuple[str, ...]:
    """The keys of a lock and of its line: all that a plain lock needs."""
    return lease_key(tag), token_key(tag), *line_keys(tag)


def milliseconds(seconds: float) -> int:
    """Round up: the server may keep a grant for longer than its ttl, never for less."""
    return math.ceil(seconds * 1000)


def _permits(claim: Claim) -> int:
    return claim.mode.of if isinstance(claim.mode, Permit) else 0


def _label_of(claim: Claim) -> str:
    """What the lease of *claim* has behind its token."""
    return stored(claim.label) if claim.mode != WRITER else f"{WRITES}{stored(claim.label)}"


def stored(label: str | None) -> str:
    """Mark a label, so that an empty text differs from None."""
    return "" if label is None else f"={label}"


def _check_retention(retention: object) -> float:
    try:
        value = float(retention)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        value = math.nan
    if isinstance(retention, bool) or not 1.0 <= value <= 100 * 365 * 86400.0:
        msg = f"retention must be a number of seconds from 1 to a hundred years, got {shown(retention)}"
        raise ConfigurationError(msg)
    return value


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
