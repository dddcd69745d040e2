"""The part of asyncpg that the backend uses, with types: asyncpg has none of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Protocol, cast

from fencing_sdk._values.drivers import imported_from

with imported_from("postgresql", "asyncpg"):
    import asyncpg

from fencing_sdk._values.url import PostgresqlUrl

ServerError: type[Exception] = asyncpg.PostgresError
"""An error that the server sent; `code_of` returns its SQLSTATE."""

DriverError: type[Exception] = asyncpg.InterfaceError
"""The driver itself refused, or found the connection closed."""

ClientConfigurationError: type[Exception] = asyncpg.ClientConfigurationError
TargetNotMatched: type[Exception] = asyncpg.TargetServerAttributeNotMatched
OutdatedStatement: tuple[type[Exception], ...] = (
    asyncpg.InvalidCachedStatementError,
    asyncpg.OutdatedSchemaCacheError,
)
"""The tables or functions have changed since the statement was prepared; it did not run."""
Disconnected: type[Exception] = asyncpg.ConnectionDoesNotExistError
InternalClientError: type[Exception] = asyncpg.InternalClientError


class DriverRow(Protocol):
    """One row of an answer."""

    def __getitem__(self, column: int) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...


class PreparedStatement(Protocol):
    """A statement that the server has prepared."""

    async def fetchrow(self, *arguments: object) -> DriverRow | None:
        """Run it and return the first row."""
        ...


class DriverConnection(Protocol):
    """A connection of asyncpg; it runs one statement at a time."""

    async def prepare(self, statement: str, *, name: str) -> PreparedStatement:
        """Prepare a statement under a name."""
        ...

    async def fetchrow(self, statement: str, *arguments: object) -> DriverRow | None:
        """Prepare and run a statement; return the first row."""
        ...

    async def execute(self, script: str) -> str:
        """Run statements without parameters."""
        ...

    async def add_listener(self, channel: str, callback: Callable[[object, int, str, str], None]) -> None:
        """Call *callback* with each notification on a channel."""
        ...

    async def remove_listener(self, channel: str, callback: Callable[[object, int, str, str], None]) -> None:
        """Stop calling *callback*. The last one of the channel sends UNLISTEN to the server."""
        ...

    def add_termination_listener(self, callback: Callable[[object], None]) -> None:
        """Call *callback* when the connection ends."""
        ...

    def get_server_pid(self) -> int:
        """Return the process id that the server has sent at the beginning."""
        ...

    def is_closed(self) -> bool:
        """Return whether the connection ended."""
        ...

    async def close(self, *, timeout: float) -> None:
        """Close the connection after a message to the server."""
        ...

    def terminate(self) -> None:
        """Close the connection without a message to the server."""
        ...


def connect(url: PostgresqlUrl, arguments: Mapping[str, object]) -> Awaitable[DriverConnection]:
    """Open a connection to what *url* names, unless *arguments* name something else."""
    given = {**url.arguments(), **arguments}
    return cast("Awaitable[DriverConnection]", asyncpg.connect(url.options_dsn, **given))


def code_of(error: BaseException) -> str:
    """Return the SQLSTATE of an error that the server sent, or an empty text."""
    return str(getattr(error, "sqlstate", None) or "") if isinstance(error, ServerError) else ""
