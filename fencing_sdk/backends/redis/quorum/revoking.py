"""
Takes grants away from their holders on a quorum, and tells the holders why.

1. A majority of the nodes shows who has the token. Then each node is asked to delete the hold of this owner and token,
   in one step (`revoke.lua`), so a later grant is never hit.
2. Each node keeps a note: which revocation came first, whether it has deleted a hold, and the reason. While the note
   stands, the holder gets no new hold there (`heal.lua`).
3. The grant has ended when a majority of the nodes has no hold of it and will get none: a node that has deleted it, or
   one that has shown it before and has lost it since. A node that had none may still get it by a slow request of the
   attempt that has won the lock, so it does not count.
4. If several operators revoke one grant at the same time, the first is the one that came first on most nodes.

Until a majority has deleted it, the holder may go on: `revoke` raises an error then, and may be repeated.
`tests/properties/quorum_revocation_model.py` goes through every order of these steps.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence

from fencing_sdk._values.claim import Claim, new_owner
from fencing_sdk.backends.redis.connection.node import CallOutcome
from fencing_sdk.backends.redis.connection.pipe import Reply
from fencing_sdk.backends.redis.quorum.acquire_ballot import majority_of
from fencing_sdk.backends.redis.quorum.node import SILENCE, NodeRequest
from fencing_sdk.backends.redis.quorum.node_poll import ask_nodes, find_hold
from fencing_sdk.backends.redis.quorum.nodes import QuorumNodes, most_telling
from fencing_sdk.backends.redis.quorum.requests import QuorumRequests

__all__ = ["QuorumRevocations", "RevocationTally"]

_PATIENCE = 5.0
"""Seconds for which the nodes may be asked when the grant has almost ended."""


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
        """Whether no further answer will come."""
        return self._answered == self._nodes

    @property
    def ended(self) -> bool:
        """Whether the grant has ended for certain."""
        return len(self._firsts) + len(self._free) >= self._majority

    @property
    def is_the_first(self) -> bool:
        """Whether it was this revocation that has ended the grant: not a release, an expiry or another operator's."""
        counts = Counter(self._firsts.values())
        if counts.total() < self._majority:
            return False
        return min(counts, key=lambda revocation: (-counts[revocation], revocation)) == self._revocation


class QuorumRevocations:
    """Revokes for one backend."""

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
        told = _RevocationRound(RevocationTally(len(self._nodes), holding, revocation))
        for node in self._nodes:
            node.tell(("revoke", name, token), request, shown.left, told.answer)
        return await told.result(patience)

    async def reasons(self, claims: Sequence[Claim]) -> list[str | None]:
        """For claims whose grants have ended: why they were revoked; None where no operator did it."""
        # A majority has the note of a grant that was revoked, so one of any majority has it.
        answers = await ask_nodes(self._nodes, self._requests.noted(claims), _read_reasons, lambda _: True)
        return [next((reason for reason in told if reason), None) for told in zip(*answers.values(), strict=True)]


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
