"""
A process that forks while its backend is open, in three ways; both sides go on with the same object.

    sqlite_fork.py idle PATH     between two transactions, standing in a line
    sqlite_fork.py busy PATH     in the middle of a transaction
    sqlite_fork.py stuck PATH    in the middle of a transaction that does not end
"""

import asyncio
import json
import os
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from fencing_sdk.abc import Claim, Grant
from fencing_sdk.backends._shared import rules
from fencing_sdk.backends.sqlite import SqliteBackend
from fencing_sdk.backends.sqlite import store as _thread
from fencing_sdk.backends.sqlite.rows import OpenFile, SqliteRows
from fencing_sdk.errors import BackendRefusedError
from fencing_sdk.testing.promises.under_test import in_line


def locks_of_this_process(path: str) -> int:
    """How many locks the kernel knows that this process has on the database."""
    inode = str(Path(path).stat().st_ino)
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return sum(line[4] == str(os.getpid()) and line[5].endswith(f":{inode}") for line in lines)


def fork(child: Callable[[], Awaitable[object]]) -> tuple[int, int]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(writing, json.dumps(asyncio.run(child())).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    return pid, reading


def outcome_of(child: tuple[int, int]) -> object:
    pid, reading = child
    with os.fdopen(reading) as pipe:
        heard = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0, "the child failed"
    return json.loads(heard)


async def idle(backend: SqliteBackend, path: str) -> dict[str, object]:
    mine, ahead, waiting = Claim("mine", 60.0), Claim("line", 60.0), Claim("line", 60.0)
    assert isinstance(await backend.acquire(mine), Grant)
    assert isinstance(await backend.acquire(ahead), Grant)

    async def child() -> dict[str, object]:
        outcome = await backend.acquire(Claim("child", 60.0))
        heard = {"granted": isinstance(outcome, Grant), "locks": locks_of_this_process(path)}
        ahead, waiting = Claim("line of the child", 60.0), Claim("line of the child", 60.0)
        await backend.acquire(ahead)
        async with in_line(backend, waiting) as turn, asyncio.timeout(20):
            await backend.release(ahead)
            await turn.wait()
        await backend.aclose()
        return heard

    async with in_line(backend, waiting) as turn:
        heard = await asyncio.to_thread(outcome_of, fork(child))
        await backend.release(ahead)
        async with asyncio.timeout(20):
            await turn.wait()
        woken = isinstance(await backend.acquire(waiting), Grant)
    renewed = await backend.renew([mine])
    return {"child": heard, "woken": woken, "renewed": [outcome.name for outcome in renewed]}


async def busy(backend: SqliteBackend, path: str) -> dict[str, object]:
    begun = threading.Event()

    def slowly(opened: OpenFile) -> None:
        with opened.file.transaction() as now:
            rules.grant(SqliteRows(opened, "mine", now), Claim("mine", 60.0))
            begun.set()
            threading.Event().wait(0.5)

    work = backend._store.sql.submit(slowly)
    begun.wait()

    async def child() -> dict[str, object]:
        holder = await backend.inspect("mine")
        outcome = await backend.acquire(Claim("child", 60.0))
        return {"sees": holder is not None, "granted": isinstance(outcome, Grant)}

    heard = outcome_of(fork(child))
    await asyncio.wrap_future(work)
    return {"child": heard, "parent": isinstance(await backend.acquire(Claim("other", 60.0)), Grant)}


async def stuck(backend: SqliteBackend, path: str) -> dict[str, object]:
    _thread.FORK_PATIENCE = 0.2
    warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, about threads at a fork: 3.12 and later
    begun, go_on = threading.Event(), threading.Event()
    work = backend._store.sql.submit(lambda _: (begun.set(), go_on.wait()))
    begun.wait()

    async def child(*, grandchild: bool = False) -> list[str]:
        refused = []
        for inherited_or_new in (backend, SqliteBackend(path)):
            try:
                await inherited_or_new.acquire(Claim("child", 60.0))
            except BackendRefusedError as error:
                refused.append(str(error))
        if not grandchild:
            refused += outcome_of(fork(partial(child, grandchild=True)))
        return refused

    heard = outcome_of(fork(child))
    go_on.set()
    await asyncio.wrap_future(work)
    return {"child": heard, "parent": isinstance(await backend.acquire(Claim("other", 60.0)), Grant)}


async def main(command: str, path: str) -> None:
    backend = SqliteBackend(path)
    try:
        heard = await {"idle": idle, "busy": busy, "stuck": stuck}[command](backend, path)
    finally:
        await backend.aclose()
    sys.stdout.write(json.dumps(heard))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
