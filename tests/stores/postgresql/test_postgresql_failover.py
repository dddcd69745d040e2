"""PostgreSQL fails under a holder: crashes, failovers, lost replies, ended sessions, and locks that are taken away."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest
from inside import state_of
from patience import until
from pgbouncer import PgBouncer
from postgresql_replicas import Replicated
from postgresql_server import FORGETFUL, PostgresqlServer
from postgresql_stage import ENDS, line, nothing_left, sessions, terminate, waiting
from revoking_suite import FAR, revoked
from stays import LONG, PATIENCE, SHORT, Stay, answered, eventually, opened, renewed_or_over, staying

from fencing_sdk import BackendRefusedError, BackendUnavailableError, connect
from fencing_sdk.abc import Claim, Place
from fencing_sdk.backends.postgresql import from_url
from fencing_sdk.backends.postgresql.driver import PostgresqlSession
from fencing_sdk.events import Lost, RenewalFailed, Renewed

pytest_plugins = ["postgresql_fixtures"]


# What a failover loses, and what the SDK makes of it: replication really cut, a standby really promoted.


COMMIT = "COMMENT ON SCHEMA public IS 'something to commit'"


async def have_commits_wait_for_the_standby(group: Replicated) -> None:
    """Return when they do: a server that was told to read its settings does so when it gets round to it."""
    await group.primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
    await group.primary.execute("SELECT pg_reload_conf()")
    group.cut_replication()
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    writing = asyncio.create_task(group.primary.execute(COMMIT))
    for _ in range(1000):
        if not writing.done() and await group.primary.value(waiting):
            break
        if writing.done():
            await writing
            writing = asyncio.create_task(group.primary.execute(COMMIT))
        await asyncio.sleep(0.05)
    else:
        pytest.fail("no commit waits for the standby")
    group.link.heal()
    await writing


async def test_a_grant_that_a_synchronous_standby_has_survives_the_failover(postgresql_group):
    group = postgresql_group
    await have_commits_wait_for_the_standby(group)
    async with opened(group.primary.url) as (before, _):
        lease = await before.lock("a", ttl=60).acquire()
        token, holder = lease.token, lease.holder
        group.primary.kill()
        promoted = await group.promote()
        await promoted.execute("ALTER SYSTEM RESET synchronous_standby_names")
        await promoted.execute("SELECT pg_reload_conf()")
        async with opened(promoted.url) as (after, _):
            assert await answered(after.lock("a").try_acquire) is None
            found = await answered(lambda: after.inspect("a"))
            assert (found.token, found.id) == (token, holder)


async def test_a_grant_that_a_synchronous_standby_does_not_confirm_is_not_reported(postgresql_group):
    group = postgresql_group
    async with opened(group.primary.url) as (locks, _):
        async with locks.lock("a"):
            pass
        await have_commits_wait_for_the_standby(group)
        async with locks.lock("b", wait=PATIENCE):
            pass
        group.cut_replication()
        with pytest.raises(BackendUnavailableError):
            await locks.lock("a", ttl=60, wait=1).acquire()
        group.link.heal()
        async with locks.lock("a", ttl=60, wait=PATIENCE):  # what was granted in silence is undone
            pass


async def test_a_standby_is_refused_until_it_is_promoted(postgresql_group):
    group = postgresql_group
    async with opened(group.primary.url) as (locks, _), locks.lock("a"):
        pass
    await group.synced()
    with pytest.raises(BackendUnavailableError, match="standby"):
        async with opened(group.standby.url) as (locks, _):
            await locks.lock("a", wait=0.5).acquire()
    await group.promote()
    async with opened(group.standby.url) as (locks, _), locks.lock("a", wait=PATIENCE):
        pass


@pytest.mark.parametrize("order", ["primary first", "standby first"])
async def test_of_two_hosts_the_primary_is_found(order, postgresql_group):
    group = postgresql_group
    url = group.url if order == "primary first" else swapped(group)
    async with opened(url) as (locks, _):
        for _ in range(3):
            async with locks.lock("a", wait=PATIENCE):
                pass
    assert await group.primary.value("SELECT count(*) FROM fencing.fencing_line") == 1


def swapped(group: Replicated) -> str:
    first, second = f"127.0.0.1:{group.primary.port}", f"127.0.0.1:{group.standby.port}"
    return group.url.replace(f"{first},{second}", f"{second},{first}")


@pytest.mark.parametrize("how", ["kill", "pause"])
async def test_a_client_of_two_hosts_follows_a_failover_with_its_lease(how, postgresql_group):
    """The lease that was replicated goes on with its token, over a dead or silent primary and a new one."""
    group = postgresql_group
    async with opened(group.url) as (locks, log):
        async with staying(locks.lock("a", ttl=40, heartbeat_interval=0.5)) as stay:
            await log.seen(Renewed)
            await group.synced()
            getattr(group.primary, how)()
            promoted = await group.promote()
            renewed = len(log.of(Renewed))
            await log.seen(Renewed, renewed + 2)
            found = await answered(lambda: locks.inspect("a"))
            assert (found.token, found.id) == (stay.token, stay.lease.holder)
            assert await promoted.value("SELECT min(token) FROM fencing.fencing_ticket WHERE name = 'a'") == stay.token
            await stay.end()
        async with locks.lock("a", wait=PATIENCE) as lease:
            assert lease.token > stay.token
    assert log.of(Lost) == []


async def test_waiters_get_their_turn_over_a_failover(postgresql_group):
    """The line and the connection to listen on are gone with the old primary; the waiters are not."""
    group = postgresql_group
    async with opened(group.url) as (locks, _), opened(group.url) as (others, _):
        async with staying(locks.lock("a", ttl=40, heartbeat_interval=0.5)) as stay:
            waiters = [Stay(others.lock("a", ttl=30), work=0) for _ in range(3)]
            await waiting(group.primary, 3)
            await group.synced()
            group.primary.kill()
            promoted = await group.promote()
            await waiting(promoted, 3)
            await stay.end()
        for waiter in waiters:
            await waiter.over()
            assert waiter.error is None
            assert waiter.token > stay.token


async def test_a_primary_that_becomes_a_standby_is_left_for_the_other(postgresql_group):
    """A switch-over: both answer all the time, and who may be written to has changed."""
    group = postgresql_group
    async with opened(group.url) as (locks, log), staying(locks.lock("a", **LONG | {"ttl": 40})) as stay:
        await log.seen(Renewed)
        await group.synced()
        await group.primary.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        await group.primary.execute("SELECT pg_reload_conf()")
        await log.seen(RenewalFailed)
        promoted = await group.promote()
        renewed = len(log.of(Renewed))
        await log.seen(Renewed, renewed + 1)
        assert await promoted.value("SELECT min(token) FROM fencing.fencing_ticket WHERE name = 'a'") == stay.token
        await stay.end()
    assert log.of(Lost) == []


# The server stops at once or loses its memory, and starts again: what was granted stays granted, tokens grow.


def crash(server, how: str) -> None:
    """Stop and start again."""
    if how == "kill":
        server.kill()
        server.start()
    else:
        server.restart(immediate=True)


@pytest.mark.parametrize(("how", "tokens"), [("immediate", "counter"), ("kill", "counter"), ("kill", "hybrid")])
async def test_tokens_grow_over_every_crash(how, tokens, start_postgresql):
    server = start_postgresql(**FORGETFUL)
    seen = []
    async with opened(server.url, tokens=tokens) as (locks, _):
        for _ in range(3):
            lease = await locks.lock("a", ttl=30, wait=PATIENCE).acquire()
            seen.append(state_of(lease).number)
            await asyncio.to_thread(crash, server, how)
            await lease.release()
    assert seen == sorted(set(seen))
    if tokens == "counter":
        assert seen == [1, 2, 3]


async def test_what_was_granted_and_renewed_before_a_crash_is_kept_after_it(start_postgresql):
    """Otherwise the server would grant the lock to another owner while the holder still relies on its answer."""
    server = start_postgresql(**FORGETFUL)
    backend = from_url(server.url)
    claim = Claim("a", 60.0)
    place = await backend.draw(claim)
    for _ in range(2):
        ends = await server.value(ENDS, "a")
        await asyncio.to_thread(crash, server, "kill")
        assert await server.value(ENDS, "a") == ends
        assert await eventually(lambda: kept(backend, claim), what="it is kept")
    ((seen,),) = await backend.tickets(["a"])
    assert seen.token == place.token
    await backend.give_back(claim)
    await backend.aclose()
    await nothing_left(server)


async def kept(backend, claim) -> bool:
    try:
        (answer,) = await backend.keep([(claim, 0)])
        return isinstance(answer, Place)
    except BackendUnavailableError:
        return False


@pytest.mark.parametrize("how", ["immediate", "kill"])
async def test_a_lease_and_those_who_wait_live_through_a_crash(how, start_postgresql):
    server = start_postgresql()
    async with opened(server.url) as (locks, log), opened(server.url) as (others, _):
        async with staying(locks.lock("a", ttl=20, heartbeat_interval=0.5)) as stay:
            waiters = [Stay(others.lock("a", ttl=20, wait=PATIENCE), work=0) for _ in range(3)]
            await waiting(server, 3)
            await asyncio.to_thread(crash, server, how)
            renewed = len(log.of(Renewed))
            await log.seen(Renewed, renewed + 1)
            await eventually(lambda: _in_line(server, 3), what="all three wait again")
            assert not any(waiter.entered.is_set() for waiter in waiters)
            await stay.end()
        for waiter in waiters:
            await waiter.over()
            assert waiter.error is None
            assert waiter.token > stay.token
    assert log.of(Lost) == []
    await nothing_left(server)


async def _in_line(server, number) -> bool:
    return await line(server) == number


async def test_a_restart_for_longer_than_the_lease_ends_the_body_in_time(start_postgresql):
    server = start_postgresql()
    async with opened(server.url) as (locks, log), staying(locks.lock("a", **SHORT)) as stay:
        await renewed_or_over(log, stay)
        await asyncio.to_thread(server.stop, immediate=True)
        await stay.over()
        assert stay.lost is not None
        with pytest.raises(BackendUnavailableError):
            await locks.lock("a", wait=0.2).acquire()
        await asyncio.to_thread(server.start)
        async with staying(locks.lock("a", wait=PATIENCE)) as following:
            assert following.token > stay.token
            await following.end()
    await nothing_left(server)


# One session ends.


@pytest.mark.parametrize("which", ["query ILIKE 'listen%'", "query NOT ILIKE 'listen%'", "true"])
async def test_a_terminated_session_costs_waiters_a_moment(which, postgresql_server, monkeypatch):
    listener = "fencing_sdk.backends.postgresql.listener"
    monkeypatch.setattr(f"{listener}.ECHO_PATIENCE", PATIENCE)  # on a slow machine an echo takes long
    server = postgresql_server
    async with opened(server.url) as (locks, _), opened(server.url) as (others, log):
        async with staying(others.lock("a", **LONG | {"ttl": 20})) as stay:
            waiters = [Stay(locks.lock("a", ttl=60), work=0) for _ in range(10)]
            await waiting(server, 10)
            await until(lambda: locks._backend._listener.listening)
            assert await terminate(server, which) > 0
            renewed = len(log.of(Renewed))
            await log.seen(Renewed, renewed + 1)
            await stay.end()
            for waiter in waiters:
                await waiter.over()
                assert waiter.error is None
        assert log.of(Lost) == []

        async def few() -> bool:
            return len(await sessions(server)) <= 3

        await eventually(few, what="no session is left over")
    await nothing_left(server)


# What only PostgreSQL can show when it fails under a holder: sessions that are terminated, and openings given up.


# The connection breaks.


# The client gives up at the very moment when a connection has been opened.


@pytest.mark.every_loop
@pytest.mark.parametrize("turns", range(5))
async def test_an_opening_that_is_cancelled_when_it_has_succeeded_leaves_no_connection(
    turns, postgresql_server, monkeypatch
):
    backend, loop = from_url(postgresql_server.url), asyncio.get_running_loop()
    connect_to = backend._dialer._connect_to

    def cancel_after(turns):
        loop.call_soon(cancel_after, turns - 1) if turns else dialing.cancel()

    async def connect_and_be_cancelled(*arguments):
        connection = await connect_to(*arguments)
        cancel_after(turns)
        return connection

    monkeypatch.setattr(backend._dialer, "_connect_to", connect_and_be_cancelled)
    dialing = asyncio.create_task(backend._dialer.dial())
    await asyncio.wait({dialing})
    if not dialing.cancelled():
        dialing.result().drop()
    assert await eventually(lambda: none_left(postgresql_server), what="no connection is left", within=5)


@pytest.mark.every_loop
async def test_a_backend_that_is_closed_when_its_connection_has_been_opened_leaves_none(postgresql_server, monkeypatch):
    backend = from_url(postgresql_server.url)
    closing = []
    open_one = backend._dialer.dial

    async def open_and_be_closed():
        session = await open_one()
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: closing.append(loop.create_task(backend._connection.aclose())))
        return session

    monkeypatch.setattr(backend._connection, "_dial_session", open_and_be_closed)
    with pytest.raises(BackendUnavailableError):
        await backend.tickets(["a"])
    await closing[0]
    assert await eventually(lambda: none_left(postgresql_server), what="no connection is left", within=5)


async def none_left(server) -> bool:
    return not await sessions(server)


# Bells: what was rung while the connection was broken is heard when it is back, and without one by the next keep.


ODD = 'Ü "b", c'


async def listening(locks) -> None:
    await until(lambda: locks._backend._listener.listening)


async def test_the_holder_hears_whatever_the_schema_and_the_lock_are_called(postgresql_server):
    name = ODD * 25
    async with opened(postgresql_server.url, schema=ODD) as (locks, _), staying(locks.lock(name, **FAR)) as stay:
        async with connect(postgresql_server.url, schema=ODD) as operator:
            assert await operator.revoke(name, token=stay.token, reason="hangs")
        await revoked(stay)


async def test_what_was_ended_while_the_connection_was_broken_is_heard_when_it_is_back(
    postgresql_server, postgresql_proxy
):
    async with opened(postgresql_proxy.url) as (locks, _), connect(postgresql_server.url) as operator:
        async with staying(locks.lock("a", **FAR)) as stay, staying(locks.lock("b", **FAR)) as kept:
            await listening(locks)
            postgresql_proxy.refuse()
            postgresql_proxy.cut()
            await until(lambda: not locks._backend._listener.listening)
            assert await operator.revoke("a", token=stay.token, reason="hangs")
            postgresql_proxy.heal()
            await revoked(stay)
            await kept.end()


async def test_a_connection_that_ends_as_it_begins_to_listen_is_followed_by_another(postgresql_server, monkeypatch):
    listen, dropped = PostgresqlSession.listen, []

    async def listen_and_end_once(session, *arguments):
        stop = await listen(session, *arguments)
        if not dropped:
            dropped.append(session)
            session.drop()
        return stop

    monkeypatch.setattr(PostgresqlSession, "listen", listen_and_end_once)
    async with opened(postgresql_server.url) as (locks, _), connect(postgresql_server.url) as operator:
        async with staying(locks.lock("a", **FAR)) as stay:
            await until(lambda: dropped)
            assert await operator.revoke("a", token=stay.token, reason="hangs")
            await revoked(stay)


@pytest.mark.parametrize("options", [{}, {"pooled": True}], ids=["as it comes", "pooled"])
async def test_behind_a_pooling_proxy_the_next_keep_finds_it_and_no_session_is_left_listening(
    options, pgbouncer, postgresql_server
):
    with PgBouncer(postgresql_server, binary=pgbouncer.binary, default_pool_size=1) as narrow:
        application = await asyncpg.connect(narrow.url, statement_cache_size=0)
        try:
            async with opened(narrow.url, **options) as (locks, log), staying(locks.lock("a", **LONG)) as stay:
                await log.seen(Renewed, 2)
                await eventually(lambda: _none_listens(application), what="no session listens")
                assert await locks.revoke("a", token=stay.token, reason="hangs")
                await revoked(stay)
        finally:
            await application.close()


async def _none_listens(application) -> bool:
    return await application.fetchval("SELECT count(*) FROM pg_listening_channels()") == 0


async def test_a_short_hold_does_not_listen(postgresql_server):
    async with opened(postgresql_server.url) as (locks, _):
        for _ in range(20):
            async with locks.lock("a"):
                pass
        assert len(await sessions(postgresql_server)) == 1


async def test_a_schema_of_another_version_is_completed_and_keeps_its_locks_and_functions(
    postgresql_server: PostgresqlServer,
):
    server = postgresql_server
    async with opened(server.url) as (locks, _), staying(locks.lock("a", **FAR)) as stay:
        for function in ("fencing_end", "fencing_sweep"):
            await server.execute(f"DROP FUNCTION fencing.{function}")
        await server.execute("CREATE FUNCTION fencing.fencing_older() RETURNS text LANGUAGE sql AS $$ SELECT 'x' $$")
        with pytest.raises(BackendRefusedError, match="fencing init"):
            async with connect(server.url, create=False):
                pass
        async with connect(server.url) as operator:
            assert await operator.revoke("a", token=stay.token, reason="hangs")
            assert await server.value("SELECT fencing.fencing_older()") == "x"
        await revoked(stay)
