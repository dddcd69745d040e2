"""
The rules of a line in random histories: deaths, lost and late messages, clock steps, and owners that come back.

``python -m tests.simulation.ticket_model [histories] [first seed]``. Each of `FAULTS` must be caught.

A client of the model does what an engine has to do, and no more:
* A new owner for each acquisition; the same owner for its retries. A deadline counts from the **sending** of the latest
  draw or keep that was answered, plus ttl, less the drift of the two clocks; an answer after it is not used.
* It believes that it holds from an answer (or a bell) with a token until its deadline, its give_back, or `Gone`.
* A request may be lost, may arrive up to `LATE` seconds later, also after the give_back, and also twice. Replies too.
* A bell may be lost. A client may die at any step: it says nothing more, but it goes on believing until its deadline.
* The store's clock may be set back by up to an hour. (Set forward, every lease with a store's clock breaks: see P1.)

Checked at each moment: nobody believes to hold beside somebody incompatible; at most `width` permits, with different
slots; a token, once believed, is above all that were believed before by a ticket that begins to hold later, or, of
readers who hold together, the same; no owner holds with two tokens. At the end: every living ticket was served, in the
order in which the store drew them among those that lived; after a ttl nothing stays behind.
"""

from __future__ import annotations

import heapq
import random
import sys
from contextlib import contextmanager

from fencing_sdk.abc import LOCK, READER, WAITER_TTL, WRITER, Claim, Gone, Permit, Place
from fencing_sdk.abc.line import Line

TTLS, LATE, DRIFT = (2.0, 5.0, 9.0), 4.0, 0.01
NAME = "n"
KINDS = ("lock", "lock", "writer", "reader", "reader", "permit", "permit")


class World:
    def __init__(self, seed: int, hybrid: bool) -> None:
        self.r = random.Random(seed)
        self.seed, self.time, self.offset, self.serial = seed, 0.0, 5000.0, 0
        ticks = lambda last: max(last + 1, int((self.time + self.offset) * 10)) if hybrid else last + 1  # noqa: E731
        self.line = Line(ticks)
        self.events: list[tuple[float, int, object]] = []
        self.clients: list[Client] = []
        self.grants: list[tuple[int, str, str]] = []  # in the order in which the store gave them
        self.served = 0
        self.setbacks = 0
        self.longest = 0.0

    def now(self) -> float:
        return self.time + self.offset

    def at(self, delay: float, do) -> None:
        self.serial += 1
        heapq.heappush(self.events, (self.time + delay, self.serial, do))

    def delay(self) -> float:
        return self.r.choice((0.0, 0.001, 0.01, 0.1, self.r.uniform(0, 1), self.r.uniform(0, LATE)))

    def send(self, do, answer) -> None:
        """Carry out *do* at the store, perhaps late, perhaps twice, perhaps never; then *answer*, perhaps never."""
        sent = self.time
        if self.r.random() < 0.08:
            return

        def arrives() -> None:
            said = do()
            woken = len(self.line.rung)
            self.line.settle(self.now())
            assert len(self.line.rung) == woken, f"{self.seed}: nobody let {self.line.rung[woken:]} hold"
            self.ring()
            if self.r.random() > 0.08:
                self.at(self.delay(), lambda: answer(said, sent))

        self.at(self.delay(), arrives)
        if self.r.random() < 0.05:
            self.at(self.delay(), lambda: (do(), self.ring()))

    def ring(self) -> None:
        rung, self.line.rung = self.line.rung, []
        for row in rung:
            self.grants.append((row.token, row.owner, row.mode.word))
            assert row.number > self.served, f"{self.seed}: served out of order: {row}"
            self.served = row.number
            client = next((one for one in self.clients if one.claim.owner == row.owner), None)
            if client is not None and self.r.random() > 0.2:
                place = Place(row.token, row.permit, row.number)
                self.at(self.delay(), lambda client=client, place=place: client.bell(place))

    def keep(self, claim: Claim) -> object:
        owner = claim.owner
        row, now = self.line.rows.get(owner), self.now()
        dead = row is None or min(row.dies, now + row.longest) <= now
        said = self.line.keep(claim, now)
        assert isinstance(said, Gone) == dead, f"{self.seed}: {owner} was dead: {dead}, and is {said}"
        return said

    def check(self) -> None:
        holding = [one for one in self.clients if one.believes()]
        kinds = {one.claim.mode.word for one in holding}
        if len(holding) > 1:
            assert kinds in ({"reader"}, {"permit"}), f"{self.seed}: two hold: {holding}"
        if kinds == {"permit"}:
            slots = [one.place.permit for one in holding]
            assert len(set(slots)) == len(slots), f"{self.seed}: a slot twice: {holding}"
            assert len(holding) <= max(one.claim.mode.width for one in holding), f"{self.seed}: too many: {holding}"
        if kinds == {"reader"}:
            assert len({one.place.token for one in holding}) == 1, f"{self.seed}: readers differ: {holding}"

    def run(self) -> int:
        r = self.r
        for number in range(r.randrange(3, 12)):
            self.at(r.uniform(0, 12), lambda number=number: Client(self, number).begin())
        for _ in range(r.choice((0, 0, 1))):
            self.at(r.uniform(1, 20), self.set_back)
        for _ in range(r.choice((0, 0, 1, 2))):
            self.at(r.uniform(1, 20), self.operator)
        steps = 0
        while self.events and steps < 200_000:
            self.time, _, do = heapq.heappop(self.events)
            do()
            self.check()
            steps += 1
        self.settled()
        return steps

    def set_back(self) -> None:
        self.offset -= self.r.choice((0.5, 3.0, 10.0, 3600.0))
        self.setbacks += 1

    def operator(self) -> None:
        held = [row for row in self.line.settle(self.now()) if not row.owner.startswith("-")]
        self.ring()
        if held:
            token = self.r.choice(held).token
            over = self.line.end(token, "ended", self.now())
            self.ring()
            for client in self.clients:
                if any(row.owner == client.claim.owner for row in over):
                    client.ended = True  # by itself: until it hears of it, an operator breaks exclusion on purpose

    def settled(self) -> None:
        last = -1
        shared: str = ""
        for token, _, kind in self.grants:
            assert token > last or (token == last and kind == "reader" == shared), f"{self.seed}: tokens {self.grants}"
            last, shared = token, kind
        for client in self.clients:
            assert client.state in {"done", "dead"}, f"{self.seed}: {client} was never served"
        assert not self.events, f"{self.seed}: it never ends"
        self.line.settle(self.now())  # after a clock was set back, a life is bounded from the next look on
        self.time += max(TTLS) + self.longest + 0.1
        seen = self.line.seen(self.now())
        assert not seen, f"{self.seed}: left behind {seen}"
        place = self.line.draw(Claim(NAME, 1.0, "last"), self.now())
        assert isinstance(place, Place), f"{self.seed}: {place}"
        assert (place.token or 0) > last, f"{self.seed}: {place}"
        self.line.give_back("last", self.now())
        assert not self.line.rows


