"""
Serves operators of a quorum: found it, let a node vote again that has lost its memory, list, and end tickets.

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
2. Wait until every hold that was there then has ended or was kept since: a lease that counted on a forgetful node
   has ended by then.
3. The forgetful nodes get the highest counters, then the epoch.

Both are safe to repeat, also after they were broken off at any step, and while another operator does the same.

Listing: what a majority holds is on at least one of any nodes that are not a minority, on one of two of three nodes.
So a listing walks over the keys of so many nodes, as that of a single server does.

1. If one of these nodes goes, and another takes its place, the listing begins again.
2. A name is listed at the first of these nodes that has it. But a node that was away may have got it after it was
   walked over. So a node counts as the first only if the attempt by which it has the lock is older than the listing,
   by the clocks of the clients. The cursor has the time at which the listing began.

Ending a ticket: a majority of the nodes shows who has the token, and each node gets the request to delete the hold of
this owner and token, so a later ticket is never hit.

1. Each node keeps a note: which request came first, whether it has deleted a hold, and the reason. While the
   note stands, the holder gets no new hold there.
2. The ticket has ended when a majority of the nodes has no hold of it and will get none: a node that has deleted
   it, or one that has shown it before and has lost it since. A node that had none may still get it by a slow
   request of the attempt that has won the lock, so it does not count.
3. If several operators end one ticket at the same time, the first is the one that came first on most nodes.

Until a majority has deleted it, the holder may go on: `end` raises an error then, and may be repeated.
`tests/properties/quorum_revocation_model.py` goes through every order of these steps.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from fencing_sdk._values.claim import Claim, new_owner
from fencing_sdk._values.clock import wall_ticks
from fencing_sdk.backends.redis.connection.dial import UnreachableError
from fencing_sdk.backends.redis.connection.pipe import PipeError
from fencing_sdk.backends.redis.connection.router import Masters
from fencing_sdk.backends.redis.keys import KeyWalk, ListingCursor
from fencing_sdk.backends.redis.quorum.ballots import EndTally
from fencing_sdk.backends.redis.quorum.node import NodeRequest, QuorumNode
from fencing_sdk.backends.redis.quorum.nodes import Poll, QuorumNodes, ask_nodes, shown_by_majority
from fencing_sdk.backends.redis.quorum.requests import (
    BACKEND,
    COUNTERS,
    QuorumRequests,
    SeenHold,
    bytes_of,
    read_holds,
    read_knowledge,
    read_reasons,
)
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError

__all__ = ["QuorumOperations", "prepare"]

_LOOKED_AT = 50
"""Locks that one run of a script describes."""
_AHEAD = 2_000
"""Ticks by which the number of an attempt may be ahead of its client's clock."""
_PATIENCE = 5.0
"""Seconds for asking the nodes when the ticket has almost died."""


