"""An operator takes a lock away on PostgreSQL: a message tells the holder, and a look what it has missed."""

from __future__ import annotations

import asyncpg
import pytest
from patience import until
from pgbouncer import PgBouncer
from postgresql_server import PostgresqlServer
from revocation_notices_suite import FAR, holding, listening, shorten_the_moment, told, watcher
from stays import LONG, opened, staying

from fencing_sdk import BackendRefusedError, connect
from fencing_sdk.backends.postgresql.connection.session import PostgresqlSession

pytest_plugins = ["postgresql_fixtures"]

ODD = 'Ü "b", c'


@pytest.fixture(autouse=True)
def short(monkeypatch):
    shorten_the_moment(monkeypatch)


async def test_the_holder_is_told_whatever_the_schema_and_the_lock_are_called(postgresql_server):
    name = ODD * 25
    async with holding(postgresql_server.url, name, schema=ODD) as (_, (stay,)):
        async with connect(postgresql_server.url, schema=ODD) as operator:
            assert await operator.revoke(name, token=stay.token, reason="hangs")
        await told(stay)


async def test_what_was_revoked_while_the_connection_was_broken_is_told_when_it_is_back(
    postgresql_server, postgresql_proxy
):
    async with holding(postgresql_proxy.url, "a", "b") as (locks, (stay, kept)):
        postgresql_proxy.refuse()
        postgresql_proxy.cut()
        await until(lambda: not watcher(locks)._listening)
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


async def test_a_schema_of_another_version_is_completed_and_keeps_its_locks_and_functions(
    postgresql_server: PostgresqlServer,
):
    server = postgresql_server
    async with holding(server.url, "a") as (_, (stay,)):
        for function in ("fencing_revoke", "fencing_readers"):
            await server.execute(f"DROP FUNCTION fencing.{function}")
        await server.execute("CREATE FUNCTION fencing.fencing_older() RETURNS text LANGUAGE sql AS $$ SELECT 'x' $$")
        with pytest.raises(BackendRefusedError, match="fencing init"):
            async with connect(server.url, create=False):
                pass
        async with connect(server.url) as operator:
            assert await operator.revoke("a", token=stay.token, reason="hangs")
            assert await server.value("SELECT fencing.fencing_older()") == "x"
        await told(stay)