class Client:
    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        r = world.r
        kind = r.choice(KINDS)
        width = r.choice((2, 2, 3))
        self.mode = {"lock": LOCK, "writer": WRITER, "reader": READER}.get(kind) or Permit(width)
        self.ttl = r.choice(TTLS)
        self.drift = r.uniform(1 - DRIFT / 2, 1 + DRIFT / 2)
        self.comes_back = r.random() < 0.3
        self.tries_only = r.random() < 0.2
        self.dies_at = r.uniform(0.1, 15) + world.time if r.random() < 0.2 else float("inf")
        self.state, self.lives = "", 0

    def __repr__(self) -> str:
        who = f"{self.number}.{self.lives} {self.mode.word}/{self.mode.width}"
        return f"{who} {self.state} {self.place} until {self.deadline:.2f}"

    def begin(self) -> None:
        self.lives += 1
        self.claim = Claim(NAME, self.ttl, f"{self.number}.{self.lives}", None, self.mode)
        self.state, self.place, self.deadline, self.ended, self.drawn = "waits", None, -1.0, False, 0
        self.over_at = float("inf")
        self.holds_until = self.world.time + self.world.r.uniform(0.1, 12)
        if self not in self.world.clients:
            self.world.clients.append(self)
        self.beat()

    def believes(self) -> bool:
        return self.place is not None and not self.ended and self.world.time < min(self.deadline, self.over_at)

    def beat(self) -> None:
        """Draw while it is not known to have a ticket; then keep. Until it dies or gives back."""
        world, mine = self.world, self.lives
        if self.state in {"done", "dead"} or self.lives != mine:
            return
        if world.time >= self.dies_at:
            self.state = "dead"
            return
        if self.place is not None and (world.time >= self.deadline or world.time >= self.holds_until):
            self.finish()
            return
        claim, only = self.claim, self.tries_only
        if self.place is None:
            do = lambda: world.line.draw(claim, world.now(), only_if_it_holds=only)  # noqa: E731
        else:
            do = lambda: world.keep(claim)  # noqa: E731
        world.send(do, lambda said, sent: self.lives == mine and self.answered(said, sent))
        world.at(min(self.ttl, WAITER_TTL) / 5, lambda: self.lives == mine and self.beat())

    def answered(self, said, sent: float) -> None:  # noqa: C901  (a case for each answer)
        if self.state in {"done", "dead"}:
            return
        waits = isinstance(said, Place) and said.token is None
        lives = min(self.ttl, WAITER_TTL) if waits else self.ttl
        deadline = sent + lives * (1 - DRIFT) / self.drift
        if isinstance(said, Place) and said.number < self.drawn:
            return  # about a ticket that has died since
        if isinstance(said, Place):
            self.drawn = said.number
        if isinstance(said, Place) and self.place is not None and said.number != self.place.number:
            assert not self.believes(), f"{self.world.seed}: {self} has another ticket {said}"
            self.finish(gone=True)
        elif isinstance(said, Place) and said.token is not None:
            if self.place is not None and self.world.time >= self.deadline:
                return  # it was lost before: a late answer revives nothing
            if self.world.time < deadline:
                if self.place is not None:
                    assert self.place.token == said.token, f"{self.world.seed}: {self} has another token {said}"
                else:
                    self.holds_until = self.world.time + self.world.r.uniform(0.1, 12)
                self.place, self.deadline = said, max(self.deadline, deadline)
        elif isinstance(said, Place):
            self.deadline = max(self.deadline, deadline)  # an older answer, if it holds already: holding is for good
        elif isinstance(said, Gone) and self.place is not None:
            if self.believes() and not self.ended:
                raise AssertionError(f"{self.world.seed}: {self} is gone, before its deadline")
            self.finish(gone=True)

    def bell(self, place: Place) -> None:
        """What a bell says counts from the last answered draw, which is in `deadline`."""
        if place.number != self.drawn:  # of a ticket that died before this one was drawn
            return
        if self.state == "waits" and self.place is None and self.world.time < self.deadline and not self.tries_only:
            self.place = place
            self.holds_until = self.world.time + self.world.r.uniform(0.1, 12)

    def finish(self, *, gone: bool = False) -> None:
        world, owner = self.world, self.claim.owner
        self.over_at = world.time
        self.state = "done"
        after = world.r.choice((0.0, 0.0, 0.0, world.r.uniform(0.5, 20)))
        if gone:
            after = 0.0
        world.longest = max(world.longest, after)
        for pause in (0.0, LATE, 2 * LATE):  # at once, and again when no request can arrive any more
            world.at(
                pause, lambda: world.send(lambda: world.line.give_back(owner, world.now(), after), lambda *_: None)
            )
        if self.comes_back and self.lives < 3:
            world.at(world.r.uniform(0, 3), self.begin)


