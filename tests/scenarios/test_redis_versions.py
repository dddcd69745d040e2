"""Clients of several versions hold and wait for the same locks: what they write is read as they wrote it."""

import time

import redis.asyncio
from stays import PATIENCE, opened

from fencing_sdk._values.claim import holder_of

pytest_plugins = ["redis_fixtures"]

LEASE, LAST, LINE, SIGNS = (f"{{fencing:a}}:{key}" for key in "ltqw")
OWNER, CHANNEL, TICKET = "5e2a64fecf718495e9acf4185b4bbdbc", "{fencing}:wake:c13f97af32284b399f0453db61ad602f", "42"


async def test_the_lease_of_a_client_of_another_version_is_waited_for_and_shown(redis_server):
    await redis_server.command("SET", LAST, "1795678693419940")
    await redis_server.command("SET", LEASE, f"{OWNER}\x001795678693419940\x00=worker 3", "PX", 700)
    async with opened(redis_server.url) as (locks, _):
        holder = await locks.inspect("a")
        assert holder is None or (holder.holder, holder.metadata) == (holder_of(OWNER), "worker 3")
        async with locks.lock("a", wait=PATIENCE) as lease:
            assert lease.token > 1795678693419940


async def test_a_waiter_of_another_version_is_handed_the_lock_by_a_release(redis_server):
    client = redis.asyncio.Redis.from_url(redis_server.url)
    hears = client.pubsub()
    await hears.subscribe(CHANNEL)
    assert await hears.get_message(timeout=PATIENCE)  # it listens
    async with opened(redis_server.url) as (locks, _):
        async with locks.lock("a", wait=PATIENCE, ttl=60) as lease:
            soon = time.time_ns() // 1_000_000 + 2_500  # so that the sign is fresh also if this machine stands still
            sign = f"{soon} direct 4194193 15000 {TICKET} PUBLISH {CHANNEL}\0=worker 3"
            await redis_server.command("HSET", SIGNS, OWNER, sign)
            await redis_server.command("ZADD", LINE, 1, OWNER)
            last = lease.token
        owner, token, metadata = (await redis_server.command("GET", LEASE)).split("\0")
        assert (owner, metadata) == (OWNER, "=worker 3")
        assert int(token) > last
        message = await hears.get_message(timeout=PATIENCE)
        assert message["data"].decode() == f"{TICKET} 4194193 {token}"
    await hears.aclose()
    await client.aclose()


async def test_a_waiter_of_a_version_that_gives_other_signs_holds_up_no_one(redis_server):
    """It finds the lock free, or held, when it asks by itself."""
    async with opened(redis_server.url) as (locks, _):
        async with locks.lock("a", wait=PATIENCE, ttl=60) as lease:
            await redis_server.command("ZADD", LINE, 1, OWNER)
            last = lease.token
        async with locks.lock("a", wait=PATIENCE) as lease:
            assert lease.token > last
