"""The part of asyncpg that the backend uses, with types, and a session: one open connection with its statements."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from fencing_sdk._values.drivers import IDLE_LIMIT, imported_from

with imported_from("postgresql", "asyncpg"):
    import asyncpg

from fencing_sdk._values.url import PostgresqlUrl
from fencing_sdk.backends._shared.request_queue import keep_in_children

ServerError: type[Exception] = asyncpg.PostgresError
"""An error that the server sent; `code_of` returns its SQLSTATE."""

ClientConfigurationError: type[Exception] = asyncpg.ClientConfigurationError
TargetNotMatched: type[Exception] = asyncpg.TargetServerAttributeNotMatched
OutdatedStatement: tuple[type[Exception], ...] = (
    asyncpg.InvalidCachedStatementError,
    asyncpg.OutdatedSchemaCacheError,
)
"""The tables or functions have changed since the statement was prepared; it did not run."""
Disconnected: type[Exception] = asyncpg.ConnectionDoesNotExistError


DriverConnection: TypeAlias = Any
"""An `asyncpg.Connection`. The driver has no types."""
DriverRow: TypeAlias = Any
"""An `asyncpg.Record`."""


def connect(url: PostgresqlUrl, arguments: Mapping[str, object]) -> Awaitable[DriverConnection]:
    """Open a connection to what *url* names, unless *arguments* name something else."""
    given = {**url.arguments(), **arguments}
    return cast("Awaitable[DriverConnection]", asyncpg.connect(url.options_dsn, **given))


def code_of(error: BaseException) -> str:
    """Return the SQLSTATE of an error that the server sent, or an empty text."""
    return str(getattr(error, "sqlstate", None) or "") if isinstance(error, ServerError) else ""


_CLOSE_PATIENCE = 0.5
"""Seconds that the server has to answer when the connection is closed."""


class PostgresqlSession:
    """
    One open connection. It runs one statement at a time and never cancels one: see `request_queue`.

    Args:
        connection: An open connection of the driver.

        pooled: Whether a proxy may give every statement to another server process, which does not
            know what was prepared on this one.
    """

    def __init__(self, connection: DriverConnection, *, pooled: bool) -> None:
        self._connection = connection
        self.prepared: dict[str, Any] = {}
        """Statements by their texts. Cleared when the tables or functions have changed."""
        self.pooled = pooled
        self.wrapped = False
        """True if each statement needs its own transaction, because the default isolation is not READ COMMITTED."""
        keep_in_children(self)

    @property
    def closed(self) -> bool:
        """True if the driver knows that the connection is closed."""
        return bool(self._connection.is_closed())

    async def ask(self, statement: str, arguments: tuple[object, ...]) -> DriverRow | None:
        """Run one statement, as `fetch` does, and return its first row."""
        rows = await self.fetch(statement, arguments)
        return rows[0] if rows else None

    async def fetch(self, statement: str, arguments: Sequence[object]) -> Sequence[DriverRow]:
        """
        Run one statement and return its rows. There are three cases.

        1. The default isolation is another one: run the statement in its own transaction.
        2. A proxy pools transactions: prepare nothing.
        3. Otherwise prepare each statement once, because that saves a round trip from then on.

        Raises:
            Exception: the driver's error.
        """
        rows: Sequence[DriverRow]
        if self.wrapped:
            return await self._transact(statement, arguments)
        if self.pooled:
            rows = await self._connection.fetch(statement, *arguments)
            return rows
        prepared = self.prepared.get(statement)
        if prepared is None:
            # Behind a proxy that was not noticed yet, a random name may be unknown, but never another client's.
            name = f"fencing_{uuid.uuid4().hex}"
            prepared = self.prepared[statement] = await self._connection.prepare(statement, name=name)
        rows = await prepared.fetch(*arguments)
        return rows

    async def _transact(self, statement: str, arguments: Sequence[object]) -> Sequence[DriverRow]:
        """
        Run one statement in a transaction of its own.

        The server ends it if this process freezes before the commit. Where a transaction has locked rows, a process
        that freezes between the parsing and the execution of a next statement would keep them locked: PostgreSQL does
        not count that as idle.
        """
        await self._connection.execute(f"BEGIN ISOLATION LEVEL READ COMMITTED; {IDLE_LIMIT}")
        try:
            rows: Sequence[DriverRow] = await self._connection.fetch(statement, *arguments)
        except BaseException:
            if not self.closed:
                await self._connection.execute("ROLLBACK")
            raise
        await self._connection.execute("COMMIT")
        return rows

    async def talks_to_server(self) -> bool:
        """
        Return whether no proxy is between: a proxy that pools sends a process id of its own when a connection opens.

        Raises:
            Exception: the driver's error.
        """
        if self.pooled:
            return False
        row = await self.ask("SELECT pg_catalog.pg_backend_pid()", ())
        return row is not None and bool(row[0] == self._connection.get_server_pid())

    async def listen(self, channel: str, on_notify: Callable[[str], None]) -> None:
        """Call *on_notify* with the payload of every message on *channel*."""

        def on_message(_: object, __: int, ___: str, payload: str) -> None:
            on_notify(payload)

        await self._connection.add_listener(channel, on_message)

    def on_end(self, call: Callable[[], None]) -> None:
        """Call back when the connection ends."""
        self._connection.add_termination_listener(lambda _: call())

    def drop(self) -> None:
        """Close the connection at once, even while a statement runs."""
        self._connection.terminate()

    async def aclose(self) -> None:
        """Close the connection with a message to the server, which has half a second to answer."""
        try:
            await self._connection.close(timeout=_CLOSE_PATIENCE)
        except Exception:  # noqa: BLE001  (the connection must end, whichever error the driver raised)
            self.drop()
