"""
The contracts: what a store does for the engine, and what a guard does for a resource.

A store tries exactly once. Waiting, retrying and time live in the engine. "Another holder has it"
is a value; "the store did not answer" is `BackendUnavailableError`; a permanent error that certainly took no lock is
`BackendRefusedError`. Extra powers are protocols of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from fencing_sdk._values.claim import (
    LOCK,
    READER,
    WRITER,
    Busy,
    Claim,
    Grant,
    Holder,
    Listing,
    Mode,
    Permit,
    Renewal,
    Revoked,
    Waiting,
)
from fencing_sdk._values.reports import Finding
from fencing_sdk._values.token import Token
from fencing_sdk.errors import LossReason

__all__ = [
    "LOCK",
    "READER",
    "WRITER",
    "Backend",
    "Busy",
    "Claim",
    "Grant",
    "Guard",
    "Holder",
    "Listing",
    "LossNotice",
    "Mode",
    "Permit",
    "PlaceInLine",
    "Renewal",
    "Revoked",
    "SupportsDiagnosis",
    "SupportsLine",
    "SupportsListing",
    "SupportsLossNotice",
    "SupportsOpen",
    "SupportsRevoking",
    "SupportsShares",
    "SupportsTransfer",
    "WaiterNotice",
    "Waiting",
]


class Backend(Protocol):
    """
    A lock service, seen through five calls. Used by many tasks of one event loop at once.

    Connections are opened by the first call, and again by a call that comes after `aclose`.
    """

    async def acquire(self, claim: Claim) -> Grant | Busy:
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

        Never creates a grant and never revives an expired one. Claims whose shard is down are `Renewal.UNKNOWN`; the
        others keep their answers. A call that is cancelled at its limit while some shards have answered may return what
        it has.

        Raises:
            BackendUnavailableError: no claim has an answer.
        """
        ...

    async def release(self, claim: Claim) -> Renewal | Revoked | None:
        """
        Release the lock if ``claim.owner`` holds it; return None if it did, or if the store does not know.

        Idempotent. Otherwise return what a renewal would: a holder whose first release finds no grant has lost it.
        """
        ...

    async def inspect(self, name: str) -> Holder | None:
        """Return the holder of *name*, or None when it is free."""
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
class SupportsDiagnosis(Protocol):
    """A backend that can report how its store is set up, and what of that breaks a promise."""

    async def diagnose(self, ttl: float) -> Sequence[Finding]:
        """
        Look at the store and its settings, each of its hosts by itself. What cannot be read is a finding too.

        It works where `SupportsOpen.open` fails, changes nothing, and takes a bounded time.

        Args:
            ttl: Seconds of the locks in use.

        Raises:
            BackendError: the store reported nothing.
        """
        ...

    async def server_time(self) -> float | None:
        """
        Return seconds since 1970 by the clock of the store; None where that is this machine's, or the store hides it.

        Raises:
            BackendError: the store did not answer.
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
    * To renew, to release and to inspect work as for a lock; `Backend.inspect` returns one of several holders.

    Permits, readers, writers and plain locks of one name wait for each other. Its tokens grow across
    all of them, in the order of the grants.
    """

    async def holders(self, name: str) -> Sequence[Holder]:
        """
        Return the holders of *name*, in the order of their permits, or of their tokens.

        Raises:
            BackendUnavailableError, BackendRefusedError: as `Backend.inspect`.
        """
        ...


class WaiterNotice(Protocol):
    """Called in the event loop by a backend that has news for a waiter. Never raises, and runs no code of users."""

    def __call__(self, grant: Grant | None = None, age: float = 0.0) -> None:
        """
        Without *grant*: another try may succeed, perhaps for nothing.

        With *grant*: the lock was granted to the waiter. Its ttl was restarted less than *age* seconds ago.
        """
        ...


