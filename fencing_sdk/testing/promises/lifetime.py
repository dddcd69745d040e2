"""How long a grant lasts, how renewals restart its ttl, and that later grants have higher tokens, whatever happens."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

from fencing_sdk._values.claim import Claim, Grant, Renewal
from fencing_sdk._values.timing import MIN_TTL
from fencing_sdk.abc import Backend
from fencing_sdk.testing.promises.under_test import NAME, TRIES, BackendUnderTest, Reopen, needs


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
        """`inspect` shows the seconds that are left, and not the ttl of the claim."""
        ttl = 10 * self.ttl
        await self.granted(backend, self.claim(ttl=ttl))
        granted_by = self.now()
        await self.pass_time(self.ttl)
        asked_at = self.now()
        holder = await backend.inspect(NAME)
        assert holder is not None
        assert 0 < holder.remaining <= granted_by + self.ended_after(ttl) - asked_at


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
        """A heartbeat that is still on its way when the lock is released finds nothing."""
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

    async def test_a_renewal_keeps_token_and_label(self, backend: Backend) -> None:
        """A renewed grant is the same grant."""
        claim = self.claim(label="batch 7")
        token = await self.granted(backend, claim)
        assert await self.renewed(backend, claim) is Renewal.RENEWED
        holder = await backend.inspect(NAME)
        assert holder is not None
        assert (holder.token, holder.label) == (token, "batch 7")

    async def test_another_client_may_renew_with_the_claim(self, backend: Backend, reopen: Reopen) -> None:
        """The owner id is the proof, not the connection: a client that reconnected renews on."""
        claim = self.claim()
        await self.granted(backend, claim)
        async with aclosing(reopen()) as other:
            assert await self.renewed(other, claim) is Renewal.RENEWED

    # Another ttl

    async def test_a_renewal_may_set_a_longer_ttl(self, backend: Backend) -> None:
        """The new ttl counts from the renewal on: so a job leaves its lock to the store for a while."""
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
        """Nothing is sent, and nothing fails."""
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


class TokenPromises(BackendUnderTest):
    """Growth, for ever."""

    async def test_tokens_grow_after_a_release(self, backend: Backend) -> None:
        """The number outlives the record of the grant."""
        tokens = [await self._taken_and_released(backend) for _ in range(5)]
        self.assert_rising(tokens)

    async def test_tokens_grow_after_an_expiry(self, backend: Backend) -> None:
        """A holder that died is followed by a higher number."""
        first = await self.granted(backend, self.claim(ttl=self.ttl))
        await self.expire(self.ttl)
        assert await self.granted(backend, self.claim()) > first

    async def test_tokens_grow_when_the_same_owner_comes_after_its_expiry(self, backend: Backend) -> None:
        """The same owner id gets a new number: another holder may have had the lock in between."""
        claim = self.claim(ttl=self.ttl)
        first = await self.granted(backend, claim)
        await self.expire(self.ttl)
        assert await self.granted(backend, claim) > first

    async def test_tokens_grow_after_a_clean_up(self, backend: Backend) -> None:
        """The store may delete released and expired grants, but never the last number."""
        expired = await self.granted(backend, self.claim(ttl=self.ttl))
        await self.expire(self.ttl)
        await self.purge(backend)
        released = await self._taken_and_released(backend)
        await self.purge(backend)
        self.assert_rising([expired, released, await self.granted(backend, self.claim())])

    async def test_tokens_grow_after_a_restart(self, backend: Backend, reopen: Reopen) -> None:
        """Neither released nor expired numbers come again from the restarted store."""
        released = await self._taken_and_released(backend)
        expired = await self.granted(backend, self.claim(ttl=self.ttl))
        await self.expire(self.ttl)
        async with aclosing(await self.restart(backend, reopen)) as restarted:
            self.assert_rising([released, expired, await self.granted(restarted, self.claim())])

    async def test_tokens_grow_after_many_restarts(self, backend: Backend, reopen: Reopen) -> None:
        """Also when a restart follows at once, and when nothing happened in between."""
        async with AsyncExitStack() as opened:
            tokens = [await self._taken_and_released(backend)]
            for _ in range(3):
                backend = await opened.enter_async_context(aclosing(await self.restart(backend, reopen)))
                backend = await opened.enter_async_context(aclosing(await self.restart(backend, reopen)))
                tokens.append(await self._taken_and_released(backend))
        self.assert_rising(tokens)

    @needs("survives_restart")
    async def test_grants_survive_a_restart(self, backend: Backend, reopen: Reopen) -> None:
        """The holder goes on, with its token; a rival is still refused."""
        claim = self.claim()
        token = await self.granted(backend, claim)
        async with aclosing(await self.restart(backend, reopen)) as restarted:
            await self.refused(restarted, self.claim())
            assert await self.renewed(restarted, claim) is Renewal.RENEWED
            assert await self.granted(restarted, claim) == token

    async def test_tokens_grow_across_clients(self, backend: Backend, reopen: Reopen) -> None:
        """The number is the store's: clients that take turns see one rising row."""
        async with aclosing(reopen()) as other:
            tokens = [await self._taken_and_released(client) for client in (backend, other) * 4]
        self.assert_rising(tokens)

    async def test_tokens_grow_for_each_name(self, backend: Backend) -> None:
        """Names that take turns do not disturb each other's growth."""
        tokens: dict[str, list[int]] = {"a": [], "b": [], "a/b": []}
        for _, name in itertools.product(range(4), tokens):
            tokens[name].append(await self._taken_and_released(backend, name))
        for row in tokens.values():
            self.assert_rising(row)

    async def test_two_grants_never_share_a_token(self, backend: Backend, reopen: Reopen) -> None:
        """Many rivals of two clients, all at once: every number comes once, in the order of the grants."""
        tokens: list[int] = []

        async def rival(client: Backend) -> None:
            claim = self.claim()
            await self.freed_soon(client, claim)
            tokens.append(await self.granted(client, claim))
            await client.release(claim)

        async with aclosing(reopen()) as other, asyncio.TaskGroup() as rivals:
            for client in (backend, other) * 10:
                rivals.create_task(rival(client))
        assert len(tokens) == 20
        self.assert_rising(tokens)

    async def test_inspect_and_retries_show_the_token_of_the_grant(self, backend: Backend) -> None:
        """There is one number for a grant, wherever it is shown."""
        claim = self.claim()
        token = await self.granted(backend, claim)
        assert await self.renewed(backend, claim) is Renewal.RENEWED
        assert await self.granted(backend, claim) == token
        holder = await backend.inspect(NAME)
        assert holder is not None
        assert holder.token == token

    async def _taken_and_released(self, backend: Backend, name: str = NAME) -> int:
        claim: Claim = self.claim(name)
        token = await self.granted(backend, claim)
        await backend.release(claim)
        return token
