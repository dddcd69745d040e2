"""
Renewals by a majority: when a round of answers proves that a lease goes on. No I/O, no clock.

The client knows the number of its hold on each node. A node renews a hold only if owner and number are as the client
says: the hold was never broken. A round succeeds when a majority of *established* nodes has renewed.

A node that lost the hold (it was away for longer than the ttl) gets a new one after a successful round. This hold has
another number, and says nothing about the time before it. So it is not established until one whole round, begun after
the node had answered, has succeeded without it. If it counted at once, another owner could have had the lock in
between: `tests/properties/quorum_renewal_model.py` finds such a history.
"""

from __future__ import annotations

from collections.abc import Sequence

from fencing_sdk._values.claim import Claim, Renewal
from fencing_sdk.backends.redis.quorum.acquire_ballot import majority_of

__all__ = ["QuorumHold", "RenewalRound"]

_ESTABLISHED = 0


class QuorumHold:
    """A grant as its holder knows it: the number of the hold on each node, and since when it counts."""

    __slots__ = ("_since", "claim", "numbers", "rounds", "token")

    def __init__(self, claim: Claim, token: int) -> None:
        self.claim = claim
        self.token = token
        self.numbers: dict[int, int] = {}
        """The number of the hold on each node that has one."""
        self._since: dict[int, int] = {}  # node -> the first round that begins after it has answered
        self.rounds = 0
        """Rounds of renewals that have begun."""

    def settled(self, node: int, number: int) -> None:
        """Take note of a hold that counts from the start: the node granted no number above the token before."""
        self.numbers[node] = number
        self._since[node] = _ESTABLISHED

    def joined(self, node: int, number: int) -> None:
        """Take note of a hold that the node has made, or is found to have, after the lock was won."""
        if self.numbers.get(node) != number:
            self.numbers[node] = number
            self._since[node] = self.rounds + 1

    def lost(self, node: int) -> None:
        """Take note that the hold on a node was broken."""
        self.numbers.pop(node, None)
        self._since.pop(node, None)

    def counts(self, node: int) -> bool:
        """Whether the hold on *node* is established."""
        return self._since.get(node) == _ESTABLISHED

    def succeeded(self, number: int) -> None:
        """Establish the holds that had been made before round *number* began, because it has succeeded."""
        for node, since in self._since.items():
            if since <= number:
                self._since[node] = _ESTABLISHED


class RenewalRound:
    """
    The answers of the nodes to one request that renews several leases.

    Args:
        claims: The leases.

        holds: What is known of each; None for a lease that another object has acquired. Then the node compares
            the owner alone.

        nodes: The number of all nodes.

        look: The round only looks whether leases are lost. It establishes no hold.
    """

    def __init__(
        self, claims: Sequence[Claim], holds: Sequence[QuorumHold | None], nodes: int, *, look: bool = False
    ) -> None:
        self.claims = claims
        self.holds = holds
        self.nodes = nodes
        self._majority = majority_of(nodes)
        self._look = look
        self._renewed = [0] * len(claims)
        self._refused = [0] * len(claims)
        self._taken = [0] * len(claims)
        self._numbers = [0] * len(claims)
        self._answered = 0
        self._undecided = len(claims)
        self.outcomes = [Renewal.UNKNOWN] * len(claims)
        """What is known so far of each lease."""
        self.missing: dict[int, list[int]] = {}
        """By node: the leases, as indices, of which it has no unbroken hold."""
        if not look:
            for index, hold in enumerate(holds):
                if hold is not None:
                    hold.rounds += 1
                    self._numbers[index] = hold.rounds

    def answer(self, node: int, codes: bytes) -> None:
        """Take note of the answer of a node: a character for each lease, see ``renew.lua``."""
        self._answered += 1
        for index, code in enumerate(codes):
            self._count(index, node, code)

    def _count(self, index: int, node: int, code: int) -> None:
        hold = self.holds[index]
        if code == _RENEWED:
            if hold is None or hold.counts(node):
                self._renewed[index] += 1
                if self._renewed[index] == self._majority:
                    self._decide(index, Renewal.RENEWED)
            return
        if hold is not None:
            if not self._look:
                hold.lost(node)
            if code != _TAKEN:
                self.missing.setdefault(node, []).append(index)
        self._refused[index] += 1
        self._taken[index] += code == _TAKEN
        if self._refused[index] == self.nodes - self._majority + 1:
            taken = 2 * self._taken[index] >= self._refused[index]
            self._decide(index, Renewal.TAKEN_OVER if taken else Renewal.REFUSED)

    def _decide(self, index: int, outcome: Renewal) -> None:
        if self.outcomes[index] is not Renewal.UNKNOWN:
            return
        self.outcomes[index] = outcome
        self._undecided -= 1
        hold = self.holds[index]
        if outcome is Renewal.RENEWED and hold is not None and not self._look:
            hold.succeeded(self._numbers[index])

    def failed(self) -> None:
        """Take note that one node gives no answer."""
        self._answered += 1

    @property
    def decided(self) -> bool:
        """Whether every lease has its outcome, or no further answer will come."""
        return self._undecided == 0 or self._answered >= self.nodes

    def to_heal(self, node: int) -> list[int]:
        """The leases, as indices, for which *node* may get a new hold: this round has renewed them without it."""
        if self._look:
            return []
        return [index for index in self.missing.pop(node, ()) if self.outcomes[index] is Renewal.RENEWED]


_RENEWED = ord("1")
_TAKEN = ord("x")
