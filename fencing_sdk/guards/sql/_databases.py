"""
The dialects that a SqlGuard knows, and the database in which it runs its own short transactions.

In these it raises a fence, and reads it.

A guard keeps no connection. For each of these transactions it opens the file in a worker thread, or connects to the
server. So there is nothing to close, nothing belongs to one event loop, and a restart of the server breaks nothing.
A fence is raised once for an acquisition, not for every write. For a pool of connections, pass an engine that has one.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Protocol, TypeVar, cast, runtime_checkable
from urllib.parse import unquote

import anyio
import anyio.to_thread

from fencing_sdk._http.tls import complaint_about
from fencing_sdk._mysql.url import SCHEMES as MYSQL_SCHEMES
from fencing_sdk._mysql.url import MysqlUrl, read_mysql_query
from fencing_sdk._values.drivers import install
from fencing_sdk._values.tasks import move_on_after, retrieve
from fencing_sdk._values.url import SCHEMES, TLS_FILES, read_postgresql_url, split_url
from fencing_sdk.errors import ConfigurationError, UnsupportedError
from fencing_sdk.guards.sql._fence_table import FenceTable
from fencing_sdk.guards.sql._mysql import MysqlFences
from fencing_sdk.guards.sql._postgresql import PostgresqlFences
from fencing_sdk.guards.sql._protocols import MYSQL, POSTGRESQL, SQLITE, AlchemyAsyncEngine, AsyncpgConnection
from fencing_sdk.guards.sql._sqlite import SqliteFences
from fencing_sdk.guards.sql._transaction import Steps, Transaction, dialect_of, perform, perform_sync

if TYPE_CHECKING:
    from fencing_sdk._mysql.driver import MysqlDriverConnection

T = TypeVar("T")

DIALECTS: Mapping[str, type[FenceTable]] = {
    kind.dialect: kind for kind in (SqliteFences, PostgresqlFences, MysqlFences)
}
"""What each dialect does in its own way, by SQLAlchemy's name of the dialect."""

_CONNECT_PATIENCE = 30.0
"""Seconds that the opening of a connection may take."""
CLOSE_PATIENCE = 1.0
"""Seconds for cancelling a statement on the server and closing the connection."""


class _OwnConnection(AsyncpgConnection, Protocol):
    async def execute(self, query: str, /) -> object: ...

    async def close(self) -> None: ...


class _Connect(Protocol):
    async def __call__(
        self, dsn: str | None, /, *, timeout: float, statement_cache_size: int, **parts: object
    ) -> _OwnConnection: ...


class PostgresqlDatabase:
    """The database that a ``postgresql://`` URL names."""

    dialect = POSTGRESQL

    def __init__(self, url: str) -> None:
        """
        Read *url*, without I/O.

        Raises:
            ConfigurationError: it cannot be read, or asyncpg is missing. The message never repeats the URL.
        """
        self._url = read_postgresql_url(url)
        self.identity = self._url.identity()
        try:
            import asyncpg  # noqa: PLC0415  (a user of SQLite may not have it)
        except ModuleNotFoundError as error:
            msg = f"{error.name} is not installed; run: {install('postgresql')}"
            raise ConfigurationError(msg) from error
        self._connect = cast("_Connect", asyncpg.connect)

    async def run(self, work: Callable[[Transaction], Steps[T]]) -> T:
        """
        Run *work* in a transaction of its own.

        Raises:
            ConfigurationError: a file that the URL names for TLS cannot be used.
        """
        # Behind a proxy that pools transactions, a prepared statement may be another client's, so the guard caches no
        # statement.
        try:
            connection = await self._connect(
                self._url.options_dsn,
                timeout=_CONNECT_PATIENCE,
                statement_cache_size=0,
                **self._url.arguments(),
            )
        except (FileNotFoundError, ssl.SSLError) as error:  # which name no file
            password = self._url.file("sslpassword")
            complaint = complaint_about(*map(self._url.file, TLS_FILES), names=TLS_FILES, password=password)
            if complaint is None:
                raise
            raise ConfigurationError(complaint) from error
        try:
            # At other levels PostgreSQL refuses to raise a fence that another transaction raised meanwhile.
            await connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
            result = await perform(connection, work)
            await connection.execute("COMMIT")  # after an error, closing rolls back
            return result
        finally:
            with move_on_after(CLOSE_PATIENCE, shield=True):
                await connection.close()  # if a statement is under way, the driver first cancels it at the server


