"""
What the Kahuna backend adds to a bare POST: requests, connections and CPU, against a stand-in in another process.

    uv run python -m benchmarks kahuna
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
from yarl import URL

from benchmarks.table import Row, compare, compared, run
from fencing_sdk import LockClient
from fencing_sdk.abc import Claim, Place
from fencing_sdk.backends.kahuna import from_url
from fencing_sdk.backends.kahuna.cluster import TRY_EXTEND, TRY_LOCK, TRY_UNLOCK, body_of

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "servers"))

from kahuna_server import KahunaServer

TIMES = 300
LEASES = 1000


async def one_call(server: KahunaServer, *, times: int) -> list[Row]:
    """The same body to the same path, once by aiohttp alone and once by the backend."""
    claim = Claim("bench", 3600.0)
    origin = f"http://127.0.0.1:{server.ports[0]}"
    headers = {"Content-Type": "application/json"}
    extend, lock, unlock = (URL(origin + path) for path in (TRY_EXTEND, TRY_LOCK, TRY_UNLOCK))
    extend_text = str(extend)
    renewing, releasing = body_of(claim.name, claim, ttl=claim.ttl), body_of(claim.name, claim)
    async with aiohttp.ClientSession(headers=headers) as session:

        async def post(url: URL | str, body: bytes) -> bytes:
            async with session.post(url, data=body) as response:
                return await response.read()

        backend = from_url(server.url)
        await backend.draw(claim)

        async def bare() -> None:
            await post(extend, renewing)

        async def bare_text() -> None:
            await post(extend_text, renewing)

        async def renew() -> None:
            await backend.keep([(claim, 0)])

        contestants = {"one POST": bare, "one POST, its URL as a text": bare_text, "backend.keep": renew}
        rows = compared(await compare(contestants, times=times))
        await backend.give_back(claim)

        async def bare_pair() -> None:
            await post(lock, renewing)
            await post(unlock, releasing)

        async def pair() -> None:
            drawn = Claim("bench", 3600.0)  # a repeated draw of one owner is another request
            await backend.draw(drawn)
            await backend.give_back(drawn)

        async with LockClient(backend) as locks:
            held = locks.lock("bench")

            async def scoped() -> None:
                async with held:
                    pass

            contestants = {"two POSTs": bare_pair, "backend.draw, backend.give_back": pair, "async with lock": scoped}
            rows += compared(await compare(contestants, times=times))
    return rows


async def requests_of_one_lease(server: KahunaServer) -> list[Row]:
    server.reset()
    backend, claim = from_url(server.url), Claim("bench", 60.0)
    await backend.draw(claim)
    await backend.keep([(claim, 0)])
    await backend.give_back(claim)
    seen = server.seen()
    await backend.draw(claim)
    await backend.draw(Claim("bench", 60.0))
    refused = [request["call"] for request in server.seen()[len(seen) + 1 :]]
    await backend.aclose()
    connections = len({request["peer"] for request in seen})
    return [
        Row("requests of draw, keep, give_back", str(len(seen)), reach="3", reached=len(seen) == 3),
        Row("connections of these", str(connections), reach="1", reached=connections == 1),
        Row("requests of a refused draw", ", ".join(refused)),
    ]


async def many_renewals(server: KahunaServer) -> list[Row]:
    server.reset()
    backend = from_url(server.url)
    claims = [Claim(f"bench/{number}", 600.0) for number in range(LEASES)]
    await asyncio.gather(*(backend.draw(claim) for claim in claims))
    cpu, wall = time.process_time(), time.perf_counter()
    answers = await backend.keep([(claim, 0) for claim in claims])
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    seen = server.seen("try-extend")
    await backend.aclose()
    what, renewed = f"a renewal of {LEASES:,} leases", sum(isinstance(answer, Place) for answer in answers)
    made = f"{len(seen):,} on {len({request['peer'] for request in seen})} connections"
    return [
        Row(what, f"{wall * 1000:.0f} ms, {cpu / LEASES * 1e6:.0f} us of CPU for each"),
        Row(f"{what}: requests", made, reach="1.02 each", reached=len(seen) <= 1.02 * LEASES),
        Row(f"{what}: renewed", f"{renewed:,}", reach="all", reached=renewed == LEASES),
    ]


async def measure(*, quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, KahunaServer(Path(folder)) as server:
        server.replication(0)
        rows = await one_call(server, times=TIMES // 6 if quick else TIMES)
        rows += await requests_of_one_lease(server)
        return rows + await many_renewals(server)


if __name__ == "__main__":
    run(measure)
