"""
Locks on several independent Redis masters: granted by a majority, with tokens that never repeat and never fall.

    connect("redis+quorum://a:6379,b:6379,c:6379")           # rediss+quorum:// for TLS; three to seven nodes
    connect(RedisQuorumBackend([client_a, client_b, client_c]))   # if their logins differ

``fencing init`` founds the quorum once. Tokens need no clock, but nodes that remember (``appendfsync always``), or
refuse to vote. Exclusion is by time, as with every lease. docs/backends/redis-quorum.md has the protocol and its proof.

    __init__.py   the backend, as the client calls it
    ballots.py    what the answers to an attempt, and to a round of renewals, amount to; no I/O
    rounds.py     one attempt to acquire a lock; the leases of the client, renewed and healed
    waiters.py    the waiters of the client, and what wakes them
    operating.py  founds a quorum, readmits a node that has lost its memory, lists, and takes grants away
    nodes.py      which nodes vote together, one question to all of them, and what a majority shows
    node.py       one node: whether it votes, and the requests that it has to get in any case
    requests.py   the requests to a node, how its answers are read, and its errors; the keys
    *.lua         the scripts, each one atomic step at one node
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fencing_sdk._values.claim import Busy, Claim, Grant, Holder, Listing, Renewal, Revoked, Waiting
from fencing_sdk._values.clock import JITTER, wall_ticks
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.url import option_names
from fencing_sdk.abc import LossNotice, WaiterNotice
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared.losses import with_reasons
from fencing_sdk.backends._shared.rules import LINE_POLL
from fencing_sdk.backends._shared.waiters import KeptPlace, KeptPlaces, Turn
from fencing_sdk.backends.redis.connection.pipe import Pipe, Reply
from fencing_sdk.backends.redis.losses import RedisLossWatcher
from fencing_sdk.backends.redis.options import DRIVER_OPTIONS, nodes_of_clients, nodes_of_url
from fencing_sdk.backends.redis.quorum.node import NodeRequest, QuorumNode
from fencing_sdk.backends.redis.quorum.nodes import Poll, QuorumNodes, find_hold
from fencing_sdk.backends.redis.quorum.operating import QuorumListing, QuorumRevocations, holder_of_hold, prepare
from fencing_sdk.backends.redis.quorum.requests import QuorumRequests, translating
from fencing_sdk.backends.redis.quorum.rounds import QuorumAttempt, QuorumRenewals
from fencing_sdk.backends.redis.quorum.waiters import QuorumWaiters, pause_after_split
from fencing_sdk.backends.redis.requests import DEFAULT_PREFIX, RedisKeys, check_prefix, read_release

__all__ = ["RedisQuorumBackend", "from_url"]

_SPREAD = 1000
"""Ticks by which the numbers of attempts differ at random, so that two clients rarely make the same."""


class RedisQuorumBackend(Uncopied):
    """
    A lock service on three to seven independent Redis or Valkey servers, from version 6.2 on.

    Args:
        clients: An asyncio client of redis-py or valkey-py for each server. The backend copies their settings, and
            opens one connection of its own to each server.

        prefix: The beginning of every key; an ACL rule can name them: ``~{fencing:*``.

    Raises:
        ConfigurationError: an argument has a wrong type or value. No I/O happens before the first call.
    """

    def __init__(self, clients: Sequence[object], *, prefix: str = DEFAULT_PREFIX) -> None:
        self._dialers = nodes_of_clients(clients)
        keys = RedisKeys(check_prefix(prefix))
        self._requests = QuorumRequests(keys)
        self._nodes = QuorumNodes(self._dialers, self._requests, on_push=self._on_push, on_vote=self._on_vote)
        self._renewals = QuorumRenewals(self._nodes, self._requests, self._next_number)
        self._places = KeptPlaces()
        self._waiters = QuorumWaiters(self._nodes, self._requests, keys)
        self._losses = RedisLossWatcher(partial(self._renew, look=True))
        self._revocations = QuorumRevocations(self._nodes, self._requests)
        self._listing = QuorumListing(self._nodes, self._requests)
        self._last_number = 0

    def _next_number(self) -> int:
        """The number of an attempt, and the hint for the numbers of its holds."""
        self._last_number = max(self._last_number + 1, wall_ticks() + JITTER.randrange(_SPREAD))
        return self._last_number

    def _on_vote(self, _node: QuorumNode, pipe: Pipe) -> None:
        self._losses.on_connect(pipe)
        self._waiters.on_vote(pipe)

    def _on_push(self, node: int, message: list[Reply]) -> None:
        self._losses.on_push(message)
        self._waiters.on_push(node, message)

    async def open(self) -> None:
        """See `fencing_sdk.abc.SupportsOpen.open`."""
        with translating("open"):
            await self._nodes.quorum()

    async def init(self) -> str:
        """
        Found the store, or let servers take part again that have lost their memory; return what was done.

        Idempotent, and safe while others do the same. It may last as long as the longest lease.

        Raises:
            BackendError: a server cannot be reached, or too few remember what they have granted.
        """
        with translating("init"):
            return await prepare(self._nodes, self._requests)

    async def acquire(self, claim: Claim) -> Grant | Busy:
        """See `fencing_sdk.abc.Backend.acquire`."""
        waiter = self._waiters.table.find(claim)
        with translating("acquire"):
            voters = self._nodes.voters() or await self._nodes.quorum()
            place = None if waiter is None else waiter.place
            attempt = QuorumAttempt(self._nodes, self._requests, claim, self._next_number(), place)
            hold = await attempt.run(voters)
        if hold is None:
            ballot = attempt.ballot
            if waiter is not None:  # where a node has dropped it, it joins the line again
                self._waiters.refused(waiter, ballot)
            if not ballot.held:
                return Busy(pause_after_split(1 if waiter is None else waiter.splits))
            left = ballot.retry_after()
            if waiter is None:
                return Busy(left)
            return Busy(LINE_POLL if left is None else min(left, LINE_POLL))
        self._renewals.add(hold)
        self._losses.granted(self._requests.hold(claim.name), claim, hold.token)
        if waiter is not None:
            self._waiters.granted(waiter, attempt.ballot)
        return Grant(hold.token)

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal | Revoked]:
        """See `fencing_sdk.abc.Backend.renew`."""
        self._losses.renewing((self._requests.hold(claim.name) for claim in claims), claims)
        with translating("renew"):
            return await self._renew(claims)

    async def _renew(self, claims: Sequence[Claim], *, look: bool = False) -> Sequence[Renewal | Revoked]:
        voters = self._nodes.voters() or await self._nodes.quorum()
        renewals = await self._renewals.renew(claims, voters, look=look)
        return await with_reasons(claims, renewals, self._revocations.reasons)

    async def release(self, claim: Claim) -> Renewal | Revoked | None:
        """
        See `fencing_sdk.abc.Backend.release`.

        Every node gets the release; one that is away, when it is back. If so many nodes had no hold of the owner that
        the others are not a majority, its grant had already ended.
        """
        self._losses.ended(self._requests.hold(claim.name), claim)
        self._renewals.remove(claim)
        call = self._requests.release(claim)
        with translating("release"):
            if self._nodes.voters() is None:
                await self._nodes.quorum()

            def is_decided(answers: Collection[Renewal | None]) -> bool:
                released = sum(answer is None for answer in answers)
                return released >= self._nodes.majority or self._refusal(answers) is not None

            poll = Poll(len(self._nodes), len(self._nodes), read_release, is_decided)
            request = NodeRequest(call)
            for node in self._nodes:
                node.deliver(("release", claim.owner), request, claim.ttl, poll.answer)
            answers = await poll.result()
        refusal = self._refusal(answers.values())
        return None if refusal is None else (await with_reasons([claim], [refusal], self._revocations.reasons))[0]

    def _refusal(self, answers: Collection[Renewal | None]) -> Renewal | None:
        refused = [answer for answer in answers if answer is not None]
        if len(refused) <= len(self._nodes) - self._nodes.majority:
            return None
        taken = sum(answer is Renewal.TAKEN_OVER for answer in refused)
        return Renewal.TAKEN_OVER if 2 * taken >= len(refused) else Renewal.REFUSED

    async def inspect(self, name: str) -> Holder | None:
        """See `fencing_sdk.abc.Backend.inspect`."""
        with translating("inspect"):
            seen, _ = await find_hold(self._nodes, self._requests, name)
        return None if seen is None else holder_of_hold(name, seen)

    async def list_holders(self, prefix: str, cursor: str | None, limit: int) -> Listing:
        """See `fencing_sdk.abc.SupportsListing.list_holders`."""
        with translating("list"):
            return await self._listing.page(prefix, cursor, limit)

    async def list_waiters(self, name: str) -> Sequence[Waiting]:
        """See `fencing_sdk.abc.SupportsListing.list_waiters`."""
        with translating("list"):
            return await self._listing.waiters(name)

    async def revoke(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.SupportsRevoking.revoke`."""
        with translating("revoke"):
            revoked = await self._revocations.revoke(name, token, reason)
        self._losses.changed(self._requests.hold(name))
        return revoked

    async def aclose(self) -> None:
        """Close the connections. Grants stay until they are released or expire."""
        await self._losses.aclose()
        await self._nodes.aclose()

    def on_loss(self, notice: LossNotice) -> Callable[[], None]:
        """See `fencing_sdk.abc.SupportsLossNotice.on_loss`."""
        return self._losses.on_loss(notice)

    def stand(self, claim: Claim, notify: WaiterNotice, *, hand_over: bool) -> KeptPlace:  # noqa: ARG002  (the nodes only wake)
        """See `fencing_sdk.abc.SupportsLine.stand`."""
        return self._places.stand(self._in_line, claim, notify)

    @asynccontextmanager
    async def _in_line(self, claim: Claim) -> AsyncIterator[Turn]:
        with translating("queue"):
            waiter = await self._waiters.join(claim)
        try:
            yield waiter
        finally:
            await self._waiters.leave(waiter)


def from_url(url: str, **options: object) -> RedisQuorumBackend:
    """
    Make a backend for one of its URLs; `RedisQuorumBackend` explains the options.

    The driver's own options, such as ``ssl_ca_certs``, may stand in the URL's query too.

    Raises:
        ConfigurationError: the URL or an option cannot be used.
    """
    ours = option_names(RedisQuorumBackend)
    chosen = take_options(url, options, (*ours, *DRIVER_OPTIONS))
    own: dict[str, Any] = {name: chosen.pop(name) for name in ours if name in chosen}
    return RedisQuorumBackend(nodes_of_url(url, chosen), **own)  # what remains are the driver's
