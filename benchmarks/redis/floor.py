"""What a hand-off costs below the engine: the backend alone, and nothing but its two scripts."""

from __future__ import annotations

import asyncio
import time

from benchmarks.redis.peers import TTL, BareConnection
from benchmarks.redis.server import OwnServer
from fencing_sdk.abc import Claim, Grant
from fencing_sdk.backends.redis import RedisBackend, from_url
from fencing_sdk.backends.redis.keys import DEFAULT_PREFIX, RedisKeys
from fencing_sdk.backends.redis.requests import RedisRequests

_NAME = "handed on below"
_PATIENCE = 20.0


async def backend_alone(server: OwnServer, waiters: int) -> list[float]:
    """Seconds from one release to the next grant, with waiters who speak to the backend themselves."""
    backend, first = from_url(server.url), Claim(_NAME, TTL)
    gaps: list[float] = []
    in_line = asyncio.Barrier(waiters + 1)
    left_at = 0.0

    async def wait() -> None:
        nonlocal left_at
        claim = Claim(_NAME, TTL)
        async with backend.queue(claim) as turn:
            await in_line.wait()
            await _granted(backend, claim, turn)
        begin, left_at = left_at, time.perf_counter()
        gaps.append(left_at - begin)
        await backend.release(claim)

    await backend.acquire(first)
    tasks = [asyncio.create_task(wait()) for _ in range(waiters)]
    async with asyncio.timeout(_PATIENCE):
        await in_line.wait()
        left_at = time.perf_counter()
        await backend.release(first)
        await asyncio.gather(*tasks)
    await backend.aclose()
    return gaps


async def _granted(backend: RedisBackend, claim: Claim, turn: object) -> None:
    while True:
        await turn.wait()
        if isinstance(await backend.acquire(claim), Grant):
            return


async def two_scripts(server: OwnServer, times: int) -> list[float]:
    """Seconds for a release that wakes, and the acquisition by the head, one after the other by the bare parser."""
    calls = RedisRequests(RedisKeys(DEFAULT_PREFIX), tokens="hybrid", fair=True, retention=86400.0, min_replicas=0)
    bare, holder, taken = await BareConnection.open(server.port), Claim(_NAME, TTL), []
    await bare.call(*calls.acquire(holder).by_text())
    await bare.call(*calls.release(Claim("remembers the script", TTL)).by_text())
    for number in range(times):
        head = Claim(_NAME, TTL)
        await bare.call(*calls.join(head, "PUBLISH", "nobody", number).by_text())
        begin = time.perf_counter()
        await bare.call(*calls.release(holder).by_hash())
        await bare.call(*calls.acquire(head).by_hash())
        taken.append(time.perf_counter() - begin)
        holder = head
    await bare.call(*calls.release(holder).by_hash())
    bare.close()
    return taken
