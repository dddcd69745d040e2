"""One Redis server, or the network before it, fails under a holder: no overrun, no lost token, nothing left behind."""

import asyncio
import contextlib
import random

import pytest
from event_log import CLOCK, ENDED_BY_TIME
from patience import until
from redis_server import version_of
from redis_stage import connections, key, keys, milliseconds_left, nothing_left
from stays import PATIENCE, Stay, eventually, opened, staying

from fencing_sdk import (
    AcquireTimeoutError,
    BackendUnavailableError,
    LeaseLostError,
    LossReason,
    Lost,
    NotAcquired,
    RenewalFailed,
    Renewed,
)
from fencing_sdk._lease import state_of
from fencing_sdk.backends.redis import scripts

pytest_plugins = ["redis_fixtures"]

SHORT = {"ttl": 3.0, "safety_buffer": 1.4, "heartbeat_interval": 0.4}
"""For a lease that is to be lost. The buffer is longer than an interval, and than a machine may stand still."""

LONG = {"ttl": 6.0, "safety_buffer": 0.6, "heartbeat_interval": 0.3}
"""For a lease that is to be kept."""

LEAVING = 4.0
"""Seconds in which an ``async with`` is left whatever the server does: release is given two."""


def forget(proxy):
    """Lose the state of the connections that are open, as a NAT gateway may: they never carry a byte again."""
    links = list(proxy._links)
    for link in links:
        link.up._held = link.down._held = lambda: True
    return links


# The server is silent.


@pytest.mark.every_loop
async def test_a_server_that_stops_for_less_than_the_deadline_is_ridden_out(redis_server):
    async with opened(redis_server.url) as (locks, log), staying(locks.lock("a", **LONG)) as stay:
        await log.seen(Renewed)
        renewed = len(log.of(Renewed))
        redis_server.pause()
        await log.seen(RenewalFailed, 2)
        redis_server.resume()
        await log.seen(Renewed, renewed + 2)
        assert stay.lease.held
        assert stay.lease.token == stay.token
        assert len(await connections(redis_server)) == 1
        await stay.end()
    assert log.of(Lost) == []
    await nothing_left(redis_server)


@pytest.mark.every_loop
async def test_a_server_that_stops_for_longer_ends_the_body_before_the_lease(redis_server):
    async with opened(redis_server.url) as (locks, log), staying(locks.lock("a", **SHORT)) as stay:
        await log.seen(Renewed)
        (seconds, micros), left = redis_server.ask_all(["TIME"], ["PTTL", key("a")])
        ends_at = int(seconds) * 1_000_000 + int(micros) + left * 1000
        redis_server.pause()
        await stay.over()
        redis_server.resume()
        assert stay.lost in ENDED_BY_TIME
        assert stay.body_ended_micros < ends_at
        assert stay.left_at - stay.body_ended_at < LEAVING
        async with staying(locks.lock("a", wait=PATIENCE)) as following:
            assert following.token > stay.token
            await following.end()
    await nothing_left(redis_server)


@pytest.mark.parametrize("fault", ["blackhole", "half_open"])
async def test_the_server_still_keeps_the_lease_at_the_moment_the_body_ends(fault, redis_server, proxy):
    ended: list[tuple[int, float]] = []

    async def work(locks) -> float:
        with pytest.raises(LeaseLostError):
            async with locks.lock("a", **SHORT):
                try:
                    await asyncio.Event().wait()
                finally:
                    left = redis_server.ask("PTTL", key("a"))  # blocks: this very moment is what counts
                    ended.append((left, CLOCK.now()))
        return CLOCK.now()

    async with opened(proxy.url) as (locks, log):
        task = asyncio.create_task(work(locks))
        await log.seen(Renewed, 2)
        getattr(proxy, fault)()
        async with asyncio.timeout(PATIENCE):
            left_at = await task  # while nothing is delivered
        proxy.heal()
        assert log.of(Lost)[0].reason in ENDED_BY_TIME
    ((left, ended_at),) = ended
    assert left > 0
    assert left_at - ended_at < LEAVING
    await nothing_left(redis_server)


