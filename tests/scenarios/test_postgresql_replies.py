"""The server did what was asked and the reply is lost, or the request is: to a client it looks the same."""

import asyncio
import contextlib
import random

import pytest
from postgresql_stage import LEFT, line, nothing_left, waiting
from stays import LONG, PATIENCE, Stay, eventually, opened, staying

from fencing_sdk import AcquireTimeoutError, BackendUnavailableError, LeaseLostError, Lost, Renewed

pytest_plugins = ["postgresql_fixtures"]

BOTH = pytest.mark.parametrize("fault", ["lose_replies", "lose_requests"])
TOKEN = "SELECT token FROM fencing.fencing_lock WHERE name = 'a'"


async def test_a_retry_after_a_lost_reply_finds_its_own_grant(postgresql_server, postgresql_proxy):
    async with opened(postgresql_proxy.url) as (locks, _):
        async with locks.lock("other", ttl=30):
            pass
        for _ in range(2):
            lost = postgresql_proxy.lose_replies(of="fencing_acquire")
            async with staying(locks.lock("a", ttl=30, wait=PATIENCE)) as stay:
                assert lost.done()
                assert await postgresql_server.value(TOKEN) == stay.token
                await stay.end()
        assert postgresql_proxy.connections == 1
    await nothing_left(postgresql_server)


async def test_a_lost_reply_to_a_renewal_is_ridden_out(postgresql_server, postgresql_proxy):
    async with opened(postgresql_proxy.url) as (locks, log), staying(locks.lock("a", **LONG | {"ttl": 4.0})) as stay:
        await log.seen(Renewed)
        lost = postgresql_proxy.lose_replies(2, of="fencing_renew")
        async with asyncio.timeout(PATIENCE):
            await lost
        renewed = len(log.of(Renewed))
        await log.seen(Renewed, renewed + 1)
        await stay.end()
    assert log.of(Lost) == []
    await nothing_left(postgresql_server)


@BOTH
async def test_a_release_without_an_answer_is_repeated_and_touches_no_other_lease(
    fault, postgresql_server, postgresql_proxy
):
    async with opened(postgresql_proxy.url) as (locks, _), opened(postgresql_server.url) as (others, _):
        async with staying(locks.lock("a", ttl=30)) as stay:
            waiter = Stay(others.lock("a", ttl=30, wait=PATIENCE))
            await waiting(postgresql_server, 1)
            lost = getattr(postgresql_proxy, fault)(of="fencing_release")
            await stay.end()
            async with asyncio.timeout(PATIENCE):
                await lost
        await waiter.begun()
        assert waiter.lease.held
        assert waiter.token > stay.token
        assert await postgresql_server.value(LEFT, "a") > 0
        await waiter.end()
    await nothing_left(postgresql_server)


@BOTH
async def test_a_lost_answer_to_joining_the_line_costs_a_moment(fault, postgresql_server, postgresql_proxy):
    async with opened(postgresql_proxy.url) as (locks, _), opened(postgresql_server.url) as (others, _):
        async with staying(others.lock("a", ttl=30)) as stay:
            lost = getattr(postgresql_proxy, fault)(of="fencing_join")
            waiter = Stay(locks.lock("a", ttl=30, wait=PATIENCE))
            async with asyncio.timeout(PATIENCE):
                await lost
            await waiting(postgresql_server, 1)
            await stay.end()
        await waiter.begun()
        await waiter.end()
    await nothing_left(postgresql_server)


@BOTH
async def test_a_waiter_that_leaves_while_the_connection_breaks_is_gone_for_good(
    fault, postgresql_server, postgresql_proxy
):
    async with opened(postgresql_proxy.url) as (locks, _), opened(postgresql_server.url) as (others, _):
        async with staying(others.lock("a", ttl=30)) as stay:
            lost = getattr(postgresql_proxy, fault)(of="fencing_leave")
            waiter = Stay(locks.lock("a", ttl=30))
            await waiting(postgresql_server, 1)
            await waiter.abandon()
            async with asyncio.timeout(PATIENCE):
                await lost
            begun = asyncio.get_running_loop().time()
            await eventually(lambda: _empty(postgresql_server), what="the line is empty")
            assert asyncio.get_running_loop().time() - begun < 10
            await asyncio.sleep(1.5)  # longer than a waiter pauses before it stands in line again
            assert await line(postgresql_server) == 0
            await stay.end()
    await nothing_left(postgresql_server)


async def _empty(server) -> bool:
    return await line(server) == 0


async def test_bodies_never_overlap_and_tokens_rise_whatever_the_network_does(postgresql_server, postgresql_proxy):
    """Two clients behind one bad network and one beside it, with a server that stands still now and then."""
    inside: list[int] = []
    tokens: list[int] = []
    options = {"ttl": 2.4, "safety_buffer": 1.0, "heartbeat_interval": 0.3}
    over = asyncio.Event()
    proxy = postgresql_proxy

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
        urls = (proxy.url, proxy.url, postgresql_server.url)
        clients = [(await stack.enter_async_context(opened(url)))[0] for url in urls]
        tasks = [asyncio.create_task(work(locks, number)) for number, locks in enumerate(clients * 2)]
        for fault in ("blackhole", "cut", "half_open", "pause", "refuse", "lose_replies", "pause", "blackhole"):
            on = postgresql_server if fault == "pause" else proxy
            getattr(on, fault)()
            await asyncio.wait(tasks, timeout=random.uniform(0.2, 1.2))
            postgresql_server.resume()
            proxy.heal()
            await asyncio.wait(tasks, timeout=0.2)
        over.set()
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*tasks)
        assert tokens == sorted(set(tokens))
        assert len(tokens) > 3
    await nothing_left(postgresql_server)
