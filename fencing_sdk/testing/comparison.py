"""
A store beside the rules of `fencing_sdk.abc.line`: random verbs of several clients, compared answer by answer.

Tokens are compared by their order and equality, since each store draws its own. Where a test can set the store's clock,
tickets die in the histories too.
"""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fencing_sdk._values.claim import HELD, LOCK, READER, WRITER, Busy, Claim, Mode, Permit, Place
from fencing_sdk.abc import WAITER_TTL, Backend, PassesOn
from fencing_sdk.abc.line import Line

_VERBS = ("draw",) * 4 + ("try", "keep", "keep", "keep", "give", "give", "park", "end", "pass", "look")
_MODES = ("lock", "lock", "writer", "reader", "reader", "permit", "permit")
_NEAR = 0.002
"""Seconds by which a store may round on a clock that is set by hand."""


class TooSlowError(Exception):
    """The machine stood still for so long that tickets died by the clock of the store. The history shows nothing."""


@dataclass
class Comparison:
    """
    One history of one name.

    What the stores cannot do is left out of it: waiting, modes, `PassesOn`.

    Args:
        stores: Clients of one store. The requests of an owner go through one of them.

        seed: Decides the history.

        set_clock: Sets the clock of the store, in seconds; it may be awaitable. None if the clock runs by itself: then
            no ticket dies.

        sets_back: The clock is also set back.

        verbs: The verbs to play: ``draw``, ``try``, ``keep``, ``give``, ``park``, ``end``, ``pass``, ``look``.

        modes: The words of the modes that are drawn.

        passes_on: False leaves `PassesOn.pass_on` out.

        redraws: False: no owner draws again while a ticket stays that it has given back for later.
    """

    stores: Sequence[Backend]
    seed: int
    set_clock: Callable[[float], object] | None = None
    sets_back: bool = True
    passes_on: bool = True
    redraws: bool = True
    modes: Sequence[str] = _MODES
    verbs: Sequence[str] = _VERBS
    pairs: dict[int, int] = field(default_factory=dict, init=False)
    """The token of the rules -> the token of the store."""
    log: list[str] = field(default_factory=list, init=False)
    """The verbs so far."""

    async def play(self, most: int = 60) -> int:
        """
        Play it, with at most so many verbs; return how many were compared.

        Raises:
            AssertionError: an answer differs. It names the seed and the last verbs.
            TooSlowError: the clock runs by itself, and the machine stood still.
        """
        begun = time.monotonic()
        try:
            return await self._play(most)
        except AssertionError as error:
            if self.set_clock is None and time.monotonic() - begun > WAITER_TTL / 2:
                raise TooSlowError from error
            raise

    async def _play(self, most: int) -> int:
        dice, now, line = random.Random(self.seed), 500_000.0, Line(lambda last: last + 1)
        name = f"compared/{self.seed}"
        claims = self._claims(name, dice)
        numbers: dict[str, int] = {}
        steps = dice.randrange(5, most)
        if self.set_clock is not None:
            await self._set(now)
        for _ in range(steps):
            if self.set_clock is not None:
                back = (-2.0, -3600.0) if self.sets_back and dice.random() < 0.05 else ()
                now += dice.choice((0, 0, 0, 0.125, 0.5, 1, 3, 9, *back * 20))
                await self._set(now)
            claim, verb = dice.choice(claims), dice.choice(self._played())
            store = self.stores[int(claim.owner[-1], 16) % len(self.stores)]
            if verb in {"draw", "try"} and not self.redraws and f"-{claim.owner}" in line.rows:
                verb = "look"
            self.log.append(f"{now:.3f} {verb} {claim.owner[-1]} {claim.mode.word} {claim.ttl:g}")
            if verb == "end":
                await self._look(store, line, name, now)  # which tokens were drawn meanwhile
            if verb == "pass":
                heir = dice.choice(claims)
                heir = Claim(name, heir.ttl, heir.owner, heir.label, claim.mode)
                assert isinstance(store, PassesOn)
                theirs, ours = await store.pass_on(claim, heir), line.pass_on(claim.owner, heir, now)
                claim = heir
            elif verb == "look":
                await self._look(store, line, name, now)
                continue
            else:
                theirs, ours = await self._step(
                    verb, claim, store, line, now=now, dice=dice, known=numbers.get(claim.owner, 0)
                )
            line.rung.clear()
            if isinstance(theirs, Place) and theirs != HELD:
                numbers[claim.owner] = theirs.number
            self._equal(theirs, ours)
        for claim in claims:
            await self.stores[0].give_back(claim)
        return steps

    def _claims(self, name: str, dice: random.Random) -> list[Claim]:
        modes = [word for word in self.modes if word in self.stores[0].modes]
        claims = []
        for number in range(dice.randrange(3, 9)):
            ttl = dice.choice((2.0, 7.0, 9.0)) * (1 if self.set_clock is not None else 10)
            word = dice.choice(modes)
            mode: Mode = {"lock": LOCK, "writer": WRITER, "reader": READER}.get(word) or Permit(dice.choice((1, 2, 3)))
            owner = f"{self.seed:08x}{number:024x}"
            claims.append(Claim(name, ttl, owner, dice.choice((None, "\u00e9")), mode))
        return claims

    def _played(self) -> Sequence[str]:
        store = self.stores[0]
        played = [verb for verb in self.verbs if verb != "pass" or (self.passes_on and isinstance(store, PassesOn))]
        return played if store.rings else ["try" if verb == "draw" else verb for verb in played]

    async def _set(self, now: float) -> None:
        assert self.set_clock is not None
        moved = self.set_clock(now)
        if inspect.isawaitable(moved):
            await moved

    async def _step(
        self, verb: str, claim: Claim, store: Backend, line: Line, *, now: float, dice: random.Random, known: int
    ) -> tuple[Any, Any]:
        """Carry a verb out, in the store and by the rules."""
        if verb in {"draw", "try"}:
            only = verb == "try"
            theirs: Any = await store.draw(claim, only_if_it_holds=only)
            return theirs, line.draw(claim, now, only_if_it_holds=only)
        if verb == "keep":
            mine = next((row.number for row in line.rows.values() if row.owner == claim.owner), 0)
            ours, asked = (0, 0) if dice.random() < 0.5 else (mine, known if mine else 0)
            (theirs,) = await store.keep([(claim, asked)])
            return theirs, line.keep(claim, now, ours)
        if verb in {"give", "park"}:
            after = claim.ttl if verb == "park" else 0.0
            return await store.give_back(claim, after=after), line.give_back(claim.owner, now, after)
        assert verb == "end", verb
        held = [row.token for row in line.rows.values() if row.token is not None]
        token = dice.choice(held) if held else 7
        return await store.end(claim.name, self.pairs.get(token, 7), "why"), bool(line.end(token, "why", now))

    async def _look(self, store: Backend, line: Line, name: str, now: float) -> None:
        (theirs,) = await store.tickets([name])
        ours = line.seen(now)
        line.rung.clear()
        assert len(theirs) == len(ours), self._text(theirs, ours)
        for one, other in zip(theirs, ours, strict=True):
            self._token(one.token, other.token)
            same = one._replace(token=None, remaining=0, since=0) == other._replace(token=None, remaining=0, since=0)
            assert same, self._text(one, other)
            if self.set_clock is not None:
                self._near(one.remaining, other.remaining)

    def _equal(self, theirs: Any, ours: Any) -> None:
        assert type(theirs) is type(ours), self._text(theirs, ours)
        if isinstance(ours, Place):
            if theirs.token != HELD.token:
                self._token(theirs.token, ours.token)
                assert theirs.permit == ours.permit, self._text(theirs, ours)
            self._near(theirs.look_after, ours.look_after)
        elif isinstance(ours, Busy):
            self._near(theirs.look_after, ours.look_after)
        else:
            assert theirs == ours, self._text(theirs, ours)

    def _near(self, theirs: float | None, ours: float | None) -> None:
        if self.set_clock is not None and theirs != ours:
            assert theirs is not None, self._text(theirs, ours)
            assert ours is not None, self._text(theirs, ours)
            assert abs(theirs - ours) < _NEAR, self._text(theirs, ours)

    def _token(self, theirs: int | None, ours: int | None) -> None:
        if ours is None or theirs is None:
            assert theirs is ours, self._text(theirs, ours)
            return
        if ours not in self.pairs:
            higher = max([token for mine, token in self.pairs.items() if mine < ours], default=-1)
            assert theirs > higher, self._text(theirs, ours)
            self.pairs[ours] = theirs
        assert self.pairs[ours] == theirs, self._text(theirs, ours)

    def _text(self, theirs: object, ours: object) -> str:
        return "\n".join([f"seed {self.seed}: {theirs} and not {ours}", *self.log[-12:]])
