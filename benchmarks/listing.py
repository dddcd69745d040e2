"""
What it costs to list many locks, and what others notice of it, on every store that can list.

    uv run python -m benchmarks listing

One client lists all locks while another takes and releases a free lock every few milliseconds: in the same process,
so that the work of the listing delays it too. Memory is the most that Python has allocated in a second listing.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import sys
import tempfile
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.table import Row, percentile, run, times
from fencing_sdk import Lease, LockClient
from fencing_sdk.abc import Backend
from fencing_sdk.backends import from_url
from fencing_sdk.backends.memory import MemoryBackend

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "servers"))

from etcd_server import EtcdCluster
from postgresql_server import PostgresqlServer
from redis_server import RedisServer
from zookeeper_server import ZooKeeperServer

LOCKS = 100_000
AT_ONCE = 100
"""Acquisitions under way while the locks are taken."""
PAUSE = 0.005
ALONE = 400
"""Acquisitions without a listing beside them."""

COPIES = """
    INSERT INTO {table} (name, {columns})
    SELECT 'job/' || n, {columns} FROM {table}, ({numbers}) numbers WHERE name = 'job/0'
"""
"""Locks of SQL stores are copies of the rows of one that was acquired: acquiring all of them would take minutes."""


@dataclass(frozen=True)
class Store:
    name: str
    connect: Callable[[], Backend]
    copy: Callable[[int], Awaitable[object]] | None = None
    ttl: float = 3600.0
    part: float = 1.0
    """Of the locks: where the store writes each grant to disk, taking all of them would take ten minutes."""


@contextlib.asynccontextmanager
async def stores() -> AsyncIterator[list[Store]]:
    with contextlib.ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "locks.db"
        redis = stack.enter_context(RedisServer()).url
        postgresql = stack.enter_context(PostgresqlServer())
        etcd = stack.enter_context(EtcdCluster()).url
        zookeeper = stack.enter_context(ZooKeeperServer()).url
        memory = MemoryBackend()
        yield [
            Store("memory", lambda: memory),
            Store("SQLite", lambda: from_url(f"sqlite:///{path}"), lambda count: copy_in_sqlite(path, count)),
            Store("Redis", lambda: from_url(redis)),
            Store("PostgreSQL", lambda: from_url(postgresql.url), lambda count: copy_in_postgresql(postgresql, count)),
            Store("etcd", lambda: from_url(etcd), part=0.1),
            Store("ZooKeeper", lambda: from_url(f"{zookeeper}/listing"), ttl=30.0, part=0.1),
        ]


async def copy_in_sqlite(path: Path, count: int) -> None:
    numbers = f"WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {count - 1}) SELECT n FROM s"
    with contextlib.closing(sqlite3.connect(path)) as file, file:
        file.execute(COPIES.format(table="fencing_line", columns="boot, dies, line", numbers=numbers))


async def copy_in_postgresql(server: PostgresqlServer, count: int) -> None:
    numbers = f"SELECT n FROM generate_series(1, {count - 1}) n"
    ticket = "owner, mode, width, label, channel, token, permit, dies, longest"
    for table, columns in (("fencing_line", "last"), ("fencing_ticket", ticket)):
        await server.execute(COPIES.format(table=f"fencing.{table}", columns=columns, numbers=numbers))


async def take(store: Store, holder: LockClient, count: int) -> list[Lease]:
    """Hold so many locks, as long as the leases are kept."""
    numbers = iter(range(1 if store.copy else count))

    async def work() -> list[Lease]:
        return [await holder.lock(f"job/{number}", ttl=store.ttl).acquire() for number in numbers]

    groups = await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    if store.copy is not None:
        await store.copy(count)
    return [lease for leases in groups for lease in leases]


async def cycles(locks: LockClient, taken: list[float], *, until: Callable[[], bool]) -> None:
    """Take and release a free lock; note the seconds of each acquisition."""
    while not until():
        begin = time.perf_counter()
        lease = await locks.lock("free", ttl=30).acquire()
        taken.append(time.perf_counter() - begin)
        await lease.release()
        await asyncio.sleep(PAUSE)


async def listed(locks: LockClient) -> int:
    return len([None async for _ in locks.all_holders("job/*")])


async def of_store(store: Store, count: int) -> Row:
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(LockClient(store.connect())) for _ in range(3)]
        holder, operator, other = clients
        leases = await take(store, holder, count)
        alone: list[float] = []
        beside: list[float] = []
        await cycles(other, alone, until=lambda: len(alone) >= ALONE)
        begin, ended = time.perf_counter(), False
        acquiring = asyncio.create_task(cycles(other, beside, until=lambda: ended))
        found = await listed(operator)
        seconds, ended = time.perf_counter() - begin, True
        await acquiring
        assert found == count, f"{found} of {count} were listed, {len(leases)} leases"
        tracemalloc.start()
        await listed(operator)
        memory = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
    p99, before = (percentile(values, 99) * 1e3 for values in (beside, alone))
    return Row(
        f"{store.name}: {count:,} locks",
        f"{seconds:.2f} s, {memory:.1f} MiB; acquire beside it p99 {p99:.1f} ms",
        f"acquire alone p99 {before:.1f} ms",
        times(p99, before),
        "p99 12 ms, or 2x",
        p99 <= max(12.0, 2 * before),
    )


async def measure(*, quick: bool) -> list[Row]:
    async with stores() as found:
        return [await of_store(store, int(LOCKS * store.part * (0.05 if quick else 1.0))) for store in found]


if __name__ == "__main__":
    run(measure)