# Planted faults: the rules with one line wrong.


@contextmanager
def planted(cls: type, name: str, fault):
    good = getattr(cls, name)
    setattr(cls, name, fault(good))
    try:
        yield
    finally:
        setattr(cls, name, good)


def _revives(good):
    def keep(self, claim, now, number=0):
        row = self.rows.get(claim.owner)
        if row is not None and row.dies <= now:
            row.dies = now + claim.ttl  # whoever asks, lives
        return good(self, claim, now, number)

    return keep


def _recalls(good):
    def living(self, owner, now):  # a death is judged anew at each look, and not written down
        row = self.rows.get(owner)
        return row if row is not None and row.dies > now else None

    return living


def _ahead(good):
    def draw(self, claim, now, **more):
        place = good(self, claim, now, **more)
        if claim.owner in self.rows and self.rows[claim.owner].token is None:
            row = self.rows.pop(claim.owner)
            self.rows = {claim.owner: row, **self.rows}
        return place

    return draw


def _silent(good):
    def give_back(self, owner, now, after=0.0):
        if after <= 0 and self._living(owner, now) is not None:
            del self.rows[owner]  # and nobody is told
            return None
        return good(self, owner, now, after)

    return give_back


def _forgets(good):
    def settle(self, now):
        if not self.rows or all(row.token is None for row in self.rows.values()):
            self.last = 0
        return good(self, now)

    return settle


def _shortens(good):
    def keep(self, claim, now, number=0):
        row = self._living(claim.owner, now)
        if row is not None:
            row.dies = now + min(claim.ttl, WAITER_TTL)  # as of a waiter
            return self._place(row, now)
        return good(self, claim, now, number)

    return keep


def _own_token(good):
    def settle(self, now):
        before = {owner for owner, row in self.rows.items() if row.token is not None}
        held = good(self, now)
        for row in held:
            if row.owner not in before and row.mode.word == "reader" and len(held) > 1:
                row.token = self.last = self.next_token(self.last)
        return held

    return settle


def _comes_back(good):
    graves = {}

    def keep(self, claim, now, number=0):
        place, owner = good(self, claim, now, number), claim.owner
        if isinstance(place, Place):
            graves[id(self), owner] = self.rows[owner]
        elif (row := graves.get((id(self), owner))) is not None and owner not in self.ended:
            row.dies = now + claim.ttl
            self.rows = {owner: row, **self.rows}
            return Place(row.token, row.permit, row.number)
        return place

    return keep


def _of_any_number(good):
    def bell(self, place):
        good(self, place._replace(number=self.drawn))

    return bell


FAULTS = {
    "a bell that is taken for one of another ticket": (Client, "bell", _of_any_number),
    "a keep that brings back who was passed over": (Line, "keep", _comes_back),
    "a keep that revives": (Line, "keep", _revives),
    "a death that is not written down": (Line, "_living", _recalls),
    "a draw that puts ahead": (Line, "draw", _ahead),
    "a give_back that lets nobody hold, so that nobody is woken": (Line, "give_back", _silent),
    "a token counter that forgets": (Line, "settle", _forgets),
    "a keep that shortens": (Line, "keep", _shortens),
    "readers with tokens of their own": (Line, "settle", _own_token),
}


def play(histories: range) -> int:
    """Play these seeds, and return how many steps that took."""
    return sum(World(seed, hybrid=seed % 2 == 0).run() for seed in histories)


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    histories, first = (*numbers, *(3000, 0)[len(numbers) :])
    sys.stdout.write(f"ok: {histories} histories, {play(range(first, first + histories))} steps\n")
