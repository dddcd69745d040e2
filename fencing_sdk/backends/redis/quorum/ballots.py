"""
Decides, from the answers of the nodes, an attempt to get a lock, a round of keeps, and an operator's end. No I/O.

A node that grants the lock gives it a number, higher than every number it has given before. The token is chosen once,
when a majority has granted: the smallest number that a majority of the grants does not exceed. Then

1. a grant with this very number is settled;
2. a grant with a lower number is settled once the node has confirmed the token: it compares owner and number, so the
   hold is unbroken, and raises its counter to the token;
3. a grant with a higher number does not count. It is confirmed all the same, so that the node shows the right token.

The lock is won when a majority is settled. Two winners share a node. On this node one hold has ended before the other
began, and its counter was at least the token of the first when it numbered the second. So tokens never repeat and
never fall, whatever clocks, delays and expiries do.

Keeps. The client knows the number of its hold on each node. A node keeps a hold only if owner and number are as the
client says: the hold was never broken. A round succeeds when a majority of *established* nodes has kept it.

A node that lost the hold (it was away for longer than the ttl) gets a new one after a successful round. This hold has
another number, and says nothing about the time before it. So it is not established until one whole round, begun after
the node had answered, has succeeded without it. If it counted at once, another owner could have had the lock in
between: `tests/properties/quorum_renewal_model.py` finds such a history.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from enum import Enum, auto, unique
from typing import NamedTuple

from fencing_sdk._values.claim import HELD, Claim, Gone, Place

__all__ = ["Ballot", "BallotVerdict", "EndTally", "KeepRound", "QuorumHold", "Refusal", "majority_of"]


def majority_of(nodes: int) -> int:
    """Size of a majority of *nodes*: any two share at least one."""
    return nodes // 2 + 1


class Refusal(NamedTuple):
    """Why a node did not grant the lock."""

    left: float | None
    """Seconds until the node may grant it; None if the hold has no ttl."""
    token: int
    """The token of the hold in the way."""
    attempt: int
    """The attempt that made the hold in the way."""


@unique
class BallotVerdict(Enum):
    """The state of an attempt."""

    OPEN = auto()
    WON = auto()
    REFUSED = auto()
    """Other owners have so many nodes that no majority is left."""
    UNAVAILABLE = auto()
    """So many nodes have failed that no majority is left."""


class Ballot:
    """
    The answers to one attempt.

    Args:
        nodes: The number of all nodes, asked or not.

        attempt: The number of this attempt. A lower one is senior.

        asked: The nodes in question; the others count as failed.
    """

    __slots__ = ("_attempt", "_confirming", "_failed", "grants", "majority", "pending", "refusals", "settled", "token")

    def __init__(self, nodes: int, attempt: int, asked: Collection[int]) -> None:
        self._attempt = attempt
        self.majority = majority_of(nodes)
        self.pending = set(asked)
        self._failed = set(range(nodes)) - self.pending
        self._confirming: set[int] = set()
        self.grants: dict[int, int] = {}
        """The number of each grant, by node."""
        self.refusals: dict[int, Refusal] = {}
        self.token: int | None = None
        """The token, once a majority has granted."""
        self.settled: set[int] = set()
        """The nodes that count for the token."""

    def granted(self, node: int, number: int) -> list[int]:
        """Take note of a grant; return the nodes that have to confirm the token now."""
        self.pending.discard(node)
        self.refusals.pop(node, None)
        self.grants[node] = number
        if self.token is not None:
            return self._place(node)
        if len(self.grants) < self.majority:
            return []
        self.token = sorted(self.grants.values())[self.majority - 1]
        return [asked for granting in self.grants for asked in self._place(granting)]

    def _place(self, node: int) -> list[int]:
        """Count a grant with the token's number; the others have to be confirmed."""
        if self.grants[node] == self.token:
            self.settled.add(node)
            return []
        if self.token is not None and self.grants[node] < self.token:
            self._confirming.add(node)
        return [node]

    def confirmed(self, node: int, *, kept: bool) -> None:
        """Take note of the answer to a confirmation: whether the hold was still the one that was granted."""
        if node in self._confirming:
            self._confirming.discard(node)
            (self.settled if kept else self._failed).add(node)

    def refused(self, node: int, refusal: Refusal) -> None:
        """Take note of a refusal."""
        self.pending.discard(node)
        self.refusals[node] = refusal

    def failed(self, node: int) -> None:
        """Take note that a node was unreachable, or did not answer, for a grant or a confirmation."""
        self.pending.discard(node)
        self._confirming.discard(node)
        if node not in self.settled:
            self._failed.add(node)

    def ask_again(self) -> list[int]:
        """Return the nodes that refused; their answers are awaited once more."""
        again = list(self.refusals)
        self.pending.update(again)
        self.refusals.clear()
        return again

    @property
    def heard(self) -> bool:
        """True if a majority has granted or refused: an attempt that is still open then waits for a slow minority."""
        return len(self.grants) + len(self.refusals) >= self.majority

    @property
    def verdict(self) -> BallotVerdict:
        """The state of the attempt by the answers so far."""
        if len(self.settled) >= self.majority:
            return BallotVerdict.WON
        hopeful = len(self._confirming) + len(self.settled) if self.token is not None else len(self.grants)
        if hopeful + len(self.pending) >= self.majority:
            return BallotVerdict.OPEN
        if self.heard:
            return BallotVerdict.REFUSED
        may_be_heard = len(self.grants) + len(self.refusals) + len(self.pending) >= self.majority
        return BallotVerdict.OPEN if may_be_heard else BallotVerdict.UNAVAILABLE

    @property
    def held(self) -> bool:
        """True if one other owner has a majority; else the nodes are split between rivals."""
        tokens = Counter(refusal.token for refusal in self.refusals.values())
        return any(count >= self.majority for count in tokens.values())

    @property
    def senior(self) -> bool:
        """
        True if this attempt asks again, and its rivals give way.

        Some node has granted it, no other owner has a majority, and every hold in the way belongs to a later attempt.
        Attempts are compared, not numbers: of all rivals at one moment, exactly one is the first.
        """
        rivals = self.refusals.values()
        return bool(self.grants) and not self.held and all(rival.attempt > self._attempt for rival in rivals)

    def retry_after(self) -> float | None:
        """Seconds until a majority of the nodes may be free, as far as the answers show."""
        left = [0.0] * len(self.grants)
        left += [refusal.left for refusal in self.refusals.values() if refusal.left is not None]
        return sorted(left)[self.majority - 1] if len(left) >= self.majority else None


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
        """Return whether the hold on *node* is established."""
        return self._since.get(node) == _ESTABLISHED

    def succeeded(self, number: int) -> None:
        """Establish the holds that had been made before round *number* began, because it has succeeded."""
        for node, since in self._since.items():
            if since <= number:
                self._since[node] = _ESTABLISHED


