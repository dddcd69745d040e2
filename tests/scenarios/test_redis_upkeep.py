"""What a Redis server and a process keep in the long run: counters, keys, connections, descriptors, loops."""

import asyncio
import gc
import os
from pathlib import Path

import pytest
from redis_stage import connections, key, keys, nothing_left
from stays import PATIENCE, eventually, opened, staying

from fencing_sdk import LossReason, connect
from fencing_sdk.abc import Claim, Grant, Held
from fencing_sdk.backends.redis import from_url

pytest_plugins = ["redis_fixtures"]

TRICKY = [
    *("a", "a:l", "a}:l", "{a}:l", "{a}", "{a", "a}", "{}", "{", "}", "}{", "{{a}}", "a{b}c", "a%7Bb%7Dc"),
    *("%", "%%", "%25", "%7B", "{%7B", "%2525", "%s", "a b", " ", "'", '"', "\\", "*", "[a]", "?", "a\u00a0b"),
    *("\u00e9", "e\u0301", "\u202e", "\U0001f512", "\u00e9" * 256, "x" * 512, "x" * 511 + "{", "x" * 511 + "}"),
]


async def test_an_idle_counter_expires_and_hybrid_tokens_grow_all_the_same(redis_server):
    async with opened(redis_server.url, retention=1) as (locks, _):
        async with locks.lock("a") as lease:
            first = lease.token
        left = await redis_server.command("PTTL", key("a", "t"))
        assert 0 < left <= 1000 or left == -2  # it has expired already

        async def forgotten() -> bool:
            return not await redis_server.command("EXISTS", key("a", "t"))

        await eventually(forgotten, what="the counter expires")
        assert await redis_server.command("DBSIZE") == 0
        async with locks.lock("a") as lease:
            assert lease.token > first
    await nothing_left(redis_server)


async def test_a_plain_counter_is_kept_for_ever(redis_server):
    async with opened(redis_server.url, tokens="counter", retention=1) as (locks, _), locks.lock("a"):
        assert await redis_server.command("PTTL", key("a", "t")) == -1
    await nothing_left(redis_server)


async def test_a_counter_ahead_of_the_clock_still_grows(redis_server):
    ahead = 2**52
    await redis_server.command("SET", key("a", "t"), ahead)
    async with opened(redis_server.url) as (locks, _):
        for expected in (ahead + 1, ahead + 2):
            async with locks.lock("a") as lease:
                assert lease.token == expected
    await nothing_left(redis_server)


async def test_two_names_never_share_a_lock_or_a_key(redis_server):
    backend = from_url(redis_server.url)
    claims = [Claim(name, 30.0) for name in TRICKY]
    for claim in claims:
        assert isinstance(await backend.acquire(claim), Grant)
        assert isinstance(await backend.acquire(Claim(claim.name, 30.0)), Held)
    assert len(await keys(redis_server)) == len(TRICKY)
    for claim in claims:
        holder = await backend.inspect(claim.name)
        assert (holder.name, holder.holder) == (claim.name, claim.holder)
    for claim in claims:
        await backend.release(claim)
    await backend.aclose()
    await nothing_left(redis_server)


async def test_prefixes_and_namespaces_are_worlds_apart(redis_server):
    async with opened(redis_server.url) as (a, _), opened(redis_server.url, prefix="other") as (b, _):
        async with opened(redis_server.url, namespace="ns") as (c, _), a.lock("x"), b.lock("x"), c.lock("x"):
            assert await keys(redis_server) == {key("x"), key("x", prefix="other"), key("ns:x")}
    await nothing_left(redis_server)


async def test_databases_are_worlds_apart(redis_server):
    async with opened(redis_server.url + "/0") as (a, _), opened(redis_server.url + "/1") as (b, _):
        async with a.lock("x"), b.lock("x"):
            assert "db1:keys=2" in await redis_server.command("INFO", "keyspace")
    await nothing_left(redis_server)


async def test_a_loss_in_another_database_is_nobodys_loss(redis_server):
    """A server tells of changed keys without saying in which database."""
    async with opened(redis_server.url) as (locks, log), opened(redis_server.url + "/1") as (others, _):
        async with staying(locks.lock("a", ttl=600)) as stay:
            lease = await others.lock("a", ttl=600).acquire()
            redis_server.ask_all(["SELECT", 1], ["DEL", key("a")])
            async with asyncio.timeout(PATIENCE):
                assert await lease.wait_lost() is LossReason.REVOKED
            await lease.release()
            await stay.lease.renew()
            assert stay.lease.held
            await stay.end()
    assert "lost" not in {event.kind for event in log.events}
    await nothing_left(redis_server)


@pytest.mark.every_loop
async def test_opening_and_closing_a_hundred_times_leaks_nothing(redis_server):
    descriptors = Path("/proc/self/fd")
    async with opened(redis_server.url) as (locks, _), locks.lock("a"):
        pass
    gc.collect()
    before = len(os.listdir(descriptors))  # noqa: PTH208  (an iterator would be one more)
    for _ in range(100):
        async with opened(redis_server.url) as (locks, _), locks.lock("a"):
            pass
    assert len(os.listdir(descriptors)) <= before  # noqa: PTH208
    assert await connections(redis_server) == []
    await nothing_left(redis_server)


async def test_one_client_may_be_opened_again_and_again(redis_server):
    locks = connect(redis_server.url)
    tokens = []
    for _ in range(3):
        async with locks, locks.lock("a") as lease:
            tokens.append(lease.token)
            assert len(await connections(redis_server)) == 1
    assert tokens == sorted(set(tokens))
    await nothing_left(redis_server)


def test_a_client_serves_a_second_loop_after_the_first_is_gone(redis_server):
    locks = connect(redis_server.url)

    async def use() -> int:
        async with locks, locks.lock("a") as lease:
            return int(lease.token)

    tokens = [asyncio.run(use()) for _ in range(3)]
    assert tokens == sorted(set(tokens))
    asyncio.run(nothing_left(redis_server))


def test_a_backend_serves_a_second_loop_although_nobody_closed_it_in_the_first(redis_server):
    backend = from_url(redis_server.url)
    first, second = Claim("a", 30.0), Claim("a", 30.0)

    async def forgetful() -> None:
        assert isinstance(await backend.acquire(first), Grant)

    async def tidy() -> None:
        assert isinstance(await backend.acquire(second), Held)
        await backend.release(first)
        assert isinstance(await backend.acquire(second), Grant)
        await backend.release(second)
        await backend.aclose()

    asyncio.run(forgetful())
    forgotten = backend._router._node.connection._transport
    asyncio.run(tidy())
    forgotten._sock.close()  # what belongs to a loop that is gone cannot be closed in another way
    forgotten._sock = None
    asyncio.run(nothing_left(redis_server))


async def test_a_thousand_leases_cost_one_connection_and_are_all_given_back(redis_server):
    async with opened(redis_server.url) as (locks, _):
        leases = await asyncio.gather(*(locks.lock(f"n{n}", ttl=30).acquire() for n in range(1000)))
        assert len(await connections(redis_server)) == 1
        assert len({lease.token for lease in leases}) > 1
        await asyncio.gather(*(lease.release() for lease in leases[:500]))

        async def released() -> bool:
            return len(await keys(redis_server)) == 500

        await eventually(released, what="500 are given back")
    await nothing_left(redis_server)  # closing gives back what is still held
