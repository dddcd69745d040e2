"""What the engine costs: acquire and release, the cancel scope, a read of the token, ten thousand held leases."""

from __future__ import annotations

import asyncio
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import anyio
from _measure import compare, report

from fencing_sdk import LockClient
from fencing_sdk.abc import Backend, Claim, Renewal
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.backends.sqlite import SqliteBackend

LEASES = 10_000
INTERVALS = 3


async def acquire_and_release(title: str, backend: Backend, *, times: int) -> None:
    async with LockClient(backend) as locks:
        lock = locks.lock("bench")

        async def bare() -> None:
            claim = Claim("bench", 15.0)
            await backend.acquire(claim)
            await backend.release(claim)

        async def handle() -> None:
            lease = await lock.acquire()
            await lease.release()

        async def scoped() -> None:
            async with lock:
                pass

        contestants = {"bare: backend.acquire, backend.release": bare, "plain handle": handle, "async with": scoped}
        report(title, await compare(contestants, times=times))


async def scope_and_token() -> None:
    async with LockClient(MemoryBackend()) as locks:
        lease = await locks.lock("bench").acquire()

        class Bare:
            token = 34

        bare = Bare()

        async def nothing() -> None:
            pass

        async def scope() -> None:
            with anyio.CancelScope(deadline=anyio.current_time() + 10):
                pass

        async def read_attribute() -> None:
            for _ in range(1000):
                bare.token  # noqa: B018

        async def read_token() -> None:
            for _ in range(1000):
                lease.token  # noqa: B018

        report("a scope with a deadline", await compare({"bare: await nothing": nothing, "scope": scope}, times=5000))
        reads = {"bare: 1000 attributes": read_attribute, "1000 tokens, each with the clock": read_token}
        report("reading the token", await compare(reads, times=20))
        await lease.release()


class Counting:
    """Counts the calls that renew."""

    def __init__(self) -> None:
        self._table = MemoryBackend()
        self.acquire, self.release = self._table.acquire, self._table.release
        self.inspect, self.aclose = self._table.inspect, self._table.aclose
        self.calls = 0
        self.claims = 0

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal]:
        self.calls += 1
        self.claims += len(claims)
        return await self._table.renew(claims)


async def held_leases() -> None:
    backend = Counting()
    async with LockClient(backend) as locks:
        leases = [await locks.lock(f"held/{number}", ttl=10).acquire() for number in range(LEASES)]
        interval = (10 - 2) / 4
        backend.calls = backend.claims = 0
        tasks = len(asyncio.all_tasks())
        cpu, begin = time.process_time(), time.monotonic()
        await asyncio.sleep(INTERVALS * interval)
        cpu, wall = time.process_time() - cpu, time.monotonic() - begin
        lost = sum(not lease.held for lease in leases)
        print(f"\n{LEASES:,} leases held for {INTERVALS} intervals of {interval:g} s")
        print(f"  tasks in the process                   {tasks}")
        print(f"  calls for each interval                {backend.calls / INTERVALS:.1f}")
        print(f"  claims for each call                   {backend.claims / max(1, backend.calls):.0f}")
        print(f"  CPU for each lease and renewal         {cpu / max(1, backend.claims) * 1e6:.1f} us")
        print(f"  CPU of one core                        {cpu / wall:.1%}")
        print(f"  lost                                   {lost}")
        print(
            f"  peak memory of the process             {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB"
        )
        await asyncio.gather(*(lease.release() for lease in leases))


async def main() -> None:
    print(f"Python {sys.version.split()[0]}, {asyncio.get_running_loop().__class__.__module__}")
    await acquire_and_release("memory: acquire and release", MemoryBackend(), times=1000)
    with tempfile.TemporaryDirectory() as folder:
        await acquire_and_release(
            "SQLite: acquire and release", SqliteBackend(str(Path(folder, "bench.db"))), times=100
        )
    await scope_and_token()
    await held_leases()


if __name__ == "__main__":
    if sys.argv[1:] == ["--uvloop"]:
        import uvloop

        uvloop.run(main())
    else:
        asyncio.run(main())
