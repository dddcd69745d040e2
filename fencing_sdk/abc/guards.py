"""What a guard does for a resource, and what a store does for the guards that it keeps itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from fencing_sdk._values.claim import Claim, Grant, Held
from fencing_sdk._values.token import Token

__all__ = ["Guard", "SupportsFence", "TransactionalGuard"]


@runtime_checkable
class Guard(Protocol):
    """
    The resource's side: remembers the highest token it accepted and refuses lower ones.

    Besides these two, each guard has an ``admit`` or ``write`` of its own kind that is part of
    the write itself: check and write are one atomic step, or there is no fence.
    """

    async def raise_to(self, resource: str, token: int) -> None:
        """
        Refuse every token below *token* from now on.

        Raises:
            StaleTokenError: the resource has seen a higher token, or this very number from
                another holder.
        """
        ...

    async def highest(self, resource: str) -> Token | None:
        """The highest token *resource* accepted, or None when it has seen none."""
        ...


@runtime_checkable
class TransactionalGuard(Guard, Protocol):
    """A guard whose fences are rows of a database, so that a transaction there can raise one along with more."""

    @property
    def database(self) -> str | None:
        """The database, without a password; None when the guard does not know it."""
        ...

    async def raise_in(self, transaction: Any, resource: str, token: int, *, wait: float) -> None:
        """
        `Guard.raise_to` as part of an open *transaction* of that database. The fence is raised when it commits.

        The call waits up to *wait* seconds for a transaction that has locked the fence, and then raises the
        database's own error.

        Raises:
            StaleTokenError: as `Guard.raise_to`. The transaction has to be rolled back.
        """
        ...


@runtime_checkable
class SupportsFence(Protocol):
    """A backend whose store may also keep the fences of a guard, and then raises them with the grant."""

    def keeps(self, guard: Guard) -> bool:
        """Return whether `acquire_fenced` takes this *guard*. No I/O."""
        ...

    async def acquire_fenced(self, claim: Claim, fences: Sequence[tuple[Guard, str]]) -> Grant | Held:
        """
        `Backend.acquire`, and with a grant the fence of every guard's resource is raised: all of it or nothing.

        Raises:
            StaleTokenError: a fence could not be raised, and nothing was granted.
            BackendUnavailableError, BackendRefusedError: as `Backend.acquire`.
        """
        ...
