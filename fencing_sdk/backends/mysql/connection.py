"""
The connections: how a session with the server that takes writes is opened, and what a transaction on it is.

The hosts of a URL are asked at the same time, and the first in the URL that takes writes is used, not the quickest: a
replica that is not read-only takes writes, too, and clients that choose different servers exclude nothing.

A transaction has two texts of several statements, so two round trips. Between them, and in the middle of the second,
the server ends the connection after `PAUSE` seconds of silence: otherwise a client that froze there would keep its rows
locked for eight hours. A service between that refuses several statements in one text gets them one by one.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from fencing_sdk._http.tls import distrust
from fencing_sdk._mysql import READ_ONLY, VARIABLES, ask_for, driver, look_alike, read_only, several_writers, values_of
from fencing_sdk._mysql.driver import MysqlDriverConnection, Rows, code_of
from fencing_sdk._mysql.url import MysqlUrl
from fencing_sdk._values.drivers import packed_text
from fencing_sdk._values.tasks import first_in_order, start_task
from fencing_sdk.backends._shared.error_translation import NoConnectionError, reason_of
from fencing_sdk.backends._shared.request_queue import ConnectionAbandonedError, keep_in_children
from fencing_sdk.backends.mysql.errors import BACKEND, NOT_SENT, has_ended, translated
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError

T = TypeVar("T")

PAUSE = 3
"""Seconds of silence within a transaction after which the server rolls it back."""
_IDLE = 28800
"""Seconds of silence outside of a transaction, as the servers have it by default."""
_CLOSE_PATIENCE = 0.5
_CREATE_PATIENCE = 30.0

SCHEMA = packed_text(__package__, "schema.sql")
NOW = "CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED)"
"""Beginning of the statement: not before the rows were locked, because a statement that waits for one reads no time."""
SECOND = 1_000_000
"""Microseconds, in which the server's tables count time."""
_TABLES = {"fencing_line", "fencing_ticket", "fencing_bell"}
_SHOW_TABLES = "SHOW TABLES LIKE 'fencing\\_%'"
_SHOW_VARIABLES = ask_for("innodb_flush_log_at_trx_commit", "version_comment", *READ_ONLY, *VARIABLES)
_SYNTAX = 1064
"""The error of a server or a proxy that takes one statement in a text."""
_NO_HOST = 2003
_DENIED = {1044, 1142}


