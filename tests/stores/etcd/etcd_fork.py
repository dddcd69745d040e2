"""
A process that forks while it holds a lock; parent and child go on with the same backend.

    etcd_fork.py URL

The child renews the parent's claim, as a process that took over would, and takes a lock of its own.
"""

import asyncio
import json
import os
import sys

from fencing_sdk.abc import Claim, Grant
from fencing_sdk.backends.etcd import EtcdBackend, from_url


async def child(backend: EtcdBackend, claim: Claim) -> str:
    async with asyncio.timeout(20):
        outcome = await backend.acquire(Claim("child", 60.0))
        (renewed,) = await backend.renew([claim])
    await backend.aclose()
    return f"{isinstance(outcome, Grant)} {renewed.name}"


async def main(url: str) -> None:
    backend, claim = from_url(url), Claim("parent", 60.0)
    await backend.acquire(Claim("first", 60.0))
    await backend.acquire(claim)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(writing, asyncio.run(child(backend, claim)).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        heard = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0  # noqa: ASYNC222  (the child is through)
    (renewed,) = await backend.renew([claim])
    await backend.aclose()
    sys.stdout.write(json.dumps({"child": heard, "parent": renewed.name}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
