"""
The requests to one node as calls of scripts, and how the answers are read. No I/O.

    {fencing:}:epoch        "NODES.RANDOM": the node may vote while it remembers this
    {fencing:}:founding     the epoch that is about to be founded
    {fencing:}:id           random: two addresses with one id are one server
    {fencing:}:run          the server's run id when it got its epoch
    {fencing:}:c0 to c1023  the counters; the name of a lock decides which one numbers its holds
    {fencing:NAME}:h        the hold (see holds.lua), with the ttl of the lease
    {fencing:NAME}:hx:DIGEST  why the ticket of this owner was ended

The counters never expire, so there is a fixed number of them, and the tokens of one lock have gaps.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from fencing_sdk._values.claim import Claim
from fencing_sdk.abc import Kept
from fencing_sdk.backends._shared.bells import bell_key
from fencing_sdk.backends._shared.error_translation import ErrorTranslation
from fencing_sdk.backends.redis import stored
from fencing_sdk.backends.redis.connection.pipe import Reply
from fencing_sdk.backends.redis.errors import translated as translated_by_redis
from fencing_sdk.backends.redis.keys import RedisKeys, milliseconds
from fencing_sdk.backends.redis.quorum.ballots import QuorumHold, Refusal
from fencing_sdk.backends.redis.scripts import Argument, RedisScript, ScriptCall
from fencing_sdk.errors import BackendError

_HOLD = ":h"
COUNTERS = 1024
"""Fixed for ever: another number would assign other counters to locks, and tokens could fall."""


def _script(*named: str, reads: bool = False) -> RedisScript:
    return RedisScript(*(f"quorum/holds.lua [{name}]" for name in named), reads=reads)


GRANT = _script("hold", "grant")
CONFIRM = _script("hold", "confirm")
UNDO = _script("hold", "undo")
KEEP = _script("hold", "keep")
HEAL = _script("hold", "heal")
GIVE_BACK = _script("hold", "give back")
SEE = _script("see", reads=True)
END = _script("hold", "end")
NOTED = _script("noted", reads=True)
FOUND = _script("found")
SEAL = _script("seal")
ADMIT = _script("admit")
SCAN = _script("scan")

PRELOADED = (GRANT, CONFIRM, UNDO, KEEP, HEAL, GIVE_BACK)
"""Loaded on each new connection: a grant that has to be sent again, by its text, could fall behind its release."""


class Knowledge(NamedTuple):
    """A node's memory of its quorum; empty where it has none."""

    epoch: str
    founding: str
    id: str
    run: str


