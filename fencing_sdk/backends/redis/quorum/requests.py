"""
The requests to one node as calls of scripts, and how the answers are read. No I/O.

    {fencing:}:epoch        "NODES.RANDOM": the node may vote while it remembers this
    {fencing:}:founding     the epoch that is about to be founded
    {fencing:}:id           random: two addresses with one id are one server
    {fencing:}:run          the server's run id when it got its epoch
    {fencing:}:c0 to c1023  the counters; the name of a lock decides which one numbers its holds
    {fencing:NAME}:h        the hold (see holds.lua), with the ttl of the lease
    {fencing:NAME}:hq, :hw  the line of the waiters (see line.lua)
    {fencing:NAME}:hx:OWNER why its grant was revoked (see operating.lua)

The counters never expire, so there is a fixed number of them, and the tokens of one lock have gaps.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from fencing_sdk._values.claim import Claim
from fencing_sdk.backends._shared.error_translation import ErrorTranslation
from fencing_sdk.backends.redis.connection.pipe import Reply
from fencing_sdk.backends.redis.errors import translated as translated_by_redis
from fencing_sdk.backends.redis.quorum.ballots import QuorumHold, Refusal
from fencing_sdk.backends.redis.requests import RedisKeys, milliseconds, read_token, stored
from fencing_sdk.backends.redis.scripts import WAITING, Argument, RedisScript, ScriptCall
from fencing_sdk.errors import BackendError

_HOLD = ":h"
COUNTERS = 1024
"""Fixed for ever: another number would assign other counters to locks, and tokens could fall."""

_HOLDS, _OPERATING = "quorum/holds.lua", "quorum/operating.lua"
_HOLD_PART = f"{_HOLDS} [hold]"
_LINE = ("line.lua [time]", f"{_HOLDS} [line]")
_PLACE = f"{_HOLDS} [place]"

GRANT = RedisScript(*_LINE, _HOLD_PART, f"{_HOLDS} [grant]")
CONFIRM = RedisScript(_HOLD_PART, f"{_HOLDS} [confirm]")
UNDO = RedisScript(*_LINE, _HOLD_PART, _PLACE, f"{_HOLDS} [undo]")
RENEW = RedisScript(_HOLD_PART, f"{_HOLDS} [renew]")
HEAL = RedisScript(_HOLD_PART, f"{_HOLDS} [heal]")
RELEASE = RedisScript(*_LINE, _HOLD_PART, f"{_HOLDS} [release]")
JOIN = RedisScript(*_LINE, _HOLD_PART, _PLACE, f"{_HOLDS} [join]")
LEAVE = RedisScript(*_LINE, f"{_HOLDS} [leave]")
INSPECT = RedisScript(f"{_OPERATING} [inspect]", reads=True)
LISTED = RedisScript(f"{_OPERATING} [listed]", reads=True)
REVOKE = RedisScript(*_LINE, _HOLD_PART, f"{_OPERATING} [revoke]")
NOTED = RedisScript(f"{_OPERATING} [noted]")
FOUND = RedisScript(f"{_OPERATING} [found]")
SEAL = RedisScript(f"{_OPERATING} [seal]")
ADMIT = RedisScript(f"{_OPERATING} [admit]")
SCAN = RedisScript(f"{_OPERATING} [scan]")

PRELOADED = (GRANT, CONFIRM, UNDO, RENEW, HEAL, RELEASE, JOIN, LEAVE)
"""Loaded on each new connection: a grant that has to be sent again, by its text, could fall behind its release."""


class Knowledge(NamedTuple):
    """A node's memory of its quorum; empty where it has none."""

    epoch: str
    founding: str
    id: str
    run: str


class SeenHold(NamedTuple):
    """The hold of a lock on one node, for `inspect`."""

    owner: str
    token: int
    left: float
    label: str | None
    attempt: int = 0
    """The attempt that has made it: near the microseconds of its client's clock."""


class LinePlace(NamedTuple):
    """Where a waiter stands in the line of every node, and how it is woken."""

    score: int
    """Microseconds of the client's clock when it joined."""
    channel: str
    ticket: str


