"""
A process that waits, and may be stopped or killed at any moment.

    etcd_waiters.py URL NAME TTL COUNT

So many tasks stand in line for one lock. It says "waiting" when all stand there, and then, in JSON
lines, who holds the lock with which token, and why a lease was lost. A holder stays until it loses.
"""

from __future__ import annotations

import asyncio
import json
import sys

from fencing_sdk import BackendUnavailableError, LeaseLostError, LockClient, connect


def report(**fields: object) -> None:
    print(json.dumps(fields), flush=True)  # noqa: T201  (the controller reads it)


async def wait(locks: LockClient, name: str, ttl: float, number: int) -> None:
    while True:
        try:
            async with locks.lock(name, ttl=ttl) as lease:
                report(kind="held", number=number, token=lease.token)
                await asyncio.Event().wait()
        except LeaseLostError as lost:
            report(kind="lost", number=number, reason=lost.reason.value, token=lost.token)
            return
        except BackendUnavailableError:  # it stood still for a ttl with a request on its way
            continue


async def main(url: str, name: str, ttl: str, count: str) -> None:
    async with connect(url) as locks, asyncio.TaskGroup() as group:
        for number in range(int(count)):
            group.create_task(wait(locks, name, float(ttl), number))
            await asyncio.sleep(0.01)
        report(kind="waiting")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
