"""
The contracts: what a store does for the engine, and what a guard does for a resource.

A store tries exactly once. Waiting, retrying and time live in the engine. "Another holder has it"
is a value; "the store did not answer" is `BackendUnavailableError`; what another try will not
change is `BackendRefusedError`. Extra powers are protocols of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from enum import Enum, auto, unique
from typing import Protocol, runtime_checkable

from fencing_sdk._values.claim import (
    LOCK,
    READER,
    WRITER,
    Claim,
    Grant,
    Held,
    Holder,
    Listing,
    Mode,
    Permit,
    Renewal,
    Revoked,
    Token,
    Waiting,
)
from fencing_sdk._values.findings import Finding, Severity
from fencing_sdk.abc.guards import Guard, SupportsFence, TransactionalGuard
from fencing_sdk.errors import BackendError, LossReason

__all__ = [
    "LOCK",
    "READER",
    "WRITER",
    "Backend",
    "Claim",
    "Finding",
    "Grant",
    "Guard",
    "Held",
    "Holder",
    "Listing",
    "LossNotice",
    "Mode",
    "Permit",
    "PlaceInLine",
    "Posted",
    "Renewal",
    "Revoked",
    "Sent",
    "Severity",
    "SupportsDiagnosis",
    "SupportsDirectGrant",
    "SupportsFence",
    "SupportsFounding",
    "SupportsListing",
    "SupportsLossNotice",
    "SupportsOpen",
    "SupportsPolling",
    "SupportsPosts",
    "SupportsQueue",
    "SupportsRevoking",
    "SupportsSchema",
    "SupportsShares",
    "Tell",
    "Token",
    "TransactionalGuard",
    "Turn",
    "Waiting",
]


class Backend(Protocol):
    """
    A lock service, seen through five calls. Used by many tasks of one event loop at once.

    Connections are opened by the first call, and again by a call that comes after `aclose`.
    """

    async def acquire(self, claim: Claim) -> Grant | Held:
        """
        Try once to take the lock for ``claim.owner``.

        The same owner again, while it holds, gets the same token and a fresh ttl. A grant's token
        is higher than that of every earlier grant of the name, whatever happened in between:
        release, expiry, clean-up, restart.

        Raises:
            BackendUnavailableError: the outcome is unknown.
            BackendRefusedError: another try will not help.
        """
        ...

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal | Revoked]:
        """
        Restart the ttl of every claim that still holds; one outcome each, in order.

        Never creates a grant and never revives an expired one. Claims that could not be asked
        about (their shard is down) are `Renewal.UNKNOWN`; the others keep their answers. A call
        that is cancelled at its limit while some shards have answered may return what it has.

        Raises:
            BackendUnavailableError: no claim has an answer.
        """
        ...

    async def release(self, claim: Claim) -> Renewal | Revoked | None:
        """
        Give the lock back if ``claim.owner`` holds it; return None if this call has done so, or the store cannot tell.

        Idempotent. Otherwise return what a renewal would: a holder whose first release finds no grant has lost it.
        """
        ...

    async def inspect(self, name: str) -> Holder | None:
        """Tell who holds *name*, or None when it is free."""
        ...

    async def aclose(self) -> None:
        """Close the connections. Grants stay until they are released or expire."""
        ...


@runtime_checkable
class SupportsOpen(Protocol):
    """A backend that can say at once, and not at the first lock, that it cannot work."""

    async def open(self) -> None:
        """
        Connect.

        Raises:
            BackendError: the store cannot be used.
        """
        ...


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
            BackendError: the store cannot be reached, or permits it not.
        """
        ...


@runtime_checkable
class SupportsFounding(Backend, Protocol):
    """A backend on several independent servers that has to be told once that they belong together."""

    async def found(self) -> str:
        """
        Found the store, or let servers take part again that have lost their memory; return what was done.

        Idempotent, and safe while others do the same. It may last as long as the longest lease.

        Raises:
            BackendError: a server cannot be reached, or too few remember what they have granted.
        """
        ...


@runtime_checkable
class SupportsDiagnosis(Protocol):
    """A backend that can tell how its store is set up, and what of that breaks a promise."""

    async def diagnose(self, ttl: float) -> Sequence[Finding]:
        """
        Look at the store and its settings, each of its hosts by itself. What cannot be read is a finding too.

        It works where `SupportsOpen.open` fails, changes nothing, and takes a bounded time.

        Args:
            ttl: Seconds of the locks in use.

        Raises:
            BackendError: the store told nothing.
        """
        ...

    async def server_time(self) -> float | None:
        """
        Seconds since 1970 by the clock of the store; None where it is that of this machine, or the store does not tell.

        Raises:
            BackendError: the store did not answer.
        """
        ...


class Sent(Protocol):
    """A request that was posted."""

    def give_up(self) -> None:
        """
        It was not answered in time. Close its connection if the store is silent, and break off what it still waits for.

        An answer may still come, and is taken: a grant that comes late is released. Never raises.
        """
        ...


