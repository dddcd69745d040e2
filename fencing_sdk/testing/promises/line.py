"""
The line of waiters: first come, first served, and no waiter sleeps through a release.

A release may hand the lock to the head of the line, with its token. A holder may hear at once that its grant was taken
away.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing

import pytest

from fencing_sdk._client import LockClient
from fencing_sdk._values.claim import Busy, Claim
from fencing_sdk.abc import Backend, SupportsLine
from fencing_sdk.errors import LeaseLostError, LossReason
from fencing_sdk.testing.promises.under_test import (
    NAME,
    BackendUnderTest,
    PowerfulBackend,
    Reopen,
    StandingClaim,
    in_line,
    needs,
)

_WAITERS = 50
_YIELDS = range(8)


@needs("queues")
class LinePromises(BackendUnderTest):
    """Order, wake-ups, and leaving. For backends that declare ``queues``."""

    async def test_a_release_wakes_the_head_of_the_line(self, backend: PowerfulBackend) -> None:
        """A waiter sleeps until the release and is granted then."""
        holder, waiter = self.claim(), self.claim()
        await self.granted(backend, holder)
        async with in_line(backend, waiter) as turn:
            served = asyncio.create_task(self._served(backend, waiter, turn))
            await asyncio.sleep(0.02)
            assert not served.done()
            await backend.release(holder)
            await served

    async def test_a_release_on_another_client_wakes_the_head_too(
        self, backend: PowerfulBackend, reopen: Reopen
    ) -> None:
        """Wake-ups go through the store."""
        holder, waiter = self.claim(), self.claim()
        async with aclosing(reopen()) as other:
            await self.granted(other, holder)
            async with in_line(backend, waiter) as turn:
                served = asyncio.create_task(self._served(backend, waiter, turn))
                await asyncio.sleep(0.02)
                await other.release(holder)
                await served

    async def test_a_release_before_joining_is_not_missed(self, backend: PowerfulBackend) -> None:
        """Refused, released, joined: the try after joining succeeds without any wake-up."""
        holder, waiter = self.claim(), self.claim()
        await self.granted(backend, holder)
        await self.refused(backend, waiter)
        await backend.release(holder)
        async with in_line(backend, waiter):
            await self.granted(backend, waiter)

    async def test_a_release_between_joining_and_waiting_is_not_missed(self, backend: PowerfulBackend) -> None:
        """Joined, refused, released: the wait that begins only then returns at once."""
        holder, waiter = self.claim(), self.claim()
        await self.granted(backend, holder)
        async with in_line(backend, waiter) as turn:
            await self.refused(backend, waiter)
            await backend.release(holder)
            async with self.soon():
                await turn.wait()
            await self._served(backend, waiter, turn)

    async def test_the_line_is_served_in_order(self, backend: PowerfulBackend) -> None:
        """At every release the head is granted and all the others are refused."""
        claims = [self.claim() for _ in range(4)]
        await self.granted(backend, claims[0])
        async with AsyncExitStack() as line:
            turns = [await line.enter_async_context(in_line(backend, claim)) for claim in claims[1:]]
            for ahead, head, turn in zip(claims, claims[1:], turns, strict=False):
                await backend.release(ahead)
                for later in reversed(claims[claims.index(head) + 1 :]):
                    await self.refused(backend, later)
                await self._served(backend, head, turn)

    async def test_a_newcomer_does_not_overtake_the_line(self, backend: PowerfulBackend) -> None:
        """The lock is free, but it is kept for the waiter at the head."""
        holder, waiter = self.claim(), self.claim()
        await self.granted(backend, holder)
        async with in_line(backend, waiter) as turn:
            await self.refused(backend, waiter)
            await backend.release(holder)
            busy = await self.refused(backend, self.claim())
            assert busy.retry_after is None or busy.retry_after > 0, "a newcomer would try in a tight loop"
            await self._served(backend, waiter, turn)

    async def test_a_waiter_keeps_its_place_for_longer_than_a_sign_of_life_lasts(
        self, backend: PowerfulBackend, reopen: Reopen
    ) -> None:
        """The waiter tries when the store advises it, and stays the head of the line until the release."""
        holder, head, late = self.claim(), self.claim(), self.claim()
        await self.granted(backend, holder)
        async with aclosing(reopen()) as other, AsyncExitStack() as line:
            assert isinstance(other, SupportsLine)
            turn = await line.enter_async_context(in_line(backend, head))
            began, joined = self.now(), False
            while (waited := self.now() - began) < 1.2 * self.sign_of_life:
                if waited > 0.6 * self.sign_of_life and not joined:
                    joined = await line.enter_async_context(in_line(other, late)) is not None
                await self.refused(other, late)
                advice = (await self.refused(backend, head)).retry_after
                await self.pass_time(
                    self.sign_of_life / 3 if advice is None else min(max(advice, 0.01), self.sign_of_life / 3)
                )
            await backend.release(holder)
            await self.refused(other, late)
            await self._served(backend, head, turn)

    async def test_leaving_while_it_is_your_turn_passes_the_turn_on(self, backend: PowerfulBackend) -> None:
        """The head was woken and lost interest: the next one is woken instead."""
        holder, head, second = self.claim(), self.claim(), self.claim()
        await self.granted(backend, holder)
        async with AsyncExitStack() as leaving:
            await leaving.enter_async_context(in_line(backend, head))
            async with in_line(backend, second) as turn:
                served = asyncio.create_task(self._served(backend, second, turn))
                await backend.release(holder)
                await asyncio.sleep(0.02)
                assert not served.done()
                await leaving.aclose()
                await served

    async def test_leaving_from_the_middle_of_the_line_keeps_the_order(self, backend: PowerfulBackend) -> None:
        """Every waiter behind moves up by one."""
        holder, head, middle, last = (self.claim() for _ in range(4))
        await self.granted(backend, holder)
        async with AsyncExitStack() as leaving, in_line(backend, head) as turn:
            await leaving.enter_async_context(in_line(backend, middle))
            async with in_line(backend, last) as last_turn:
                await leaving.aclose()
                await backend.release(holder)
                await self.refused(backend, last)
                await self._served(backend, head, turn)
                await backend.release(head)
                await self._served(backend, last, last_turn)

    async def test_a_cancelled_waiter_leaves_nothing_in_the_line(self, backend: PowerfulBackend) -> None:
        """After its task has ended, a newcomer is granted as if it had never waited."""
        holder, waiter = self.claim(), self.claim()
        await self.granted(backend, holder)
        task = asyncio.create_task(self._stand(backend, waiter))
        await asyncio.sleep(0.02)
        await _cancel(task)
        await backend.release(holder)
        await self.granted(backend, self.claim())

    async def test_a_waiter_cancelled_while_joining_leaves_nothing_in_the_line(self, backend: PowerfulBackend) -> None:
        """Wherever the cancellation hits: half joined is not joined."""
        for yields in _YIELDS:
            name = f"joining/{yields}"
            task = asyncio.create_task(self._stand(backend, self.claim(name)))
            for _ in range(yields):
                await asyncio.sleep(0)
            await _cancel(task)
            await self.freed_soon(backend, self.claim(name))

    async def test_a_holder_that_was_served_is_not_in_the_line_any_more(self, backend: PowerfulBackend) -> None:
        """A retry repeats its grant, and leaving the line afterwards gives nothing away."""
        holder, waiter = self.claim(), self.claim()
        await self.granted(backend, holder)
        async with in_line(backend, waiter) as turn:
            await backend.release(holder)
            token = await self._served(backend, waiter, turn)
            assert await self.granted(backend, waiter) == token
        await self.refused(backend, self.claim())
        await backend.release(waiter)
        await self.granted(backend, self.claim())

    async def test_each_name_has_a_line_of_its_own(self, backend: PowerfulBackend) -> None:
        """A waiter in line for one lock holds up no waiter of another lock."""
        await self.granted(backend, self.claim("a"))
        async with in_line(backend, self.claim("a")):
            await self.granted(backend, self.claim("b"))

    async def test_the_head_gets_the_lock_of_a_holder_that_died(self, backend: PowerfulBackend) -> None:
        """No store announces an expiry reliably: ``retry_after`` is soon enough for a waiter's own timer."""
        sent_at = self.now()
        await self.granted(backend, self.claim(ttl=self.ttl))
        by = self.now() + self.ended_after(self.ttl)
        waiter = self.claim()
        async with in_line(backend, waiter):
            freed_at = await self.freed(backend, waiter, by=by)
        assert freed_at >= self.lasted_until(sent_at, self.ttl)

    async def test_fifty_waiters_are_all_served_in_order(self, backend: PowerfulBackend, reopen: Reopen) -> None:
        """Waiters of two clients, joined in turn, are each served exactly once."""
        served: list[int] = []
        joined = asyncio.Queue[None]()

        async def wait_and_hold(client: Backend, number: int) -> None:
            assert isinstance(client, SupportsLine)
            claim = self.claim()
            async with in_line(client, claim) as turn:
                joined.put_nowait(None)
                await _patiently(client, claim, turn)
            served.append(number)
            await client.release(claim)

        first = self.claim()
        await self.granted(backend, first)
        async with aclosing(reopen()) as other, self.soon(), asyncio.TaskGroup() as waiters:
            for number in range(_WAITERS):
                waiters.create_task(wait_and_hold((backend, other)[number % 2], number))
                await joined.get()
            await backend.release(first)
        assert served == list(range(_WAITERS))

    async def _stand(self, backend: PowerfulBackend, claim: Claim) -> None:
        async with in_line(backend, claim) as turn:
            while True:
                await turn.wait()


