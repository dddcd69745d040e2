"""Many holders at once, in tasks and in threads; and several resources in one step, all written or none."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from fencing_sdk._values.token import Token
from fencing_sdk.abc import Guard
from fencing_sdk.errors import ConfigurationError, StaleTokenError
from fencing_sdk.testing.promises.under_test import CONFLICTING, NEW, OLD, RESOURCE, GuardUnderTest, needs

T = TypeVar("T")

TASKS = 8
THREADS = 4
_WRITES = 25
_TURNS = 12
_NUMBERS = 20


@dataclass(frozen=True, slots=True)
class _Accepted:
    """A write that a guard accepted: when the request began, its token, and when the answer came."""

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
        """Write with tokens around a rising middle; return which were accepted."""
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
        """A write that began after the answer to another one has no lower token; the highest stays."""
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


ACCOUNTS = ("accounts/1", "accounts/2", "accounts/3")
NO_MAPPINGS: tuple[object, ...] = (
    {},
    None,
    [("a", 1)],
    "a",
    {"a": -1},
    {"a": True},
    {"": 1},
    {7: 1},
    {"a\n": 1},
    {"b": 1, "a": 1.5},
)
_MANY = 50
_TASKS = 6
_ROUNDS = 15


class SeveralPromises(GuardUnderTest):
    """`write_all`: the check and the writes of several resources are one step."""

    @needs("several")
    async def test_several_resources_are_written_together(self, guard: Guard) -> None:
        """Each with a token of its own, which is remembered with its holder."""
        tokens = {name: Token(number, f"{number:08x}") for number, name in enumerate(reversed(ACCOUNTS), 33)}
        for value in ("first", "again"):
            await self._all_accepted(guard, tokens, value)
        for name, token in tokens.items():
            highest = await guard.highest(name)
            assert highest is not None
            assert (highest, highest.holder) == (token, token.holder)

    @needs("several")
    @pytest.mark.parametrize("stale", ACCOUNTS)
    async def test_one_stale_token_refuses_all_and_is_named(self, guard: Guard, stale: str) -> None:
        """Wherever it stands, nothing is written and no fence is raised."""
        await self._all_accepted(guard, dict.fromkeys(ACCOUNTS, 10), "old")
        await guard.raise_to(stale, NEW)
        error = await self._all_refused(guard, dict.fromkeys(ACCOUNTS, OLD))
        assert (error.resource, error.token, error.fence, error.conflict) == (stale, 33, 34, False)
        await self._all_accepted(guard, dict.fromkeys(ACCOUNTS, NEW), "new")

    @needs("several")
    async def test_one_conflict_refuses_all_and_is_named(self, guard: Guard) -> None:
        """As it refuses a single write."""
        await guard.raise_to(ACCOUNTS[1], NEW)
        error = await self._all_refused(guard, dict.fromkeys(ACCOUNTS, CONFLICTING))
        assert (error.resource, error.conflict) == (ACCOUNTS[1], True)
        assert await guard.highest(ACCOUNTS[0]) is None

    @needs("several")
    async def test_each_fence_refuses_by_itself_afterwards(self, guard: Guard) -> None:
        """A write to one of the resources meets the fence that a write to all has raised."""
        await self._all_accepted(guard, dict.fromkeys(ACCOUNTS, NEW), "together")
        for name in ACCOUNTS:
            await self.refused(guard, name, OLD)
            await self.accepted(guard, name, NEW, "alone")

    @needs("several")
    async def test_fifty_resources_fit_into_one_step(self, guard: Guard) -> None:
        """No limit of a statement or a script comes before the one that etcd sets."""
        await self._all_accepted(guard, {f"accounts/{number}": number for number in range(_MANY)}, "many")

    @needs("several")
    async def test_steps_that_overlap_do_not_wait_for_each_other_in_a_circle(self, guard: Guard) -> None:
        """Each takes some of the resources, in an order of its own; the highest token wins in each."""
        names = [f"accounts/{number}" for number in range(6)]
        accepted: dict[str, int] = {}

        async def work(seed: int) -> None:
            chance = random.Random(seed)
            for turn in range(_ROUNDS):
                token = turn * _TASKS + seed
                some = chance.sample(names, 3)
                try:
                    await self.write_all(guard, dict.fromkeys(some, token), dict.fromkeys(some, str(token)))
                except StaleTokenError as error:
                    assert error.fence > token, f"{token} was refused although no higher token was seen"  # noqa: PT017  (its fields are the promise)
                    continue
                accepted.update({name: max(token, accepted.get(name, -1)) for name in some})

        async with asyncio.timeout(self.patience):
            await asyncio.gather(*(work(seed) for seed in range(_TASKS)))
        assert accepted.keys() == set(names)
        for name, token in accepted.items():
            assert await guard.highest(name) == token
            assert await self.read(guard, name) == str(token)

    @needs("several")
    async def test_no_step_is_torn_by_another(self, guard: Guard) -> None:
        """Writers of the same resources: at the end all have the value of one writer, that with the highest token."""

        async def work(token: int) -> None:
            try:
                await self.write_all(guard, dict.fromkeys(ACCOUNTS, token), dict.fromkeys(ACCOUNTS, str(token)))
            except StaleTokenError as error:
                assert error.fence > token, f"{token} was refused although no higher token was seen"  # noqa: PT017  (as above)

        chance = random.Random(7)
        for turn in range(_ROUNDS):
            tokens = [turn * _TASKS + number for number in range(_TASKS)]
            chance.shuffle(tokens)
            async with asyncio.timeout(self.patience):
                await asyncio.gather(*(work(token) for token in tokens))
            assert {await self.read(guard, name) for name in ACCOUNTS} == {str(max(tokens))}

    @needs("several")
    @pytest.mark.parametrize("tokens", NO_MAPPINGS, ids=lambda tokens: ascii(tokens)[:20])
    async def test_what_is_no_mapping_of_tokens_is_refused_and_changes_nothing(self, guard: Guard, tokens: Any) -> None:
        """Before any request or write."""
        with pytest.raises(ConfigurationError):
            await self.write_all(guard, tokens, {"a": "value", "b": "value"})
        for name in ("a", "b"):
            assert await guard.highest(name) is None
            assert await self.read(guard, name) is None

    async def _all_accepted(self, guard: Guard, tokens: Mapping[str, int], value: str) -> None:
        await self.write_all(guard, tokens, {name: f"{value} of {name}" for name in tokens})
        for name, token in tokens.items():
            assert await self.read(guard, name) == f"{value} of {name}"
            assert await guard.highest(name) == token

    async def _all_refused(self, guard: Guard, tokens: Mapping[str, int]) -> StaleTokenError:
        before = [(await self.read(guard, name), await guard.highest(name)) for name in tokens]
        with pytest.raises(StaleTokenError) as refusal:
            await self.write_all(guard, tokens, dict.fromkeys(tokens, "stale"))
        after = [(await self.read(guard, name), await guard.highest(name)) for name in tokens]
        assert after == before, "a refused step changed a resource"
        return refusal.value