async def test_a_connection_that_died_in_silence_is_replaced_within_the_deadline(redis_server, proxy):
    async with opened(proxy.url) as (locks, log), staying(locks.lock("a", **LONG | {"ttl": 4.0})) as stay:
        await log.seen(Renewed)
        forgotten = forget(proxy)
        renewed = len(log.of(Renewed))
        await log.seen(RenewalFailed)
        await log.seen(Renewed, renewed + 2)
        assert stay.lease.held
        assert proxy.connections == 1
        await stay.end()
        for link in forgotten:
            link.cut()
    assert log.of(Lost) == []
    await nothing_left(redis_server)


async def test_a_connection_that_dies_in_silence_while_it_is_opened_costs_no_lease(redis_server, proxy):
    options = {"ttl": 4.0, "safety_buffer": 0.5, "heartbeat_interval": 0.3}
    async with opened(proxy.url) as (locks, log), staying(locks.lock("a", **options)) as stay:
        await log.seen(Renewed)
        accepted = proxy.accepted
        proxy.blackhole()
        await until(lambda: proxy.accepted > accepted)
        forgotten = forget(proxy)
        proxy.heal()
        renewed = len(log.of(Renewed))
        await log.seen(Renewed, renewed + 2)
        await stay.end()
        for link in forgotten:
            link.cut()
    assert log.of(Lost) == []
    await nothing_left(redis_server)


async def test_a_client_that_closes_while_nothing_is_delivered_closes_all_the_same(redis_server, proxy):
    async with opened(redis_server.url) as (others, _):
        held = await others.lock("b", ttl=60).acquire()
        async with opened(proxy.url) as (locks, log):
            lease = await locks.lock("a", **LONG).acquire()
            waiting = Stay(locks.lock("b", ttl=60))
            await eventually(lambda: redis_server.command("EXISTS", key("b", "q")), what="it waits")
            await log.seen(Renewed)
            proxy.blackhole()
            begun = CLOCK.now()
        assert CLOCK.now() - begun < 15
        assert lease.lost_reason is LossReason.CLOSED
        await waiting.over()
        proxy.cut()
        proxy.heal()
        async with staying(others.lock("a", wait=PATIENCE)) as following:
            assert following.token > state_of(lease).number
            await following.end()
        await lease.release()
        await held.release()
        async with others.lock("b", wait=PATIENCE):  # its waiter could not say that it left
            pass
    await nothing_left(redis_server)


async def test_a_grant_that_comes_after_it_was_given_up_is_undone(redis_server):
    async with opened(redis_server.url) as (locks, log):
        redis_server.pause()
        with pytest.raises(BackendUnavailableError):
            await locks.lock("a", ttl=20, wait=0.2).acquire()
        await log.seen(NotAcquired)
        resumed_at = CLOCK.now()
        redis_server.resume()
        async with staying(locks.lock("a", ttl=20, wait=PATIENCE)) as stay:
            assert stay.granted_at - resumed_at < 10  # long before the ttl of the late grant
            await stay.end()
    await nothing_left(redis_server)


async def test_a_late_grant_on_a_held_back_connection_is_undone(redis_server, proxy):
    async with opened(proxy.url) as (locks, log):
        proxy.blackhole()
        with pytest.raises(BackendUnavailableError):
            await locks.lock("a", ttl=30, wait=0.2).acquire()
        await log.seen(NotAcquired)
        proxy.heal()
        async with staying(locks.lock("a", ttl=30, wait=PATIENCE)) as stay:
            await stay.end()
    await nothing_left(redis_server)


# The connection breaks.


@pytest.mark.every_loop
async def test_a_connection_cut_again_and_again_costs_nothing_and_leaves_one(redis_server, proxy):
    async with opened(proxy.url) as (locks, log), staying(locks.lock("a", **LONG)) as stay:
        for _ in range(4):
            renewed = len(log.of(Renewed))
            proxy.cut()
            await log.seen(Renewed, renewed + 1)
        assert len(await connections(redis_server)) == proxy.connections == 1
        await stay.end()
    assert log.of(Lost) == []
    await nothing_left(redis_server)


async def test_a_server_that_refuses_connections_for_a_while_costs_nothing(redis_server, proxy):
    async with opened(proxy.url) as (locks, log), staying(locks.lock("a", **LONG)) as stay:
        await log.seen(Renewed)
        proxy.refuse()
        proxy.cut()
        await log.seen(RenewalFailed, 3)
        renewed = len(log.of(Renewed))
        proxy.heal()
        await log.seen(Renewed, renewed + 2)
        assert len(await connections(redis_server)) == 1
        await stay.end()
    assert log.of(Lost) == []
    await nothing_left(redis_server)


