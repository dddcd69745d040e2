"""
A process that forks while a connection to etcd or Kahuna is open; parent and child go on with the same backend.

    store_fork.py own URL          in the middle of a running loop; the child runs another one
    store_fork.py inherited URL    between two runs of one loop, which the child runs on

The child keeps the parent's ticket, as a process that took over would, and takes a lock of its own.
"""

import asyncio
import gc
import json
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from fencing_sdk._http.requests import inherited
from fencing_sdk.abc import Backend, Claim, Place
from fencing_sdk.backends import from_url

CLAIM = Claim("parent", 60.0)


async def take(backend: Backend) -> None:
    for claim in (Claim("first", 60.0), CLAIM):
        assert isinstance(await backend.draw(claim, only_if_it_holds=True), Place)


async def kept(backend: Backend, *own: Claim) -> str:
    async with asyncio.timeout(20):
        for claim in own:
            assert isinstance(await backend.draw(claim, only_if_it_holds=True), Place)
        (answer,) = await backend.keep([(CLAIM, 0)])
    await backend.aclose()
    return type(answer).__name__


def fork(backend: Backend, run: Callable[[Coroutine[Any, Any, str]], str]) -> str:
    """Keep in a child, and return the kind of answer that it got."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(writing, run(kept(backend, Claim("child", 60.0))).encode())
            inherited.clear()  # as at the end of a child that ends by itself
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        heard = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    return heard


async def own(backend: Backend) -> dict[str, str]:
    await take(backend)
    return {"child": fork(backend, asyncio.run), "parent": await kept(backend)}


def from_parent(backend: Backend) -> dict[str, str]:
    with asyncio.Runner() as runner:
        runner.run(take(backend))
        child = fork(backend, runner.get_loop().run_until_complete)
        return {"child": child, "parent": runner.run(kept(backend))}


if __name__ == "__main__":
    made = from_url(sys.argv[2])
    sys.stdout.write(json.dumps(asyncio.run(own(made)) if sys.argv[1] == "own" else from_parent(made)))
