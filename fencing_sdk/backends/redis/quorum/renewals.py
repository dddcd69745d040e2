"""The leases of one client on the nodes of a quorum: renewed in batches, and healed where a node has lost them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from fencing_sdk._values.claim import Claim, Renewal
from fencing_sdk._values.clock import BootClock
from fencing_sdk.backends.redis.connection.node import CallOutcome
from fencing_sdk.backends.redis.quorum.ballots import QuorumHold, RenewalRound
from fencing_sdk.backends.redis.quorum.node import NodeRequest
from fencing_sdk.backends.redis.quorum.nodes import QuorumNodes, Voters, most_telling
from fencing_sdk.backends.redis.quorum.requests import QuorumRequests, read_numbers

BATCH = 200
"""Leases in one request: it keeps a node busy for less than a millisecond."""
_SWEEP_FROM = 64

_CLOCK = BootClock()


class QuorumHolds:
    """What the client knows of its leases, by name and owner."""

    def __init__(self) -> None:
        self._holds: dict[tuple[str, str], tuple[QuorumHold, float]] = {}
        self._sweep_at = _SWEEP_FROM

    def add(self, hold: QuorumHold) -> None:
        """Keep a new grant, or note that it was renewed."""
        now = _CLOCK.now()
        self._holds[hold.claim.name, hold.claim.owner] = hold, now + hold.claim.ttl
        if len(self._holds) > self._sweep_at:
            self._holds = {key: kept for key, kept in self._holds.items() if kept[1] > now}
            self._sweep_at = 2 * len(self._holds) + _SWEEP_FROM

    def find(self, claim: Claim) -> QuorumHold | None:
        """What is known of the grant of *claim*."""
        found = self._holds.get((claim.name, claim.owner))
        return None if found is None else found[0]

    def remove(self, claim: Claim) -> None:
        """Forget a grant that has ended."""
        self._holds.pop((claim.name, claim.owner), None)


class QuorumRenewals:
    """Renews leases by majority."""

    def __init__(
        self, nodes: QuorumNodes, requests: QuorumRequests, holds: QuorumHolds, next_hint: Callable[[], int]
    ) -> None:
        self._nodes = nodes
        self._requests = requests
        self._holds = holds
        self._next_hint = next_hint

    async def renew(self, claims: Sequence[Claim], voters: Voters, *, look: bool = False) -> list[Renewal]:
        """
        Renew leases.

        Args:
            claims: The leases.

            voters: The nodes to ask.

            look: Only look whether leases are lost. Nodes that have lost a hold get no new one: else what an
                operator deletes on one node after the other would come back.

        Raises:
            Exception: too few nodes have answered.
        """
        batches = [claims[start : start + BATCH] for start in range(0, len(claims), BATCH)]
        rounds = [_Round(self, batch, voters, look=look) for batch in batches]
        for one in rounds:
            one.send()
        try:
            for one in rounds:
                await one.wait()
        except asyncio.CancelledError:  # at the limit of the call, the answers of some are better than none
            if not any(outcome is not Renewal.UNKNOWN for one in rounds for outcome in one.tally.outcomes):
                raise
        outcomes = [outcome for one in rounds for outcome in one.tally.outcomes]
        if all(outcome is Renewal.UNKNOWN for outcome in outcomes) and any(one.errors for one in rounds):
            raise most_telling([error for one in rounds for error in one.errors])
        return outcomes

    def make_round(self, claims: Sequence[Claim], *, look: bool) -> RenewalRound:
        """The tally of one batch."""
        return RenewalRound(claims, [self._holds.find(claim) for claim in claims], len(self._nodes), look=look)

    def send(self, tally: RenewalRound, voters: Voters, answer: Callable[[int, CallOutcome], None]) -> None:
        """Send the requests of one batch."""
        for node in voters.nodes:
            node.send(NodeRequest(self._requests.renew(tally.claims, tally.holds, voters.epoch, node.number)), answer)

    def renewed(self, tally: RenewalRound, epoch: str, answered: Sequence[int]) -> None:
        """Note the success of leases, and heal the nodes that have answered without a hold of theirs."""
        for hold, outcome in zip(tally.holds, tally.outcomes, strict=True):
            if hold is not None and outcome is Renewal.RENEWED and self._holds.find(hold.claim) is hold:
                self._holds.add(hold)
        for node in answered:
            lost = [(tally.holds[index], tally.claims[index]) for index in tally.to_heal(node)]
            known = [(hold, claim) for hold, claim in lost if hold is not None and self._holds.find(claim) is hold]
            if known:
                self._heal(node, known, epoch)

    def _heal(self, node: int, leases: Sequence[tuple[QuorumHold, Claim]], epoch: str) -> None:
        def healed(node: int, outcome: CallOutcome) -> None:
            for (hold, _), number in zip(leases, read_numbers(outcome, len(leases)), strict=True):
                if number:
                    hold.joined(node, number)

        self._nodes[node].send(NodeRequest(self._requests.heal(leases, epoch, self._next_hint())), healed)


class _Round:
    """One batch on its way. It lives until every node has answered, so that a late node is healed too."""

    def __init__(self, renewals: QuorumRenewals, claims: Sequence[Claim], voters: Voters, *, look: bool) -> None:
        self._renewals = renewals
        self._voters = voters
        self._decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tally = renewals.make_round(claims, look=look)
        self.errors: list[Exception] = []

    def send(self) -> None:
        """Ask the nodes that vote; the others count as failed."""
        for _ in range(self.tally.nodes - len(self._voters.nodes)):
            self.tally.failed()
        self._renewals.send(self.tally, self._voters, self._on_answer)

    async def wait(self) -> None:
        """Wait until every lease of the batch has its outcome, or until no more outcomes can come."""
        await self._decided

    def _on_answer(self, node: int, outcome: CallOutcome) -> None:
        if isinstance(outcome, bytes) and len(outcome) == len(self.tally.claims):
            self.tally.answer(node, outcome)
        else:
            self.errors.append(outcome if isinstance(outcome, Exception) else ValueError("not an answer to a renewal"))
            self.tally.failed()
        if not self.tally.decided:
            return
        if not self._decided.done():
            self._decided.set_result(None)
        self._renewals.renewed(self.tally, self._voters.epoch, list(self.tally.missing))
