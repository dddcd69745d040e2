"""
Opens sessions with the server that takes writes, and creates the tables.

The hosts of a URL are asked at the same time, and the first in the URL that takes writes is used, not the quickest: a
replica that lacks ``read_only`` takes writes, too, and clients that choose different servers exclude nothing.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from fencing_sdk._http.tls import distrust
from fencing_sdk._mysql import driver, writers
from fencing_sdk._mysql.driver import MysqlDriverConnection, code_of
from fencing_sdk._mysql.url import MysqlUrl
from fencing_sdk.backends._shared.error_translation import NoConnectionError, reason_of
from fencing_sdk.backends.mysql.errors import BACKEND, translated
from fencing_sdk.backends.mysql.session import PAUSE, MysqlSession, has_ended
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError

_CREATE_PATIENCE = 30.0
_HEAD_START = 0.5
"""Seconds for which a host that has answered waits for those that stand before it in the URL."""

SCHEMA = (Path(__file__).parent / "schema.sql").read_text(encoding="utf-8")
_TABLES = {"fencing_lock", "fencing_waiter", "fencing_sign", "fencing_revoked", "fencing_bell"}
_SHOW_TABLES = "SHOW TABLES LIKE 'fencing\\_%'"
_SHOW_VARIABLES = writers.ask_for("read_only", "innodb_flush_log_at_trx_commit", *writers.VARIABLES)
_SYNTAX = 1064
"""What a server or a proxy says to a second statement in one text."""
_NO_HOST = 2003
_DENIED = {1044, 1142}


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
        attempts = [asyncio.ensure_future(self._open_writable(host)) for host in self.hosts]
        session: MysqlSession | None = None
        try:
            session = await self._first_in_order(attempts)
            await self._check_tables(session, create=create)
        except BaseException:
            if session is not None:
                session.drop()
            raise
        finally:
            for attempt in attempts:
                attempt.cancel()
                attempt.add_done_callback(partial(_drop_unless, session))
        return session

    async def _open_writable(self, host: MysqlUrl) -> MysqlSession:
        session = await self.open_host(host)
        try:
            async with asyncio.timeout(self._patience):
                await _check_writable(session)
        except BaseException as error:
            session.drop()
            if isinstance(error, TimeoutError):
                raise NoConnectionError.at(host.place, "it does not answer") from error
            raise
        return session

    async def _first_in_order(self, attempts: Sequence[asyncio.Future[MysqlSession]]) -> MysqlSession:
        """Choose the first host that takes writes. One that is silent is passed over once a later one has answered."""
        while True:
            failures: list[tuple[MysqlUrl, Exception]] = []
            for host, attempt in zip(self.hosts, attempts, strict=True):
                if not attempt.done():
                    break
                error = attempt.exception()
                if error is None:
                    return attempt.result()
                if not isinstance(error, Exception):
                    raise error
                failures.append((host, error))
                if isinstance(translated("connect", error), BackendRefusedError):
                    raise _error_of(failures)  # the others would refuse, too, or this one has to be mended first
            else:
                raise _error_of(failures)
            opened = [each for each in attempts if each.done() and each.exception() is None]
            pending = [each for each in attempts if not each.done()]
            limit = _HEAD_START if opened else None
            done, _ = await asyncio.wait(pending, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                return opened[0].result()

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
        elif self._arguments and isinstance(error, TypeError | ValueError | AttributeError):  # its text may quote one
            detail = "asyncmy does not take one of the arguments in driver"
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


async def _session_on(connection: MysqlDriverConnection) -> MysqlSession:
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


async def _check_writable(session: MysqlSession) -> None:
    """
    Check that the server takes writes, keeps them in a crash, and is the only one that does.

    Raises:
        BackendUnavailableError: it takes no writes now.
        BackendRefusedError: it loses what it has acknowledged, or other servers write the same rows.
    """
    (found,) = await session.ask(_SHOW_VARIABLES)
    values = writers.values_of(found)
    if values.get("read_only", "OFF") != "OFF":
        raise BackendUnavailableError(
            BACKEND, "connect", "the server is a replica, or read_only is on for another reason"
        )
    refusal = writers.several_writers(values)
    if values.get("innodb_flush_log_at_trx_commit") == "0":
        refusal = "innodb_flush_log_at_trx_commit is 0, so a crash forgets grants; set it to 1"
    if refusal is not None:
        raise BackendRefusedError(BACKEND, "connect", refusal)


def _drop_unless(chosen: MysqlSession | None, attempt: asyncio.Future[MysqlSession]) -> None:
    if not attempt.cancelled() and attempt.exception() is None and attempt.result() is not chosen:
        attempt.result().drop()


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
