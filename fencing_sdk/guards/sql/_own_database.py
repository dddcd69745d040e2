"""
Where a SqlGuard opens short transactions of its own: to raise a fence, and to tell it.

No connection of ours is kept. A file is opened anew in a worker thread, and a server is connected to
anew, for each of them: there is nothing to close, nothing that belongs to one event loop, nothing
that a restart of the server breaks. A fence is raised once for an acquisition, not for every write;
who wants a pool for that passes an engine that has one.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Coroutine
from contextlib import closing
from typing import Protocol, TypeVar, cast
from urllib.parse import unquote, urlsplit

import anyio
import anyio.to_thread

from fencing_sdk.errors import ConfigurationError, UnsupportedError
from fencing_sdk.guards.sql._accepted import AlchemyAsyncEngine
from fencing_sdk.guards.sql._names import POSTGRESQL, SQLITE
from fencing_sdk.guards.sql._server import LEAVING, Server
from fencing_sdk.guards.sql._steps import Steps
from fencing_sdk.guards.sql._transaction import Transaction, perform_sync

T = TypeVar("T")

PATIENCE = 30.0
"""Seconds that a transaction of ours waits for another writer. A caller that is cancelled does not wait for that."""

Work = Callable[[Transaction], Steps[T]]


class Database(Protocol):
    """Runs some work in a transaction of its own, committed unless it raises."""

    @property
    def dialect(self) -> str:
        """SQLAlchemy's name of the database's kind."""
        ...

    @property
    def place(self) -> str | None:
        """Who connects to which database of which servers, where that is known for certain."""
        ...

    async def run(self, work: Work[T]) -> T: ...


class Nowhere:
    """A guard that was given no database: it lives in its callers' transactions alone."""

    dialect = SQLITE
    place = None

    async def run(self, work: Work[T]) -> T:  # noqa: ARG002  (there is no transaction to do it in)
        """Raise: there is no place for a transaction."""
        msg = (
            "SqlGuard() has no database of its own; pass SqlGuard('sqlite:///app.db'), "
            "SqlGuard('postgresql://host/app') or SqlGuard(async_engine)"
        )
        raise UnsupportedError(msg)


class File:
    """An SQLite file, through the standard library."""

    dialect = SQLITE
    place = None

    def __init__(self, path: str) -> None:
        self._path = path

    async def run(self, work: Work[T]) -> T:
        """Run *work* in a worker thread. A caller that is cancelled leaves the thread to finish."""
        return await anyio.to_thread.run_sync(self._run, work, abandon_on_cancel=True)

    def _run(self, work: Work[T]) -> T:
        with closing(sqlite3.connect(self._path, timeout=PATIENCE, isolation_level=None)) as connection:
            connection.execute("BEGIN")  # the work's first statement takes the lock it needs, and waits for it
            result = perform_sync(connection, work)
            connection.execute("COMMIT")  # after an error, closing rolls back
            return result


class _SyncConnection(Protocol):
    def exec_driver_sql(self, statement: str, /) -> object: ...


class Engine:
    """An AsyncEngine of SQLAlchemy."""

    place = None
    """Not known: what an engine was told besides its URL may lead elsewhere, and is not to be seen."""

    def __init__(self, engine: AlchemyAsyncEngine) -> None:
        self._engine = engine
        self.dialect = engine.dialect.name

    async def run(self, work: Work[T]) -> T:
        """Run *work* on a connection of the engine's pool."""
        if self.dialect != POSTGRESQL:
            return await self._run(perform_sync, work)
        return await _cancelled_once(self._run(_at_read_committed, work))

    async def _run(self, perform: Callable[[object, Work[T]], T], work: Work[T]) -> T:
        async with self._engine.begin() as connection:
            result: T = await connection.run_sync(perform, work)
            return result


def _at_read_committed(connection: object, work: Work[T]) -> T:
    """The engine may be set to a level at which a change that was committed meanwhile is an error."""
    cast("_SyncConnection", connection).exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
    return perform_sync(connection, work)


async def _cancelled_once(work: Coroutine[object, object, T]) -> T:
    """
    Await *work*, in a task of its own, and when this is cancelled, see it to its end.

    A cancel scope cancels again and again until it is left. SQLAlchemy takes that for a reason to cut
    the connection, and the statement would wait on at the server, in a transaction that nobody ends.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        with anyio.move_on_after(LEAVING, shield=True):
            await asyncio.wait([task])
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody asks for it any more
        raise


def database(connect: object) -> Database:
    """
    Choose by what *connect* is: None, a path, a URL or an AsyncEngine.

    Raises:
        ConfigurationError: it is none of these, or names no file.
    """
    if connect is None:
        return Nowhere()
    if isinstance(connect, os.PathLike):
        connect = os.fspath(connect)
    if isinstance(connect, str):
        return Server(connect) if connect.partition("://")[0] in _SERVERS else File(_path(connect))
    if hasattr(connect, "sync_engine") and hasattr(connect, "begin"):
        return Engine(cast("AlchemyAsyncEngine", connect))
    msg = (
        "connect must be a path, a URL such as 'sqlite:///app.db' or 'postgresql://host/app', or SQLAlchemy's "
        f"AsyncEngine, not {type(connect).__name__}"
    )
    raise ConfigurationError(msg)


_SERVERS = {"postgresql", "postgres"}


def _path(text: str) -> str:
    path = _path_of_url(text) if "://" in text else text
    if path in {"", ":memory:"} or "\0" in path:
        msg = "SqlGuard needs a file, such as sqlite:///app.db: a database in memory is seen by one connection alone"
        raise ConfigurationError(msg)
    return path


def _path_of_url(url: str) -> str:
    parts = urlsplit(url)
    if "+" in parts.scheme:
        msg = (
            "drop the '+driver' of the URL (postgresql://host/app, sqlite:///app.db), or pass SQLAlchemy's engine: "
            "SqlGuard(create_async_engine(url)); if it is missing: pip install 'fencing-sdk[sqlalchemy]'"
        )
        raise ConfigurationError(msg)
    if parts.scheme != "sqlite" or parts.netloc or parts.query or parts.fragment:
        msg = "write sqlite:///relative.db or sqlite:////absolute.db, without options, or postgresql://host/database"
        raise ConfigurationError(msg)
    return unquote(parts.path.removeprefix("/"), errors="surrogateescape")
