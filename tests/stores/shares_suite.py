"""
Permits, readers and writers of two clients, from the wait to the release.

`fencing_sdk.testing.promises.verbs` has the answers of a store to each call. The scenarios are written once. A store
that shares runs them by a subclass with a fixture ``bench``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from stays import PATIENCE, Stay, opened, staying
from store_bench import WaitersBench, nothing_left

from fencing_sdk import LockClient, connect

NAME = "a"
WAITS = {"ttl": 60.0, "wait": PATIENCE}


class SharesSuite:
    """What permits, readers and writers see of each other."""

    @pytest.fixture
    async def clients(self, bench: WaitersBench) -> AsyncIterator[tuple[LockClient, LockClient]]:
        """Two clients of one store, in which they leave nothing."""
        async with opened(bench.url) as (one, _), opened(bench.url) as (other, _):
            yield one, other
        await nothing_left(bench)

    async def test_readers_enter_together_between_two_writers(self, bench: WaitersBench, clients):
        one, other = clients
        async with staying(one.rwlock(NAME, **WAITS).writer) as before:
            readers = [Stay(locks.rwlock(NAME, **WAITS).reader) for locks in (one, other, other)]
            await bench.waiting(NAME, 3)
            writer = Stay(one.rwlock(NAME, **WAITS).writer)
            await bench.waiting(NAME, 4)
            late = Stay(other.rwlock(NAME, **WAITS).reader)
            await bench.waiting(NAME, 5)
            await before.end()
        for reader in readers:
            await reader.begun()
        assert {reader.token for reader in readers} == {readers[0].token}
        assert before.token < readers[0].token
        assert len([holder async for holder in other.all_holders(NAME)]) == 3
        assert not writer.entered.is_set()
        assert not late.entered.is_set()
        for reader in readers:
            await reader.end()
        await writer.begun()
        assert not late.entered.is_set()
        await writer.end()
        await late.begun()
        assert readers[0].token < writer.token < late.token
        await late.end()

    @pytest.mark.parametrize("steps", range(1, 13, 2))
    async def test_readers_that_give_up_while_they_are_let_in_keep_nothing(self, steps: int, bench, clients):
        """However far they have come: the others are let in, and a writer after them."""
        one, other = clients
        async with staying(other.rwlock(NAME, **WAITS).writer) as writer:
            readers = [Stay(one.rwlock(NAME, **WAITS).reader) for _ in range(8)]
            await bench.waiting(NAME, 8)
            ending = asyncio.create_task(writer.end())
            for _ in range(steps):
                await asyncio.sleep(0)
            for reader in readers[::2]:
                reader.task.cancel()
            await ending
        for reader in readers[1::2]:
            await reader.begun()
        await asyncio.wait([reader.task for reader in readers[::2]])
        for reader in readers[1::2]:
            await reader.end()
        async with other.rwlock(NAME, **WAITS).writer as lease:
            assert lease.token > readers[1].token

    async def test_a_permit_that_is_released_lets_in_the_first_with_its_number(self, bench: WaitersBench, clients):
        one, other = clients
        holding = [Stay(locks.semaphore(NAME, permits=2, **WAITS)) for locks in clients]
        for stay in holding:
            await stay.begun()
        waiting = []
        for number in range(3):
            waiting.append(Stay((one, other)[number % 2].semaphore(NAME, permits=2, **WAITS)))
            await bench.waiting(NAME, number + 1)
        taken = {stay.lease.permit: stay for stay in holding}
        assert set(taken) == {0, 1}
        for waiter, number in zip(waiting, (1, 0), strict=False):
            await taken[number].end()
            assert (await waiter.begun()).permit == number
            assert [stay.entered.is_set() for stay in waiting] == [stay in waiting[: 2 - number] for stay in waiting]
        assert max(stay.token for stay in holding) < waiting[0].token < waiting[1].token
        for stay in waiting:
            await stay.begun()
            await stay.end()

    async def test_tries_at_the_same_moment_get_all_permits_that_are_free(self, clients):
        """None is refused because the one ahead has not got its number yet."""
        for _ in range(5):
            tries = [locks.semaphore(NAME, permits=4, ttl=60).try_acquire() for locks in clients * 2]
            leases = await asyncio.gather(*tries)
            assert {lease.permit for lease in leases if lease is not None} == {0, 1, 2, 3}
            await asyncio.gather(*(lease.release() for lease in leases))

    async def test_permits_of_another_process_and_readers_exclude_each_other(self, bench: WaitersBench, clients):
        one, other = clients
        async with staying(one.semaphore(NAME, permits=2, **WAITS)) as permit:
            readers = [Stay(other.rwlock(NAME, **WAITS).reader) for _ in range(3)]
            await bench.waiting(NAME, 3)
            await permit.end()
        for reader in readers:
            await reader.begun()
        async with connect(bench.url) as third:
            assert await third.semaphore(NAME, permits=2).try_acquire() is None
        for reader in readers:
            await reader.end()
