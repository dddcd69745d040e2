"""A machine that is suspended, and a loop that stands still: leases end in time all the same."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import tenacity
from inside import BootClock, LoopClock, memory_on, on_clock
from patience import until
from virtual_time import in_virtual_time, now, settle

from fencing_sdk import AcquireTimeoutError, LeaseLostError, LockClient, LossReason
from fencing_sdk._engine.timers import StallWatch
from fencing_sdk.abc import Busy, Place
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.testing import FaultyBackend

# After a suspend, the clock of leases has gone on and the one of the event loop has not.


HOUR = 3600.0
AT_MOST = 1.0
"""Seconds after a suspend within which everything that is past due has been seen."""


class SuspendedClock(LoopClock):
    """Goes on with the loop's clock, and further on while the machine is suspended."""

    def __init__(self) -> None:
        self.slept = 0.0

    def now(self) -> float:
        return super().now() + self.slept

    def suspend(self, seconds: float) -> None:
        self.slept += seconds


@contextlib.asynccontextmanager
async def laptop(store: object | None = None) -> AsyncIterator[tuple[LockClient, SuspendedClock]]:
    clock = SuspendedClock()
    # the store's time goes on too, but the grants of these tests need not expire there
    backend = store or memory_on(LoopClock())
    async with on_clock(LockClient(backend), clock) as client:
        yield client, clock


async def body_until_lost(client: LockClient, **options: float) -> tuple[float, LossReason]:
    """Work until cancelled; return when that was, and why."""
    left = 0.0
    with pytest.raises(LeaseLostError) as lost:
        async with client.lock("a", **options):
            try:
                await asyncio.sleep(24 * HOUR)
            finally:
                left = asyncio.get_running_loop().time()
    return left, lost.value.reason


@pytest.mark.parametrize(
    "options",
    [
        {"ttl": 0.2},
        {"ttl": 1},
        {"ttl": 15},
        {"ttl": 30},
        {"ttl": 86_400},
        {"ttl": 60, "max_hold": 9},
        {"ttl": 60, "max_hold": 50},
    ],
    ids=str,
)
@pytest.mark.parametrize("moment", [0.0, 0.05, 2.0, 5.3, 8.0])
@in_virtual_time
async def test_a_body_whose_lease_ended_in_a_suspend_is_cancelled_within_a_second(options, moment):
    async with laptop() as (client, clock):
        working = asyncio.create_task(body_until_lost(client, **options))
        await settle()
        await asyncio.sleep(moment)
        clock.suspend(25 * HOUR)
        resumed = asyncio.get_running_loop().time()
        left, reason = await working
        assert left - resumed <= AT_MOST
        assert reason in {LossReason.STALLED, LossReason.EXPIRED}


@in_virtual_time
async def test_a_lease_that_ends_after_the_suspend_ends_in_time():
    """Its timers were set before: they would be late by as long as the suspend took."""
    async with laptop() as (client, clock):
        working = asyncio.create_task(body_until_lost(client, ttl=3600, max_hold=600))
        await asyncio.sleep(100)
        clock.suspend(300)
        left, reason = await working
        assert left - 1000 == pytest.approx(300, abs=0.01)
        assert reason is LossReason.EXPIRED


@in_virtual_time
async def test_a_lease_that_outlives_the_suspend_is_renewed_within_a_second(caplog):
    async with laptop(store := FaultyBackend(memory_on(LoopClock()))) as (client, clock):
        lease = await client.lock("a", ttl=3600).acquire()
        await asyncio.sleep(1)
        clock.suspend(1800)
        await asyncio.sleep(AT_MOST)
        assert [operation for operation, _ in store.calls] == ["acquire", "renew"]
        assert lease.held
        assert "late: the event loop did not run, or nothing of this process" in caplog.text
        await lease.release()


