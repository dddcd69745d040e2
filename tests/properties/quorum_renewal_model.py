"""
An exhaustive model of a long lease on a quorum: the backend's own `QuorumHold`, while a rival acquires.

The holder has won the lock on a majority; the grant of the third node may come late. It renews, and heals nodes that
have lost its hold. A rival tries once. Checked: when a round of renewals succeeds, no rival has had the lock between
the moment at which the holder won it and the moment at which that round began.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from quorum_model import first_violation

from fencing_sdk.abc import Claim
from fencing_sdk.backends.redis.quorum.ballots import QuorumHold, majority_of

FREE, HOLDER, RIVAL = range(3)
CLAIM = Claim("lock", 10.0, owner="holder")


class CountsAtOnce(QuorumHold):
    """Counts a node that was healed like one that never lost the hold."""

    __slots__ = ()

    def joined(self, node: int, number: int) -> None:
        self.settled(node, number)


class State(NamedTuple):
    owners: tuple[int, ...]
    known: tuple[int, ...]
    """By node, since which round the holder counts its hold; -1: it knows of none, or of another than there is."""
    late: tuple[int, ...]
    """Nodes that the holder's first request has not reached yet."""
    rounds: int = 0
    renewed: tuple[int, ...] | None = None
    """The nodes that have renewed in the round under way; None: none is."""
    granted: tuple[int, ...] = ()
    """The nodes that the rival has got."""
    confirmed: tuple[int, ...] = ()
    rival_at: int = -1
    """Rounds that had begun when the rival had a majority; -1: it has none."""
    succeeded: int = 0
    """The last round that has succeeded."""


class RenewalModel:
    def __init__(self, *, nodes: int = 3, rounds: int = 4, hold: type[QuorumHold] = QuorumHold) -> None:
        self.nodes = range(nodes)
        self.majority = majority_of(nodes)
        self.rounds = rounds
        self.hold = hold

    def violation(self) -> str | None:
        first = State(
            tuple(HOLDER if node < self.majority else FREE for node in self.nodes),
            tuple(0 if node < self.majority else -1 for node in self.nodes),
            tuple(self.nodes[self.majority :]),
        )
        return first_violation(first, self.steps, self.broken)

    def broken(self, _: State, after: State) -> str | None:
        if len(after.confirmed) >= self.majority and after.succeeded > after.rival_at:
            return "a round succeeded although a rival had the lock before it began"
        return None

    def steps(self, state: State) -> Iterator[State]:
        for node in self.nodes:
            if state.owners[node] != FREE:
                yield self.at(state, node, FREE, known=-1 if state.owners[node] == HOLDER else None)
            if node in state.late and state.owners[node] == FREE:
                yield self.grant_late(state, node)
        yield from self.renew(state)
        yield from self.compete(state)

    def grant_late(self, state: State, node: int) -> State:
        """A node numbers a hold above the token only if it has confirmed a later one."""
        hold = self.restore(state)
        if node in state.confirmed:
            hold.joined(node, 1)
        else:
            hold.settled(node, 1)
        late = tuple(other for other in state.late if other != node)
        return self.at(state, node, HOLDER, known=hold._since[node])._replace(late=late)

    def renew(self, state: State) -> Iterator[State]:
        if state.renewed is None:
            if state.rounds < self.rounds:
                yield state._replace(rounds=state.rounds + 1, renewed=())
            if state.rounds:
                for node in self.nodes:
                    if state.owners[node] == FREE and node not in state.late:
                        hold = self.restore(state)
                        hold.joined(node, 1)
                        yield self.at(state, node, HOLDER, known=hold._since[node])
            return
        hold = self.restore(state)
        for node in self.nodes:
            if node not in state.renewed and state.owners[node] == HOLDER and state.known[node] >= 0:
                yield state._replace(renewed=tuple(sorted((*state.renewed, node))))
        if sum(hold.counts(node) for node in state.renewed) >= self.majority:
            hold.succeeded(state.rounds)
            known = tuple(hold._since.get(node, -1) for node in self.nodes)
            yield state._replace(known=known, renewed=None, succeeded=state.rounds)

    def compete(self, state: State) -> Iterator[State]:
        for node in self.nodes:
            if state.rival_at < 0 and state.owners[node] == FREE and node not in state.granted:
                granted = tuple(sorted((*state.granted, node)))
                yield self.at(state, node, RIVAL)._replace(granted=granted)
            if state.rival_at >= 0 and state.owners[node] == RIVAL and node not in state.confirmed:
                yield state._replace(confirmed=tuple(sorted((*state.confirmed, node))))
        if state.rival_at < 0 and len(state.granted) >= self.majority:
            yield state._replace(rival_at=state.rounds)

    def restore(self, state: State) -> QuorumHold:
        hold = self.hold(CLAIM, 1)
        hold.rounds = state.rounds
        for node, since in enumerate(state.known):
            if since >= 0:
                hold.numbers[node] = 1
                hold._since[node] = since
        return hold

    @staticmethod
    def at(state: State, node: int, owner: int, *, known: int | None = None) -> State:
        owners = (*state.owners[:node], owner, *state.owners[node + 1 :])
        if known is None:
            return state._replace(owners=owners)
        return state._replace(owners=owners, known=(*state.known[:node], known, *state.known[node + 1 :]))
