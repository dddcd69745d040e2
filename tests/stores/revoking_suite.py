"""
An operator takes a lock away while its holder releases it, renews it or lets it expire, and another does the same.

Whatever comes first, the successor is never hit, the tokens rise, and at most one operator is told that it was they.
The scenarios are written once. A store runs them by a subclass with a fixture ``bench``.
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
from stays import PATIENCE
from store_bench import WaitersBench

from fencing_sdk import BackendUnavailableError
from fencing_sdk.abc import Claim, Grant, Renewal, Revoked
from fencing_sdk.backends import from_url

Revoke = Callable[[Any, str, int], Awaitable[bool]]

LANES = 10
"""Locks that are raced for at the same time."""
_CLIENTS = 4


async def as_it_is(operator: Any, name: str, token: int) -> bool:
    return bool(await operator.revoke(name, token, "a test"))


async def compared_before(operator: Any, name: str, token: int) -> bool:
    """Compare the token, and take away afterwards what is there then: what must be one step is two."""
    seen = await operator.inspect(name)
    if seen is None or seen.token != token:
        return False
    for _ in range(100):
        found = await operator.inspect(name)
        if found is not None and found.token != token:  # the successor came in between
            return bool(await operator.revoke(name, found.token, "a test"))
        await asyncio.sleep(0.01)
    return False


@asynccontextmanager
async def clients(url: str) -> AsyncIterator[list[Any]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(aclosing(from_url(url))) for _ in range(_CLIENTS)]


async def granted_soon(backend: Any, claim: Claim) -> int:
    while True:
        outcome = await backend.acquire(claim)
        if isinstance(outcome, Grant):
            return outcome.token
        await asyncio.sleep(random.uniform(0.0, 0.004))


async def renewed(backend: Any, claim: Claim) -> Renewal | Revoked:
    """Ask as a heartbeat does: again where the store cannot say, because others have locked the row for a moment."""
    while True:
        with suppress(BackendUnavailableError):
            (answer,) = await backend.renew([claim])
            return answer


class Race:
    """A victim, a successor and two operators, each with a connection of its own."""

    def __init__(self, backends: Sequence[Any], revoke: Revoke) -> None:
        self.victim, self.successor, *self.operators = backends
        self._revoke = revoke
        self.taken_away = 0

    async def run(self, name: str, last: int, *, ttl: float, end: str) -> int:
        """Race once for a lock, and return the token of the successor."""
        claim, follower = Claim(name, ttl), Claim(name, 30.0)
        token = await granted_soon(self.victim, claim)
        assert token > last, "the tokens did not rise"
        await asyncio.sleep(random.uniform(0.8, 1.1) * ttl if end == "expire" else 0.0)
        others: dict[str, Callable[[], Awaitable[Any]]] = {
            "release": lambda: self.victim.release(claim),
            "renew": lambda: renewed(self.victim, claim),
            "expire": lambda: asyncio.sleep(0),
        }
        rivals = [others[end], *(partial(self._revoke, operator, name, token) for operator in self.operators)]
        random.shuffle(rivals)
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
            following = tasks.create_task(granted_soon(self.successor, follower))
            await asyncio.sleep(random.uniform(0.0, 0.002))
            outcomes = await asyncio.gather(*(rival() for rival in rivals))
        next_token = following.result()
        heard = sum(outcome is True for outcome in outcomes)
        self.taken_away += heard
        assert heard <= 1 if end != "renew" else heard == 1, f"{heard} operators were told that they took it away"
        assert next_token > token, "the tokens did not rise"
        await self._successor_is_safe(follower, claim, token, next_token)
        await self.successor.release(follower)
        return next_token

    async def _successor_is_safe(self, follower: Claim, claim: Claim, token: int, next_token: int) -> None:
        assert not await self._revoke(self.operators[0], claim.name, token), "a token was revoked that has ended"
        await self.victim.release(claim)
        seen = await self.operators[1].inspect(claim.name)
        assert seen is not None, "the successor was hit"
        assert seen.token == next_token, "the successor was hit"
        assert await renewed(self.successor, follower) is Renewal.RENEWED, "the successor was hit"
        assert await renewed(self.victim, claim) is not Renewal.RENEWED, "a grant that has ended was renewed"


async def race(url: str, revoke: Revoke, ends: Sequence[str], *, rounds: int, ttl: float = 30.0) -> int:
    """Race *rounds* times; return how often an operator came first."""
    async with clients(url) as backends:
        racing = Race(backends, revoke)

        async def lane(name: str) -> None:
            last = -1
            for _, end in zip(range(rounds // LANES), itertools.cycle(ends), strict=False):
                last = await racing.run(name, last, ttl=ttl, end=end)

        async with asyncio.TaskGroup() as lanes:
            for number in range(LANES):
                lanes.create_task(lane(f"race/{number}"))
        return racing.taken_away


class RevokingSuite:
    """What an operator may do while others work."""

    short_ttl = 0.2
    """Seconds of a grant that is left to expire; at least the store's minimum."""

    @pytest.mark.campaign
    async def test_whatever_comes_first_the_successor_is_never_hit(self, bench: WaitersBench):
        rounds = amount(4000, short=100)
        assert await race(bench.url, as_it_is, ["release", "renew"], rounds=rounds) >= rounds / 2

    @pytest.mark.campaign
    async def test_a_grant_that_expires_meanwhile_leaves_its_successor_alone(self, bench: WaitersBench):
        rounds = amount(400, short=10)
        await race(bench.url, as_it_is, ["expire"], rounds=rounds, ttl=self.short_ttl)