@in_virtual_time
async def test_a_lease_whose_renewal_is_away_ends_as_well():
    async with laptop(store := FaultyBackend(memory_on(LoopClock()))) as (client, clock):
        store.hang("renew")
        working = asyncio.create_task(body_until_lost(client, ttl=600))
        await asyncio.sleep(600 * 0.8 / 4 + 1)
        assert [operation for operation, _ in store.calls] == ["acquire", "renew"]
        clock.suspend(HOUR)
        resumed = asyncio.get_running_loop().time()
        left, _ = await working
        assert left - resumed <= AT_MOST
        store.heal()


@in_virtual_time
async def test_the_holder_of_a_plain_handle_is_told_within_a_second():
    async with laptop() as (client, clock):
        lease = await client.lock("a", ttl=60).acquire()
        waiting = asyncio.create_task(lease.wait_lost())
        await asyncio.sleep(5)
        clock.suspend(HOUR)
        assert await waiting is LossReason.STALLED
        assert now() - 5 <= AT_MOST
        await lease.release()


@in_virtual_time
async def test_a_lease_that_joins_what_was_scheduled_before_a_suspend_is_renewed_in_time():
    """Nothing is held during the suspend, but the heartbeat still sleeps for a lease that was released."""
    async with laptop(store := FaultyBackend(memory_on(LoopClock()))) as (client, clock):
        lock = client.lock("a", ttl=86_400)
        beat = clock.now() + 86_400 * 0.8 / 4
        await (await lock.acquire()).release()
        await asyncio.sleep(3)
        clock.suspend(60)
        lease = await lock.acquire()
        await asyncio.sleep(beat + AT_MOST - clock.now())
        assert [operation for operation, _ in store.calls].count("renew") == 1
        await lease.release()


@pytest.mark.parametrize("queue", [True, False], ids=["in line", "back-off"])
@in_virtual_time
async def test_a_waiter_whose_patience_ended_in_a_suspend_gives_up_within_a_second(queue):
    table = memory_on(LoopClock(), MemoryBackend if queue else NoLine)
    async with laptop(table) as (client, clock):
        async with on_clock(LockClient(table), LoopClock()) as other, other.lock("a"):
            lock = client.lock("a", wait=300, backoff=tenacity.wait_fixed(200))
            waiting = asyncio.create_task(lock.acquire())
            await asyncio.sleep(0.1)
            clock.suspend(HOUR)
            with pytest.raises(AcquireTimeoutError):
                await waiting
            assert now() - 0.1 <= AT_MOST


class NoLine(MemoryBackend):
    """A store without a line, which does not know how long the holder has left."""

    rings = False

    async def draw(self, claim, *, only_if_it_holds=False):
        assert only_if_it_holds
        outcome = await super().draw(claim, only_if_it_holds=True)
        return outcome if isinstance(outcome, Place) else Busy(None)


async def lateness() -> float:
    """Seconds by which a busy machine was late to run this task, altogether, until it is cancelled."""
    loop, late = asyncio.get_running_loop(), 0.0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            before = loop.time()
            await asyncio.sleep(0.01)
            late += max(0.0, loop.time() - before - 0.02)
    return late


@pytest.mark.every_loop
async def test_on_every_loop_a_suspend_is_seen_within_a_second():
    async with laptop() as (client, clock):
        working = asyncio.create_task(body_until_lost(client, ttl=60))
        await until(lambda: client.status().leases == 1, what="the lease is held")
        late = asyncio.create_task(lateness())
        clock.suspend(HOUR)
        resumed = asyncio.get_running_loop().time()
        left, _ = await working
        late.cancel()
        assert left - resumed <= AT_MOST + 0.2 + await late


def timers() -> int:
    """Return the number of timers that the loop still waits for."""
    return sum(not timer.cancelled() for timer in asyncio.get_running_loop()._scheduled)


@in_virtual_time
async def test_a_client_that_holds_nothing_is_not_woken():
    async with laptop() as (client, _):
        await settle()
        assert timers() == 0
        async with client.lock("a", ttl=15):
            pass
        await asyncio.sleep(4)
        assert timers() == 0