class QuorumOperations:
    """Calls of operators, apart from founding."""

    def __init__(self, nodes: QuorumNodes, requests: QuorumRequests) -> None:
        self._nodes = nodes
        self._requests = requests
        self._walk = KeyWalk()

    async def holds(
        self, names: Sequence[str], *, by_all: bool = False
    ) -> list[tuple[SeenHold | None, Mapping[int, SeenHold | None]]]:
        """
        Ask who holds each name: what a majority shows, None if no owner has one; and what each node shows.

        *by_all*: wait for all nodes, for a while.
        """
        found: list[tuple[SeenHold | None, Mapping[int, SeenHold | None]]] = []
        enough = (lambda _: False) if by_all else self._is_decided
        for start in range(0, len(names), _LOOKED_AT):
            some = names[start : start + _LOOKED_AT]
            answers = await ask_nodes(self._nodes, self._requests.see(some), read_holds, enough)
            for index in range(len(some)):
                shown = {node: seen[index] for node, seen in answers.items()}
                found.append((shown_by_majority(shown.values(), self._nodes.majority), shown))
        return found

    def _is_decided(self, answers: Collection[Sequence[SeenHold | None]]) -> bool:
        """Return whether further answers cannot change what a majority shows."""
        counts = (Counter(hold.ticket if hold else None for hold in of_name) for of_name in zip(*answers, strict=True))
        return all(most.most_common(1)[0][1] >= self._nodes.majority for most in counts)

    async def names(self, prefix: str, cursor: str | None, limit: int) -> tuple[Sequence[str], str | None]:
        """See `fencing_sdk.abc.Backend.names`."""
        at = ListingCursor.read(cursor)
        for _ in range(len(self._nodes) - 1):
            with suppress(PipeError, UnreachableError):  # the node has gone, and with it its vote
                return await self._names(prefix, at, limit)
        return await self._names(prefix, at, limit)

    async def _names(self, prefix: str, at: ListingCursor, limit: int) -> tuple[Sequence[str], str | None]:
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
        if not earlier:
            return names, after

        listed: list[str] = []
        for name, (_, shown) in zip(names, await self.holds(names, by_all=True), strict=True):
            before = [hold for node, hold in shown.items() if node in earlier and hold is not None]
            if not any(hold.attempt < int(began) for hold in before):  # else an earlier node had it, and it was listed
                listed.append(name)
        return listed, after

    async def end(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.Backend.end`. Raise an error if too few nodes have answered."""
        ((shown, by_node),) = await self.holds([name])
        if shown is None or shown.token != token:
            return False
        holding = [node for node, hold in by_node.items() if hold is not None and hold.ticket == shown.ticket]
        tally = EndTally(len(self._nodes), holding, own := new_owner())
        patience = shown.left + _PATIENCE
        request = NodeRequest(self._requests.end(name, shown, own, reason, patience))
        poll = Poll(len(self._nodes), len(self._nodes), bytes_of, lambda _: False)  # who hears all agrees on the first
        for node in self._nodes:
            node.deliver(("end", name, token), request, shown.left, poll.answer)
        async with asyncio.timeout(patience):  # an answer that comes later proves nothing: the notes stand no longer
            tally.answers = {node: first.decode() for node, first in (await poll.result()).items()}
        if not tally.ended:
            raise BackendUnavailableError(BACKEND, "revoke", "too few nodes have answered; the holder may go on")
        return tally.is_the_first

    async def reasons(self, claims: Sequence[Claim]) -> list[str | None]:
        """Return the reasons of operators for claims whose tickets are gone; None where no operator ended one."""
        # A majority has the note of a ticket that was ended, so one of any majority has it.
        answers = await ask_nodes(self._nodes, self._requests.noted(claims), read_reasons, lambda _: True)
        return [next((reason for reason in found if reason), None) for found in zip(*answers.values(), strict=True)]


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
    known = [read_knowledge(await node.server.run(requests.found("name", os.urandom(8).hex()))) for node in nodes]
    if len({one.id for one in known}) < len(nodes):
        msg = "two of the addresses lead to the same server, which would vote twice"
        raise BackendRefusedError(BACKEND, "init", msg)
    first = min(range(len(nodes)), key=lambda number: known[number].id)
    proposal = f"{len(nodes)}.{os.urandom(8).hex()}"
    epoch = read_knowledge(await nodes[first].server.run(requests.found("propose", proposal, "first"))).founding
    for node in nodes:
        if (
            node.number != first
            and read_knowledge(await node.server.run(requests.found("propose", epoch))).founding != epoch
        ):
            raise BackendUnavailableError(BACKEND, "init", _CHANGED)
    await _settle(list(nodes), requests, epoch)


async def _settle(nodes: Sequence[QuorumNode], requests: QuorumRequests, epoch: str) -> None:
    for node in nodes:
        known = read_knowledge(await node.server.run(requests.found("settle", epoch, node.run)))
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
        found = await node.server.run(requests.seal(_epoch(node), epoch, node.run))
        if not isinstance(found, list) or len(found) != COUNTERS:
            raise BackendUnavailableError(BACKEND, "init", _CHANGED)
        known = [int(counter) if isinstance(counter, bytes) and counter.isdigit() else 0 for counter in found]
        counters = [max(pair) for pair in zip(counters, known, strict=True)]
        await _look_again(node)
    longest = max([await _longest_hold(node, requests) for node in nodes])
    await asyncio.sleep(longest * (1 + _DRIFT) + _MARGIN if longest else 0.0)
    for node in forgetful:
        if not await node.server.run(requests.admit(_epoch(node), epoch, os.urandom(8).hex(), node.run, counters)):
            raise BackendUnavailableError(BACKEND, "init", _CHANGED)
        await _look_again(node)


async def _longest_hold(node: QuorumNode, requests: QuorumRequests) -> float:
    """Seconds until the last hold ends that the node has now."""
    longest, cursor = 0, b"0"
    while True:
        match await node.server.run(requests.scan(cursor)):
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
