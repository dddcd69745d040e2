"""
One lock, several claims: who is granted, who is refused, how the lock is released, and what is left of a try given up.

Names and labels are untrusted text: kept as they are, never mixed up, never executed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any

import pytest

from fencing_sdk._values.claim import Claim, Grant, Holder, Renewal
from fencing_sdk.abc import (
    Backend,
    SupportsLine,
    SupportsListing,
    SupportsLossNotice,
    SupportsRevoking,
    SupportsShares,
    SupportsTransfer,
)
from fencing_sdk.errors import BackendUnavailableError
from fencing_sdk.testing.promises.under_test import BackendUnderTest, Reopen, StandingClaim


class GrantPromises(BackendUnderTest):
    """Lifecycle, contention, ownership, idempotence."""

    async def test_the_declared_powers_are_the_real_ones(self, backend: Backend) -> None:
        """A power that is there is tested, and one that is declared is there."""
        standing = StandingClaim(backend, self.claim(), hand_over=True) if isinstance(backend, SupportsLine) else None
        assert self.queues == (standing is not None and not standing.place.polls), "declare queues"
        assert self.hands_over == (standing is not None and standing.place.hands_over), "declare hands_over"
        if standing is not None:
            await standing.leave()
        assert self.shares == isinstance(backend, SupportsShares), "declare shares"
        assert self.notices == isinstance(backend, SupportsLossNotice), "declare notices"
        assert self.lists == isinstance(backend, SupportsListing), "declare lists"
        assert self.revokes == isinstance(backend, SupportsRevoking), "declare revokes"
        assert self.transfers == isinstance(backend, SupportsTransfer), "declare transfers"

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
        """Name, token, public holder and the seconds that are left; never the owner, which could release the lock."""
        claim = self.claim(label="batch 7")
        token = await self.granted(backend, claim)
        holder = await backend.inspect(claim.name)
        assert holder is not None
        assert claim.owner not in repr(holder)
        assert (holder.name, holder.token, holder.id) == (claim.name, token, claim.holder)
        assert 0 < holder.remaining <= self.ended_after(claim.ttl)

    async def test_inspect_shows_none_when_the_lock_is_free(self, backend: Backend) -> None:
        """Before the first grant and after the release."""
        claim = self.claim()
        assert await backend.inspect(claim.name) is None
        await self.granted(backend, claim)
        await backend.release(claim)
        assert await backend.inspect(claim.name) is None

    async def test_grants_outlive_the_object_that_asked_for_them(self, backend: Backend, reopen: Reopen) -> None:
        """Closing the connections releases nothing."""
        claim = self.claim()
        token = await self.granted(backend, claim)
        await backend.aclose()
        async with aclosing(reopen()) as other:
            await self.refused(other, self.claim())
            assert await self.granted(other, claim) == token

    async def test_a_closed_backend_opens_again(self, backend: Backend) -> None:
        """Every call may be the first one after `aclose`, and closing twice is not an error."""
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
        """A release proves ownership; that of a stranger changes nothing and is not an error."""
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
        """A waiter never sleeps beyond the moment at which the holder's grant ends."""
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


_YIELDS = (0, 1, 2, 3, 5, 8, 13, 21, 34)
"""Turns of the event loop after which a call is cancelled: before, during and after its way to the store."""


class AbandonmentPromises(BackendUnderTest):
    """Cancelled calls, and answers that were never read."""

    async def test_a_claim_is_enough_to_free_a_grant_that_nobody_read(self, backend: Backend) -> None:
        """The answer got lost: the claim is enough to release the lock, without the token."""
        claim = self.claim()
        await backend.acquire(claim)
        await backend.release(Claim(claim.name, claim.ttl, claim.owner))
        await self.granted(backend, self.claim())

    async def test_a_cancelled_acquisition_can_be_released(self, backend: Backend) -> None:
        """Wherever the cancellation hits, releasing by claim, again if need be, frees the lock."""
        for yields in _YIELDS:
            claim = self.claim(f"cancelled/{yields}")
            await _cut_short(backend.acquire(claim), yields)
            await self._released(backend, claim)

    async def test_a_release_that_overtakes_its_acquisition_is_repeated(self, backend: Backend) -> None:
        """The release finds nothing and says nothing; the late grant is freed by the next release."""
        claim = self.claim()
        await backend.release(claim)
        await self.granted(backend, claim)
        await self.refused(backend, self.claim())
        await backend.release(claim)
        await self.granted(backend, self.claim())

    async def test_a_cancelled_call_does_not_harm_the_next_ones(self, backend: Backend) -> None:
        """The connection is not left in the middle of something, and answers are not mixed up."""
        mine, other = self.claim(), self.claim("invoices/43")
        await self.granted(backend, mine)
        token = await self.granted(backend, other)
        calls: tuple[Callable[[], Awaitable[object]], ...] = (
            lambda: backend.renew([mine]),
            lambda: backend.inspect(mine.name),
            lambda: backend.acquire(self.claim()),
            lambda: backend.release(self.claim()),
        )
        for yields in _YIELDS:
            for call in calls:
                await _cut_short(_awaited(call), yields)
                holder = await backend.inspect(other.name)
                assert isinstance(holder, Holder), f"expected what inspect shows, got {holder}"
                assert (holder.name, holder.token) == (other.name, token)
        assert await self.renewed(backend, mine) is Renewal.RENEWED

    async def _released(self, backend: Backend, claim: Claim) -> None:
        rival = self.claim(claim.name)
        async with self.soon():
            while True:
                await backend.release(claim)
                if isinstance(await backend.acquire(rival), Grant):
                    return
                await asyncio.sleep(0.01)


