"""Which tokens a guard admits and refuses, and fences: raised, kept over a restart, one for each resource."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from fencing_sdk._client import LockClient
from fencing_sdk._values.token import TOKEN_LIMIT, Token
from fencing_sdk.abc import Guard
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.errors import ConfigurationError, StaleTokenError
from fencing_sdk.testing.promises.under_test import CONFLICTING, NEW, OLD, RESOURCE, GuardUnderTest

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
        """It has the two calls of the contract."""
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