@in_virtual_time
async def test_a_client_that_holds_leases_is_woken_about_once_a_second():
    async with laptop() as (client, _):
        leases = [await client.lock(str(number), ttl=86_400).acquire() for number in range(100)]
        await asyncio.sleep(2)
        loop = asyncio.get_running_loop()
        before = loop.turns_that_waited
        await asyncio.sleep(1000)
        assert 1000 <= loop.turns_that_waited - before <= 1250
        for lease in leases:
            await lease.release()


@in_virtual_time
async def test_no_timer_is_left_in_the_loop_when_the_client_is_closed():
    async with laptop() as (client, _):
        lease = await client.lock("a", ttl=86_400).acquire()
    assert lease.lost_reason is LossReason.CLOSED
    assert timers() == 0


# The stall watch, in real time: it names the code that keeps the event loop, and is silent otherwise.


CLOCK = BootClock()
TRIES = range(5)
"""A machine that stands still between `arm` and the next line shows the watch something else, and rightly so."""


@pytest.fixture
def watch() -> Iterator[StallWatch]:
    watch = StallWatch(CLOCK)
    yield watch
    watch.stop()
    if watch._thread is not None:
        watch._thread.join(5)
        assert not watch._thread.is_alive()


def compress_the_archive(until: Callable[[], object], within: float = 5.0) -> None:
    """Keep this thread busy until something happened elsewhere, or for too long."""
    end = CLOCK.now() + within
    while not until() and CLOCK.now() < end:
        sum(range(1000))


def test_code_that_overruns_is_named(watch: StallWatch):
    began = CLOCK.now()
    stack = ""

    def is_named() -> bool:
        """Return whether the watch has seen it; the machine may stand still before, so that the test is seen late."""
        nonlocal stack
        stack = watch.stack_since(began) or ""
        if stack and "compress_the_archive" not in stack:
            watch.arm(CLOCK.now() + 0.05)
        return "compress_the_archive" in stack

    watch.arm(began + 0.05)
    compress_the_archive(is_named)
    assert "compress_the_archive" in stack
    assert "test_code_that_overruns_is_named" in stack


def test_a_blocking_call_without_the_interpreter_lock_is_named_too(watch: StallWatch):
    for _ in TRIES:
        began = CLOCK.now()
        watch.arm(began + 0.05)
        time.sleep(0.5)
        if "time.sleep(0.5)" in str(watch.stack_since(began)):
            break
    assert "time.sleep(0.5)" in str(watch.stack_since(began))


def test_an_idle_watch_costs_no_thread_and_an_idle_client_no_wake_up(watch: StallWatch):
    before = set(threading.enumerate())
    watch.arm(None)
    assert not set(threading.enumerate()) - before
    watch.arm(CLOCK.now() + 30)
    assert len(set(threading.enumerate()) - before) == 1
    watch.arm(None)
    began = CLOCK.now()
    time.sleep(0.1)
    assert watch.stack_since(began) is None


async def test_a_loop_that_waits_for_input_is_not_blocked():
    """A process that was stopped finds its loop waiting: there is no code to blame."""
    watch = StallWatch(CLOCK)
    try:
        for _ in TRIES:
            began = CLOCK.now()
            watch.arm(began + 0.1)
            await asyncio.sleep(0.6)
            await until(lambda began=began: watch._seen is not None and watch._seen[0] >= began, what="it has looked")
            if watch.stack_since(began) is None:
                break
        assert watch.stack_since(began) is None
    finally:
        watch.stop()


def test_a_stop_that_comes_while_the_thread_looks_around_is_not_missed():
    watch = StallWatch(CLOCK)

    class Inopportune(threading.Event):
        def clear(self) -> None:
            watch.stop()
            super().clear()

    watch._rearmed = Inopportune()
    watch.arm(CLOCK.now() + 30)
    try:
        watch._thread.join(5)
        assert not watch._thread.is_alive()
    finally:
        watch._rearmed.set()
