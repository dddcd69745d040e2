"""
Every way to a transaction of PostgreSQL that `SqlGuard` knows, under one small interface for tests.

    async with way.begin("serializable") as transaction:
        await way.admit(guard, transaction, "a", token)
        await way.put(transaction, "a", "value")
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import asyncpg
import psycopg
from psycopg.rows import dict_row
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

DATA = "CREATE TABLE data (resource text PRIMARY KEY, value text)"
PUT = "INSERT INTO data VALUES ({}, {}) ON CONFLICT (resource) DO UPDATE SET value = excluded.value"
GET = "SELECT value FROM data WHERE resource = {}"


class Way:
    """One way. `open` and `close` belong to one event loop."""

    marks = ("$1", "$2")
    blocking = False
    put_text, pid_text = PUT, "SELECT pg_backend_pid()"

    def __init__(self, url: str) -> None:
        self.url = url

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def begin(self, level: str | None = None) -> Any:
        """A transaction on a connection of its own, committed unless the body raises."""
        raise NotImplementedError

    async def execute(self, transaction: Any, statement: str, *parameters: Any) -> Any:
        raise NotImplementedError

    async def admit(self, guard: Any, transaction: Any, resource: str, token: int) -> None:
        if self.blocking:
            await asyncio.to_thread(guard.admit_sync, transaction, resource, token)
        else:
            await guard.admit(transaction, resource, token)

    async def admit_all(self, guard: Any, transaction: Any, tokens: Mapping[str, int]) -> None:
        if self.blocking:
            await asyncio.to_thread(guard.admit_all_sync, transaction, tokens)
        else:
            await guard.admit_all(transaction, tokens)

    async def put(self, transaction: Any, resource: str, value: str) -> None:
        await self.execute(transaction, self.put_text.format(*self.marks), resource, value)

    async def look(self, transaction: Any, resource: str) -> str | None:
        """Read, and so fix what the transaction sees at the higher levels."""
        rows = await self.execute(transaction, GET.format(self.marks[0]), resource)
        return rows[0][0] if rows else None

    async def pid(self, transaction: Any) -> int:
        return (await self.execute(transaction, self.pid_text))[0][0]

    async def write(self, guard: Any, resource: str, token: int, value: str) -> None:
        async with self.begin() as transaction:
            await self.admit(guard, transaction, resource, token)
            await self.put(transaction, resource, value)

    async def write_all(self, guard: Any, tokens: Mapping[str, int], values: Mapping[str, str]) -> None:
        async with self.begin() as transaction:
            await self.admit_all(guard, transaction, tokens)
            for resource, value in values.items():
                await self.put(transaction, resource, value)

    async def read(self, resource: str) -> str | None:
        async with self.begin() as transaction:
            return await self.look(transaction, resource)


class Asyncpg(Way):
    """A bare connection for each transaction."""

    @contextlib.asynccontextmanager
    async def begin(self, level=None):
        connection = await asyncpg.connect(self.url)
        try:
            async with connection.transaction(isolation=level.replace(" ", "_") if level else None):
                yield connection
        finally:
            await connection.close()

    async def execute(self, transaction, statement, *parameters):
        return await transaction.fetch(statement, *parameters)


class AsyncpgPool(Asyncpg):
    """What a pool hands out: a proxy."""

    async def open(self):
        self.pool = await asyncpg.create_pool(self.url, min_size=0, max_size=8)

    async def close(self):
        await self.pool.close()

    @contextlib.asynccontextmanager
    async def begin(self, level=None):
        async with self.pool.acquire() as connection:
            async with connection.transaction(isolation=level.replace(" ", "_") if level else None):
                yield connection


class PsycopgAsync(Way):
    """An asynchronous connection whose rows are dictionaries. Connections are used again."""

    marks = ("%s", "%s")

    async def open(self):
        self.idle = []

    async def close(self):
        for connection in self.idle:
            await connection.close()

    @contextlib.asynccontextmanager
    async def begin(self, level=None):
        if self.idle:
            connection = self.idle.pop()
        else:
            connection = await psycopg.AsyncConnection.connect(self.url, row_factory=dict_row)
        try:
            await connection.set_isolation_level(level and psycopg.IsolationLevel[level.upper().replace(" ", "_")])
            yield connection
            await connection.commit()
        except BaseException:
            await connection.close()
            raise
        self.idle.append(connection)

    async def execute(self, transaction, statement, *parameters):
        async with transaction.cursor(row_factory=psycopg.rows.tuple_row) as cursor:
            await cursor.execute(statement, parameters or None)
            return await cursor.fetchall() if cursor.description else []


class PsycopgSync(Way):
    """A blocking connection in a worker thread."""

    blocking = True
    marks = ("%s", "%s")

    @contextlib.asynccontextmanager
    async def begin(self, level=None):
        connection = await asyncio.to_thread(psycopg.connect, self.url)
        if level:
            connection.isolation_level = psycopg.IsolationLevel[level.upper().replace(" ", "_")]
        try:
            yield connection
            await asyncio.to_thread(connection.commit)
        finally:
            await asyncio.to_thread(connection.close)

    async def execute(self, transaction, statement, *parameters):
        def execute():
            cursor = transaction.execute(statement, parameters or None)
            return cursor.fetchall() if cursor.description else []

        return await asyncio.to_thread(execute)


class Alchemy(Way):
    """SQLAlchemy's AsyncConnection, over asyncpg."""

    scheme, driver = "postgresql", "asyncpg"
    marks = (":a", ":b")

    async def open(self):
        self.engine = self.make_engine()

    def make_engine(self, **options):
        return create_async_engine(self.url_with_driver, **options)

    @property
    def url_with_driver(self):
        return self.url.replace(f"{self.scheme}://", f"{self.scheme}+{self.driver}://")

    async def close(self):
        await self.engine.dispose()

    @contextlib.asynccontextmanager
    async def begin(self, level=None):
        async with self.engine.connect() as connection:
            if level:
                await connection.execution_options(isolation_level=level.upper())
            async with connection.begin():
                yield connection

    async def execute(self, transaction, statement, *parameters):
        result = await transaction.execute(text(statement), dict(zip("ab", parameters, strict=False)))
        return list(result) if result.returns_rows else []


