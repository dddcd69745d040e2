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
    opened: int = 0
    """Of the line, how many at its front are known to be readers, and were woken. Only with ``together``."""
    last: tuple[int, int] = (-1, 0)
    """The last of them, which wakes those behind when it is granted."""
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

        together: How many readers one step wakes, each of which may then be granted out of turn, as on Redis. 0: the
            head alone is woken and granted.
    """

    def __init__(
        self,
        kinds: str,
        *,
        permits: int = 2,
        rounds: int = 1,
        mishaps: Mishaps | None = None,
        timers: bool = False,
        together: int = 0,
        broken: str = "",
    ) -> None:
        self.kinds, self.permits, self.timers, self.broken = kinds, permits, timers, broken
        self.together = together
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
                yield f"the store drops {who} from the line", self._without(state, who, turn)

    # The store.

    def _without(self, state: ShareState, who: int, turn: int) -> ShareState:
        """The state without this waiter in its line."""
        opened = state.opened
        if (who, turn) in state.line[:opened] and self.broken != "numbers are given again":
            opened -= 1
        return state._replace(line=tuple(place for place in state.line if place != (who, turn)), opened=opened)

    def _fits(self, kind: str, holders: tuple[ShareRow, ...]) -> bool:
        if kind == "W":
            return not holders
        if any(self.kinds[row.who] != kind for row in holders):
            return False
        return kind == "R" or len(holders) < self.permits

    def _wake(self, state: ShareState, *, anew: bool = False) -> Iterator[ShareState]:
        """Wake whom there is room for: the head, or readers at the front of the line. *anew*: a writer has ended."""
        if not self.together or not state.line or self.kinds[state.line[0][0]] != "R":
            yield from self._wake_head(state)
        elif self._fits("R", state.holders):
            for woken in [state._replace(opened=0)] if anew else self._wake_head(state):
                yield from self._open(woken)

    def _open(self, state: ShareState) -> Iterator[ShareState]:
        """Wake the readers behind those that were woken, up to the first other waiter; or the message is lost."""
        opened, clients = state.opened, state.clients
        while opened < len(state.line) and self.kinds[state.line[opened][0]] == "R":
            if opened == state.opened + self.together:
                break
            who, turn = state.line[opened]
            if clients[who].at != "dead" and clients[who].turn == turn:
                clients = changed(clients, who, woken=True)
            opened += 1
        if opened == state.opened:
            yield state
            return
        further = state._replace(opened=opened, last=state.line[opened - 1])
        yield further._replace(clients=clients)
        if state.left.wakeups:
            yield further._replace(left=state.left.one_less("wakeups"))

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
        turn = state.line.index(me) if me in state.line else len(state.line)
        if (turn and not self._passes(state, turn)) or not self._fits(kind, state.holders):
            return
        token = state.counter + 1
        if kind == "R" and state.holders and self.broken != "a token for each reader":
            token = state.holders[0].token
        taken = {row.permit for row in state.holders}
        permit = next(number for number in range(self.permits) if number not in taken) if kind == "P" else 0
        row = ShareRow(*me, permit, token)
        granted = self._without(state, *me)._replace(
            counter=max(state.counter, token), holders=tuple(sorted((*state.holders, row)))
        )
        for after in self._chain(state, granted, turn):
            yield row, after

    def _passes(self, state: ShareState, turn: int) -> bool:
        """Whether the one that is *turn* th in the line may be granted before those ahead of it."""
        if self.broken == "out of turn past a writer":
            return bool(self.together) and turn < len(state.line) and self.kinds[state.line[turn][0]] == "R"
        return turn < state.opened

    def _chain(self, before: ShareState, granted: ShareState, turn: int) -> Iterator[ShareState]:
        """Whom a grant wakes: the head; of readers that are woken together, the last wakes those behind."""
        kind = self.kinds[granted.holders[0].who]
        if kind == "W" or self.broken == "no chain of wake-ups":
            yield granted
        elif not self.together or kind != "R":
            yield from self._wake(granted)
        elif turn >= min(before.opened, len(before.line)) or before.line[turn] == before.last:
            yield from self._open(granted)
        else:
            yield granted

    # What clients do.

    def _trying(self, state: ShareState, who: int, client: Client) -> Iterator[ShareStep]:
        again = client.at == "trying_again" or self.broken == "no second try"
        granted = list(self._grant(state, who))
        for row, after in granted:
            if self._ahead(state, who) - {self.kinds[who]}:
                yield "is granted out of turn", "P8: a reader passes a writer that came before it"
            held = {"at": "held", "token": row.token, "permit": row.permit, "valid": True, "woken": False}
            yield f"is granted {row.token}/{row.permit}", after.become(who, **held)
            if state.left.replies:
                yield "is granted, and the reply is lost", after._replace(left=state.left.one_less("replies"))
        for after in [] if granted else self._refuse(state, who):
            yield "is refused", after.become(who, at="waiting" if again and client.at != "trying" else "joining")

    def _refuse(self, state: ShareState, who: int) -> Iterator[ShareState]:
        """A reader that came while readers hold may have only readers before it: it opens the line for itself."""
        me = (who, state.clients[who].turn)
        opens = self.together and self.kinds[who] == "R" and self.broken != "a later reader opens nothing"
        if opens and me in state.line and self._fits("R", state.holders):
            yield from self._open(state)
        else:
            yield state

    def _ahead(self, state: ShareState, who: int) -> set[str]:
        """The kinds of those that stand in the line before this client."""
        me = (who, state.clients[who].turn)
        return {self.kinds[other] for other, _ in state.line[: state.line.index(me)]} if me in state.line else set()

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
        rest = self._without(state, who, client.turn)
        for after in [rest] if self.broken == "left in silence" else self._wake(rest):
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
        for released in [after] if silent else self._wake(after, anew=self.kinds[who] == "W"):
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
        """Whether a later holder, to which this client's share had to go, has raised the same fence."""
        return any(
            other.at in {"body", "writing"}
            and other.token > client.token
            and (pair in {"RW", "WR", "WW"} or (pair == "PP" and other.permit == client.permit))
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
    if len(holders) > 1 and (kinds & {"W", "L"} or len(kinds) > 1):
        return "P1: a writer is not alone"
    numbers = [permit for kind, permit, _ in holders if kind == "P"]
    if len(numbers) > permits or len(set(numbers)) < len(numbers):
        return "P1: too many permits"
    if len({token for kind, _, token in holders if kind == "R"}) > 1:
        return "P4: readers that hold together have two tokens"
    return ""
