"""
Every way to a transaction of MySQL and MariaDB that `SqlGuard` knows, as `postgresql_ways` has those of PostgreSQL.

mysqlclient has to be compiled, so its ways are there only where it is installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from urllib.parse import unquote, urlsplit

import aiomysql
import asyncmy
import postgresql_ways as ways
import pymysql
import pytest
from asyncmy.cursors import DictCursor
from mysql_programs import flavours

DATA = "CREATE TABLE data (resource varbinary(512) PRIMARY KEY, value blob) ENGINE=InnoDB"
LEVEL = "SET SESSION TRANSACTION ISOLATION LEVEL "


def arguments(url: str) -> dict:
    """What the drivers take, for a URL; aiomysql has a name of its own for one."""
    at = urlsplit(url)
    login = {"user": at.username, "password": unquote(at.password or "")}
    return {"host": at.hostname, "port": at.port, "charset": "utf8mb4", **login, "database": at.path[1:]}


def arguments_of_aiomysql(url: str) -> dict:
    given = arguments(url)
    return {"db": given.pop("database"), **given}


class Texts:
    """What is written in its own way here, before the parts of PostgreSQL's ways."""

    put_text, pid_text = "REPLACE INTO data VALUES ({}, {})", "SELECT CONNECTION_ID()"

    async def look(self, transaction, resource):
        found = await super().look(transaction, resource)
        return found.decode() if isinstance(found, bytes) else found


class Asyncmy(Texts, ways.Way):
    """A bare connection for each transaction, whose rows are dictionaries."""

    marks = ("%s", "%s")

    async def connect(self, **options):
        return await asyncmy.connect(**arguments(self.url), cursor_cls=DictCursor, **options)

    @contextlib.asynccontextmanager
    async def begin(self, level=None):
        connection = await self.connect()
        try:
            if level:
                await self.execute(connection, LEVEL + level)
                await connection.commit()
            yield connection
            await connection.commit()
        finally:
            connection.close()
            await asyncio.sleep(0)

    async def execute(self, transaction, statement, *parameters):
        async with transaction.cursor() as cursor:
            await cursor.execute(statement, parameters or None)
            rows = await cursor.fetchall() if cursor.description else []
        return [tuple(row.values()) if isinstance(row, dict) else row for row in rows]


class Aiomysql(Asyncmy):
    """The same with tuples as rows."""

    async def connect(self, **options):
        return await aiomysql.connect(**arguments_of_aiomysql(self.url), **options)


class AiomysqlPool(Aiomysql):
    """What a pool hands out."""

    async def open(self):
        self.pool = await aiomysql.create_pool(minsize=0, maxsize=8, **arguments_of_aiomysql(self.url))

    async def close(self):
        self.pool.terminate()
        await self.pool.wait_closed()

    @contextlib.asynccontextmanager
    async def begin(self, level=None):
        async with self.pool.acquire() as connection:
            await self.execute(connection, LEVEL + (level or "repeatable read"))
            await connection.begin()
            try:
                yield connection
                await connection.commit()
            except BaseException:
                await connection.rollback()
                raise


class PyMysql(Texts, ways.Way):
    """A blocking connection in a worker thread."""

    blocking = True
    marks = ("%s", "%s")

    def connect(self, **options):
        return pymysql.connect(**arguments(self.url), **options)

    @contextlib.asynccontextmanager
    async def begin(self, level=None):
        connection = await asyncio.to_thread(self.connect)
        try:
            if level:
                await self.execute(connection, LEVEL + level)
                await asyncio.to_thread(connection.commit)
            yield connection
            await asyncio.to_thread(connection.commit)
        finally:
            await asyncio.to_thread(connection.close)

    async def execute(self, transaction, statement, *parameters):
        def execute():
            with transaction.cursor() as cursor:
                cursor.execute(statement, parameters or None)
                return cursor.fetchall() if cursor.description else []

        return await asyncio.to_thread(execute)


class MysqlClient(PyMysql):
    """The same with mysqlclient."""

    def connect(self, **options):
        import MySQLdb

        return MySQLdb.connect(**arguments(self.url), **options)


class Alchemy(Texts, ways.Alchemy):
    """SQLAlchemy's AsyncConnection, over asyncmy."""

    scheme, driver = "mysql", "asyncmy"

    @property
    def url_with_driver(self):
        return self.url.replace("mysql://", f"{self.scheme}+{self.driver}://")


class AlchemyOfMariadb(Alchemy):
    """The same over aiomysql, by MariaDB's name, which MySQL takes, too."""

    driver = "aiomysql"


class AlchemySession(Alchemy, ways.AlchemySession):
    """An AsyncSession."""


class AlchemySyncSession(Alchemy, ways.AlchemySyncSession):
    """A blocking Session over PyMySQL, in a worker thread."""

    driver = "pymysql"


class AlchemyMysqlClient(AlchemySyncSession):
    """The same over mysqlclient."""

    driver = "mysqldb"


WAYS = {
    "asyncmy": Asyncmy,
    "aiomysql": Aiomysql,
    "aiomysql-pool": AiomysqlPool,
    "pymysql": PyMysql,
    "connection": Alchemy,
    "connection-aiomysql": AlchemyOfMariadb,
    "session": AlchemySession,
    "session-sync": AlchemySyncSession,
}
if importlib.util.find_spec("MySQLdb"):
    WAYS |= {"mysqlclient": MysqlClient, "session-mysqlclient": AlchemyMysqlClient}


COLUMNS = [("postgresql", way) for way in ways.WAYS] + [(flavour, way) for flavour in flavours() for way in WAYS]
every_way = pytest.mark.parametrize("way", COLUMNS, indirect=True, ids="-".join)
"""Marks a test for all ways to all servers, because the driver decides."""


def opened(name: str, url: str):
    """As `postgresql_ways.opened`."""
    return ways.opened(name, url, WAYS)


def code_of(error: BaseException) -> int | None:
    """The number of a driver's error, or of the one that SQLAlchemy has wrapped."""
    arguments = getattr(error, "orig", error).args
    return arguments[0] if arguments else None
