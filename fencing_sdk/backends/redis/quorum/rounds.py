"""
Attempts to acquire a lock, and rounds of keeps: requests to all nodes, of which a majority decides.

An attempt sends what `Ballot` asks for, and cleans up when it is not won:

1. GRANT goes to all nodes that vote, at once. Mostly a majority grants the same number, because every number is raised
   to the hint, the client's clock. Then the lock is won in one round trip. No promise depends on that clock.
2. Where the numbers differ, CONFIRM raises the lower ones to the token.
3. If rivals have split the nodes, the senior attempt asks the nodes that have refused again, up to six times. The
   others undo what they have got at once.
4. A node that does not answer is waited for only as long as a majority has not answered, and a little longer while its
   answer would decide. Whatever it grants later is undone, or belongs to the lease if the lock was won.

A round keeps tickets in batches, and heals the nodes that have lost a hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from fencing_sdk._values.claim import HELD, Claim, Gone, Place
from fencing_sdk._values.clock import BootClock
from fencing_sdk.abc import Kept
from fencing_sdk.backends.redis.connection.node import CallOutcome
from fencing_sdk.backends.redis.connection.pipe import ReplyError
from fencing_sdk.backends.redis.quorum.ballots import Ballot, BallotVerdict, KeepRound, QuorumHold
from fencing_sdk.backends.redis.quorum.node import NodeRequest
from fencing_sdk.backends.redis.quorum.nodes import QuorumNodes, Voters, most_telling
from fencing_sdk.backends.redis.quorum.requests import QuorumRequests, read_grant, read_numbers

_INSISTENCE = 6
"""Times that a senior attempt asks again."""
_SHORTEST, _LONGEST = 0.005, 0.25
"""Seconds for which an attempt that a majority has answered waits for a slow minority."""
_FIRST_DELAY = 0.0005
"""Seconds, at least, before a senior attempt asks again for the first time."""

_BATCH = 200
"""Tickets in one request: it keeps a node busy for less than a millisecond."""
_SWEEP_FROM = 64

_CLOCK = BootClock()


class QuorumAttempt:
    """
    One attempt.

    Its *number* is higher than that of every earlier attempt of this client, and near the clock's microseconds.
    """

    def __init__(self, nodes: QuorumNodes, requests: QuorumRequests, claim: Claim, number: int) -> None:
        self._nodes = nodes
        self._requests = requests
        self._claim = claim
        self._number = number
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
            self._over, token = True, self.ballot.token
            assert token is not None
            hold = self.hold = QuorumHold(self._claim, token)
            for settled in self.ballot.settled:  # they have granted no number above the token
                hold.settled(settled, token)
            return hold
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
            answer = outcome if isinstance(outcome, Exception) else read_grant(outcome)
        except ValueError as error:
            answer = error
        if isinstance(answer, Exception):
            self._errors[node] = answer
            self.ballot.failed(node)
        elif isinstance(answer, int):
            for other in self.ballot.granted(node, answer):
                self._confirm(other)
        else:
            self.ballot.refused(node, answer)
        self._take_note(node)

    def _confirm(self, node: int) -> None:
        token, number = self.ballot.token, self.ballot.grants[node]
        if token is None or (self._over and self.hold is None):
            return

        def confirmed(node: int, outcome: CallOutcome) -> None:
            if isinstance(outcome, Exception):
                self._errors[node] = outcome
                self.ballot.failed(node)
            else:
                self.ballot.confirmed(node, kept=outcome == 1)
                if outcome == 1 and self.hold is not None and node not in self.ballot.settled:
                    self.hold.joined(node, self.ballot.grants[node])
            self._take_note(node)

        call = self._requests.confirm(self._claim, self._epoch, number, token)
        self._nodes[node].send(NodeRequest(call), confirmed)

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

    def _undo(self) -> None:
        """Free the nodes that have granted the lock, or may still do so."""
        self._over = True
        unknown = {node for node, error in self._errors.items() if not isinstance(error, ReplyError)}
        for node in {*self.ballot.grants, *self.ballot.pending, *unknown}:
            self._undo_at(node)

    def _undo_at(self, node: int) -> None:
        call = self._requests.undo(self._claim, self._number)
        self._nodes[node].deliver(("undo", self._claim.owner, self._number), NodeRequest(call), self._claim.ttl)


class QuorumHolds:
    """The holds that this client has won, and how a majority keeps them."""

    def __init__(self, nodes: QuorumNodes, requests: QuorumRequests, next_hint: Callable[[], int]) -> None:
        self._nodes = nodes
        self._requests = requests
        self._next_hint = next_hint
        self._holds: dict[tuple[str, str], tuple[QuorumHold, float]] = {}
        self._sweep_at = _SWEEP_FROM

    def add(self, hold: QuorumHold) -> None:
        """Remember a new hold, or that it was kept."""
        now = _CLOCK.now()
        self._holds[hold.claim.name, hold.claim.owner] = hold, now + hold.claim.ttl
        if len(self._holds) > self._sweep_at:
            self._holds = {key: kept for key, kept in self._holds.items() if kept[1] > now}
            self._sweep_at = 2 * len(self._holds) + _SWEEP_FROM

    def find(self, claim: Claim, number: int = 0) -> QuorumHold | None:
        """The hold of *claim*, if this client knows it, and if its ticket has this *number* or that is 0."""
        hold, _ = self._holds.get((claim.name, claim.owner), (None, 0.0))
        return hold if hold is not None and number in {0, hold.token} else None

    def remove(self, claim: Claim) -> None:
        """Forget a hold that was given back."""
        self._holds.pop((claim.name, claim.owner), None)

    async def keep(self, tickets: Sequence[Kept], voters: Voters) -> list[Place | Gone | None]:
        """Keep tickets. Raise an error if too few nodes have answered."""
        rounds: list[tuple[KeepRound, asyncio.Future[None]]] = []
        errors: list[Exception] = []
        for start in range(0, len(tickets), _BATCH):
            batch = tickets[start : start + _BATCH]
            tally = KeepRound([self.find(claim, number) for claim, number in batch], len(self._nodes))
            rounds.append((tally, self._send(batch, tally, voters, errors)))
        try:
            for _, decided in rounds:
                await decided
        except asyncio.CancelledError:  # at the limit of the call, the answers of some are better than none
            if all(outcome is None for tally, _ in rounds for outcome in tally.outcomes):
                raise
        outcomes: list[Place | Gone | None] = []
        for tally, _ in rounds:
            for hold, outcome in zip(tally.holds, tally.outcomes, strict=True):
                outcomes.append(Place(hold.token, None, hold.token) if hold and outcome is HELD else outcome)
        if errors and all(outcome is None for outcome in outcomes):
            raise most_telling(errors)
        return outcomes

    def _send(
        self, tickets: Sequence[Kept], tally: KeepRound, voters: Voters, errors: list[Exception]
    ) -> asyncio.Future[None]:
        """
        Ask the nodes that vote; the others count as failed. Return what is done once the tally is decided.

        It is kept until every node has answered, so that a late node is healed too.
        """
        decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def answered(node: int, outcome: CallOutcome) -> None:
            if isinstance(outcome, bytes) and len(outcome) == len(tickets):
                tally.answer(node, outcome)
            else:
                errors.append(outcome if isinstance(outcome, Exception) else ValueError("not an answer to a keep"))
                tally.failed()
            if not tally.decided:
                return
            if not decided.done():
                decided.set_result(None)
            for hold, kept in zip(tally.holds, tally.outcomes, strict=True):
                if hold is not None and kept is HELD and self.find(hold.claim) is hold:
                    self.add(hold)
            for healing in list(tally.missing):
                self._heal(healing, tickets, tally, voters.epoch)

        for _ in range(tally.nodes - len(voters.nodes)):
            tally.failed()
        for node in voters.nodes:
            request = self._requests.keep(tickets, tally.holds, voters.epoch, node.number)
            node.send(NodeRequest(request), answered)
        return decided

    def _heal(self, node: int, tickets: Sequence[Kept], tally: KeepRound, epoch: str) -> None:
        """Give leases of the round that has succeeded without *node* a new hold there."""
        lost = [(tally.holds[index], tickets[index][0]) for index in tally.to_heal(node)]
        leases = [(hold, claim) for hold, claim in lost if hold is not None and self.find(claim) is hold]

        def healed(node: int, outcome: CallOutcome) -> None:
            for (hold, _), number in zip(leases, read_numbers(outcome, len(leases)), strict=True):
                if number:
                    hold.joined(node, number)

        if leases:
            self._nodes[node].send(NodeRequest(self._requests.heal(leases, epoch, self._next_hint())), healed)
