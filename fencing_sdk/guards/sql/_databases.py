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
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import unquote

import anyio
import anyio.to_thread

from fencing_sdk._http.tls import complaint_about
from fencing_sdk._mysql import READ_ONLY, ask_for, read_only, values_of
from fencing_sdk._mysql.url import SCHEMES as MYSQL_SCHEMES
from fencing_sdk._mysql.url import MysqlUrl, read_mysql_query
from fencing_sdk._values.drivers import IDLE_LIMIT, install, missing
from fencing_sdk._values.tasks import first_in_order, move_on_after, retrieve, start_task
from fencing_sdk._values.url import SCHEMES, TLS_FILES, PostgresqlUrl, read_postgresql_url, split_url
from fencing_sdk.errors import BackendUnavailableError, ConfigurationError
from fencing_sdk.guards.sql._fence_table import FenceTable, SqliteFences
from fencing_sdk.guards.sql._mysql import MysqlFences
from fencing_sdk.guards.sql._postgresql import PostgresqlFences
from fencing_sdk.guards.sql._transaction import (
    MYSQL,
    POSTGRESQL,
    SQLITE,
    Transaction,
    dialect_of,
    perform,
    perform_sync,
)

if TYPE_CHECKING:
    from fencing_sdk._mysql.driver import MysqlDriverConnection

T = TypeVar("T")

DIALECTS: Mapping[str, type[FenceTable]] = {
    kind.dialect: kind for kind in (SqliteFences, PostgresqlFences, MysqlFences)
}
"""The table of each dialect, by SQLAlchemy's name of it."""

Work: TypeAlias = Callable[[Transaction], Coroutine[Any, Any, T]]

_CONNECT_PATIENCE = 30.0
"""Seconds that the opening of a connection may take."""
_PAUSE = 3
"""Seconds for which a client may be silent in a transaction. Else one that froze there would keep a fence locked."""
_READ_COMMITTED = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"
CLOSE_PATIENCE = 1.0
"""Seconds for cancelling a statement on the server and closing the connection."""


def _takes_no_writes(place: str) -> BackendUnavailableError:
    return BackendUnavailableError("SqlGuard", "connect", f"{place} takes no writes, nor does any other host")


async def _first_writer(
    hosts: Sequence[Any], dial: Callable[..., Coroutine[Any, Any, T]], close: Callable[[T], object]
) -> T:
    """
    Connect to all *hosts* at once, and return the connection to the first in their order that takes writes.

    Raises:
        Exception: that of the last host.
    """

    def blame(failures: Sequence[Exception]) -> Exception | None:
        return failures[-1] if len(failures) == len(hosts) else None

    return await first_in_order([dial(host, among_others=len(hosts) > 1) for host in hosts], blame, close)


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
            raise ConfigurationError(missing(error.name, "postgresql")) from error
        self._connect, self._not_matched = asyncpg.connect, asyncpg.TargetServerAttributeNotMatched

    async def run(self, work: Work[T]) -> T:
        """
        Run *work* in a transaction of its own.

        Raises:
            ConfigurationError: a file that the URL names for TLS cannot be used.
        """
        connection = await _first_writer(self._url.each_host(), self._dial, lambda opened: opened.terminate())
        try:
            # At other levels PostgreSQL refuses to raise a fence that another transaction raised meanwhile.
            await connection.execute(f"BEGIN ISOLATION LEVEL READ COMMITTED; {IDLE_LIMIT}")
            result = await perform(connection, work)
            await connection.execute("COMMIT")  # after an error, closing rolls back
            return result
        finally:
            with move_on_after(CLOSE_PATIENCE, shield=True):
                await connection.close()  # if a statement is under way, the driver first cancels it at the server

    async def _dial(self, url: PostgresqlUrl, *, among_others: bool) -> Any:
        # Behind a proxy that pools transactions, a prepared statement may be another client's, so the guard caches no
        # statement.
        options: dict[str, object] = {"timeout": _CONNECT_PATIENCE, "statement_cache_size": 0}
        if among_others:
            options["target_session_attrs"] = "read-write"
        try:
            return await self._connect(url.options_dsn, **options, **url.arguments())
        except (FileNotFoundError, ssl.SSLError) as error:  # which name no file
            password = url.file("sslpassword")
            complaint = complaint_about(*map(url.file, TLS_FILES), names=TLS_FILES, password=password)
            if complaint is None:
                raise
            raise ConfigurationError(complaint) from error
        except self._not_matched as error:
            raise _takes_no_writes(url.place) from error


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

    async def run(self, work: Work[T]) -> T:
        """Run *work* in a transaction of its own, at READ COMMITTED."""
        async with self._connected() as connection:
            await self._driver.ask(connection, f"SET wait_timeout = {_PAUSE}")
            await self._driver.ask(connection, "START TRANSACTION")
            result = await perform(connection, work)
            await self._driver.ask(connection, "COMMIT")  # after an error, closing rolls back
            return result

    async def create(self, ddl: str) -> None:
        """Create the table on a connection without a transaction, which the statement would commit."""
        async with self._connected() as connection:
            await self._driver.ask(connection, ddl)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[MysqlDriverConnection]:
        connection = await _first_writer(self._url.each_host(), self._dial_host, lambda opened: opened.close())
        try:
            yield connection
            with move_on_after(CLOSE_PATIENCE, shield=True):
                await connection.ensure_closed()
        finally:
            connection.close()

    async def _dial_host(self, url: MysqlUrl, *, among_others: bool) -> MysqlDriverConnection:
        connection = await self._dial(url)
        if among_others:
            try:
                (found,) = await self._driver.ask(connection, ask_for(*READ_ONLY))
            except BaseException:
                connection.close()
                raise
            if read_only(values_of(found)) is not None:
                connection.close()
                raise _takes_no_writes(url.place)
        return connection

    async def _dial(self, url: MysqlUrl) -> MysqlDriverConnection:
        """Connect in a task: asyncmy may swallow a cancellation, and waits for an answer without a limit."""

        def close_late(task: asyncio.Task[MysqlDriverConnection]) -> None:
            if not task.cancelled() and task.exception() is None:
                task.result().close()

        task = start_task(self._driver.connect(url, patience=_CONNECT_PATIENCE), "fencing-guard")
        try:
            await asyncio.wait([task], timeout=_CONNECT_PATIENCE)
            if task.done():
                return task.result()
            msg = f"no answer to the login within {_CONNECT_PATIENCE:g} s"
            raise TimeoutError(msg)
        finally:
            if not task.done():
                task.add_done_callback(close_late)
                task.cancel()