async def test_a_server_that_refuses_connections_for_good_ends_the_body_in_time(redis_server, proxy):
    async with opened(proxy.url) as (locks, log), staying(locks.lock("a", **SHORT)) as stay:
        await log.seen(Renewed)
        proxy.refuse()
        proxy.cut()
        await stay.over()
        assert stay.lost in ENDED_BY_TIME
        assert stay.left_at - stay.body_ended_at < LEAVING
        with pytest.raises(BackendUnavailableError):
            await locks.lock("a", wait=0.1).acquire()
        proxy.heal()
        async with staying(locks.lock("a", wait=PATIENCE)) as following:
            assert following.token > stay.token
            await following.end()
    await nothing_left(redis_server)


async def test_many_tasks_share_one_connection_after_it_broke_under_all_of_them(redis_server, proxy):
    async with opened(proxy.url) as (locks, _):

        async def use(number: int) -> None:
            for _ in range(5):
                async with locks.lock(f"n{number}", ttl=60, wait=60):
                    await asyncio.sleep(0)

        tasks = [asyncio.create_task(use(number)) for number in range(100)]
        pause = 0.3
        while not all(task.done() for task in tasks):
            proxy.cut()
            await asyncio.wait(tasks, timeout=pause)
            pause *= 1.5  # a slow machine gets somewhere, too
        await asyncio.gather(*tasks)
        await use(0)  # the last cut may have come when nobody needed a connection any more
        assert len(await connections(redis_server)) == proxy.connections == 1
    await nothing_left(redis_server)


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
    async with opened(proxy.url) as (locks, log), staying(locks.lock("a", **LONG | {"ttl": 4.0})) as stay:
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
            assert lost.done()
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
            lost = getattr(proxy, fault)(of=scripts.JOIN.text)
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
            lost = getattr(proxy, fault)(of=scripts.LEAVE.sha)
            with pytest.raises(AcquireTimeoutError):
                await locks.lock("a", ttl=30, wait=2).acquire()
            async with asyncio.timeout(PATIENCE):
                await lost
            await eventually(lambda: _absent(redis_server, "q"), what="the line is empty", within=10)
            await asyncio.sleep(1.5)  # longer than a waiter pauses before it stands in line again
            assert await keys(redis_server) == {key("a")}
            await stay.end()
    await nothing_left(redis_server)


async def _absent(server, part) -> bool:
    return not await server.command("EXISTS", key("a", part))


# Everything at once.


async def test_bodies_never_overlap_and_tokens_rise_whatever_the_network_does(redis_server, proxy):
    """Two clients behind one bad network and one beside it, with a server that stands still now and then."""
    inside: list[int] = []
    tokens: list[int] = []
    options = {"ttl": 2.4, "safety_buffer": 1.0, "heartbeat_interval": 0.3}
    over = asyncio.Event()

    async def work(locks, number) -> None:
        while not over.is_set():
            with contextlib.suppress(LeaseLostError, BackendUnavailableError, AcquireTimeoutError):
                async with locks.lock("a", wait=5, **options) as lease:
                    assert inside == []
                    inside.append(number)
                    tokens.append(lease.token)
                    try:
                        await asyncio.sleep(random.uniform(0, 0.6))
                    finally:
                        assert inside.pop() == number

    async with contextlib.AsyncExitStack() as stack:
        clients = [
            (await stack.enter_async_context(opened(url)))[0] for url in (proxy.url, proxy.url, redis_server.url)
        ]
        tasks = [asyncio.create_task(work(locks, number)) for number, locks in enumerate(clients * 2)]
        for fault in ("blackhole", "cut", "half_open", "pause", "refuse", "lose_replies", "pause", "blackhole"):
            on = redis_server if fault == "pause" else proxy
            getattr(on, fault)()
            await asyncio.wait(tasks, timeout=random.uniform(0.2, 1.2))
            redis_server.resume()
            proxy.heal()
            await asyncio.wait(tasks, timeout=0.2)
        over.set()
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*tasks)
        assert tokens == sorted(set(tokens))
        assert len(tokens) > 3
    await nothing_left(redis_server)


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