class MysqlSession:
    """
    One open connection, which runs one request at a time.

    Args:
        connection: An open connection of the driver.

        together: Whether it takes several statements in one text.

        direct: Whether the number of the connection is the server's own. A proxy numbers connections by itself, so a
            KILL through it may reach another one.
    """

    def __init__(self, connection: MysqlDriverConnection, *, together: bool, direct: bool) -> None:
        self._connection = connection
        self._together = together
        self.direct = direct
        self.committing = False
        """True while a text is under way that may have committed."""
        self.abandoned = False
        """True if a caller gave up, and not the server."""
        self.read_only_settings: Sequence[str] = ()
        """The settings of this server that can make it refuse writes."""
        self._ended = False
        self._reading: asyncio.Future[list[Rows]] | None = None
        self._begin, self._idle = ["START TRANSACTION"], list[str]()
        if not self.is_mariadb:  # MySQL has no limit of its own for a transaction that is silent
            self._begin.insert(0, f"SET wait_timeout = {PAUSE}")
            self._idle.append(f"SET wait_timeout = {_IDLE}")
        keep_in_children(self)

    @property
    def closed(self) -> bool:
        """True if the connection has ended, as far as the driver knows."""
        return self._ended or not self._connection.connected

    @property
    def number(self) -> int:
        """The server's number of the connection, for KILL."""
        return int(self._connection.thread_id())

    @property
    def version(self) -> str:
        """Name and version that the server gives itself."""
        return str(self._connection.get_server_info())

    @property
    def is_mariadb(self) -> bool:
        """True for MariaDB, False for MySQL."""
        return "MariaDB" in self.version

    async def ask(self, *statements: str) -> list[Rows]:
        """
        Run *statements*, and return the rows of each.

        A task reads, which `drop` can cancel. To close the connection alone would first send what is left of a long
        text, and say good-bye with TLS: a silent server would leave the reader waiting.

        Raises:
            Exception: the driver's error. A statement after the one that failed did not run.
        """
        self._reading = reading = start_task(self._read(statements))
        try:
            await asyncio.wait((reading,))
        finally:
            self._reading = None
            reading.cancel()
        error: BaseException | None
        if reading.cancelled():
            error = ConnectionAbandonedError("the connection was closed while a statement ran")
        elif (error := reading.exception()) is None:
            return reading.result()
        if not isinstance(error, driver.ServerError) or has_ended(code_of(error)):
            self._end()
        raise error

    async def _read(self, statements: Sequence[str]) -> list[Rows]:
        if self._together:
            return await driver.ask(self._connection, "; ".join(statements))
        return [(await driver.ask(self._connection, statement))[0] for statement in statements]

    async def transact(
        self, first: Sequence[str], work: Callable[[Sequence[Rows]], Awaitable[tuple[Sequence[str], T]]]
    ) -> tuple[T, Sequence[Rows]]:
        """
        Run a transaction: its *first* statements, then *work*, which takes their rows and returns the last ones.

        Without last statements the transaction is rolled back: it has changed nothing.

        Returns:
            What *work* returns besides, and the rows of the last statements.

        Raises:
            Exception: the error of the driver or of *work*. Nothing is changed, unless the session is `committing`.
        """
        try:
            answers = await self.ask(*self._begin, *first)
            last, result = await work(answers[len(self._begin) :])
            if not last:
                await self.ask("ROLLBACK", *self._idle)
                return result, ()
            self.committing = True
            answers = await self.ask(*last, *self._idle, "COMMIT")  # an error is one from before the commit
        except Exception:
            if not self.closed:  # the server has refused, so nothing is committed
                self.committing = False
                try:
                    await self.ask("ROLLBACK", *self._idle)
                except Exception:  # noqa: BLE001  (the server rolls back when the connection ends)
                    self._end()
            raise
        except BaseException:
            self._end()
            raise
        self.committing = False
        return result, answers[: len(last)]

    async def change(self, *statements: str) -> list[Rows]:
        """
        Run *statements* in one text, of which one changes a row and commits at once. Otherwise as `ask`.

        Raises:
            Exception: the driver's error. Nothing is changed, unless the session is `committing`.
        """
        self.committing = True
        try:
            answers = await self.ask(*statements)
        except driver.ServerError as error:
            self.committing = self.closed and code_of(error) != NOT_SENT
            raise
        self.committing = False
        return answers

    def drop(self) -> None:
        """Close the connection at once, even while a statement runs."""
        self.abandoned = True
        self._end()
        if self._reading is not None:
            self._reading.cancel()

    async def aclose(self) -> None:
        """Close the connection with a message to the server, within half a second."""
        with suppress(Exception):  # the connection must end, whichever error the driver raised
            async with asyncio.timeout(_CLOSE_PATIENCE):
                await self._connection.ensure_closed()
        self._end()

    def _end(self) -> None:
        self._ended = True
        self._connection.close()


