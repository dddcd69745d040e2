"""
From an address to a session with the server that takes writes.

Several hosts are asked at the same time, so that one which is silent costs nothing. Passed over are standbys, and old
primaries that were made read-only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from fencing_sdk.backends.postgresql import _driver
from fencing_sdk.backends.postgresql._driver import Connection
from fencing_sdk.backends.postgresql._schema import create, mark
from fencing_sdk.backends.postgresql._session import Session
from fencing_sdk.backends.postgresql._settings import Address, Choices
from fencing_sdk.backends.postgresql._translation import BACKEND, ReadOnlyError, StandbyError, translated
from fencing_sdk.errors import BackendRefusedError, shown

_CREATE_PATIENCE = 30.0
"""Seconds that the creation of the tables may take, which waits for whoever does the same."""
_LAST_WORDS = 0.2
"""Seconds that the opening of a connection nobody needs any more has to end."""


_Preparation = Callable[[Connection], Awaitable[None]]


class _ConclusiveError(Exception):
    """Said about the server that takes writes, so that no other host can say otherwise."""

    def __init__(self, error: BackendRefusedError) -> None:
        super().__init__()
        self.error = error


class Dialer:
    """Opens sessions. Args as in `PostgresqlBackend`."""

    def __init__(self, address: Address, choices: Choices, driver: Mapping[str, object]) -> None:
        self._address = address
        self._choices = choices
        self._driver = {**driver, "timeout": choices.connect_timeout, "statement_cache_size": 0}
        self.pooled = choices.pooled

    async def dial(self) -> Session:
        """
        Connect to the server that takes writes, and see that the tables are there.

        Raises:
            BackendError: there is none, or it cannot be used.
        """
        return await self._first(prepare=self._prepare)

    async def dial_anyway(self) -> Session:
        """`dial`, and leave the tables alone."""
        return await self._first(prepare=None)

    async def create(self) -> None:
        """
        Create the tables and functions that are missing.

        Raises:
            Exception: it is not permitted, or the connection broke.
        """
        connection = await self._any(prepare=_create_in(self._choices.schema))
        await Session(connection, pooled=self.pooled).aclose()

    async def _first(self, prepare: _Preparation | None) -> Session:
        return Session(await self._any(prepare), pooled=self.pooled)

    async def _any(self, prepare: _Preparation | None) -> Connection:
        tasks = {asyncio.create_task(self._open(url, prepare)) for url in self._address.urls}
        chosen: Connection | None = None
        try:
            chosen = await _first_of(tasks)
        except _ConclusiveError as said:
            raise said.error from said.error.__cause__
        finally:
            await _end(tasks, keep=chosen)
        return chosen

    async def _open(self, url: str, prepare: _Preparation | None) -> Connection:
        connection: Connection | None = None
        try:
            async with asyncio.timeout(self._choices.connect_timeout):
                connection = await self._connect(url)
                complete = await self._greet(connection)
            if prepare is not None and not complete:
                async with asyncio.timeout(_CREATE_PATIENCE):
                    await prepare(connection)
        except BaseException:
            if connection is not None:
                connection.terminate()
            raise
        return connection

    async def _connect(self, url: str) -> Connection:
        try:
            return await _driver.connect(url, self._driver)
        except (_driver.ClientConfigurationError, ValueError, TypeError):
            pass  # its message may quote the URL
        detail = "the URL or an argument of the driver cannot be used; is every option in the query one of libpq's?"
        raise BackendRefusedError(BACKEND, "connect", detail)

    async def _greet(self, connection: Connection) -> bool:
        """Whether the tables and functions are there."""
        row = await connection.fetchrow(
            "SELECT pg_catalog.pg_is_in_recovery(), pg_catalog.current_setting('transaction_read_only'), "
            "pg_catalog.to_regprocedure($1) IS NOT NULL",
            mark(self._choices.schema),
        )
        assert row is not None
        standby, read_only, complete = row
        if standby:
            raise StandbyError
        if read_only == "on":  # in a standby too, but that has a reason of its own
            raise ReadOnlyError
        return bool(complete)

    async def _prepare(self, connection: Connection) -> None:
        schema = self._choices.schema
        way_out = (
            "run 'fencing init --url ...' or what schema_sql() returns as a role that may create it; this role then "
            "needs USAGE on the schema, and SELECT, INSERT, UPDATE and DELETE on its tables"
        )
        if not self._choices.create:
            detail = f"schema {shown(schema)} lacks the tables or functions of this version; {way_out}"
            raise _ConclusiveError(BackendRefusedError(BACKEND, "connect", detail))
        try:
            await create(connection, schema)
        except _driver.ServerError as error:
            if _driver.code_of(error) != "42501":
                raise
            detail = f"the role may not use or create schema {shown(schema)}; {way_out}"
            refusal = BackendRefusedError(BACKEND, "connect", detail)
            refusal.__cause__ = error
            raise _ConclusiveError(refusal) from error


async def _first_of(tasks: set[asyncio.Task[Connection]]) -> Connection:
    errors: list[Exception] = []
    left = tasks
    while left:
        done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            error = task.exception()
            if error is None:
                return task.result()
            if isinstance(error, _ConclusiveError) or not isinstance(error, Exception):
                raise error
            errors.append(error)
    # Where one host may still come up or be promoted, another try may help, whatever the others say.
    raise next((error for error in errors if not _is_refusal(error)), errors[0])


def _is_refusal(error: Exception) -> bool:
    return isinstance(translated("connect", error), BackendRefusedError)


async def _end(tasks: set[asyncio.Task[Connection]], *, keep: Connection | None) -> None:
    """Close what the others have opened, now or when they have."""

    def close(task: asyncio.Task[Connection]) -> None:
        if not task.cancelled() and task.exception() is None and task.result() is not keep:
            task.result().terminate()

    for task in tasks:
        task.cancel()
        task.add_done_callback(close)
    await asyncio.wait(tasks, timeout=_LAST_WORDS)


def _create_in(schema: str) -> _Preparation:
    async def prepare(connection: Connection) -> None:
        await create(connection, schema)

    return prepare
