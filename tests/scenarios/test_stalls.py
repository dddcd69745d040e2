"""A blocked event loop is logged with the code that blocked it, whether the lease outlives that or not. Real time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import pytest
from inside import state_of
from patience import until

from fencing_sdk import LeaseLostError, LockClient, LossReason
from fencing_sdk._engine.timers import StallWatch
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.events import RenewalLate
from fencing_sdk.testing import FaultyBackend

pytestmark = pytest.mark.every_loop

TTL = 1.0
LASTING = {"ttl": 10.0, "heartbeat_interval": 0.2}
"""For a lease that is to be kept, and whose beats are as close together as those of a lease of one second."""
SHORT, LONG = 0.5, 1.2
"""Seconds for which the loop is blocked: the lease is renewed late, and the lease is lost."""


looking, looked = threading.Event(), threading.Event()


@pytest.fixture(autouse=True)
def a_look_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = StallWatch._sample

    def noticed(watch: StallWatch) -> str | None:
        looking.set()
        seen = sample(watch)
        looked.set()
        return seen

    monkeypatch.setattr(StallWatch, "_sample", noticed)


def crunch_the_numbers(seconds: float) -> None:
    """Block the loop, on a busy machine for as long as it takes the other thread to have a look."""
    looked.clear()
    time.sleep(seconds)
    looked.wait(20)


async def undisturbed(seconds: float) -> None:
    """Sleep, and once more if the watch looked meanwhile: it looks once for each beat, also for one late by itself."""
    looking.clear()
    await asyncio.sleep(seconds)
    while looking.is_set():
        looking.clear()
        await asyncio.sleep(0.1)  # the late beat comes, and the watch waits for the next one


async def lose_by_block(locks: LockClient, prepare: Callable[[], Awaitable[object]]) -> LossReason | None:
    """Block the loop after *prepare*, and return why the lease was lost; None if a busy machine cost it before."""
    blocked = False
    try:
        async with locks.lock("a", ttl=TTL) as lease:
            await prepare()
            lease.check()
            blocked = True
            crunch_the_numbers(LONG)
            await asyncio.sleep(10)
    except LeaseLostError as lost:
        if blocked:
            return lost.reason
        await asyncio.sleep(0.1)  # what is told of this loss is told by then
        return None
    pytest.fail("the lease outlived the block")


def messages(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if word in record.getMessage()]


async def test_a_block_that_the_lease_outlives_is_logged_with_its_stack(caplog):
    async with LockClient(MemoryBackend()) as locks, locks.lock("a", **LASTING) as lease:
        await undisturbed(0.1)
        crunch_the_numbers(SHORT)
        await until(lambda: any("crunch_the_numbers(SHORT)" in late for late in messages(caplog, "late")), within=20)
        assert lease.held


@pytest.mark.parametrize("after", [None, 0.0, 0.1, 0.3], ids=lambda after: f"after {after}")
async def test_a_block_that_costs_the_lease_is_logged_with_its_stack(caplog, after):
    """Also one that begins before the heartbeat had its first turn, and in the middle between two beats."""
    events = []

    async def prepare() -> None:
        if after is not None:
            await undisturbed(after)

    async with LockClient(MemoryBackend(), observers=[events.append]) as locks:
        while (reason := await lose_by_block(locks, prepare)) is None:
            caplog.clear()
        assert reason is LossReason.STALLED
    (loss,) = messages(caplog, "is over")
    assert "crunch_the_numbers(LONG)" in loss
    stacks = [event.stack or "" for event in events if isinstance(event, RenewalLate)]
    assert any("crunch_the_numbers(LONG)" in stack for stack in stacks)


async def test_a_block_while_a_renewal_is_on_its_way_is_logged_with_its_stack(caplog):
    store = FaultyBackend(MemoryBackend())
    store.delay("renew", 0.1)

    async def a_renewal_is_sent() -> None:
        looking.set()
        while looking.is_set():  # once more if the watch looks between the sending and the block
            looking.clear()
            store.calls.clear()
            await until(lambda: ("renew", ("a",)) in store.calls)

    async with LockClient(store) as locks:
        while (reason := await lose_by_block(locks, a_renewal_is_sent)) is None:
            caplog.clear()
        assert reason is LossReason.STALLED
    (loss,) = messages(caplog, "is over")
    assert "crunch_the_numbers(LONG)" in loss


async def test_a_block_that_costs_many_leases_is_logged_once(caplog):
    async with LockClient(MemoryBackend()) as locks:
        leases = [await locks.lock(name, ttl=TTL).acquire() for name in "abc"]
        await undisturbed(0.1)
        while not all(lease.held for lease in leases):  # a busy machine cost one of them before the block
            for lease in leases:
                await lease.release()
            leases = [await locks.lock(name, ttl=TTL).acquire() for name in "abc"]
            await undisturbed(0.1)
            caplog.clear()
        crunch_the_numbers(LONG)
        assert {await lease.wait_lost() for lease in leases} == {LossReason.STALLED}
        await asyncio.sleep(0.05)
        for lease in leases:
            await lease.release()
    (loss,) = messages(caplog, "is over")
    assert "and so are 2 others" in loss
    assert loss.count("crunch_the_numbers(LONG)") == 1


async def test_a_lease_that_ends_for_another_reason_is_logged_without_a_stack(caplog):
    store = MemoryBackend()
    async with LockClient(store) as locks:
        lease = await locks.lock("a", ttl=60).acquire()
        await store.give_back(state_of(lease).claim)
        with pytest.raises(LeaseLostError):
            await lease.renew()
        await asyncio.sleep(0.05)
        await lease.release()
    (loss,) = messages(caplog, "is over")
    assert "blocked" not in loss
