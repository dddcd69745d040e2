"""SqlGuard on PostgreSQL: the contract, through every kind of transaction, and what is true of each of them."""

import asyncio
import contextlib
import socket
from contextlib import asynccontextmanager, closing
from types import SimpleNamespace

import anyio
import asyncpg
import psycopg
import psycopg2
import pytest
from local_ports import HOST
from postgresql_replicas import Replicated
from postgresql_ways import Alchemy, opened
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from through_a_way import ThroughAWay

from fencing_sdk import BackendUnavailableError, ConfigurationError, StaleTokenError, Token, UsageError
from fencing_sdk.errors import UnsupportedError
from fencing_sdk.guards.sql import FenceColumn, SqlGuard
from fencing_sdk.testing.suites import GuardSuite

pytest_plugins = ["postgresql_fixtures", "guard_database"]

OLD, NEW = Token(33, "aaaaaaaa"), Token(34, "bbbbbbbb")


@pytest.fixture
async def asyncpg_way(server):
    async with opened("asyncpg", server.url) as way:
        yield way


async def fence(server, resource="a"):
    """The fence as others see it, or None when there is no row, or no table."""
    if await server.value("SELECT to_regclass('fencing_fence')::text") is None:
        return None
    return await server.value("SELECT token FROM fencing_fence WHERE resource = $1", resource)


# The contract.


class TestWithAUrlAndAPoolOfAsyncpg(ThroughAWay, GuardSuite):
    way = "asyncpg-pool"


class TestWithAnEngineAndSessions(ThroughAWay, GuardSuite):
    way = "session"

    def make_guard(self, way):
        return SqlGuard(way.engine)


# A transaction there must be.


@asynccontextmanager
async def autocommitting(kind, url):
    """A connection in the mode in which each statement is committed by itself."""
    if kind == "asyncpg":
        connection = await asyncpg.connect(url)
        yield connection
        await connection.close()
    elif kind == "psycopg":
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
            yield connection
    elif kind == "psycopg-sync":
        with psycopg.connect(url, autocommit=True) as connection:
            yield connection
    else:
        async with opened(kind, url) as way:
            engine = way.make_engine(isolation_level="AUTOCOMMIT")
            async with AsyncSession(engine) as session:
                yield session
            await engine.dispose()


@pytest.mark.parametrize("kind", ["asyncpg", "psycopg", "psycopg-sync", "session", "connection-psycopg"])
async def test_a_connection_that_commits_by_itself_is_refused(kind, server):
    """Before anything is sent: neither fence nor table is there afterwards."""
    async with autocommitting(kind, server.url) as connection:
        with pytest.raises(UsageError, match="begin one first"):
            await SqlGuard().admit(connection, "a", NEW)
        with pytest.raises(UsageError, match="begin one first"):
            await SqlGuard().raise_in(connection, "a", NEW)
    assert await server.value("SELECT to_regclass('fencing_fence')::text") is None


@pytest.mark.parametrize("kind", ["connection", "connection-psycopg"])
async def test_an_engine_in_autocommit_raises_no_fence(kind, server):
    async with opened(kind, server.url) as way:
        engine = way.make_engine(isolation_level="AUTOCOMMIT")
        with pytest.raises(UsageError, match="begin one first"):
            await SqlGuard(engine).raise_to("a", NEW)
        await engine.dispose()


async def test_a_transaction_that_was_begun_by_hand_will_do(server):
    guard = SqlGuard()
    async with autocommitting("asyncpg", server.url) as connection:
        await connection.execute("BEGIN")
        await guard.admit(connection, "a", 1)
        await connection.execute("COMMIT")
    async with autocommitting("psycopg", server.url) as connection, connection.transaction():
        await guard.admit(connection, "a", 2)
    with psycopg.connect(server.url, autocommit=True) as connection, connection.transaction():
        guard.admit_sync(connection, "a", 3)
    assert await fence(server) == 3


async def test_a_driver_that_hides_that_it_commits_is_found_out(server):
    """By the transaction that is not open after the statement."""

    class Hiding:
        def __init__(self, connection):
            self._connection, self._written = connection, False

        def is_in_transaction(self):
            return not self._written

        async def fetch(self, statement, *parameters):
            self._written = statement.startswith("INSERT")
            return await self._connection.fetch(statement, *parameters)

    async with autocommitting("asyncpg", server.url) as connection:
        with pytest.raises(UsageError, match="begin one first"):
            await SqlGuard().admit(Hiding(connection), "a", NEW)


def test_an_unknown_driver_is_refused():
    """Whether its connections commit by themselves cannot be seen."""
    strange = SimpleNamespace(
        dialect=SimpleNamespace(name="postgresql", paramstyle="format"),
        connection=SimpleNamespace(driver_connection=object(), dbapi_connection=object()),
        exec_driver_sql=None,
    )
    with pytest.raises(UnsupportedError, match="cannot see what builtins commits"):
        SqlGuard().admit_sync(strange, "a", NEW)


async def test_what_is_no_transaction_is_refused(server):
    async with opened("asyncpg-pool", server.url) as way:
        for wrong in (way.pool, server.url, None):
            with pytest.raises(UsageError, match="transaction must be"):
                await SqlGuard().admit(wrong, "a", NEW)
        async with way.begin() as transaction:
            with pytest.raises(UsageError, match=r"await guard\.admit"):
                SqlGuard().admit_sync(transaction, "a", NEW)
    async with opened("psycopg", server.url) as way, way.begin() as transaction:
        with pytest.raises(UsageError, match=r"await guard\.admit"):
            SqlGuard().admit_sync(transaction, "a", NEW)


