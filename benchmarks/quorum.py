"""
What locks on a quorum of Redis masters cost, beside the same locks on one Redis.

    uv run python -m benchmarks quorum [--quick]
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from benchmarks.link import slow_link
from benchmarks.redis.server import HOST, OwnServer, missing
from benchmarks.table import Operation, Row, compare, p50_p99, percentile, run, times
from fencing_sdk import Lock, LockClient, connect
from fencing_sdk.backends.redis.quorum import from_url

SLOW = 0.05
"""Seconds for the way to the slow node and back."""


def url_of(ports: list[int]) -> str:
    return "redis+quorum://" + ",".join(f"{HOST}:{port}" for port in ports)


async def founded(servers: list[OwnServer]) -> str:
    """Empty the servers, found a quorum on them, and return its URL."""
    for server in servers:
        server.clear()
    url = url_of([server.port for server in servers])
    backend = from_url(url)
    await backend.init()
    await backend.aclose()
    return url


@asynccontextmanager
async def open_client(url: str) -> AsyncIterator[LockClient]:
    """A client that has connected to every server."""
    async with connect(url) as locks:
        async with locks.lock("warm"):
            await asyncio.sleep(0.1)
        yield locks


async def cycles(servers: list[OwnServer], *, rounds: int) -> list[Row]:
    """One task, one lock, which is always free."""
    async with AsyncExitStack() as stack:
        contestants: dict[str, Operation] = {}
        urls = {"one Redis": servers[0].url, "3 nodes": await founded(servers[:3])}
        for name, url in urls.items():
            lock = (await stack.enter_async_context(open_client(url))).lock("bench")

            async def cycle(lock: Lock = lock) -> None:
                async with lock:
                    pass

            contestants[name] = cycle
        results = await compare(contestants, times=300, rounds=rounds)
    one, three = results["one Redis"], results["3 nodes"]
    wall, cpu = three.wall / one.wall, three.cpu / one.cpu
    return [
        Row("a cycle", f"{three.wall:.0f} us", f"one Redis: {one.wall:.0f} us", f"{wall:.2f}x", "2x", wall <= 2),
        Row("its CPU", f"{three.cpu:.0f} us", f"one Redis: {one.cpu:.0f} us", f"{cpu:.2f}x", "2.5x", cpu <= 2.5),
    ]


async def _latencies(locks: LockClient, count: int) -> list[float]:
    taken = []
    for _ in range(count):
        begin = time.perf_counter()
        async with locks.lock("bench"):
            pass
        taken.append(time.perf_counter() - begin)
    return taken


async def one_node_away(servers: list[OwnServer], *, rounds: int) -> list[Row]:
    """One of three nodes is 50 ms away, or stopped: a cycle takes as long as before."""
    await founded(servers[:3])
    ports = [server.port for server in servers[:3]]
    rows = []
    with slow_link(ports[0], SLOW) as port:
        async with open_client(url_of(ports)) as near, open_client(url_of([port, *ports[1:]])) as far:
            pairs = [(await _latencies(near, 200), await _latencies(far, 200)) for _ in range(rounds)]
        rows.append(_beside("one node 50 ms away", pairs))
    async with open_client(url_of(ports)) as locks:
        pairs = []
        for _ in range(rounds):
            before = await _latencies(locks, 200)
            servers[0].pause()
            await _latencies(locks, 10)
            pairs.append((before, await _latencies(locks, 200)))
            servers[0].resume()
            await asyncio.sleep(0.3)
        rows.append(_beside("one node stopped", pairs))
    return rows


def _beside(name: str, pairs: list[tuple[list[float], list[float]]]) -> Row:
    well, harmed = ([value for pair in pairs for value in pair[which]] for which in (0, 1))
    ratio = statistics.median(harmed) / statistics.median(well)
    return Row(name, p50_p99(harmed), f"all well: {p50_p99(well)}", f"{ratio:.2f}x p50", "1.2x", ratio <= 1.2)


async def contended(servers: list[OwnServer], *, tasks: int, turns: int) -> list[Row]:
    """Many tasks on one lock: how many turns they have in a second, and how long one waits."""
    urls = {"one Redis": servers[0].url, "3 nodes": await founded(servers[:3])}
    seen: dict[str, tuple[float, list[float], float]] = {}
    for name, url in urls.items():
        waits: list[float] = []
        async with open_client(url) as locks:

            async def work(locks=locks, waits=waits) -> None:  # type: ignore[no-untyped-def]
                for _ in range(turns):
                    begin = time.perf_counter()
                    async with locks.lock("bench"):
                        waits.append(time.perf_counter() - begin)

            begin, cpu = time.perf_counter(), time.process_time()
            await asyncio.gather(*(work() for _ in range(tasks)))
            took, cpu = time.perf_counter() - begin, time.process_time() - cpu
        seen[name] = len(waits) / took, waits, cpu / len(waits)
    (one, one_waits, one_cpu), (three, three_waits, three_cpu) = seen.values()
    fair = percentile(three_waits, 99) / statistics.median(three_waits)
    return [
        Row(f"{tasks} tasks, one lock", f"{three:,.0f} turns/s", f"one Redis: {one:,.0f}", times(three, one)),
        Row(
            "a turn's CPU", f"{three_cpu * 1e6:.0f} us", f"one Redis: {one_cpu * 1e6:.0f} us", times(three_cpu, one_cpu)
        ),
        Row(
            "the wait for a turn",
            p50_p99(three_waits, scale=1e3, unit="ms"),
            f"one Redis: {p50_p99(one_waits, scale=1e3, unit='ms')}",
            f"p99 {fair:.1f}x p50",
            "3x",
            fair <= 3,
        ),
    ]


async def measure(*, quick: bool) -> list[Row]:
    async with AsyncExitStack() as stack:
        servers = [stack.enter_context(OwnServer()) for _ in range(3)]
        return [
            *await cycles(servers, rounds=3 if quick else 11),
            *await one_node_away(servers, rounds=2 if quick else 5),
            *await contended(servers, tasks=100, turns=5 if quick else 20),
        ]


if __name__ == "__main__":
    if why := missing():
        sys.exit(why)
    run(measure)
