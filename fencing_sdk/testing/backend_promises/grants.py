"""One lock, several claims: which claim is granted, which is refused, and how the lock is released."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from fencing_sdk._values.claim import Grant, Renewal
from fencing_sdk.abc import (
    Backend,
    SupportsDirectGrant,
    SupportsListing,
    SupportsLossNotice,
    SupportsQueue,
    SupportsRevoking,
    SupportsShares,
)
from fencing_sdk.testing.backend_promises.backend_under_test import BackendUnderTest, Reopen


class GrantPromises(BackendUnderTest):
    """Lifecycle, contention, ownership, idempotence."""

    async def test_the_declared_powers_are_the_real_ones(self, backend: Backend) -> None:
        """A power that is there is tested, and one that is declared is there."""
        assert self.queues == isinstance(backend, SupportsQueue), "declare queues"
        assert self.hands_over == isinstance(backend, SupportsDirectGrant), "declare hands_over"
        assert self.shares == isinstance(backend, SupportsShares), "declare shares"
        assert self.notices == isinstance(backend, SupportsLossNotice), "declare notices"
        assert self.lists == isinstance(backend, SupportsListing), "declare lists"
        assert self.revokes == isinstance(backend, SupportsRevoking), "declare revokes"

    # Lifecycle

    async def test_a_free_lock_is_granted_and_a_held_one_is_not(self, backend: Backend) -> None:
        """The first claim gets the lock; another one gets an answer, not an error."""
        await self.granted(backend, self.claim())
        await self.refused(backend, self.claim())

    async def test_a_released_lock_is_free(self, backend: Backend) -> None:
        """Nothing but the release is needed; no ttl has to pass."""
        claim = self.claim()
        await self.granted(backend, claim)
        await backend.release(claim)
        await self.granted(backend, self.claim())

    async def test_inspect_shows_the_grant_that_was_given(self, backend: Backend) -> None:
        """Name, token, public holder and the seconds that are left."""
        claim = self.claim()
        token = await self.granted(backend, claim)
        holder = await backend.inspect(claim.name)
        assert holder is not None
        assert (holder.name, holder.token, holder.holder) == (claim.name, token, claim.holder)
        assert 0 < holder.remaining <= self.ended_after(claim.ttl)

    async def test_inspect_shows_none_when_the_lock_is_free(self, backend: Backend) -> None:
        """Before the first grant and after the release."""
        claim = self.claim()
        assert await backend.inspect(claim.name) is None
        await self.granted(backend, claim)
        await backend.release(claim)
        assert await backend.inspect(claim.name) is None

    async def test_inspect_keeps_the_owner_id_secret(self, backend: Backend) -> None:
        """The owner id is enough to release the lock, so it is never shown."""
        claim = self.claim(metadata="batch 7")
        await self.granted(backend, claim)
        assert claim.owner not in repr(await backend.inspect(claim.name))

    async def test_grants_outlive_the_object_that_asked_for_them(self, backend: Backend, reopen: Reopen) -> None:
        """Closing the connections gives nothing back."""
        claim = self.claim()
        token = await self.granted(backend, claim)
        await backend.aclose()
        async with aclosing(reopen()) as other:
            await self.refused(other, self.claim())
            assert await self.granted(other, claim) == token

    async def test_a_closed_backend_opens_again(self, backend: Backend) -> None:
        """Every call may be the first one after `aclose`, and closing twice is no error."""
        claim = self.claim()
        await backend.aclose()
        await self.granted(backend, claim)
        await backend.aclose()
        await backend.aclose()
        assert await self.renewed(backend, claim) is Renewal.RENEWED
        await backend.aclose()
        assert await backend.inspect(claim.name) is not None
        await backend.aclose()
        await backend.release(claim)
        await self.granted(backend, self.claim())

    # Contention

    async def test_another_client_of_the_store_is_refused_too(self, backend: Backend, reopen: Reopen) -> None:
        """Exclusion holds in the store, not in the object."""
        claim = self.claim()
        await self.granted(backend, claim)
        async with aclosing(reopen()) as other:
            await self.refused(other, self.claim())
            await backend.release(claim)
            await self.granted(other, self.claim())

    async def test_one_of_many_rivals_wins(self, backend: Backend, reopen: Reopen) -> None:
        """Rivals that arrive together, also as the very first calls of two clients, get one grant."""
        async with aclosing(reopen()) as other:
            tries = [client.acquire(self.claim()) for _ in range(10) for client in (backend, other)]
            async with self.soon():
                outcomes = await asyncio.gather(*tries)
        assert sum(isinstance(outcome, Grant) for outcome in outcomes) == 1

    async def test_locks_of_different_names_do_not_exclude_each_other(self, backend: Backend) -> None:
        """A name is the unit of exclusion."""
        first, second = self.claim("invoices/42"), self.claim("invoices/43")
        await self.granted(backend, first)
        await self.granted(backend, second)
        await backend.release(first)
        await self.refused(backend, self.claim(second.name))

    # Ownership

    async def test_nobody_else_can_release(self, backend: Backend) -> None:
        """A release proves ownership; that of a stranger changes nothing and is no error."""
        claim = self.claim()
        await self.granted(backend, claim)
        await backend.release(self.claim())
        await self.refused(backend, self.claim())
        assert await self.renewed(backend, claim) is Renewal.RENEWED

    async def test_a_late_release_leaves_the_next_holder_alone(self, backend: Backend) -> None:
        """A release that arrives again, after the lock went on, does not touch the new grant."""
        first, second = self.claim(), self.claim()
        await self.granted(backend, first)
        await backend.release(first)
        await self.granted(backend, second)
        await backend.release(first)
        assert await self.renewed(backend, second) is Renewal.RENEWED

    # Idempotence: what a retry after a lost answer relies on

    async def test_acquiring_again_with_the_same_owner_repeats_the_grant(self, backend: Backend) -> None:
        """A retry finds its own grant, with its own token."""
        claim = self.claim()
        token = await self.granted(backend, claim)
        assert await self.granted(backend, claim) == token
        assert await self.renewed(backend, claim) is Renewal.RENEWED

    async def test_retries_of_one_acquisition_that_arrive_together_are_one_grant(self, backend: Backend) -> None:
        """The first request was slow and not lost: both find the same grant."""
        claim = self.claim()
        async with self.soon():
            tokens = await asyncio.gather(*(self.granted(backend, claim) for _ in range(10)))
        assert len(set(tokens)) == 1

    async def test_releasing_again_is_no_error(self, backend: Backend) -> None:
        """After the release, and without any grant."""
        claim = self.claim()
        await backend.release(claim)
        await self.granted(backend, claim)
        await backend.release(claim)
        await backend.release(claim)
        await self.granted(backend, self.claim())

    # What a release answers: a holder whose first release finds no grant learns so that it has lost its lease

    async def test_a_release_answers_whether_the_grant_was_its_owners(self, backend: Backend, reopen: Reopen) -> None:
        """None if it has ended the grant; otherwise what a renewal would have answered, from any client."""
        first, second = self.claim(), self.claim()
        async with aclosing(reopen()) as other:
            await self.granted(backend, first)
            assert await backend.release(first) is None
            for client in (backend, other):
                assert await client.release(first) is Renewal.REFUSED
            await self.granted(backend, second)
            for client in (backend, other):
                assert await client.release(first) is self.taken_over
            assert await other.release(second) is None
            assert await backend.release(second) is Renewal.REFUSED

    # Refusals

    async def test_retry_after_is_a_number_of_seconds_or_unknown(self, backend: Backend) -> None:
        """It never sends a waiter to sleep beyond the moment at which the holder's grant ends."""
        claim = self.claim(ttl=self.ttl)
        sent_at = self.now()
        await self.granted(backend, claim)
        granted_by = self.now()
        await self.pass_time(self.ttl * 0.4)
        asked_at = self.now()
        outcome = await backend.acquire(self.claim())
        if isinstance(outcome, Grant):  # the machine was too slow
            assert self.now() >= self.lasted_until(sent_at, self.ttl)
        elif outcome.retry_after is not None:
            assert 0 <= outcome.retry_after <= granted_by + self.ended_after(self.ttl) - asked_at
