"""
Lists what is held on a quorum and who waits, and takes grants away.

What a majority holds is on at least one of any nodes that are not a minority: on one of two of three nodes. So a
listing walks over the keys of so many nodes, as that of a single server does, and asks all nodes who holds what it has
found.

1. If one of these nodes goes, and another takes its place, the listing begins again.
2. A lock is listed at the first of these nodes that has it. But a node that was away may have got it after it was
   walked over. So a node counts as the first only if the attempt by which it has the lock is older than the listing,
   by the clocks of the clients. The cursor has the time at which the listing began.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NamedTuple

from fencing_sdk._values.claim import LOCK, Claim, Holder, Listing, Waiting, holder_of, new_owner
from fencing_sdk._values.clock import wall_micros, wall_ticks
from fencing_sdk.backends._shared.rules import age_of
from fencing_sdk.backends.redis.connection.dial import UnreachableError
from fencing_sdk.backends.redis.connection.node import CallOutcome
from fencing_sdk.backends.redis.connection.pipe import PipeError, Reply
from fencing_sdk.backends.redis.connection.router import Masters
from fencing_sdk.backends.redis.operating import KeyWalk, ListingCursor
from fencing_sdk.backends.redis.quorum.ballots import majority_of
from fencing_sdk.backends.redis.quorum.node import SILENCE, NodeRequest
from fencing_sdk.backends.redis.quorum.nodes import QuorumNodes, ask_nodes, find_hold, most_telling, shown_by_majority
from fencing_sdk.backends.redis.quorum.requests import QuorumRequests, SeenHold, read_hold

__all__ = ["QuorumListing", "QuorumRevocations", "RevocationTally", "holder_of_hold"]

_LOOKED_AT = 50
"""Locks that one run of a script describes."""
_AHEAD = 2_000
"""Ticks by which the number of an attempt may be ahead of its client's clock."""
_STRETCH = 100
"""Waiters that one run of a script returns."""


class _SeenLock(NamedTuple):
    """One lock on one node."""

    hold: SeenHold | None
    waiters: int


class _Place(NamedTuple):
    """The place of a waiter in the line of one node."""

    score: bytes
    owner: str
    alive: bool
    """True if it has given a sign of life; a waiter that has gone without leaving does not."""


class QuorumListing:
    """Lists for one backend."""

    def __init__(self, nodes: QuorumNodes, requests: QuorumRequests) -> None:
        self._nodes = nodes
        self._requests = requests
        self._walk = KeyWalk()

    async def page(self, prefix: str, cursor: str | None, limit: int) -> Listing:
        """See `fencing_sdk.abc.SupportsListing.list_holders`."""
        at = ListingCursor.read(cursor)
        for _ in range(len(self._nodes) - 1):
            with suppress(PipeError, UnreachableError):  # the node has gone, and with it its vote
                return await self._page(prefix, at, limit)
        return await self._page(prefix, at, limit)

    async def _page(self, prefix: str, at: ListingCursor, limit: int) -> Listing:
        voters = self._nodes.voters() or await self._nodes.quorum()
        chosen = voters.nodes[: len(self._nodes) - self._nodes.majority + 1]
        numbers, _, began = at.layout.partition("@")
        if numbers != (layout := "-".join(str(node.number) for node in chosen)) or not began.isdigit():
            at = ListingCursor(f"{layout}@{wall_ticks() + _AHEAD}")
            began = at.layout.partition("@")[2]
        walked = Masters([node.server for node in chosen], at.layout)
        found, after = await self._walk.page(at, walked, self._requests.holds(prefix), limit)
        names = [name for key in found if (name := self._requests.name(key)) is not None]
        earlier = {node.number for node in chosen[: at.server]}
        holders: list[Holder] = []
        for start in range(0, len(names), _LOOKED_AT):
            holders += await self._describe(names[start : start + _LOOKED_AT], earlier, int(began))
        return Listing(holders, after)

    async def _describe(self, names: Sequence[str], earlier: Collection[int], began: int) -> list[Holder]:
        """Look at locks: leave out what no majority holds, and what was listed at *earlier* nodes."""

        def read(reply: Reply) -> list[_SeenLock]:
            return _read_listed(reply, len(names))

        answers = await ask_nodes(self._nodes, self._requests.listed(names), read, lambda _: False)
        holders = []
        for index, name in enumerate(names):
            lock = {node: seen[index] for node, seen in answers.items()}
            shown = shown_by_majority([seen.hold for seen in lock.values()], self._nodes.majority)
            if shown is not None and not any(_was_there(lock.get(node), shown, began) for node in earlier):
                holders.append(holder_of_hold(name, shown, max(seen.waiters for seen in lock.values())))
        return holders

    async def waiters(self, name: str) -> list[Waiting]:
        """See `fencing_sdk.abc.SupportsListing.list_waiters`."""
        waiters: list[Waiting] = []
        after: bytes | None = b"-inf"
        while after is not None:
            call = self._requests.waiting(name, after, _STRETCH)
            answers = await ask_nodes(self._nodes, call, _read_line, lambda _: True)
            lines = list(answers.values())
            full = [line[-1].score for line in lines if len(line) == _STRETCH]
            after = min(full, key=float, default=None)
            last = math.inf if after is None else float(after)
            waiters += [Waiting(holder_of(owner)) for owner in _in_most(lines, last)]
        return waiters