class QuorumRequests:
    """Makes the calls of scripts for the keys of one prefix."""

    def __init__(self, keys: RedisKeys) -> None:
        self._keys = keys
        tag = keys.tag("")
        self._epoch, self._founding, self._id, self._run = (
            f"{tag}:{key}" for key in ("epoch", "founding", "id", "run")
        )
        self._counters = [f"{tag}:c{number}" for number in range(COUNTERS)]

    def hold(self, name: str) -> str:
        """The key of the hold of lock *name*."""
        return f"{self._keys.tag(name)}{_HOLD}"

    def _counter(self, name: str) -> str:
        return self._counters[zlib.crc32(name.encode()) % COUNTERS]

    def _with_line(self, name: str) -> tuple[str, str, str]:
        key = self.hold(name)
        return key, f"{key}q", f"{key}w"

    def grant(self, claim: Claim, epoch: str, attempt: int) -> ScriptCall:
        """Ask for a hold. The attempt's number is also the hint for the token."""
        keys = (self._epoch, self._counter(claim.name), *self._with_line(claim.name))
        arguments = (epoch, claim.owner, milliseconds(claim.ttl), attempt, stored(claim.label))
        return ScriptCall(GRANT, keys, arguments, follow=keys[2:3])

    def confirm(self, claim: Claim, epoch: str, number: int, token: int) -> ScriptCall:
        """Raise the hold with *number* to the token."""
        keys = (self._epoch, self._counter(claim.name), self.hold(claim.name))
        return ScriptCall(CONFIRM, keys, (epoch, claim.owner, number, token, milliseconds(claim.ttl)), follow=keys[2:3])

    def undo(self, claim: Claim, attempt: int, place: LinePlace | None) -> ScriptCall:
        """Delete what an attempt has got; a waiter goes back to its *place*."""
        return ScriptCall(UNDO, self._with_line(claim.name), (claim.owner, attempt, *(place or ())))

    def renew(self, claims: Sequence[Claim], holds: Sequence[QuorumHold | None], epoch: str, node: int) -> ScriptCall:
        """Renew leases on one *node*, each if its hold there is unbroken."""
        arguments: list[Argument] = [epoch]
        for claim, hold in zip(claims, holds, strict=True):
            number: Argument = "" if hold is None else hold.numbers.get(node, 0)
            arguments += (claim.owner, number, milliseconds(claim.ttl))
        return ScriptCall(RENEW, (self._epoch, *(self.hold(claim.name) for claim in claims)), arguments)

    def heal(self, leases: Sequence[tuple[QuorumHold, Claim]], epoch: str, hint: int) -> ScriptCall:
        """Give leases a new hold on a node that has lost theirs."""
        keys, arguments = [self._epoch], list[Argument]((epoch, hint))
        for hold, claim in leases:
            keys += (self._counter(claim.name), self.hold(claim.name), self._note(claim.name, claim.owner))
            arguments += (claim.owner, hold.token, hint, milliseconds(claim.ttl), stored(claim.label))
        return ScriptCall(HEAL, keys, arguments)

    def release(self, claim: Claim) -> ScriptCall:
        """Release a lock on one node, and wake the head of its line there."""
        return ScriptCall(RELEASE, self._with_line(claim.name), (claim.owner,))

    def join(self, claim: Claim, place: LinePlace) -> ScriptCall:
        """Join the line of one node."""
        return ScriptCall(JOIN, self._with_line(claim.name), (claim.owner, *place))

    def leave(self, claim: Claim) -> ScriptCall:
        """Leave the line of one node."""
        return ScriptCall(LEAVE, self._with_line(claim.name), (claim.owner,))

    def inspect(self, name: str) -> ScriptCall:
        """Ask who has the hold on one node."""
        return ScriptCall(INSPECT, (self.hold(name),), (), untracked=True)

    def revoke(self, name: str, seen: SeenHold, revocation: str, reason: str, patience: float) -> ScriptCall:
        """Take the hold of a grant that was *seen* away on one node; note by which revocation and why, for a while."""
        keys = (*self._with_line(name), self._note(name, seen.owner))
        return ScriptCall(REVOKE, keys, (seen.owner, seen.token, revocation, reason, milliseconds(patience)))

    def noted(self, claims: Sequence[Claim]) -> ScriptCall:
        """Ask one node for the reasons for which the grants of claims were revoked."""
        return ScriptCall(NOTED, [self._note(claim.name, claim.owner) for claim in claims], ())

    def _note(self, name: str, owner: str) -> str:
        return f"{self.hold(name)}x:{owner}"

    def listed(self, names: Sequence[str]) -> ScriptCall:
        """Ask one node for its holds of locks, and how many wait for each."""
        keys = [key for name in names for key in self._with_line(name)[:2]]
        return ScriptCall(LISTED, keys, (), untracked=True)

    def waiting(self, name: str, after: bytes, most: int) -> ScriptCall:
        """Ask one node for the waiters that came after one."""
        return ScriptCall(WAITING, self._with_line(name)[1:], (after, most), untracked=True)

    def holds(self, prefix: str) -> str:
        """The pattern of SCAN for the holds of all locks whose name begins with *prefix*."""
        return self._keys.leases(prefix, ending=_HOLD)

    def name(self, hold: bytes) -> str | None:
        """The lock of a key that `holds` has found; None for a key of another program."""
        return self._keys.name(hold, ending=_HOLD)

    def look(self) -> tuple[str, ...]:
        """Ask what the node knows about its quorum, by a command of the server."""
        return ("MGET", *self._about())

    def found(self, step: str, value: str, more: str = "") -> ScriptCall:
        """Take one step of founding."""
        return ScriptCall(FOUND, self._about(), (step, value, more))

    def seal(self, epoch: str, new: str, run: str) -> ScriptCall:
        """Give a node that remembers a new epoch; the reply has its counters."""
        return ScriptCall(SEAL, (self._epoch, self._run, *self._counters), (epoch, new, run))

    def admit(self, epoch: str, new: str, name: str, run: str, counters: Sequence[int]) -> ScriptCall:
        """Let a node vote, with counters that are at least *counters*."""
        return ScriptCall(ADMIT, (*self._about(), *self._counters), (epoch, new, name, run, *counters))

    def scan(self, cursor: bytes) -> ScriptCall:
        """Look at some of the holds of a node: the reply is the next cursor, and the milliseconds of the longest."""
        return ScriptCall(SCAN, (), (cursor, self.holds("")))

    def _about(self) -> tuple[str, str, str, str]:
        return self._epoch, self._founding, self._id, self._run


