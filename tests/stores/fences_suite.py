"""A guard in the database of the locks: its fences are raised right after the grant, and nothing waits behind them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing
from pathlib import Path
from typing import Any

import pytest
from child_processes import state
from patience import until
from stays import PATIENCE, Stay, opened, staying
from worker_processes import worker_processes

from fencing_sdk import BackendUnavailableError, StaleTokenError, Token, connect
from fencing_sdk.backends import from_url
from fencing_sdk.events import FenceRaised
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.guards.sql import SqlGuard

SEAT = "seats/42"
FROZEN = Path(__file__).with_name("fence_frozen.py")


class FencesSuite:
    """A store brings the fixture ``bench``, and what these ask of its database."""

    def writing(self, bench: Any, guard: SqlGuard, token: int) -> AbstractAsyncContextManager[None]:
        """Write under the fence, in a transaction that ends with the block."""
        raise NotImplementedError

    async def drop_schema(self, bench: Any) -> None:
        raise NotImplementedError

    async def waits_for_a_row(self, bench: Any) -> bool:
        raise NotImplementedError

    @pytest.fixture
    async def backend(self, bench: Any) -> AsyncIterator[Any]:
        async with aclosing(from_url(bench.url)) as made:
            yield made

    @pytest.fixture
    def guard(self, bench: Any) -> SqlGuard:
        return SqlGuard(bench.url)

    async def test_a_holder_of_a_lock_has_its_fences_before_its_body(self, guard, bench):
        async with opened(bench.url) as (locks, log):
            aside = MemoryGuard()
            async with locks.lock(SEAT, fences=[aside, guard]) as lease:
                for each in (guard, aside):
                    fence = await each.highest(SEAT)
                    assert (fence, fence.holder) == (lease.token, lease.holder)
                with pytest.raises(StaleTokenError):
                    async with self.writing(bench, guard, Token(lease.token - 1, "b0b0b0b0")):
                        pass
            assert [event.resource for event in log.of(FenceRaised)] == [SEAT, SEAT]

    async def test_a_fence_that_is_higher_already_gives_the_lock_back(self, guard, bench):
        async with connect(bench.url) as locks:
            await guard.raise_to(SEAT, Token(2**52, "a0a0a0a0"))
            with pytest.raises(StaleTokenError) as stale:
                await locks.lock(SEAT, fences=[guard]).acquire()
            assert stale.value.fence == 2**52
            async with locks.lock(SEAT, ttl=60, wait=0):
                pass

    async def test_permits_and_readers_raise_their_fences(self, guard, bench):
        async with opened(bench.url) as (locks, _):
            async with locks.semaphore("pool", permits=2, fences=[guard]) as one:
                two = await locks.semaphore("pool", permits=2, fences=[guard]).acquire(wait=5)
                assert [await guard.highest(f"pool/{number}") for number in (0, 1)] == [one.token, two.token]
                await two.release()
            catalog = locks.rwlock("catalog", fences=[guard])
            async with catalog.reader as reader, opened(bench.url) as (others, _):
                other = await others.rwlock("catalog", fences=[guard]).reader.try_acquire()
                assert other is not None
                await other.release()
                fence = await guard.highest("catalog")
                assert (fence, fence.holder) == (reader.token, reader.token.holder)
            async with catalog.writer as writer:
                assert await guard.highest("catalog") == writer.token

    async def test_waiters_with_fences_are_served_in_order(self, guard, bench):
        order: list[int] = []

        async def wait(locks, number):
            async with locks.lock(SEAT, fences=[guard], wait=PATIENCE) as lease:
                order.append(number)
                assert await guard.highest(SEAT) == lease.token

        async with connect(bench.url) as locks:
            async with locks.lock(SEAT, fences=[guard]):
                tasks = []
                for number in range(5):
                    tasks.append(asyncio.create_task(wait(locks, number)))
                    await bench.waiting(SEAT, number + 1)
            await asyncio.gather(*tasks)
        assert order == [0, 1, 2, 3, 4]

    async def test_a_fence_that_a_transaction_holds_delays_no_other_lease(self, guard, bench):
        """A transaction that writes under the fence holds it until it ends; heartbeats use another connection."""
        terms = {"ttl": 2.0, "heartbeat_interval": 0.2}
        async with opened(bench.url) as (locks, _):
            await guard.raise_to(SEAT, 1)
            async with staying(locks.lock("other", **terms)) as other, self.writing(bench, guard, 1):
                following = Stay(locks.lock(SEAT, ttl=1.0, heartbeat_interval=0.2, fences=[guard]))
                await following.over()
                assert isinstance(following.error, BackendUnavailableError), following.error
                await other.end()
            async with locks.lock(SEAT, fences=[guard], wait=PATIENCE) as lease:
                assert await guard.highest(SEAT) == lease.token

    @pytest.mark.slow
    async def test_a_raise_that_was_given_up_stops_waiting_at_the_server(self, guard, bench):
        await guard.raise_to(SEAT, 1)
        async with self.writing(bench, guard, 1):
            waiting = asyncio.create_task(guard.raise_to(SEAT, 2))
            while not await self.waits_for_a_row(bench):
                pass
            waiting.cancel()
            async with asyncio.timeout(20):  # the writer holds the fence all the time
                while await self.waits_for_a_row(bench):
                    pass

    @pytest.mark.slow
    @pytest.mark.parametrize("action", ["raise_to", "schema"])
    async def test_a_client_that_freezes_before_any_message_holds_up_no_other(self, action, backend, guard, bench):
        """The next taker goes on while the first one is still frozen."""
        async with worker_processes() as start:
            for number in itertools.count(1):
                worker = await start(FROZEN, bench.url, action, number)
                await worker.says("ready")
                await worker.go_on()
                await until(lambda at=worker.process.pid: state(at) in {"T", "Z", ""})
                if state(worker.process.pid) != "T":
                    break
                if action == "raise_to":
                    await guard.raise_to(SEAT, number + 1)
                else:
                    await backend.create_schema()
                    await self.drop_schema(bench)
                assert state(worker.process.pid) == "T"
                await worker.kill()
            await worker.says("done")
        assert number > 1