class MysqlDatabase:
    """The database that a ``mysql://`` or ``mariadb://`` URL names."""

    dialect = MYSQL

    def __init__(self, url: str) -> None:
        """
        Read *url*, without I/O.

        Raises:
            ConfigurationError: it cannot be read, or asyncmy is missing. The message never repeats the URL.
        """
        self._url = read_mysql_query(url)
        self.identity = self._url.identity()
        try:
            from fencing_sdk._mysql import driver  # noqa: PLC0415  (a user of SQLite may not have asyncmy)
        except ModuleNotFoundError as error:
            raise ConfigurationError(str(error)) from error
        self._driver = driver

    async def run(self, work: Callable[[Transaction], Steps[T]]) -> T:
        """Run *work* in a transaction of its own, at READ COMMITTED."""
        return await self._on_a_connection(lambda connection: self._transact(connection, work))

    async def run_apart(self, statement: str) -> None:
        """See `RunsApart`."""
        await self._on_a_connection(lambda connection: self._driver.ask(connection, statement))

    async def _transact(self, connection: MysqlDriverConnection, work: Callable[[Transaction], Steps[T]]) -> T:
        await self._driver.ask(connection, "START TRANSACTION")
        result = await perform(connection, work)
        await self._driver.ask(connection, "COMMIT")  # after an error, closing rolls back
        return result

    async def _on_a_connection(self, use: Callable[[MysqlDriverConnection], Awaitable[T]]) -> T:
        connection = await self._connect()
        try:
            result = await use(connection)
            with move_on_after(CLOSE_PATIENCE, shield=True):
                await connection.ensure_closed()
            return result
        finally:
            connection.close()

    async def _connect(self) -> MysqlDriverConnection:
        """Connect to the first host that takes the connection."""
        *others, last = self._url.each_host()
        for url in others:
            try:
                return await self._dial(url)
            except (OSError, self._driver.ServerError):
                continue
        return await self._dial(last)

    async def _dial(self, url: MysqlUrl) -> MysqlDriverConnection:
        """In a task of its own: asyncmy may swallow a cancellation, and waits for an answer without a limit."""
        task = asyncio.ensure_future(self._driver.connect(url, patience=_CONNECT_PATIENCE))
        try:
            await asyncio.wait([task], timeout=_CONNECT_PATIENCE)
            if task.done():
                return task.result()
            msg = f"no answer to the login within {_CONNECT_PATIENCE:g} s"
            raise TimeoutError(msg)
        finally:
            if not task.done():
                task.add_done_callback(_close_late)
                task.cancel()


def _close_late(dialing: asyncio.Task[MysqlDriverConnection]) -> None:
    if not dialing.cancelled() and dialing.exception() is None:
        dialing.result().close()


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


@runtime_checkable
class RunsApart(Protocol):
    """A database in which a statement would commit the transaction in which it stands."""

    async def run_apart(self, statement: str) -> None:
        """Run *statement* on a connection without a transaction."""
        ...


class NoDatabase:
    """A guard without a database of its own. It works in the transactions of its callers only."""

    dialect = SQLITE
    identity = None

    async def run(self, work: Work[T]) -> T:  # noqa: ARG002  (there is no transaction to run it in)
        """Refuse, because there is no database."""
        msg = (
            "SqlGuard() has no database of its own; pass SqlGuard('sqlite:///app.db'), "
            "SqlGuard('postgresql://host/app'), SqlGuard('mysql://user@host/app') or SqlGuard(async_engine)"
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
        self.dialect = dialect_of(engine.dialect.name)

    async def run(self, work: Work[T]) -> T:
        """Run *work* on a connection of the engine's pool."""
        if self.dialect == SQLITE:
            return await self._run(perform_sync, work)
        return await _run_to_end(self._run(_at_read_committed, work))

    async def run_apart(self, statement: str) -> None:
        """See `RunsApart`. The statement is the first of its transaction."""

        def run(connection: object, statement: str) -> None:
            cast("_SyncConnection", connection).exec_driver_sql(statement)

        async with self._engine.begin() as connection:
            await connection.run_sync(run, statement)

    async def _run(self, perform: Callable[[object, Work[T]], T], work: Work[T]) -> T:
        async with self._engine.begin() as connection:
            result: T = await connection.run_sync(perform, work)
            return result


def _at_read_committed(connection: object, work: Work[T]) -> T:
    """At other levels, to which the engine may be set, a server may refuse a fence that was raised meanwhile."""
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
        scheme = connect.partition("://")[0]
        if scheme in MYSQL_SCHEMES:
            return MysqlDatabase(connect)
        return PostgresqlDatabase(connect) if scheme in SCHEMES else SqliteDatabase(_path(connect))
    if hasattr(connect, "sync_engine") and hasattr(connect, "begin"):
        return EngineDatabase(cast("AlchemyAsyncEngine", connect))
    msg = (
        "connect must be a path, a URL such as 'sqlite:///app.db', 'postgresql://host/app' or 'mysql://user@host/app', "
        f"or SQLAlchemy's AsyncEngine, not {type(connect).__name__}"
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
            "drop the '+driver' of the URL (postgresql://host/app, mysql://user@host/app, sqlite:///app.db), or pass "
            f"SQLAlchemy's engine: SqlGuard(create_async_engine(url)); if it is missing: {install('sqlalchemy')}"
        )
        raise ConfigurationError(msg)
    parts = split_url(url)
    if scheme != "sqlite" or parts.user is not None or parts.hosts or parts.query:
        msg = (
            "write sqlite:///relative.db or sqlite:////absolute.db, without options, or postgresql://host/database, "
            "or mysql://user@host/database"
        )
        raise ConfigurationError(msg)
    return unquote(parts.path.removeprefix("/"), errors="surrogateescape")