async def _patiently(backend: Backend, claim: Claim, turn: StandingClaim) -> None:
    """Wait as the engine does: woken, or after ``retry_after``."""
    while isinstance(outcome := await backend.acquire(claim), Busy):
        try:
            async with asyncio.timeout(outcome.retry_after):
                await turn.wait()
        except TimeoutError:
            continue


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))


@needs("hands_over")
class DirectGrantPromises(BackendUnderTest):
    """Handing over, and releasing. For backends that declare ``hands_over``."""

    async def test_a_release_hands_the_lock_over_with_its_token(self, backend: PowerfulBackend) -> None:
        """The waiter asks for nothing after it has joined."""
        holder = self.claim()
        before = await self.granted(backend, holder)
        waiter = StandingClaim(backend, self.claim(), hand_over=True)
        await waiter.joined()
        await backend.release(holder)
        token = await self._handed(waiter)
        found = await backend.inspect(holder.name)
        assert found is not None
        assert (found.id, found.token) == (waiter.claim.holder, token)
        self.assert_rising([before, token])
        assert await self.granted(backend, waiter.claim) == token, "asking again repeats the grant"

    async def test_a_lock_that_was_released_before_the_waiter_joined_is_handed_over(
        self, backend: PowerfulBackend
    ) -> None:
        """Refused, released, joined: the waiter is not left with a free lock."""
        holder, claim = self.claim(), self.claim()
        await self.granted(backend, holder)
        await self.refused(backend, claim)
        await backend.release(holder)
        await self._handed(StandingClaim(backend, claim, hand_over=True))

    async def test_a_lock_is_handed_over_in_the_order_of_arrival(
        self, backend: PowerfulBackend, reopen: Reopen
    ) -> None:
        """Waiters of two clients, each served once."""
        holder = self.claim()
        await self.granted(backend, holder)
        async with aclosing(reopen()) as other:
            waiters = []
            for number in range(6):
                client = (backend, other)[number % 2]
                assert isinstance(client, SupportsLine)
                waiters.append(StandingClaim(client, self.claim(), hand_over=True))
                await waiters[-1].joined()
            tokens = []
            for waiter in waiters:
                assert waiter.grant is None, "it was handed over before its turn"
                await backend.release(holder)
                tokens.append(await self._handed(waiter))
                holder = waiter.claim
            self.assert_rising(tokens)

    async def test_a_waiter_that_has_left_is_not_handed_the_lock(self, backend: PowerfulBackend) -> None:
        """The release of its claim takes it out of the line."""
        holder = self.claim()
        await self.granted(backend, holder)
        waiter = StandingClaim(backend, self.claim(), hand_over=True)
        await waiter.joined()
        waiter.place.leave()
        await backend.release(waiter.claim)
        await backend.release(holder)
        await self.granted(backend, self.claim())

    async def test_a_grant_on_its_way_to_a_waiter_that_leaves_is_released(self, backend: PowerfulBackend) -> None:
        """Handed over and cancelled at once: the release of its claim passes the lock on to the next waiter."""
        holder = self.claim()
        await self.granted(backend, holder)
        leaving = StandingClaim(backend, self.claim(), hand_over=True)
        await leaving.joined()
        following = StandingClaim(backend, self.claim(), hand_over=True)
        await following.joined()
        releasing = asyncio.ensure_future(backend.release(holder))
        await asyncio.sleep(0)
        leaving.place.leave()
        await releasing
        await backend.release(leaving.claim)
        await self._handed(following)

    async def test_a_handed_grant_lasts_for_its_ttl_from_its_age_on(self, backend: PowerfulBackend) -> None:
        """Whatever the message took: no other claim is granted before the age and the ttl allow it."""
        holder = self.claim()
        await self.granted(backend, holder)
        waiter = StandingClaim(backend, self.claim(ttl=self.ttl), hand_over=True)
        await waiter.joined()
        await backend.release(holder)
        await self._handed(waiter)
        counts_from = self.now() - waiter.age
        waiter.place.leave()
        by = self.now() + self.ended_after(self.ttl)
        freed_at = await self.freed(backend, self.claim(), by=by)
        assert freed_at >= self.lasted_until(counts_from, self.ttl)

    async def test_a_waiter_that_asks_is_woken_and_not_handed_the_lock(self, backend: PowerfulBackend) -> None:
        """Fences are raised with a grant, and shares have their own rules: only a try does that."""
        holder, claim = self.claim(), self.claim()
        await self.granted(backend, holder)
        async with in_line(backend, claim) as waiter, self.soon():
            assert not waiter.place.hands_over
            await backend.release(holder)
            await waiter.wait()
            assert waiter.grant is None
            await self.granted(backend, claim)

    async def _handed(self, waiter: StandingClaim) -> int:
        async with self.soon():
            while waiter.grant is None:
                await waiter.wait()
        waiter.place.leave()
        return waiter.grant.token


