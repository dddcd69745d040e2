"""The ttl: a grant lasts that long after the last renewal, and is gone then, even if no call reaches the store."""

from __future__ import annotations

from contextlib import aclosing

from fencing_sdk._values.claim import Claim, Grant, Renewal
from fencing_sdk._values.timing import MIN_TTL
from fencing_sdk.abc import Backend
from fencing_sdk.testing.backend_promises.backend_under_test import NAME, TRIES, BackendUnderTest, Reopen


class ExpiryPromises(BackendUnderTest):
    """Not before the ttl, and not long after it."""

    async def test_a_grant_lasts_its_ttl_and_not_longer(self, backend: Backend, reopen: Reopen) -> None:
        """Without renewal and release, a rival is refused until the ttl is over, and granted then."""
        sent_at = self.now()
        await self.granted(backend, self.claim(ttl=self.ttl))
        async with aclosing(reopen()) as other:
            freed_at = await self.freed(other, self.claim(), by=self.now() + self.ended_after(self.ttl))
        assert freed_at >= self.lasted_until(sent_at, self.ttl)

    async def test_an_expired_grant_is_gone_even_if_nobody_came(self, backend: Backend) -> None:
        """No holder is shown, and its owner gets no renewal."""
        claim = self.claim(ttl=self.ttl)
        await self.granted(backend, claim)
        await self.expire(self.ttl)
        assert await backend.inspect(NAME) is None
        assert await self.renewed(backend, claim) is Renewal.REFUSED

    async def test_a_release_after_the_ttl_finds_no_grant(self, backend: Backend) -> None:
        """Its owner had lost it, even if no other owner came: others could have had the lock meanwhile."""
        claim = self.claim(ttl=self.ttl)
        await self.granted(backend, claim)
        await self.expire(self.ttl)
        assert await backend.release(claim) is Renewal.REFUSED

    async def test_the_former_owner_cannot_touch_the_next_grant(self, backend: Backend) -> None:
        """After an expiry its renewal is refused and its release does nothing."""
        former, now_mine = self.claim(ttl=self.ttl), self.claim()
        await self.granted(backend, former)
        await self.expire(self.ttl)
        await self.granted(backend, now_mine)
        assert await self.renewed(backend, former) is self.taken_over
        assert await backend.release(former) is self.taken_over
        await self.refused(backend, self.claim())
        assert await self.renewed(backend, now_mine) is Renewal.RENEWED

    async def test_acquiring_again_gives_a_fresh_ttl(self, backend: Backend) -> None:
        """Or the grant says that it did not restart the ttl, so that the deadline is not reckoned from the retry."""
        claim, counts_from = await self._granted_again(backend)
        by = self.now() + self.ended_after(claim.ttl)
        freed_at = await self.freed(backend, self.claim(claim.name), by=by)
        assert freed_at >= self.lasted_until(counts_from, claim.ttl)

    async def _granted_again(self, backend: Backend) -> tuple[Claim, float]:
        """
        Acquire a lock twice for one claim; return the claim, and the moment from which its ttl counts.

        A machine that is slower than the ttl starts again, with twice the ttl.
        """
        for attempt in range(TRIES):
            claim = self.claim(f"{NAME}/{attempt}", ttl=self.ttl * 2**attempt)
            first_at = self.now()
            await self.granted(backend, claim)
            await self.pass_time(claim.ttl * 0.4)
            again_at = self.now()
            outcome = await backend.acquire(claim)
            if isinstance(outcome, Grant):
                return claim, again_at if outcome.restarted else first_at
            assert self.now() >= self.lasted_until(first_at, claim.ttl), f"a living grant was refused: {outcome}"
        msg = f"this machine needs longer than ttl = {self.ttl} for one acquisition; declare a longer one"
        raise AssertionError(msg)

    async def test_grants_of_one_name_may_have_different_ttls(self, backend: Backend) -> None:
        """The ttl belongs to the claim: a long one is not cut to that of the holder before."""
        short, long = self.claim(ttl=self.ttl), self.claim(ttl=60 * self.ttl)
        await self.granted(backend, short)
        await backend.release(short)
        await self.granted(backend, long)
        await self.expire(self.ttl)
        await self.refused(backend, self.claim())

    async def test_an_odd_ttl_is_not_cut(self, backend: Backend) -> None:
        """Fractions are rounded up, never down, and ttls below the store's minimum up to that."""
        for number, asked in enumerate((MIN_TTL, self.ttl * 1.15)):
            name, ttl = f"odd/{number}", max(asked, self.minimum_ttl)
            sent_at = self.now()
            await self.granted(backend, self.claim(name, ttl=asked))
            freed_at = await self.freed(backend, self.claim(name), by=self.now() + self.ended_after(ttl))
            assert freed_at >= self.lasted_until(sent_at, ttl)

    async def test_the_remaining_seconds_shrink(self, backend: Backend) -> None:
        """What `inspect` shows is what is left, and not the ttl that was asked for."""
        ttl = 10 * self.ttl
        await self.granted(backend, self.claim(ttl=ttl))
        granted_by = self.now()
        await self.pass_time(self.ttl)
        asked_at = self.now()
        holder = await backend.inspect(NAME)
        assert holder is not None
        assert 0 < holder.remaining <= granted_by + self.ended_after(ttl) - asked_at
