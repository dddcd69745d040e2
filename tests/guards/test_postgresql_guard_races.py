"""SqlGuard on PostgreSQL with several transactions at once, at every isolation level, and held fences."""

import asyncio

import anyio
import asyncpg
import pytest
from postgresql_ways import WAYS, opened

from fencing_sdk import Token
from fencing_sdk.guards.sql import SqlGuard

pytest_plugins = ["postgresql_fixtures", "guard_database"]

OLD, NEW = Token(33, "aaaaaaaa"), Token(34, "bbbbbbbb")
COMMITTED, SNAPSHOTS = "read committed", ["repeatable read", "serializable"]


@pytest.fixture(params=WAYS)
async def way(request, server):
    async with opened(request.param, server.url) as way:
        yield way


@pytest.fixture
async def asyncpg_way(server):
    async with opened("asyncpg", server.url) as way:
        yield way


@pytest.fixture
async def looking(server):
    """A connection that looks at the others, while nothing of the loop is blocked."""
    async with server.connected() as connection:
        yield connection


async def eventually(looking, query, *parameters):
    """Wait until *query* says so."""
    for _ in range(2_000):
        if await looking.fetchval(query, *parameters):
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"never: {query}")


async def is_waiting(looking):
    """Wait until a transaction waits for the lock of another one."""
    query = "SELECT count(*) = 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    await eventually(looking, query)


async def fence(looking, resource="a"):
    return await looking.fetchval("SELECT token FROM fencing_fence WHERE resource = $1", resource)


# Two writers.


@pytest.mark.parametrize("level", SNAPSHOTS)
async def test_a_fence_that_did_not_exist_when_the_transaction_looked_stops_it_too(asyncpg_way, level, looking):
    """There is no row in its view that could be compared."""
    guard = SqlGuard(asyncpg_way.url)
    await guard.raise_to("another", NEW)
    with pytest.raises(asyncpg.SerializationError):
        async with asyncpg_way.begin(level) as transaction:
            await asyncpg_way.look(transaction, "a")
            await guard.raise_to("a", NEW)
            await guard.admit(transaction, "a", OLD)
    assert await fence(looking) == 34


async def test_resources_do_not_wait_for_each_other(asyncpg_way):
    guard = SqlGuard(asyncpg_way.url)
    await guard.raise_to("b", 1)
    async with asyncpg_way.begin() as transaction:
        await guard.admit(transaction, "a", NEW)
        with anyio.fail_after(20):
            await guard.raise_to("b", 2)
            await asyncpg_way.write(guard, "c", 3, "three")
            assert [await guard.highest(name) for name in "abc"] == [None, 2, 3]
    assert await guard.highest("a") == 34


# The guard's own transactions.


async def test_a_server_that_does_not_answer_holds_no_one_who_is_cancelled(server, asyncpg_way, looking):
    """It cannot be told that the statement is cancelled, and is not waited for."""
    guard = SqlGuard(server.url)
    await guard.raise_to("a", OLD)
    async with asyncpg_way.begin() as transaction:
        await guard.admit(transaction, "a", OLD)
        raising = asyncio.create_task(guard.raise_to("a", NEW))
        await is_waiting(looking)
        server.pause()
        try:
            raising.cancel()
            done, _ = await asyncio.wait([raising], timeout=15)
            assert done
        finally:
            server.resume()
    assert raising.cancelled()


async def test_raising_is_not_refused_for_a_change_that_was_committed_meanwhile(server, asyncpg_way, looking):
    """At every level that the engine or the role may be set to, because no caller would try again."""
    async with opened("connection", server.url) as way:
        engine = way.make_engine(isolation_level="SERIALIZABLE")
        await looking.execute("ALTER DATABASE guards SET default_transaction_isolation = 'serializable'")
        try:
            for number, guard in enumerate([SqlGuard(engine), SqlGuard(server.url)]):
                await guard.raise_to("a", 10 * number)
                async with asyncpg_way.begin("read committed") as transaction:
                    await guard.admit(transaction, "a", 10 * number + 1)
                    raising = asyncio.create_task(guard.raise_to("a", 10 * number + 2))
                    await is_waiting(looking)
                await raising
                assert await guard.highest("a") == 10 * number + 2
        finally:
            await looking.execute("ALTER DATABASE guards RESET default_transaction_isolation")
            await engine.dispose()


# In a transaction of the caller.


async def test_a_raised_fence_outlives_a_crash_whatever_the_session_is_set_to(asyncpg_way):
    """And the settings end with the transaction."""
    guard = SqlGuard()
    await asyncpg_way.write(guard, "a", 1, "old")
    setting = "SELECT current_setting('synchronous_commit'), current_setting('lock_timeout')"
    for before, during in {"off": "on", "local": "on", "on": "on", "remote_apply": "remote_apply"}.items():
        connection = await asyncpg.connect(asyncpg_way.url, server_settings={"synchronous_commit": before})
        async with connection.transaction():
            await guard.raise_in(connection, "a", NEW)
            assert tuple(await connection.fetchrow(setting)) == (during, "5s")
        assert tuple(await connection.fetchrow(setting)) == (before, "0")
        await connection.close()