@needs("notices")
class NoticePromises(BackendUnderTest):
    """For backends that declare ``notices``."""

    async def test_the_holder_is_told_that_its_grant_was_taken_away(self, backend: PowerfulBackend) -> None:
        """The notice names the claim and the reason, and the lock is free."""
        notices: asyncio.Queue[tuple[str, str, LossReason]] = asyncio.Queue()
        backend.on_loss(lambda claim, reason, *_: notices.put_nowait((claim.name, claim.owner, reason)))
        claim = self.claim()
        await self.granted(backend, claim)
        await self.revoke(backend, NAME)
        async with self.soon():
            assert await notices.get() == (NAME, claim.owner, LossReason.REVOKED)
        await self.granted(backend, self.claim())

    async def test_giving_back_is_no_loss(self, backend: PowerfulBackend) -> None:
        """Only a grant that ends behind its holder's back is worth a notice."""
        notices: list[Claim] = []
        backend.on_loss(lambda claim, *_: notices.append(claim))
        claim = self.claim()
        await self.granted(backend, claim)
        await backend.release(claim)
        await self.revoke(backend, NAME)
        await self.granted(backend, self.claim())
        assert not notices

    async def test_notices_stop_when_nobody_wants_them(self, backend: PowerfulBackend) -> None:
        """One client leaves, the others still hear."""
        notices: asyncio.Queue[str] = asyncio.Queue()
        stop = backend.on_loss(lambda *_: notices.put_nowait("left"))
        backend.on_loss(lambda *_: notices.put_nowait("here"))
        stop()
        stop()
        await self.granted(backend, self.claim())
        await self.revoke(backend, NAME)
        async with self.soon():
            assert await notices.get() == "here"
        assert notices.empty()

    async def test_a_notice_ends_the_lease_and_its_work(self, backend: PowerfulBackend) -> None:
        """No heartbeat is needed: the next one would be minutes away."""
        async with LockClient(backend) as locks:
            working = asyncio.create_task(_work(locks))
            await self.taken(backend)
            await self.revoke(backend, NAME)
            with pytest.raises(LeaseLostError) as lost:
                await asyncio.wait_for(working, self.patience)
        assert lost.value.reason is LossReason.REVOKED


async def _work(locks: LockClient) -> None:
    async with locks.lock(NAME, ttl=3600):
        await asyncio.Event().wait()
