"""
The direct grant as a state machine, small enough to be looked at in every state it can reach.

A release hands the lock to the first waiter in the line, with a token, in a message that nobody asked for. Waiters give
signs of life, give up, hold, renew, read their token and leave. A client that is frozen takes no step, which it may do
in every state. The search is breadth-first, so a counter-example is a shortest one.

One tick is the unit of time. A sign names the tick at which it was sent, and the message repeats that: the grant counts
from there. What `docs/decisions/0014-a-release-hands-the-lock-on.md` calls not safe is broken here on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from message_model import GrantRow, MessageBounds, MessageModel, Step

SUSPECT = 1
"""Ticks after its last sign of life at which a waiter is woken, and not handed the lock."""
LINE_TTL = 2
"""Ticks after its last sign of life at which a waiter is no longer in the line."""


@dataclass(frozen=True, kw_only=True)
class GrantBounds(MessageBounds):
    renewals: bool = False


class GrantClient(NamedTuple):
    """``at``: idle, waiting, holding."""

    at: str = "idle"
    attempt: int = 0
    signed: int = -1
    """When it sent its last sign of life, or renewal."""
    deadline: int = 0
    token: int = 0


class Place(NamedTuple):
    """A place in the line: whose it is, the sign that the store had last, and when."""

    who: int
    attempt: int
    sign: int
    seen: int


class GrantState(NamedTuple):
    now: int = 0
    row: GrantRow | None = None
    heard: Place | None = None
    """A waiter that was told of a grant that is not made yet: what a broken store does."""
    counter: int = 0
    line: tuple[Place, ...] = ()
    clients: tuple[GrantClient, ...] = (GrantClient(), GrantClient())
    messages: frozenset[tuple[object, ...]] = frozenset()


class GrantModel(MessageModel):
    """The protocol, or a broken variant of it."""

    start = GrantState()

    def steps(self, state: GrantState) -> Iterator[Step]:
        """Everything that can happen in *state*."""
        yield from super().steps(state)
        if state.heard is not None:
            yield "the grant is made that was told", self._grant(state._replace(heard=None), state.heard, state.counter)

    # What clients do.

    def _idle(self, state: GrantState, who: int, client: GrantClient) -> Iterator[Step]:
        if client.attempt < self.bounds.attempts and self._room(state):
            waiting = GrantClient("waiting", client.attempt, signed=state.now)
            yield "joins the line", self._become(state, who, waiting, ("sign", who, client.attempt, state.now))

    def _waiting(self, state: GrantState, who: int, client: GrantClient) -> Iterator[Step]:
        if client.signed < state.now and self._room(state):
            again = client._replace(signed=state.now)
            yield "gives a sign of life", self._become(state, who, again, ("sign", who, client.attempt, state.now))
        yield from self._leave(state, who, client, "gives up")

    def _holding(self, state: GrantState, who: int, client: GrantClient) -> Iterator[Step]:
        fresh, row = state.now < client.deadline, state.row
        if fresh and (row is None or (row.who, row.attempt) != (who, client.attempt)):
            yield "reads its token", "P1: a token is read that the store does not stand for"
        if fresh and self.bounds.renewals and client.signed < state.now and self._room(state):
            renewing = client._replace(signed=state.now)
            yield "renews", self._become(state, who, renewing, ("renew", who, client.attempt, state.now))
        yield from self._leave(state, who, client, "leaves")

    def _leave(self, state: GrantState, who: int, client: GrantClient, how: str) -> Iterator[Step]:
        """A waiter that gives up may have been granted the lock, and releases its claim."""
        silent = client.at == "waiting" and self.broken == "a waiter gives up without a release"
        if silent or self._room(state):
            release = () if silent else (("release", who, client.attempt),)
            yield how, self._become(state, who, GrantClient("idle", client.attempt + 1), *release)

    # What the store does.

    def _on_sign(self, state: GrantState, who: int, attempt: int, sign: int) -> Iterator[Step]:
        row = state.row
        if row is None or (row.who, row.attempt) != (who, attempt):
            others = tuple(place for place in state.line if (place.who, place.attempt) != (who, attempt))
            first = next((place for place in state.line if place not in others), None)
            at = len(others) if first is None else state.line.index(first)
            line = (*others[:at], Place(who, attempt, sign, state.now), *others[at:])
            yield "in line", self._hand_on(state._replace(line=line))
            return
        if self.broken != "a grant is repeated without a fresh ttl":
            row = row._replace(expires=state.now + self.bounds.ttl)
        handed = ("handed", who, attempt, row.token, sign)
        yield "repeated", state._replace(row=row, messages=state.messages | {handed})

    def _on_release(self, state: GrantState, who: int, attempt: int) -> Iterator[Step]:
        line = tuple(place for place in state.line if (place.who, place.attempt) != (who, attempt))
        row = state.row
        if row is not None and (row.who, row.attempt) == (who, attempt):
            row = None
        after = state._replace(row=row, line=line)
        if self.broken != "a release hands nothing on":
            after = self._hand_on(after)
        waits = any(state.now - place.seen <= SUSPECT for place in after.line[:1])
        free = after.row is None and after.heard is None
        yield "released", "P8: a lock is released and not handed to the first waiter" if free and waits else after

    def _hand_on(self, state: GrantState) -> GrantState:
        """Hand a free lock to the first waiter that lives, unless it has missed a sign: then it keeps its turn."""
        line = tuple(place for place in state.line if state.now - place.seen < LINE_TTL)
        state = state._replace(line=line)
        if state.row is not None or state.heard is not None or not line or state.now - line[0].seen > SUSPECT:
            return state
        state = state._replace(line=line[1:], counter=state.counter + 1)
        handed = ("handed", line[0].who, line[0].attempt, state.counter, line[0].sign)
        state = state._replace(messages=state.messages | {handed})
        if self.broken == "a grant is told before it is made":
            return state._replace(heard=line[0])
        return self._grant(state, line[0], state.counter)

    def _grant(self, state: GrantState, place: Place, token: int) -> GrantState:
        ttl = self.bounds.ttl - (self.broken == "an offer is shorter than the ttl")
        return state._replace(row=GrantRow(place.who, place.attempt, token, state.now + ttl))

    def _on_renew(self, state: GrantState, who: int, attempt: int, sent: int) -> Iterator[Step]:
        row = state.row
        if row is None or (row.who, row.attempt) != (who, attempt):
            yield "refused", state
            return
        after = state._replace(row=row._replace(expires=state.now + self.bounds.ttl))
        yield "renewed", after._replace(messages=after.messages | {("renewed", who, attempt, sent)})

    # What clients hear.

    def _on_handed(self, state: GrantState, who: int, attempt: int, token: int, sign: int) -> Iterator[Step]:
        client = state.clients[who]
        mine = client.attempt == attempt and client.at != "idle"
        if mine and client.at == "waiting":
            deadline = self._counts_from(state, client, sign) + self.bounds.ttl
            holding = client._replace(at="holding", deadline=deadline, token=token)
            if state.now < deadline:
                yield "taken", self._become(state, who, holding)
            else:
                yield "too late", self._become(state, who, holding)  # the lease is over, and is released by leaving
        elif mine and (token <= client.token) and self.broken != "an old message releases a new grant":
            yield "old", state
        elif self.broken in {"a waiter gives up without a release", "a message for one that has left is dropped"}:
            yield "dropped", state
        else:  # the waiter has left; its release may have come before its sign
            yield "released", state._replace(messages=state.messages | {("release", who, attempt)})

    def _counts_from(self, state: GrantState, client: GrantClient, sign: int) -> int:
        if self.broken == "a grant counts from its message":
            return state.now
        return client.signed if self.broken == "a grant counts from the latest sign" else sign

    def _on_renewed(self, state: GrantState, who: int, attempt: int, sent: int) -> Iterator[Step]:
        client = state.clients[who]
        if client.at == "holding" and client.attempt == attempt and state.now < client.deadline:
            deadline = max(client.deadline, sent + self.bounds.ttl)
            yield "heard", self._become(state, who, client._replace(deadline=deadline))
        else:
            yield "heard by no holder", state

    def _wants(self, state: GrantState, row: GrantRow) -> bool:
        client = state.clients[row.who]
        return client.at != "idle" and client.attempt == row.attempt
