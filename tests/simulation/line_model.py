"""
Permits, readers and writers on a store with a line of keys, where each client decides by what it sees: etcd, ZooKeeper.

A client puts a key of its own in the line, and looks. Its token is its place: the revision that created the key. The
rules of the package, `node_line`, decide whether its turn has come, and which key it watches. When its turn has come it
may have to take a second step, which the store makes only while the client's key lives: a reader puts the phase, with
its place, if there is none; a permit writes a number into its key; and each but a reader deletes the phase.

The phase key belongs to no lease. A lease that ends takes away the client's key, and its number with it. A waiter looks
again when a key that it watches has changed. A watch misses nothing that has changed since the look.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fencing_sdk.abc import LOCK, READER, WRITER, Mode, Permit
from fencing_sdk.backends._shared.node_line import Permits, rival_of
from fencing_sdk.backends._shared.rules import free_permit

NO_NUMBER = -1


class Mishaps(NamedTuple):
    """Mishaps that may still come."""

    pauses: int = 0
    kills: int = 0
    cancellations: int = 0

    def one_less(self, what: str) -> Mishaps:
        return self._replace(**{what: getattr(self, what) - 1})


class LineClient(NamedTuple):
    """``at``: joining, looking, waiting, drawing, held, body, writing, ending, done, dead."""

    at: str
    rounds: int
    turn: int = 0
    token: int = 0
    permit: int = 0
    valid: bool = False
    watched: tuple[tuple[int, int], ...] = ()
    """The keys that it watches: when each was created, and the number that it had."""


class LineKey(NamedTuple):
    who: int
    turn: int
    created: int
    kind: str
    number: int = NO_NUMBER

    @property
    def shared(self) -> str:
        return {"R": "reader", "P": "permit"}.get(self.kind, "")

    @property
    def permit(self) -> int | None:
        return None if self.number == NO_NUMBER else self.number


class LineState(NamedTuple):
    clients: tuple[LineClient, ...]
    left: Mishaps
    revision: int = 0
    line: tuple[LineKey, ...] = ()
    phase: int = 0
    fences: tuple[tuple[str, tuple[int, str]], ...] = ()

    def become(self, who: int, **changes: object) -> LineState:
        client = self.clients[who]._replace(**changes)  # type: ignore[arg-type]
        return self._replace(clients=(*self.clients[:who], client, *self.clients[who + 1 :]))

    def without(self, who: int, turn: int) -> LineState:
        """The store after the keys of one owner are gone."""
        return self._replace(
            revision=self.revision + 1,
            line=tuple(key for key in self.line if key[:2] != (who, turn)),
        )


LineStep = tuple[str, "LineState | str"]


class LineModel:
    """
    The rules, or a broken variant of them. ``kinds`` and ``permits`` as for `ShareModel`.

    With *one_fence*, permits are fenced by the name as all others are: there must be one permit then.
    """

    def __init__(
        self,
        kinds: str,
        *,
        permits: int = 2,
        rounds: int = 1,
        mishaps: Mishaps | None = None,
        one_fence: bool = False,
        broken: str = "",
    ) -> None:
        self.kinds, self.permits, self.one_fence, self.broken = kinds, permits, one_fence, broken
        self.start = LineState(tuple(LineClient("joining", rounds) for _ in kinds), mishaps or Mishaps())

    def done(self, state: object) -> bool:
        assert isinstance(state, LineState)
        return all(client.at in {"done", "dead"} for client in state.clients) and not state.line

    def steps(self, state: LineState) -> Iterator[LineStep]:
        """Everything that can happen in *state*, each judged by what it leads to."""
        for what, after in self._happens(state):
            yield what, after if isinstance(after, str) else self._judged(after)

    def _happens(self, state: LineState) -> Iterator[LineStep]:
        for who, client in enumerate(state.clients):
            name = f"{self.kinds[who]}{who}"
            for what, after in getattr(self, f"_{client.at}")(state, who, client):
                yield f"{name} {what}", after
            left = state.left
            if client.valid and left.pauses:
                yield f"{name} pauses", state.become(who, valid=False)._replace(left=left.one_less("pauses"))
            if client.at in {"looking", "drawing"} and left.pauses:
                gone = state.without(who, client.turn)._replace(left=left.one_less("pauses"))
                yield f"{name} stands still, and its lease ends", gone
            if left.kills and client.at not in {"done", "dead"}:
                dead = state.become(who, at="dead", valid=False, token=0, permit=0)
                yield f"{name} is killed", dead._replace(left=left.one_less("kills"))
        for key in state.line:
            client = state.clients[key.who]
            unaware = client.at in {"held", "body", "writing", "ending"} and not client.valid
            if client.at == "dead" or client.turn != key.turn or unaware:
                yield f"the lease of {key.who} ends", state.without(key.who, key.turn)

    # What a client sees.

    def _ahead(self, state: LineState, who: int) -> list[LineKey] | None:
        """The keys before its own; None when its own is gone."""
        mine = [key[:2] for key in state.line].index((who, state.clients[who].turn)) if self._lives(state, who) else -1
        return list(state.line[:mine]) if mine >= 0 else None

    @staticmethod
    def _lives(state: LineState, who: int) -> bool:
        return any(key[:2] == (who, state.clients[who].turn) for key in state.line)

    def _mode(self, who: int) -> Mode:
        return {"R": READER, "W": WRITER, "L": LOCK}.get(self.kinds[who]) or Permit(self.permits)

    def _may(self, who: int, ahead: list[LineKey]) -> bool:
        if self.broken == "a number beside a waiter" and self.kinds[who] == "P":
            return len(ahead) < self.permits
        return rival_of(self._mode(who), ahead) is None

    def _to_watch(self, who: int, ahead: list[LineKey]) -> tuple[tuple[int, int], ...]:
        rival = rival_of(self._mode(who), ahead)
        if self.broken in {"a reader watches the key before it", "a permit watches the key before it"}:
            rival = ahead[-1]
        watched = ahead if isinstance(rival, Permits) else [rival]
        return tuple((key.created, key.number) for key in watched if key is not None)

    # What clients do.

    def _joining(self, state: LineState, who: int, client: LineClient) -> Iterator[LineStep]:
        key = LineKey(who, client.turn, state.revision + 1, self.kinds[who])
        yield "joins", state._replace(revision=key.created, line=(*state.line, key)).become(who, at="looking")

    def _looking(self, state: LineState, who: int, client: LineClient) -> Iterator[LineStep]:
        ahead = self._ahead(state, who)
        if ahead is None:
            yield "finds its key gone", state.become(who, at="ending")
        elif not self._may(who, ahead):
            yield "has to wait", state.become(who, at="waiting", watched=self._to_watch(who, ahead))
        elif self.kinds[who] == "R" and state.phase:
            yield "joins the phase", self._held_with(state, who, state.phase)
        elif self.kinds[who] in "WL" and not (state.phase and self.broken != f"a phase outlives {self.kinds[who]}"):
            place = next(key.created for key in state.line if key[:2] == (who, client.turn))
            yield "has its place as token", self._held_with(state, who, place)
        else:
            free = free_permit(self._mode(who), {key.permit for key in ahead})
            yield "sees its turn", state.become(who, at="drawing", permit=free or 0)

    def _waiting(self, state: LineState, who: int, client: LineClient) -> Iterator[LineStep]:
        if not self._lives(state, who) or self._sees_a_change(state, client):
            yield "looks again", state.become(who, at="looking", watched=())
        if state.left.cancellations:
            left = state.left.one_less("cancellations")
            yield "is cancelled", state.become(who, at="ending", watched=())._replace(left=left)

    @staticmethod
    def _sees_a_change(state: LineState, client: LineClient) -> bool:
        return not set(client.watched) <= {(key.created, key.number) for key in state.line}

    def _drawing(self, state: LineState, who: int, client: LineClient) -> Iterator[LineStep]:
        if not self._lives(state, who) and self.broken != "drawn without a look at the own key":
            yield "finds its key gone", state.become(who, at="ending")
            return
        new, kind = state.revision + 1, self.kinds[who]
        own = next((key for key in state.line if key[:2] == (who, client.turn)), LineKey(who, client.turn, new, kind))
        if kind == "R":
            begun = new if self.broken == "a phase is drawn" else own.created
            after = state._replace(revision=new, phase=state.phase or begun)
            yield f"has the phase {after.phase}", self._held_with(after, who, after.phase)
            return
        line = tuple(key._replace(number=client.permit) if key == own and kind == "P" else key for key in state.line)
        phase = state.phase if self.broken == f"a phase outlives {kind}" else 0
        after = state._replace(revision=new, line=line, phase=phase)
        yield f"is granted with {own.created}", self._held_with(after, who, own.created, client.permit)

    @staticmethod
    def _held_with(state: LineState, who: int, token: int, permit: int = 0) -> LineState:
        return state.become(who, at="held", token=token, permit=permit, valid=True)

    def _held(self, state: LineState, who: int, client: LineClient) -> Iterator[LineStep]:
        if not client.valid:
            yield "finds out", state.become(who, at="ending")
        elif (fences := self._admitted(state, who, client)) is None:
            yield "raises its fence", "P3: a holder cannot raise its fence"
        else:
            yield "raises its fence", state._replace(fences=fences).become(who, at="body")

    def _body(self, state: LineState, who: int, client: LineClient) -> Iterator[LineStep]:
        if client.valid:
            yield "reads its token", state.become(who, at="writing")
        yield "ends", state.become(who, at="ending")

    def _writing(self, state: LineState, who: int, client: LineClient) -> Iterator[LineStep]:
        fences = self._admitted(state, who, client)
        if fences is None and client.valid:
            yield "writes", "P3: the write of a holder is refused"
        elif fences is not None and not client.valid and self._superseded(state, who, client):
            yield "writes", "P3: a stale write is accepted"
        else:
            after = state if fences is None else state._replace(fences=fences)
            yield "writes", after.become(who, at="ending")

    def _ending(self, state: LineState, who: int, client: LineClient) -> Iterator[LineStep]:
        turn, rounds = client.turn, client.rounds
        again = LineClient("joining", rounds - 1, turn + 1) if rounds > 1 else LineClient("done", 0, turn)
        gone = state.without(who, turn)
        yield "deletes its keys", gone._replace(clients=(*gone.clients[:who], again, *gone.clients[who + 1 :]))

    def _done(self, _state: LineState, _who: int, _client: LineClient) -> Iterator[LineStep]:
        return iter(())

    _dead = _done

    # The guard, and what must hold.

    def _admitted(
        self, state: LineState, who: int, client: LineClient
    ) -> tuple[tuple[str, tuple[int, str]], ...] | None:
        fences = dict(state.fences)
        resource = f"pool/{client.permit}" if self.kinds[who] == "P" and not self.one_fence else "pool"
        fence = (client.token, "readers" if self.kinds[who] == "R" else f"{who}.{client.turn}")
        before = fences.get(resource, fence)
        if fence[0] < before[0] or (fence[0] == before[0] and fence[1] != before[1]):
            return None
        fences[resource] = fence
        return tuple(sorted(fences.items()))

    def _superseded(self, state: LineState, who: int, client: LineClient) -> bool:
        return any(
            other.at in {"body", "writing"}
            and other.token > client.token
            and (len(set(pair)) == 2 or pair in {"WW", "LL"} or (pair == "PP" and other.permit == client.permit))
            for number, other in enumerate(state.clients)
            if number != who
            for pair in [self.kinds[who] + self.kinds[number]]
        )

    def _judged(self, state: LineState) -> LineState | str:
        alive = [(self.kinds[who], c.permit, c.token) for who, c in enumerate(state.clients) if c.valid]
        return broken_rule(alive, self.permits) or self._left(state) or state

    def _left(self, state: LineState) -> str:
        """A waiter that may go on has a watch that tells it so."""
        for who, client in enumerate(state.clients):
            if client.at == "waiting" and not self._sees_a_change(state, client):
                ahead = self._ahead(state, who)
                if ahead is not None and self._may(who, ahead):
                    return "P8: there is room, and a waiter watches what does not tell it"
        return ""


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
