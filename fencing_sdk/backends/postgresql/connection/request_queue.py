"""
The connection of PostgreSQL for a client's requests, and what it makes of an error of the server.

Everything else is in `fencing_sdk.backends._shared.request_queue`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fencing_sdk.backends._shared.request_queue import RequestConnection
from fencing_sdk.backends.postgresql.connection.dial import PostgresqlDialer
from fencing_sdk.backends.postgresql.connection.driver import DriverRow, OutdatedStatement, code_of
from fencing_sdk.backends.postgresql.connection.session import PostgresqlSession

_ROLLED_BACK = {"40001", "40P01"}
_NOT_PREPARED = {"26000", "42P05"}
_NO_SCHEMA = {"3F000", "42883", "42P01"}
_WRONG_ISOLATION = "FS002"
_READ_ONLY = "25006"

RequestBody = Callable[[PostgresqlSession], Awaitable[DriverRow | None]]
"""What a request does on a session: one statement, or one transaction."""


class PostgresqlConnection(RequestConnection[PostgresqlSession]):
    """The connection of one backend."""

    def __init__(self, dialer: PostgresqlDialer) -> None:
        super().__init__(self._dial, self._adapted)
        self._dialer = dialer

    async def _dial(self) -> PostgresqlSession:
        return await self._dialer.dial()

    async def ask(
        self, statement: str, arguments: tuple[object, ...], *, urgent: bool = False, must_run: bool = False
    ) -> DriverRow | None:
        """
        Run one *statement* with its parameters, as `run` does, and return its first row.

        Raises:
            Exception: the driver's error.
        """
        return await self.run(lambda session: session.ask(statement, arguments), urgent=urgent, must_run=must_run)

    async def open(self) -> None:
        """Connect, unless connected already."""
        await self.ask("SELECT 1", ())

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
            session.forget_statements()
            return True
        return False
