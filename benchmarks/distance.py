"""
What a lock costs where the store is far away: 0, 1 and 10 ms there and back.

    uv run python -m benchmarks distance [--picture=FILE]

A cycle is one ``async with lock`` with an empty body, on a free lock. A hand-off is the time from the end of a body to
the first line of the next, between two clients that take turns.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path

from benchmarks.link import slow_link
from benchmarks.picture import bars
from benchmarks.table import Row, run
from fencing_sdk import LockClient, connect

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "servers"))

from etcd_server import EtcdCluster
from postgresql_server import PostgresqlServer
from redis_server import RedisServer

DISTANCES = (0.0, 0.001, 0.010)
TURNS = 20


async def cycle(url: str, times: int) -> float:
    """Seconds for one ``async with``: the median."""
    taken = []
    async with connect(url) as locks:
        lock = locks.lock("near and far")
        for _ in range(times):
            begin = time.perf_counter()
            async with lock:
                pass
            taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


async def hand_off(url: str, turns: int) -> float:
    """Seconds from the end of a body to the next one's first line: the median."""
    gaps: list[float] = []
    left_at = 0.0

    async def stand(locks: LockClient, entered: asyncio.Event, leave: asyncio.Event) -> None:
        nonlocal left_at
        async with locks.lock("handed on", ttl=30):
            gaps.append(time.perf_counter() - left_at)
            entered.set()
            await leave.wait()
            left_at = time.perf_counter()

    async with connect(url) as one, connect(url) as two:
        entered, leave = asyncio.Event(), asyncio.Event()
        holder = asyncio.create_task(stand(one, entered, leave))
        await entered.wait()
        for turn in range(turns):
            entered, next_leave = asyncio.Event(), asyncio.Event()
            waiter = asyncio.create_task(stand((two, one)[turn % 2], entered, next_leave))
            await asyncio.sleep(0.25)  # it stands in line
            leave.set()
            await entered.wait()
            await holder
            holder, leave = waiter, next_leave
        leave.set()
        await holder
    return statistics.median(gaps[1:])


@asynccontextmanager
async def stores() -> AsyncIterator[dict[str, tuple[int, Callable[[int], str]]]]:
    """The port of each server, and its URL by way of another port."""
    with RedisServer() as redis, PostgresqlServer() as postgresql, EtcdCluster() as etcd:
        database = postgresql.url
        yield {
            "Redis": (redis.port, lambda port: f"redis://127.0.0.1:{port}"),
            "PostgreSQL": (postgresql.port, lambda port: database.replace(str(postgresql.port), str(port))),
            "etcd": (etcd.members[0].port, lambda port: f"etcd://127.0.0.1:{port}"),
        }


def link(port: int, distance: float) -> AbstractContextManager[int]:
    return slow_link(port, distance) if distance else nullcontext(port)


async def measure(*, quick: bool) -> list[Row]:
    rows: list[Row] = []
    seen: dict[str, list[tuple[str, float]]] = {}
    async with stores() as servers:
        for name, (port, url) in servers.items():
            for distance in DISTANCES:
                with link(port, distance) as by:
                    one = await cycle(url(by), 20 if quick else 100)
                    other = await hand_off(url(by), 4 if quick else TURNS)
                away = f"{distance * 1e3:g} ms"
                for what, taken in (("a cycle", one), ("a hand-off", other)):
                    trips = f"{taken / distance:.2f} trips" if distance else ""
                    rows.append(Row(f"{name}, {away} away: {what}", f"{taken * 1e3:.2f} ms", ratio=trips))
                    seen.setdefault(f"{what}, {away} away", []).append((name, taken * 1e3))
    for word in sys.argv:
        if word.startswith("--picture="):
            draw(Path(word.partition("=")[2]), seen)
    return rows


def draw(path: Path, seen: dict[str, list[tuple[str, float]]]) -> None:
    path.write_text(bars("What a lock costs, by the distance of its store", seen, unit="ms"))


if __name__ == "__main__":
    run(measure)
