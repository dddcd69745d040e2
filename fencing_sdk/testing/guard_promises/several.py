"""Several resources in one step: all of them are written, or none."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import pytest

from fencing_sdk._values.claim import Token
from fencing_sdk.abc import Guard
from fencing_sdk.errors import ConfigurationError, StaleTokenError
from fencing_sdk.testing._powers import needs
from fencing_sdk.testing.guard_promises.guard_under_test import CONFLICTING, NEW, OLD, GuardUnderTest

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
        """Before anything is asked or written."""
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
