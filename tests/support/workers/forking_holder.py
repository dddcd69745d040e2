"""
A process that forks while it holds a lock; both sides go on.

    forking_holder.py URL KIND

    idle    the child ends without touching what it inherited
    close   the child closes the client that it inherited
    use     the child uses the backend that it inherited, in a loop of its own

It says "forked" when the child has ended, and goes on until a line comes in; it ends with what became of its lease.
"""

import asyncio
import gc
import os
import sys

from fencing_sdk import LockClient, connect
from fencing_sdk.abc import Backend, Busy, Claim
from fencing_sdk.events import Renewed


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def child(locks: LockClient, backend: Backend, kind: str) -> None:
    if kind == "close":
        await locks.aclose()
    if kind == "use":
        for name in ("a", "b"):
            claim = Claim(name, 10.0)
            assert isinstance(await backend.draw(claim, only_if_it_holds=True), Busy) is (name == "a")
            await backend.give_back(claim)
        await backend.aclose()


def fork(locks: LockClient, backend: Backend, kind: str) -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            asyncio._set_running_loop(None)  # as multiprocessing does from Python 3.12 on
            asyncio.run(child(locks, backend, kind))
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0, "the child failed"


async def main(url: str, kind: str) -> None:
    renewed = asyncio.Semaphore(0)

    def observe(event: object) -> None:
        if isinstance(event, Renewed):
            renewed.release()

    if url.startswith("redis://"):  # a machine that stands still is not a silent server: the connection stays
        from fencing_sdk.backends.redis.connection import node

        node.SILENCE = 60.0
    locks = connect(url, observers=[observe])
    async with locks, locks.lock("a", ttl=10, heartbeat_interval=0.2) as lease:
        say("held")
        await renewed.acquire()
        fork(locks, locks._backend, kind)
        for _ in range(3):
            await renewed.acquire()
        say("forked")
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        lease.check()
        async with locks.lock("c"):
            pass
    say("ended")


asyncio.run(main(*sys.argv[1:]))
