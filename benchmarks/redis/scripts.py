"""What the scripts cost the server, by its own account."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Iterable

from benchmarks.redis.peers import TTL, BareLock
from benchmarks.redis.server import OwnServer
from benchmarks.table import Row, times
from fencing_sdk.abc import Claim, Place
from fencing_sdk.backends.redis import RedisBackend, from_url

_LEAST = "GET, compare, PEXPIRE"


async def scripts(server: OwnServer, *, locks: int, rounds: int) -> list[Row]:
    """Each script on so many locks, in one write; the median of the rounds."""
    backend, bare = from_url(server.url), await BareLock.open(server.port)
    await backend.open()
    taken = [await _one_round(server, backend, bare, locks) for _ in range(rounds)]
    await backend.aclose()
    bare.close()
    costs = {name: statistics.median(seen[name] for seen in taken) for name in taken[0]}
    least = costs.pop(_LEAST)
    peer = f"{_LEAST} {least * 1e6:.1f} us"
    return [Row(f"server: {name}", f"{cost * 1e6:.1f} us", peer, times(cost, least)) for name, cost in costs.items()]


async def _one_round(server: OwnServer, backend: RedisBackend, bare: BareLock, locks: int) -> dict[str, float]:
    claims = [Claim(f"script/{number}", TTL) for number in range(locks)]
    again = [Claim(claim.name, TTL) for claim in claims]
    await asyncio.gather(*(bare.acquire(f"bare/{number}", "me") for number in range(locks)))
    tries = (backend.draw(claim, only_if_it_holds=True) for claim in again)
    drawn = await _cost(server, map(backend.draw, claims), locks)
    places = await backend.keep([(claim, 0) for claim in claims])
    kept = [(claim, place.number) for claim, place in zip(claims, places, strict=True) if isinstance(place, Place)]
    seen = {
        "draw, holds": drawn,
        "draw, held by another": await _cost(server, tries, locks),
        "keep, each ticket": await _cost(server, [backend.keep(kept)], locks),
        "look": await _cost(server, (backend.tickets([claim.name]) for claim in claims), locks),
        "give back": await _cost(server, map(backend.give_back, claims), locks),
        _LEAST: await _cost(server, (bare.renew(f"bare/{number}", "me") for number in range(locks)), locks),
    }
    server.clear()
    return seen


async def _cost(server: OwnServer, calls: Iterable[Awaitable[object]], count: int) -> float:
    before = server.script_seconds()
    await asyncio.gather(*calls)
    return (server.script_seconds() - before) / count
