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

from fencing_sdk.abc import Claim, Place
from fencing_sdk.abc.line import Line
from fencing_sdk.backends.sqlite import SqliteBackend
from fencing_sdk.backends.sqlite import thread as _thread
from fencing_sdk.backends.sqlite.lines import LineFile
from fencing_sdk.errors import BackendRefusedError


def locks_of_this_process(path: str) -> int:
    """Count the locks that this process has on the database, as the kernel knows."""
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


async def drawn(backend: SqliteBackend, name: str) -> bool:
    """Return whether a new owner holds *name*."""
    return isinstance(await backend.draw(Claim(name, 60.0), only_if_it_holds=True), Place)


async def woken(backend: SqliteBackend, name: str, between: Callable[[], Awaitable[object]]) -> bool:
    """Wait in a line until the bell alone says that the ticket holds; *between*: while it waits."""
    ahead, waiting, rung = Claim(name, 60.0), Claim(name, 60.0), asyncio.Event()
    await backend.draw(ahead)
    stop = backend.listen(waiting, lambda _: rung.set())
    await backend.draw(waiting)
    await between()
    await backend.give_back(ahead)
    async with asyncio.timeout(20):
        await rung.wait()
    stop()
    (place,) = await backend.keep([(waiting, 0)])
    return isinstance(place, Place) and place.token is not None


async def idle(backend: SqliteBackend, path: str) -> dict[str, object]:
    mine, heard = Claim("mine", 60.0), []
    assert isinstance(await backend.draw(mine), Place)

    async def child() -> dict[str, object]:
        found = {"granted": await drawn(backend, "child"), "locks": locks_of_this_process(path)}
        assert await woken(backend, "line of the child", partial(asyncio.sleep, 0))
        await backend.aclose()
        return found

    async def fork_and_wait() -> None:
        heard.append(await asyncio.to_thread(outcome_of, fork(child)))

    rung = await woken(backend, "line", fork_and_wait)
    (kept,) = await backend.keep([(mine, 0)])
    return {"child": heard[0], "woken": rung, "kept": isinstance(kept, Place)}


async def busy(backend: SqliteBackend, path: str) -> dict[str, object]:
    begun = threading.Event()

    def slowly(opened: LineFile) -> None:
        def step(line: Line, now: float) -> object:
            begun.set()
            threading.Event().wait(0.5)
            return line.draw(Claim("mine", 60.0), now)

        opened.run([("mine", step)], draws=True)

    work = backend._sql.submit(slowly)
    begun.wait()

    async def child() -> dict[str, object]:
        (tickets,) = await backend.tickets(["mine"])
        return {"sees": bool(tickets), "granted": await drawn(backend, "child")}

    heard = outcome_of(fork(child))
    await asyncio.wrap_future(work)
    return {"child": heard, "parent": await drawn(backend, "other")}


async def stuck(backend: SqliteBackend, path: str) -> dict[str, object]:
    _thread.FORK_PATIENCE = 0.2
    warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, about threads at a fork: 3.12 and later
    begun, go_on = threading.Event(), threading.Event()
    work = backend._sql.submit(lambda _: (begun.set(), go_on.wait()))
    begun.wait()

    async def child(*, grandchild: bool = False) -> list[str]:
        refused = []
        for inherited_or_new in (backend, SqliteBackend(path)):
            try:
                await inherited_or_new.draw(Claim("child", 60.0))
            except BackendRefusedError as error:
                refused.append(str(error))
        if not grandchild:
            refused += outcome_of(fork(partial(child, grandchild=True)))
        return refused

    heard = outcome_of(fork(child))
    go_on.set()
    await asyncio.wrap_future(work)
    return {"child": heard, "parent": await drawn(backend, "other")}


async def main(command: str, path: str) -> None:
    backend = SqliteBackend(path)
    try:
        heard = await {"idle": idle, "busy": busy, "stuck": stuck}[command](backend, path)
    finally:
        await backend.aclose()
    sys.stdout.write(json.dumps(heard))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
