"""
A deploy, three times: a worker, a FastAPI service under uvicorn and an aiohttp service get SIGTERM at work.

    uv run python examples/drain_on_deploy.py

Each is a real process that gets a real SIGTERM while it works under a lock, and while another of its tasks waits for
one. The work ends, the waiter leaves, and the next process has the lock milliseconds after the end of the work.
"""

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from aiohttp import web
from fastapi import FastAPI

from fencing_sdk import DrainingError, LockClient, connect

WORK = 1.5  # seconds


async def work(locks: LockClient) -> None:
    """What is done under the lock. A deploy should not interrupt it."""
    async with locks.lock("work", ttl=15) as lease:
        say("works")
        await asyncio.sleep(WORK)
        lease.check()
        say("done")


async def wait_in_line(locks: LockClient) -> None:
    """Wait for the same lock, which this process will never get."""
    try:
        async with locks.lock("work", ttl=15):
            say("works again")
    except DrainingError:
        say("left the line")


# The three programs


async def worker(locks: LockClient) -> None:
    """A loop that ends when the next lock raises `DrainingError`."""
    async with locks, locks.draining_on(signal.SIGTERM, signal.SIGINT, within=25):
        while True:
            await work(locks)


def fastapi_service(locks: LockClient) -> None:
    """A service under uvicorn: it takes no more requests, and ends the lifespan, in which the client drains."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with locks:
            jobs = [asyncio.create_task(job(locks)) for job in (work, wait_in_line)]
            yield
        await asyncio.gather(*jobs)

    uvicorn.run(FastAPI(lifespan=lifespan), host="127.0.0.1", port=0, log_level="critical")


def aiohttp_service(locks: LockClient) -> None:
    """The same with aiohttp."""

    async def draining(_: web.Application) -> AsyncIterator[None]:
        async with locks:
            jobs = [asyncio.create_task(job(locks)) for job in (work, wait_in_line)]
            yield
        await asyncio.gather(*jobs)

    app = web.Application()
    app.cleanup_ctx.append(draining)
    web.run_app(app, host="127.0.0.1", port=0, print=lambda _: None)


# The deploy


def say(what: str) -> None:
    print(what, f"{time.monotonic():.6f}", flush=True)


async def deploy(role: str, url: str) -> None:
    """Start a process, stop it while it works, and wait for the lock that it holds."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, role, url, stdout=asyncio.subprocess.PIPE, env=os.environ
    )
    assert process.stdout is not None
    said: dict[str, float] = {}
    async with connect(url) as locks:
        while "works" not in said:
            said.update(read(await process.stdout.readline()))
        process.send_signal(signal.SIGTERM)
        async with locks.lock("work"):
            next_has_it = time.monotonic()
            while line := await process.stdout.readline():
                said.update(read(line))
    code = await process.wait()
    assert next_has_it > said["done"], "the lock went on before the work had ended"
    print(f"{role}: exit code {code}, the next process has the lock {1000 * (next_has_it - said['done']):.0f} ms later")
    assert "works again" not in said
    assert ("left the line" in said) == (role != "worker")
    assert code == (0 if role != "fastapi" else -signal.SIGTERM), "uvicorn raises the signal again when it has ended"


def read(line: bytes) -> dict[str, float]:
    assert line, "the process ended too early"
    what, _, when = line.decode().strip().rpartition(" ")
    return {what: float(when)}


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        roles = ("worker", "fastapi", "aiohttp")
        await asyncio.gather(*(deploy(role, f"sqlite:///{folder}/{role}.db") for role in roles))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["worker", url]:
            asyncio.run(worker(connect(url)))
        case ["fastapi", url]:
            fastapi_service(connect(url, drain=25))
        case ["aiohttp", url]:
            aiohttp_service(connect(url, drain=25))
        case _:
            asyncio.run(main())
