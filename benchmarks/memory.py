"""
What the engine costs where the store costs nothing: a cycle, a read of the token, ten thousand leases that are held.

    uv run python -m benchmarks memory
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from benchmarks.path import path
from benchmarks.table import Row, compare, compared, run
from fencing_sdk import LockClient
from fencing_sdk._values.answer import Settled
from fencing_sdk.abc import Claim, Gone, Kept, Place
from fencing_sdk.backends.memory import MemoryBackend

LEASES = 10_000


async def cycles(*, times: int) -> list[Row]:
    """Acquire and release a free lock."""
    backend = MemoryBackend()
    async with LockClient(backend) as locks:
        lock = locks.lock("bench")

        async def bare() -> None:
            claim = Claim("bench", 15.0)
            await backend.draw(claim)
            await backend.give_back(claim)

        async def handle() -> None:
            lease = await lock.acquire()
            await lease.release()

        async def scoped() -> None:
            async with lock:
                pass

        contestants = {"the backend's two calls": bare, "plain handle": handle, "async with lock": scoped}
        results = await compare(contestants, times=times)
        reaches = {"plain handle": 10.0, "async with lock": 15.0}
        bare_cost = results["the backend's two calls"].cpu
        return [
            Row(
                name,
                f"{results[name].cpu:.1f} us CPU",
                f"the backend's two calls: {bare_cost:.1f} us",
                f"{results[name].cpu / bare_cost:.1f}x",
                f"{reach:g} us",
                results[name].cpu <= reach,
            )
            for name, reach in reaches.items()
        ]


async def token_reads(*, times: int) -> list[Row]:
    """A token looks at the clock each time it is read."""
    async with LockClient(MemoryBackend()) as locks:
        lease = await locks.lock("bench").acquire()

        class Bare:
            token = 34

        bare = Bare()

        async def read_attribute() -> None:
            for _ in range(1000):
                bare.token  # noqa: B018

        async def read_token() -> None:
            for _ in range(1000):
                lease.token  # noqa: B018

        reads = {"1,000 reads of an attribute": read_attribute, "1,000 reads of lease.token": read_token}
        rows = compared(await compare(reads, times=times))
        await lease.release()
        return rows


class Counting(MemoryBackend):
    """Counts the calls that renew."""

    calls = 0
    claims = 0

    def keep(self, tickets: Sequence[Kept]) -> Settled[Sequence[Place | Gone]]:
        self.calls += 1
        self.claims += len(tickets)
        return super().keep(tickets)


async def held_leases(*, intervals: int) -> list[Row]:
    backend = Counting()
    async with LockClient(backend) as locks:
        leases = [await locks.lock(f"held/{number}", ttl=10).acquire() for number in range(LEASES)]
        interval = (10 - 2) / 4
        backend.calls = backend.claims = 0
        cpu, begin = time.process_time(), time.monotonic()
        await asyncio.sleep(intervals * interval)
        cpu, wall = time.process_time() - cpu, time.monotonic() - begin
        lost = sum(not lease.held for lease in leases)
        await asyncio.gather(*(lease.release() for lease in leases))
    what = f"{LEASES:,} leases, ttl 10 s"
    each = cpu / max(1, backend.claims) * 1e6
    return [
        Row(f"{what}: CPU of a core", f"{cpu / wall:.2%}", reach="0.9 %", reached=cpu / wall <= 0.009),
        Row(f"{what}: CPU of a renewal", f"{each:.1f} us"),
        Row(f"{what}: calls of the store in an interval", f"{backend.calls / intervals:.1f}"),
        Row(f"{what}: lost", str(lost), reach="0", reached=not lost),
    ]


async def measure(*, quick: bool) -> list[Row]:
    rows = await cycles(times=500 if quick else 2000)
    async with LockClient(MemoryBackend()) as locks:
        rows += await path(locks)
    rows += await token_reads(times=20)
    return rows + await held_leases(intervals=1 if quick else 3)


if __name__ == "__main__":
    run(measure)
