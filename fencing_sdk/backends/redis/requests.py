"""The requests of the backend as calls of scripts. `answers.py` reads what comes back. No I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fencing_sdk._values.claim import (
    LOCK,
    READER,
    WRITER,
    Claim,
    Permit,
)
from fencing_sdk.backends._shared.option_values import read_hybrid, read_switch
from fencing_sdk.backends.redis.keys import (
    WRITES,
    RedisKeys,
    lease_key,
    line_keys,
    never_key,
    revoked_key,
    share_keys,
    share_line_keys,
    token_key,
)
from fencing_sdk.backends.redis.scripts import (
    ACQUIRE,
    ACQUIRE_SHARE,
    ACQUIRE_WRITER,
    CHECK_SHARES,
    HOLDERS,
    INSPECT,
    JOIN_SHARE_LINE,
    LEAVE_SHARE_LINE,
    LISTED,
    RELEASE,
    RELEASE_SHARE,
    RENEW,
    RENEW_SHARES,
    REVOKE,
    REVOKED,
    STAND,
    WAITING,
    Argument,
    ScriptCall,
)
from fencing_sdk.errors import ConfigurationError, shown

DEFAULT_RETENTION = 7 * 86400.0
_MOST_REPLICAS = 100


class WaiterSign(NamedTuple):
    """A sign of life: what the server keeps of a waiter, so that a release can hand it the lock or wake it."""

    claim: Claim
    mode: str
    """``"direct"``, ``"silent"`` or ``"wake"``: see `line.lua`."""
    sent_at: int
    """Milliseconds on a clock of this client, which a message repeats: a grant counts from this moment."""
    ticket: str
    command: str
    channel: str

    def stored(self) -> str:
        """What the server keeps, behind its own time."""
        ttl, metadata = milliseconds(self.claim.ttl), stored(self.claim.metadata)
        return f"{self.mode} {self.sent_at} {ttl} {self.ticket} {self.command} {self.channel}\0{metadata}"


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
        """Whether a free lock goes only to the head of the line."""
        self._options: tuple[Argument, ...] = (*self._tokens, "fair" if self.fair else "barge")
        self.replicas = _check_replicas(min_replicas)
        """Replicas that must have a grant or a renewal before it counts."""

    def lease(self, name: str) -> str:
        """The key of the lease of lock *name*."""
        return lease_key(self._keys.tag(name))

    def acquire(self, claim: Claim) -> ScriptCall:
        """Ask for a grant; the reply is the token, or the milliseconds until another try makes sense."""
        keys = self._all_keys(claim.name)
        metadata = stored(claim.metadata) if claim.mode != WRITER else f"{WRITES}{stored(claim.metadata)}"
        arguments = (claim.owner, milliseconds(claim.ttl), metadata, *self._options)
        if claim.mode != LOCK:
            return self._acquire_share(claim, arguments)
        return ScriptCall(ACQUIRE, keys, arguments, self.replicas, follow=keys[:1])

    def _acquire_share(self, claim: Claim, arguments: tuple[Argument, ...]) -> ScriptCall:
        """Ask for a share, or the lock of a writer; a refusal is ``[milliseconds left, 1 if it is in the line]``."""
        tag = self._keys.tag(claim.name)
        keys = (lease_key(tag), token_key(tag), *share_line_keys(tag))
        if not claim.mode.shared:
            return ScriptCall(ACQUIRE_WRITER, keys, arguments, self.replicas, keys[:1], untracked=True)
        mode: tuple[Argument, ...] = (claim.mode.word, _permits(claim))
        all_keys = self._whole(tag, *keys, *share_keys(tag))
        return ScriptCall(ACQUIRE_SHARE, all_keys, (*arguments, *mode), self.replicas, keys[:1], untracked=True)

    def renew(self, claims: Sequence[Claim]) -> ScriptCall:
        """Renew leases, all in one slot on a cluster, and either all of them shares or none."""
        spans = {ttl: milliseconds(ttl) for ttl in {claim.ttl for claim in claims}}  # there are few
        arguments: list[Argument] = [word for claim in claims for word in (claim.owner, spans[claim.ttl])]
        if claims[0].mode.shared:
            tags = [self._keys.tag(claim.name) for claim in claims]
            keys = [key for tag in tags for key in (lease_key(tag), *share_keys(tag))]
            return ScriptCall(RENEW_SHARES, keys, arguments, self.replicas, tuple(keys[::3]), untracked=True)
        return ScriptCall(RENEW, [self.lease(claim.name) for claim in claims], arguments, self.replicas)

    def release(self, claim: Claim) -> ScriptCall:
        """Release a lock, or leave its line, and hand the lock on. Of a share: release it, and wake the head."""
        if claim.mode != LOCK:
            noted = int(claim.mode != READER or claim.metadata is not None)
            arguments = (claim.owner, claim.mode.word, noted)
            return ScriptCall(RELEASE_SHARE, self._share_keys(claim), arguments, untracked=True)
        keys = self._whole(self._keys.tag(claim.name), *self._all_keys(claim.name))
        return ScriptCall(RELEASE, keys, (claim.owner, *self._tokens))

    def release_alone(self, claim: Claim) -> ScriptCall:
        """
        Release what stands in the lease, without access to the line: its waiters notice at their next sign of life.

        The error is TRYAGAIN for a share that does not stand there, because another share has joined it.
        """
        keys = (self.lease(claim.name),)
        if claim.mode != LOCK:
            return self.release(claim)._replace(keys=keys)
        return ScriptCall(RELEASE, keys, (claim.owner, *self._tokens))

    def renew_share_alone(self, claim: Claim) -> tuple[ScriptCall, ...]:
        """Renew a share with fewer keys: it stands in the lease, or is that of a reader without metadata."""
        call = self.renew((claim,))
        return tuple(call._replace(keys=call.keys[:count]) for count in ((1, 2) if claim.mode == READER else (1,)))

    def stand(self, lines: Sequence[Sequence[WaiterSign]]) -> ScriptCall:
        """Give signs of life for waiters, those of one lock after the other, all in one slot on a cluster."""
        keys: list[str] = []
        arguments: list[Argument] = [*self._tokens]
        for signs in lines:
            keys += self._all_keys(signs[0].claim.name)
            arguments.append(len(signs))
            for sign in signs:
                arguments += (sign.claim.owner, sign.stored())
        return ScriptCall(STAND, keys, arguments)

    def check_shares(self, claims: Sequence[Claim]) -> ScriptCall:
        """
        Ask whether shares of one name are still held.

        The reply is that of `renew`, and client tracking follows the lease.
        """
        tag = self._keys.tag(claims[0].name)
        keys, owners = (lease_key(tag), share_keys(tag)[0]), [claim.owner for claim in claims]
        return ScriptCall(CHECK_SHARES, keys, owners, follow=keys[:1], untracked=True)

    def join_share_line(self, claim: Claim, command: str, channel: str, ticket: str) -> ScriptCall:
        """Join the line of shares; the server then wakes the waiter by *command* with *ticket* on *channel*."""
        if claim.mode.shared:
            command = f"{command}/{claim.mode.word}/{_permits(claim)}"
        arguments = (claim.owner, command, channel, ticket, stored(claim.metadata))
        return ScriptCall(JOIN_SHARE_LINE, self._share_keys(claim)[:3], arguments, untracked=True)

    def leave_share_line(self, claim: Claim) -> ScriptCall:
        """Leave the line of shares."""
        return ScriptCall(LEAVE_SHARE_LINE, self._share_keys(claim), (claim.owner,), untracked=True)

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
        return (lease_key(tag), *line_keys(tag), *share_line_keys(tag), *share_keys(tag))

    def waiting(self, name: str, after: str, most: int, *, shares: bool) -> ScriptCall:
        """Ask for the waiters that came after one, in one of the two lines of a lock."""
        tag = self._keys.tag(name)
        return ScriptCall(WAITING, share_line_keys(tag) if shares else line_keys(tag), (after, most), untracked=True)

    def revoke(self, name: str, token: int, reason: str) -> ScriptCall:
        """End the grants with a token; the reply is 1 if there were any."""
        tag = self._keys.tag(name)
        keys = self._whole(tag, *self._all_keys(name), *share_line_keys(tag), *share_keys(tag), revoked_key(tag))
        return ScriptCall(REVOKE, keys, (token, reason, *self._tokens), self.replicas, untracked=True)

    def revoked(self, claim: Claim) -> ScriptCall:
        """Ask for the reason for which the grant of a claim was revoked."""
        return ScriptCall(REVOKED, (revoked_key(self._keys.tag(claim.name)),), (claim.owner,), untracked=True)

    def _share_keys(self, claim: Claim) -> tuple[str, ...]:
        tag = self._keys.tag(claim.name)
        return self._whole(tag, lease_key(tag), *share_line_keys(tag), *share_keys(tag))

    def _whole(self, tag: str, *keys: str) -> tuple[str, ...]:
        """The keys of a script that may empty one of them and then touch it again: it runs whole or not at all."""
        return (*keys, never_key(tag)) if self._sharded else keys

    def _all_keys(self, name: str) -> tuple[str, ...]:
        tag = self._keys.tag(name)
        return (lease_key(tag), token_key(tag), *line_keys(tag))


def milliseconds(seconds: float) -> int:
    """Round up: the server may keep a grant for longer than its ttl, never for less."""
    return math.ceil(seconds * 1000)


def _permits(claim: Claim) -> int:
    return claim.mode.of if isinstance(claim.mode, Permit) else 0


def stored(metadata: str | None) -> str:
    """Mark metadata, so that an empty text differs from no metadata."""
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
