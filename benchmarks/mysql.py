"""
What locks in MySQL and MariaDB cost, beside bare statements of the same driver.

    uv run python -m benchmarks mysql

Starts a server of its own of each kind that this machine has. Unlike the servers of other benchmarks it is on a disk,
for which it waits at each commit: the backend refuses one that does not.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import asyncmy

from benchmarks.cycle import cycle
from benchmarks.table import Row, percentile, run
from fencing_sdk import connect
from fencing_sdk.backends.mysql import from_url

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "servers"))

from local_ports import HOST
from mysql_programs import flavours
from mysql_server import USER, MysqlServer

TIMES = 400
WAITERS = 100
ROUNDS = 60
PATIENCE = 30.0
CYCLE = {"mariadb": 4.2, "mysql": 2.5}
"""How many times two bare updates a cycle may take."""
HAND_OVER = 0.015
STATEMENTS = 15


async def one_cycle(server: MysqlServer, *, times: int) -> list[Row]:
    """Two commits each: two updates of a row by its key, and our acquire and release."""
    bare = await asyncmy.connect(host=HOST, port=server.port, user=USER, database=server.database, autocommit=True)
    cursor = bare.cursor()
    await cursor.execute("CREATE TABLE plain (id INT PRIMARY KEY, number BIGINT) ENGINE=InnoDB")
    await cursor.execute("INSERT INTO plain VALUES (1, 0)")

    async def writes() -> None:
        await cursor.execute("UPDATE plain SET number = number + 1 WHERE id = 1")
        await cursor.execute("UPDATE plain SET number = number + 1 WHERE id = 1")

    rows = await cycle(
        from_url(server.url), {"two updates by asyncmy": writes}, times=times, reach=CYCLE[server.flavour]
    )
    await bare.ensure_closed()
    return rows


async def hand_over(server: MysqlServer) -> list[Row]:
    """From the release by one client to the grant of another one that waits."""
    gaps = []
    async with connect(server.url) as one, connect(server.url) as two:
        holder, waiter = one, two
        lease = await holder.lock("handed on", ttl=60).acquire()
        for _ in range(ROUNDS):
            waiting = asyncio.create_task(waiter.lock("handed on", ttl=60, wait=PATIENCE).acquire())
            while not await waiter.waiters("handed on"):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            await asyncio.sleep(0.1)  # its client listens
            begun = time.perf_counter()
            await lease.release()
            lease = await waiting
            gaps.append(time.perf_counter() - begun)
            holder, waiter = waiter, holder
        await lease.release()
    p50, p95 = percentile(gaps, 50), percentile(gaps, 95)
    most = f"p50 {HAND_OVER * 1e3:.0f} ms"
    return [Row("hand-over: p50 / p95", f"{p50 * 1e3:.1f} / {p95 * 1e3:.1f} ms", reach=most, reached=p50 <= HAND_OVER)]


async def statements(server: MysqlServer) -> list[Row]:
    """How many statements a second the server gets from a client with many waiters, by its own count."""
    async with connect(server.url) as locks, locks.lock("crowded", ttl=60):
        waiting = [asyncio.create_task(locks.lock("crowded", ttl=60, wait=60).acquire()) for _ in range(WAITERS)]
        while len(await locks.waiters("crowded")) < WAITERS:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        before, begun = await _texts(server), time.perf_counter()
        await asyncio.sleep(5.0)
        rate = (await _texts(server) - before - 1) / (time.perf_counter() - begun)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
    what = f"{WAITERS} waiters of one client: statements a second"
    return [Row(what, f"{rate:.1f}", reach=f"{STATEMENTS}", reached=rate <= STATEMENTS)]


async def _texts(server: MysqlServer) -> int:
    ((_, number),) = await server.fetch("SHOW GLOBAL STATUS LIKE 'Questions'")
    return int(number)


async def measure(*, quick: bool) -> list[Row]:
    rows: list[Row] = []
    for flavour in flavours():
        with TemporaryDirectory() as folder, MysqlServer(flavour, folder=Path(folder)) as server:
            print(f"asyncmy {version('asyncmy')}, {flavour} {await server.value('SELECT VERSION()')}")
            parts = await one_cycle(server, times=TIMES // 4 if quick else TIMES)
            parts += await hand_over(server)
            parts += await statements(server)
        rows += [replace(row, measure=f"{flavour}: {row.measure}") for row in parts]
    return rows


if __name__ == "__main__":
    run(measure)