async def test_a_connection_of_psycopg2_is_refused_and_told_what_is_taken(server):
    """It looks like one of psycopg 3, and knows no row_factory."""

    def admit():
        with closing(psycopg2.connect(server.url)) as connection:
            SqlGuard().admit_sync(connection, "a", NEW)

    with pytest.raises(UsageError, match=r"psycopg 3.* also over psycopg2, not connection of psycopg2"):
        await asyncio.to_thread(admit)


async def test_sqlalchemy_over_psycopg2_is_taken(server):
    engine = create_engine(server.url.replace("postgresql://", "postgresql+psycopg2://"))

    def admit(token):
        with Session(engine) as session, session.begin():
            SqlGuard().admit_sync(session, "a", token)

    await asyncio.to_thread(admit, NEW)
    with pytest.raises(StaleTokenError):
        await asyncio.to_thread(admit, OLD)
    engine.dispose()
    assert await fence(server) == 34


# Others.


def test_a_statement_for_each_kind_of_database():
    engine = Alchemy("postgresql://host/app").make_engine()
    for guard in (SqlGuard("postgres://host/app"), SqlGuard(engine)):
        assert guard.ddl() == guard.ddl("postgresql") == SqlGuard().ddl("postgresql")
        assert "bigint" in guard.ddl()
        assert guard.ddl("sqlite") == SqlGuard().ddl() == SqlGuard("app.db").ddl()
    with pytest.raises(ConfigurationError, match="dialect must be one of sqlite, postgresql, mysql, got 'mssql'"):
        SqlGuard().ddl("mssql")


# Several transactions at once.


@pytest.fixture
async def looking(server):
    """A connection that looks at the others, while nothing of the loop is blocked."""
    async with server.connected() as connection:
        yield connection


async def is_waiting(looking):
    """Wait until a transaction waits for the lock of another one."""
    query = "SELECT count(*) = 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    for _ in range(2_000):
        if await looking.fetchval(query):
            return
        await asyncio.sleep(0.01)
    pytest.fail("no transaction waits")


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
async def test_a_fence_that_did_not_exist_when_the_transaction_looked_stops_it_too(asyncpg_way, level, server):
    """There is no row in its view that could be compared."""
    guard = SqlGuard(asyncpg_way.url)
    await guard.raise_to("another", NEW)
    with pytest.raises(asyncpg.SerializationError):
        async with asyncpg_way.begin(level) as transaction:
            await asyncpg_way.look(transaction, "a")
            await guard.raise_to("a", NEW)
            await guard.admit(transaction, "a", OLD)
    assert await fence(server) == 34


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
    """A server that stands still learns nothing of the cancellation, and is not waited for."""
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


@pytest.mark.slow
@pytest.mark.usefixtures("server")
async def test_a_guard_with_several_hosts_uses_the_one_that_takes_writes():
    """Neither a standby that answers first, which lacks the fence, nor a host that never answers."""
    async with Replicated() as group:
        await group.synced()
        group.cut_replication()
        login, database = group.url.partition("@")[0], group.url.rpartition("/")[2]
        with socket.create_server((HOST, 0)) as silent:
            hosts = [silent.getsockname()[1], group.standby.port, group.primary.port]
            guard = SqlGuard(f"{login}@{','.join(f'{HOST}:{port}' for port in hosts)}/{database}")
            await guard.raise_to("a", NEW)
            assert await guard.highest("a") == NEW
        readers = SqlGuard(f"{login}@{HOST}:{group.standby.port},{HOST}:{group.standby.port}/{database}")
        with pytest.raises(BackendUnavailableError, match="takes no writes"):
            await readers.highest("a")


@pytest.mark.parametrize("cursor", ["Cursor", "RawCursor"])
@pytest.mark.parametrize("piped", [False, True])
async def test_psycopg_in_pipeline_mode_and_with_cursors_of_another_kind(cursor, piped, server):
    guard = SqlGuard()
    factory = getattr(psycopg, f"Async{cursor}")
    async with await psycopg.AsyncConnection.connect(server.url, cursor_factory=factory) as connection:
        async with connection.pipeline() if piped else contextlib.nullcontext():
            await guard.admit_all(connection, {"a": NEW, "b": NEW})
            with pytest.raises(StaleTokenError):
                await guard.admit(connection, "a", OLD)
            await connection.commit()
            await connection.set_autocommit(True)
            with pytest.raises(UsageError, match="commits every statement"):
                await guard.admit(connection, "a", NEW)
            async with connection.transaction():
                await guard.raise_in(connection, "a", Token(35, "cccccccc"))
    with psycopg.connect(server.url, cursor_factory=getattr(psycopg, cursor)) as connection:
        with connection.pipeline() if piped else contextlib.nullcontext():
            guard.admit_sync(connection, "a", Token(36, "dddddddd"))
    assert await fence(server) == 36


def test_a_column_asks_for_the_outcome_of_a_pipeline(server):
    seats = FenceColumn("seats", key="seat")
    with psycopg.connect(server.url) as connection:
        connection.execute("CREATE TABLE seats (seat int PRIMARY KEY, fence bigint NOT NULL DEFAULT 0)")
        connection.execute("INSERT INTO seats VALUES (1)")
        with connection.pipeline() as pipeline:
            done = connection.execute("UPDATE seats SET fence = 34 WHERE seat = 1 AND fence <= 34")
            with pytest.raises(UsageError, match=r"pipeline\.sync"):
                seats.written_sync(connection, 1, NEW, done)
            pipeline.sync()
            assert seats.written_sync(connection, 1, NEW, done)
