"""
A task that runs once per deployment, and not in each of its processes: here it registers a webhook at a partner.

    uv run python examples/start_up_task.py

The lock lets one process work, and the others wait until it has ended. That it was done is a row of the database: a
lock ends with its lease, and a process that starts an hour later has to find it done, too.
"""

import asyncio
import os
import sqlite3
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import closing

from fencing_sdk import LockClient, connect
from fencing_sdk.guards.sql import SqlGuard

guard = SqlGuard()


async def once(locks: LockClient, deployment: str, task: Callable[[], Awaitable[None]]) -> bool:
    """Run *task* if no process of this *deployment* has, and return whether this one did."""
    async with locks.lock("start-up", ttl=15, wait=600) as lease:  # one name: deployments do not overlap
        with closing(sqlite3.connect(os.environ["DATABASE"])) as db:
            if db.execute("SELECT 1 FROM deployments WHERE id = ?", [deployment]).fetchone():
                return False
            await task()  # cancelled if the lease is lost; killed in the middle, it runs again: make it idempotent
            with db:  # one transaction, after the task and inside of the lock
                guard.admit_sync(db, "start-up", lease.token)
                db.execute("INSERT INTO deployments VALUES (?)", [deployment])
            return True


async def register_webhook() -> None:
    print(f"process {os.getpid()} registers the webhook", flush=True)
    await asyncio.sleep(0.3)  # yours: a request to the partner


async def service() -> None:
    async with connect() as locks:
        await once(locks, os.environ["DEPLOYMENT"], register_webhook)
        print(f"process {os.getpid()} is ready", flush=True)


async def deploy(deployment: str, processes: int) -> int:
    """Start all processes at the same moment; return how often the task ran."""
    environment = os.environ | {"DEPLOYMENT": deployment}
    command = [sys.executable, __file__, "service"]
    started = [
        await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE)
        for _ in range(processes)
    ]
    outputs = [output.decode() for output, _ in await asyncio.gather(*(process.communicate() for process in started))]
    assert all("is ready" in output for output in outputs)
    return "".join(outputs).count("registers")


async def main(folder: str) -> None:
    os.environ.update(DATABASE=f"{folder}/shop.db", FENCING_URL=f"sqlite:///{folder}/locks.db")
    with closing(sqlite3.connect(os.environ["DATABASE"])) as db:
        db.execute("CREATE TABLE deployments (id TEXT PRIMARY KEY)")
    for deployment in ("v1", "v1", "v2"):  # the second one: all processes of v1 start again
        print(f"four processes of {deployment} start, the task runs {await deploy(deployment, 4)} times")
    with closing(sqlite3.connect(os.environ["DATABASE"])) as db:
        assert db.execute("SELECT id FROM deployments").fetchall() == [("v1",), ("v2",)]


if __name__ == "__main__":
    if sys.argv[1:] == ["service"]:
        asyncio.run(service())
    else:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(main(folder))
