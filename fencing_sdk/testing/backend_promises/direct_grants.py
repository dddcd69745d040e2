"""The direct grant: a release hands the lock to the waiter at the head of the line, with its token."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from fencing_sdk._values.claim import Claim, Grant
from fencing_sdk.abc import PlaceInLine, SupportsDirectGrant
from fencing_sdk.testing._powers import needs
from fencing_sdk.testing.backend_promises.backend_under_test import BackendUnderTest, HandingBackend, Reopen


class StandingClaim:
    """One that stands in the line, and what it was told."""

    def __init__(self, backend: SupportsDirectGrant, claim: Claim) -> None:
        self.claim = claim
        self.told = asyncio.Event()
        self.grant: Grant | None = None
        self.age = 0.0
        self.standing: PlaceInLine = backend.stand(claim, self._tell)

    def _tell(self, grant: Grant | None = None, age: float = 0.0) -> None:
        if grant is not None:
            self.grant, self.age = grant, age
            self.told.set()


class DirectGrantPromises(BackendUnderTest):
    """Handing over, and giving back. For backends that declare ``hands_over``."""

    @needs("hands_over")
    async def test_a_release_hands_the_lock_over_with_its_token(self, backend: HandingBackend) -> None:
        """The waiter asks for nothing after it has joined."""
        holder = self.claim()
        before = await self.granted(backend, holder)
        waiter = StandingClaim(backend, self.claim())
        await self._in_line(waiter)
        await backend.release(holder)
        token = await self._handed(waiter)
        found = await backend.inspect(holder.name)
        assert found is not None
        assert (found.holder, found.token) == (waiter.claim.holder, token)
        self.assert_rising([before, token])
        assert await self.granted(backend, waiter.claim) == token, "asking again repeats the grant"

    @needs("hands_over")
    async def test_a_lock_that_was_released_before_the_waiter_joined_is_handed_over(
        self, backend: HandingBackend
    ) -> None:
        """Refused, released, joined: the waiter is not left with a free lock."""
        holder, claim = self.claim(), self.claim()
        await self.granted(backend, holder)
        await self.refused(backend, claim)
        await backend.release(holder)
        await self._handed(StandingClaim(backend, claim))

    @needs("hands_over")
    async def test_a_lock_is_handed_over_in_the_order_of_arrival(self, backend: HandingBackend, reopen: Reopen) -> None:
        """Waiters of two clients, each served once."""
        holder = self.claim()
        await self.granted(backend, holder)
        async with aclosing(reopen()) as other:
            waiters = []
            for number in range(6):
                client = (backend, other)[number % 2]
                assert isinstance(client, SupportsDirectGrant)
                waiters.append(StandingClaim(client, self.claim()))
                await self._in_line(waiters[-1])
            tokens = []
            for waiter in waiters:
                assert waiter.grant is None, "it was handed over before its turn"
                await backend.release(holder)
                tokens.append(await self._handed(waiter))
                holder = waiter.claim
            self.assert_rising(tokens)

    @needs("hands_over")
    async def test_a_waiter_that_has_left_is_not_handed_the_lock(self, backend: HandingBackend) -> None:
        """The release of its claim takes it out of the line."""
        holder = self.claim()
        await self.granted(backend, holder)
        waiter = StandingClaim(backend, self.claim())
        await self._in_line(waiter)
        waiter.standing.leave()
        await backend.release(waiter.claim)
        await backend.release(holder)
        await self.granted(backend, self.claim())

    @needs("hands_over")
    async def test_a_grant_on_its_way_to_a_waiter_that_leaves_is_given_back(self, backend: HandingBackend) -> None:
        """Handed over and cancelled at once: the release of its claim passes the lock on to the next waiter."""
        holder = self.claim()
        await self.granted(backend, holder)
        leaving = StandingClaim(backend, self.claim())
        await self._in_line(leaving)
        following = StandingClaim(backend, self.claim())
        await self._in_line(following)
        releasing = asyncio.ensure_future(backend.release(holder))
        await asyncio.sleep(0)
        leaving.standing.leave()
        await releasing
        await backend.release(leaving.claim)
        await self._handed(following)

    @needs("hands_over")
    async def test_a_handed_grant_lasts_for_its_ttl_from_its_age_on(self, backend: HandingBackend) -> None:
        """Whatever the message took: no other claim is granted before the age and the ttl allow it."""
        holder = self.claim()
        await self.granted(backend, holder)
        waiter = StandingClaim(backend, self.claim(ttl=self.ttl))
        await self._in_line(waiter)
        await backend.release(holder)
        await self._handed(waiter)
        counts_from = self.now() - waiter.age
        waiter.standing.leave()
        by = self.now() + self.ended_after(self.ttl)
        freed_at = await self.freed(backend, self.claim(), by=by)
        assert freed_at >= self.lasted_until(counts_from, self.ttl)

    async def _handed(self, waiter: StandingClaim) -> int:
        async with self.soon():
            await waiter.told.wait()
        assert waiter.grant is not None
        waiter.standing.leave()
        return waiter.grant.token

    async def _in_line(self, waiter: StandingClaim) -> None:
        """Wait until the store knows *waiter*."""
        async with self.soon():
            while waiter.standing.nap(1.0) is None:  # noqa: ASYNC110  (a standing announces no joining)
                await asyncio.sleep(0.005)
