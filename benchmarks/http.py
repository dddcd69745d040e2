"""
What the middlewares cost: that of the client, that of the server, both, and a guard on top.

    uv run python -m benchmarks http

The bare round trip carries the same header, set by hand, and no code looks at it. Client and server
share one process, so the CPU of a round trip is that of both sides. Rounds are short and many, and
interleaved: what is looked for is smaller than the noise of a busy machine.
"""

from __future__ import annotations

from aiohttp import ClientSession, web
from aiohttp.typedefs import Handler

from benchmarks.table import Operation, Row, compare, compared, run
from fencing_sdk import LockClient
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.integrations.aiohttp import fencing_middleware, guard_middleware

TIMES, ROUNDS = 50, 150


class Willing:
    """A guard that admits everything: what is left is the middleware."""

    async def raise_to(self, resource: str, token: int) -> None:
        pass

    async def highest(self, resource: str) -> None:
        pass


async def handler(_: web.Request) -> web.Response:
    return web.Response(text="ok")


@web.middleware
async def empty(request: web.Request, handler: Handler) -> web.StreamResponse:
    return await handler(request)


async def serve(*middlewares: object) -> tuple[web.AppRunner, str]:
    app = web.Application(middlewares=middlewares)  # type: ignore[arg-type]
    app.router.add_put("/seats/{seat}", handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def measure(*, quick: bool) -> list[Row]:
    plain_server, plain_url = await serve()
    empty_server, empty_url = await serve(empty)
    willing_server, willing_url = await serve(guard_middleware(Willing(), resource="seats/{seat}"))
    guarded_server, guarded_url = await serve(guard_middleware(MemoryGuard(), resource="seats/{seat}"))
    async with (
        LockClient(MemoryBackend()) as locks,
        ClientSession() as plain,
        ClientSession(middlewares=[fencing_middleware([plain_url, willing_url, guarded_url])]) as fencing,
        locks.lock("seats/42", ttl=300) as lease,
    ):
        by_hand = lease.headers()

        def put(session: ClientSession, url: str) -> Operation:
            headers = by_hand if session is plain else None

            async def once() -> None:
                async with session.put(f"{url}/seats/42", headers=headers) as response:
                    await response.read()
                    assert response.status == 200

            return once

        contestants = {
            "aiohttp to aiohttp": put(plain, plain_url),
            "client middleware": put(fencing, plain_url),
            "an empty server middleware": put(plain, empty_url),
            "server middleware": put(plain, willing_url),
            "both": put(fencing, willing_url),
            "both, and MemoryGuard": put(fencing, guarded_url),
        }
        results = await compare(contestants, times=TIMES, rounds=ROUNDS // 10 if quick else ROUNDS)
        rows = compared(results, reach={"client middleware": 1.05, "server middleware": 1.05}, by="cpu")
    for server in (plain_server, empty_server, willing_server, guarded_server):
        await server.cleanup()
    return rows


if __name__ == "__main__":
    run(measure)
