"""
The token travels by itself: from `async with lock` through aiohttp's client to a guarded aiohttp service.

    uv run python examples/aiohttp_service.py

The first publisher keeps its token for too long. Its client raises the refusal as `StaleTokenError`, not as a 409.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import ClientSession, web

from fencing_sdk import LockClient, StaleTokenError, connect
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.integrations.aiohttp import cleanup_ctx, fencing_middleware, guard_middleware, request_token

prices: dict[str, str] = {}


def price_service() -> web.Application:
    """Keeps prices in memory. The middleware turns late requests away; the check that counts is beside the write."""
    guard = MemoryGuard()
    app = web.Application(middlewares=[guard_middleware(guard, resource="prices/{item}")])

    async def write(request: web.Request) -> web.Response:
        item, text = (
            request.match_info["item"],
            await request.text(),
        )  # a request that comes meanwhile may have a later token
        guard.write(f"prices/{item}", request_token(request), prices.__setitem__, item, text)
        return web.Response()

    app.router.add_put("/prices/{item}", write)
    return app


def publisher(locks: LockClient, prices_url: str) -> web.Application:
    """Publishes a price under the lock of its item."""
    app = web.Application(middlewares=[guard_middleware(required=False)])  # a lost lease is 503, a taken lock 423
    app.cleanup_ctx.append(cleanup_ctx(locks))

    async def publish(request: web.Request) -> web.Response:
        item = request.match_info["item"]
        async with (
            ClientSession(middlewares=[fencing_middleware(origins=[prices_url])]) as session,
            locks.lock(f"prices/{item}", wait=5) as lease,
            session.put(f"{prices_url}/prices/{item}", data=await request.text()) as response,
        ):
            print(f"published under token {lease.token}: {response.status}")
            return web.json_response(lease.headers())

    async def ready(_: web.Request) -> web.Response:
        """For a load balancer. To lead an election is not to be ready: see docs/operations.md."""
        status = locks.status()
        figures = {"leases": status.leases, "least_remaining": status.least_remaining, "leader_of": status.leader_of}
        return web.json_response(figures, status=200 if status.open and not status.draining else 503)

    app.router.add_post("/publish/{item}", publish)
    app.router.add_get("/ready", ready)
    return app


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def main() -> None:
    async with (
        served(price_service()) as prices_url,
        # Within one process; several need a store.
        served(publisher(connect("memory://", tokens="counter"), prices_url)) as publisher_url,
        ClientSession(middlewares=[fencing_middleware(origins=[prices_url])]) as zombie,
    ):
        async with zombie.get(f"{publisher_url}/ready") as response:
            print(f"the publisher is ready: {response.status}")
        async with zombie.post(f"{publisher_url}/publish/A1", data="9.50") as response:
            kept = await response.json()
        async with zombie.post(f"{publisher_url}/publish/A1", data="9.75") as response:
            response.raise_for_status()
        try:
            await zombie.put(f"{prices_url}/prices/A1", data="9.50", headers=kept)
        except StaleTokenError as error:
            print(f"the late one: {error}")
        assert prices == {"A1": "9.75"}, "the late write got through"


asyncio.run(main())
