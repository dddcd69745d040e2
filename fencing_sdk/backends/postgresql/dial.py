"""
Opens a session with the server that takes writes, and keeps one for a client's requests.

If the URL names several hosts, the dialer asks all of them at the same time, so that a silent host costs nothing. It
passes over standbys, and over old primaries that an operator made read-only.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from fencing_sdk._http.tls import complaint_about, distrust
from fencing_sdk._values.url import TLS_FILES, PostgresqlUrl
from fencing_sdk.backends._shared.background_task import first_success
from fencing_sdk.backends._shared.error_translation import NoConnectionError, reason_of
from fencing_sdk.backends._shared.request_queue import RequestConnection
from fencing_sdk.backends.postgresql import driver
from fencing_sdk.backends.postgresql.driver import (
    DriverConnection,
    DriverRow,
    OutdatedStatement,
    PostgresqlSession,
    code_of,
)
from fencing_sdk.backends.postgresql.errors import BACKEND, ReadOnlyError, StandbyError, translated
from fencing_sdk.backends.postgresql.schema import create, missing_right, newest_function
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError, shown

_VERIFYING = {"verify-ca", "verify-full"}
_ROOT = "~/.postgresql/root.crt"
"""Where libpq and asyncpg look for the certificate of the authority."""
_CREATE_PATIENCE = 30.0
"""Seconds that the creation of the tables may take; it waits for other clients that create them."""
_CANCEL_PATIENCE = 0.2
"""Seconds that the attempts at other hosts have to end once one host was chosen."""

_ROLLED_BACK = {"40001", "40P01"}
_NOT_PREPARED = {"26000", "42P05"}
_NO_SCHEMA = {"3F000", "42883", "42P01"}
_WRONG_ISOLATION = "FS002"
_READ_ONLY = "25006"


class _ConclusiveError(Exception):
    """An error from the server that takes writes: no other host can give a better answer."""

    def __init__(self, error: BackendRefusedError) -> None:
        super().__init__()
        self.error = error


class PostgresqlDialer:
    """Opens sessions. A request that notices a proxy sets `pooled` for the next ones."""

    def __init__(
        self,
        hosts: Sequence[PostgresqlUrl],
        *,
        schema: str,
        create: bool,
        pooled: bool,
        patience: float,
        arguments: Mapping[str, object],
    ) -> None:
        self.hosts = hosts
        self.schema = schema
        self.create = create
        self.pooled = pooled
        self._patience = patience
        self._arguments = {**arguments, "timeout": patience, "statement_cache_size": 0}

    async def dial(self, *, missing: str = "connect") -> PostgresqlSession:
        """
        Ask all hosts at once, choose the first that takes writes, and close the connections to the others.

        Args:
            missing: What is done about tables and functions that are missing. "connect": they are created, if that is
                allowed. "create_schema": they are created, and an error says which right is lacking. "": nothing.

        Raises:
            BackendError: there is no such server, or it cannot be used.
        """
        attempts = [partial(self._connect_to, host, missing) for host in self.hosts]
        try:
            connection = await first_success(
                attempts,
                self._error_of_all,
                final=_ConclusiveError,
                discard=lambda connection: connection.terminate(),
                patience=_CANCEL_PATIENCE,
            )
        except _ConclusiveError as conclusive:
            raise conclusive.error from conclusive.error.__cause__
        return PostgresqlSession(connection, pooled=self.pooled)

    def _error_of_all(self, errors: Sequence[Exception]) -> Exception:
        """
        Make one error of those of all hosts, each with its place.

        If one host may still start or be promoted, another attempt may help, although the other hosts refuse.
        """
        unreached = [error for error in errors if isinstance(error, NoConnectionError)]
        away = NoConnectionError.of_all(unreached)
        away.__cause__ = unreached[0].__cause__ if unreached else None
        answers = [
            (host.place, translated("connect", error))
            for host, error in zip(self.hosts, errors, strict=True)
            if error not in unreached
        ]
        if not answers:
            return away
        places: dict[str, list[str]] = {}
        for place, answer in sorted(answers, key=lambda pair: pair[0]):
            places.setdefault(answer.detail, []).append(place)
        details = [translated("connect", away).detail] if unreached else []
        details += [f"{', '.join(where)}: {detail}" for detail, where in places.items()]
        refused = not unreached and all(isinstance(answer, BackendRefusedError) for _, answer in answers)
        error = (BackendRefusedError if refused else BackendUnavailableError)(BACKEND, "connect", "; ".join(details))
        error.__cause__ = errors[0]
        return error

    async def _connect_to(self, host: PostgresqlUrl, missing: str) -> DriverConnection:
        connection: DriverConnection | None = None
        patience = asyncio.timeout(self._patience)
        try:
            async with patience:
                connection = await self.open_host(host)
                complete = await self._takes_writes(connection)
            if missing and not complete:
                async with asyncio.timeout(_CREATE_PATIENCE):
                    await self._create(connection, missing)
        except BaseException as error:
            if connection is not None:
                connection.terminate()
            if isinstance(error, TimeoutError) and patience.expired():
                raise self._silent(host) from error
            raise
        return connection

    async def open_host(self, host: PostgresqlUrl) -> DriverConnection:
        """
        Connect to one host, whether it takes writes or not.

        Raises:
            BackendRefusedError: the URL cannot be used, or the server refuses TLS.
            NoConnectionError: what is at that address cannot be reached, or is not PostgreSQL.
            Exception: the driver's error.
        """
        try:
            return await driver.connect(host, self._arguments)
        except ssl.SSLCertVerificationError as error:  # before ValueError, which it is too
            raise BackendRefusedError(BACKEND, "connect", distrust(error, TLS_FILES[0])) from error
        except (driver.ClientConfigurationError, ValueError, TypeError):
            pass  # its message may quote the URL
        except (FileNotFoundError, ssl.SSLError) as error:  # a file of the URL, or no socket
            password = host.file("sslpassword")
            complaint = complaint_about(*map(host.file, TLS_FILES), names=TLS_FILES, password=password)
            if complaint is not None:
                raise BackendRefusedError(BACKEND, "connect", complaint) from error
            why = "no server listens at that socket" if isinstance(error, FileNotFoundError) else reason_of(error)
            raise NoConnectionError.at(host.place, why) from error
        except TimeoutError as error:
            raise self._silent(host) from error
        except (OSError, driver.Disconnected) as error:
            why = reason_of(error)
            if isinstance(error, ConnectionError | driver.Disconnected) and not isinstance(
                error, ConnectionRefusedError
            ):
                why = "it closed the connection, or has no TLS; is it PostgreSQL?"
            raise NoConnectionError.at(host.place, why) from error
        raise BackendRefusedError(BACKEND, "connect", _unusable(host))

    def _silent(self, host: PostgresqlUrl) -> NoConnectionError:
        limit = f"{self._patience:g} s"
        reason = f"no answer within {limit}: it hangs, or a server behind it, or it is not PostgreSQL"
        return NoConnectionError.at(host.place, reason)

    async def _takes_writes(self, connection: DriverConnection) -> bool:
        """
        Raise unless the server takes writes. Return whether it has the tables and functions.

        Raises:
            StandbyError, ReadOnlyError: it takes none.
        """
        row = await connection.fetchrow(
            "SELECT pg_catalog.pg_is_in_recovery(), pg_catalog.current_setting('transaction_read_only'), "
            "pg_catalog.to_regprocedure($1) IS NOT NULL",
            newest_function(self.schema),
        )
        assert row is not None
        standby, read_only, complete = row
        if standby:  # a standby is read-only too, so this comes first
            raise StandbyError
        if read_only == "on":
            raise ReadOnlyError
        return bool(complete)

    async def _create(self, connection: DriverConnection, operation: str) -> None:
        way_out = (
            "run 'fencing init --url ...' or what schema_sql() returns as a role that may create it; this role then "
            "needs USAGE on the schema, and SELECT, INSERT, UPDATE and DELETE on its tables"
        )
        by_command = operation == "create_schema"
        if not (self.create or by_command):
            detail = f"schema {shown(self.schema)} lacks the tables or functions of this version; {way_out}"
            raise _ConclusiveError(BackendRefusedError(BACKEND, operation, detail))
        try:
            await create(connection, self.schema)
        except driver.ServerError as error:
            if code_of(error) != "42501":
                raise
            detail = f"the role may not use or create schema {shown(self.schema)}; {way_out}"
            if by_command:
                detail = await missing_right(connection, self.schema)
            refusal = BackendRefusedError(BACKEND, operation, detail)
            refusal.__cause__ = error
            raise _ConclusiveError(refusal) from error


def _unusable(host: PostgresqlUrl) -> str:
    """Return why the driver does not take the URL, as far as that can be known without the driver's own words."""
    mode = (host.file("sslmode") or "").replace("_", "-")
    if mode in _VERIFYING and not host.file("sslrootcert") and not Path(_ROOT).expanduser().is_file():
        fix = f"write sslrootcert=/path/to/ca.pem, or put the file at {_ROOT}"
        return f"sslmode={mode} needs the certificate of the authority; {fix}"
    return "the URL or an argument of the driver cannot be used; is every option in the query one of libpq's?"