class KeepRound:
    """
    The answers of the nodes to one request that keeps several tickets.

    A hold of None is that of a ticket which this client does not know: the node compares owner and token alone.
    """

    def __init__(self, holds: Sequence[QuorumHold | None], nodes: int) -> None:
        self.holds = holds
        self.nodes = nodes
        self._majority = majority_of(nodes)
        self._kept = [0] * len(holds)
        self._refused = [0] * len(holds)
        self._taken = [0] * len(holds)
        self._numbers = [0] * len(holds)
        self._answered = 0
        self._undecided = len(holds)
        self.outcomes: list[Place | Gone | None] = [None] * len(holds)
        """The outcome of each ticket, as far as it is known."""
        self.missing: dict[int, list[int]] = {}
        """The tickets, as indices, of which a node has no unbroken hold, by node."""
        for index, hold in enumerate(holds):
            if hold is not None:
                hold.rounds += 1
                self._numbers[index] = hold.rounds

    def answer(self, node: int, codes: bytes) -> None:
        """Take note of the answer of a node: a character for each ticket, see ``holds.lua``."""
        self._answered += 1
        for index, code in enumerate(codes):
            self._count(index, node, code)

    def _count(self, index: int, node: int, code: int) -> None:
        hold = self.holds[index]
        if code == _KEPT:
            if hold is None or hold.counts(node):
                self._kept[index] += 1
                if self._kept[index] == self._majority:
                    self._decide(index, HELD)
            return
        if hold is not None:
            hold.lost(node)
            if code != _TAKEN:
                self.missing.setdefault(node, []).append(index)
        self._refused[index] += 1
        self._taken[index] += code != _FREE
        if self._refused[index] == self.nodes - self._majority + 1:
            self._decide(index, Gone(taken=2 * self._taken[index] >= self._refused[index]))

    def _decide(self, index: int, outcome: Place | Gone) -> None:
        if self.outcomes[index] is not None:
            return
        self.outcomes[index] = outcome
        self._undecided -= 1
        hold = self.holds[index]
        if outcome is HELD and hold is not None:
            hold.succeeded(self._numbers[index])

    def failed(self) -> None:
        """Take note that one node gives no answer."""
        self._answered += 1

    @property
    def decided(self) -> bool:
        """True if every ticket has its outcome, or no further answer will come."""
        return self._undecided == 0 or self._answered >= self.nodes

    def to_heal(self, node: int) -> list[int]:
        """The tickets, as indices, for which *node* may get a new hold: this round has kept them without it."""
        return [index for index in self.missing.pop(node, ()) if self.outcomes[index] is HELD]


_KEPT, _FREE, _TAKEN = b"10x"


class EndTally:
    """
    The answers of the nodes to one *request* of an operator. *holding* nodes, a majority, have shown the ticket.

    An answer is the request that came first to the node; "" if it had no hold then.
    """

    def __init__(self, nodes: int, holding: Collection[int], request: str) -> None:
        self._majority = majority_of(nodes)
        self._holding = holding
        self._request = request
        self.answers: dict[int, str] = {}

    @property
    def ended(self) -> bool:
        """True if the ticket has ended for certain."""
        return sum(bool(first) or node in self._holding for node, first in self.answers.items()) >= self._majority

    @property
    def is_the_first(self) -> bool:
        """True if it was this request that has ended the ticket: not its owner, its death or another operator."""
        counts = Counter(filter(None, self.answers.values()))
        if counts.total() < self._majority:
            return False
        return min(counts, key=lambda request: (-counts[request], request)) == self._request