class AlchemyPsycopg(Alchemy):
    """The same over psycopg."""

    driver = "psycopg"


class AlchemySession(Alchemy):
    """An AsyncSession."""

    @contextlib.asynccontextmanager
    async def begin(self, level=None):
        async with AsyncSession(self.engine) as session, session.begin():
            if level:
                await session.connection(execution_options={"isolation_level": level.upper()})
            yield session


class AlchemySyncSession(Alchemy):
    """A blocking Session over psycopg, in a worker thread."""

    blocking, driver = True, "psycopg"

    async def open(self):
        self.engine = create_engine(self.url_with_driver)

    async def close(self):
        await asyncio.to_thread(self.engine.dispose)

    @contextlib.asynccontextmanager
    async def begin(self, level=None):
        session = Session(self.engine)
        if level:
            await asyncio.to_thread(session.connection, execution_options={"isolation_level": level.upper()})
        try:
            yield session
            await asyncio.to_thread(session.commit)
        finally:
            await asyncio.to_thread(session.close)

    async def execute(self, transaction, statement, *parameters):
        def execute():
            result = transaction.execute(text(statement), dict(zip("ab", parameters, strict=False)))
            return list(result) if result.returns_rows else []

        return await asyncio.to_thread(execute)


WAYS = {
    "asyncpg": Asyncpg,
    "asyncpg-pool": AsyncpgPool,
    "psycopg": PsycopgAsync,
    "psycopg-sync": PsycopgSync,
    "connection": Alchemy,
    "connection-psycopg": AlchemyPsycopg,
    "session": AlchemySession,
    "session-sync": AlchemySyncSession,
}


@contextlib.asynccontextmanager
async def opened(name: str, url: str, ways: Mapping[str, type[Way]] = WAYS):
    way = ways[name](url)
    await way.open()
    try:
        yield way
    finally:
        await way.close()


def sqlstate(error: BaseException) -> str | None:
    """The SQLSTATE of a driver's error, or of the one that SQLAlchemy has wrapped."""
    return getattr(getattr(error, "orig", error), "sqlstate", None)