class MysqlDialer:
    """
    Opens sessions with the server that takes writes.

    Args:
        url: Where it is.

        create: Whether tables that are missing are created.

        patience: Seconds for which a host is waited for.

        tables: Whether the tables of locks are needed, and a server that forgets no commit in a crash.
    """

    def __init__(self, url: MysqlUrl, *, create: bool, patience: float, tables: bool = True) -> None:
        self.hosts = url.each_host()
        self._tables = tables
        self._create = create
        self._patience = patience

    async def dial(self, *, create: bool = False) -> MysqlSession:
        """
        Connect, and create the tables if they are missing and may be created, or if *create* demands it.

        Raises:
            BackendError: no host takes writes, or the server cannot be used.
        """
        works = [self._open_writable(host) for host in self.hosts]
        session = await first_in_order(works, self._blame, MysqlSession.drop)
        try:
            if self._tables:
                await self._check_tables(session, create=create or self._create)
        except BaseException:
            session.drop()
            raise
        return session

    def _blame(self, failures: Sequence[Exception]) -> Exception | None:
        """Return the error of hosts that failed; None: the next one may take writes."""
        last = translated("connect", failures[-1])
        refused = isinstance(last, BackendRefusedError)  # so would the others, or this one has to be mended first
        if refused or len(failures) == len(self.hosts):
            return _error_of(list(zip(self.hosts, failures, strict=False)))
        return None

    async def _open_writable(self, host: MysqlUrl) -> MysqlSession:
        session = await self.open_host(host)
        try:
            async with asyncio.timeout(self._patience):
                (found,) = await session.ask(_SHOW_VARIABLES)
            values = values_of(found)
            _check_writable(values, session.version, may_forget=not self._tables)
            session.read_only_settings = [name for name in READ_ONLY if name in values]
        except BaseException as error:
            session.drop()
            if isinstance(error, TimeoutError):
                raise NoConnectionError.at(host.place, "it does not answer") from error
            raise
        return session

    async def open_host(self, host: MysqlUrl) -> MysqlSession:
        """
        Connect to one host, whether it takes writes or not.

        Raises:
            NoConnectionError: nothing answers at that address, or it is not MySQL.
            Exception: the driver's error.
        """
        connection: MysqlDriverConnection | None = None
        try:
            async with asyncio.timeout(self._patience):
                connection = await driver.connect(host, patience=self._patience)
                try:
                    together, (_, ((number,),)) = True, await driver.ask(connection, "DO 0; SELECT CONNECTION_ID()")
                except driver.ServerError as error:
                    if code_of(error) != _SYNTAX:
                        raise
                    together, (((number,),),) = False, await driver.ask(connection, "SELECT CONNECTION_ID()")
                session = MysqlSession(connection, together=together, direct=number == connection.thread_id())
                if session.is_mariadb:
                    await session.ask(f"SET idle_transaction_timeout = {PAUSE}")
                return session
        except BaseException as error:
            if connection is not None:
                connection.close()
            known = self._known(host, error)
            if known is None:
                raise
            raise known from error

    def _known(self, host: MysqlUrl, error: BaseException) -> Exception | None:
        """Return why the connection to *host* cannot be opened; None for what the server itself has said."""
        code = code_of(error)
        cause = error.__cause__ if code == _NO_HOST else error
        if isinstance(error, TimeoutError):
            reason = f"no answer within {self._patience:g} s: it hangs, or it is not MySQL"
        elif isinstance(cause, ssl.SSLCertVerificationError):
            return BackendRefusedError(BACKEND, "connect", distrust(cause, "ca"))
        elif code == _NO_HOST:
            reason = reason_of(cause)
        elif isinstance(error, RuntimeError | ImportError) and "cryptography" in str(error):
            detail = "this login without TLS needs the package cryptography; install it, or write ?tls=true"
            return BackendRefusedError(BACKEND, "connect", detail)
        elif isinstance(error, driver.ServerError) and has_ended(code):
            reason = f"{'it closed the connection' if code else 'its answer cannot be read'}; is it MySQL?"
        else:
            return None
        return NoConnectionError.at(host.place, reason)

    async def _check_tables(self, session: MysqlSession, *, create: bool) -> None:
        async with asyncio.timeout(self._patience):
            (found,) = await session.ask(_SHOW_TABLES)
        missing = _TABLES - {name for (name,) in found}
        if not missing:
            return
        way_out = (
            "run 'fencing init --url ...' or what schema_sql() returns as a user that may create tables; this user "
            "then needs SELECT, INSERT, UPDATE and DELETE on them"
        )
        if not create:
            detail = f"the database lacks {', '.join(sorted(missing))}; {way_out}"
            raise BackendRefusedError(BACKEND, "connect", detail)
        try:
            async with asyncio.timeout(_CREATE_PATIENCE):
                for statement in statements_of(SCHEMA):
                    if missing.intersection(statement.split()):  # of the others the driver would log a warning
                        await session.ask(statement)
        except driver.ServerError as error:
            if code_of(error) not in _DENIED:
                raise
            detail = f"the user may not create tables; {way_out}"
            raise BackendRefusedError(BACKEND, "connect", detail) from error


def statements_of(script: str) -> list[str]:
    """The statements of a script in which each ends with a semicolon at the end of a line; without comments."""
    lines = (line.partition("--")[0].rstrip() for line in script.splitlines())
    return [text.strip() for text in "\n".join(lines).split(";\n") if text.strip(";\n ")]


def _check_writable(values: Mapping[str, str], version: str, *, may_forget: bool) -> None:
    """Refuse a server that takes no writes, forgets them in a crash, is one of several writers, or is no MySQL."""
    if (setting := read_only(values)) is not None:
        raise BackendUnavailableError(BACKEND, "connect", f"the server is read-only: {setting} is on; is it a replica?")
    refusal = several_writers(values)
    if not may_forget and values.get("innodb_flush_log_at_trx_commit") == "0":
        refusal = "innodb_flush_log_at_trx_commit is 0, so a crash forgets grants; set it to 1"
    if (other := look_alike(version, values.get("version_comment", ""))) is not None:
        refusal = f"the server is {other}, and no MySQL: SKIP LOCKED and KILL QUERY may do something else there"
    if refusal is not None:
        raise BackendRefusedError(BACKEND, "connect", refusal)


def _error_of(failures: Sequence[tuple[MysqlUrl, Exception]]) -> Exception:
    """Make one error of those of the hosts. Where one has refused, it was the last that was asked."""
    last = failures[-1][1]
    if len(failures) == 1:
        return last
    unreached = [error for _, error in failures if isinstance(error, NoConnectionError)]
    if len(unreached) == len(failures):
        away = NoConnectionError.of_all(unreached)
        away.__cause__ = last
        return away
    answers = [(host.place, translated("connect", error)) for host, error in failures]
    details = [answer.detail if place in answer.detail else f"{place}: {answer.detail}" for place, answer in answers]
    error = type(answers[-1][1])(BACKEND, "connect", "; ".join(details))
    error.__cause__ = last
    return error