class PostgresqlConnection(RequestConnection[PostgresqlSession]):
    """The connection of one backend."""

    def __init__(self, dialer: PostgresqlDialer) -> None:
        super().__init__(dialer.dial, self._adapted)
        self._dialer = dialer

    async def ask(
        self, statement: str, arguments: tuple[object, ...], *, urgent: bool = False, must_run: bool = False
    ) -> DriverRow | None:
        """
        Run one *statement* with its parameters, as `run` does, and return its first row.

        Raises:
            Exception: the driver's error.
        """
        return await self.run(lambda session: session.ask(statement, arguments), urgent=urgent, must_run=must_run)

    def _adapted(self, session: PostgresqlSession, error: Exception) -> bool:
        """
        Adapt to *error*. Return whether the request surely did nothing and may succeed if it runs again at once.

        1. The server rolled the transaction back: run it again as it is.
        2. A prepared statement is missing or another client's: a proxy pools transactions. Stop preparing statements.
        3. The default isolation is not READ COMMITTED: give each statement a transaction with that level.
        4. The schema is missing: connect anew, which looks for the right server and creates what is missing.
        5. The server became read-only: connect anew for the next request. This one fails, because it was refused.
        6. A prepared statement is out of date: prepare it anew.
        """
        code = code_of(error)
        if code in _ROLLED_BACK:
            return True
        if code in _NOT_PREPARED and not session.pooled:
            session.pooled = self._dialer.pooled = True
            return True
        if code == _WRONG_ISOLATION and not session.wrapped:
            session.wrapped = True
            return True
        if code in _NO_SCHEMA or code == _READ_ONLY:
            session.drop()
            return code in _NO_SCHEMA
        if isinstance(error, OutdatedStatement):
            session.prepared.clear()
            return True
        return False
