"""
What locks in SQLite cost: a cycle beside two bare transactions, and what waiting costs in CPU and writes.

    uv run python -m benchmarks sqlite
"""

from __future__ import annotations

import asyncio
import resource
import sqlite3
import tempfile
from pathlib import Path

from benchmarks.table import Row, compare, compared, run
from fencing_sdk import LockClient, connect
from fencing_sdk.abc import Claim
from fencing_sdk.backends.sqlite import SqliteBackend

SECONDS = 5.0


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def written() -> int:
    """Bytes that this process has written by system calls."""
    return int(Path("/proc/self/io").read_text().split("wchar:")[1].split()[0])


async def waiting(folder: Path, number: int) -> Row:
    """A second of a client that holds a lock, with *number* waiters for it besides."""
    async with connect(f"sqlite:///{folder / f'{number}.db'}") as locks, locks.lock("a", ttl=600):
        waiters = [asyncio.create_task(locks.lock("a", ttl=600).acquire()) for _ in range(number)]
        await asyncio.sleep(2)
        used, bytes_before = cpu(), written()
        await asyncio.sleep(SECONDS)
        share, rate = (cpu() - used) / SECONDS, (written() - bytes_before) / SECONDS / 1024
        for task in waiters:
            task.cancel()
        await asyncio.wait(waiters) if waiters else None
    return Row(f"{number} waiters", f"{share:.2%} of a core, {rate:.1f} KiB/s written")


async def cycles(folder: Path, *, times: int) -> list[Row]:
    """Acquire and release a free lock, beside two transactions that change a row."""
    backend = SqliteBackend(str(folder / "locks.db"))
    plain = sqlite3.connect(folder / "plain.db", isolation_level=None)
    plain.execute("PRAGMA journal_mode = WAL")
    plain.execute("CREATE TABLE plain (name TEXT PRIMARY KEY, number)")
    plain.execute("INSERT INTO plain VALUES ('a', 0)")

    async def bare() -> None:
        for _ in range(2):
            plain.execute("BEGIN IMMEDIATE")
            plain.execute("UPDATE plain SET number = number + 1 WHERE name = 'a'")
            plain.execute("COMMIT")

    async with LockClient(backend) as locks:
        lock = locks.lock("bench")

        async def pair() -> None:
            claim = Claim("pair", 15.0)
            await backend.draw(claim)
            await backend.give_back(claim)

        async def scoped() -> None:
            async with lock:
                pass

        contestants = {"two transactions": bare, "backend.draw, backend.give_back": pair, "async with lock": scoped}
        rows = compared(await compare(contestants, times=times))
    plain.close()
    return rows


async def measure(*, quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        rows = await cycles(Path(folder), times=30 if quick else 150)
        for number in (0, 20, 200):
            rows.append(await waiting(Path(folder), number))
    return rows


if __name__ == "__main__":
    run(measure)
