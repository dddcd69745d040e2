"""What waiting for a lock in SQLite costs: CPU of the process, and bytes that reach the database's log."""

from __future__ import annotations

import asyncio
import resource
import tempfile
from pathlib import Path

from fencing_sdk import connect

SECONDS = 5.0


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def measure(folder: Path, number: int) -> None:
    """Compare a client that holds a lock with one that has *number* waiters for it besides."""
    path = folder / f"{number}.db"
    log = path.with_name(f"{path.name}-wal")
    async with connect(f"sqlite:///{path}") as locks, locks.lock("a", ttl=600):
        waiting = [asyncio.create_task(locks.lock("a", ttl=600).acquire()) for _ in range(number)]
        await asyncio.sleep(2)
        before, written = cpu(), log.read_bytes()
        await asyncio.sleep(SECONDS)
        share = (cpu() - before) / SECONDS
        same = "nothing" if log.read_bytes() == written else "something"
        print(f"  {number:4} waiters: {share:6.2%} of a core, {same} written to the database")
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting) if waiting else None


async def main() -> None:
    print("\nSQLite, waiting in line")
    with tempfile.TemporaryDirectory() as folder:
        for number in (0, 20, 200):
            await measure(Path(folder), number)


if __name__ == "__main__":
    asyncio.run(main())
