"""What the Kahuna backend adds to a bare POST: requests, connections and CPU, against a stand-in in another process."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
from yarl import URL

from benchmarks.table import compare, report
from fencing_sdk import LockClient
from fencing_sdk.abc import Claim, Renewal
from fencing_sdk.backends.kahuna import from_url
from fencing_sdk.backends.kahuna.requests import TRY_EXTEND, TRY_LOCK, TRY_UNLOCK, RequestWriter

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "servers"))

from kahuna_server import KahunaServer

TIMES = 300
LEASES = 1000


async def one_call(server: KahunaServer) -> None:
    """The same body to the same path, once by aiohttp alone and once by the backend."""
    claim, wording = Claim("bench", 3600.0), RequestWriter("persistent")
    origin = f"http://127.0.0.1:{server.ports[0]}"
    headers = {"Content-Type": "application/json"}
    extend, lock, unlock = (URL(origin + path) for path in (TRY_EXTEND, TRY_LOCK, TRY_UNLOCK))
    extend_text = str(extend)
    renewing, releasing = wording.of_claim(claim), wording.of_release(claim)
    async with aiohttp.ClientSession(headers=headers) as session:

        async def post(url: URL | str, body: bytes) -> bytes:
            async with session.post(url, data=body) as response:
                return await response.read()

        backend = from_url(server.url)
        await backend.acquire(claim)

        async def bare() -> None:
            await post(extend, renewing)

        async def bare_text() -> None:
            await post(extend_text, renewing)

        async def renew() -> None:
            await backend.renew([claim])

        contestants = {"bare: aiohttp POST": bare, "the same, URL as a text": bare_text, "backend.renew": renew}
        report("renew: one request", await compare(contestants, times=TIMES))
        await backend.release(claim)

        async def bare_pair() -> None:
            await post(lock, renewing)
            await post(unlock, releasing)

        async def pair() -> None:
            await backend.acquire(claim)
            await backend.release(claim)

        contestants = {"bare: two aiohttp POSTs": bare_pair, "backend.acquire, backend.release": pair}
        report("acquire and release: two requests", await compare(contestants, times=TIMES))
        async with LockClient(backend) as locks:
            held = locks.lock("bench")

            async def scoped() -> None:
                async with held:
                    pass

            contestants = {"bare: two aiohttp POSTs": bare_pair, "async with lock": scoped}
            report("the same, with the engine", await compare(contestants, times=TIMES))


async def requests_of_one_lease(server: KahunaServer) -> None:
    server.reset()
    backend, claim = from_url(server.url), Claim("bench", 60.0)
    await backend.acquire(claim)
    await backend.renew([claim])
    await backend.release(claim)
    seen = server.seen()
    print("\nacquire, renew, release")
    print(f"  requests                               {[request['call'] for request in seen]}")
    print(f"  connections                            {len({request['peer'] for request in seen})}")
    await backend.acquire(claim)
    await backend.acquire(Claim("bench", 60.0))
    print(f"  requests of a refused acquisition      {[request['call'] for request in server.seen()[-2:]]}")
    await backend.aclose()


async def many_renewals(server: KahunaServer) -> None:
    server.reset()
    backend = from_url(server.url)
    claims = [Claim(f"bench/{number}", 600.0) for number in range(LEASES)]
    await asyncio.gather(*(backend.acquire(claim) for claim in claims))
    cpu, wall = time.process_time(), time.perf_counter()
    outcomes = await backend.renew(claims)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    seen = server.seen("try-extend")
    print(f"\none call of renew with {LEASES:,} claims")
    print(f"  renewed                                {outcomes.count(Renewal.RENEWED)}")
    print(f"  requests                               {len(seen)}")
    print(f"  connections                            {len({request['peer'] for request in seen})}")
    print(f"  wall                                   {wall * 1000:.0f} ms")
    print(f"  CPU for each claim                     {cpu / LEASES * 1e6:.0f} us")
    await backend.aclose()


async def main() -> None:
    print(f"Python {sys.version.split()[0]}, aiohttp {aiohttp.__version__}")
    with tempfile.TemporaryDirectory() as folder, KahunaServer(Path(folder)) as server:
        server.replication(0)
        await one_call(server)
        await requests_of_one_lease(server)
        await many_renewals(server)


if __name__ == "__main__":
    asyncio.run(main())
