"""What only Redis shows when it fails under a holder: lost replies to a script, crashes with and without memory."""

import asyncio

import pytest
from patience import until
from redis_server import version_of
from redis_stage import connections, key, keys, milliseconds_left, nothing_left
from stays import LONG, PATIENCE, Stay, eventually, opened, staying

from fencing_sdk import (
    BackendUnavailableError,
    LossReason,
    Lost,
    RenewalFailed,
    Renewed,
)
from fencing_sdk.backends.redis import scripts

pytest_plugins = ["redis_fixtures"]

# A reply is lost after the server did what was asked.


async def test_a_retry_after_a_lost_reply_finds_its_own_grant(redis_server, proxy):
    async with opened(proxy.url) as (locks, _):
        lost = proxy.lose_replies(of=scripts.ACQUIRE.text)  # a server without scripts is sent the text
        async with staying(locks.lock("a", ttl=30, wait=PATIENCE)) as stay:
            assert lost.done()
            assert int(await redis_server.command("GET", key("a", "t"))) == stay.token
            await stay.end()
        lost = proxy.lose_replies(of=scripts.ACQUIRE.sha)
        async with staying(locks.lock("a", ttl=30, wait=PATIENCE)) as again:
            assert lost.done()
            assert int(await redis_server.command("GET", key("a", "t"))) == again.token > stay.token
            assert len(await connections(redis_server)) == 1
            await again.end()
    await nothing_left(redis_server)


async def test_a_lost_reply_to_a_renewal_is_ridden_out(redis_server, proxy):
    async with opened(proxy.url) as (locks, log), staying(locks.lock("a", **LONG)) as stay:
        await log.seen(Renewed)
        lost = proxy.lose_replies(2, of=scripts.RENEW.sha)
        async with asyncio.timeout(PATIENCE):
            await lost
        renewed = len(log.of(Renewed))
        await log.seen(Renewed, renewed + 1)
        await stay.end()
    assert log.of(Lost) == []
    await nothing_left(redis_server)


@pytest.mark.parametrize("fault", ["lose_replies", "lose_requests"])
async def test_a_release_without_an_answer_is_repeated_and_touches_nobody_else(fault, redis_server, proxy):
    async with opened(proxy.url) as (locks, _), opened(redis_server.url) as (others, _):
        async with locks.lock("a", ttl=30):  # so that the server knows the scripts
            pass
        async with staying(locks.lock("a", ttl=30)) as stay:
            waiting = Stay(others.lock("a", ttl=30, wait=PATIENCE))
            await eventually(lambda: redis_server.command("EXISTS", key("a", "q")), what="somebody waits")
            lost = getattr(proxy, fault)(of=scripts.RELEASE.sha)
            await stay.end()
            async with asyncio.timeout(PATIENCE):
                await lost
        await waiting.begun()
        assert waiting.lease.held
        assert waiting.token > stay.token
        assert await milliseconds_left(redis_server, "a") > 0
        await waiting.end()
    await nothing_left(redis_server)


@pytest.mark.parametrize("fault", ["lose_replies", "lose_requests"])
async def test_a_lost_answer_to_joining_the_line_costs_a_moment(fault, redis_server, proxy):
    async with opened(proxy.url) as (locks, _), opened(redis_server.url) as (others, _):
        async with staying(others.lock("a", ttl=30)) as stay:
            lost = getattr(proxy, fault)(of=scripts.STAND.sha)
            waiting = Stay(locks.lock("a", ttl=30, wait=PATIENCE))
            async with asyncio.timeout(PATIENCE):
                await lost
            await eventually(lambda: redis_server.command("EXISTS", key("a", "q")), what="it waits in line")
            await stay.end()
        await waiting.begun()
        await waiting.end()
        assert len(await connections(redis_server)) == 2
    await nothing_left(redis_server)