WRITER_PATIENCE = 30.0
"""Seconds that a transaction of the guard waits for another writer. A caller that is cancelled stops waiting."""


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


_SETTINGS: Mapping[str, Sequence[str]] = {
    SQLITE: (),
    # At other levels, to which the engine may be set, a server may refuse a fence that was raised meanwhile.
    POSTGRESQL: (_READ_COMMITTED, IDLE_LIMIT),
    MYSQL: (
        f"SET @fencing_pause = @@SESSION.wait_timeout, SESSION wait_timeout = {_PAUSE}",
        _READ_COMMITTED,
    ),
}


class EngineDatabase:
    """The database of SQLAlchemy's AsyncEngine."""

    identity = None
    """Unknown: an argument of the engine that cannot be read here may lead to another database than its URL."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.dialect = dialect_of(engine.dialect.name)

    async def run(self, work: Work[T]) -> T:
        """
        Run *work* on a connection of the engine's pool, in a task of its own.

        A cancel scope cancels again and again until its body ends. SQLAlchemy cuts the connection then, without
        cancelling the statement at the server, which would go on waiting in a transaction that no client ends. So the
        task is cancelled once, and waited for.
        """
        task = asyncio.create_task(self._run(work), name="fencing-guard")
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            with move_on_after(CLOSE_PATIENCE, shield=True):
                await asyncio.wait([task])
            task.add_done_callback(retrieve)
            raise

    async def _run(self, work: Work[T]) -> T:
        async with self._engine.connect() as connection:
            try:
                async with connection.begin():
                    for statement in _SETTINGS[self.dialect]:
                        await connection.exec_driver_sql(statement)
                    return await perform(connection, work)
            finally:
                if self.dialect == MYSQL:
                    try:
                        await connection.exec_driver_sql("SET wait_timeout = @fencing_pause")
                    except BaseException as error:
                        await connection.invalidate()  # the setting ends with it
                        if not isinstance(error, Exception):
                            raise

    async def create(self, ddl: str) -> None:
        """Create the table by the first statement of a transaction, which it may commit."""
        async with self._engine.begin() as connection:
            await connection.exec_driver_sql(ddl)


OwnDatabase: TypeAlias = PostgresqlDatabase | MysqlDatabase | SqliteDatabase | EngineDatabase


def own_database(connect: object) -> OwnDatabase | None:
    """
    Make the database for *connect*: a path, a URL or an AsyncEngine; None without one.

    Raises:
        ConfigurationError: it is none of these, or names no file.
    """
    if connect is None:
        return None
    if isinstance(connect, os.PathLike):
        connect = os.fspath(connect)
    if isinstance(connect, str):
        scheme = connect.partition("://")[0]
        if scheme in MYSQL_SCHEMES:
            return MysqlDatabase(connect)
        return PostgresqlDatabase(connect) if scheme in SCHEMES else SqliteDatabase(path_of(connect))
    if hasattr(connect, "sync_engine") and hasattr(connect, "begin"):
        return EngineDatabase(connect)
    msg = (
        "connect must be a path, a URL such as 'sqlite:///app.db', 'postgresql://host/app' or 'mysql://user@host/app', "
        f"or SQLAlchemy's AsyncEngine, not {type(connect).__name__}"
    )
    raise ConfigurationError(msg)


def path_of(text: str) -> str:
    """Return the path of an SQLite file, which is *text* or stands in its URL."""
    scheme, is_url, _ = text.partition("://")
    if is_url and "+" in scheme:
        msg = (
            "drop the '+driver' of the URL (postgresql://host/app, mysql://user@host/app, sqlite:///app.db), or pass "
            f"SQLAlchemy's engine: SqlGuard(create_async_engine(url)); if it is missing: {install('sqlalchemy')}"
        )
        raise ConfigurationError(msg)
    if is_url:
        parts = split_url(text)
        if scheme != "sqlite" or parts.user is not None or parts.hosts or parts.query:
            msg = (
                "write sqlite:///relative.db or sqlite:////absolute.db, without options, or "
                "postgresql://host/database, or mysql://user@host/database"
            )
            raise ConfigurationError(msg)
        text = unquote(parts.path.removeprefix("/"), errors="surrogateescape")
    if text in {"", ":memory:"} or "\0" in text:
        msg = "SqlGuard needs a file, such as sqlite:///app.db: only one connection can see a database in memory"
        raise ConfigurationError(msg)
    return text