async def _awaited(call: Callable[[], Awaitable[object]]) -> None:
    await call()


async def _cut_short(call: Coroutine[Any, Any, object], yields: int) -> None:
    task = asyncio.ensure_future(call)
    for _ in range(yields):
        await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError, BackendUnavailableError):
        await task


ODD_NAMES = (
    *("a", "A", " a", "a ", "a b", "a+b", "a%20b", "0", "00", "-1", "None", "null", "true"),
    *("a/b", "a%2Fb", "a//b", "a\\b", "/a", "a/", ".", "..", "../a", "../../etc/passwd", "a.lock", "-rf"),
    *("a:b", "a::b", "{a}", "{a}b", "a{}", "{0}", "%s", "%(name)s", "%", "%00", "$1", "${HOME}"),
    *("*", "?", "[a]", "a*", "_", "'", '"', "''", "`a`", "a'; DROP TABLE locks; --", "' OR '1'='1"),
    *("#", "a#b", "a?b=c", "a&b", "a,b", "a;b", "a|b", "a~b", "<a>"),
    *("a\N{COMBINING ACUTE ACCENT}", "\N{LATIN SMALL LETTER A WITH ACUTE}", "\N{LATIN SMALL LETTER SHARP S}", "ss"),
    *("\N{LATIN SMALL LETTER DOTLESS I}", "\N{FULLWIDTH LATIN SMALL LETTER A}", "\N{LOCK}"),
    *("\N{ZERO WIDTH SPACE}", "a\N{ZERO WIDTH SPACE}", "a\N{NO-BREAK SPACE}b", "\N{RIGHT-TO-LEFT OVERRIDE}a"),
    *("x" * 511, "x" * 511 + "y", "x" * 511 + "z", "\N{LOCK}" * 127, "\N{LOCK}" * 128, "/" * 512, "%" * 512),
)
"""Valid names that are easily escaped wrongly, folded into one another, or cut."""

ODD_TEXTS = (
    "",
    " ",
    "0",
    "null",
    'it\'s "quoted" `here` \\ there',
    "two\r\nlines\tand a tab",
    '{"json": [1, 2]}',
    "%s {0} $1 :name ?",
    "'); DROP TABLE locks; --",
    "a\N{COMBINING ACUTE ACCENT}\N{LATIN SMALL LETTER A WITH ACUTE}\N{RIGHT-TO-LEFT OVERRIDE}",
    "\N{LOCK}" * 1024,
)


class NamePromises(BackendUnderTest):
    """Every valid name is a lock of its own."""

    async def test_no_two_names_are_the_same_lock(self, backend: Backend) -> None:
        """All are held at once, each by an owner of its own, and each shows its own name and token."""
        claims = [self.claim(name) for name in ODD_NAMES]
        tokens = {claim.name: await self.granted(backend, claim) for claim in claims}
        for claim in claims:
            holder = await backend.inspect(claim.name)
            assert holder is not None, f"{claim.name!r} is shown as free"
            assert (holder.name, holder.id) == (claim.name, claim.holder)
            assert holder.token == tokens[claim.name]

    async def test_a_release_frees_one_name_alone(self, backend: Backend) -> None:
        """No name is a pattern, a prefix or a folder of others."""
        claims = [self.claim(name) for name in ODD_NAMES]
        for claim in claims:
            await self.granted(backend, claim)
        for released, kept in zip(claims[::2], claims[1::2], strict=False):
            await backend.release(released)
            assert await backend.inspect(released.name) is None
            await self.refused(backend, self.claim(kept.name))

    async def test_a_renewal_is_about_one_name_alone(self, backend: Backend) -> None:
        """In one call, held and free names with the oddest texts side by side."""
        claims = [self.claim(name) for name in ODD_NAMES]
        for claim in claims[::2]:
            await self.granted(backend, claim)
        outcomes = [getattr(outcome, "name", outcome) for outcome in await backend.renew(claims)]
        assert outcomes == ["RENEWED" if number % 2 == 0 else "REFUSED" for number in range(len(claims))]

    @pytest.mark.parametrize("label", [None, *ODD_TEXTS], ids=lambda text: ascii(text)[:20])
    async def test_a_label_is_shown_as_it_was_given(self, backend: Backend, label: str | None) -> None:
        """And None is None, not a text."""
        claim = self.claim(label=label)
        await self.granted(backend, claim)
        holder = await backend.inspect(claim.name)
        assert holder is not None
        assert holder.label == label

    async def test_a_label_belongs_to_the_grant(self, backend: Backend) -> None:
        """The next holder's text replaces it, and no text means none."""
        first, second = self.claim(label="batch 7"), self.claim()
        await self.granted(backend, first)
        await backend.release(first)
        await self.granted(backend, second)
        holder = await backend.inspect(second.name)
        assert holder is not None
        assert holder.label is None