def read_refusal(reply: Reply) -> Refusal:
    """Read a refusal. Raise ValueError if it is malformed."""
    match reply:
        case [int(left), int(in_line), bytes(token), bytes(attempt)]:
            return Refusal(None if left < 0 else left / 1000, bool(in_line), int(token), int(attempt))
    msg = "neither a number nor a refusal"
    raise ValueError(msg)


def read_numbers(reply: Reply, count: int) -> list[int]:
    """Read the numbers of *count* new holds; 0 where there is none."""
    if not isinstance(reply, list) or len(reply) != count:
        return [0] * count
    return [int(number) if isinstance(number, bytes) and number.isdigit() else 0 for number in reply]


def read_hold(reply: Reply) -> SeenHold | None:
    """Read the hold of a lock on one node; None if it is free. Raise ValueError if the key holds another thing."""
    if not isinstance(reply, list):
        return None
    hold, left = reply
    owner, _, token, attempt, label = (hold if isinstance(hold, bytes) else b"").decode().split("\0", 4)
    remaining = left / 1000 if isinstance(left, int) and left >= 0 else 0.0
    return SeenHold(owner, read_token(token.encode()), remaining, label[1:] if label else None, int(attempt))


def read_knowledge(reply: Reply) -> Knowledge:
    """Read what a node knows about its quorum. Raise ValueError if a key holds something else."""
    if isinstance(reply, list) and len(reply) == len(Knowledge._fields):
        return Knowledge(*(bytes(part or b"").decode(errors="replace") for part in reply))
    msg = "no knowledge"
    raise ValueError(msg)


def nodes_of(epoch: str) -> int:
    """The number of nodes that an epoch was founded with; 0 if it is not an epoch."""
    count, _, nonce = epoch.partition(".")
    return int(count) if nonce and count.isascii() and count.isdigit() and len(count) <= 2 else 0  # noqa: PLR2004


BACKEND = "RedisQuorumBackend"


def translated(operation: str, error: Exception) -> BackendError:
    """Return the error of the contract for *error*."""
    return renamed(translated_by_redis(operation, error))


def renamed(error: BackendError) -> BackendError:
    """Return *error* as one of the quorum: a connection to a node does not know what it is for."""
    if error.backend == BACKEND:
        return error
    named = type(error)(BACKEND, error.operation, error.detail)
    named.__cause__ = error.__cause__
    return named


translating = partial(ErrorTranslation, translated)
"""``with translating("acquire")``: an error of the driver leaves the block as an error of the contract."""
