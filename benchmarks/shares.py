"""
What permits and readers cost beside a plain lock, and how fast a line of readers gets in.

    uv run python -m benchmarks shares

On Redis the server's own account of its scripts is compared, on PostgreSQL the wall time of a cycle. The readers wait
behind a writer, all in one client; their time lasts from the writer's release to the first line of the last of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Awaitable, Iterable
from pathlib import Path

from benchmarks.redis.server import OwnServer
from benchmarks.table import Row, run, times
from fencing_sdk import connect
from fencing_sdk.abc import LOCK, READER, WRITER, Backend, Claim, Mode, Permit
from fencing_sdk.backends import from_url

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "servers"))

from etcd_server import EtcdCluster
from postgresql_server import PostgresqlServer
from zookeeper_server import ZooKeeperServer

TTL = 60.0
READERS = 400
IN_LINE = 2.5
"""Seconds after which so many readers stand in line for sure."""
READERS_IN = 0.150
"""Seconds within which the last of them is to be in."""
SHARES: dict[str, Mode] = {"a plain lock": LOCK, "a permit": Permit(8), "a reader": READER, "a writer": WRITER}
REDIS_REACH, POSTGRESQL_REACH = 1.4, 2.3
"""How much a share may cost of a plain lock: of the server's time, and of the wall time."""


async def on_redis(server: OwnServer, *, names: int, rounds: int) -> list[Row]:
    """Seconds of the server's scripts for an acquisition and its release."""
    backend = from_url(server.url)
    await backend.tickets(["connect first"])

    async def scripts(calls: Iterable[Awaitable[object]]) -> float:
        before = server.script_seconds()
        await asyncio.gather(*calls)
        return server.script_seconds() - before

    async def cost(mode: Mode, others: int) -> float:
        claims = [[Claim(f"{mode.word}/{n}", TTL, mode=mode) for n in range(names)] for _ in range(others + 1)]
        for beside in claims[1:]:
            await asyncio.gather(*map(backend.draw, beside))
        spent = await scripts(map(backend.draw, claims[0])) + await scripts(map(backend.give_back, claims[0]))
        for beside in claims[1:]:
            await asyncio.gather(*map(backend.give_back, beside))
        return spent / names

    cases = {name: (mode, 0) for name, mode in SHARES.items()}
    cases |= {f"{name} beside two others": (mode, 2) for name, mode in SHARES.items() if mode.shared}
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            taken[name].append(await cost(*case))
        server.clear()
    await backend.aclose()
    costs = {name: statistics.median(seen) for name, seen in taken.items()}
    return beside_a_plain_lock("Redis, server's time", costs, REDIS_REACH)


async def on_postgresql(url: str, *, cycles: int, rounds: int) -> list[Row]:
    """Seconds of an acquisition and its release, one after the other."""
    backend = from_url(url)
    taken: dict[str, list[float]] = {name: [] for name in SHARES}
    for number in range(rounds + 1):
        for name, mode in SHARES.items():
            seconds = await cycle(backend, mode, cycles)
            if number:  # the first round makes tables and plans
                taken[name].append(seconds)
    await backend.aclose()
    costs = {name: statistics.median(seen) for name, seen in taken.items()}
    return beside_a_plain_lock("PostgreSQL, wall", costs, POSTGRESQL_REACH)


async def cycle(backend: Backend, mode: Mode, cycles: int) -> float:
    begin = time.perf_counter()
    for _ in range(cycles):
        claim = Claim(f"share/{mode.word}", TTL, mode=mode)
        await backend.draw(claim)
        await backend.give_back(claim)
    return (time.perf_counter() - begin) / cycles


def beside_a_plain_lock(where: str, costs: dict[str, float], reach: float) -> list[Row]:
    (plain, least), *shares = costs.items()
    return [
        Row(
            f"{where}: {name}",
            f"{cost * 1e6:.1f} us",
            f"{plain}: {least * 1e6:.1f} us",
            times(cost, least),
            f"{reach:g}x",
            cost <= reach * least,
        )
        for name, cost in shares
    ]


async def readers(url: str, name: str) -> float:
    """Seconds from the release of a writer to the first line of the last reader."""
    entered: list[float] = []
    all_in = asyncio.Event()

    async def read() -> None:
        async with locks.rwlock(name, ttl=TTL).reader:
            entered.append(time.perf_counter())
            if len(entered) == READERS:
                all_in.set()
            await all_in.wait()

    async with connect(url) as locks, connect(url) as other:
        lease = await other.rwlock(name, ttl=TTL).writer.acquire()
        reading = [asyncio.create_task(read()) for _ in range(READERS)]
        await asyncio.sleep(IN_LINE)
        begin = time.perf_counter()
        await lease.release()
        await asyncio.gather(*reading)
    return max(entered) - begin


async def measure(*, quick: bool) -> list[Row]:
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(OwnServer())
        postgresql = stack.enter_context(PostgresqlServer()).url
        etcd = stack.enter_context(EtcdCluster()).url
        zookeeper = stack.enter_context(ZooKeeperServer()).url
        urls = {"Redis": redis.url, "PostgreSQL": postgresql, "etcd": etcd, "ZooKeeper": f"{zookeeper}/shares"}
        rows = await on_redis(redis, names=200 if quick else 1_000, rounds=5 if quick else 15)
        rows += await on_postgresql(postgresql, cycles=50 if quick else 300, rounds=3 if quick else 9)
        taken: dict[str, list[float]] = {name: [] for name in urls}
        for number in range(2 if quick else 6):
            for name, url in urls.items():
                seconds = await readers(url, f"readers/{number}")
                if number:
                    taken[name].append(seconds)
    return rows + [row(name, seconds) for name, seconds in taken.items()]


def row(name: str, taken: list[float]) -> Row:
    median = statistics.median(taken)
    return Row(
        f"{name}: {READERS} waiting readers are in",
        f"{median * 1e3:.0f} ms (least {min(taken) * 1e3:.0f})",
        reach=f"{READERS_IN * 1e3:.0f} ms",
        reached=median <= READERS_IN,
    )


if __name__ == "__main__":
    run(measure)
