"""Failure modes 9, 10 and 11: tokens that only grow, belong to one grant, and are checked where the write happens."""

import asyncio
import random
import time

import pytest
from event_log import Log, ticks
from failing_store import LedgerBackend
from inside import state_of
from patience import until

from fencing_sdk import (
    BackendUnavailableError,
    LeaseLostError,
    LockClient,
    StaleTokenError,
    Token,
    current_token,
)
from fencing_sdk.abc import Place
from fencing_sdk.events import FenceRaised, StaleRejected
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.testing import FaultyBackend


async def test_mode_09_tokens_grow_over_release_expiry_and_revocation():
    """9: however a grant ends, the next one has a higher token."""
    store = LedgerBackend()
    async with LockClient(store) as locks:
        lock = locks.lock("seats/42", ttl=1.0)
        for number in range(12):
            lease = await lock.acquire()
            if number % 3 == 0:
                store.take_away("seats/42")
            elif number == 1:
                await store.keep([(state_of(lease).claim, 0)])
                locks._engine._heartbeat.forget(lease.owner)  # as if its process had died
                await until(lambda: not store._lines.tickets("seats/42"))
            await lease.release()
    tokens = [entry.token for entry in store.of("acquire")]
    assert len(tokens) == 12
    assert tokens == sorted(set(tokens))


async def test_mode_09_tokens_grow_though_the_store_forgets_everything():
    """9: the counter is lost with its process; the clock under it is not."""
    tokens = []
    for _ in range(3):
        async with LockClient(LedgerBackend()) as locks, locks.lock("seats/42") as lease:
            tokens.append(lease.token)
    assert tokens == sorted(set(tokens))


async def test_mode_09_tokens_grow_though_the_wall_clock_steps_back(monkeypatch):
    """9: a clock that is set back by a day stops the growth of nothing while the store lives."""
    store = LedgerBackend()
    tokens = []
    async with LockClient(store) as locks:
        for days in (0, -1, 1, -30):
            now = time.time_ns()
            with monkeypatch.context() as clock:
                clock.setattr(
                    "fencing_sdk._values.clock.time.time_ns", lambda now=now, days=days: now + days * 86_400 * 10**9
                )
                async with locks.lock("seats/42") as lease:
                    tokens.append(int(lease.token))
    assert tokens == sorted(set(tokens))


class UnevenStore(LedgerBackend):
    """Pauses of random length before and after every step, so that answers overtake each other."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(7)

    async def draw(self, claim, **options):
        await ticks(self.random.randrange(6))
        answer = await super().draw(claim, **options)
        await asyncio.sleep(self.random.choice([0, 0.002, 0.01]))
        return answer

    async def give_back(self, claim, **options):
        await ticks(self.random.randrange(6))
        await super().give_back(claim, **options)
        await ticks(self.random.randrange(6))


async def test_mode_10_the_order_of_tokens_is_the_order_of_grants():
    """10: with pauses between all steps, and answers that arrive in another order than they were given."""
    store = UnevenStore()
    used: list[tuple[int, str]] = []
    async with LockClient(store) as one, LockClient(store) as two:

        async def work(number: int) -> None:
            client = (one, two)[number % 2]
            async with client.lock("seats/42", ttl=60) as lease:
                used.append((int(lease.token), lease.holder))
                await ticks(number % 3)

        await asyncio.gather(*(work(number) for number in range(30)))
    granted = [(entry.token, entry.holder) for entry in store.of("acquire")]
    assert used == granted
    assert [token for token, _ in used] == sorted({token for token, _ in used})


async def test_mode_10_the_token_is_the_one_of_the_grant_for_ever():
    """10: never fetched again; a holder that was passed over does not receive its successor's token."""
    store = LedgerBackend()
    link = FaultyBackend(store)
    async with LockClient(link) as locks, LockClient(store) as others:
        lease = await locks.lock("seats/42", ttl=1.5).acquire()
        token = lease.token
        for _ in range(3):
            await lease.renew()
            assert lease.token == token
            assert lease.token.holder == token.holder == lease.holder
        link.fail("renew")
        heir = await others.lock("seats/42", ttl=5).acquire()
        assert heir.token > token
        with pytest.raises(LeaseLostError) as lost:
            _ = lease.token
        assert lost.value.token == token
        await lease.release()
        await heir.release()
    assert len(store.of("acquire", lease.holder)) == 1


async def test_mode_10_a_token_cannot_be_set():
    """10: neither the lease's nor the context's token is anybody's to change."""
    async with LockClient(LedgerBackend()) as locks, locks.lock("seats/42") as lease:
        with pytest.raises(AttributeError):
            lease.token = Token(1)
        assert current_token() == lease.token


