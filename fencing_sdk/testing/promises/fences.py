"""Guards: tokens that are admitted and refused, fences, many holders at once, and several resources in one step."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from fencing_sdk._client import LockClient
from fencing_sdk._values.token import TOKEN_LIMIT, Token
from fencing_sdk.abc import Guard
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.errors import ConfigurationError, StaleTokenError
from fencing_sdk.testing.promises.under_test import CONFLICTING, NEW, OLD, RESOURCE, GuardUnderTest, needs

NO_TOKENS = (True, -1, TOKEN_LIMIT, 10**30, 1.0, float("nan"), "1", "", b"1", None, [34])


class GuardTokenPromises(GuardUnderTest):
    """Lower is refused, equal is accepted from one holder, higher is remembered."""

    async def test_a_resource_without_a_fence_accepts_any_token(self, guard: Guard) -> None:
        """No earlier holder can have been ahead."""
        assert await guard.highest(RESOURCE) is None
        assert await self.read(guard, RESOURCE) is None
        await self.accepted(guard, RESOURCE, NEW, "new")

    async def test_a_lower_token_is_refused_and_the_error_tells_both_numbers(self, guard: Guard) -> None:
        """The token that was sent, and the highest that the resource has seen."""
        await self.accepted(guard, RESOURCE, NEW, "new")
        error = await self.refused(guard, RESOURCE, OLD)
        assert (error.resource, error.token, error.fence, error.conflict) == (RESOURCE, 33, 34, False)

    async def test_a_lower_token_is_refused_every_time(self, guard: Guard) -> None:
        """A refusal wears nothing off, and the holder is not disturbed by it."""
        await self.accepted(guard, RESOURCE, NEW, "new")
        for token in (OLD, 33, 0, OLD):
            await self.refused(guard, RESOURCE, token)
        await self.accepted(guard, RESOURCE, NEW, "newer")

    async def test_one_holder_writes_many_times_with_one_token(self, guard: Guard) -> None:
        """A token is not a ticket for a single write."""
        for number in range(5):
            await self.accepted(guard, RESOURCE, NEW, f"value {number}")

    async def test_a_higher_token_is_accepted_and_remembered(self, guard: Guard) -> None:
        """With its holder, up to the highest token there can be."""
        for token in (OLD, NEW, Token(TOKEN_LIMIT - 1, "dddddddd")):
            await self.accepted(guard, RESOURCE, token, f"by {token}")
            highest = await guard.highest(RESOURCE)
            assert highest is not None
            assert highest.holder == token.holder
        await self.refused(guard, RESOURCE, TOKEN_LIMIT - 2)

    async def test_zero_is_a_token_like_any_other(self, guard: Guard) -> None:
        """Some stores begin with it."""
        await self.accepted(guard, RESOURCE, Token(0, "aaaaaaaa"), "first")
        await self.accepted(guard, RESOURCE, 0, "again")
        assert (await self.refused(guard, RESOURCE, Token(0, "bbbbbbbb"))).conflict
        await self.accepted(guard, RESOURCE, 1, "later")
        await self.refused(guard, RESOURCE, 0)

    async def test_the_same_number_from_another_holder_is_a_conflict(self, guard: Guard) -> None:
        """Two grants shared a token: the second holder is refused, the first goes on."""
        await self.accepted(guard, RESOURCE, NEW, "new")
        error = await self.refused(guard, RESOURCE, CONFLICTING)
        assert (error.token, error.fence, error.conflict) == (34, 34, True)
        await self.accepted(guard, RESOURCE, NEW, "newer")

    async def test_a_number_whose_holder_is_unknown_conflicts_with_nobody(self, guard: Guard) -> None:
        """A plain int fences like any token, before and after one that carries its holder."""
        await self.accepted(guard, RESOURCE, 34, "plain")
        await self.accepted(guard, RESOURCE, NEW, "known")
        await self.accepted(guard, RESOURCE, 34, "plain again")

    async def test_a_holder_that_became_known_is_remembered(self, guard: Guard) -> None:
        """A plain int with the same number does not make the guard forget it."""
        await self.accepted(guard, RESOURCE, 34, "plain")
        await self.accepted(guard, RESOURCE, NEW, "known")
        await self.accepted(guard, RESOURCE, 34, "plain again")
        assert (await self.refused(guard, RESOURCE, CONFLICTING)).conflict

    async def test_the_holder_of_a_lower_token_is_forgotten(self, guard: Guard) -> None:
        """The holder belongs to the number: a higher one, whose holder is unknown, has none."""
        await self.accepted(guard, RESOURCE, OLD, "old")
        await self.accepted(guard, RESOURCE, 34, "plain")
        await self.accepted(guard, RESOURCE, CONFLICTING, "no conflict with the holder of 33")

    @pytest.mark.parametrize("token", NO_TOKENS, ids=lambda token: ascii(token)[:20])
    async def test_what_is_no_token_is_refused_and_changes_nothing(self, guard: Guard, token: Any) -> None:
        """A number that is read differently on two sides is not a fence."""
        await self.accepted(guard, RESOURCE, 0, "value")
        with pytest.raises(ConfigurationError):
            await self.write(guard, RESOURCE, token, "not a token")
        with pytest.raises(ConfigurationError):
            await guard.raise_to(RESOURCE, token)
        assert await guard.highest(RESOURCE) == 0
        assert await self.read(guard, RESOURCE) == "value"

    async def test_a_refusal_survives_pickling(self, guard: Guard) -> None:
        """So that a worker process can hand it back."""
        await guard.raise_to(RESOURCE, NEW)
        for token in (OLD, CONFLICTING):
            error = await self.refused(guard, RESOURCE, token)
            copy = pickle.loads(pickle.dumps(error))  # noqa: S301  (what was pickled on this very line)
            assert str(copy) == str(error)
            assert vars(copy) == vars(error)


ODD_RESOURCES = (
    "a",
    "A",
    "a b",
    " a",
    "a%20b",
    "a/b",
    "a%2Fb",
    "a\\b",
    ".",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    ".lock",
    "{a}",
    "{0}",
    "%s",
    "%(a)s",
    ":a",
    "?",
    "$1",
    "'",
    '"',
    "a'; DROP TABLE fencing_fence; --",
    "a\N{COMBINING ACUTE ACCENT}",
    "\N{LATIN SMALL LETTER A WITH ACUTE}",
    "\N{LATIN SMALL LETTER SHARP S}",
    "ss",
    "\N{RIGHT-TO-LEFT OVERRIDE}a",
    "-rf",
    "~",
    "*",
    "0",
    "None",
    "x" * 512,
    "x" * 511,
    "x" * 511 + "y",
    "\N{LOCK}" * 128,
    "/" * 512,
)
"""Valid names that are easily escaped wrongly, folded into one another, or cut."""

NO_RESOURCES = ("", "a\n", "\0", "\ud800", "x" * 513, "\N{LOCK}" * 129, None, 7, b"a")


class FencePromises(GuardUnderTest):
    """`raise_to` and `highest`, zombies, and untrusted names."""

    def test_a_guard_can_stand_in_fences(self, guard: object) -> None:
        """The guard has the two calls of the contract."""
        assert isinstance(guard, Guard)

    async def test_the_old_holder_is_refused_before_the_new_one_writes(self, guard: Guard) -> None:
        """Else the new holder would read, the old one write, and the new one overwrite that unseen."""
        await self.accepted(guard, RESOURCE, OLD, "old")
        await guard.raise_to(RESOURCE, NEW)
        assert await self.read(guard, RESOURCE) == "old", "raising a fence changed the data"
        assert (await self.refused(guard, RESOURCE, OLD)).fence == 34
        await self.accepted(guard, RESOURCE, NEW, "new")

    async def test_a_fence_can_be_raised_where_nobody_has_written(self, guard: Guard) -> None:
        """There is still nothing to read, and the old holder is refused."""
        await guard.raise_to(RESOURCE, NEW)
        assert await guard.highest(RESOURCE) == 34
        assert await self.read(guard, RESOURCE) is None
        await self.refused(guard, RESOURCE, OLD)
        await self.accepted(guard, RESOURCE, NEW, "new")

    async def test_raising_a_fence_twice_is_raising_it_once(self, guard: Guard) -> None:
        """An answer may be lost, so the call is repeated."""
        await self.accepted(guard, RESOURCE, OLD, "old")
        for _ in range(3):
            await guard.raise_to(RESOURCE, NEW)
        assert await guard.highest(RESOURCE) == 34
        assert await self.read(guard, RESOURCE) == "old"
        await self.accepted(guard, RESOURCE, NEW, "new")
        await guard.raise_to(RESOURCE, NEW)
        assert await self.read(guard, RESOURCE) == "new"

    async def test_a_fence_is_never_lowered(self, guard: Guard) -> None:
        """A late acquisition learns that it is late."""
        await guard.raise_to(RESOURCE, NEW)
        with pytest.raises(StaleTokenError) as refusal:
            await guard.raise_to(RESOURCE, OLD)
        assert (refusal.value.token, refusal.value.fence, refusal.value.conflict) == (33, 34, False)
        assert await guard.highest(RESOURCE) == 34
        await self.refused(guard, RESOURCE, OLD)

    async def test_a_fence_belongs_to_one_holder(self, guard: Guard) -> None:
        """The conflict shows at the acquisition, before anything is written."""
        await guard.raise_to(RESOURCE, NEW)
        with pytest.raises(StaleTokenError) as refusal:
            await guard.raise_to(RESOURCE, CONFLICTING)
        assert refusal.value.conflict
        assert (await self.refused(guard, RESOURCE, CONFLICTING)).conflict

    async def test_a_fence_remembers_a_holder_that_became_known(self, guard: Guard) -> None:
        """Also where it had the number already, without a holder."""
        await guard.raise_to(RESOURCE, 34)
        await guard.raise_to(RESOURCE, NEW)
        await guard.raise_to(RESOURCE, 34)
        assert (await self.refused(guard, RESOURCE, CONFLICTING)).conflict

    async def test_fences_are_independent(self, guard: Guard) -> None:
        """The tokens of two locks have nothing to do with each other."""
        await self.accepted(guard, "invoices/1", NEW, "one")
        await guard.raise_to("invoices/2", Token(99, "eeeeeeee"))
        await self.accepted(guard, "invoices/3", OLD, "three")
        await self.accepted(guard, "invoices/1", NEW, "one again")
        assert await guard.highest("invoices/2") == 99
        assert await self.read(guard, "invoices/3") == "three"
        assert await guard.highest("invoices") is None

    async def test_the_fence_outlives_the_guard_or_the_guard_says_that_it_does_not(self, guard: Guard) -> None:
        """`durable` is what is true."""
        await self.accepted(guard, RESOURCE, OLD, "old")
        await guard.raise_to(RESOURCE, NEW)
        async with self.reopen(guard) as other:
            highest = await other.highest(RESOURCE)
            if not self.durable:
                assert highest is None, "declare durable = True: the fence is still there"
                return
            assert (highest, highest.holder) == (34, NEW.holder)
            assert await self.read(other, RESOURCE) == "old"
            await self.refused(other, RESOURCE, OLD)
            assert (await self.refused(other, RESOURCE, CONFLICTING)).conflict
            await self.accepted(other, RESOURCE, NEW, "new")
        assert await self.read(guard, RESOURCE) == "new"

    async def test_a_zombie_is_refused_from_the_moment_the_next_holder_has_its_lease(self, guard: Guard) -> None:
        """With leases of a lock whose first holder does not know that it lost it."""
        store = MemoryBackend()
        async with LockClient(store) as locks:
            lock = locks.lock(RESOURCE, fences=[guard])
            zombie = await lock.acquire()
            stale = zombie.token
            await self.accepted(guard, RESOURCE, stale, "in time")
            store.take_away(RESOURCE)
            async with lock as lease:
                await self.refused(guard, RESOURCE, stale)
                assert await self.read(guard, RESOURCE) == "in time"
                await self.accepted(guard, RESOURCE, lease.token, "by the next holder")
            await zombie.release()
        await self.refused(guard, RESOURCE, stale)

    async def test_every_valid_name_is_a_resource_of_its_own(self, guard: Guard) -> None:
        """However it has to be escaped where the guard keeps it."""
        for number, resource in enumerate(ODD_RESOURCES):
            await self.accepted(guard, resource, number, f"value {number}")
        for number, resource in enumerate(ODD_RESOURCES):
            assert await self.read(guard, resource) == f"value {number}", f"{resource[:20]!r} is another one's"
            assert await guard.highest(resource) == number
            await guard.raise_to(resource, 100)
            await self.refused(guard, resource, 99)

    @pytest.mark.parametrize("resource", NO_RESOURCES, ids=lambda resource: ascii(resource)[:20])
    async def test_what_names_no_resource_is_refused(self, guard: Guard, resource: Any) -> None:
        """Before any request or write, with the error that is made for it."""
        with pytest.raises(ConfigurationError):
            await self.write(guard, resource, NEW, "value")
        with pytest.raises(ConfigurationError):
            await guard.raise_to(resource, NEW)


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


@needs("several")
class SeveralPromises(GuardUnderTest):
    """`write_all`: the check and the writes of several resources are one step."""

    async def test_several_resources_are_written_together(self, guard: Guard) -> None:
        """Each with a token of its own, which is remembered with its holder."""
        tokens = {name: Token(number, f"{number:08x}") for number, name in enumerate(reversed(ACCOUNTS), 33)}
        for value in ("first", "again"):
            await self._all_accepted(guard, tokens, value)
        for name, token in tokens.items():
            highest = await guard.highest(name)
            assert highest is not None
            assert (highest, highest.holder) == (token, token.holder)

    @pytest.mark.parametrize("stale", ACCOUNTS)
    async def test_one_stale_token_refuses_all_and_is_named(self, guard: Guard, stale: str) -> None:
        """Wherever it stands, nothing is written and no fence is raised."""
        await self._all_accepted(guard, dict.fromkeys(ACCOUNTS, 10), "old")
        await guard.raise_to(stale, NEW)
        error = await self._all_refused(guard, dict.fromkeys(ACCOUNTS, OLD))
        assert (error.resource, error.token, error.fence, error.conflict) == (stale, 33, 34, False)
        await self._all_accepted(guard, dict.fromkeys(ACCOUNTS, NEW), "new")

    async def test_one_conflict_refuses_all_and_is_named(self, guard: Guard) -> None:
        """As it refuses a single write."""
        await guard.raise_to(ACCOUNTS[1], NEW)
        error = await self._all_refused(guard, dict.fromkeys(ACCOUNTS, CONFLICTING))
        assert (error.resource, error.conflict) == (ACCOUNTS[1], True)
        assert await guard.highest(ACCOUNTS[0]) is None

    async def test_each_fence_refuses_by_itself_afterwards(self, guard: Guard) -> None:
        """A write to one of the resources meets the fence that a write to all has raised."""
        await self._all_accepted(guard, dict.fromkeys(ACCOUNTS, NEW), "together")
        for name in ACCOUNTS:
            await self.refused(guard, name, OLD)
            await self.accepted(guard, name, NEW, "alone")

    async def test_fifty_resources_fit_into_one_step(self, guard: Guard) -> None:
        """No limit of a statement or a script comes before the one that etcd sets."""
        await self._all_accepted(guard, {f"accounts/{number}": number for number in range(_MANY)}, "many")

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
