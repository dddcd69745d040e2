"""One resource, one write after the other: which token gets in."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from fencing_sdk._values.claim import TOKEN_LIMIT, Token
from fencing_sdk.abc import Guard
from fencing_sdk.errors import ConfigurationError
from fencing_sdk.testing.guard_promises.guard_under_test import CONFLICTING, NEW, OLD, RESOURCE, GuardUnderTest

NO_TOKENS = (True, -1, TOKEN_LIMIT, 10**30, 1.0, float("nan"), "1", "", b"1", None, [34])


class GuardTokenPromises(GuardUnderTest):
    """Lower is refused, equal is accepted from one holder, higher is remembered."""

    async def test_a_resource_without_a_fence_accepts_any_token(self, guard: Guard) -> None:
        """No earlier holder can have been ahead."""
        assert await guard.highest(RESOURCE) is None
        assert await self.read(guard, RESOURCE) is None
        await self.accepted(guard, RESOURCE, NEW, "new")

    async def test_a_lower_token_is_refused_and_the_error_tells_both_numbers(self, guard: Guard) -> None:
        """What was sent, and what the resource has seen."""
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
        """A token is no ticket for a single write."""
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
        """A number that is read differently on two sides is no fence."""
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
