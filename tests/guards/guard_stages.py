"""
The servers on which `SqlGuard` keeps fences, each with all ways to its transactions, as columns of shared tests.

    async def test_...(way):
        await way.write(guard, "a", token, "value")
        assert await way.stage.fence() == 34

A module asks for them with ``pytest_plugins = ["postgresql_fixtures", "mysql_fixtures", "guard_database",
"guard_stages"]``. Each test finds its server with an empty table ``data`` and without fences.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial

import guard_database
import mysql_ways
import postgresql_ways
import pytest
from mysql_programs import flavours

from fencing_sdk.guards.sql import SqlGuard


class PostgresqlStage:
    """PostgreSQL."""

    dialect, snapshots = "postgresql", True
    """Above READ COMMITTED it refuses what was changed meanwhile."""
    ways = postgresql_ways.WAYS

    def __init__(self, server) -> None:
        self.server = server

    async def fence(self, resource="a"):
        """The fence as others see it, or None when there is no row, or no table."""
        if await self.server.value("SELECT to_regclass('fencing_fence')::text") is None:
            return None
        return await self.server.value("SELECT token FROM fencing_fence WHERE resource = $1", resource)

    async def is_waiting(self):
        """Wait until a transaction waits for the lock of another one."""
        query = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        for _ in range(2_000):
            if await self.server.fetch(query):
                return
            await asyncio.sleep(0.01)
        pytest.fail(f"never: {query}")

    async def no_other_transaction(self, way, transaction):
        """Wait until no other session is in the middle of something."""
        own = await way.pid(transaction)
        query = """
            SELECT 1 FROM pg_stat_activity
            WHERE datname = current_database() AND xact_start IS NOT NULL AND pid NOT IN ($1, pg_backend_pid())
        """
        for _ in range(2_000):
            if not await self.server.fetch(query, own):
                return
            await asyncio.sleep(0.01)
        pytest.fail("a transaction is left")

    def wants_a_retry(self, error) -> bool:
        return postgresql_ways.sqlstate(error) == "40001"

    def waited_too_long(self, error) -> bool:
        return postgresql_ways.sqlstate(error) == "55P03"


class MysqlStage(PostgresqlStage):
    """MySQL or MariaDB."""

    dialect, snapshots = "mysql", False
    ways = mysql_ways.WAYS

    async def fence(self, resource="a"):
        if not await self.server.fetch("SHOW TABLES LIKE 'fencing_fence'"):
            return None
        return await self.server.value("SELECT token FROM fencing_fence WHERE resource = %s", resource)

    async def is_waiting(self):
        await self.server.has_a_waiter()

    async def no_other_transaction(self, way, transaction):
        """Nothing is promised: these servers notice a connection that has ended once they have waited for the row."""

    def wants_a_retry(self, error) -> bool:
        return mysql_ways.code_of(error) in {1213, 1020}

    def waited_too_long(self, error) -> bool:
        return mysql_ways.code_of(error) == 1205


@pytest.fixture(scope="module")
def _mysql_guard_databases(shared_mysql):
    """One database of each for all tests of a module: quicker than one for each test."""
    servers = {}

    def server(flavour):
        if flavour not in servers:
            servers[flavour] = shared_mysql(flavour)
        servers[flavour].database = ""
        servers[flavour].ask("CREATE DATABASE IF NOT EXISTS test_guards")
        servers[flavour].database = "test_guards"
        return servers[flavour]

    yield server
    for one in servers.values():
        one.database = ""
        one.ask("DROP DATABASE IF EXISTS test_guards")


@pytest.fixture
async def mysql_guard_server(mysql_flavour, _mysql_guard_databases):
    """A server of either flavour with an empty table ``data`` and nothing else."""
    return await _emptied(_mysql_guard_databases(mysql_flavour))


async def _emptied(server):
    for (table,) in await server.fetch("SHOW TABLES"):
        await server.execute(f"DROP TABLE `{table}`")
    await server.execute(mysql_ways.DATA)
    return server


@pytest.fixture
def stage_of(request, _mysql_guard_databases):
    """Look at a server from outside; on MySQL the table of fences is there."""
    database = partial(request.getfixturevalue, "_guard_database")

    async def stage(kind):
        if kind == "postgresql":
            return PostgresqlStage(await guard_database.emptied(database()))
        server = await _emptied(_mysql_guard_databases(kind))
        await server.execute(SqlGuard().ddl("mysql"))
        return MysqlStage(server)

    return stage


SOME = [(kind, name) for kind, name in mysql_ways.COLUMNS if name in {"asyncpg", "asyncmy", "session-sync"}]
"""For each server a driver that is awaited, and SQLAlchemy over one that blocks."""


@pytest.fixture(params=SOME, ids="-".join)
async def way(request, stage_of):
    """Two ways to a transaction of each server, for what the server decides; `stage` looks at it from outside."""
    kind, name = request.param
    stage = await stage_of(kind)
    async with postgresql_ways.opened(name, stage.server.url, stage.ways) as way:
        way.stage = stage
        yield way


OWN = [("postgresql", how) for how in ("url", "connection", "connection-psycopg")]
OWN += [(flavour, how) for flavour in flavours() for how in ("url", "connection", "connection-aiomysql")]


@pytest.fixture(params=OWN, ids="-".join)
async def own_guard(request, stage_of):
    """A guard that raises fences by itself, in each way, with a `way` for those who write."""
    kind, how = request.param
    stage = await stage_of(kind)
    async with AsyncExitStack() as stack:

        async def opened(name):
            way = await stack.enter_async_context(postgresql_ways.opened(name, stage.server.url, stage.ways))
            way.stage = stage
            return way

        guard = SqlGuard(stage.server.url if how == "url" else (await opened(how)).engine)
        guard.way = await opened("asyncpg" if kind == "postgresql" else "asyncmy")
        yield guard
