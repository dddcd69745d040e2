"""A finish in the transaction of every driver that a worker may have, and none where each statement is committed."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any, Self

import aiosqlite
import asyncpg
import mysql_ways
import postgresql_ways as ways
import psycopg
import pytest
from django.db import connections, transaction
from django_bench import known_to_django
from mysql_programs import flavours
from row_benches import RowBench, add_jobs, row_bench
from sqlalchemy.ext.asyncio import create_async_engine
from stays import PATIENCE

import fencing_sdk.rows.sync
from fencing_sdk import StaleTokenError, UsageError, rows

pytest_plugins = ["postgresql_fixtures", "mysql_fixtures"]
pytestmark = pytest.mark.server


def path_of(url: str) -> str:
    return url.partition("///")[2]


class Sqlite3(ways.Way):
    """A blocking connection in a worker thread, which begins transactions by itself."""

    blocking = True

    @asynccontextmanager
    async def begin(self, level: str | None = None) -> AsyncIterator[sqlite3.Connection]:
        with closing(sqlite3.connect(path_of(self.url), timeout=10, check_same_thread=False)) as connection:
            yield connection
            await asyncio.to_thread(connection.commit)


class Aiosqlite(ways.Way):
    """A connection that is awaited."""

    @asynccontextmanager
    async def begin(self, level: str | None = None) -> AsyncIterator[aiosqlite.Connection]:
        async with aiosqlite.connect(path_of(self.url), timeout=10) as connection:
            yield connection
            await connection.commit()


class AlchemyOfSqlite(ways.Alchemy):
    """SQLAlchemy's AsyncConnection, over aiosqlite."""

    scheme, driver = "sqlite", "aiosqlite"


class AlchemySessionOfSqlite(AlchemyOfSqlite, ways.AlchemySession):
    """An AsyncSession."""


class AlchemySyncSessionOfSqlite(ways.AlchemySyncSession):
    """A blocking Session, in a worker thread."""

    scheme, driver = "sqlite", "pysqlite"


WAYS: dict[str, dict[str, type[ways.Way]]] = {
    "sqlite": {
        "sqlite3": Sqlite3,
        "aiosqlite": Aiosqlite,
        "connection": AlchemyOfSqlite,
        "session": AlchemySessionOfSqlite,
        "session-sync": AlchemySyncSessionOfSqlite,
    },
    "postgresql": ways.WAYS,
    **dict.fromkeys(flavours(), mysql_ways.WAYS),
}
COLUMNS = [(kind, name) for kind, found in WAYS.items() for name in found]
KINDS = ["sqlite", "postgresql", *flavours()]


class Worker:
    """A worker of the world that its driver belongs to: it holds a row by a plain handle."""

    def __init__(self, bench: RowBench, way: ways.Way) -> None:
        self.bench, self.way = bench, way
        world: Any = fencing_sdk.rows.sync if way.blocking else rows
        self.db = world.row_client(bench.url)

    async def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return await (asyncio.to_thread if self.way.blocking else _called)(function, *args, **options)

    async def __aenter__(self) -> Self:
        await self.call(self.db.__enter__ if self.way.blocking else self.db.__aenter__)
        self.lease = await self.call(self.db.rows("jobs", where="state = 'queued'").take(wait=PATIENCE).acquire)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.call(self.lease.release)
        await self.call(self.db.close if self.way.blocking else self.db.aclose)

    async def finish(self, transaction: object) -> None:
        await self.call(self.lease.finish, transaction, state="done", result="a 'pdf'")