class SeenHold(NamedTuple):
    """The hold of a lock on one node."""

    digest: str
    """Digest of its owner."""
    token: int
    left: float
    label: str | None
    attempt: int = 0
    """The attempt that has made it: near the ticks of its client's clock."""

    @property
    def ticket(self) -> tuple[str, int]:
        """The ticket that it belongs to: owner and token."""
        return self.digest, self.token


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

    def _note(self, name: str, digest: str) -> str:
        return f"{self.hold(name)}x:{digest}"

    def grant(self, claim: Claim, epoch: str, attempt: int) -> ScriptCall:
        """Ask for a hold. The attempt's number is also the hint for the token."""
        keys = (self._epoch, self._counter(claim.name), self.hold(claim.name))
        ttl, digest = milliseconds(claim.ttl), bell_key(claim.owner)
        return ScriptCall(GRANT, keys, (epoch, claim.owner, ttl, attempt, digest, stored(claim.label)))

    def confirm(self, claim: Claim, epoch: str, number: int, token: int) -> ScriptCall:
        """Raise the hold with *number* to the token."""
        keys = (self._epoch, self._counter(claim.name), self.hold(claim.name))
        return ScriptCall(CONFIRM, keys, (epoch, claim.owner, number, token, milliseconds(claim.ttl)))

    def undo(self, claim: Claim, attempt: int) -> ScriptCall:
        """Delete what an attempt has got."""
        return ScriptCall(UNDO, (self.hold(claim.name),), (claim.owner, attempt))

    def keep(self, tickets: Sequence[Kept], holds: Sequence[QuorumHold | None], epoch: str, node: int) -> ScriptCall:
        """Let tickets live on, on one *node*, each if its hold there is unbroken."""
        arguments: list[Argument] = [epoch]
        for (claim, token), hold in zip(tickets, holds, strict=True):
            number: Argument = hold.numbers.get(node, 0) if hold is not None else f"={token}" if token else ""
            arguments += (claim.owner, number, milliseconds(claim.ttl))
        return ScriptCall(KEEP, (self._epoch, *(self.hold(claim.name) for claim, _ in tickets)), arguments)

    def heal(self, leases: Sequence[tuple[QuorumHold, Claim]], epoch: str, hint: int) -> ScriptCall:
        """Give leases a new hold on a node that has lost theirs."""
        keys, arguments = [self._epoch], list[Argument]((epoch, hint))
        for hold, claim in leases:
            digest = bell_key(claim.owner)
            keys += (self._counter(claim.name), self.hold(claim.name), self._note(claim.name, digest))
            arguments += (claim.owner, hold.token, milliseconds(claim.ttl), digest, stored(claim.label))
        return ScriptCall(HEAL, keys, arguments)

    def give_back(self, claim: Claim, after: float = 0.0) -> ScriptCall:
        """Delete the hold on one node, or let it stand there for *after* seconds."""
        digest = bell_key(f"-{claim.owner}") if after > 0 else ""
        return ScriptCall(GIVE_BACK, (self.hold(claim.name),), (claim.owner, milliseconds(after), digest))

    def see(self, names: Sequence[str]) -> ScriptCall:
        """Ask one node for its holds of locks."""
        return ScriptCall(SEE, [self.hold(name) for name in names], ())

    def end(self, name: str, seen: SeenHold, request: str, reason: str, patience: float) -> ScriptCall:
        """Delete the hold of a ticket that was *seen* on one node; note by which request and why, for a while."""
        keys = (self.hold(name), self._note(name, seen.digest))
        return ScriptCall(END, keys, (seen.digest, seen.token, request, reason, milliseconds(patience)))

    def noted(self, claims: Sequence[Claim]) -> ScriptCall:
        """Ask one node for the reasons for which the tickets of claims were ended."""
        return ScriptCall(NOTED, [self._note(claim.name, bell_key(claim.owner)) for claim in claims], ())

    def holds(self, prefix: str) -> str:
        """The pattern of SCAN for the holds of all locks whose name begins with *prefix*."""
        return self._keys.lines(prefix, ending=_HOLD)

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


def read_grant(reply: Reply) -> int | Refusal:
    """Read the number of a grant, or a refusal. Raise ValueError if the reply is neither."""
    match reply:
        case bytes(number):
            return int(number)
        case [int(left), bytes(token), bytes(attempt)]:
            return Refusal(None if left < 0 else left / 1000, int(token), int(attempt))
    msg = "neither a number nor a refusal"
    raise ValueError(msg)


def bytes_of(reply: Reply) -> bytes:
    """Return a reply that must be text. Raise TypeError if it is not."""
    if not isinstance(reply, bytes):
        msg = "not a text"
        raise TypeError(msg)
    return reply


def read_numbers(reply: Reply, count: int) -> list[int]:
    """Read the numbers of *count* new holds; 0 where there is none."""
    if not isinstance(reply, list) or len(reply) != count:
        return [0] * count
    return [int(number) if isinstance(number, bytes) and number.isdigit() else 0 for number in reply]


def read_holds(reply: Reply) -> list[SeenHold | None]:
    """Read the holds of locks on one node; None for those that are free there."""
    if not isinstance(reply, list):
        msg = "not the holds of locks"
        raise TypeError(msg)
    return [None if hold is None else _seen(*hold) for hold in reply]


def _seen(token: bytes, left: int, digest: bytes, attempt: bytes, label: bytes) -> SeenHold:
    text = label.decode(errors="replace")
    return SeenHold(digest.decode(), int(token), max(left, 0) / 1000, text[1:] if text else None, int(attempt))


def read_reasons(reply: Reply) -> list[str]:
    """Read the reasons for which tickets were ended; "" where there is none."""
    if isinstance(reply, list):
        return [reason.decode(errors="replace") if isinstance(reason, bytes) else "" for reason in reply]
    msg = "not the reasons of operators"
    raise TypeError(msg)


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
