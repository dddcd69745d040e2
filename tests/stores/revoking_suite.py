"""
An operator ends a ticket while its holder gives it back, keeps it or lets it die, and another operator does the same.

Whatever comes first, the successor is never hit, the tokens rise, and at most one operator hears that it was they. And
a holder in another client hears of its loss by the bell, however far its next heartbeat is. The scenarios are written
once. A store runs them by a subclass with a fixture ``bench``.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest
from campaigns import amount
from looking import holder
from stays import PATIENCE, Stay, opened, staying
from store_bench import WaitersBench

from fencing_sdk import BackendUnavailableError, LossReason, connect
from fencing_sdk.abc import Claim, Gone, Place
from fencing_sdk.backends import from_url

End = Callable[[Any, str, int], Awaitable[bool]]

LANES = 10
"""Locks that are raced for at the same time."""
_CLIENTS = 4
FAR = {"ttl": 3600.0, "heartbeat_interval": 900.0}
"""A lease whose next heartbeat is minutes away: what is noticed was rung."""


async def as_it_is(operator: Any, name: str, token: int) -> bool:
    return bool(await operator.end(name, token, "a test"))


async def compared_before(operator: Any, name: str, token: int) -> bool:
    """Compare the token, and end afterwards what is there then: what must be one step is two."""
    seen = await holder(operator, name)
    if seen is None or seen.token != token:
        return False
    for _ in range(100):
        found = await holder(operator, name)
        if found is not None and found.token != token:  # the successor came in between
            return bool(await operator.end(name, found.token, "a test"))
        await asyncio.sleep(0.01)
    return False


@asynccontextmanager
async def clients(url: str) -> AsyncIterator[list[Any]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(aclosing(from_url(url))) for _ in range(_CLIENTS)]


async def drawn_soon(backend: Any, claim: Claim) -> int:
    while True:
        with suppress(BackendUnavailableError):  # as while others have locked the row for a moment
            place = await backend.draw(claim, only_if_it_holds=True)
            if isinstance(place, Place):
                return place.token
        await asyncio.sleep(random.uniform(0.0, 0.004))


async def kept(backend: Any, claim: Claim) -> Place | Gone:
    """Ask as a heartbeat does: again where the store cannot say."""
    while True:
        with suppress(BackendUnavailableError):
            (answer,) = await backend.keep([(claim, 0)])
            if answer is not None:
                return answer


class Race:
    """A victim, a successor and two operators, each with a connection of its own."""

    def __init__(self, backends: Sequence[Any], end: End) -> None:
        self.victim, self.successor, *self.operators = backends
        self._end = end
        self.ended = 0

    async def run(self, name: str, last: int, *, ttl: float, by: str) -> int:
        """One round, in which a ticket ends *by* something else at the same time; the token of the successor."""
        claim, follower = Claim(name, ttl), Claim(name, 30.0)
        token = await drawn_soon(self.victim, claim)
        assert token > last, "the tokens did not rise"
        others = {
            "give_back": lambda: self.victim.give_back(claim),
            "keep": lambda: kept(self.victim, claim),
            "death": lambda: asyncio.sleep(0),
        }
        rivals = [others[by], *(partial(self._end, operator, name, token) for operator in self.operators)]
        random.shuffle(rivals)
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
            following = tasks.create_task(drawn_soon(self.successor, follower))
            await asyncio.sleep(random.uniform(0.0, 0.002))
            outcomes = await asyncio.gather(*(rival() for rival in rivals))
        next_token = following.result()
        heard = sum(outcome is True for outcome in outcomes)
        self.ended += heard
        assert heard <= 1 if by != "keep" else heard == 1, f"{heard} operators heard that they ended it"
        assert next_token > token, "the tokens did not rise"
        await self._successor_is_safe(follower, claim, token, next_token)
        await self.successor.give_back(follower)
        return next_token

    async def _successor_is_safe(self, follower: Claim, claim: Claim, token: int, next_token: int) -> None:
        assert not await self._end(self.operators[0], claim.name, token), "a token was ended that had ended"
        await self.victim.give_back(claim)
        seen = await holder(self.operators[1], claim.name)
        assert seen is not None, "the successor was hit"
        assert seen.token == next_token, "the successor was hit"
        assert isinstance(await kept(self.successor, follower), Place), "the successor was hit"
        assert isinstance(await kept(self.victim, claim), Gone), "a ticket that had ended was kept"


async def race(url: str, end: End, by: Sequence[str], *, rounds: int, ttl: float = 30.0) -> int:
    """Race *rounds* times; return how often an operator came first."""
    async with clients(url) as backends:
        racing = Race(backends, end)

        async def lane(name: str) -> None:
            last = -1
            for _, each in zip(range(rounds // LANES), itertools.cycle(by), strict=False):
                last = await racing.run(name, last, ttl=ttl, by=each)

        async with asyncio.TaskGroup() as lanes:
            for number in range(LANES):
                lanes.create_task(lane(f"race/{number}"))
        return racing.ended


class RevokingSuite:
    """What an operator may do while others work."""

    short_ttl = 0.2
    """Seconds of a ticket that is left to die; at least the store's minimum."""

    @pytest.mark.campaign
    async def test_whatever_comes_first_the_successor_is_never_hit(self, bench: WaitersBench):
        rounds = amount(4000, short=100)
        assert await race(bench.url, as_it_is, ["give_back", "keep"], rounds=rounds) >= rounds / 2

    @pytest.mark.campaign
    async def test_a_ticket_that_dies_meanwhile_leaves_its_successor_alone(self, bench: WaitersBench):
        rounds = amount(400, short=10)
        await race(bench.url, as_it_is, ["death"], rounds=rounds, ttl=self.short_ttl)


class BellSuite:
    """The holder hears at once that its ticket was ended, on stores that ring and share."""

    @pytest.mark.every_loop
    async def test_the_bell_ends_the_lease_of_a_holder_and_no_other(self, bench: WaitersBench):
        async with opened(bench.url) as (locks, _), connect(bench.url) as operator:
            async with staying(locks.lock("a", **FAR)) as stay, staying(locks.lock("b", **FAR)) as other:
                assert await operator.revoke("a", token=stay.token, reason="hangs")
                await revoked(stay)
                await other.end()
            async with staying(locks.lock("a", **FAR)) as stay:
                assert await locks.revoke("a", token=stay.token, reason="hangs")  # its own client
                await revoked(stay)

    async def test_the_bell_ends_all_readers_of_a_token_and_one_permit(self, bench: WaitersBench):
        async with opened(bench.url) as (locks, _), opened(bench.url) as (others, _), connect(bench.url) as operator:
            async with (
                staying(locks.rwlock("a", **FAR).reader) as one,
                staying(others.rwlock("a", **FAR).reader) as two,
                staying(locks.semaphore("b", permits=2, **FAR)) as taken,
                staying(others.semaphore("b", permits=2, **FAR)) as kept_on,
            ):
                assert await operator.revoke("a", token=one.token, reason="hangs")
                assert await operator.revoke("b", token=taken.token, reason="hangs")
                for stay in (one, two, taken):
                    await revoked(stay)
                await kept_on.end()


async def revoked(stay: Stay) -> None:
    await stay.over()
    assert stay.lost is LossReason.REVOKED
    assert stay.error.detail == "hangs"
