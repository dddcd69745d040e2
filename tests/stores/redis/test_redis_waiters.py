"""Many wait for one lock in Redis; some are killed, messages are lost: all others are served, in order, one by one."""

from __future__ import annotations

import asyncio
import math
import signal
import sys

import pytest
from event_log import CLOCK
from patience import until
from redis_cluster import Cluster
from redis_server import version_of
from redis_stage import calls_of, connections, key, nothing_left
from redis_stage import waiting as waiting_for
from stays import PATIENCE, Stay, eventually, opened, staying
from worker_processes import WORKERS, worker_processes

from fencing_sdk.abc import READER, WRITER, Claim
from fencing_sdk.backends.redis import from_url

pytest_plugins = ["redis_fixtures"]


LIMIT = 300.0


async def waiting(server, number, name="a") -> None:
    async def all_wait() -> bool:
        return await waiting_for(server, name) == number

    await eventually(all_wait, what=f"{number} wait", within=LIMIT)


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
        assert await waiting_for(redis_server) == 0
        await stay.end()
        next_holder = await locks.lock("a", ttl=60).try_acquire()
        assert next_holder is not None
        await next_holder.release()
    await nothing_left(redis_server)


# One process.


async def test_the_cost_of_a_hand_off_does_not_grow_with_the_line(redis_server):
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
                assert await calls_of(redis_server, "evalsha") - runs <= 3 * number + 2 + polls
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
                assert await redis_server.command("CLIENT", "KILL", "TYPE", "pubsub") == 2
            await stay.end()
            for waiter in stays:
                await waiter.over()
                assert waiter.error is None
        assert len(await connections(redis_server)) == 2
        assert proxy.connections == 1
    await nothing_left(redis_server)


async def test_no_newcomer_overtakes_a_waiter(redis_server, proxy, answers_may_be_late):
    async with opened(redis_server.url) as (locks, _), opened(proxy.url) as (others, _):
        lease = await locks.lock("a", ttl=60).acquire()
        waiter = Stay(others.lock("a", ttl=60, wait=PATIENCE), work=0)
        await waiting(redis_server, 1)
        proxy.blackhole()
        await lease.release()
        assert await locks.lock("a", ttl=60).try_acquire() is None
        proxy.heal()
        await waiter.over()
        assert waiter.error is None
    await nothing_left(redis_server)


async def test_more_readers_than_one_run_lets_in_are_let_in_by_those_before_them(redis_server):
    """The bound of a run is 500."""
    async with opened(redis_server.url) as (locks, _):
        shared, held, all_hold = locks.rwlock("a", ttl=60), [], asyncio.Event()

        async def read() -> None:
            async with shared.reader as lease:
                held.append(lease.token)
                if len(held) == 1100:
                    all_hold.set()
                await all_hold.wait()  # for 1,100 tasks that ask again and again, renewals would come too late

        async with shared.writer:
            readers = [asyncio.create_task(read()) for _ in range(1100)]
            await waiting(redis_server, 1100)
        await asyncio.gather(*readers)
        assert len(set(held)) == 1
    await nothing_left(redis_server)


async def test_a_waiter_whose_slot_moves_listens_at_the_next_server(redis_cluster: Cluster):
    """The old server ends the subscription, and says so."""
    slot, source = redis_cluster.slot_of(key("a")), redis_cluster.node_of(key("a"))
    if version_of(source.binary) < (7,):
        pytest.skip("no channels of their own before Redis 7")
    target = redis_cluster.other_than(source)
    url = redis_cluster.url.replace("redis://", "redis+cluster://")
    async with opened(url) as (locks, _), opened(url) as (others, _):
        async with staying(others.lock("a", ttl=60)) as stay:
            waiter = Stay(locks.lock("a", ttl=60), work=0)
            await waiting(source, 1)
            for there, here in ((target, source), (source, target)):  # and back again
                await asyncio.to_thread(redis_cluster.move_slot, slot, to=there)
                await until(lambda there=there: len(there.ask("PUBSUB", "SHARDCHANNELS")) == 1, what="it listens there")
                assert here.ask("PUBSUB", "SHARDCHANNELS") == []
            await stay.end()
        await waiter.over()
        assert waiter.error is None
        await until(lambda: source.ask("PUBSUB", "SHARDCHANNELS") == [], what="it listens no more")


async def test_a_message_that_is_no_news_is_passed_over(redis_server):
    backend, heard = from_url(redis_server.url), []
    claim = Claim("a", 60.0, mode=WRITER)
    await backend.draw(Claim("a", 60.0, mode=READER))
    stop = backend.listen(claim, heard.append)
    await backend.draw(claim)
    for text in ("", "x", "x y z", b"\xff", f"{backend._bells._client} 1 2 3"):
        await redis_server.command("PUBLISH", backend._bells._channel, text)
    await backend.tickets(["a"])
    assert heard == []
    stop()
    await backend.aclose()
