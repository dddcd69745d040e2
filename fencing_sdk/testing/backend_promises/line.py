"""The line of waiters: first come, first served, and no waiter sleeps through a release."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing

from fencing_sdk._values.claim import Claim, Grant, Held
from fencing_sdk.abc import Backend, SupportsQueue, Turn
from fencing_sdk.testing._powers import needs
from fencing_sdk.testing.backend_promises.backend_under_test import BackendUnderTest, QueueingBackend, Reopen

_WAITERS = 50
_YIELDS = range(8)


class LinePromises(BackendUnderTest):
    """Order, wake-ups, and leaving. For backends that declare ``queues``."""

    @needs("queues")
    async def test_a_release_wakes_the_head_of_the_line(self, backend: QueueingBackend) -> None:
        """A waiter sleeps until the release and is granted then."""
        holder, waiter = self.claim(), self.claim()
        await self.granted(backend, holder)
        async with backend.queue(waiter) as turn:
            served = asyncio.create_task(self._served(backend, waiter, turn))
            await asyncio.sleep(0.02)
            assert not served.done()
            await backend.release(holder)
            await served

    @needs("queues")
    async def test_a_release_on_another_client_wakes_the_head_too(
        self, backend: QueueingBackend, reopen: Reopen
    ) -> None:
        """Wake-ups go through the store."""
        holder, waiter = self.claim(), self.claim()
        async with aclosing(reopen()) as other:
            await self.granted(other, holder)
            async with backend.queue(waiter) as turn:
                served = asyncio.create_task(self._served(backend, waiter, turn))
                await asyncio.sleep(0.02)
                await other.release(holder)
                await served

    @needs("queues")
    async def test_a_release_before_joining_is_not_missed(self, backend: QueueingBackend) -> None:
        """Refused, released, joined: the try after joining succeeds without any wake-up."""
        holder, waiter = self.claim(), self.claim()
        await self.granted(backend, holder)
        await self.refused(backend, waiter)
        await backend.release(holder)
        async with backend.queue(waiter):
            await self.granted(backend, waiter)

    @needs("queues")
    async def test_a_release_between_joining_and_waiting_is_not_missed(self, backend: QueueingBackend) -> None:
        """Joined, refused, released: the wait that begins only then returns at once."""
        holder, waiter = self.claim(), self.claim()
        await self.granted(backend, holder)
        async with backend.queue(waiter) as turn:
            await self.refused(backend, waiter)
            await backend.release(holder)
            async with self.soon():
                await turn.wait()
            await self._served(backend, waiter, turn)

    @needs("queues")
    async def test_the_line_is_served_in_order(self, backend: QueueingBackend) -> None:
        """At every release the head is granted and all the others are refused."""
        claims = [self.claim() for _ in range(4)]
        await self.granted(backend, claims[0])
        async with AsyncExitStack() as line:
            turns = [await line.enter_async_context(backend.queue(claim)) for claim in claims[1:]]
            for ahead, head, turn in zip(claims, claims[1:], turns, strict=False):
                await backend.release(ahead)
                for later in reversed(claims[claims.index(head) + 1 :]):
                    await self.refused(backend, later)
                await self._served(backend, head, turn)

    @needs("queues")
    async def test_a_newcomer_does_not_overtake_the_line(self, backend: QueueingBackend) -> None:
        """The lock is free, but it is kept for the waiter at the head."""
        holder, waiter = self.claim(), self.claim()
        await self.granted(backend, holder)
        async with backend.queue(waiter) as turn:
            await self.refused(backend, waiter)
            await backend.release(holder)
            held = await self.refused(backend, self.claim())
            assert held.retry_after is None or held.retry_after > 0, "a newcomer would try in a tight loop"
            await self._served(backend, waiter, turn)

    @needs("queues")
    async def test_a_waiter_keeps_its_place_for_longer_than_a_sign_of_life_lasts(
        self, backend: QueueingBackend, reopen: Reopen
    ) -> None:
        """It tries when the store advises it, and stays the head of the line until the release."""
        holder, head, late = self.claim(), self.claim(), self.claim()
        await self.granted(backend, holder)
        async with aclosing(reopen()) as other, AsyncExitStack() as line:
            assert isinstance(other, SupportsQueue)
            turn = await line.enter_async_context(backend.queue(head))
            began, joined = self.now(), False
            while (waited := self.now() - began) < 1.2 * self.sign_of_life:
                if waited > 0.6 * self.sign_of_life and not joined:
                    joined = await line.enter_async_context(other.queue(late)) is not None
                await self.refused(other, late)
                advice = (await self.refused(backend, head)).retry_after
                await self.pass_time(
                    self.sign_of_life / 3 if advice is None else min(max(advice, 0.01), self.sign_of_life / 3)
                )
            await backend.release(holder)
            await self.refused(other, late)
            await self._served(backend, head, turn)

    @needs("queues")
    async def test_leaving_while_it_is_your_turn_passes_the_turn_on(self, backend: QueueingBackend) -> None:
        """The head was woken and lost interest: the next one is woken instead."""
        holder, head, second = self.claim(), self.claim(), self.claim()
        await self.granted(backend, holder)
        async with AsyncExitStack() as leaving:
            await leaving.enter_async_context(backend.queue(head))
            async with backend.queue(second) as turn:
                served = asyncio.create_task(self._served(backend, second, turn))
                await backend.release(holder)
                await asyncio.sleep(0.02)
                assert not served.done()
                await leaving.aclose()
                await served

    @needs("queues")
    async def test_leaving_from_the_middle_of_the_line_keeps_the_order(self, backend: QueueingBackend) -> None:
        """Every waiter behind moves up by one."""
        holder, head, middle, last = (self.claim() for _ in range(4))
        await self.granted(backend, holder)
        async with AsyncExitStack() as leaving, backend.queue(head) as turn:
            await leaving.enter_async_context(backend.queue(middle))
            async with backend.queue(last) as last_turn:
                await leaving.aclose()
                await backend.release(holder)
                await self.refused(backend, last)
                await self._served(backend, head, turn)
                await backend.release(head)
                await self._served(backend, last, last_turn)

    @needs("queues")
    async def test_a_cancelled_waiter_leaves_nothing_in_the_line(self, backend: QueueingBackend) -> None:
        """After its task has ended, a newcomer is granted as if it had never waited."""
        holder, waiter = self.claim(), self.claim()
        await self.granted(backend, holder)
        task = asyncio.create_task(self._stand(backend, waiter))
        await asyncio.sleep(0.02)
        await _cancel(task)
        await backend.release(holder)
        await self.granted(backend, self.claim())

    @needs("queues")
    async def test_a_waiter_cancelled_while_joining_leaves_nothing_in_the_line(self, backend: QueueingBackend) -> None:
        """Wherever the cancellation hits: half joined is not joined."""
        for yields in _YIELDS:
            name = f"joining/{yields}"
            task = asyncio.create_task(self._stand(backend, self.claim(name)))
            for _ in range(yields):
                await asyncio.sleep(0)
            await _cancel(task)
            await self.freed_soon(backend, self.claim(name))

    @needs("queues")
    async def test_a_holder_that_was_served_is_not_in_the_line_any_more(self, backend: QueueingBackend) -> None:
        """A retry repeats its grant, and leaving the line afterwards gives nothing away."""
        holder, waiter = self.claim(), self.claim()
        await self.granted(backend, holder)
        async with backend.queue(waiter) as turn:
            await backend.release(holder)
            token = await self._served(backend, waiter, turn)
            assert await self.granted(backend, waiter) == token
        await self.refused(backend, self.claim())
        await backend.release(waiter)
        await self.granted(backend, self.claim())

    @needs("queues")
    async def test_each_name_has_a_line_of_its_own(self, backend: QueueingBackend) -> None:
        """A waiter in line for one lock holds up no waiter of another lock."""
        await self.granted(backend, self.claim("a"))
        async with backend.queue(self.claim("a")):
            await self.granted(backend, self.claim("b"))

    @needs("queues")
    async def test_the_head_gets_the_lock_of_a_holder_that_died(self, backend: QueueingBackend) -> None:
        """No store announces an expiry reliably: ``retry_after`` is soon enough for a waiter's own timer."""
        sent_at = self.now()
        await self.granted(backend, self.claim(ttl=self.ttl))
        by = self.now() + self.ended_after(self.ttl)
        waiter = self.claim()
        async with backend.queue(waiter):
            freed_at = await self.freed(backend, waiter, by=by)
        assert freed_at >= self.lasted_until(sent_at, self.ttl)

    @needs("queues")
    async def test_fifty_waiters_are_all_served_in_order(self, backend: QueueingBackend, reopen: Reopen) -> None:
        """Waiters of two clients, joined in turn, are each served exactly once."""
        served: list[int] = []
        joined = asyncio.Queue[None]()

        async def wait_and_hold(client: Backend, number: int) -> None:
            assert isinstance(client, SupportsQueue)
            claim = self.claim()
            async with client.queue(claim) as turn:
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

    async def _served(self, backend: Backend, claim: Claim, turn: Turn) -> int:
        """Wait for the turn of *claim* by wake-ups alone, without a timer that would hide a lost one."""
        async with self.soon():
            while not isinstance(outcome := await backend.acquire(claim), Grant):
                await turn.wait()
        return outcome.token

    async def _stand(self, backend: QueueingBackend, claim: Claim) -> None:
        async with backend.queue(claim) as turn:
            while True:
                await turn.wait()


async def _patiently(backend: Backend, claim: Claim, turn: Turn) -> None:
    """Wait as the engine does: woken, or after ``retry_after``."""
    while isinstance(outcome := await backend.acquire(claim), Held):
        try:
            async with asyncio.timeout(outcome.retry_after):
                await turn.wait()
        except TimeoutError:
            continue


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))
