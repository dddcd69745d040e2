"""Two clients of one store, on which the promises about its verbs are played."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
from collections.abc import Awaitable, Callable, Sequence

import pytest

from fencing_sdk._values.claim import HELD, LOCK, READER, WRITER, Busy, Claim, Gone, Mode, Permit, Place, Seen
from fencing_sdk.abc import Backend, News, PassesOn
from fencing_sdk.testing.promises.under_test import LONG, TRIES, BackendUnderTest, Reopen

_MODES = {"lock": LOCK, "writer": WRITER, "reader": READER}


class BellLog(list[News]):
    """The news that a bell has rung."""

    stop: Callable[[], object]

    @property
    def held(self) -> list[Place]:
        """News that the ticket holds."""
        return [news for news in self if isinstance(news, Place) and news.token is not None]


class Stage:
    """Two clients of one store, and a name."""

    def __init__(self, suite: BackendUnderTest, a: Backend, b: Backend) -> None:
        self.a, self.b = a, b
        self._numbers = itertools.count(100)
        self._suite = suite
        self.name = self.fresh()

    def fresh(self, stem: str = "invoices/") -> str:
        """Make a name that no ticket has had."""
        return f"{stem}{next(self._numbers)}"

    async def death(self) -> None:
        """Let a ticket of the suite's ttl die."""
        await self._suite.expire(self._suite.ttl)

    def claim(
        self, mode: Mode = LOCK, *, ttl: float = LONG, name: str | None = None, label: str | None = None
    ) -> Claim:
        """Make a claim of a new owner."""
        return Claim(name or self.name, ttl, None, label, mode)

    async def attempt(
        self,
        kind: str = "lock",
        width: int = 1,
        *,
        ttl: float = LONG,
        name: str | None = None,
        label: str | None = None,
        owner: Claim | None = None,
        store: Backend | None = None,
    ) -> tuple[Claim, Place | Busy]:
        """Draw a ticket only if it holds, for a new owner or for that of a claim; return the claim and the answer."""
        claim = self._claim(kind, width, ttl=ttl, name=name, label=label, owner=owner)
        return claim, await (store or self.a).draw(claim, only_if_it_holds=True)

    async def draw(
        self,
        kind: str = "lock",
        width: int = 1,
        *,
        ttl: float = LONG,
        name: str | None = None,
        label: str | None = None,
        owner: Claim | None = None,
        store: Backend | None = None,
    ) -> tuple[Claim, Place]:
        """Draw a ticket, as `attempt` does; where the store has lines, it may wait."""
        claim = self._claim(kind, width, ttl=ttl, name=name, label=label, owner=owner)
        place = await (store or self.a).draw(claim, only_if_it_holds=not self._suite.lines)
        assert isinstance(place, Place), place
        return claim, place

    async def held(
        self,
        kind: str = "lock",
        width: int = 1,
        *,
        ttl: float = LONG,
        name: str | None = None,
        owner: Claim | None = None,
        store: Backend | None = None,
    ) -> tuple[Claim, int]:
        """Draw a ticket that must hold at once; return its claim and its token."""
        claim, place = await self.draw(kind, width, ttl=ttl, name=name, owner=owner, store=store)
        assert place.token is not None, f"it does not hold: {place}"
        return claim, place.token

    def _claim(
        self, kind: str, width: int, *, ttl: float, name: str | None, label: str | None, owner: Claim | None
    ) -> Claim:
        mode = _MODES.get(kind) or Permit(width)
        return Claim(name or self.name, ttl, None if owner is None else owner.owner, label, mode)

    async def keep(self, claim: Claim, *, ttl: float | None = None, store: Backend | None = None) -> Place | Gone:
        """Keep one ticket, perhaps with another ttl than before."""
        kept = claim if ttl is None else Claim(claim.name, ttl, claim.owner, claim.label, claim.mode)
        (answer,) = await (store or self.a).keep([(kept, 0)])
        assert answer is not None
        return answer

    async def place(self, claim: Claim, *, ttl: float | None = None, store: Backend | None = None) -> Place:
        """Keep one ticket, which must be alive."""
        answer = await self.keep(claim, ttl=ttl, store=store)
        assert isinstance(answer, Place), f"it is gone: {answer}"
        return answer

    async def holds(self, claim: Claim, *, by: float | None = None, store: Backend | None = None) -> int:
        """Keep a ticket until it holds; return its token. *by*: the moment at which it has to."""
        async with self._suite.soon():
            while True:
                asked_at = self._suite.now()
                place = await self.place(claim, store=store)
                if place.token is not None:
                    return place.token
                assert by is None or asked_at <= by, f"it does not hold: {place}"
                await asyncio.sleep(0.01)

    async def still_holds(
        self, claim: Claim, token: int, *, ttl: float | None = None, store: Backend | None = None
    ) -> None:
        """Check that a ticket holds under this token, or holds without having its token read."""
        place = await self.place(claim, ttl=ttl, store=store)
        assert place.token in {token, HELD.token}, place

    async def waits(self, *claims: Claim) -> None:
        """Check that these tickets live, and wait."""
        for claim in claims:
            place = await self.place(claim)
            assert place.token is None, place

    async def gone(self, claim: Claim, *, ttl: float | None = None) -> Gone:
        """Check that this ticket is gone."""
        answer = await self.keep(claim, ttl=ttl)
        assert isinstance(answer, Gone), answer
        return answer

    async def short_of_life(self) -> tuple[Claim, Claim, Place]:
        """
        Draw a ticket of the suite's ttl, and one behind it that waits; return both claims, and the place of the second.

        A machine that is slower than the ttl starts again, with twice the ttl.
        """
        for ttl in self._ttls():
            name, sent_at = self.fresh(), self._suite.now()
            holder, _ = await self.draw(name=name, ttl=ttl)
            waiter, place = await self.draw(name=name, store=self.b)
            if place.token is None:
                return holder, waiter, place
            assert self._suite.now() >= self._suite.lasted_until(sent_at, ttl), "two hold at once"
        raise AssertionError(self._too_slow())

    async def kept_beyond_its_ttl(
        self, *, waits: bool = False, by: Backend | None = None
    ) -> tuple[Claim | None, Claim]:
        """
        Keep a ticket in time, again and again, for longer than its ttl.

        A machine that is slower than the ttl starts again, with twice the ttl.

        Args:
            waits: It stands behind another one.

            by: The client that keeps it.

        Returns:
            The claim ahead, if there is one, and that of the ticket.
        """
        for ttl in self._ttls():
            name = self.fresh()
            ahead = (await self.draw(name=name))[0] if waits else None
            sent_at = self._suite.now()
            claim, first = await self.draw(name=name, ttl=ttl)
            for _ in range(5):
                await self._suite.pass_time(ttl / 3)
                kept_at = self._suite.now()
                answer = await self.keep(claim, store=by)
                if isinstance(answer, Gone):
                    assert self._suite.now() >= self._suite.lasted_until(sent_at, ttl), "a living ticket was not kept"
                    break
                assert answer.token == first.token or (answer.token == HELD.token and not waits), answer
                sent_at = kept_at
            else:
                return ahead, claim
        raise AssertionError(self._too_slow())

    def _ttls(self) -> Sequence[float]:
        return [self._suite.ttl * 2**attempt for attempt in range(TRIES)]

    def _too_slow(self) -> str:
        return (
            f"this machine stands still for longer than ttl = {self._suite.ttl} again and again; declare a longer one"
        )

    async def seen(self) -> Sequence[Seen]:
        """Return the tickets of the name."""
        (seen,) = await self.b.tickets([self.name])
        return seen

    async def pass_on(self, claim: Claim, heir: Claim, *, store: Backend | None = None) -> Place | Gone:
        """Let a ticket change hands."""
        backend = store or self.a
        assert isinstance(backend, PassesOn)
        return await backend.pass_on(claim, heir)

    async def until(self, true: Callable[[], object]) -> None:
        """Wait until something is so."""
        async with self._suite.soon():
            while not true():  # noqa: ASYNC110  (it may be so in the store)
                await asyncio.sleep(0.005)

    async def rings(self, bell: BellLog) -> None:
        """Wait until a bell has rung."""
        await self.until(lambda: bell)

    async def hears(self) -> None:
        """Wait until the bells of the tickets that were drawn are surely heard."""
        await asyncio.sleep(self._suite.bell_lag)

    def listen(self, claim: Claim, store: Backend | None = None) -> BellLog:
        """Hear the bell of a ticket that is about to be drawn."""
        bell = BellLog()
        bell.stop = (store or self.a).listen(claim, bell.append)
        return bell


class OnStage(BackendUnderTest):
    """Promises that are played by two clients."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        for name, promise in tuple(vars(cls).items()):
            if name.startswith("test_") and promise is not None and "w" in inspect.signature(promise).parameters:
                setattr(cls, name, _closing(promise))
        super().__init_subclass__(**kwargs)

    @pytest.fixture
    def w(self, backend: Backend, reopen: Reopen) -> Stage:
        """Two clients of one store, and a name."""
        return Stage(self, backend, reopen())


def _closing(promise: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Close the second client after a promise. An asynchronous fixture would need a plugin of its own kind."""

    @functools.wraps(promise)
    async def played(self: OnStage, w: Stage) -> None:
        try:
            await promise(self, w)
        finally:
            await w.b.aclose()

    return played
