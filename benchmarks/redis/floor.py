"""What a hand-off costs below the engine: the backend alone."""

from __future__ import annotations

import asyncio
import time

from benchmarks.redis.peers import TTL
from benchmarks.redis.server import OwnServer
from fencing_sdk.abc import Claim, News, Place
from fencing_sdk.backends.redis import from_url

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
        claim, handed = Claim(_NAME, TTL), asyncio.Event()

        def ring(news: News) -> None:
            if isinstance(news, Place):
                handed.set()

        stop = backend.listen(claim, ring)
        await backend.draw(claim)
        await in_line.wait()
        await handed.wait()
        stop()
        begin, left_at = left_at, time.perf_counter()
        gaps.append(left_at - begin)
        await backend.give_back(claim)

    await backend.draw(first)
    tasks = [asyncio.create_task(wait()) for _ in range(waiters)]
    async with asyncio.timeout(_PATIENCE):
        await in_line.wait()
        left_at = time.perf_counter()
        await backend.give_back(first)
        await asyncio.gather(*tasks)
    await backend.aclose()
    return gaps
