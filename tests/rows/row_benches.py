"""
A database with a table of jobs, for tests of leased rows; one kind for each column of the tests.

A promise to tasks and threads alike is one scenario: see `both_worlds`. Its client and its transactions are those of
the world that it runs in.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import asyncmy
import psycopg
import pymysql
import pytest
from both_worlds import at_once, shown
from mysql_programs import flavours
from mysql_server import USER, MysqlServer
from postgresql_server import PostgresqlServer

import fencing_sdk.rows.sync
from fencing_sdk import BackendRefusedError
from fencing_sdk.rows import row_client, schema_sql

DATABASES = ["sqlite", *(pytest.param(kind, marks=pytest.mark.server) for kind in ("postgresql", *flavours()))]
"""Kinds of databases, each a column of a test that takes a `row_bench`."""
_JOBS = """
CREATE TABLE jobs (
    id {key} PRIMARY KEY, state VARCHAR(20) NOT NULL DEFAULT 'queued', priority INT NOT NULL DEFAULT 0,
    attempts INT NOT NULL DEFAULT 0, result VARCHAR(200), leased_by TEXT
)
"""


class RowBench(Protocol):
    """A database of this test alone."""

    url: str
    world: str
    """``tasks`` or ``threads``."""

    def ask(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run one statement, which writes its values as ``%s``, and return its rows."""
        ...

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Open a transaction of the application, which is committed, or rolled back by an error."""
        ...


class SqliteRowBench:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"sqlite:///{path}"
        self.world = "tasks"

    def ask(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.path, timeout=10)) as connection, connection:
            return connection.execute(statement.replace("%s", "?"), values).fetchall()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, timeout=10, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")


class PostgresqlRowBench:
    def __init__(self, server: PostgresqlServer) -> None:
        self.server = server
        self.url = server.url
        self.world = "tasks"

    def ask(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        for number in range(1, len(values) + 1):
            statement = statement.replace("%s", f"${number}", 1)
        return self.server.ask(statement, *values)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        if self.world == "threads":
            with psycopg.connect(self.url) as blocking:
                yield blocking
            return
        async with self.server.connected() as connection, connection.transaction():
            yield connection


class MysqlRowBench:
    def __init__(self, server: MysqlServer) -> None:
        self.server = server
        self.url = server.url
        self.world = "tasks"

    def ask(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        return self.server.ask(statement, *values)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        address = {"host": "127.0.0.1", "port": self.server.port, "user": USER, "database": self.server.database}
        if self.world == "threads":
            with closing(pymysql.connect(**address)) as blocking:
                try:
                    yield blocking
                except BaseException:
                    blocking.rollback()  # a server that finds a connection closed rolls back a little later
                    raise
                blocking.commit()
            return
        connection = await asyncmy.connect(**address)
        try:
            await connection.begin()
            yield connection
            await connection.commit()
        except BaseException:
            await connection.rollback()  # a server that finds a connection closed rolls back a little later
            raise
        finally:
            connection.close()


@contextmanager
def row_bench(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RowBench]:
    """Yield the database of one *kind*, with an empty table ``jobs`` that has the columns of a lease."""
    bench: RowBench
    if kind == "sqlite":
        bench = SqliteRowBench(tmp_path / "app.db")
    elif kind == "postgresql":
        bench = PostgresqlRowBench(request.getfixturevalue("postgresql_server"))
    else:
        with request.getfixturevalue("shared_mysql")(kind).fresh_database() as server:
            yield with_jobs(MysqlRowBench(server), kind)
        return
    yield with_jobs(bench, kind)


def with_jobs(bench: RowBench, kind: str) -> RowBench:
    """Make the table ``jobs``."""
    keys = {"sqlite": "INTEGER", "postgresql": "BIGINT GENERATED BY DEFAULT AS IDENTITY"}
    bench.ask(_JOBS.format(key=keys.get(kind, "BIGINT AUTO_INCREMENT")))
    for statement in schema_sql("jobs", dialect=bench.url.partition(":")[0]):
        bench.ask(statement)
    return bench


def add_jobs(bench: RowBench, number: int) -> None:
    """Enqueue jobs with the keys from 1 to *number*."""
    bench.ask(f"INSERT INTO jobs (id) VALUES {', '.join(f'({key})' for key in range(1, number + 1))}")


def client_of(bench: RowBench, **options: Any) -> Any:
    """Make a client for the world of the bench, with the words of that for tasks."""
    threads = bench.world == "threads"
    return (
        shown(fencing_sdk.rows.sync.row_client(bench.url, **options)) if threads else row_client(bench.url, **options)
    )


async def refusal(bench: RowBench, **options: Any) -> str:
    """Return why the claim of a row is refused."""
    async with client_of(bench) as db:
        with pytest.raises(BackendRefusedError) as refused:
            await db.rows(**{"table": "jobs", **options}).take(wait=0).acquire()
    return str(refused.value)


def in_both_worlds(scenario: Callable[[RowBench], Coroutine[Any, Any, None]]) -> Any:
    """Make a test of a *scenario* that takes a bench."""

    async def test(bench: RowBench, world: str) -> None:
        bench.world = world
        if world == "tasks":
            await scenario(bench)
        else:
            await asyncio.to_thread(at_once, scenario(bench))

    test.__doc__ = scenario.__doc__
    return pytest.mark.parametrize("world", ["tasks", "threads"])(test)
