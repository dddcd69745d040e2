"""Many wait for one lock in PostgreSQL, bells are lost and sessions end: all are served, one by one."""

from __future__ import annotations

import asyncio

import pytest
from patience import until
from postgresql_stage import nothing_left, terminate, waiting
from stays import PATIENCE, Stay, opened, staying, use_in_turn

from fencing_sdk.backends.postgresql import schema

pytest_plugins = ["postgresql_fixtures"]

FAR = {"ttl": 3600.0, "heartbeat_interval": 900.0}


@pytest.fixture
def bells_alone(monkeypatch):
    """No waiter is kept for minutes, so that a bell alone wakes it; and none dies because of that."""
    monkeypatch.setattr("fencing_sdk._engine.ticket.WAITER_TTL", 3600.0)
    monkeypatch.setattr("fencing_sdk.backends.postgresql.listener.ECHO_PATIENCE", PATIENCE)
    assert schema._TEXT.count("5000000") == 3
    monkeypatch.setattr(schema, "_TEXT", schema._TEXT.replace("5000000", "3600000000"))


async def test_a_waiter_that_missed_a_message_tries_when_its_client_listens_again(
    postgresql_server, postgresql_proxy, bells_alone
):
    server, proxy = postgresql_server, postgresql_proxy
    async with opened(proxy.url) as (locks, _), opened(server.url) as (others, _):
        async with staying(others.lock("a", **FAR)) as stay:
            waiter = Stay(locks.lock("a", **FAR), work=0)
            await waiting(server, 1)
            await until(lambda: locks._backend._listener.listening)
            await locks.inspect("other")  # now the try that was made while listening is answered
            proxy.refuse()
            proxy.cut()
            await until(lambda: not locks._backend._listener.listening)
            await stay.end()
        proxy.heal()
        await waiter.over()
        assert waiter.error is None
    await nothing_left(server)


async def test_a_head_that_leaves_while_it_is_its_turn_wakes_the_next(postgresql_server, postgresql_proxy, bells_alone):
    server, proxy = postgresql_server, postgresql_proxy
    async with opened(proxy.url) as (locks, _), opened(server.url) as (others, _):
        async with staying(others.lock("a", **FAR)) as stay:
            first = Stay(locks.lock("a", **FAR))
            await waiting(server, 1)
            await first.abandon()
            await waiting(server, 0)  # now the statement to leave is prepared
            head = Stay(locks.lock("a", **FAR))
            await waiting(server, 1)
            following = Stay(others.lock("a", **FAR), work=0)
            await waiting(server, 2)
            await until(lambda: locks._backend._listener.listening and others._backend._listener.listening)
            await locks.inspect("other")  # now the tries that were made while listening are answered
            await others.inspect("other")
            proxy.half_open()  # the head is not reached by the message, but can say that it leaves
            await stay.end()
            await head.abandon()
            await following.over()
            assert following.error is None
        proxy.heal()
    await nothing_left(server)


async def test_grants_never_overlap_while_sessions_are_terminated_all_the_time(postgresql_server):
    server = postgresql_server
    async with opened(server.url) as (one, _), opened(server.url) as (two, _), opened(server.url) as (three, _):
        using = asyncio.create_task(use_in_turn([one, two, three], tasks=4, times=3))
        pause = 0.4
        while not using.done():
            await terminate(server)
            await asyncio.wait([using], timeout=pause)
            pause *= 1.1  # a slow machine gets somewhere, too
        await using
    await nothing_left(server)
