"""
Serves operators of a quorum: found it, let a node vote again that has lost its memory, list, and take grants away.

Founding (``fencing init``): every node answers, and no node has an epoch.

1. Each node gets a random id. Equal ids mean that two addresses lead to one server.
2. The node with the smallest id decides between founders: the first epoch proposed there is the one. Then it is
   proposed to the others.
3. When all nodes have the proposal, each settles it: only now it may vote.

So a node that has an epoch proves that all nodes had the proposal. Founding that was broken off is completed from
there: a node with the proposal and no epoch has never voted. A node with neither has lost its memory.

Re-admission: every node is reached, and enough of them remember to meet every majority that the others belonged to.

1. Each node that remembers gets a new epoch, and its counters are read in the same step. From then on no acquisition
   of the old epoch can count one of these nodes. Their holds stay.
2. Wait until every hold that was there then has ended or was renewed since: a lease that counted on a forgetful node
   has ended by then.
3. The forgetful nodes get the highest counters, then the epoch.

Both are safe to repeat, also after they were broken off at any step, and while another operator does the same.

Listing: what a majority holds is on at least one of any nodes that are not a minority, on one of two of three nodes.
So a listing walks over the keys of so many nodes, as that of a single server does, and asks all nodes who holds what it
has found.

1. If one of these nodes goes, and another takes its place, the listing begins again.
2. A lock is listed at the first of these nodes that has it. But a node that was away may have got it after it was
   walked over. So a node counts as the first only if the attempt by which it has the lock is older than the listing,
   by the clocks of the clients. The cursor has the time at which the listing began.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
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
from fencing_sdk.backends.redis.quorum.node import SILENCE, NodeRequest, QuorumNode
from fencing_sdk.backends.redis.quorum.nodes import QuorumNodes, ask_nodes, find_hold, most_telling, shown_by_majority
from fencing_sdk.backends.redis.quorum.requests import (
    BACKEND,
    COUNTERS,
    QuorumRequests,
    SeenHold,
    read_hold,
    read_knowledge,
)
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError

__all__ = ["QuorumListing", "QuorumRevocations", "RevocationTally", "holder_of_hold", "prepare"]

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
        read = partial(_read_listed, count=len(names))
        answers = await ask_nodes(self._nodes, self._requests.listed(names), read, lambda _: False)
        holders = []
        for index, name in enumerate(names):
            lock = {node: seen[index] for node, seen in answers.items()}
            shown = shown_by_majority([seen.hold for seen in lock.values()], self._nodes.majority)
            if shown is None:
                continue
            before = [lock[node].hold for node in earlier if node in lock]  # listed, if they had it when that began
            if not any(hold[:2] == shown[:2] and hold.attempt < began for hold in before if hold is not None):
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
            # The others come and go.
            counts = Counter(place.owner for line in lines for place in line if place.alive)
            scores = {place.owner: float(place.score) for line in lines for place in line}
            in_most = [owner for owner, count in counts.items() if 2 * count > len(lines) and scores[owner] <= last]
            waiters += [Waiting(holder_of(owner)) for owner in sorted(in_most, key=scores.__getitem__)]
        return waiters


def holder_of_hold(name: str, hold: SeenHold, waiters: int | None = None) -> Holder:
    """Describe who has a hold: its token has the time of the grant, by the clock of this client."""
    age = age_of(hold.token, LOCK, wall_micros())
    holder = holder_of(hold.owner)
    return Holder(name, hold.token, holder, hold.left, hold.label, held_for=age, waiters=waiters)


def _read_listed(reply: Reply, count: int) -> list[_SeenLock]:
    if not isinstance(reply, list) or len(reply) != count:
        msg = "not the holds of so many locks"
        raise ValueError(msg)
    seen = [_SeenLock(None, 0)] * count
    for index, lock in enumerate(reply):
        match lock:
            case [hold, left, int(waiters)]:
                with suppress(ValueError):  # the key holds something else
                    seen[index] = _SeenLock(read_hold([hold, left]), waiters)
    return seen


def _read_line(reply: Reply) -> list[_Place]:
    if not isinstance(reply, list):
        msg = "not a line"
        raise TypeError(msg)
    words = [word if isinstance(word, bytes) else b"" for word in reply]
    return [_Place(words[at], words[at + 1].decode(), bool(words[at + 2])) for at in range(0, len(words) - 2, 3)]


_PATIENCE = 5.0
"""Seconds for asking the nodes when the grant has almost ended."""


class RevocationTally:
    """The answers of the nodes to one *revocation*. *holding* nodes, a majority, have shown the grant. No I/O."""

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
        """See `fencing_sdk.abc.SupportsRevoking.revoke`. Raise an error if too few nodes have answered."""
        shown, holding = await find_hold(self._nodes, self._requests, name)
        if shown is None or shown.token != token:
            return False
        revocation = new_owner()
        patience = shown.left + _PATIENCE
        request = NodeRequest(self._requests.revoke(name, shown, revocation, reason, patience))
        tally = RevocationTally(len(self._nodes), holding, revocation)
        errors: list[Exception] = []
        ended, complete = asyncio.Event(), asyncio.Event()

        def answered(node: int, outcome: CallOutcome) -> None:
            if isinstance(outcome, bytes):
                tally.answer(node, outcome.decode())
            else:
                errors.append(outcome if isinstance(outcome, Exception) else ValueError("no answer to a revocation"))
                tally.failed()
            if tally.complete:
                complete.set()
            if tally.complete or tally.ended:
                ended.set()

        for node in self._nodes:
            node.deliver(("revoke", name, token), request, shown.left, answered)
        with suppress(TimeoutError):  # an answer that comes later proves nothing: the notes stand no longer
            async with asyncio.timeout(patience):
                await ended.wait()
        if not tally.ended:
            raise most_telling(errors)
        with suppress(TimeoutError):  # operators who hear all nodes agree on the first
            async with asyncio.timeout(SILENCE):
                await complete.wait()
        return tally.is_the_first

    async def reasons(self, claims: Sequence[Claim]) -> list[str | None]:
        """For claims whose grants have ended: why they were revoked; None where no operator did it."""
        # A majority has the note of a grant that was revoked, so one of any majority has it.
        answers = await ask_nodes(self._nodes, self._requests.noted(claims), _read_reasons, lambda _: True)
        return [next((reason for reason in found if reason), None) for found in zip(*answers.values(), strict=True)]


def _read_reasons(reply: Reply) -> list[str]:
    if isinstance(reply, list):
        return [reason.decode(errors="replace") if isinstance(reason, bytes) else "" for reason in reply]
    msg = "not the reasons of revocations"
    raise ValueError(msg)


_MARGIN, _DRIFT = 0.1, 0.01

_CHANGED = "another operator does the same at this moment, or a node has changed; run fencing init again"


async def prepare(nodes: QuorumNodes, requests: QuorumRequests) -> str:
    """
    Found the quorum, or let forgetful nodes vote again; return what was done, as a sentence.

    Raise an error if a node cannot be reached, or a BackendError that says what to do.
    """
    await nodes.reach_all()
    epochs = {_epoch(node) for node in nodes} - {""}
    if not epochs:
        await _found(nodes, requests)
        return f"the quorum of {len(nodes)} nodes is founded"
    if len(epochs) == 1:
        unsettled = [
            node for node in nodes if not _epoch(node) and node.knowledge and node.knowledge.founding in epochs
        ]
        await _settle(unsettled, requests, *epochs)  # founding was broken off before they got their epoch
    forgetful = [node for node in nodes if node.forgetful]
    if not forgetful and len(epochs) == 1:
        return f"nothing to do: all {len(nodes)} nodes remember the epoch"
    await _admit(nodes, forgetful, requests)
    return f"{len(forgetful)} of {len(nodes)} nodes had lost their memory, and vote again"


async def _found(nodes: QuorumNodes, requests: QuorumRequests) -> None:
    known = [read_knowledge(await node.ask(requests.found("name", os.urandom(8).hex()))) for node in nodes]
    if len({one.id for one in known}) < len(nodes):
        msg = "two of the addresses lead to the same server, which would vote twice"
        raise BackendRefusedError(BACKEND, "init", msg)
    first = min(range(len(nodes)), key=lambda number: known[number].id)
    proposal = f"{len(nodes)}.{os.urandom(8).hex()}"
    epoch = read_knowledge(await nodes[first].ask(requests.found("propose", proposal, "first"))).founding
    for node in nodes:
        if node.number != first and read_knowledge(await node.ask(requests.found("propose", epoch))).founding != epoch:
            raise BackendUnavailableError(BACKEND, "init", _CHANGED)
    await _settle(list(nodes), requests, epoch)


async def _settle(nodes: Sequence[QuorumNode], requests: QuorumRequests, epoch: str) -> None:
    for node in nodes:
        known = read_knowledge(await node.ask(requests.found("settle", epoch, node.run)))
        if known.epoch != epoch:
            raise BackendUnavailableError(BACKEND, "init", _CHANGED)
        await _look_again(node)


async def _admit(nodes: QuorumNodes, forgetful: Sequence[QuorumNode], requests: QuorumRequests) -> None:
    healthy = [node for node in nodes if node not in forgetful]
    needed = len(nodes) - nodes.majority + 1
    if len(healthy) < needed:
        msg = (
            f"only {len(healthy)} of {len(nodes)} nodes remember the last tokens, and {needed} are needed; stop all "
            f"clients for their longest ttl, delete the key {requests.look()[1]} on every node, and run "
            "fencing init: tokens then go on from the clients' clocks"
        )
        raise BackendRefusedError(BACKEND, "init", msg)
    epoch = f"{len(nodes)}.{os.urandom(8).hex()}"
    counters = [0] * COUNTERS
    for node in healthy:
        found = await node.ask(requests.seal(_epoch(node), epoch, node.run))
        if not isinstance(found, list) or len(found) != COUNTERS:
            raise BackendUnavailableError(BACKEND, "init", _CHANGED)
        known = [int(counter) if isinstance(counter, bytes) and counter.isdigit() else 0 for counter in found]
        counters = [max(pair) for pair in zip(counters, known, strict=True)]
        await _look_again(node)
    longest = max([await _longest_hold(node, requests) for node in nodes])
    await asyncio.sleep(longest * (1 + _DRIFT) + _MARGIN if longest else 0.0)
    for node in forgetful:
        if not await node.ask(requests.admit(_epoch(node), epoch, os.urandom(8).hex(), node.run, counters)):
            raise BackendUnavailableError(BACKEND, "init", _CHANGED)
        await _look_again(node)


async def _longest_hold(node: QuorumNode, requests: QuorumRequests) -> float:
    """Seconds until the last hold ends that the node has now."""
    longest, cursor = 0, b"0"
    while True:
        match await node.ask(requests.scan(cursor)):
            case [bytes(cursor), int(left)]:
                longest = max(longest, left)
            case _:
                raise BackendUnavailableError(BACKEND, "init", _CHANGED)
        if cursor == b"0":
            return longest / 1000


def _epoch(node: QuorumNode) -> str:
    return node.knowledge.epoch if node.knowledge else ""


async def _look_again(node: QuorumNode) -> None:
    """Ask the node what it knows, now that this has changed."""
    task = node.open_soon(at_once=True)
    if task is not None:
        await task
    if node.error is not None:
        raise node.error
