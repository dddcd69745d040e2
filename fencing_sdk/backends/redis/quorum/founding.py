"""
Founding a quorum, and letting a node vote again that has lost its memory. An operator starts both: ``fencing init``.

Founding: every node answers, and no node has an epoch.

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
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from fencing_sdk.backends.redis.connection.pipe import Reply
from fencing_sdk.backends.redis.quorum.node import QuorumNode
from fencing_sdk.backends.redis.quorum.nodes import QuorumNodes
from fencing_sdk.backends.redis.quorum.requests import BACKEND, COUNTERS, QuorumRequests, read_knowledge
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError

_MARGIN, _DRIFT = 0.1, 0.01

_CHANGED = "another operator does the same at this moment, or a node has changed; run fencing init again"


async def prepare(nodes: QuorumNodes, requests: QuorumRequests) -> str:
    """
    Found the quorum, or let forgetful nodes vote again; return what was done, as a sentence.

    Raises:
        BackendError: it is not possible now; the error says what to do.
        Exception: a node cannot be reached.
    """
    await nodes.reach_all()
    epochs = {_epoch(node) for node in nodes} - {""}
    if not epochs:
        await _found(nodes, requests)
        return f"the quorum of {len(nodes)} nodes is founded"
    if len(epochs) == 1:
        await _settle([node for node in nodes if _is_half_founded(node, epochs)], requests, *epochs)
    forgetful = [node for node in nodes if node.forgetful]
    if not forgetful and len(epochs) == 1:
        return f"nothing to do: all {len(nodes)} nodes remember the epoch"
    await _admit(nodes, forgetful, requests)
    return f"{len(forgetful)} of {len(nodes)} nodes had lost their memory, and vote again"


def _is_half_founded(node: QuorumNode, epochs: set[str]) -> bool:
    """Return whether founding was broken off before this node got its epoch: it has never voted."""
    return not _epoch(node) and node.knowledge is not None and node.knowledge.founding in epochs


async def _found(nodes: QuorumNodes, requests: QuorumRequests) -> None:
    known = [read_knowledge(await node.ask(requests.found("name", _nonce()))) for node in nodes]
    if len({one.id for one in known}) < len(nodes):
        msg = "two of the addresses lead to the same server, which would vote twice"
        raise BackendRefusedError(BACKEND, "init", msg)
    first = min(range(len(nodes)), key=lambda number: known[number].id)
    proposal = f"{len(nodes)}.{_nonce()}"
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
            f"clients for their longest ttl, delete the key {requests.look().keys[0]} on every node, and run "
            "fencing init: tokens then go on from the clients' clocks"
        )
        raise BackendRefusedError(BACKEND, "init", msg)
    epoch = f"{len(nodes)}.{_nonce()}"
    counters = [0] * COUNTERS
    for node in healthy:
        found = await node.ask(requests.seal(_epoch(node), epoch, node.run))
        counters = [max(pair) for pair in zip(counters, _read_counters(found), strict=True)]
        await _look_again(node)
    longest = max([await _longest_hold(node, requests) for node in nodes])
    await asyncio.sleep(longest * (1 + _DRIFT) + _MARGIN if longest else 0.0)
    for node in forgetful:
        if not await node.ask(requests.admit(_epoch(node), epoch, _nonce(), node.run, counters)):
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


def _read_counters(reply: Reply) -> list[int]:
    if not isinstance(reply, list) or len(reply) != COUNTERS:
        raise BackendUnavailableError(BACKEND, "init", _CHANGED)
    return [int(counter) if isinstance(counter, bytes) and counter.isdigit() else 0 for counter in reply]


def _epoch(node: QuorumNode) -> str:
    return node.knowledge.epoch if node.knowledge else ""


async def _look_again(node: QuorumNode) -> None:
    """Ask the node what it knows, now that this has changed."""
    task = node.open_soon(at_once=True)
    if task is not None:
        await task
    if node.error is not None:
        raise node.error


def _nonce() -> str:
    return os.urandom(8).hex()
