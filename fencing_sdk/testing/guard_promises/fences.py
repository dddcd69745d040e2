"""The fence by itself: raised before a write, kept over a restart, one for each resource."""

from __future__ import annotations

from typing import Any

import pytest

from fencing_sdk._client import LockClient
from fencing_sdk._values.claim import Token
from fencing_sdk.abc import Guard
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.errors import ConfigurationError, StaleTokenError
from fencing_sdk.testing.guard_promises.guard_under_test import CONFLICTING, NEW, OLD, RESOURCE, GuardUnderTest

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
        """Before anything is asked or written, with the error that is made for it."""
        with pytest.raises(ConfigurationError):
            await self.write(guard, resource, NEW, "value")
        with pytest.raises(ConfigurationError):
            await guard.raise_to(resource, NEW)