@pytest.mark.parametrize("fault", ["lose_replies", "lose_requests"])
async def test_a_waiter_that_leaves_while_the_connection_breaks_is_gone_for_good(fault, redis_server, proxy):
    async with opened(proxy.url) as (locks, _), opened(redis_server.url) as (others, _):
        async with staying(others.lock("a", ttl=30)) as stay:
            lost = getattr(proxy, fault)(of=scripts.RELEASE.sha)
            waiting = Stay(locks.lock("a", ttl=30))
            await eventually(lambda: redis_server.command("EXISTS", key("a", "q")), what="it waits in line")
            await waiting.abandon()
            async with asyncio.timeout(PATIENCE):
                await lost
            await eventually(lambda: _absent(redis_server, "q"), what="the line is empty")
            await asyncio.sleep(1.5)  # longer than a waiter pauses before it stands in line again
            assert await keys(redis_server) == {key("a")}
            await stay.end()
    await nothing_left(redis_server)


async def _absent(server, part) -> bool:
    return not await server.command("EXISTS", key("a", part))


# The server dies.


async def test_a_lease_and_its_line_live_through_a_crash_of_a_durable_server(start_redis):
    server = start_redis(appendonly=True, appendfsync="always")
    async with opened(server.url) as (locks, log), opened(server.url) as (others, _):
        async with staying(locks.lock("a", ttl=10)) as stay:
            waiting = Stay(others.lock("a", ttl=10, wait=PATIENCE))
            await eventually(lambda: server.command("EXISTS", key("a", "q")), what="somebody waits")
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            assert await server.command("EXISTS", key("a", "q"))
            renewed = len(log.of(Renewed))
            await log.seen(Renewed, renewed + 1)
            assert not waiting.entered.is_set()
            await stay.end()
        await waiting.begun()
        assert waiting.token > stay.token
        assert len(await connections(server)) == 2
        await waiting.end()
    assert log.of(Lost) == []
    await nothing_left(server)


async def test_a_server_that_forgets_everything_in_a_crash_grants_a_higher_token(start_redis):
    server = start_redis()
    async with opened(server.url) as (locks, _), opened(server.url) as (others, _):
        async with staying(locks.lock("a", **LONG)) as stay:
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            async with staying(others.lock("a", wait=PATIENCE)) as following:
                assert following.token > stay.token
                await stay.over()
                assert stay.lost in {LossReason.TAKEN_OVER, LossReason.REFUSED, LossReason.REVOKED}
                await following.end()
    await nothing_left(server)


async def test_plain_counters_begin_again_when_the_server_forgets_which_the_docs_say(start_redis, pytestconfig):
    server = start_redis()
    async with opened(server.url, tokens="counter") as (locks, _):
        for expected in (1, 2):
            async with locks.lock("a") as lease:
                assert lease.token == expected
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        async with locks.lock("a", wait=PATIENCE) as lease:
            assert lease.token == 1
    page = (pytestconfig.rootpath / "docs/backends/redis.md").read_text()
    assert "start again at 1" in page
    await nothing_left(server)


async def test_a_server_that_loads_its_data_is_waited_for(start_redis, redis_binary):
    if version_of(redis_binary) < (7,):
        pytest.skip("before Redis 7 a small file is loaded without a look at the network")
    server = start_redis(key_load_delay=2000, loading_process_events_interval_bytes=1024)
    async with opened(server.url) as (locks, log), staying(locks.lock("a", **LONG | {"ttl": 20})) as stay:
        await log.seen(Renewed)
        await server.command("EVAL", "for i = 1, 3000 do redis.call('SET', 'filler:' .. i, i) end", 0)
        await server.command("SAVE")
        await asyncio.to_thread(server.kill)
        starting = asyncio.create_task(asyncio.to_thread(server.start))
        await until(lambda: any("loading" in event.error for event in log.of(RenewalFailed)))
        await server.command("CONFIG", "SET", "key-load-delay", 0)
        await starting
        renewed = len(log.of(Renewed))
        await log.seen(Renewed, renewed + 1)
        await stay.end()
        await server.command("EVAL", "for i = 1, 3000 do redis.call('DEL', 'filler:' .. i) end", 0)
    assert log.of(Lost) == []
    await nothing_left(server)


async def test_a_server_that_is_down_when_the_client_opens_is_told_at_once(start_redis):
    server = start_redis()
    server.kill()
    with pytest.raises(BackendUnavailableError):
        async with opened(server.url):
            pytest.fail("it opened")
    server.start()
    async with opened(server.url) as (locks, _), locks.lock("a"):
        pass
    await nothing_left(server)
