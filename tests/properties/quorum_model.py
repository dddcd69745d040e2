"""
An exhaustive model of acquiring a lock from a quorum: the backend's own `Ballot`, on nodes that follow the scripts.

No clock is trusted: a hold may vanish at any moment. Requests may be lost, delayed for as long as one likes and, in
some models, delivered twice; replies may be lost; an attempt that gives up is one that takes no further step. Nodes may
lose their memory, and be admitted again. Checked whenever an attempt wins: no other winner has its token, and every
attempt that had won before it began has a lower one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from fencing_sdk.backends.redis.quorum.ballots import Ballot, BallotVerdict, majority_of

S = TypeVar("S")

NODES = 3
EVERY = range(NODES)


class Node(NamedTuple):
    counter: int = 0
    holder: int = -1
    """The attempt that has the hold."""
    number: int = 0
    epoch: int = 1
    """0: the node has lost its memory."""


class Attempt(NamedTuple):
    epoch: int = 0
    """0: it has not begun."""
    floor: int = -1
    """The highest token that had been won when it began."""
    hint: int = 0
    grants_left: tuple[int, ...] = ()
    """Deliveries of GRANT that may still come, by node."""
    granted: tuple[int, ...] = (0,) * NODES
    """The numbers that the client knows of, by node; 0: none."""
    confirms: tuple[int, ...] = ()
    """The nodes to which a CONFIRM is on its way."""
    confirming: tuple[int, ...] = ()
    settled: tuple[int, ...] = ()
    token: int | None = None
    won: bool = False


class State(NamedTuple):
    nodes: tuple[Node, ...]
    attempts: tuple[Attempt, ...]
    vanishings: int
    losses: int
    admission: tuple[int, int, tuple[int, ...]] | None = None
    """A re-admission under way: the new epoch, the highest counter read, and the nodes read."""


def first_violation(first: S, steps: Callable[[S], Iterator[S]], broken: Callable[[S, S], str | None]) -> str | None:
    """Look at every state that can be reached by *steps*; return what the first one breaks, or None."""
    seen, queue = {first}, deque([first])
    while queue:
        state = queue.popleft()
        for after in steps(state):
            if after not in seen:
                if what := broken(state, after):
                    return f"{what}: {after}"
                seen.add(after)
                queue.append(after)
        assert len(seen) < 3_000_000, "too large a model"
    return None


class ConfirmsNothing(Ballot):
    """Takes the highest number as the token and confirms nothing, as published attempts at tokens for Redlock do."""

    __slots__ = ()

    def granted(self, node: int, number: int) -> list[int]:
        super().granted(node, number)
        if self.token is not None:
            self.token = max(self.grants.values())
            self.settled = set(self.grants)
        return []


@dataclass(frozen=True)
class Model:
    attempts: int = 2
    hints: tuple[int, ...] = (0,)
    counters: tuple[int, ...] = (0, 0, 0)
    deliveries: tuple[int, ...] = (1, 1, 1)
    """How often the GRANT of the first attempt may be delivered, by node; those of the others are delivered once."""
    vanishings: int = 4
    losses: int = 0
    """How often a node may lose its memory."""
    ballot: type[Ballot] = Ballot
    compares_number: bool = True
    """Whether CONFIRM compares the number of the hold, besides its owner."""
    epochs: bool = True
    """Whether a node that has lost its memory refuses to vote."""
    counter_survives: bool = False
    """Whether a node that loses its memory falls back to an older counter, and votes on."""

    def violation(self) -> str | None:
        first = State(
            tuple(Node(counter) for counter in self.counters),
            (Attempt(),) * self.attempts,
            self.vanishings,
            self.losses,
        )
        return first_violation(first, self.steps, self.broken)

    def broken(self, before: State, after: State) -> str | None:
        for number, attempt in enumerate(after.attempts):
            if attempt.won and not before.attempts[number].won:
                assert attempt.token is not None
                others = [other.token for other in before.attempts if other.won]
                if attempt.token in others:
                    return "duplicate token"
                if attempt.token <= attempt.floor:
                    return "a token fell"
        return None

    # What may happen

    def steps(self, state: State) -> Iterator[State]:
        for number, attempt in enumerate(state.attempts):
            if not attempt.epoch:
                yield from self.begin(state, number)
                if number == 0 or state.attempts[number - 1].epoch:
                    continue
                break  # attempts that have not begun are alike
            for node in EVERY:
                if attempt.grants_left[node]:
                    yield from self.deliver_grant(state, number, node)
                if node in attempt.confirms:
                    yield from self.deliver_confirm(state, number, node)
        for number, node in enumerate(state.nodes):
            if node.holder >= 0 and state.vanishings:
                yield _with_node(state, number, node._replace(holder=-1, number=0))._replace(
                    vanishings=state.vanishings - 1
                )
            if state.losses and node.counter:
                yield self.forget(state, number, node)
        yield from self.admit(state)

    def begin(self, state: State, number: int) -> Iterator[State]:
        floor = max((attempt.token or 0 for attempt in state.attempts if attempt.won), default=-1)
        left = self.deliveries if number == 0 else (1,) * NODES
        for epoch in {node.epoch for node in state.nodes} - {0}:
            for hint in self.hints:
                yield _with_attempt(state, number, Attempt(epoch, floor, hint, left))

    def deliver_grant(self, state: State, number: int, at: int) -> Iterator[State]:
        node, attempt = state.nodes[at], state.attempts[number]
        if (self.epochs and node.epoch != attempt.epoch) or node.holder not in {-1, number}:
            return
        if node.holder == -1:
            granted = max(node.counter + 1, attempt.hint)
            node = node._replace(counter=granted, holder=number, number=granted)
        left = tuple(count - (other == at) for other, count in enumerate(attempt.grants_left))
        lost = _with_attempt(_with_node(state, at, node), number, attempt._replace(grants_left=left))
        yield lost
        if not attempt.won and not attempt.granted[at]:
            ballot = self.restore(attempt)
            asked = ballot.granted(at, node.number)
            yield _with_attempt(lost, number, _told(lost.attempts[number], ballot, asked))

    def deliver_confirm(self, state: State, number: int, at: int) -> Iterator[State]:
        node, attempt = state.nodes[at], state.attempts[number]
        assert attempt.token is not None
        kept = node.holder == number and (not self.compares_number or node.number == attempt.granted[at])
        if self.epochs and node.epoch != attempt.epoch:
            kept = False
        if kept:
            raised = max(node.number, attempt.token)
            node = node._replace(counter=max(node.counter, raised), number=raised)
        confirms = tuple(other for other in attempt.confirms if other != at)
        lost = _with_attempt(_with_node(state, at, node), number, attempt._replace(confirms=confirms))
        yield lost
        if kept and not attempt.won:
            ballot = self.restore(attempt)
            ballot.confirmed(at, kept=True)
            yield _with_attempt(lost, number, _told(lost.attempts[number], ballot, []))

    def forget(self, state: State, number: int, node: Node) -> State:
        if self.counter_survives:
            lost = Node(node.counter - 1, epoch=node.epoch)
        elif self.epochs:
            lost = Node(epoch=0)
        else:
            lost = Node(epoch=node.epoch)
        return _with_node(state, number, lost)._replace(losses=state.losses - 1)

    def admit(self, state: State) -> Iterator[State]:
        """Each step of a re-admission is one at one node. Holds stay."""
        forgetful = [number for number in EVERY if not state.nodes[number].epoch]
        if not forgetful:
            return
        if state.admission is None:
            yield state._replace(admission=(max(node.epoch for node in state.nodes) + 1, 0, ()))
            return
        epoch, highest, read = state.admission
        for number in EVERY:
            node = state.nodes[number]
            if number not in read and node.epoch:
                sealed = _with_node(state, number, node._replace(epoch=epoch))
                yield sealed._replace(admission=(epoch, max(highest, node.counter), tuple(sorted((*read, number)))))
        if len(read) >= NODES - majority_of(NODES) + 1:
            for number in forgetful:
                yield _with_node(state, number, Node(highest, epoch=epoch))._replace(admission=None)

    def restore(self, attempt: Attempt) -> Ballot:
        """The ballot of an attempt, as it was left."""
        ballot = self.ballot(NODES, 0, EVERY)
        for node, number in enumerate(attempt.granted):
            if number:
                ballot.grants[node] = number
                ballot.pending.discard(node)
        ballot.token, ballot.settled = attempt.token, set(attempt.settled)
        ballot._confirming = set(attempt.confirming)
        return ballot


def _told(attempt: Attempt, ballot: Ballot, asked: list[int]) -> Attempt:
    return attempt._replace(
        granted=tuple(ballot.grants.get(node, 0) for node in EVERY),
        confirms=tuple(sorted({*attempt.confirms, *asked})),
        confirming=tuple(sorted(ballot._confirming)),
        settled=tuple(sorted(ballot.settled)),
        token=ballot.token,
        won=ballot.verdict is BallotVerdict.WON,
    )


def _with_node(state: State, number: int, node: Node) -> State:
    return state._replace(nodes=(*state.nodes[:number], node, *state.nodes[number + 1 :]))


def _with_attempt(state: State, number: int, attempt: Attempt) -> State:
    return state._replace(attempts=(*state.attempts[:number], attempt, *state.attempts[number + 1 :]))
