"""
Locks on several independent Redis masters: granted by a majority, with tokens that never repeat and never fall.

    connect("redis+quorum://a:6379,b:6379,c:6379")           # rediss+quorum:// for TLS; three to seven nodes
    connect(RedisQuorumBackend([client_a, client_b, client_c]))   # if their logins differ

``fencing init`` founds the quorum once. Tokens need no clock, but nodes that remember (``appendfsync always``), or
refuse to vote. Exclusion is by time, as with every lease. docs/backends/redis-quorum.md has the protocol and its proof.

    __init__.py   the backend, as the client calls it
    ballots.py    what the answers to an attempt, a round of keeps, and an operator's end amount to; no I/O
    rounds.py     one attempt to acquire a lock; the holds of the client, kept and healed
    operating.py  founds a quorum, readmits a node that has lost its memory, lists, and ends tickets
    nodes.py      which nodes vote together, one question to all of them, and what a majority shows
    node.py       one node: whether it votes, and the requests that it has to get in any case
    requests.py   the requests to a node, how its answers are read, and its errors; the keys
    holds.lua     the scripts, each one atomic step at one node
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from fencing_sdk._values.claim import HELD, LOCK, Busy, Claim, Gone, Place, Seen
from fencing_sdk._values.clock import JITTER, wall_micros, wall_ticks
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.url import option_names
from fencing_sdk.abc import Bell, Kept
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared.bells import bell_key
from fencing_sdk.backends._shared.tokens import age_of
from fencing_sdk.backends.redis.connection.pipe import Reply
from fencing_sdk.backends.redis.keys import DEFAULT_PREFIX, RedisKeys, check_prefix
from fencing_sdk.backends.redis.options import DRIVER_OPTIONS, nodes_of_clients, nodes_of_url
from fencing_sdk.backends.redis.quorum.node import NodeRequest
from fencing_sdk.backends.redis.quorum.nodes import Poll, QuorumNodes, Voters
from fencing_sdk.backends.redis.quorum.operating import QuorumOperations, prepare
from fencing_sdk.backends.redis.quorum.requests import BACKEND, QuorumRequests, SeenHold, translating
from fencing_sdk.backends.redis.quorum.rounds import QuorumAttempt, QuorumHolds
from fencing_sdk.errors import BackendUnavailableError

__all__ = ["RedisQuorumBackend", "from_url"]

_SPREAD = 1000
"""Ticks by which the numbers of attempts differ at random, so that two clients rarely make the same."""
_SPLIT = 0.002, 0.01
"""Seconds before another try, after rivals have split the nodes. Random: they should part."""


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

    modes = frozenset({"lock"})
    rings = False

    def __init__(self, clients: Sequence[object], *, prefix: str = DEFAULT_PREFIX) -> None:
        self._dialers = nodes_of_clients(clients)
        self._requests = QuorumRequests(RedisKeys(check_prefix(prefix)))
        self._nodes = QuorumNodes(self._dialers, self._requests)
        self._holds = QuorumHolds(self._nodes, self._requests, self._next_number)
        self._operations = QuorumOperations(self._nodes, self._requests)
        self._last_number = 0

    def _next_number(self) -> int:
        """The number of an attempt, and the hint for the numbers of its holds."""
        self._last_number = max(self._last_number + 1, wall_ticks() + JITTER.randrange(_SPREAD))
        return self._last_number

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

    async def _voters(self) -> Voters:
        return self._nodes.voters() or await self._nodes.quorum()

    async def draw(self, claim: Claim, *, only_if_it_holds: bool = False) -> Place | Busy:  # noqa: ARG002  (there is no line)
        """See `fencing_sdk.abc.Backend.draw`."""
        with translating("acquire"):
            voters = await self._voters()
            if self._holds.find(claim) is not None:  # drawn before, by a request whose answer was lost
                (kept,) = await self._holds.keep([(claim, 0)], voters)
                if isinstance(kept, Place):
                    return kept
            attempt = QuorumAttempt(self._nodes, self._requests, claim, self._next_number())
            hold = await attempt.run(voters)
        if hold is not None:
            self._holds.add(hold)
            return Place(hold.token, None, hold.token)
        return Busy(attempt.ballot.retry_after() if attempt.ballot.held else JITTER.uniform(*_SPLIT))

    async def keep(self, tickets: Sequence[Kept]) -> Sequence[Place | Gone | None]:
        """See `fencing_sdk.abc.Backend.keep`."""
        with translating("renew"):
            answers = await self._holds.keep(tickets, await self._voters())
            gone = [(at, answer) for at, answer in enumerate(answers) if isinstance(answer, Gone)]
            reasons = await self._operations.reasons([tickets[at][0] for at, _ in gone]) if gone else ()
            for (at, answer), reason in zip(gone, reasons, strict=True):
                answers[at] = Gone(reason, answer.taken)
            for at in [at for at, answer in enumerate(answers) if answer is HELD]:
                answers[at] = await self._place(*tickets[at])
        return answers

    async def _place(self, claim: Claim, number: int) -> Place:
        """Return the place of a ticket that another object has drawn, and that was found to hold."""
        if not number:
            ((hold, _),) = await self._operations.holds([claim.name])
            number = hold.token if hold is not None and hold.digest == bell_key(claim.owner) else 0
        return Place(number, None, number) if number else HELD

    async def give_back(self, claim: Claim, *, after: float = 0.0) -> Gone | None:
        """
        See `fencing_sdk.abc.Backend.give_back`.

        Every node gets the request; one that is away, when it is back, unless the hold is to stand for a while. If so
        many nodes had no hold of the owner that the others are not a majority, its ticket had already ended.
        """
        self._holds.remove(claim)
        with translating("release"):
            await self._voters()
            poll = Poll(len(self._nodes), len(self._nodes), _read_return, self._is_decided)
            request = NodeRequest(self._requests.give_back(claim, after))
            for node in self._nodes:
                if after > 0:
                    node.send(request, poll.answer)
                else:
                    node.deliver(("release", claim.owner), request, claim.ttl, poll.answer)
            answers = list((await poll.result()).values())
            if self._is_gone(answers):
                (reason,) = await self._operations.reasons([claim])
                return Gone(reason, taken=2 * answers.count(_TAKEN) >= len(answers) - answers.count(_DONE))
            if after > 0 and answers.count(_DONE) < self._nodes.majority:
                raise BackendUnavailableError(BACKEND, "release", "too few nodes let the lock stand")
        return None

    def _is_decided(self, answers: Collection[int]) -> bool:
        return self._is_gone(answers) or list(answers).count(_DONE) >= self._nodes.majority

    def _is_gone(self, answers: Collection[int]) -> bool:
        return len(answers) - list(answers).count(_DONE) > len(self._nodes) - self._nodes.majority

    async def end(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.Backend.end`."""
        with translating("revoke"):
            return await self._operations.end(name, token, reason)

    async def tickets(self, names: Sequence[str]) -> Sequence[Sequence[Seen]]:
        """See `fencing_sdk.abc.Backend.tickets`."""
        with translating("inspect"):
            found = await self._operations.holds(names)
        return [() if hold is None else (_seen(hold),) for hold, _ in found]

    async def names(self, prefix: str, cursor: str | None, limit: int) -> tuple[Sequence[str], str | None]:
        """See `fencing_sdk.abc.Backend.names`."""
        with translating("list"):
            return await self._operations.names(prefix, cursor, limit)

    def listen(self, claim: Claim, bell: Bell) -> Callable[[], object]:  # noqa: ARG002
        """No bell rings: the client polls."""
        return lambda: None

    async def aclose(self) -> None:
        """Close the connections. Tickets stay until they are given back or die."""
        await self._nodes.aclose()


_DONE, _FREE, _TAKEN = 1, 0, -1


def _read_return(reply: Reply) -> int:
    """Read the answer of a node to a release. Raise TypeError if it is malformed."""
    if not isinstance(reply, int):
        msg = "not an answer to a release"
        raise TypeError(msg)
    return reply


def _seen(hold: SeenHold) -> Seen:
    """Describe a hold: its token has the time of the grant, by the clock of this client."""
    age = age_of(hold.token, LOCK, wall_micros())
    return Seen(hold.digest[:8], LOCK, hold.token, None, hold.left, age, hold.label)


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
