"""Many holders at once, in tasks and in threads: check and write are one step, or these fail."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from fencing_sdk._values.claim import Token
from fencing_sdk.abc import Guard
from fencing_sdk.errors import StaleTokenError
from fencing_sdk.testing.guard_promises.guard_under_test import RESOURCE, GuardUnderTest

T = TypeVar("T")

TASKS = 8
THREADS = 4
_WRITES = 25
_TURNS = 12
_NUMBERS = 20


@dataclass(frozen=True, slots=True)
class _Accepted:
    """A write that a guard accepted: when it was asked for, its token, and when it was answered."""

    asked: int
    token: int
    answered: int


class RacePromises(GuardUnderTest):
    """No interleaving lets a lower token win."""

    async def test_of_the_holders_of_one_number_exactly_one_gets_in(self, guard: Guard) -> None:
        """The first writer is accepted; all others learn that there is a conflict."""
        for number in range(_NUMBERS):
            tokens = [Token(number, holder * 8) for holder in "abcd"]
            outcomes = await _all(self._gets_in(guard, token) for token in tokens)
            (winner,) = itertools.compress(tokens, outcomes)
            assert await self.read(guard, RESOURCE) == winner.holder

    async def test_accepted_writes_never_go_down_among_tasks(self, guard: Guard) -> None:
        """Tokens that are high and low by chance."""
        ticks = itertools.count()
        writers = (self._write_at_random(guard, ticks, seed) for seed in range(TASKS))
        await self._check_history(guard, await _all(writers))

    async def test_accepted_writes_never_go_down_among_threads(self, guard: Guard) -> None:
        """The same, each thread with an event loop and, where the fences are shared, a guard of its own."""
        ticks = itertools.count()

        async def write_at_random(seed: int) -> list[_Accepted]:
            async with self._shared(guard) as own:
                return await self._write_at_random(own, ticks, seed)

        await self._check_history(guard, await _in_threads(write_at_random))

    async def test_no_update_is_lost_among_tasks(self, guard: Guard) -> None:
        """Holders that raise the fence, read, and write what they read plus one."""
        await self._check_counter(guard, await _all(self._count_up(guard, seed) for seed in range(TASKS)))

    async def test_no_update_is_lost_among_threads(self, guard: Guard) -> None:
        """The same, each thread with an event loop and, where the fences are shared, a guard of its own."""

        async def count_up(seed: int) -> Counter[str]:
            async with self._shared(guard) as own:
                return await self._count_up(own, seed)

        await self._check_counter(guard, await _in_threads(count_up))

    def _shared(self, guard: Guard) -> AbstractAsyncContextManager[Guard]:
        return self.reopen(guard) if self.durable else _itself(guard)

    async def _gets_in(self, guard: Guard, token: Token) -> bool:
        try:
            await self.write(guard, RESOURCE, token, str(token.holder))
        except StaleTokenError as error:
            _check(error.conflict, f"{token} was refused as if {error.fence} were higher")
            return False
        return True

    async def _write_at_random(self, guard: Guard, ticks: itertools.count[int], seed: int) -> list[_Accepted]:
        """Write with tokens around a rising middle; tell which were accepted."""
        chance = random.Random(seed)
        accepted: list[_Accepted] = []
        seen = -1
        for middle in range(_WRITES):
            token = max(0, middle + chance.randrange(-5, 6))
            asked = next(ticks)
            try:
                await self.write(guard, RESOURCE, token, str(token))
            except StaleTokenError as error:
                _check(error.fence > token, f"{token} was refused although no higher token was seen")
            else:
                accepted.append(_Accepted(asked, token, next(ticks)))
            await _give_way(chance)
            value = int(await self.read(guard, RESOURCE) or -1)
            _check(value >= seen, f"{value} was read after {seen}")
            seen = value
        return accepted

    async def _check_history(self, guard: Guard, histories: list[list[_Accepted]]) -> None:
        """A write that was asked for after another one was answered has no lower token; the highest stays."""
        accepted = [write for history in histories for write in history]
        for earlier, later in itertools.permutations(accepted, 2):
            if earlier.answered < later.asked:
                assert earlier.token <= later.token, f"{later} was accepted after {earlier}"
        highest = max(write.token for write in accepted)
        assert await guard.highest(RESOURCE) == highest
        assert await self.read(guard, RESOURCE) == str(highest)

    async def _count_up(self, guard: Guard, seed: int) -> Counter[str]:
        """
        Raise the fence, read, write one more: again and again, each time as a new holder.

        All go for the next number at once. An update is lost when a write is accepted although
        another holder has raised the fence and read meanwhile.
        """
        chance = random.Random(seed)
        counts: Counter[str] = Counter()
        for turn in range(_TURNS):
            highest = await guard.highest(RESOURCE)
            token = Token(0 if highest is None else highest + 1, f"{seed:04x}{turn:04x}")
            await _give_way(chance)
            try:
                await guard.raise_to(RESOURCE, token)
                value = int(await self.read(guard, RESOURCE) or 0)
                await _give_way(chance)
                await self.write(guard, RESOURCE, token, str(value + 1))
            except StaleTokenError:
                counts["refused"] += 1
            else:
                counts["accepted"] += 1
        return counts

    async def _check_counter(self, guard: Guard, counts: list[Counter[str]]) -> None:
        total = sum(counts, Counter[str]())
        assert total["accepted"], "no write was accepted"
        assert await self.read(guard, RESOURCE) == str(total["accepted"]), f"updates were lost: {total}"


async def _in_threads(work: Callable[[int], Coroutine[Any, Any, T]]) -> list[T]:
    """Run *work* in threads, each with an event loop of its own."""

    def run(seed: int) -> T:
        return asyncio.run(work(seed))

    return await _all(asyncio.to_thread(run, seed) for seed in range(THREADS))


async def _all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run *works* at once, all of them to their end; then the first error leaves, bare."""
    outcomes = await asyncio.gather(*works, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


@asynccontextmanager
async def _itself(guard: Guard) -> AsyncIterator[Guard]:
    yield guard


async def _give_way(chance: random.Random) -> None:
    for _ in range(chance.randrange(1, 4)):
        await asyncio.sleep(0)


def _check(holds: bool, otherwise: str) -> None:  # noqa: FBT001  (an assertion that may stand in an except block)
    assert holds, otherwise