async def _called(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return await function(*args, **options)


@pytest.fixture
async def worker(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Worker]:
    kind, name = request.param
    with row_bench(kind, request, tmp_path) as bench:
        add_jobs(bench, 1)
        async with ways.opened(name, bench.url, WAYS[kind]) as way, Worker(bench, way) as worker:
            yield worker


every_driver = pytest.mark.parametrize("worker", COLUMNS, indirect=True, ids="-".join)


@every_driver
async def test_a_finish_is_part_of_the_transaction(worker: Worker) -> None:
    bench, way = worker.bench, worker.way
    async with way.begin() as opened:
        await worker.call(worker.lease.admit, opened)
    with pytest.raises(ZeroDivisionError):
        async with way.begin() as opened:
            await worker.finish(opened)
            raise ZeroDivisionError
    assert bench.ask("SELECT state FROM jobs") == [("queued",)]
    async with way.begin() as opened:
        await worker.finish(opened)
    assert bench.ask("SELECT state, result FROM jobs") == [("done", "a 'pdf'")]
    with pytest.raises(UsageError, match="already"):
        async with way.begin() as opened:
            await worker.finish(opened)


@every_driver
async def test_a_stale_finish_is_refused_and_rolled_back(worker: Worker) -> None:
    worker.bench.ask("UPDATE jobs SET lease_token = lease_token + 1")
    for step in (worker.finish, lambda opened: worker.call(worker.lease.admit, opened)):
        with pytest.raises(StaleTokenError) as stale:
            async with worker.way.begin() as opened:
                await step(opened)
        assert (stale.value.resource, stale.value.fence) == ("jobs/1", stale.value.token + 1)
    assert worker.bench.ask("SELECT state FROM jobs") == [("queued",)]


@asynccontextmanager
async def autocommitting(way: ways.Way) -> AsyncIterator[Any]:
    """Yield a connection in the mode in which each statement is committed by itself."""
    async with AsyncExitStack() as stack:
        if isinstance(way, ways.Alchemy):
            engine = create_async_engine(way.url_with_driver, isolation_level="AUTOCOMMIT")
            stack.push_async_callback(engine.dispose)
            yield await stack.enter_async_context(engine.connect())
        elif isinstance(way, Aiosqlite):
            yield await stack.enter_async_context(aiosqlite.connect(path_of(way.url), isolation_level=None))
        elif isinstance(way, Sqlite3):
            own = sqlite3.connect(path_of(way.url), isolation_level=None, check_same_thread=False)
            yield stack.enter_context(closing(own))
        elif isinstance(way, ways.PsycopgAsync):
            yield await stack.enter_async_context(await psycopg.AsyncConnection.connect(way.url, autocommit=True))
        elif isinstance(way, ways.PsycopgSync):
            yield stack.enter_context(psycopg.connect(way.url, autocommit=True))
        elif isinstance(way, ways.Asyncpg):
            connection = await asyncpg.connect(way.url)
            stack.push_async_callback(connection.close)
            yield connection
        else:  # of MySQL
            made = way.connect(autocommit=True)  # type: ignore[attr-defined]
            connection = made if way.blocking else await made
            stack.push_async_callback(asyncio.sleep, 0)
            stack.callback(connection.close)
            yield connection


@pytest.mark.parametrize(
    "worker",
    [(kind, name) for kind, name in COLUMNS if "session" not in name and "pool" not in name],
    indirect=True,
    ids="-".join,
)
async def test_a_connection_that_commits_by_itself_is_refused(worker: Worker) -> None:
    """Before anything is sent: the row is leased afterwards as it was."""
    async with autocommitting(worker.way) as connection:
        for step in (worker.finish, lambda opened: worker.call(worker.lease.admit, opened)):
            with pytest.raises(UsageError, match="begin one first"):
                await step(connection)
    assert worker.bench.ask("SELECT state FROM jobs") == [("queued",)]
    await worker.call(worker.lease.renew)


async def test_threads_are_refused_what_has_to_be_awaited(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with row_bench("sqlite", request, tmp_path) as bench:
        add_jobs(bench, 1)
        async with Worker(bench, Sqlite3(bench.url)) as worker, ways.opened("a", bench.url, {"a": Aiosqlite}) as other:
            async with other.begin() as opened:
                with pytest.raises(UsageError, match="is asynchronous, and this call blocks"):
                    await worker.finish(opened)


# Django


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RowBench]:
    with row_bench(request.param, request, tmp_path) as made:
        add_jobs(made, 1)
        yield made


def test_djangos_connection_is_a_transaction_inside_of_atomic(bench: RowBench) -> None:
    with known_to_django(bench) as using, fencing_sdk.rows.sync.row_client(bench.url) as db:
        connection = connections[using]
        jobs = db.rows("jobs", where="state = 'queued'", rest=0)
        with jobs.take(wait=PATIENCE) as lease:
            with pytest.raises(UsageError, match="begin one first"):
                lease.finish(connection, state="done")
            bench.ask("UPDATE jobs SET lease_token = lease_token + 1")
            with pytest.raises(StaleTokenError), transaction.atomic(using):
                lease.finish(connection, state="done")
            bench.ask("UPDATE jobs SET lease_token = lease_token - 1")
            with transaction.atomic(using):
                lease.admit(connection)
                with connection.cursor() as cursor:
                    cursor.execute("UPDATE jobs SET priority = %s", [7])
                lease.finish(connection, state="done")
    assert bench.ask("SELECT state, priority FROM jobs") == [("done", 7)]
