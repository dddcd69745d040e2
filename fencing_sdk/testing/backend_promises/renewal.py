"""Renewals: restart the ttl of a grant that lives, and do nothing else. One call carries many."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

from fencing_sdk._values.claim import Claim, Renewal
from fencing_sdk.abc import Backend
from fencing_sdk.testing._powers import needs
from fencing_sdk.testing.backend_promises.backend_under_test import NAME, TRIES, BackendUnderTest, Reopen


class RenewalPromises(BackendUnderTest):
    """Renewal of one and of many."""

    async def test_a_renewal_restarts_the_ttl(self, backend: Backend) -> None:
        """A rival is refused for a whole ttl after the renewal was sent, and granted then."""
        claim, renewed_at = await self._renewed_in_time(backend, after=0.4)
        by = self.now() + self.ended_after(claim.ttl)
        freed_at = await self.freed(backend, self.claim(claim.name), by=by)
        assert freed_at >= self.lasted_until(renewed_at, claim.ttl)

    async def test_a_renewal_never_creates(self, backend: Backend) -> None:
        """A claim that was never granted is refused, and the lock stays free."""
        claim = self.claim()
        assert await self.renewed(backend, claim) is Renewal.REFUSED
        assert await backend.inspect(NAME) is None
        await self.granted(backend, self.claim())

    async def test_a_renewal_never_revives(self, backend: Backend) -> None:
        """A grant that expired stays gone, even if no rival came meanwhile; a rival gets the lock afterwards."""
        claim = self.claim(ttl=self.ttl)
        await self.granted(backend, claim)
        await self.expire(self.ttl)
        assert await self.renewed(backend, claim) is Renewal.REFUSED
        await self.granted(backend, self.claim())

    async def test_a_released_grant_is_not_renewed(self, backend: Backend) -> None:
        """A heartbeat that is still on its way when the lock is given back finds nothing."""
        claim = self.claim()
        await self.granted(backend, claim)
        await backend.release(claim)
        assert await self.renewed(backend, claim) is Renewal.REFUSED
        await self.granted(backend, self.claim())

    async def test_nobody_else_can_renew(self, backend: Backend) -> None:
        """A stranger's renewal is refused, and does not prolong the grant that it met."""
        ttl = self.ttl
        await self.granted(backend, self.claim(ttl=ttl))
        granted_by = self.now()
        await self.pass_time(ttl * 0.4)
        assert await self.renewed(backend, self.claim()) in {self.taken_over, Renewal.REFUSED}
        await self.freed(backend, self.claim(), by=granted_by + self.ended_after(ttl))

    async def test_a_refusal_tells_whether_somebody_else_holds_the_lock(self, backend: Backend) -> None:
        """Operators ask that first."""
        former, holder = self.claim(), self.claim()
        await self.granted(backend, former)
        await backend.release(former)
        assert await self.renewed(backend, former) is Renewal.REFUSED
        await self.granted(backend, holder)
        assert await self.renewed(backend, former) is self.taken_over

    async def test_a_renewal_keeps_token_and_metadata(self, backend: Backend) -> None:
        """A renewed grant is the same grant."""
        claim = self.claim(metadata="batch 7")
        token = await self.granted(backend, claim)
        assert await self.renewed(backend, claim) is Renewal.RENEWED
        holder = await backend.inspect(NAME)
        assert holder is not None
        assert (holder.token, holder.metadata) == (token, "batch 7")

    async def test_another_client_may_renew_with_the_claim(self, backend: Backend, reopen: Reopen) -> None:
        """The owner id is the proof, not the connection: a client that reconnected renews on."""
        claim = self.claim()
        await self.granted(backend, claim)
        async with aclosing(reopen()) as other:
            assert await self.renewed(other, claim) is Renewal.RENEWED

    # Another ttl

    async def test_a_renewal_may_set_a_longer_ttl(self, backend: Backend) -> None:
        """It counts from the renewal on: so a job leaves its lock to the store for a while."""
        await self._kept(backend, backend)

    async def test_a_renewal_may_set_a_shorter_ttl(self, backend: Backend) -> None:
        """A rival is granted when it is over, although the first one is not."""
        claim = self.claim(ttl=4 * self.ttl + 4 * self.expiry_lag)
        await self.granted(backend, claim)
        assert await self.renewed(backend, replace(claim, ttl=self.ttl)) is Renewal.RENEWED
        await self.freed(backend, self.claim(), by=self.now() + self.ended_after(self.ttl))

    @needs("keeps_alone")
    async def test_a_longer_ttl_outlives_the_client(self, backend: Backend, reopen: Reopen) -> None:
        """The process that ran the job may have ended."""
        async with aclosing(reopen()) as other:
            await self._kept(backend, other, leaves=True)

    async def _kept(self, backend: Backend, other: Backend, *, leaves: bool = False) -> None:
        """Renew with a longer ttl, and look when *other* gets the lock."""
        claim, renewed_at = await self._renewed_in_time(backend, longer=True)
        by = self.now() + self.ended_after(claim.ttl)
        if leaves:
            await backend.aclose()
        freed_at = await self.freed(other, self.claim(claim.name), by=by)
        assert freed_at >= self.lasted_until(renewed_at, claim.ttl)

    # Many in one call

    async def test_an_empty_renewal_has_no_outcomes(self, backend: Backend) -> None:
        """Nothing is asked and nothing fails."""
        assert list(await backend.renew([])) == []

    async def test_every_claim_has_its_own_outcome_in_order(self, backend: Backend) -> None:
        """A claim that is refused changes nothing for the others."""
        mine, too = self.claim("a"), self.claim("b")
        await self.granted(backend, mine)
        await self.granted(backend, too)
        await self.granted(backend, self.claim("taken"))
        asked = [self.claim("free"), mine, self.claim("taken"), self.claim("a"), too]
        assert list(await backend.renew(asked)) == [
            Renewal.REFUSED,
            Renewal.RENEWED,
            self.taken_over,
            self.taken_over,
            Renewal.RENEWED,
        ]

    async def test_a_claim_may_be_renewed_twice_in_one_call(self, backend: Backend) -> None:
        """Duplicates get the same outcome each."""
        mine, stranger = self.claim(), self.claim("free")
        await self.granted(backend, mine)
        outcomes = await backend.renew([mine, stranger, mine, stranger])
        assert list(outcomes) == [Renewal.RENEWED, Renewal.REFUSED] * 2

    async def test_more_than_a_thousand_claims_fit_into_one_call(self, backend: Backend) -> None:
        """No limit of a statement, a script or a packet cuts the batch; the order stays."""
        asked = [self.claim(f"batch/{number}", ttl=600.0) for number in range(1100)]  # time for a slow machine
        held = asked[::50] + asked[-1:]
        async with self.soon():
            await asyncio.gather(*(self.granted(backend, claim) for claim in held))
            outcomes = await backend.renew(asked)
        owners = {claim.owner for claim in held}
        expected = [Renewal.RENEWED if claim.owner in owners else Renewal.REFUSED for claim in asked]
        assert list(outcomes) == expected

    async def test_renewals_may_be_in_flight_together(self, backend: Backend) -> None:
        """Batches that overlap get their own answers each."""
        mine, free = self.claim("mine"), self.claim("free")
        await self.granted(backend, mine)
        batches = [[mine] * number + [free] * (10 - number) for number in range(10)]
        async with self.soon():
            outcomes = await asyncio.gather(*(backend.renew(batch) for batch in batches))
        for number, answer in enumerate(outcomes):
            assert list(answer) == [Renewal.RENEWED] * number + [Renewal.REFUSED] * (10 - number)

    async def _renewed_in_time(
        self, backend: Backend, *, after: float = 0.0, longer: bool = False
    ) -> tuple[Claim, float]:
        """
        Renew a grant while it lives; start again, with twice the ttl, if the machine was slower than that.

        Args:
            backend: The backend under test.

            after: The part of the ttl that passes before the renewal.

            longer: Whether to renew with a ttl that is longer than the first one may last.

        Returns:
            The claim as it was renewed, and the moment before that.
        """
        for attempt in range(TRIES):
            claim = self.claim(f"{NAME}/{attempt}", ttl=self.ttl * 2**attempt)
            sent_at = self.now()
            await self.granted(backend, claim)
            if after:
                await self.pass_time(claim.ttl * after)
            again = replace(claim, ttl=2 * claim.ttl + self.expiry_lag) if longer else claim
            renewed_at = self.now()
            outcome = await self.renewed(backend, again)
            if outcome is Renewal.RENEWED:
                return again, renewed_at
            assert self.now() >= self.lasted_until(sent_at, claim.ttl), f"a living grant was not renewed: {outcome}"
        msg = f"this machine needs longer than ttl = {self.ttl} for one renewal; declare a longer one"
        raise AssertionError(msg)
