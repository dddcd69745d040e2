"""An operator takes a lock away on PostgreSQL: a message tells the holder, and a look what it has missed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest
from patience import until
from pgbouncer import PgBouncer
from postgresql_server import PostgresqlServer
from stays import LONG, PATIENCE, Stay, opened, staying

from fencing_sdk import BackendRefusedError, LockClient, LossReason, connect
from fencing_sdk.backends.postgresql import losses
from fencing_sdk.backends.postgresql.connection.session import PostgresqlSession

pytest_plugins = ["postgresql_fixtures"]

FAR = {"ttl": 3600.0, "heartbeat_interval": 900.0}
"""A lease whose next heartbeat is minutes away: what is noticed was pushed."""

ODD = 'Ü "b", c'


@pytest.fixture(autouse=True)
def a_short_moment(monkeypatch):
    """A hold is long, and a connection is tried again, after a moment that costs the tests less."""
    monkeypatch.setattr(losses, "_MOMENT", 0.05)
    monkeypatch.setattr(losses, "_LAST_PAUSE", 0.2)


def watcher(locks: LockClient) -> losses.PostgresqlLossWatcher:
    return locks._backend._losses


async def listening(locks: LockClient) -> None:
    """Wait until messages arrive, and until all grants were looked at."""
    await until(lambda: watcher(locks)._session is not None and not watcher(locks)._task.running)


@asynccontextmanager
async def holding(url: str, *names: str, **options: str) -> AsyncIterator[tuple[LockClient, list[Stay]]]:
    """A client that holds some locks and listens."""
    async with opened(url, **options) as (locks, _):
        stays = [Stay(locks.lock(name, **FAR)) for name in names]
        for stay in stays:
            await stay.begun()
        await listening(locks)
        yield locks, stays
        for stay in stays:
            await stay.abandon()


async def told(stay: Stay, reason: str = "hangs") -> None:
    await stay.over()
    assert stay.lost is LossReason.REVOKED
    assert stay.error.detail == reason


@pytest.mark.every_loop
@pytest.mark.parametrize(("schema", "name"), [("fencing", "a"), (ODD, ODD * 25)])
async def test_the_holder_is_told_by_a_message_and_no_other_holder(postgresql_server, schema, name):
    async with holding(postgresql_server.url, name, "other", schema=schema) as (_, (stay, other)):
        async with connect(postgresql_server.url, schema=schema) as operator:
            assert await operator.revoke(name, token=stay.token, reason="hangs")
        await told(stay)
        await other.end()


async def test_a_client_tells_itself(postgresql_server):
    async with holding(postgresql_server.url, "a") as (locks, (stay,)):
        assert await locks.revoke("a", token=stay.token, reason="hangs")
        await told(stay)


async def test_all_readers_of_a_token_are_told_and_one_permit(postgresql_server):
    async with opened(postgresql_server.url) as (locks, _), connect(postgresql_server.url) as operator:
        guide, seats = locks.rwlock("guide", **FAR), locks.semaphore("seats", permits=2, **FAR)
        async with (
            staying(guide.reader) as one,
            staying(guide.reader) as two,
            staying(seats) as taken,
            staying(seats) as kept,
        ):
            await listening(locks)
            assert await operator.revoke("guide", token=one.token, reason="hangs")
            assert await operator.revoke("seats", token=taken.token, reason="hangs")
            for stay in (one, two, taken):
                await told(stay)
            await kept.end()


async def test_what_was_revoked_while_the_connection_was_broken_is_told_when_it_is_back(
    postgresql_server, postgresql_proxy
):
    async with holding(postgresql_proxy.url, "a", "b") as (locks, (stay, kept)):
        postgresql_proxy.refuse()
        postgresql_proxy.cut()
        await until(lambda: watcher(locks)._session is None)
        async with connect(postgresql_server.url) as operator:
            assert await operator.revoke("a", token=stay.token, reason="hangs")
        postgresql_proxy.heal()
        await told(stay)
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
            await told(stay)


async def test_a_client_of_the_version_before_is_heard(postgresql_server):
    async with holding(postgresql_server.url, "a") as (_, (stay,)):
        assert await postgresql_server.value("SELECT fencing.fencing_revoke_v1('a', $1, 'hangs')", stay.token)
        await told(stay)


async def test_a_message_proves_nothing(postgresql_server):
    """It may be forged, and a reason may be that of an earlier grant to the same owner."""
    server = postgresql_server
    async with holding(server.url, "a", "b") as (_, (kept, stay)):
        await server.execute(
            "INSERT INTO fencing.fencing_revoked (name, owner, until, reason) "
            "SELECT name, owner, expires_at, 'earlier' FROM fencing.fencing_lock WHERE name = 'a'"
        )
        channel = losses.revocation_channel("fencing")
        for payload in ("", "x" * 7999, losses.name_digest("a")):
            await server.fetch("SELECT pg_notify($1, $2)", channel, payload)
        assert await server.value("SELECT fencing.fencing_revoke_v1('b', $1, 'hangs')", stay.token)
        await told(stay)  # messages arrive in order, so those before were looked at
        await kept.end()


async def test_a_short_hold_costs_the_server_nothing(postgresql_proxy, monkeypatch):
    monkeypatch.setattr(losses, "_MOMENT", 600.0)
    async with opened(postgresql_proxy.url) as (locks, _):
        for _ in range(20):
            async with locks.lock("a"):
                pass
        statements = [text for _, text, *_ in postgresql_proxy.requests]
    assert sum(b"fencing_acquire" in text for text in statements) >= 20
    assert not [text for text in statements if text.startswith((b"LISTEN", b"SELECT pg_catalog.pg_backend_pid"))]


@pytest.mark.parametrize("options", [{}, {"pooled": True}], ids=["as it comes", "pooled"])
async def test_behind_a_pooling_proxy_the_next_renewal_tells_and_no_session_is_left_listening(
    options, pgbouncer, postgresql_server
):
    with PgBouncer(postgresql_server, binary=pgbouncer.binary, default_pool_size=1) as narrow:
        application = await asyncpg.connect(narrow.url, statement_cache_size=0)
        try:
            async with opened(narrow.url, **options) as (locks, _), staying(locks.lock("a", **LONG)) as stay:
                await listening(locks)
                assert await application.fetchval("SELECT count(*) FROM pg_listening_channels()") == 0
                assert await locks.revoke("a", token=stay.token, reason="hangs")
                await told(stay)
        finally:
            await application.close()


async def test_a_client_that_was_told_of_a_pooling_proxy_does_not_listen(postgresql_proxy):
    async with opened(postgresql_proxy.url, pooled=True) as (locks, _), staying(locks.lock("a", **FAR)) as stay:
        await listening(locks)
        assert not [text for _, text, *_ in postgresql_proxy.requests if text.startswith(b"LISTEN")]
        await stay.end()


async def test_a_schema_of_the_version_before_is_completed_and_keeps_its_locks(postgresql_server: PostgresqlServer):
    server = postgresql_server
    async with holding(server.url, "a") as (_, (stay,)):
        for function in ("fencing_revoke_v1", "fencing_revoke_v2", "fencing_readers_acquire_v1"):
            await server.execute(f"DROP FUNCTION fencing.{function}")
        with pytest.raises(BackendRefusedError, match="fencing init"):
            async with connect(server.url, create=False):
                pass
        async with connect(server.url) as operator:
            assert await operator.revoke("a", token=stay.token, reason="hangs")
        await told(stay)


async def test_a_lock_that_was_released_is_watched_no_more(postgresql_server):
    async with holding(postgresql_server.url, "a", "b") as (locks, stays):
        assert len(watcher(locks)._held) == 2
        await stays[0].end()
        assert await locks.revoke("b", token=stays[1].token, reason="hangs")
        await told(stays[1])
        await until(lambda: not watcher(locks)._held)


async def test_a_client_that_holds_nothing_for_a_while_listens_no_more_until_it_holds_again(
    postgresql_server, postgresql_proxy, monkeypatch
):
    monkeypatch.setattr(losses, "_IDLE", 0.05)
    async with opened(postgresql_proxy.url) as (locks, _), connect(postgresql_server.url) as operator:
        for _ in range(2):
            told_to_stop = postgresql_proxy.saw("UNLISTEN")
            async with staying(locks.lock("a", **FAR)) as stay:
                await listening(locks)
                assert await operator.revoke("a", token=stay.token, reason="hangs")
                await told(stay)
            async with asyncio.timeout(PATIENCE):
                await told_to_stop
