"""
One attempt to acquire a lock: sends what `Ballot` asks for, and cleans up when the attempt is not won.

1. GRANT goes to all nodes that vote, at once. Mostly a majority grants the same number, because every number is raised
   to the hint, the client's clock. Then the lock is won in one round trip. No promise depends on that clock.
2. Where the numbers differ, CONFIRM raises the lower ones to the token.
3. If rivals have split the nodes, the senior attempt asks the nodes that have refused again, up to six times. The
   others undo what they have got at once.
4. A node that does not answer is waited for only as long as a majority has not answered, and a little longer while its
   answer would decide. Whatever it grants later is undone, or belongs to the lease if the lock was won.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from fencing_sdk._values.claim import Claim
from fencing_sdk._values.clock import BootClock
from fencing_sdk.backends.redis.connection.node import CallOutcome
from fencing_sdk.backends.redis.connection.pipe import ReplyError
from fencing_sdk.backends.redis.quorum.ballots import Ballot, BallotVerdict, QuorumHold
from fencing_sdk.backends.redis.quorum.node import NodeRequest
from fencing_sdk.backends.redis.quorum.nodes import QuorumNodes, Voters, most_telling
from fencing_sdk.backends.redis.quorum.requests import LinePlace, QuorumRequests, read_refusal
from fencing_sdk.backends.redis.requests import read_token

_INSISTENCE = 6
"""Times that a senior attempt asks again."""
_SHORTEST, _LONGEST = 0.005, 0.25
"""Seconds for which an attempt that a majority has answered waits for a slow minority."""
_FIRST_DELAY = 0.0005
"""Seconds, at least, before a senior attempt asks again for the first time."""

_CLOCK = BootClock()


class _Placed(Protocol):
    @property
    def place(self) -> LinePlace: ...


class QuorumAttempt:
    """
    One attempt.

    Args:
        number: Its number: higher than that of every earlier attempt of this client, and near the clock's microseconds.

        waiter: The waiter for which it is made. If it fails, the waiter stays where it was in every line.
    """

    def __init__(
        self,
        nodes: QuorumNodes,
        requests: QuorumRequests,
        claim: Claim,
        number: int,
        waiter: _Placed | None,
    ) -> None:
        self._nodes = nodes
        self._requests = requests
        self._claim = claim
        self._number = number
        self._waiter = waiter
        self._epoch = ""
        self._voters: Voters | None = None
        self._errors: dict[int, Exception] = {}
        self._news: asyncio.Future[None] | None = None
        self._over = False
        self.ballot = Ballot(len(nodes), number, ())
        self.hold: QuorumHold | None = None
        """The grant, once the lock was won. Late answers still add nodes to it."""

    async def run(self, voters: Voters) -> QuorumHold | None:
        """
        Ask the nodes; return the grant, or None if the lock was refused.

        Raises:
            Exception: too few nodes have answered.
        """
        self._voters, self._epoch = voters, voters.epoch
        self.ballot = Ballot(len(self._nodes), self._number, [node.number for node in voters.nodes])
        try:
            request = NodeRequest(self._requests.grant(self._claim, self._epoch, self._number))
            for node in voters.nodes:
                node.send(request, self._on_grant)
            await self._decide()
        except BaseException:
            self._undo()
            raise
        if self.ballot.verdict is BallotVerdict.WON:
            return self._won()
        self._undo()
        if self.ballot.verdict is BallotVerdict.UNAVAILABLE:
            raise most_telling(list(self._errors.values()))
        return None

    async def _decide(self) -> None:
        """Wait for the answers; while this attempt is the senior of several, ask again."""
        started = _CLOCK.now()
        await self._wait_for_verdict(started)
        delay = max(_FIRST_DELAY, (_CLOCK.now() - started) / 2)
        for _ in range(_INSISTENCE):
            if self.ballot.verdict not in {BallotVerdict.REFUSED, BallotVerdict.OPEN} or not self.ballot.senior:
                return
            await asyncio.sleep(delay)
            delay *= 2
            request = NodeRequest(self._requests.grant(self._claim, self._epoch, self._number))
            for number in self.ballot.ask_again():
                self._nodes[number].send(request, self._on_grant)
            await self._wait_for_verdict(_CLOCK.now())

    async def _wait_for_verdict(self, started: float) -> None:
        """Wait for a verdict; but once a majority has answered, only a little for the others."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None
        try:
            while self.ballot.verdict is BallotVerdict.OPEN:
                if self.ballot.heard:
                    if timer is not None:
                        if timer.when() <= loop.time():
                            return
                    else:
                        took = _CLOCK.now() - started
                        timer = loop.call_later(min(max(3 * took, _SHORTEST), _LONGEST), self._wake)
                self._news = loop.create_future()
                await self._news
        finally:
            self._news = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _on_grant(self, node: int, outcome: CallOutcome) -> None:
        try:
            if isinstance(outcome, bytes):
                for other in self.ballot.granted(node, read_token(outcome)):
                    self._confirm(other)
            elif isinstance(outcome, Exception):
                self._errors[node] = outcome
                self.ballot.failed(node)
            else:
                self.ballot.refused(node, read_refusal(outcome))
        except ValueError as error:
            self._errors[node] = error
            self.ballot.failed(node)
        self._take_note(node)

    def _confirm(self, node: int) -> None:
        token, number = self.ballot.token, self.ballot.grants[node]
        if token is not None and not (self._over and self.hold is None):
            call = self._requests.confirm(self._claim, self._epoch, number, token)
            self._nodes[node].send(NodeRequest(call), self._on_confirm)

    def _on_confirm(self, node: int, outcome: CallOutcome) -> None:
        if isinstance(outcome, Exception):
            self._errors[node] = outcome
            self.ballot.failed(node)
        else:
            self.ballot.confirmed(node, kept=outcome == 1)
            if outcome == 1 and self.hold is not None and node not in self.ballot.settled:
                self.hold.joined(node, self.ballot.grants[node])
        self._take_note(node)

    def _take_note(self, node: int) -> None:
        """Act on an answer: wake the attempt, or use or undo what came late."""
        if not self._over:
            if self.ballot.heard or self.ballot.verdict is not BallotVerdict.OPEN:
                self._wake()
        elif self.hold is None:
            if node in self.ballot.grants:
                self._undo_at(node)
        elif node in self.ballot.settled:
            self.hold.settled(node, self.hold.token)

    def _won(self) -> QuorumHold:
        """Make the grant. The nodes that have granted no number above the token count from the start."""
        self._over = True
        token = self.ballot.token
        assert token is not None
        hold = self.hold = QuorumHold(self._claim, token)
        for node in self.ballot.settled:
            hold.settled(node, token)
        return hold

    def _undo(self) -> None:
        """Free the nodes that have granted the lock, or may still do so."""
        self._over = True
        unknown = {node for node, error in self._errors.items() if not isinstance(error, ReplyError)}
        for node in {*self.ballot.grants, *self.ballot.pending, *unknown}:
            self._undo_at(node)

    def _undo_at(self, node: int) -> None:
        place = None if self._waiter is None else self._waiter.place
        call = self._requests.undo(self._claim, self._number, place)
        self._nodes[node].deliver(("undo", self._claim.owner, self._number), NodeRequest(call), self._claim.ttl)