def _was_there(seen: _SeenLock | None, shown: SeenHold, began: int) -> bool:
    """Return whether a node had a hold of this grant when the listing began."""
    hold = None if seen is None else seen.hold
    return hold is not None and (hold.owner, hold.token) == (shown.owner, shown.token) and hold.attempt < began


def holder_of_hold(name: str, hold: SeenHold, waiters: int | None = None) -> Holder:
    """Describe who has a hold: its token has the time of the grant, by the clock of this client."""
    age = age_of(hold.token, LOCK, wall_micros())
    holder = holder_of(hold.owner)
    return Holder(name, hold.token, holder, hold.left, hold.label, held_for=age, waiters=waiters)


def _in_most(lines: Sequence[Sequence[_Place]], last: float) -> list[str]:
    """Those who stand in most of the lines up to a *last* score, in their order. The others come and go."""
    counts = Counter(place.owner for line in lines for place in line if place.alive)
    scores = {place.owner: float(place.score) for line in lines for place in line}
    found = [owner for owner, count in counts.items() if 2 * count > len(lines) and scores[owner] <= last]
    return sorted(found, key=scores.__getitem__)


def _read_listed(reply: Reply, count: int) -> list[_SeenLock]:
    """
    Read what one node says of *count* locks.

    Raises:
        ValueError: it is not such an answer.
    """
    if not isinstance(reply, list) or len(reply) != count:
        msg = "not the holds of so many locks"
        raise ValueError(msg)
    return [_read_seen(lock) for lock in reply]


def _read_seen(lock: Reply) -> _SeenLock:
    match lock:
        case [hold, left, int(waiters)]:
            with suppress(ValueError):  # the key holds something else
                return _SeenLock(read_hold([hold, left]), waiters)
    return _SeenLock(None, 0)


def _read_line(reply: Reply) -> list[_Place]:
    """
    Read a stretch of the line of one node.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(reply, list):
        msg = "not a line"
        raise TypeError(msg)
    words = [word if isinstance(word, bytes) else b"" for word in reply]
    return [_Place(words[at], words[at + 1].decode(), bool(words[at + 2])) for at in range(0, len(words) - 2, 3)]


_PATIENCE = 5.0
"""Seconds for asking the nodes when the grant has almost ended."""


class RevocationTally:
    """
    The answers of the nodes to one revocation. No I/O, no clock.

    Args:
        nodes: The number of all nodes.

        holding: The nodes that have shown the grant: a majority at the least.

        revocation: The id of this one.
    """

    def __init__(self, nodes: int, holding: Collection[int], revocation: str) -> None:
        self._nodes = nodes
        self._majority = majority_of(nodes)
        self._holding = holding
        self._revocation = revocation
        self._firsts: dict[int, str] = {}
        self._free: set[int] = set()
        self._answered = 0

    def answer(self, node: int, first: str) -> None:
        """Take note of the revocation that came *first* to a node; "" if the node had no hold then."""
        self._answered += 1
        if first:
            self._firsts[node] = first
        elif node in self._holding:
            self._free.add(node)

    def failed(self) -> None:
        """Take note that a node gives no answer."""
        self._answered += 1

    @property
    def complete(self) -> bool:
        """True if no further answer will come."""
        return self._answered == self._nodes

    @property
    def ended(self) -> bool:
        """True if the grant has ended for certain."""
        return len(self._firsts) + len(self._free) >= self._majority

    @property
    def is_the_first(self) -> bool:
        """True if it was this revocation that has ended the grant: not a release, an expiry or another operator's."""
        counts = Counter(self._firsts.values())
        if counts.total() < self._majority:
            return False
        return min(counts, key=lambda revocation: (-counts[revocation], revocation)) == self._revocation


