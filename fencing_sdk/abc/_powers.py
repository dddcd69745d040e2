"""Powers that one store has, or that the engine and ``fencing init`` look for. They are not part of the contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto, unique
from typing import Any, NamedTuple, Protocol, runtime_checkable

from fencing_sdk._values.claim import Busy, Claim, Grant, Renewal, Revoked
from fencing_sdk._values.token import Token
from fencing_sdk.abc import Backend, Guard
from fencing_sdk.errors import BackendError


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


class PendingPost(Protocol):
    """A request that was posted."""

    def give_up(self) -> None:
        """
        Give up a call that was not answered in time.

        Closes its connection if the store is silent, and breaks off what it still waits for. An answer that still comes
        is taken: a late grant is released. Never raises.
        """
        ...


@unique
class PostOutcome(Enum):
    """Outcomes of a posted request besides those of `Backend.acquire` and the errors."""

    RELEASED = auto()
    """The owner's grant has ended by this release: what `Backend.release` answers with None."""
    NOT_EXECUTED = auto()
    """The store did nothing, but it will for the full call: the script is not loaded, the key was moved."""


@runtime_checkable
class SupportsPosts(Protocol):
    """
    A backend that can send a request at once, without a task, and hand over its answer by a callback.

    A post means what `Backend.acquire` and `Backend.release` mean, for a caller that is not in the line and for a claim
    of mode `LOCK`. *answer* is called once, in the event loop; it never raises and runs no code of a user. Errors are
    those of the contract. There are three cases:

    1. The answer is known at once: *answer* is called before the post returns None.
    2. The request was sent: the post returns a `PendingPost`, and *answer* is called later.
    3. The post returns None without an answer: nothing was sent, and the engine makes the full call.
    """

    def post_acquire(
        self, claim: Claim, answer: Callable[[Grant | Busy | PostOutcome | BackendError], None]
    ) -> PendingPost | None:
        """Begin `Backend.acquire`."""
        ...

    def post_release(
        self, claim: Claim, answer: Callable[[PostOutcome | Renewal | Revoked | BackendError], None]
    ) -> PendingPost | None:
        """Begin `Backend.release`."""
        ...


class Raising(NamedTuple):
    """A statement that raises a fence, as ``fencing_acquire_fenced`` of PostgreSQL's schema runs it."""

    statement: str
    needs: str
    """Table and permissions that the statement needs, for an error."""
    report: Callable[[str, Token, int | None], None]
    """Reports what became of a resource and its token. Raises the StaleTokenError, if a fence refuses the token."""


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

    async def raising(self, connection: Any) -> Raising:
        """Return the statement that raises a fence on a *connection* to PostgreSQL, once the table is there."""
        ...


@runtime_checkable
class SupportsFence(Protocol):
    """A backend whose store may also keep the fences of a guard, and then raises them with the grant."""

    def keeps(self, guard: Guard) -> bool:
        """Return whether `acquire_fenced` takes this *guard*. No I/O."""
        ...

    async def acquire_fenced(self, claim: Claim, fences: Sequence[tuple[Guard, str]]) -> Grant | Busy:
        """
        `Backend.acquire`, and with a grant the fence of every guard's resource is raised: all of it or nothing.

        Raises:
            StaleTokenError: a fence could not be raised, and nothing was granted.
            BackendUnavailableError, BackendRefusedError: as `Backend.acquire`.
        """
        ...
