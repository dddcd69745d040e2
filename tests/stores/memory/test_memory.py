"""The memory backend keeps the contract; its clock is set by hand, so nothing here waits for time."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

import pytest
from inside import memory_on

from fencing_sdk import ConfigurationError, LockClient, connect
from fencing_sdk.abc import Backend, Claim
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.testing import BackendSuite


class ManualClock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


class TestMemoryBackend(BackendSuite):
    passes_on = True
    processes = False
    breakable = False
    survives_restart = False

    @pytest.fixture
    def backend(self):
        self.clock = ManualClock()
        return memory_on(self.clock)

    @pytest.fixture
    def reopen(self, backend):
        return lambda: backend

    def now(self) -> float:
        return self.clock.now()

    async def pass_time(self, seconds: float) -> None:
        self.clock.time += seconds

    async def restart(self, backend: Backend, reopen) -> Backend:
        return memory_on(self.clock)


async def test_clients_that_share_the_object_exclude_each_other_and_others_do_not():
    shared = MemoryBackend()
    async with connect(shared) as one, connect(shared) as two, connect("memory://") as apart:
        async with one.lock("a"):
            assert await two.lock("a").try_acquire() is None
            lease = await apart.lock("a").try_acquire()
            assert lease is not None
            await lease.release()


async def test_hybrid_tokens_start_at_the_wall_clock_so_a_new_process_goes_on_above_the_old_one():
    before = time.time_ns() // 10_000
    place = await MemoryBackend().draw(Claim("a", 60))
    assert before <= place.token <= time.time_ns() // 10_000


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("memory://shared", {}, "takes no path"),
        ("memory:///a/b", {}, "takes no path"),
        ("memory://?tokens=random", {}, "tokens must be 'hybrid' or 'counter', got 'random'"),
        ("memory://", {"tokens": None}, "tokens must be"),
        ("memory://", {"ttl": 5}, "unknown option .* known are tokens"),
        ("memory://?tokens=counter", {"tokens": "counter"}, "occurs twice"),
    ],
)
def test_what_a_url_cannot_mean_is_refused_when_the_client_is_built(url, options, message):
    with pytest.raises(ConfigurationError, match=message):
        connect(url, **options)


async def test_nothing_is_left_of_many_waiters_that_come_go_and_are_cancelled():
    backend = MemoryBackend()
    chance = random.Random(42)

    async def visit(locks: LockClient, name: str) -> None:
        async with locks.lock(name):
            await asyncio.sleep(chance.uniform(0, 0.001))

    async with LockClient(backend) as locks:
        visits = [asyncio.create_task(visit(locks, f"a{number % 5}")) for number in range(200)]
        for task in chance.sample(visits, 100):
            await asyncio.sleep(chance.uniform(0, 0.001))
            task.cancel()
        for task in visits:
            with contextlib.suppress(asyncio.CancelledError):
                await task
    assert not backend._lines._lines
    assert not backend._bells