class PlaceInLine(Protocol):
    """The place of a waiter in the line of one name. A class that inherits from this one has the defaults."""

    hands_over: bool = False
    """
    True if the store may grant the lock to this waiter without another try.

    If so, a waiter that gives up also calls `Backend.release`, which takes it out of the line, and releases a grant
    that was on its way to it.
    """

    polls: bool = False
    """
    True if the store wakes no waiter: then the pauses that a caller has chosen come before those of
    `retry_after`.
    """

    notices_joining: bool = False
    """True if there is news as soon as it is in the line, although the lock may be held."""

    def retry_after(self, advice: float) -> float | None:
        """
        Seconds after which the waiter tries again although it has heard nothing.

        None: it is not in the line, or not yet, and tries again as if there were no line. *advice* is what the
        `Busy.retry_after` of its last try makes advisable.
        """
        ...

    def leave(self) -> asyncio.Future[None] | None:
        """
        Give the waiter no more news, and take it out of the line unless it was granted or `hands_over`.

        Return None where that is done, else what ends with it: the closing of the client waits for that, up to its
        limit, and then cancels it. Never raises, and may be called again.
        """
        ...


@runtime_checkable
class SupportsLine(Protocol):
    """
    A backend that lets waiters stand in line, and wakes them or hands them the lock.

    While a waiter is in the line, `Backend.acquire` grants to the head of the line alone. Where the store wakes no
    waiter (`PlaceInLine.polls`), the line is that of one client, whose head asks the store.
    """

    def stand(self, claim: Claim, notify: WaiterNotice, *, hand_over: bool) -> PlaceInLine:
        """
        Join the line for ``claim.name``, in the background, and call *notify* when there is news.

        A release that comes after this call is not missed: either the waiter is in the line by then, or it hears once
        it is. A place that was lost by a fault is taken again. No error of joining reaches the waiter: its next try
        raises the store's.

        Args:
            claim: Who waits, and for what.

            notify: Called with each news, perhaps before this call returns.

            hand_over: The store may grant the lock to this waiter. Else it only wakes it: a try is needed where fences
                are raised with the grant, and for a share. A store that never hands over ignores it.
        """
        ...


class LossNotice(Protocol):
    """Called in the event loop by a backend that learns that a grant is gone."""

    def __call__(self, claim: Claim, reason: LossReason, detail: str = "", /) -> object:
        """Report that the grant of *claim* has ended; *detail* is the reason of an operator who took it away."""
        ...


@runtime_checkable
class SupportsLossNotice(Protocol):
    """A backend that reports at once when a grant is taken away behind its holder's back."""

    def on_loss(self, notice: LossNotice) -> Callable[[], object]:
        """Call *notice* for every grant that ends without its holder, until the returned call is made."""
        ...


@runtime_checkable
class SupportsListing(Protocol):
    """A backend that lists holders, page by page, and waiters."""

    async def list_holders(self, prefix: str, cursor: str | None, limit: int) -> Listing:
        """
        Return about *limit* of the holders of names that begin with *prefix*, from *cursor* on, in any order.

        A name that is held from the first page to the last appears at least once. A page may be empty before the
        end. It takes memory for one page, and holds up no other call. Readers and permits appear one by one.

        Raises:
            BackendUnavailableError, BackendRefusedError: as `Backend.inspect`.
        """
        ...

    async def list_waiters(self, name: str) -> Sequence[Waiting]:
        """
        Return the waiters for *name*, in the order of the line.

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
        after a release, and the next waiter is woken or granted. A `SupportsLossNotice` notifies the holder at once,
        with the *reason*; any other store answers its next renewal with `Revoked`, or with a refusal once the reason is
        forgotten: after one ttl at the earliest.

        Returns:
            True if this call ended the grant. False if no grant has this token.

        Raises:
            BackendUnavailableError: the store did not answer; the grant may have been ended.
            BackendRefusedError: it refused.
        """
        ...


@runtime_checkable
class SupportsTransfer(Protocol):
    """A backend whose grants pass from one owner to another in one step."""

    async def transfer(self, of: Claim, to: Claim) -> Grant | Renewal | Revoked:
        """
        Give the grant of ``of.owner`` to ``to.owner``: its mode and permit, with the ttl and the label of *to*.

        Idempotent: if ``to.owner`` holds already, its ttl is restarted. The token is higher than every earlier one of
        the name, except that readers keep the token that they share. Waiters keep their places, and are not woken. From
        then on a renewal and a release by ``of.owner`` are refused, whenever they arrive.

        Returns:
            The grant; or, if ``of.owner`` does not hold, what a renewal of *of* returns.

        Raises:
            BackendUnavailableError, BackendRefusedError: as `Backend.acquire`.
        """
        ...


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
