"""
The lease protocol as a state machine, small enough to be looked at in every state it can reach.

Clients acquire, renew, read the token, write under it, release and give up; a guard refuses stale tokens and is raised
at acquisition. The search is breadth-first, so a counter-example is a shortest one. The bounds are few ticks of time,
few attempts and few messages on their way at once.

One tick is the unit of time. A client's deadline counts from the tick before its request left; with a ttl of
`ttl` ticks it may read its token while fewer than `ttl` have passed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from message_model import GrantRow, Message, MessageBounds, MessageModel, Step


@dataclass(frozen=True, kw_only=True)
class LeaseBounds(MessageBounds):
    attempts: int = 2
    writes: bool = True


class LeaseClient(NamedTuple):
    """``at``: idle, asking, raising, holding, ready (the token is read), giving_up."""

    at: str = "idle"
    attempt: int = 0
    sent: int = 0
    deadline: int = 0
    token: int = 0
    renewing: bool = False


class LeaseState(NamedTuple):
    now: int = 0
    row: GrantRow | None = None
    counter: int = 0
    clients: tuple[LeaseClient, ...] = (LeaseClient(), LeaseClient())
    messages: frozenset[tuple[object, ...]] = frozenset()
    fence: int = 0
    entered: int = 0
    """The highest token with which a client entered after raising the fence."""


class LeaseModel(MessageModel):
    """The protocol, or a broken variant of it."""

    start = LeaseState()

    # What clients do.

    def _idle(self, state: LeaseState, who: int, client: LeaseClient) -> Iterator[Step]:
        if client.attempt < self.bounds.attempts and self._room(state):
            asking = LeaseClient("asking", client.attempt, sent=state.now)
            yield "asks", self._become(state, who, asking, ("acquire", who, self._id(client.attempt)))

    def _id(self, attempt: int) -> int:
        return 0 if self.broken == "one owner for all attempts" else attempt

    def _asking(self, state: LeaseState, who: int, client: LeaseClient) -> Iterator[Step]:
        if not self._room(state):
            return
        again = self.broken not in {"given up once", "never given up"}
        after = LeaseClient("giving_up" if again else "idle", client.attempt + (not again))
        release = () if self.broken == "never given up" else (("release", who, self._id(client.attempt)),)
        yield "gives up", self._become(state, who, after, *release)

    def _giving_up(self, state: LeaseState, who: int, client: LeaseClient) -> Iterator[Step]:
        """Release again as soon as the request is not on its way any more."""
        pending = ("acquire", who, self._id(client.attempt)) in state.messages
        if not pending and self._room(state):
            after = LeaseClient("idle", client.attempt + 1)
            yield "releases again", self._become(state, who, after, ("release", who, self._id(client.attempt)))

    def _raising(self, state: LeaseState, who: int, client: LeaseClient) -> Iterator[Step]:
        yield from self._leave(state, who, client)

    def _holding(self, state: LeaseState, who: int, client: LeaseClient) -> Iterator[Step]:
        fresh = state.now < client.deadline
        if not client.renewing and fresh and self._room(state):
            renewing = client._replace(renewing=True, sent=state.now)
            yield "renews", self._become(state, who, renewing, ("renew", who, self._id(client.attempt), state.now))
        if fresh or self.broken == "no look at the clock":
            row = state.row
            if row is None or (row.who, row.attempt) != (who, self._id(client.attempt)):
                yield "reads its token", "P2: a token is read that the store does not stand for"
            else:
                yield "reads its token", self._become(state, who, client._replace(at="ready"))
        yield from self._leave(state, who, client)

    def _ready(self, state: LeaseState, who: int, client: LeaseClient) -> Iterator[Step]:
        if self._room(state):
            write = (("write", who, client.token),) if self.bounds.writes else ()
            yield "sends its write, however late", self._become(state, who, client._replace(at="holding"), *write)

    def _leave(self, state: LeaseState, who: int, client: LeaseClient) -> Iterator[Step]:
        if self._room(state):
            release = ("release", who, self._id(client.attempt))
            yield "leaves", self._become(state, who, LeaseClient("idle", client.attempt + 1), release)

    # What the store and the guard do.

    def _on_acquire(self, state: LeaseState, who: int, attempt: int) -> Iterator[Step]:
        row = state.row
        if row is not None and (row.who, row.attempt) == (who, attempt):
            renewed = row._replace(expires=state.now + self.bounds.ttl)
            yield "again", self._answer(state._replace(row=renewed), ("grant", who, attempt, row.token))
        elif row is not None:
            yield "held", state
        else:
            token = 1 if self.broken == "counter in the record" else state.counter + 1
            if token <= state.counter:
                yield "granted", "P4: a later grant has no higher token"
                return
            row = GrantRow(who, attempt, token, state.now + self.bounds.ttl)
            granted = state._replace(row=row, counter=token)
            yield "granted", self._answer(granted, ("grant", who, attempt, token))

    def _answer(self, state: LeaseState, message: Message) -> LeaseState:
        """An answer goes where its request was, so it needs no room."""
        return state._replace(messages=state.messages | {message})

    def _on_renew(self, state: LeaseState, who: int, attempt: int, sent: int) -> Iterator[Step]:
        row = state.row
        if row is None and self.broken == "renewal creates":
            row = GrantRow(who, attempt, state.clients[who].token, 0)
        if row is not None and (row.who, row.attempt) == (who, attempt):
            after = state._replace(row=row._replace(expires=state.now + self.bounds.ttl))
            yield "renewed", self._answer(after, ("renewed", who, attempt, sent))
        else:
            yield "refused", self._answer(state, ("refused", who, attempt))

    def _on_release(self, state: LeaseState, who: int, attempt: int) -> Iterator[Step]:
        row = state.row
        if row is None:
            yield "nothing to release", state
        elif (row.who, row.attempt) == (who, attempt):
            yield "released", state._replace(row=None)
        elif self.broken == "foreign release":
            yield "released by another", state._replace(row=None)
        else:
            yield "not its own", state

    def _on_write(self, state: LeaseState, _who: int, token: int) -> Iterator[Step]:
        if token >= state.fence or self.broken == "no guard":
            if token < state.fence:
                yield "accepted", "P3: a stale write is accepted"
            elif token < state.entered:
                yield "accepted", "P3: a write is accepted below the token of one who has entered"
            else:
                yield "accepted", state._replace(fence=max(state.fence, token))
        else:
            yield "refused", state

    def _on_raise(self, state: LeaseState, who: int, attempt: int, token: int) -> Iterator[Step]:
        if token >= state.fence:
            raised = state if self.broken == "fence not raised" else state._replace(fence=token)
            yield "raised", self._answer(raised, ("raised", who, attempt))
        else:
            yield "stale", state

    # What clients hear.

    def _mine(self, state: LeaseState, who: int, attempt: int) -> LeaseClient | None:
        client = state.clients[who]
        return client if self._id(client.attempt) == attempt and client.at not in {"idle", "giving_up"} else None

    def _on_grant(self, state: LeaseState, who: int, attempt: int, token: int) -> Iterator[Step]:
        client = self._mine(state, who, attempt)
        if client is None or client.at != "asking":
            yield "no client waits", state
            return
        counts_from = state.now if self.broken == "validity from the reply" else client.sent
        deadline = counts_from + self.bounds.ttl
        if state.now >= deadline:
            yield "too late", self._become(state, who, LeaseClient("giving_up", client.attempt))
        else:
            raising = client._replace(at="raising", deadline=deadline, token=token)
            yield "taken", self._become(state, who, raising, ("raise", who, attempt, token))

    def _on_raised(self, state: LeaseState, who: int, attempt: int) -> Iterator[Step]:
        client = self._mine(state, who, attempt)
        if client is None or client.at != "raising":
            yield "no client waits", state
        else:
            entered = state._replace(entered=max(state.entered, client.token))
            yield "entered", self._become(entered, who, client._replace(at="holding"))

    def _on_renewed(self, state: LeaseState, who: int, attempt: int, sent: int) -> Iterator[Step]:
        client = self._mine(state, who, attempt)
        if client is None or not client.renewing:
            yield "no client waits", state
            return
        deadline = client.deadline
        if state.now < deadline:
            counts_from = state.now if self.broken == "renewal from the reply" else sent
            deadline = max(deadline, counts_from + self.bounds.ttl)
        yield "heard", self._become(state, who, client._replace(renewing=False, deadline=deadline))

    def _on_refused(self, state: LeaseState, who: int, attempt: int) -> Iterator[Step]:
        client = self._mine(state, who, attempt)
        if client is None:
            yield "no client waits", state
        else:
            yield "lost", self._become(state, who, LeaseClient("idle", client.attempt + 1))

    def _wants(self, state: LeaseState, row: GrantRow) -> bool:
        return state.clients[row.who].at != "idle"
