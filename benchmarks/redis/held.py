"""Leases that are only held: what their renewals cost, and what they hold up."""

from __future__ import annotations

import asyncio
import gc
import statistics
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from benchmarks.redis.peers import BareLock, patient_client
from benchmarks.redis.server import OwnServer
from benchmarks.table import Row
from fencing_sdk import Lease, connect

_TTL = 10.0
_INTERVAL = (_TTL - _TTL / 5) / 4
_TICK = 0.001
_AT_ONCE = 500


@dataclass
class Held:
    """What was seen of so many leases."""

    leases: int
    cpu: float
    """Seconds of CPU for each second."""
    server: float
    """Seconds that the server spent in scripts for each second."""
    calls: float
    """Scripts for each interval."""
    lag: float
    threads: int
    tasks: int
    lost: int

    @property
    def cpu_per_renewal(self) -> float:
        return self.cpu * _INTERVAL / self.leases


@asynccontextmanager
async def _leases(server: OwnServer, count: int) -> AsyncIterator[list[Lease]]:
    """Plain handles, acquired some hundreds at a time as a starting program would."""
    async with connect(server.url) as locks:
        leases: list[Lease] = []
        for start in range(0, count, _AT_ONCE):
            names = range(start, min(start + _AT_ONCE, count))
            leases += await asyncio.gather(*(locks.lock(f"held/{name}", ttl=_TTL).acquire() for name in names))
        yield leases
        for start in range(0, count, _AT_ONCE):
            await asyncio.gather(*(lease.release() for lease in leases[start : start + _AT_ONCE]))


async def held_leases(server: OwnServer, *, intervals: int) -> list[Row]:
    idle_lag = await _worst_lag(_INTERVAL)
    seen = [await _hold(server, count, intervals, with_lag=count == 10_000) for count in (100, 1_000, 10_000)]
    kib, server_kib = await _memory(server, 2_000)
    bare = await _bare_renewals(server, 10_000)
    theirs = await _redis_py_renewals(server, 300)
    print(f"\nleases held with a ttl of {_TTL:g} s, renewed every {_INTERVAL:g} s, seen for {intervals} intervals")
    for held in seen:
        cost = f"{held.cpu:.2%} of a core, {held.cpu_per_renewal * 1e6:.2f} us CPU for each renewal"
        print(f"  {held.leases:6,}  {cost}, {held.calls:.1f} scripts for each interval, server {held.server:.2%}")
    print(f"  the server keeps {server_kib:.2f} KiB for each lease")
    return _rows(seen, kib, bare, theirs, idle_lag)


async def _hold(server: OwnServer, count: int, intervals: int, *, with_lag: bool) -> Held:
    threads = threading.active_count()
    async with _leases(server, count) as leases:
        await asyncio.sleep(_INTERVAL / 2)
        gc.collect()
        calls, busy = server.calls(), server.script_seconds()
        cpu, begin = time.process_time(), time.perf_counter()
        await asyncio.sleep(intervals * _INTERVAL)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - begin
        return Held(
            leases=count,
            cpu=cpu / wall,
            server=(server.script_seconds() - busy) / wall,
            calls=(server.calls() - calls) / wall * _INTERVAL,
            lag=await _worst_lag(intervals * _INTERVAL) if with_lag else 0.0,
            threads=threading.active_count() - threads,
            tasks=len(asyncio.all_tasks()) - 1,  # this one
            lost=sum(not lease.held for lease in leases),
        )


async def _worst_lag(seconds: float) -> float:
    """How late a task that sleeps for a millisecond is woken at worst. It costs CPU, so it has a window of its own."""
    clock = time.perf_counter
    end, worst = clock() + seconds, 0.0
    while (before := clock()) < end:
        await asyncio.sleep(_TICK)
        worst = max(worst, clock() - before - _TICK)
    return worst


async def _memory(server: OwnServer, count: int) -> tuple[float, float]:
    """KiB that Python has allocated for each lease, and the server."""
    async with _leases(server, 100):
        pass  # whatever is made once is made now
    at_server = server.memory()
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        async with _leases(server, count):
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
            at_server = server.memory() - at_server
    finally:
        tracemalloc.stop()
    return (after - before) / count / 1024, at_server / count / 1024


async def _bare_renewals(server: OwnServer, count: int) -> float:
    """Seconds of CPU for each renewal when every lease has a script of its own, all in one write."""
    bare = await BareLock.open(server.port)
    try:
        await asyncio.gather(*(bare.acquire(f"bare/{number}", "me") for number in range(count)))
        taken = []
        for _ in range(3):
            cpu = time.process_time()
            replies = await asyncio.gather(*(bare.renew(f"bare/{number}", "me") for number in range(count)))
            taken.append((time.process_time() - cpu) / count)
            assert set(replies) == {1}
        return statistics.median(taken)
    finally:
        bare.close()
        server.clear()


async def _redis_py_renewals(server: OwnServer, count: int) -> float:
    """Seconds of CPU for each `extend` of redis-py's Lock."""
    client = patient_client(server)
    try:
        held = [client.lock(f"theirs/{number}", timeout=_TTL) for number in range(count)]
        for lock in held:
            await lock.acquire()
        cpu = time.process_time()
        for lock in held:
            await lock.extend(_TTL, replace_ttl=True)
        return (time.process_time() - cpu) / count
    finally:
        await client.aclose()
        server.clear()


def _rows(seen: list[Held], kib: float, bare: float, theirs: float, idle_lag: float) -> list[Row]:
    most = seen[-1]
    each = [held.cpu_per_renewal * 1e6 for held in seen]
    redis_py, least = (cost * most.leases / _INTERVAL for cost in (theirs, bare))
    first, lost = seen[0], sum(held.lost for held in seen)
    cells = (
        ("CPU of one core", f"{most.cpu:.2%}", f"redis-py {redis_py:.0%}, bare {least:.1%}", "< 2 %", most.cpu < 0.02),
        ("worst loop lag", f"{most.lag * 1e3:.1f} ms", f"idle {idle_lag * 1e3:.1f} ms", "< 20 ms", most.lag < 0.02),
        (
            "threads",
            f"{most.threads} ({first.leases}: {first.threads})",
            "",
            "none each",
            most.threads <= first.threads,
        ),
        ("tasks", f"{most.tasks} ({first.leases}: {first.tasks})", "", "none each", most.tasks < most.leases / 100),
        ("memory of each", f"{kib:.2f} KiB (tracemalloc)", "", "<= 3 KiB", kib <= 3),
        ("lost", str(lost), "", "0", not lost),
    )
    rows = [Row(f"{most.leases:,} leases: {what}", mine, peer, "", reach, ok) for what, mine, peer, reach, ok in cells]
    costs = " / ".join(f"{cost:.1f}" for cost in each)
    peers = f"redis-py {theirs * 1e6:.0f}, bare {bare * 1e6:.1f}"
    sizes = " / ".join(f"{held.leases:,}" for held in seen)
    return [*rows, Row(f"CPU for each renewal, {sizes}", f"{costs} us", peers, "", "falls", each[-1] < each[0])]
