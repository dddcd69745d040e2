"""
A process with many tasks that stand in the line of one lock.

    zookeeper_waiters.py URL NAME TASKS TTL

Each joins the line when a line comes in on stdin. It says "joined TASK" then, and "granted TASK TOKEN" when it
has the lock, which it gives back at once; "done" at the end.
"""

import asyncio
import sys

from fencing_sdk import LockClient, connect
from fencing_sdk.backends.zookeeper import ZooKeeperBackend


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def hold(locks: LockClient, number: int, name: str, ttl: float) -> None:
    async with locks.lock(name, ttl=ttl) as lease:
        say("granted", number, lease.token)


def in_place(locks: LockClient) -> int:
    backend = locks._backend
    assert isinstance(backend, ZooKeeperBackend)
    return sum(bool(own_node.watched) for own_node in backend._own_nodes.all())


async def main(url: str, name: str, tasks: str, ttl: str) -> None:
    loop = asyncio.get_running_loop()
    async with connect(url) as locks, asyncio.TaskGroup() as group:
        for number in range(int(tasks)):
            await loop.run_in_executor(None, sys.stdin.readline)
            group.create_task(hold(locks, number, name, float(ttl)))
            while in_place(locks) <= number:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            say("joined", number)
    say("done")


asyncio.run(main(*sys.argv[1:]))
