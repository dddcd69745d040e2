"""Powers that ``fencing init`` looks for. They are not part of the contract."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from fencing_sdk.abc import Backend


@runtime_checkable
class SupportsSchema(Backend, Protocol):
    """A backend with tables of its own, which a migration may create instead of the first call."""

    def schema_sql(self) -> str:
        """The statements that create them, for those who migrate by hand."""
        ...

    async def create_schema(self) -> None:
        """
        Create what is missing. Idempotent, and safe while others do the same.

        Raises:
            BackendError: the store is unreachable, or denies it.
        """
        ...


@runtime_checkable
class SupportsInit(Backend, Protocol):
    """A backend on several independent servers, which a person has to join into one store once."""

    async def init(self) -> str:
        """
        Found the store, or let servers take part again that have lost their memory; return what was done.

        Idempotent, and safe while others do the same. It may last as long as the longest lease.

        Raises:
            BackendError: a server cannot be reached, or too few remember what they have granted.
        """
        ...
