"""Tickets in Redis that end behind their holder's back: the holder hears of it, and tokens still grow."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from event_log import CLOCK, Log
from patience import until
from redis_stage import connections, key, nothing_left
from stays import Stay, eventually, opened, staying

from fencing_sdk import BackendRefusedError, BackendUnavailableError, LockClient, LossReason
from fencing_sdk.events import Lost, Renewed

pytest_plugins = ["redis_fixtures"]


# Somebody else changes a line behind its holder's back: the holder is told, and tokens still grow.


FAR = {"ttl": 600.0, "heartbeat_interval": 150.0}
"""A lease whose next heartbeat is minutes away: what is noticed was pushed."""

BEATING = {"ttl": 6.0, "heartbeat_interval": 0.3}

SOON = 60.0
"""Seconds in which a push has surely come; a small part of `FAR`."""


async def kill_connections(server) -> None:
    for connection in await connections(server):
        await server.command("CLIENT", "KILL", "ID", connection["id"])


async def renewed(stay: Stay) -> bool:
    """Renew by hand; the first renewal may be what learns that the connection is broken."""
    try:
        await stay.lease.renew()
    except BackendUnavailableError:
        return False
    return True


async def followed(server, count: int) -> bool:
    """Whether client tracking follows so many keys."""
    return f"tracking_total_keys:{count}" in (await server.command("INFO", "stats")).splitlines()


@pytest.mark.every_loop
async def test_a_deleted_lease_ends_the_body_by_push(redis_server):
    async with opened(redis_server.url) as (locks, _):
        async with staying(locks.lock("a", **FAR)) as stay:
            await redis_server.command("DEL", key("a"))
            await stay.over(SOON)
            assert stay.lost is LossReason.REFUSED
        async with staying(locks.lock("a", **FAR)) as following:
            assert following.token > stay.token
            await following.end()
    await nothing_left(redis_server)


@pytest.mark.parametrize("tokens", ["hybrid", "counter"])
async def test_everybody_is_told_of_a_flush_and_hybrid_tokens_grow_through_it(redis_server, tokens):
    async with opened(redis_server.url, tokens=tokens) as (locks, _):
        stays = [Stay(locks.lock(f"n{number}", **FAR)) for number in range(300)]
        for stay in stays:
            await stay.begun()
        await redis_server.command("FLUSHALL")
        for stay in stays:
            await stay.over(SOON)
            assert stay.lost is LossReason.REFUSED
        async with staying(locks.lock("n7", **FAR)) as following:
            assert (following.token > stays[7].token) is (tokens == "hybrid")
            await following.end()
    await nothing_left(redis_server)


async def test_an_intruder_who_takes_the_lease_over_is_left_alone(redis_server, answers_may_be_late):
    async with opened(redis_server.url) as (locks, _):
        async with staying(locks.lock("a", **FAR)) as stay:
            await eventually(lambda: followed(redis_server, 1), what="the line is followed")
            for reply in redis_server.ask_all(["DEL", key("a")], ["SET", key("a"), "mine"]):
                assert reply in {1, "OK"}
            await stay.over(SOON)
            assert stay.lost is LossReason.TAKEN_OVER
        assert await redis_server.command("GET", key("a")) == "mine"
        with pytest.raises(BackendRefusedError):
            await locks.lock("a", wait=0).acquire()
        await redis_server.command("DEL", key("a"))
        async with locks.lock("a") as lease:
            assert lease.token > stay.token
    await nothing_left(redis_server)


async def test_a_key_of_another_type_under_one_lease_costs_no_other_lease(redis_server):
    async with opened(redis_server.url) as (locks, log):
        async with staying(locks.lock("a", **BEATING)) as stay, staying(locks.lock("b", **BEATING)) as other:
            await log.seen(Renewed, 2)
            redis_server.ask_all(["MULTI"], ["DEL", key("a")], ["RPUSH", key("a"), "mine"], ["EXEC"])
            await stay.over(SOON)
            assert stay.lost is LossReason.TAKEN_OVER
            renewed = len(log.of(Renewed))
            await log.seen(Renewed, renewed + 3)
            assert other.lease.held
            await other.end()
        assert await redis_server.command("LRANGE", key("a"), 0, -1) == ["mine"]
        await redis_server.command("DEL", key("a"))
    await nothing_left(redis_server)


@pytest.mark.every_loop
async def test_a_loss_is_pushed_after_renewals_too(redis_server):
    """A renewal writes the lease, and a write ends the tracking of a key."""
    async with opened(redis_server.url) as (locks, _), staying(locks.lock("a", **FAR)) as stay:
        for _ in range(3):
            await stay.lease.renew()
        await redis_server.command("DEL", key("a"))
        await stay.over(SOON)
        assert stay.lost is LossReason.REFUSED
    await nothing_left(redis_server)


async def test_a_loss_is_pushed_after_a_retried_acquisition_too(redis_server, proxy):
    async with opened(proxy.url) as (locks, _):
        async with locks.lock("a", **FAR):
            pass
        lost = proxy.lose_replies(of=key("a"))
        async with staying(locks.lock("a", **FAR)) as stay:
            assert lost.done()
            await redis_server.command("DEL", key("a"))
            await stay.over(SOON)
            assert stay.lost is LossReason.REFUSED
    await nothing_left(redis_server)


@pytest.mark.parametrize("fault", ["cut", "kill"])
async def test_a_loss_is_pushed_again_after_the_next_renewal_on_a_new_connection(fault, redis_server, proxy):
    async with opened(proxy.url) as (locks, _), staying(locks.lock("a", **FAR)) as stay:
        if fault == "cut":
            proxy.cut()
        else:
            await kill_connections(redis_server)
        await until(lambda: proxy.connections == 0)
        await eventually(lambda: renewed(stay), what="renewed on a new connection")
        await redis_server.command("DEL", key("a"))
        await stay.over(SOON)
        assert stay.lost is LossReason.REFUSED
    await nothing_left(redis_server)


async def test_without_permission_to_track_the_heartbeat_notices(start_redis, monkeypatch):
    # When a connection opens, all leases are looked at, which is not the heartbeat: keep the first one.
    monkeypatch.setattr("fencing_sdk.backends.redis.connection.node.SILENCE", 60.0)
    server = start_redis(user=["app on >secret ~* &* +@all -client"])
    url = server.url.replace("://", "://app:secret@")
    async with opened(url) as (locks, log), staying(locks.lock("a", **BEATING)) as stay:
        await log.seen(Renewed, 2)
        await server.command("DEL", key("a"))
        await stay.over()
        assert stay.lost is LossReason.REFUSED
    await nothing_left(server)


async def test_a_body_is_cancelled_once_although_push_and_heartbeat_tell_of_the_same_loss(redis_server):
    async with opened(redis_server.url) as (locks, log):
        for _ in range(10):
            async with staying(locks.lock("a", **BEATING | {"heartbeat_interval": 0.1})) as stay:
                await log.seen(Renewed)
                await redis_server.command("DEL", key("a"))
                await stay.over()
                assert stay.lost == LossReason.REFUSED
                assert stay.task.cancelling() == 0
        assert len(log.of(Lost)) == 10
    await nothing_left(redis_server)


async def test_a_released_lock_deleted_by_others_is_nobodys_loss(redis_server):
    async with opened(redis_server.url) as (locks, log), opened(redis_server.url) as (others, _):
        lease = await locks.lock("a", **FAR).acquire()
        await lease.release()
        for _ in range(3):
            async with others.lock("a", **FAR):
                pass
        await redis_server.command("FLUSHALL")
        async with locks.lock("b", **FAR):
            pass
        assert isinstance(log, Log)
        assert log.of(Lost) == []
    await nothing_left(redis_server)


async def test_a_loss_while_the_connection_was_away_is_noticed_when_it_is_back(redis_server, proxy):
    """Nobody told us, so we look; the next heartbeat is minutes away."""
    async with opened(proxy.url) as (locks, _):
        async with staying(locks.lock("a", **FAR)) as stay:
            proxy.refuse()
            proxy.cut()
            await redis_server.command("DEL", key("a"))
            proxy.heal()
            await eventually(lambda: _any_call(locks), what="the connection is back")
            await stay.over(SOON)
            assert stay.lost is LossReason.REFUSED
    await nothing_left(redis_server)


async def _any_call(locks) -> bool:
    try:
        await locks.inspect("b")
    except BackendUnavailableError:
        return False
    return True


async def test_the_server_remembers_nothing_of_locks_that_are_not_held(redis_server):
    """Not even in the table of client tracking, which INFO counts and no key shows."""
    async with opened(redis_server.url) as (locks, _):
        for number in range(300):
            async with locks.lock(f"n{number}", ttl=30):
                pass
        held = await locks.lock("held", ttl=30).acquire()
        await eventually(lambda: followed(redis_server, 1), what="the line of a lock that is held is followed")
        await held.release()
        assert await followed(redis_server, 0)


# Names that several hold.


NAME = "a"


def shares_of(locks: LockClient, kind: str, **options):
    return locks.rwlock(NAME, **options).reader if kind == "reader" else locks.semaphore(NAME, permits=4, **options)


async def scripts_run(server) -> int:
    stats = str(await server.command("INFO", "commandstats"))
    lines = [line for line in stats.splitlines() if line.startswith(("cmdstat_evalsha:", "cmdstat_eval:"))]
    return sum(int(line.partition("calls=")[2].partition(",")[0]) for line in lines)


@pytest.mark.parametrize("kind", ["reader", "permit"])
@pytest.mark.parametrize("holders", [1, 3])
async def test_every_holder_hears_that_a_shared_name_was_deleted(redis_server, kind, holders):
    async with contextlib.AsyncExitStack() as clients:
        stays = []
        for _ in range(holders):
            locks, _ = await clients.enter_async_context(opened(redis_server.url))
            stays.append(Stay(shares_of(locks, kind, **FAR)))
            await stays[-1].begun()
        await redis_server.command("DEL", key(NAME))
        for stay in stays:
            await stay.over(SOON)
            assert stay.lost is LossReason.REFUSED


@pytest.mark.parametrize("kind", ["reader", "permit"])
async def test_a_share_is_still_followed_after_its_client_has_released_another(redis_server, kind):
    async with opened(redis_server.url) as (locks, _):
        share = shares_of(locks, kind, **FAR)
        async with staying(share) as stay:
            async with staying(share) as other:
                await other.end()
            await redis_server.command("DEL", key(NAME))
            await stay.over(SOON)
            assert stay.lost is LossReason.REFUSED


async def test_however_often_a_shared_name_changes_a_client_looks_once_a_second(redis_server):
    changes = 40
    async with opened(redis_server.url) as (locks, _), opened(redis_server.url) as (others, _):
        async with staying(shares_of(locks, "permit", **FAR)) as stay:
            await stay.lease.renew()
            before, began = await scripts_run(redis_server), CLOCK.now()
            for _ in range(changes):
                async with shares_of(others, "permit", **FAR):
                    await asyncio.sleep(0.01)
            looks = await scripts_run(redis_server) - before - 2 * changes
            assert 1 <= looks <= 2 + CLOCK.now() - began
            await stay.end()
