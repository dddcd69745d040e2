"""The driver, asyncpg, as far as it is used here: it has no types of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Protocol, cast

import asyncpg

__all__ = ["ClientConfigurationError", "Connection", "DriverError", "Row", "ServerError", "Statement", "connect"]

ServerError: type[Exception] = asyncpg.PostgresError
"""What the server said; `code_of` tells which SQLSTATE."""

DriverError: type[Exception] = asyncpg.InterfaceError
"""The driver itself refused, or found the connection closed."""

ClientConfigurationError: type[Exception] = asyncpg.ClientConfigurationError
TargetNotMatched: type[Exception] = asyncpg.TargetServerAttributeNotMatched
Outdated: tuple[type[Exception], ...] = (asyncpg.InvalidCachedStatementError, asyncpg.OutdatedSchemaCacheError)
"""A statement was prepared for tables and functions that are not what they were; it did not run."""
Disconnected: type[Exception] = asyncpg.ConnectionDoesNotExistError
InternalClientError: type[Exception] = asyncpg.InternalClientError


class Row(Protocol):
    """One row of an answer."""

    def __getitem__(self, column: int) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...


class Statement(Protocol):
    """A statement that the server has prepared."""

    async def fetchrow(self, *arguments: object) -> Row | None: ...


class Connection(Protocol):
    """One connection; one statement at a time."""

    async def prepare(self, statement: str, *, name: str) -> Statement: ...

    async def fetchrow(self, statement: str, *arguments: object) -> Row | None: ...

    async def execute(self, script: str) -> str: ...

    async def add_listener(self, channel: str, callback: Callable[[object, int, str, str], None]) -> None: ...

    def add_termination_listener(self, callback: Callable[[object], None]) -> None: ...

    def is_closed(self) -> bool: ...

    async def close(self, *, timeout: float) -> None: ...

    def terminate(self) -> None: ...


def connect(dsn: str, arguments: Mapping[str, object]) -> Awaitable[Connection]:
    """Open a connection."""
    return cast("Awaitable[Connection]", asyncpg.connect(dsn, **arguments))


def code_of(error: BaseException) -> str:
    """The SQLSTATE of what the server said, or an empty text."""
    return str(getattr(error, "sqlstate", None) or "") if isinstance(error, ServerError) else ""
