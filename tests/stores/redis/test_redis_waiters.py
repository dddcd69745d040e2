"""Many wait for one lock in Redis; some are killed, wake-ups are lost: all others are served, in order, one by one."""

from __future__ import annotations

import asyncio
import hashlib
import math
import signal
import sys

import pytest
from event_log import CLOCK
from inside import LONGEST_PAUSE
from patience import until
from redis_stage import calls_of, connections, key, keys, nothing_left
from stays import PATIENCE, Stay, eventually, opened, staying
from worker_processes import WORKERS, worker_processes

from fencing_sdk import LockHeldError
from fencing_sdk.backends.redis import scripts

pytest_plugins = ["redis_fixtures"]


LIMIT = 300.0


async def waiting(server, number, name="a") -> None:
    async def all_wait() -> bool:
        return await server.command("ZCARD", key(name, "q")) == number

    await eventually(all_wait, what=f"{number} wait", within=LIMIT)


async def settled(locks, proxy) -> None:
    """Wait until the only waiter has the answer to its sign of life, with which it stands in line."""
    await until(lambda: any(scripts.STAND.sha.encode() in request for request in proxy.requests))
    await locks.inspect("another")  # answered in order


@pytest.fixture
def nobody_polls(monkeypatch):
    """Nobody tries again for a minute, unless woken; and nobody is passed over because of that."""
    monkeypatch.setattr("fencing_sdk.backends.redis.waiters._SIGN_EVERY", 120.0)
    monkeypatch.setattr(LONGEST_PAUSE, 60.0)
    for script in (scripts.ACQUIRE, scripts.STAND, scripts.RELEASE):
        text = script.text.replace("LINE_TTL = 3000", "LINE_TTL = 240000").replace("SUSPECT = 1250", "SUSPECT = 240000")
        assert text != script.text
        monkeypatch.setattr(script, "text", text)
        monkeypatch.setattr(script, "sha", hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


# Processes.


async def test_a_forked_child_leaves_its_parent_the_connection(redis_server):
    async with worker_processes() as start:
        holder = await start(WORKERS / "forking_holder.py", redis_server.url, "use")
        assert await holder.says() == ["held"]
        # The child may be there already, with a connection of its own; the parent's is the older one.
        before = min(await connections(redis_server), key=lambda connection: int(connection["id"]))
        assert await holder.says() == ["forked"]
        (after,) = await connections(redis_server)
        assert after["id"] == before["id"]
        await holder.go_on()
        assert await holder.ended() == "ended\n"
    await nothing_left(redis_server)


@pytest.mark.parametrize("forgets", [False, True], ids=["fresh server", "flushed meanwhile"])
async def test_a_command_that_is_ended_while_it_waits_leaves_the_line(redis_server, forgets, answers_may_be_late):
    async with opened(redis_server.url) as (locks, _), staying(locks.lock("a", ttl=60)) as stay:
        command = [sys.executable, "-m", "fencing_sdk", "run", "a", "--url", redis_server.url, "--wait", "forever"]
        process = await asyncio.create_subprocess_exec(*command, "--", "true")
        try:
            await waiting(redis_server, 1)
            if forgets:
                await redis_server.command("SCRIPT", "FLUSH")
            process.terminate()
            async with asyncio.timeout(LIMIT):
                assert await process.wait() == 128 + signal.SIGTERM
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert await keys(redis_server) == {key("a")}
        await stay.end()
        next_holder = await locks.lock("a", ttl=60).try_acquire()
        assert next_holder is not None
        await next_holder.release()
    await nothing_left(redis_server)


# One process.


async def test_the_cost_of_a_hand_off_does_not_grow_with_the_line(redis_server, nobody_polls):
    async with opened(redis_server.url) as (locks, _), opened(redis_server.url) as (others, _):
        for number in (10, 150):
            async with staying(locks.lock("a", ttl=60)) as stay:
                order = []

                async def wait(place, order=order) -> None:
                    async with others.lock("a", ttl=60):
                        order.append(place)

                tasks = [asyncio.create_task(wait(place)) for place in range(number)]
                await waiting(redis_server, number)
                assert len(await connections(redis_server)) == 2
                runs, messages = await calls_of(redis_server, "evalsha"), await calls_of(redis_server, "publish")
                begun = CLOCK.now()
                await stay.end()
                async with asyncio.timeout(PATIENCE):
                    await asyncio.gather(*tasks)
                polls = number * math.ceil(CLOCK.now() - begun)
                assert await calls_of(redis_server, "publish") - messages == number
                assert await calls_of(redis_server, "evalsha") - runs <= 2 * number + 1 + polls
                assert order == list(range(number))
    await nothing_left(redis_server)


@pytest.mark.parametrize("fault", ["kill pubsub", "cut"])
async def test_lost_wake_ups_cost_a_moment(fault, redis_server, proxy):
    async with opened(proxy.url) as (locks, _), opened(redis_server.url) as (others, _):
        async with staying(others.lock("a", ttl=60)) as stay:
            stays = [Stay(locks.lock("a", ttl=60), work=0) for _ in range(20)]
            await waiting(redis_server, 20)
            if fault == "cut":
                proxy.cut()
            else:
                assert await redis_server.command("CLIENT", "KILL", "TYPE", "pubsub") == 1
            await stay.end()
            for waiter in stays:
                await waiter.over()
                assert waiter.error is None
        assert len(await connections(redis_server)) == 2
        assert proxy.connections == 1
    await nothing_left(redis_server)


async def test_a_reconnected_waiter_is_woken_by_messages_again(redis_server, proxy, nobody_polls):
    async with opened(proxy.url) as (locks, _), opened(redis_server.url) as (others, _):
        async with staying(others.lock("a", ttl=60)) as stay:
            waiter = Stay(locks.lock("a", ttl=60), work=0)
            await waiting(redis_server, 1)
            await settled(locks, proxy)
            proxy.cut()
            await until(lambda: proxy.connections == 0)
            signs = proxy.saw(scripts.STAND.sha)
            await locks.inspect("b")
            async with asyncio.timeout(PATIENCE):
                await signs  # the one because of the new connection
            await stay.end()
        await waiter.over()
        assert waiter.error is None
    await nothing_left(redis_server)


@pytest.mark.parametrize("gone", [["q", "w"], ["q"], ["w"]], ids="-".join)
async def test_a_line_that_the_server_has_dropped_forms_again(gone, redis_server):
    """By a flush, or by an eviction, which takes one key."""
    async with opened(redis_server.url) as (locks, _), opened(redis_server.url) as (others, _):
        async with staying(others.lock("a", ttl=60)) as stay:
            stays = [Stay(locks.lock("a", ttl=60), work=0.01) for _ in range(20)]
            await waiting(redis_server, 20)
            await redis_server.command("DEL", *(key("a", kind) for kind in gone))
            await waiting(redis_server, 20)
            await stay.end()
        for waiter in stays:
            await waiter.over()
            assert waiter.error is None
    await nothing_left(redis_server)


async def test_the_last_words_of_a_head_wake_the_next_on_a_fresh_server_too(redis_server, proxy, nobody_polls):
    async with opened(proxy.url) as (locks, _), opened(redis_server.url) as (others, _):
        async with staying(others.lock("a", ttl=60)) as stay:
            head = Stay(locks.lock("a", ttl=60))
            await waiting(redis_server, 1)
            await settled(locks, proxy)
            following = Stay(others.lock("a", ttl=60), work=0)
            await waiting(redis_server, 2)
            proxy.half_open()  # the head can say that it leaves, and hears nothing any more
            await stay.end()
            await head.abandon()
            await following.over()
            assert following.error is None
        proxy.heal()
    await nothing_left(redis_server)


async def test_a_waiter_that_is_cancelled_just_before_its_client_closes_leaves_a_server_that_forgot_the_scripts(
    redis_server, proxy, nobody_polls
):
    async with opened(redis_server.url) as (others, _):
        async with staying(others.lock("a", ttl=60)) as stay:
            async with opened(proxy.url) as (locks, _):
                waiter = Stay(locks.lock("a", ttl=60))
                await waiting(redis_server, 1)
                await settled(locks, proxy)
                await redis_server.command("SCRIPT", "FLUSH")
                proxy.delay(replies=0.2)
                waiter.task.cancel()
                await asyncio.wait([waiter.task])
            assert await keys(redis_server) == {key("a")}
            await stay.end()
    await nothing_left(redis_server)


async def test_no_newcomer_overtakes_a_waiter(redis_server, proxy, answers_may_be_late):
    async with opened(redis_server.url) as (locks, _), opened(proxy.url) as (others, _):
        lease = await locks.lock("a", ttl=60).acquire()
        waiter = Stay(others.lock("a", ttl=60, wait=PATIENCE), work=0)
        await waiting(redis_server, 1)
        await settled(others, proxy)
        proxy.blackhole()
        await lease.release()
        assert await locks.lock("a", ttl=60).try_acquire() is None
        proxy.heal()
        await waiter.over()
        assert waiter.error is None
    await nothing_left(redis_server)


@pytest.mark.parametrize("sign", ["1", "99999999999999"], ids=["long ago", "before the clock was set back"])
async def test_a_head_that_is_dead_is_passed_over_and_its_place_is_removed(sign, redis_server):
    redis_server.ask_all(
        ["ZADD", key("a", "q"), 1, "dead", 2, "dead too"],
        ["HSET", key("a", "w"), "dead", f"{sign} direct lock 0 1 60000 1 PUBLISH nowhere\0"],
    )
    async with opened(redis_server.url) as (locks, _), locks.lock("a", wait=PATIENCE):
        assert await keys(redis_server) == {key("a")}
    await nothing_left(redis_server)


async def test_a_head_that_just_died_costs_three_seconds_and_no_more(redis_server, answers_may_be_late):
    async with opened(redis_server.url) as (locks, _):
        seconds, micros = map(int, await redis_server.command("TIME"))
        redis_server.ask_all(
            ["ZADD", key("a", "q"), 1, "dead"],
            [
                "HSET",
                key("a", "w"),
                "dead",
                f"{seconds * 1000 + micros // 1000} direct lock 0 1 60000 1 PUBLISH nowhere\0",
            ],
        )
        with pytest.raises(LockHeldError):
            await locks.lock("a", wait=0).acquire()
        async with staying(locks.lock("a", wait=PATIENCE)) as stay:
            assert stay.lease.held
            await stay.end()
    left = [await redis_server.command("PTTL", key("a", part)) for part in "qw"]
    assert -1 not in left, "the line ends with its last sign of life"  # -2: it has ended
    await redis_server.command("DEL", key("a", "q"), key("a", "w"))
    await nothing_left(redis_server)
