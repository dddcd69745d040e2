"""Ten thousand leases in one process: one heartbeat, a few calls an interval, and none of them lost."""

import asyncio
import math

from inside import LoopClock, on_clock, state_of
from virtual_time import in_virtual_time

from fencing_sdk import LockClient
from fencing_sdk._engine.heartbeat import BATCH
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.events import Lost

LEASES = 10_000
TTL = 7.0
INTERVAL = (TTL - TTL / 5) / 4
INTERVALS = 3


class CountingBackend(MemoryBackend):
    """Counts calls of `keep`, and the tickets in them."""

    def __init__(self) -> None:
        super().__init__()
        self._lines.clock = LoopClock()
        self.sizes: list[int] = []
        self.most_tasks = 0

    async def keep(self, tickets):
        self.sizes.append(len(tickets))
        self.most_tasks = max(self.most_tasks, len(asyncio.all_tasks()))
        return await super().keep(tickets)


@in_virtual_time
async def test_ten_thousand_leases_cost_one_task_and_a_few_calls_and_none_is_lost():
    store = CountingBackend()
    lost: list[Lost] = []
    observers = [lambda event: lost.append(event) if isinstance(event, Lost) else None]
    async with on_clock(LockClient(store, observers=observers), LoopClock()) as locks:
        idle = len(asyncio.all_tasks())
        leases = []
        for start in range(0, LEASES, 500):
            names = [f"seats/{number}" for number in range(start, start + 500)]
            leases += await asyncio.gather(*(locks.lock(name, ttl=TTL).acquire() for name in names))
            await asyncio.sleep(0.01)
        assert len(asyncio.all_tasks()) <= idle + 2 * math.ceil(LEASES / BATCH), "no task for each lease"
        store.sizes.clear()
        store.most_tasks = 0
        held_until = min(state_of(lease).deadline for lease in leases)
        await asyncio.sleep(INTERVALS * INTERVAL)

        assert all(lease.held for lease in leases)
        assert not lost
        assert min(state_of(lease).deadline for lease in leases) >= held_until + (INTERVALS - 1) * INTERVAL
        calls, renewals = len(store.sizes), sum(store.sizes)
        assert max(store.sizes) <= BATCH
        assert renewals >= (INTERVALS - 1) * LEASES, "everybody is renewed in every interval"
        assert renewals <= (INTERVALS + 1) * LEASES, "and nobody much more often"
        full = math.ceil(LEASES / BATCH)
        assert calls <= (INTERVALS + 1) * (full + 10), "beats that lie close together share a call"
        assert store.most_tasks <= idle + 2 * full + 4, "a task for each call under way, none for a lease"

        await asyncio.gather(*(lease.release() for lease in leases))
        assert not store._lines._lines
    assert not lost
