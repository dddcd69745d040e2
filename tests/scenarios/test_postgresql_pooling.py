"""Behind a real PgBouncer in transaction mode: each statement may run on another connection, and LISTEN is useless."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest
from event_log import CLOCK
from patience import until
from pgbouncer import PgBouncer
from postgresql_stage import everything_works, line, terminate, waiting
from stays import LONG, PATIENCE, Stay, opened, staying, use_in_turn

from fencing_sdk import Lost, Renewed
from fencing_sdk._values.claim import Claim, Held
from fencing_sdk.backends.postgresql import PostgresqlBackend

pytest_plugins = ["postgresql_fixtures"]

POOLED = pytest.mark.parametrize("options", [{}, {"pooled": True}], ids=["as it comes", "pooled"])


@POOLED
async def test_everything_works_through_a_pooling_proxy(options, pgbouncer):
    await everything_works(pgbouncer.url, **options)


@POOLED
async def test_clients_that_share_two_connections_enter_one_by_one(options, pgbouncer):
    async with contextlib.AsyncExitStack() as stack:
        clients = [(await stack.enter_async_context(opened(pgbouncer.url, **options)))[0] for _ in range(4)]
        await use_in_turn(clients, tasks=3, times=3)


async def test_first_use_through_a_pooling_proxy_creates_the_schema_once(pgbouncer):
    async with contextlib.AsyncExitStack() as stack:

        async def first() -> int:
            locks, _ = await stack.enter_async_context(opened(pgbouncer.url, pooled=True))
            async with locks.lock("a", wait=PATIENCE) as lease:
                return lease.token

        tokens = await asyncio.gather(*(first() for _ in range(6)))
    assert len(set(tokens)) == 6


async def test_leases_of_many_clients_are_renewed_beside_each_other(pgbouncer):
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(opened(pgbouncer.url, pooled=True)) for _ in range(4)]
        stays = [
            await stack.enter_async_context(staying(locks.lock(f"{number} {name}", **LONG)))
            for number, (locks, _) in enumerate(clients)
            for name in "abc"
        ]
        for _, log in clients:
            await log.seen(Renewed, 9)
        for stay in stays:
            await stay.end()
        assert [log.of(Lost) for _, log in clients] == [[]] * 4


async def test_waiters_poll_and_get_their_turn_in_order(pgbouncer, postgresql_server):
    async with opened(pgbouncer.url, pooled=True) as (locks, _), opened(pgbouncer.url, pooled=True) as (others, _):
        async with staying(locks.lock("a", ttl=60)) as stay:
            waiters = []
            for number in range(4):
                waiters.append(Stay(others.lock("a", ttl=60), work=0))
                await waiting(postgresql_server, number + 1)
            begun = CLOCK.now()
            await stay.end()
            for waiter in waiters:
                await waiter.over()
                assert waiter.error is None
            tokens = [waiter.token for waiter in waiters]
            assert tokens == sorted(tokens)
            assert CLOCK.now() - begun < 15
        assert await line(postgresql_server) == 0


async def test_waiters_without_notifications_try_four_times_as_often(pgbouncer, postgresql_server, monkeypatch):
    listener = "fencing_sdk.backends.postgresql.connection.listener"
    monkeypatch.setattr(f"{listener}.ECHO_PATIENCE", PATIENCE)  # on a slow machine an echo takes long
    backends = [PostgresqlBackend(url) for url in (postgresql_server.url, pgbouncer.url)]
    listening, polling = backends
    await listening.acquire(Claim("a", 60.0))
    first, second = Claim("a", 60.0), Claim("a", 60.0)
    async with listening.queue(first), polling.queue(second):
        await until(lambda: listening._waiters.listening)
        assert await listening.acquire(first) == Held(1.0)
        assert await polling.acquire(second) == Held(0.25)
    for backend in backends:
        await backend.aclose()


@asynccontextmanager
async def in_transaction(pgbouncer: PgBouncer) -> AsyncIterator[None]:
    """Keep one of the connections behind the proxy busy."""
    application = await asyncpg.connect(pgbouncer.url, statement_cache_size=0)
    try:
        async with application.transaction():
            await application.execute("SELECT 1")
            yield
    finally:
        await application.close()


async def test_what_another_client_has_prepared_behind_the_proxy_is_never_run_instead(pgbouncer, postgresql_server):
    """Before the proxy is noticed: each of its two connections knows the first statement of another client."""
    direct, one, other = (PostgresqlBackend(url) for url in (postgresql_server.url, pgbouncer.url, pgbouncer.url))
    held = Claim("a", 60.0)
    await direct.acquire(held)
    async with contextlib.AsyncExitStack() as second_is_busy:
        async with in_transaction(pgbouncer):
            await one.release(Claim("other", 60.0))  # prepared on the second connection
            await second_is_busy.enter_async_context(in_transaction(pgbouncer))
        await other._connection.ask(other._requests.leave, ("other", "stranger"))  # prepared on the first one
        assert not one._dialer.pooled, "the proxy was noticed earlier, and nothing is proved"
        await one.release(held)  # on the first one
    assert await direct.inspect("a") is None
    for backend in (one, other, direct):
        await backend.aclose()


async def test_connections_that_break_behind_the_proxy_cost_no_lease(pgbouncer, postgresql_server):
    async with opened(pgbouncer.url, pooled=True) as (locks, log), staying(locks.lock("a", **LONG)) as stay:
        for _ in range(3):
            renewed = len(log.of(Renewed))
            await terminate(postgresql_server)
            await log.seen(Renewed, renewed + 1)
        await stay.end()
    assert log.of(Lost) == []


async def test_no_state_is_left_in_the_sessions_of_others(pgbouncer, postgresql_server, monkeypatch):
    """What a call sets for itself must not reach the application that gets the connection next."""
    queue = "fencing_sdk.backends.postgresql.connection.request_queue"
    monkeypatch.setattr(f"{queue}.SILENCE", PATIENCE)  # the proxy would end the server's session, too
    settings = (
        "lock_timeout",
        "statement_timeout",
        "synchronous_commit",
        "search_path",
        "default_transaction_isolation",
    )
    names = "current_setting('" + "') || ' ' || current_setting('".join(settings) + "')"
    with PgBouncer(postgresql_server, binary=pgbouncer.binary, default_pool_size=1) as narrow:
        application = await asyncpg.connect(narrow.url, statement_cache_size=0)
        before = await application.fetchval(f"SELECT {names}")
        pid = await application.fetchval("SELECT pg_backend_pid()")
        async with opened(narrow.url, pooled=True) as (locks, log), staying(locks.lock("a", **LONG)) as stay:
            waiter = Stay(locks.lock("b", ttl=10), work=0)
            await log.seen(Renewed, 2)
            await waiter.over()
            await stay.end()
            assert await application.fetchval(f"SELECT {names}") == before
        assert await application.fetchval(f"SELECT {names}") == before
        assert await application.fetchval("SELECT pg_backend_pid()") == pid  # or the test would prove nothing
        assert await application.fetchval("SELECT count(*) FROM pg_listening_channels()") == 0
        assert await application.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0
        await application.close()
