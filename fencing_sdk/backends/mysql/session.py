"""
One open connection to the server that takes writes: how it is opened, and what a transaction on it is.

The hosts of a URL are asked in their order, and the first that takes writes is used. Not the quickest one: a replica
that lacks ``read_only`` takes writes, too, and clients that choose different servers do not exclude each other.

A transaction has two texts of several statements, so two round trips. Between them the server ends the connection after
`_PAUSE` seconds of silence: otherwise a client that froze there would keep its rows locked for eight hours. A service
between that refuses several statements in one text gets them one by one.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from fencing_sdk._http.tls import distrust
from fencing_sdk._mysql import driver
from fencing_sdk._mysql.driver import MysqlDriverConnection, Rows, code_of
from fencing_sdk._mysql.url import MysqlUrl
from fencing_sdk.backends._shared.error_translation import NoConnectionError, reason_of
from fencing_sdk.backends._shared.request_queue import keep_in_children
from fencing_sdk.backends.mysql.errors import BACKEND, translated
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError

T = TypeVar("T")

_PAUSE = 3
"""Seconds between the two texts of a transaction after which the server rolls it back."""
_IDLE = 28800
"""Seconds of silence outside of a transaction, as the servers have it by default."""
_CLOSE_PATIENCE = 0.5
_CREATE_PATIENCE = 30.0

SCHEMA = (Path(__file__).parent / "schema.sql").read_text(encoding="utf-8")
_TABLES = {"fencing_lock", "fencing_waiter", "fencing_sign", "fencing_revoked", "fencing_bell"}
_SHOW_TABLES = "SHOW TABLES LIKE 'fencing\\_%'"
_VARIABLES = (
    "read_only",
    "innodb_flush_log_at_trx_commit",
    "wsrep_on",
    "group_replication_single_primary_mode",
)
_SHOW_VARIABLES = f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({', '.join(map(repr, _VARIABLES))})"
_SYNTAX = 1064
"""What a server or a proxy says to a second statement in one text."""


class MysqlSession:
    """
    One open connection, which runs one request at a time.

    Args:
        connection: An open connection of the driver.

        together: Whether it takes several statements in one text.

        direct: Whether the number of the connection is the server's own. A proxy numbers connections by itself, so a
            KILL through it may reach another one.
    """

    __slots__ = (
        "__weakref__",
        "_begin",
        "_connection",
        "_ended",
        "_idle",
        "_together",
        "abandoned",
        "committing",
        "direct",
    )

    def __init__(self, connection: MysqlDriverConnection, *, together: bool, direct: bool) -> None:
        self._connection = connection
        self._together = together
        self.direct = direct
        self.committing = False
        """True while a text is under way that may have committed."""
        self.abandoned = False
        """True if a caller gave up, and not the server."""
        self._ended = False
        self._begin, self._idle = ["START TRANSACTION"], list[str]()
        if not self.is_mariadb:  # MySQL has no limit of its own for a transaction that is silent
            self._begin.insert(0, f"SET wait_timeout = {_PAUSE}")
            self._idle.append(f"SET wait_timeout = {_IDLE}")
        keep_in_children(self)

    @property
    def closed(self) -> bool:
        """True if the connection has ended, as far as the driver knows."""
        return self._ended or not self._connection.connected

    @property
    def number(self) -> int:
        """The server's number of the connection, for KILL."""
        return self._connection.thread_id()

    @property
    def is_mariadb(self) -> bool:
        """True for MariaDB, False for MySQL."""
        return "MariaDB" in self._connection.get_server_info()

    async def ask(self, *statements: str) -> list[Rows]:
        """
        Run *statements*, and return the rows of each.

        Raises:
            Exception: the driver's error. A statement after the one that failed did not run.
        """
        try:
            if self._together:
                return await driver.ask(self._connection, "; ".join(statements))
            return [(await driver.ask(self._connection, statement))[0] for statement in statements]
        except Exception as error:
            if not isinstance(error, driver.ServerError) or _has_ended(code_of(error)):
                self._end()
            raise

    async def transact(
        self, first: Sequence[str], work: Callable[[Sequence[Rows]], Awaitable[tuple[Sequence[str], T]]]
    ) -> T:
        """
        Run a transaction: its *first* statements, then *work*, which takes their rows and returns the last ones.

        Without last statements the transaction is rolled back: it has changed nothing.

        Raises:
            Exception: the error of the driver or of *work*. Nothing is changed, unless the session is `committing`.
        """
        try:
            answers = await self.ask(*self._begin, *first)
            last, result = await work(answers[len(self._begin) :])
            if not last:
                await self.ask("ROLLBACK", *self._idle)
                return result
            self.committing = True
            await self.ask(*last, *self._idle, "COMMIT")  # an error is one from before the commit
        except Exception:
            if not self.closed:  # the server has refused, so nothing is committed
                self.committing = False
                await self._roll_back()
            raise
        except BaseException:
            self._end()
            raise
        self.committing = False
        return result

    async def _roll_back(self) -> None:
        try:
            await self.ask("ROLLBACK", *self._idle)
        except Exception:  # noqa: BLE001  (the server rolls back when the connection ends)
            self._end()

    def for_guards(self) -> MysqlDriverConnection:
        """The driver's connection, on which a guard raises its fence within `transact`."""
        return self._connection

    def drop(self) -> None:
        """Close the connection at once, even while a statement runs."""
        self.abandoned = True
        self._end()

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
        url: The database, at each of its hosts.

        create: Whether missing tables are created.

        patience: Seconds that the opening of a connection may take.

        arguments: More arguments of ``asyncmy.connect``.
    """

    def __init__(self, url: MysqlUrl, *, create: bool, patience: float, arguments: Mapping[str, object]) -> None:
        self.hosts = url.each_host()
        self._create = create
        self._patience = patience
        self._arguments = arguments

    async def dial(self) -> MysqlSession:
        """
        Connect, and create the tables if they are missing.

        Raises:
            BackendError: no host takes writes, or the server cannot be used.
        """
        return await self._dial_first(create=self._create)

    async def create_schema(self) -> None:
        """
        Create the tables that are missing.

        Raises:
            BackendError: as `dial`.
        """
        await (await self._dial_first(create=True)).aclose()

    async def _dial_first(self, *, create: bool) -> MysqlSession:
        failures: list[tuple[MysqlUrl, Exception]] = []
        for host in self.hosts:
            try:
                session = await self.open_host(host)
                try:
                    await _check_writable(session)
                    await self._check_tables(session, create=create)
                except BaseException:
                    session.drop()
                    raise
            except Exception as error:  # noqa: BLE001  (the next host may be the one that takes writes)
                failures.append((host, error))
                if isinstance(translated("connect", error), BackendRefusedError):
                    break  # the others would refuse, too, or this one has to be mended first
            else:
                return session
        raise _error_of(failures)

    async def open_host(self, host: MysqlUrl) -> MysqlSession:
        """
        Connect to one host, whether it takes writes or not.

        Raises:
            NoConnectionError: what is at that address cannot be reached.
            Exception: the driver's error.
        """
        connection: MysqlDriverConnection | None = None
        try:
            async with asyncio.timeout(self._patience):
                connection = await driver.connect(host, self._arguments, patience=self._patience)
                return await _session_on(connection)
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
        elif isinstance(error, TypeError):  # its text may quote the value
            detail = "asyncmy does not take one of the arguments in driver"
            return BackendRefusedError(BACKEND, "connect", detail)
        elif isinstance(error, driver.ServerError) and _has_ended(code):
            reason = f"{'it closed the connection' if code else 'its answer cannot be read'}; is it MySQL?"
        else:
            return None
        return NoConnectionError.at(host.place, reason)

    async def _check_tables(self, session: MysqlSession, *, create: bool) -> None:
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


_NO_HOST = 2003
_DENIED = {1044, 1142}
_ENDED = {0, 1053, 1927, 4031}
_OF_THE_DRIVER = range(2000, 3000)


def _has_ended(code: int) -> bool:
    """Return whether an error with this number leaves a connection that cannot be used. The driver gives many none."""
    return code in _ENDED or code in _OF_THE_DRIVER


def statements_of(script: str) -> list[str]:
    """The statements of a script in which each ends with a semicolon at the end of a line; without comments."""
    lines = (line.partition("--")[0].rstrip() for line in script.splitlines())
    return [text.strip() for text in "\n".join(lines).split(";\n") if text.strip(";\n ")]


async def _session_on(connection: MysqlDriverConnection) -> MysqlSession:
    try:
        together, (_, ((number,),)) = True, await driver.ask(connection, "DO 0; SELECT CONNECTION_ID()")
    except driver.ServerError as error:
        if code_of(error) != _SYNTAX:
            raise
        together, (((number,),),) = False, await driver.ask(connection, "SELECT CONNECTION_ID()")
    session = MysqlSession(connection, together=together, direct=number == connection.thread_id())
    if session.is_mariadb:
        await session.ask(f"SET idle_transaction_timeout = {_PAUSE}")
    return session


async def _check_writable(session: MysqlSession) -> None:
    """
    Check that the server takes writes, keeps them in a crash, and is the only one that does.

    Raises:
        BackendUnavailableError: it takes no writes now.
        BackendRefusedError: it loses what it has acknowledged, or other servers write the same rows.
    """
    (found,) = await session.ask(_SHOW_VARIABLES)
    values = {str(name): str(value).upper() for name, value in found}
    if values.get("read_only", "OFF") != "OFF":
        raise BackendUnavailableError(
            BACKEND, "connect", "the server is a replica, or read_only is on for another reason"
        )
    refusal = None
    if values.get("innodb_flush_log_at_trx_commit") == "0":
        refusal = "innodb_flush_log_at_trx_commit is 0, so a crash forgets grants; set it to 1"
    elif values.get("wsrep_on", "OFF") == "ON":
        refusal = "the server is a node of Galera, where several nodes take writes; use a server that writes alone"
    elif values.get("group_replication_single_primary_mode", "ON") == "OFF":
        refusal = "group replication runs with several primaries; set group_replication_single_primary_mode = ON"
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
