"""
The database in which a SqlGuard runs its own short transactions: to raise a fence, and to read it.

A guard keeps no connection. For each of these transactions it opens the file in a worker thread, or connects to the
server. So there is nothing to close, nothing belongs to one event loop, and a restart of the server breaks nothing.
A fence is raised once for an acquisition, not for every write. For a pool of connections, pass an engine that has one.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Coroutine
from contextlib import closing
from typing import Protocol, TypeVar, cast
from urllib.parse import unquote

import anyio
import anyio.to_thread

from fencing_sdk._values.extras import install
from fencing_sdk._values.postgresql_url import SCHEMES
from fencing_sdk._values.scopes import move_on_after
from fencing_sdk._values.store_url import split_url
from fencing_sdk._values.unawaited import retrieve
from fencing_sdk.errors import ConfigurationError, UnsupportedError
from fencing_sdk.guards.sql._identifiers import POSTGRESQL, SQLITE
from fencing_sdk.guards.sql._own_server import CLOSE_PATIENCE, PostgresqlDatabase
from fencing_sdk.guards.sql._protocols import AlchemyAsyncEngine
from fencing_sdk.guards.sql._steps import Steps
from fencing_sdk.guards.sql._transaction import Transaction, perform_sync

T = TypeVar("T")

WRITER_PATIENCE = 30.0
"""Seconds that a transaction of the guard waits for another writer. A caller that is cancelled stops waiting."""

Work = Callable[[Transaction], Steps[T]]


class OwnDatabase(Protocol):
    """Runs work in a transaction of its own, which is committed unless the work raises."""

    @property
    def dialect(self) -> str:
        """SQLAlchemy's name of the dialect."""
        ...

    @property
    def identity(self) -> str | None:
        """See `SqlGuard.database`."""
        ...

    async def run(self, work: Work[T]) -> T: ...


class NoDatabase:
    """A guard without a database of its own. It works in the transactions of its callers only."""

    dialect = SQLITE
    identity = None

    async def run(self, work: Work[T]) -> T:  # noqa: ARG002  (there is no transaction to run it in)
        """
        Raise, because there is no database.

        Raises:
            UnsupportedError: always.
        """
        msg = (
            "SqlGuard() has no database of its own; pass SqlGuard('sqlite:///app.db'), "
            "SqlGuard('postgresql://host/app') or SqlGuard(async_engine)"
        )
        raise UnsupportedError(msg)


class SqliteDatabase:
    """An SQLite file, through the standard library."""

    dialect = SQLITE
    identity = None

    def __init__(self, path: str) -> None:
        self._path = path

    async def run(self, work: Work[T]) -> T:
        """Run *work* in a worker thread. If the caller is cancelled, the thread goes on to its end."""
        return await anyio.to_thread.run_sync(self._run, work, abandon_on_cancel=True)

    def _run(self, work: Work[T]) -> T:
        with closing(sqlite3.connect(self._path, timeout=WRITER_PATIENCE, isolation_level=None)) as connection:
            connection.execute("BEGIN")  # the first statement of the work waits for the lock that it needs
            result = perform_sync(connection, work)
            connection.execute("COMMIT")  # after an error, closing rolls back
            return result


class _SyncConnection(Protocol):
    def exec_driver_sql(self, statement: str, /) -> object: ...


class EngineDatabase:
    """The database of SQLAlchemy's AsyncEngine."""

    identity = None
    """Unknown: an argument of the engine that cannot be read here may lead to another database than its URL."""

    def __init__(self, engine: AlchemyAsyncEngine) -> None:
        self._engine = engine
        self.dialect = engine.dialect.name

    async def run(self, work: Work[T]) -> T:
        """Run *work* on a connection of the engine's pool."""
        if self.dialect != POSTGRESQL:
            return await self._run(perform_sync, work)
        return await _run_to_end(self._run(_at_read_committed, work))

    async def _run(self, perform: Callable[[object, Work[T]], T], work: Work[T]) -> T:
        async with self._engine.begin() as connection:
            result: T = await connection.run_sync(perform, work)
            return result


def _at_read_committed(connection: object, work: Work[T]) -> T:
    """At other levels, to which the engine may be set, PostgreSQL refuses a fence that was raised meanwhile."""
    cast("_SyncConnection", connection).exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
    return perform_sync(connection, work)


async def _run_to_end(work: Coroutine[object, object, T]) -> T:
    """
    Run *work* in a task of its own. If the caller is cancelled, cancel the task once and wait for its end.

    A cancel scope cancels again and again until its body ends. SQLAlchemy cuts the connection then, without cancelling
    the statement at the server, which would go on waiting in a transaction that no client ends.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        with move_on_after(CLOSE_PATIENCE, shield=True):
            await asyncio.wait([task])
        task.add_done_callback(retrieve)
        raise


def own_database(connect: object) -> OwnDatabase:
    """
    Make the database for *connect*: None, a path, a URL or an AsyncEngine.

    Raises:
        ConfigurationError: it is none of these, or names no file.
    """
    if connect is None:
        return NoDatabase()
    if isinstance(connect, os.PathLike):
        connect = os.fspath(connect)
    if isinstance(connect, str):
        return PostgresqlDatabase(connect) if connect.partition("://")[0] in SCHEMES else SqliteDatabase(_path(connect))
    if hasattr(connect, "sync_engine") and hasattr(connect, "begin"):
        return EngineDatabase(cast("AlchemyAsyncEngine", connect))
    msg = (
        "connect must be a path, a URL such as 'sqlite:///app.db' or 'postgresql://host/app', or SQLAlchemy's "
        f"AsyncEngine, not {type(connect).__name__}"
    )
    raise ConfigurationError(msg)


def _path(text: str) -> str:
    path = _path_of_url(text) if "://" in text else text
    if path in {"", ":memory:"} or "\0" in path:
        msg = "SqlGuard needs a file, such as sqlite:///app.db: only one connection can see a database in memory"
        raise ConfigurationError(msg)
    return path


def _path_of_url(url: str) -> str:
    scheme = url.partition("://")[0]
    if "+" in scheme:
        msg = (
            "drop the '+driver' of the URL (postgresql://host/app, sqlite:///app.db), or pass SQLAlchemy's engine: "
            f"SqlGuard(create_async_engine(url)); if it is missing: {install('sqlalchemy')}"
        )
        raise ConfigurationError(msg)
    parts = split_url(url)
    if scheme != "sqlite" or parts.user is not None or parts.hosts or parts.query:
        msg = "write sqlite:///relative.db or sqlite:////absolute.db, without options, or postgresql://host/database"
        raise ConfigurationError(msg)
    return unquote(parts.path.removeprefix("/"), errors="surrogateescape")