class QuorumRevocations:
    """
    Revokes for one backend.

    1. A majority of the nodes shows who has the token. Then each node gets the request to delete the hold of this owner
       and token, in one step (`operating.lua`), so a later grant is never hit.
    2. Each node keeps a note: which revocation came first, whether it has deleted a hold, and the reason. While the
       note stands, the holder gets no new hold there (`holds.lua`).
    3. The grant has ended when a majority of the nodes has no hold of it and will get none: a node that has deleted
       it, or one that has shown it before and has lost it since. A node that had none may still get it by a slow
       request of the attempt that has won the lock, so it does not count.
    4. If several operators revoke one grant at the same time, the first is the one that came first on most nodes.

    Until a majority has deleted it, the holder may go on: `revoke` raises an error then, and may be repeated.
    `tests/properties/quorum_revocation_model.py` goes through every order of these steps.
    """

    def __init__(self, nodes: QuorumNodes, requests: QuorumRequests) -> None:
        self._nodes = nodes
        self._requests = requests

    async def revoke(self, name: str, token: int, reason: str) -> bool:
        """
        See `fencing_sdk.abc.SupportsRevoking.revoke`.

        Raises:
            Exception: too few nodes have answered.
        """
        shown, holding = await find_hold(self._nodes, self._requests, name)
        if shown is None or shown.token != token:
            return False
        revocation = new_owner()
        patience = shown.left + _PATIENCE
        request = NodeRequest(self._requests.revoke(name, shown, revocation, reason, patience))
        round_ = _RevocationRound(RevocationTally(len(self._nodes), holding, revocation))
        for node in self._nodes:
            node.deliver(("revoke", name, token), request, shown.left, round_.answer)
        return await round_.result(patience)

    async def reasons(self, claims: Sequence[Claim]) -> list[str | None]:
        """For claims whose grants have ended: why they were revoked; None where no operator did it."""
        # A majority has the note of a grant that was revoked, so one of any majority has it.
        answers = await ask_nodes(self._nodes, self._requests.noted(claims), _read_reasons, lambda _: True)
        return [next((reason for reason in found if reason), None) for found in zip(*answers.values(), strict=True)]


class _RevocationRound:
    """A revocation that is on its way to every node."""

    def __init__(self, tally: RevocationTally) -> None:
        loop = asyncio.get_running_loop()
        self._tally = tally
        self._errors: list[Exception] = []
        self._decided: asyncio.Future[None] = loop.create_future()
        self._complete: asyncio.Future[None] = loop.create_future()

    def answer(self, node: int, outcome: CallOutcome) -> None:
        """Take note of the answer of a node."""
        if isinstance(outcome, bytes):
            self._tally.answer(node, outcome.decode())
        else:
            self._errors.append(outcome if isinstance(outcome, Exception) else ValueError("no answer to a revocation"))
            self._tally.failed()
        if self._tally.complete:
            _settle(self._complete)
        if self._tally.complete or self._tally.ended:
            _settle(self._decided)

    async def result(self, patience: float) -> bool:
        """
        Wait until the grant has ended, and return whether this revocation was the first.

        Args:
            patience: Seconds for which the notes stand. An answer that comes later proves nothing.

        Raises:
            Exception: too few nodes have answered.
        """
        await asyncio.wait((self._decided,), timeout=patience)
        if not self._tally.ended:
            raise most_telling(self._errors)
        await asyncio.wait((self._complete,), timeout=SILENCE)  # operators who hear all nodes agree on the first
        return self._tally.is_the_first


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _read_reasons(reply: Reply) -> list[str]:
    """
    Read the reasons in the notes of one node.

    Raises:
        ValueError: the reply has none.
    """
    if isinstance(reply, list):
        return [reason.decode(errors="replace") if isinstance(reason, bytes) else "" for reason in reply]
    msg = "not the reasons of revocations"
    raise ValueError(msg)
