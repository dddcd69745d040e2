"""Transactions of others beside the locks, and the settings of a role: leases go on, and every wait is bounded."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from event_log import CLOCK
from patience import until
from postgresql_stage import NEEDED, idle_in_transaction, nothing_left, role, waiting
from stays import (
    LEAVING,
    LONG,
    PATIENCE,
    SHORT,
    Stay,
    answered,
    opened,
    renewed_or_over,
    staying,
    use_in_turn,
)

from fencing_sdk import AcquireTimeoutError, BackendUnavailableError, LeaseLostError
from fencing_sdk.events import Lost, Renewed

pytest_plugins = ["postgresql_fixtures"]


LINE = "SELECT 1 FROM fencing.fencing_line WHERE name = 'a' FOR UPDATE"
ROW = "SELECT 1 FROM fencing.fencing_ticket WHERE name = 'a' FOR UPDATE"
SHARED = "SELECT 1 FROM fencing.fencing_ticket WHERE name = 'a' FOR SHARE"
TABLE = "LOCK TABLE fencing.fencing_ticket IN ACCESS EXCLUSIVE MODE"


def renewals(log, name: str) -> int:
    return sum(event.name == name for event in log.of(Renewed))


@pytest.mark.parametrize("statement", [ROW, SHARED], ids=["for update", "for share"])
async def test_a_row_that_a_transaction_keeps_locked_delays_no_other_lease(statement, postgresql_server):
    async with opened(postgresql_server.url) as (locks, log):
        async with contextlib.AsyncExitStack() as stack:
            terms = {"a": SHORT, "b": LONG, "c": LONG}
            stays = {name: await stack.enter_async_context(staying(locks.lock(name, **terms[name]))) for name in terms}
            await until(lambda: all(renewals(log, name) for name in "bc"))
            await until(lambda: renewals(log, "a") or stays["a"].task.done())
            async with idle_in_transaction(postgresql_server, statement):
                before = {name: renewals(log, name) for name in "bc"}
                await stays["a"].over()
                assert stays["a"].lost is not None
                assert stays["a"].left_at - stays["a"].body_ended_at < LEAVING
                await until(lambda: all(renewals(log, name) >= before[name] + 5 for name in "bc"))
                async with locks.lock("d", ttl=10, wait=PATIENCE):
                    pass
            await stays["b"].end()
            await stays["c"].end()
        assert [event.name for event in log.of(Lost)] == ["a"]
        async with locks.lock("a", ttl=10, wait=PATIENCE) as lease:
            assert lease.token > stays["a"].token
    await nothing_left(postgresql_server)


async def test_a_row_that_is_locked_for_a_moment_again_and_again_costs_no_lease(postgresql_server):
    async with opened(postgresql_server.url) as (locks, log), staying(locks.lock("a", **LONG)) as stay:
        for _ in range(5):
            async with idle_in_transaction(postgresql_server, ROW):
                await asyncio.sleep(0.4)
        renewed = len(log.of(Renewed))
        await log.seen(Renewed, renewed + 1)
        await stay.end()
    assert log.of(Lost) == []
    await nothing_left(postgresql_server)


async def test_acquiring_a_lock_whose_row_is_locked_is_bounded_and_delays_no_other_call(postgresql_server):
    async with opened(postgresql_server.url) as (locks, _), locks.lock("a", ttl=10):
        pass
    async with opened(postgresql_server.url) as (locks, log), staying(locks.lock("b", **LONG)) as stay:
        async with idle_in_transaction(postgresql_server, LINE):
            begun = CLOCK.now()
            trying = [asyncio.create_task(locks.lock("a", ttl=10, wait=1.5).acquire()) for _ in range(5)]
            for number in range(5):
                async with locks.lock(f"other {number}", ttl=10, wait=PATIENCE):
                    pass
            for attempt in trying:
                with pytest.raises((AcquireTimeoutError, BackendUnavailableError)):
                    await attempt
            assert CLOCK.now() - begun < 1.5 + LEAVING
            with pytest.raises((AcquireTimeoutError, BackendUnavailableError)):
                await locks.lock("a", ttl=10, wait=0).acquire()
        async with locks.lock("a", ttl=10, wait=PATIENCE):
            pass
        await stay.end()
        assert log.of(Lost) == []
    await nothing_left(postgresql_server)


async def test_a_locked_table_ends_the_body_in_time_and_then_all_goes_on(postgresql_server):
    async with opened(postgresql_server.url) as (locks, log), staying(locks.lock("a", **SHORT)) as stay:
        await renewed_or_over(log, stay)
        async with idle_in_transaction(postgresql_server, TABLE):
            await stay.over()
            assert isinstance(stay.error, LeaseLostError)
            assert stay.left_at - stay.body_ended_at < LEAVING
            with pytest.raises((AcquireTimeoutError, BackendUnavailableError)):
                await locks.lock("b", ttl=10, wait=0.5).acquire()
        async with locks.lock("a", ttl=10, wait=PATIENCE) as lease:
            assert lease.token > stay.token
    await nothing_left(postgresql_server)


# Settings of the role.

HINDERING = {
    "serializable": "default_transaction_isolation = 'serializable'",
    "repeatable read": "default_transaction_isolation = 'repeatable read'",
    "no patience for locks": "lock_timeout = '20ms'",
    "forgetful": "synchronous_commit = off",
    "no plans": "plan_cache_mode = force_custom_plan",
    "odd output": "intervalstyle = sql_standard; ALTER ROLE app SET datestyle = 'German'; "
    "ALTER ROLE app SET timezone = 'Asia/Kolkata'; ALTER ROLE app SET extra_float_digits = -10; "
    "ALTER ROLE app SET bytea_output = 'escape'; ALTER ROLE app SET standard_conforming_strings = off",
}


@pytest.mark.parametrize("setting", HINDERING.values(), ids=HINDERING.keys())
async def test_locks_work_whatever_the_role_prefers(setting, postgresql_server):
    url = await role(postgresql_server, setting)
    async with contextlib.AsyncExitStack() as stack:
        clients = [(await stack.enter_async_context(opened(url)))[0] for _ in range(3)]
        await use_in_turn(clients, tasks=4, times=3)
        async with staying(clients[0].lock("b", **LONG)) as stay:
            waiter = Stay(clients[1].lock("b", ttl=10, wait=PATIENCE))
            await waiting(postgresql_server, 1, "b")
            await asyncio.sleep(1)
            holder = await answered(lambda: clients[2].inspect("b"))
            assert holder.token == stay.token
            assert 0 < holder.remaining <= LONG["ttl"]
            await stay.end()
            await waiter.begun()
            await waiter.end()
    await nothing_left(postgresql_server)


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
async def test_a_release_sees_who_joins_at_the_same_moment(isolation, postgresql_server):
    """With a snapshot from before it had the row, it would see an empty line and wake no waiter."""
    server = postgresql_server
    url = await role(server, f"default_transaction_isolation = '{isolation}'")
    async with opened(url) as (locks, _), opened(url) as (others, _):
        for _ in range(3):
            async with staying(locks.lock("a", ttl=60, wait=PATIENCE)) as stay:
                async with idle_in_transaction(server, LINE):
                    waiter = Stay(others.lock("a", ttl=60), work=0)
                    await blocked(server, 1)
                    ending = asyncio.create_task(stay.end())
                    await blocked(server, 2)
                await ending
                await waiter.over()
                assert waiter.error is None
    await nothing_left(server)


async def blocked(server, number: int) -> None:
    """Wait until so many calls wait for the row, for less time than they do."""
    stop = CLOCK.now() + 0.15
    statement = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'app' AND wait_event_type = 'Lock'"
    while CLOCK.now() < stop and await server.value(statement) < number:
        pass


async def test_a_statement_timeout_of_the_role_costs_a_try_and_no_more(postgresql_server):
    url = await role(postgresql_server, "statement_timeout = '150ms'")
    async with opened(postgresql_server.url) as (locks, _), locks.lock("a"):
        pass
    await postgresql_server.execute(NEEDED)
    async with opened(url, open_wait=PATIENCE) as (locks, log), staying(locks.lock("b", **LONG)) as stay:
        async with idle_in_transaction(postgresql_server, LINE):
            trying = Stay(locks.lock("a", ttl=10, wait=PATIENCE))
            renewed = len(log.of(Renewed))
            await log.seen(Renewed, renewed + 4)
            assert not trying.task.done()
        await trying.begun()
        await trying.end()
        await stay.end()
    assert log.of(Lost) == []
    await nothing_left(postgresql_server)


async def test_sessions_that_the_server_ends_when_they_are_idle_cost_nothing(postgresql_server):
    url = await role(postgresql_server, "idle_session_timeout = '200ms'")
    async with opened(url, open_wait=PATIENCE) as (locks, log), opened(url, open_wait=PATIENCE) as (others, _):
        async with staying(locks.lock("a", **LONG | {"heartbeat_interval": 0.5})) as stay:
            waiters = [Stay(others.lock("a", ttl=10, wait=PATIENCE), work=0.5) for _ in range(3)]
            await waiting(postgresql_server, 3)
            renewed = len(log.of(Renewed))
            await log.seen(Renewed, renewed + 3)
            await stay.end()
            for waiter in waiters:
                await waiter.over()
                assert waiter.error is None
    assert log.of(Lost) == []
    await nothing_left(postgresql_server)


# Clocks.


@pytest.mark.parametrize("days", [-1, 1])
async def test_the_clients_wall_clock_is_not_read(days, postgresql_server, monkeypatch):
    import time

    day = 86_400
    shifted, shifted_ns = time.time() + days * day, time.time_ns() + days * day * 10**9
    async with opened(postgresql_server.url) as (others, _), opened(postgresql_server.url) as (locks, log):
        async with others.lock("a") as lease:
            first = lease.token
        monkeypatch.setattr("time.time", lambda: shifted)
        monkeypatch.setattr("time.time_ns", lambda: shifted_ns)
        async with staying(locks.lock("a", **LONG)) as stay:
            monkeypatch.undo()
            micros = await postgresql_server.value("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::int8")
            assert first < stay.token <= micros
            await log.seen(Renewed, 2)
            remaining = (await answered(lambda: others.inspect("a"))).remaining
            assert 0 < remaining <= LONG["ttl"]
            assert await answered(others.lock("a").try_acquire) is None
            await stay.end()
        async with others.lock("a", wait=PATIENCE) as lease:
            assert lease.token > stay.token
    await nothing_left(postgresql_server)


async def test_tokens_grow_although_the_clock_of_the_server_is_behind_the_last_one(postgresql_server):
    """As after a failover to a machine whose clock is wrong, or a step back."""
    async with opened(postgresql_server.url) as (locks, _):
        async with locks.lock("a") as lease:
            ahead = lease.token + 86_400 * 10**6
        await postgresql_server.execute(f"UPDATE fencing.fencing_line SET last = {ahead}")
        for expected in (ahead + 1, ahead + 2):
            async with locks.lock("a", wait=PATIENCE) as lease:
                assert lease.token == expected
    await nothing_left(postgresql_server)