async def test_mode_10_a_retry_whose_first_answer_was_lost_has_the_token_of_the_first_grant():
    """10: the second question of one claimant does not draw a second number."""
    store = LedgerBackend()
    link = FaultyBackend(store)
    link.lose_reply("acquire", times=3)
    async with LockClient(link) as locks, locks.lock("seats/42", ttl=5) as lease:
        assert [entry.token for entry in store.of("acquire")] == [lease.token] * 4


async def test_mode_11_the_old_holder_is_refused_before_the_new_one_has_written():
    """11: acquiring raises the fence; there is no gap between the grant and the first write."""
    store = LedgerBackend()
    link = FaultyBackend(store)
    seats = MemoryGuard()
    written = []
    log = Log()
    async with LockClient(link) as paused, LockClient(store, observers=[log]) as others:
        zombie = await paused.lock("seats/42", ttl=1.5, fences=[seats]).acquire()
        kept = zombie.token
        seats.write("seats/42", kept, written.append, "while it was mine")
        link.fail("renew")
        async with others.lock("seats/42", ttl=5, fences=[seats]) as lease:
            assert [event.resource for event in log.of(FenceRaised)] == ["seats/42"]
            with pytest.raises(StaleTokenError) as stale:
                seats.write("seats/42", kept, written.append, "too late")
            assert (stale.value.token, stale.value.fence) == (kept, lease.token)
            assert written == ["while it was mine"]
            seats.write("seats/42", lease.token, written.append, "first")
            seats.write("seats/42", lease.token, written.append, "one holder may write twice")
        await zombie.release()
    assert written == ["while it was mine", "first", "one holder may write twice"]


async def test_mode_11_a_holder_that_the_resource_refuses_does_not_hold():
    """11: a store that lost its counter grants a token below the fence; no work begins, and the lock is released."""

    class Restarted(LedgerBackend):
        async def draw(self, claim, **options):
            answer = await super().draw(claim, **options)
            return answer._replace(token=5) if isinstance(answer, Place) else answer

    store = Restarted()
    seats = MemoryGuard()
    log = Log()
    await seats.raise_to("seats/42", Token(34, "9f8a01c2"))
    async with LockClient(store, observers=[log]) as locks:
        with pytest.raises(StaleTokenError):
            async with locks.lock("seats/42", fences=[seats]):
                pytest.fail("the body must not run")
        assert store.tidy
    assert [(event.token, event.fence) for event in log.of(StaleRejected)] == [(5, 34)]


async def test_mode_11_two_holders_of_one_number_are_told_apart():
    """11: a broken token source gives one number twice; the second holder is refused, loudly."""

    class Broken(LedgerBackend):
        async def draw(self, claim, **options):
            answer = await super().draw(claim, **options)
            return answer._replace(token=7) if isinstance(answer, Place) else answer

    seats = MemoryGuard()
    log = Log()
    async with LockClient(Broken(), observers=[log]) as locks:
        lock = locks.lock("seats/42", fences=[seats])
        async with lock as lease:
            seats.admit("seats/42", lease.token)
        with pytest.raises(StaleTokenError) as conflict:
            await lock.acquire()
    assert conflict.value.conflict
    assert [event.conflict for event in log.of(StaleRejected)] == [True]


async def test_mode_11_a_fence_that_cannot_be_raised_gives_the_lock_back():
    """11: a guard that fails, and one that hangs, end the acquisition with an error and a free lock."""

    class Failing(MemoryGuard):
        async def raise_to(self, resource, token):
            raise ConnectionResetError

    class Hanging(MemoryGuard):
        async def raise_to(self, resource, token):
            await asyncio.Event().wait()

    store = LedgerBackend()
    async with LockClient(store) as locks:
        with pytest.raises(ConnectionResetError):
            await locks.lock("seats/42", fences=[Failing()]).acquire()
        assert store.tidy
        with pytest.raises((BackendUnavailableError, LeaseLostError)):  # lost, if the machine is very busy
            await asyncio.wait_for(locks.lock("seats/42", ttl=0.3, fences=[Hanging()]).acquire(), 20)
        assert store.tidy


async def test_mode_11_a_stale_write_that_leaves_the_body_is_seen_by_the_observers():
    """11: the refusal is the caller's error, bare, and an event for whoever watches."""
    seats = MemoryGuard()
    log = Log()
    async with LockClient(LedgerBackend(), observers=[log]) as locks:
        with pytest.raises(StaleTokenError) as stale:
            async with locks.lock("seats/42") as lease:
                await seats.raise_to("seats/42", Token(lease.token + 10))
                seats.write("seats/42", lease.token, pytest.fail, "written too late")
        assert stale.value.token == log.of(StaleRejected)[0].token
