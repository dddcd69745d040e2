"""
A process that forks while a connection is open; parent and child go on with the same backend.

    kahuna_fork.py own URL          in the middle of a running loop; the child runs another one
    kahuna_fork.py inherited URL    between two runs of one loop, which the child runs on
"""

import asyncio
import gc
import json
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from fencing_sdk._http.requests import inherited
from fencing_sdk.abc import Claim
from fencing_sdk.backends.kahuna import KahunaBackend, from_url

Run = Callable[[Coroutine[Any, Any, str]], str]


async def renewed(backend: KahunaBackend, claim: Claim) -> str:
    async with asyncio.timeout(20):
        (outcome,) = await backend.renew([claim])
    await backend.aclose()
    return outcome.name


def fork(backend: KahunaBackend, claim: Claim, run: Run) -> str:
    """Renew in a child and return what it saw."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(writing, run(renewed(backend, claim)).encode())
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


async def own(backend: KahunaBackend, claim: Claim) -> dict[str, str]:
    await backend.acquire(claim)
    child = fork(backend, claim, asyncio.run)
    return {"child": child, "parent": await renewed(backend, claim)}


def from_parent(backend: KahunaBackend, claim: Claim) -> dict[str, str]:
    with asyncio.Runner() as runner:
        runner.run(backend.acquire(claim))
        child = fork(backend, claim, runner.get_loop().run_until_complete)
        return {"child": child, "parent": runner.run(renewed(backend, claim))}


if __name__ == "__main__":
    arguments = from_url(sys.argv[2]), Claim("a", 60.0)
    heard = asyncio.run(own(*arguments)) if sys.argv[1] == "own" else from_parent(*arguments)
    sys.stdout.write(json.dumps(heard))