@unique
class Posted(Enum):
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
    2. The request was sent: the post returns a `Sent`, and *answer* is called later.
    3. The post returns None without an answer: nothing was sent, and the engine makes the full call.
    """

    def post_acquire(self, claim: Claim, answer: Callable[[Grant | Held | Posted | BackendError], None]) -> Sent | None:
        """Begin `Backend.acquire`."""
        ...

    def post_release(
        self, claim: Claim, answer: Callable[[Posted | Renewal | Revoked | BackendError], None]
    ) -> Sent | None:
        """Begin `Backend.release`."""
        ...


class Turn(Protocol):
    """What a waiter in the line of one lock waits for: its turn."""

    async def wait(self) -> None:
        """Return when another try may succeed. May wake for nothing; the caller keeps its own timer."""
        ...


@runtime_checkable
class SupportsQueue(Protocol):
    """A backend that lets waiters stand in line and wakes them."""

    def queue(self, claim: Claim) -> AbstractAsyncContextManager[Turn]:
        """
        Join the line for ``claim.name``; leaving the context leaves the line, also when cancelled.

        Entering returns only when a release can no longer be missed. While a waiter is in the
        line, `Backend.acquire` grants to the head of the line alone.
        """
        ...


@runtime_checkable
class SupportsShares(Protocol):
    """
    A backend that lets several owners hold one name: claims of every `Mode`, and not of `LOCK` alone.

    * A writer and a lock are granted when no other owner holds the name; a reader when only readers hold it; a
      permit when nothing but permits is held, and fewer than its `Permit.of`. It gets the lowest free number.
    * There is one line, in order of arrival, and only its head is granted, so no writer starves. A granted share
      wakes the next head if that one fits too. A release, and a waiter that leaves, wakes the head if it fits. Readers
      may also be woken together, and be granted as long as only readers are before them.
    * The token of a permit and of a writer is higher than every earlier one of the name. That of a reader is the token
      of the readers who hold the name now; else a new one, or that of the last readers if only readers came since.
    * To renew, to release and to inspect work as for a lock; `Backend.inspect` tells one of several holders.

    Permits, readers, writers and plain locks of one name wait for each other. Its tokens grow across
    all of them, in the order of the grants.
    """

    async def holders(self, name: str) -> Sequence[Holder]:
        """
        Tell who holds *name*, in the order of their permits, or of their tokens.

        Raises:
            BackendUnavailableError, BackendRefusedError: as `Backend.inspect`.
        """
        ...


class Tell(Protocol):
    """Called in the event loop by a backend that has news for a waiter. Never raises, and runs no code of users."""

    def __call__(self, grant: Grant | None = None, age: float = 0.0) -> None:
        """
        Without *grant*: another try may succeed, perhaps for nothing.

        With *grant*: the lock was granted to the waiter. Its ttl was restarted less than *age* seconds ago.
        """
        ...


class PlaceInLine(Protocol):
    """The place of a waiter in the line of one lock. The store may grant the lock to it without being asked again."""

    def nap(self, advice: float) -> float | None:
        """
        Seconds after which the waiter tries again although it was told nothing.

        None: it is not in the line, or not yet, and tries again as if there were no line. *advice* is what the
        `Held.retry_after` of its last try makes advisable.
        """
        ...

    def leave(self) -> None:
        """Tell the waiter nothing more. If it was not granted, the caller also calls `Backend.release`."""
        ...


@runtime_checkable
class SupportsDirectGrant(Protocol):
    """A backend whose release hands the lock to the waiter at the head of the line, with its token."""

    def stand(self, claim: Claim, tell: Tell) -> PlaceInLine:
        """
        Join the line for ``claim.name``, in the background, and call *tell* when there is news.

        A release that comes after this call is not missed. `Backend.release` takes the waiter out of the line, and
        gives back a grant that was on its way to it.
        """
        ...


@runtime_checkable
class SupportsPolling(Protocol):
    """A backend whose store wakes no waiter: those of one client stand in line, and its head asks the store."""

    def line_up(self, claim: Claim, tell: Tell) -> PlaceInLine:
        """
        Join the client's line for ``claim.name``; *tell* is called, without a grant, when another try may succeed.

        While a waiter is in the line, `Backend.acquire` refuses the others of this client without asking the store.
        """
        ...


class LossNotice(Protocol):
    """Called in the event loop by a backend that learns that a grant is gone."""

    def __call__(self, claim: Claim, reason: LossReason, detail: str = "", /) -> object:
        """Tell that the grant of *claim* is over; *detail* is what the operator wrote, where one took it away."""
        ...


@runtime_checkable
class SupportsLossNotice(Protocol):
    """A backend that tells at once when a grant is taken away behind its holder's back."""

    def on_loss(self, notice: LossNotice) -> Callable[[], object]:
        """Call *notice* for every grant that ends without its holder, until the returned call is made."""
        ...


@runtime_checkable
class SupportsListing(Protocol):
    """A backend that tells what is held, page by page, and who waits."""

    async def list_held(self, prefix: str, cursor: str | None, limit: int) -> Listing:
        """
        Return about *limit* of the holders of names that begin with *prefix*, from *cursor* on, in any order.

        A name that is held from the first page to the last is told at least once. A page may be empty before the
        end. It takes memory for one page, and holds up no other call. Readers and permits are told one by one.

        Raises:
            BackendUnavailableError, BackendRefusedError: as `Backend.inspect`.
        """
        ...

    async def list_waiters(self, name: str) -> Sequence[Waiting]:
        """
        Tell who waits for *name*, in the order of the line.

        Raises:
            BackendUnavailableError, BackendRefusedError: as `Backend.inspect`.
        """
        ...


@runtime_checkable
class SupportsRevoking(Protocol):
    """A backend that takes a grant away from its holder."""

    async def revoke(self, name: str, token: int, reason: str) -> bool:
        """
        End every grant of *name* that has this *token*: a lock, a writer, a permit, or all readers who share it.

        The store compares and ends in one step, so that a later grant is never ended. The next token is higher, as
        after a release, and the next waiter is woken or granted. A `SupportsLossNotice` tells the holder at once, with
        the *reason*; any other store answers its next renewal with `Revoked`, or with a refusal once the
        reason is forgotten: after one ttl at the earliest.

        Returns:
            Whether a grant was ended. False: none has this token.

        Raises:
            BackendUnavailableError: the store did not answer; the grant may have been ended.
            BackendRefusedError: it refused.
        """
        ...
