"""
An exhaustive model of a revocation on a quorum: the backend's own `EndTally` and `QuorumHold`.

The holder has won the lock on a majority; the grant of the third node may come late. It renews, and heals nodes that
have lost its hold, while operators revoke the grant and holds expire. Checked: once an operator knows that the grant
has ended, no round of renewals that begins then succeeds; and of the operators who have heard all nodes, one at most is
told that it was the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

from quorum_model import first_violation

from fencing_sdk.abc import Claim
from fencing_sdk.backends.redis.quorum.ballots import EndTally, QuorumHold, majority_of

CLAIM = Claim("lock", 10.0, owner="holder")
_NONE = -1

T = TypeVar("T")


class CountsAnyFreeNode(EndTally):
    """Takes a node that has never shown the grant for one that will not get it."""

    @property
    def ended(self) -> bool:
        return len(self.answers) >= self._majority


class FirstSomewhere(EndTally):
    """Takes itself for the first wherever it was the first on some node."""

    @property
    def is_the_first(self) -> bool:
        return self._request in self.answers.values()


class Operator(NamedTuple):
    holding: tuple[int, ...] = ()
    """The nodes that have shown it the grant; none: it has not looked yet."""
    heard: tuple[str | None, ...] = ()
    """By node, the answer to the revocation; None: there is none yet."""
    ended_at: int = _NONE
    """Rounds that had begun when it knew that the grant has ended."""


class State(NamedTuple):
    numbers: tuple[int, ...]
    """By node, the number of its hold; 0: it has none."""
    known: tuple[tuple[int, int], ...]
    """By node, the number that the holder knows, and since which round it counts; (0, -1): it knows of none."""
    firsts: tuple[str | None, ...]
    """By node, the revocation in its note; "" if it had no hold to delete; None if there is no note."""
    operators: tuple[Operator, ...]
    late: tuple[int, ...]
    rounds: int = 0
    renewed: tuple[int, ...] | None = None
    succeeded: int = 0
    heals: int = 0


class RevocationModel:
    def __init__(
        self,
        *,
        nodes: int = 3,
        rounds: int = 3,
        operators: int = 1,
        heals: int = 2,
        heals_what_was_revoked: bool = False,
        tally: type[EndTally] = EndTally,
    ) -> None:
        self.nodes = range(nodes)
        self.majority = majority_of(nodes)
        self.rounds = rounds
        self.operators = operators
        self.heals = heals
        self.heals_what_was_revoked = heals_what_was_revoked
        self.tally = tally

    def violation(self) -> str | None:
        held = [node < self.majority for node in self.nodes]
        first = State(
            numbers=tuple(int(here) for here in held),
            known=tuple((1, 0) if here else (0, _NONE) for here in held),
            firsts=(None,) * len(held),
            operators=(Operator(heard=(None,) * len(held)),) * self.operators,
            late=tuple(self.nodes[self.majority :]),
        )
        return first_violation(first, self.steps, self.broken)

    def broken(self, _: State, state: State) -> str | None:
        if any(0 <= operator.ended_at < state.succeeded for operator in state.operators):
            return "a round succeeded although the grant had been revoked before it began"
        tallies = [self.tally_of(which, operator) for which, operator in enumerate(state.operators)]
        if sum(len(tally.answers) == len(self.nodes) and tally.ended and tally.is_the_first for tally in tallies) > 1:
            return "two operators were told that they were the first"
        return None

    def steps(self, state: State) -> Iterator[State]:
        for node in self.nodes:
            if state.numbers[node]:
                yield state._replace(numbers=_put(state.numbers, node, 0))  # it expires
            if node in state.late:
                yield self.grant_late(state, node)
        yield from self.renew(state)
        for which, operator in enumerate(state.operators):
            yield from self.operate(state, which, operator)

    def grant_late(self, state: State, node: int) -> State:
        """The first request reaches a node that the holder has not needed; its hold counts from the start."""
        hold = self.restore(state)
        hold.settled(node, 1)
        late = tuple(other for other in state.late if other != node)
        return self.store(state, hold)._replace(numbers=_put(state.numbers, node, 1), late=late)

    def renew(self, state: State) -> Iterator[State]:
        hold = self.restore(state)
        if state.renewed is None:
            if state.rounds < self.rounds:
                yield state._replace(rounds=state.rounds + 1, renewed=())
            if state.succeeded and state.heals < self.heals:
                for node in self.nodes:
                    noted = state.firsts[node] is not None and not self.heals_what_was_revoked
                    if not state.numbers[node] and node not in state.late and not noted:
                        number = 2 + state.heals
                        hold = self.restore(state)
                        hold.joined(node, number)
                        healed = _put(state.numbers, node, number)
                        yield self.store(state, hold)._replace(numbers=healed, heals=state.heals + 1)
            return
        for node in self.nodes:
            number = state.known[node][0]
            if node not in state.renewed and number and state.numbers[node] == number:
                yield state._replace(renewed=tuple(sorted((*state.renewed, node))))
        if sum(hold.counts(node) for node in state.renewed) >= self.majority:
            hold.succeeded(state.rounds)
            yield self.store(state, hold)._replace(renewed=None, succeeded=state.rounds)

    def operate(self, state: State, which: int, operator: Operator) -> Iterator[State]:
        if not operator.holding:
            showing = tuple(node for node in self.nodes if state.numbers[node])
            if len(showing) >= self.majority:
                yield self.with_operator(state, which, operator._replace(holding=showing))
            return
        for node in self.nodes:
            if operator.heard[node] is None:
                first = state.firsts[node]
                if first is None:
                    first = f"operator {which}" if state.numbers[node] else ""
                heard = operator._replace(heard=_put(operator.heard, node, first))
                if operator.ended_at == _NONE and self.tally_of(which, heard).ended:
                    heard = heard._replace(ended_at=state.rounds)
                done = state._replace(firsts=_put(state.firsts, node, first), numbers=_put(state.numbers, node, 0))
                yield self.with_operator(done, which, heard)

    def tally_of(self, which: int, operator: Operator) -> EndTally:
        tally = self.tally(len(self.nodes), operator.holding, f"operator {which}")
        for node, first in enumerate(operator.heard):
            if first is not None:
                tally.answers[node] = first
        return tally

    def restore(self, state: State) -> QuorumHold:
        hold = QuorumHold(CLAIM, 1)
        hold.rounds = state.rounds
        for node, (number, since) in enumerate(state.known):
            if number:
                hold.numbers[node] = number
                hold._since[node] = since
        return hold

    def store(self, state: State, hold: QuorumHold) -> State:
        known = tuple((hold.numbers.get(node, 0), hold._since.get(node, _NONE)) for node in self.nodes)
        return state._replace(known=known)

    @staticmethod
    def with_operator(state: State, which: int, operator: Operator) -> State:
        return state._replace(operators=_put(state.operators, which, operator))


def _put(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])
