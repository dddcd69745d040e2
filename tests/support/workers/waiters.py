"""
A process with many tasks that wait for one lock.

    waiters.py URL NAME TASKS TTL KIND

It says "granted TASK TOKEN" for each grant, in the order of the grants, and "done LAG" at the end.

    quick   each task holds the lock for a turn of the loop
    stuck   the first task that is granted holds the lock until it is killed
"""

import asyncio
import sys

from fencing_sdk import LockClient, connect
from fencing_sdk._values.clock import BootClock

CLOCK = BootClock()


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def wait_and_hold(locks: LockClient, number: int, name: str, ttl: float, kind: str) -> None:
    async with locks.lock(name, ttl=ttl) as lease:
        say("granted", number, lease.token)
        await (asyncio.Event().wait() if kind == "stuck" else asyncio.sleep(0))
        assert lease.held


async def watch_lag() -> float:
    worst = 0.0
    try:
        while True:
            before = CLOCK.now()
            await asyncio.sleep(0.05)
            worst = max(worst, CLOCK.now() - before)
    except asyncio.CancelledError:
        return worst


async def main(url: str, name: str, tasks: str, ttl: str, kind: str) -> None:
    async with connect(url) as locks:
        watching = asyncio.create_task(watch_lag())
        async with asyncio.TaskGroup() as group:
            for number in range(int(tasks)):
                group.create_task(wait_and_hold(locks, number, name, float(ttl), kind))
        watching.cancel()
        say("done", await watching)


asyncio.run(main(*sys.argv[1:]))
