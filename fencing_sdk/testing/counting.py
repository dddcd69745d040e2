"""
A counter in a plain file, which is right only if a lock keeps its writers apart.

Run as a module it is one of several processes that increment the counter under one lock. The URL
of the store comes from the environment, because every user of the machine can see a command line.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from fencing_sdk._client import LockClient
from fencing_sdk._connect import connect

LOCK = "counter"
TASKS = 2
"""Tasks of one process that increment at the same time."""
_LONGEST_PAUSE = 0.003


class Counter:
    """A number in a file, and the tokens of the holders that incremented it, in the order of their writes."""

    def __init__(self, folder: Path) -> None:
        self._number = folder / "number"
        self._journal = folder / "tokens"

    def read(self) -> int:
        """The number; 0 before the first write."""
        return int(self._number.read_text(encoding="ascii")) if self._number.exists() else 0

    def write(self, number: int, token: int) -> None:
        """Write the number and the token of the writer. Only the lock makes this safe."""
        self._number.write_text(str(number), encoding="ascii")
        with self._journal.open("a", encoding="ascii") as journal:
            journal.write(f"{token:d}\n")

    def tokens(self) -> list[int]:
        """The tokens of all writes, in their order."""
        return [int(line) for line in self._journal.read_text(encoding="ascii").split()]

    async def increment(self, locks: LockClient, times: int) -> None:
        """Read, dawdle, and write the next number, each time under a lease of its own."""
        for _ in range(times):
            async with locks.lock(LOCK, ttl=30, backoff=_soon_again) as lease:
                number = self.read()
                await asyncio.sleep(random.uniform(0, _LONGEST_PAUSE))
                self.write(number + 1, lease.token)
            await asyncio.sleep(random.uniform(0, _LONGEST_PAUSE))


def _soon_again(_: object) -> float:
    return random.uniform(0, 10 * _LONGEST_PAUSE)


async def main(folder: str, times: int) -> None:
    """
    Increment the counter in *folder* from several tasks, *times* each.

    Says when it is ready, and begins with the others: when its input ends.
    """
    counter = Counter(Path(folder))
    async with connect() as locks, asyncio.TaskGroup() as tasks:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)
        for _ in range(TASKS):
            tasks.create_task(counter.increment(locks, times))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
