"""
Permits, readers and writers on a store that decides each call in one step: memory, SQLite, PostgreSQL, Redis.

Clients try, join the line, try again, wait to be woken, hold, raise their fence, write under their token and leave. A
wake-up is a message. What may go wrong is bounded by `Mishaps`: a pause past the deadline, a kill, a lost reply, a lost
wake-up, a waiter that is cancelled. The guard keeps one fence for each permit, and one for readers and writers.

A client is named by its kind and number: ``P0`` wants a permit, ``R1`` reads, ``W2`` writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

Outcomes = list[tuple["tuple[Client, ...]", "Mishaps"]]


class Mishaps(NamedTuple):
    """What may still go wrong."""

    pauses: int = 0
    kills: int = 0
    replies: int = 0
    wakeups: int = 0
    cancellations: int = 0

    def one_less(self, what: str) -> Mishaps:
        return self._replace(**{what: getattr(self, what) - 1})


class Client(NamedTuple):
    """``at``: trying, joining, trying_again, waiting, leaving_line, held, body, writing, releasing, done, dead."""

    at: str
    rounds: int
    turn: int = 0
    """The owner id: each round has one of its own."""
    token: int = 0
    permit: int = 0
    valid: bool = False
    """Whether it believes that it holds: its deadline is ahead."""
    woken: bool = False


class ShareRow(NamedTuple):
    """One grant in the store."""

    who: int
    turn: int
    permit: int
    token: int


class ShareState(NamedTuple):
    clients: tuple[Client, ...]
    left: Mishaps
    counter: int = 0
    holders: tuple[ShareRow, ...] = ()
    line: tuple[tuple[int, int], ...] = ()
    fences: tuple[tuple[str, object], ...] = ()

    def become(self, who: int, **changes: object) -> ShareState:
        return self._replace(clients=changed(self.clients, who, **changes))


def changed(clients: tuple[Client, ...], who: int, **changes: object) -> tuple[Client, ...]:
    return (*clients[:who], clients[who]._replace(**changes), *clients[who + 1 :])  # type: ignore[arg-type]


ShareStep = tuple[str, "ShareState | str"]
HOLDING = ("held", "body", "writing")


class ShareModel:
    """
    The rules, or a broken variant of them.

    Args:
        kinds: One letter for each client: ``"RRW"``.

        permits: How many permits there are.

        timers: Whether waiters also try by themselves. Without them, a lost wake-up is a waiter that is left.
    """

    def __init__(
        self,
        kinds: str,
        *,
        permits: int = 2,
        rounds: int = 1,
        mishaps: Mishaps | None = None,
        timers: bool = False,
        broken: str = "",
    ) -> None:
        self.kinds, self.permits, self.timers, self.broken = kinds, permits, timers, broken
        self.mishaps = mishaps or Mishaps()
        self.start = ShareState(tuple(Client("trying", rounds) for _ in kinds), self.mishaps)

    def done(self, state: object) -> bool:
        assert isinstance(state, ShareState)
        return all(c.at in {"done", "dead"} for c in state.clients) and not state.holders and not state.line

    def steps(self, state: ShareState) -> Iterator[ShareStep]:
        """Everything that can happen in *state*, each judged by what it leads to."""
        for what, after in self._happens(state):
            yield what, after if isinstance(after, str) else self._judged(after)

    def _happens(self, state: ShareState) -> Iterator[ShareStep]:
        for who, client in enumerate(state.clients):
            name = f"{self.kinds[who]}{who}"
            for what, after in getattr(self, f"_{client.at}")(state, who, client):
                yield f"{name} {what}", after
            if client.valid and state.left.pauses:
                yield f"{name} pauses", state.become(who, valid=False)._replace(left=state.left.one_less("pauses"))
            if state.left.kills and client.at not in {"done", "dead"}:
                dead = Client("dead", 0, client.turn)
                clients = (*state.clients[:who], dead, *state.clients[who + 1 :])
                yield f"{name} is killed", state._replace(clients=clients, left=state.left.one_less("kills"))
        yield from self._expiries(state)

    def _expiries(self, state: ShareState) -> Iterator[ShareStep]:
        for row in state.holders:
            client = state.clients[row.who]
            unaware = client.at in {*HOLDING, "releasing"} and not client.valid
            if client.turn != row.turn or client.at in {"dead", "done"} or unaware or self.broken == "early expiry":
                rest = tuple(other for other in state.holders if other != row)
                yield f"the store ends the grant of {row.who}", state._replace(holders=rest)
        for who, turn in state.line:
            if state.clients[who].at == "dead" or state.clients[who].turn != turn:
                line = tuple(place for place in state.line if place != (who, turn))
                yield f"the store drops {who} from the line", state._replace(line=line)

    # The store.

    def _fits(self, kind: str, holders: tuple[ShareRow, ...]) -> bool:
        if kind == "W":
            return not holders
        if any(self.kinds[row.who] != kind for row in holders):
            return False
        return kind == "R" or len(holders) < self.permits

    def _wake_head(self, state: ShareState) -> Iterator[ShareState]:
        """Wake the head of the line if it fits; or the message is lost."""
        if not state.line:
            yield state
            return
        who, turn = state.line[0]
        client = state.clients[who]
        if client.at == "dead" or client.turn != turn or not self._fits(self.kinds[who], state.holders):
            yield state
            return
        yield state.become(who, woken=True)
        if state.left.wakeups:
            yield state._replace(left=state.left.one_less("wakeups"))

    def _grant(self, state: ShareState, who: int) -> Iterator[tuple[ShareRow, ShareState]]:
        """The store's yes; nothing where it says no."""
        kind, me = self.kinds[who], (who, state.clients[who].turn)
        for row in state.holders:
            if (row.who, row.turn) == me:
                yield row, state
                return
        ahead = state.line[0] if state.line else me
        if ahead != me or not self._fits(kind, state.holders):
            return
        token = state.counter + 1
        if kind == "R" and state.holders and self.broken != "a token for each reader":
            token = state.holders[0].token
        taken = {row.permit for row in state.holders}
        permit = next(number for number in range(self.permits) if number not in taken) if kind == "P" else 0
        row = ShareRow(*me, permit, token)
        granted = state._replace(
            counter=max(state.counter, token),
            holders=tuple(sorted((*state.holders, row))),
            line=tuple(place for place in state.line if place != me),
        )
        if kind == "W" or self.broken == "no chain of wake-ups":
            yield row, granted
        else:
            for after in self._wake_head(granted):
                yield row, after

    # What clients do.

    def _trying(self, state: ShareState, who: int, client: Client) -> Iterator[ShareStep]:
        again = client.at == "trying_again" or self.broken == "no second try"
        granted = list(self._grant(state, who))
        for row, after in granted:
            held = {"at": "held", "token": row.token, "permit": row.permit, "valid": True, "woken": False}
            yield f"is granted {row.token}/{row.permit}", after.become(who, **held)
            if state.left.replies:
                yield "is granted, and the reply is lost", after._replace(left=state.left.one_less("replies"))
        if not granted:
            yield "is refused", state.become(who, at="waiting" if again and client.at != "trying" else "joining")

    _trying_again = _trying

    def _joining(self, state: ShareState, who: int, client: Client) -> Iterator[ShareStep]:
        me = (who, client.turn)
        known = me in state.line or any((row.who, row.turn) == me for row in state.holders)
        joined = state if known else state._replace(line=(*state.line, me))
        then = "waiting" if self.broken == "no second try" else "trying_again"
        yield "joins", joined.become(who, at=then, woken=False)

    def _waiting(self, state: ShareState, who: int, client: Client) -> Iterator[ShareStep]:
        if client.woken or self.timers:
            yield "wakes" if client.woken else "polls", state.become(who, at="trying_again", woken=False)
        if state.left.cancellations:
            left = state.left.one_less("cancellations")
            yield "is cancelled", state.become(who, at="leaving_line")._replace(left=left)

    def _leaving_line(self, state: ShareState, who: int, client: Client) -> Iterator[ShareStep]:
        rest = state._replace(line=tuple(place for place in state.line if place != (who, client.turn)))
        for after in [rest] if self.broken == "left in silence" else self._wake_head(rest):
            yield "leaves the line", after.become(who, at="done", woken=False)

    def _held(self, state: ShareState, who: int, client: Client) -> Iterator[ShareStep]:
        """Raise the fence, before the body begins."""
        if not client.valid:
            yield "finds out", state.become(who, at="releasing")
        elif (fences := self._admitted(state, who, client)) is None:
            yield "raises its fence", "P3: a holder cannot raise its fence"
        else:
            yield "raises its fence", state._replace(fences=fences).become(who, at="body")

    def _body(self, state: ShareState, who: int, client: Client) -> Iterator[ShareStep]:
        if client.valid:
            yield "reads its token", state.become(who, at="writing")
        yield "ends", state.become(who, at="releasing")

    def _writing(self, state: ShareState, who: int, client: Client) -> Iterator[ShareStep]:
        """The write arrives, however late."""
        fences = self._admitted(state, who, client)
        if fences is None and client.valid:
            yield "writes", "P3: the write of a holder is refused"
        elif fences is not None and not client.valid and self._superseded(state, who, client):
            yield "writes", "P3: a stale write is accepted"
        else:
            after = state if fences is None else state._replace(fences=fences)
            yield "writes", after.become(who, at="releasing")

    def _releasing(self, state: ShareState, who: int, client: Client) -> Iterator[ShareStep]:
        rest = tuple(row for row in state.holders if (row.who, row.turn) != (who, client.turn))
        after = state._replace(holders=rest)
        silent = rest == state.holders or (self.broken == "waking only when empty" and rest)
        again = Client("trying", client.rounds - 1, client.turn + 1) if client.rounds > 1 else Client("done", 0)
        for released in [after] if silent else self._wake_head(after):
            yield "releases", released._replace(clients=(*released.clients[:who], again, *released.clients[who + 1 :]))

    def _done(self, _state: ShareState, _who: int, _client: Client) -> Iterator[ShareStep]:
        return iter(())

    _dead = _done

    # The guard, and what must hold.

    def _admitted(self, state: ShareState, who: int, client: Client) -> tuple[tuple[str, object], ...] | None:
        """The fences after the guard has seen this token; None where it refuses."""
        kind, fences = self.kinds[who], dict(state.fences)
        if kind == "P" and self.broken == "the highest tokens":
            highest = sorted({*fences.get("pool", ()), client.token})[-self.permits :]  # type: ignore[misc]
            fences["pool"] = tuple(highest)
            return tuple(sorted(fences.items())) if client.token in highest else None
        resource = "pool" if kind != "P" or self.broken == "one fence for the pool" else f"pool/{client.permit}"
        alike = kind == "R" and self.broken != "a token for each reader"
        fence = (client.token, "readers" if alike else f"{who}.{client.turn}")
        before = fences.get(resource, fence)
        assert isinstance(before, tuple)
        if fence[0] < before[0] or (fence[0] == before[0] and fence[1] != before[1]):
            return None
        fences[resource] = fence
        return tuple(sorted(fences.items()))

    def _superseded(self, state: ShareState, who: int, client: Client) -> bool:
        """Whether a later holder, to which this client's share had to go, has raised its fence."""
        return any(
            other.at in {"body", "writing"}
            and other.token > client.token
            and ("W" in pair or (pair == "PP" and other.permit == client.permit))
            for number, other in enumerate(state.clients)
            if number != who
            for pair in [self.kinds[who] + self.kinds[number]]
        )

    def _judged(self, state: ShareState) -> ShareState | str:
        alive = [(self.kinds[who], c.permit, c.token) for who, c in enumerate(state.clients) if c.valid]
        stored = [(self.kinds[row.who], row.permit, row.token) for row in state.holders]
        return broken_rule(alive, self.permits) or broken_rule(stored, self.permits) or self._left(state) or state

    def _left(self, state: ShareState) -> str:
        """Without mishaps and timers, the head of the line is woken in the step that makes room for it."""
        if self.timers or not state.line or any(self.mishaps._replace(cancellations=0)):
            return ""
        who, turn = state.line[0]
        client = state.clients[who]
        asleep = client.at == "waiting" and client.turn == turn and not client.woken
        return "P8: there is room, and the head sleeps" if asleep and self._fits(self.kinds[who], state.holders) else ""


def broken_rule(holders: list[tuple[str, int, int]], permits: int) -> str:
    """The rule that these holders break together: each is its kind, its permit and its token."""
    kinds = {kind for kind, _, _ in holders}
    if len(holders) > 1 and ("W" in kinds or len(kinds) > 1):
        return "P1: a writer is not alone"
    numbers = [permit for kind, permit, _ in holders if kind == "P"]
    if len(numbers) > permits or len(set(numbers)) < len(numbers):
        return "P1: too many permits"
    if len({token for kind, _, token in holders if kind == "R"}) > 1:
        return "P4: readers that hold together have two tokens"
    return ""
