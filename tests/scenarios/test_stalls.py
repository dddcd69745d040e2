"""A blocked event loop is logged with the code that blocked it, whether the lease outlives that or not. Real time."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from fencing_sdk import LeaseLostError, LockClient, LossReason, RenewalLate
from fencing_sdk._engine.stall_watch import StallWatch
from fencing_sdk._lease import state_of
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.testing import FaultyBackend

pytestmark = pytest.mark.every_loop

TTL = 1.0
SHORT, LONG = 0.5, 1.2
"""Seconds for which the loop is blocked: the lease is renewed late, and the lease is lost."""


looked = threading.Event()


@pytest.fixture(autouse=True)
def a_look_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = StallWatch._sample

    def noticed(watch: StallWatch) -> str | None:
        seen = sample(watch)
        looked.set()
        return seen

    monkeypatch.setattr(StallWatch, "_sample", noticed)


def crunch_the_numbers(seconds: float) -> None:
    """Block the loop, on a busy machine for as long as it takes the other thread to have a look."""
    looked.clear()
    time.sleep(seconds)
    looked.wait(20)


def messages(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if word in record.getMessage()]


async def test_a_block_that_the_lease_outlives_is_logged_with_its_stack(caplog):
    async with LockClient(MemoryBackend()) as locks, locks.lock("a", ttl=TTL) as lease:
        await asyncio.sleep(0.1)
        crunch_the_numbers(SHORT)
        await asyncio.sleep(0.05)
        assert lease.held
    (late,) = messages(caplog, "heartbeat")
    assert "crunch_the_numbers(SHORT)" in late


@pytest.mark.parametrize("after", [None, 0.0, 0.1, 0.3], ids=lambda after: f"after {after}")
async def test_a_block_that_costs_the_lease_is_logged_with_its_stack(caplog, after):
    """Also one that begins before the heartbeat had its first turn, and in the middle between two beats."""
    events = []
    async with LockClient(MemoryBackend(), observers=[events.append]) as locks:
        with pytest.raises(LeaseLostError) as lost:
            async with locks.lock("a", ttl=TTL):
                if after is not None:
                    await asyncio.sleep(after)
                crunch_the_numbers(LONG)
                await asyncio.sleep(10)
        assert lost.value.reason is LossReason.STALLED
    (loss,) = messages(caplog, "is over")
    assert "crunch_the_numbers(LONG)" in loss
    (late,) = [event for event in events if isinstance(event, RenewalLate)]
    assert "crunch_the_numbers(LONG)" in late.stack


async def test_a_block_while_a_renewal_is_on_its_way_is_logged_with_its_stack(caplog):
    store = FaultyBackend(MemoryBackend())
    async with LockClient(store) as locks:
        with pytest.raises(LeaseLostError) as lost:
            async with locks.lock("a", ttl=TTL):
                store.delay("renew", 0.1)
                await asyncio.sleep(0.25)
                assert ("renew", ("a",)) in store.calls
                crunch_the_numbers(LONG)
                await asyncio.sleep(10)
        assert lost.value.reason is LossReason.STALLED
    (loss,) = messages(caplog, "is over")
    assert "crunch_the_numbers(LONG)" in loss


async def test_a_block_that_costs_many_leases_is_logged_once(caplog):
    async with LockClient(MemoryBackend()) as locks:
        leases = [await locks.lock(name, ttl=TTL).acquire() for name in "abc"]
        await asyncio.sleep(0.1)
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
        await store.release(state_of(lease).claim)
        with pytest.raises(LeaseLostError):
            await lease.renew()
        await asyncio.sleep(0.05)
        await lease.release()
    (loss,) = messages(caplog, "is over")
    assert "blocked" not in loss
