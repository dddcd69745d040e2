"""
The contracts: what a store does for the engine, and what a guard does for a resource.

"Another holder has it" is a value; "the store did not answer" is `BackendUnavailableError`; a permanent error that
certainly took no lock is `BackendRefusedError`. Waiting, retrying and time live in the engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from fencing_sdk._values.answer import Answer
from fencing_sdk._values.claim import (
    HELD,
    LOCK,
    READER,
    WRITER,
    Busy,
    Claim,
    Gone,
    Mode,
    Permit,
    Place,
    Seen,
)
from fencing_sdk._values.reports import Finding
from fencing_sdk._values.token import Token
from fencing_sdk.abc.line import WAITER_TTL

__all__ = [
    "ALL_MODES",
    "HELD",
    "LOCK",
    "READER",
    "WAITER_TTL",
    "WRITER",
    "Answer",
    "Backend",
    "Bell",
    "Busy",
    "Claim",
    "Gone",
    "Guard",
    "Kept",
    "Mode",
    "News",
    "PassesOn",
    "Permit",
    "Place",
    "Seen",
    "SupportsDiagnosis",
    "SupportsOpen",
]


ALL_MODES = frozenset({"lock", "writer", "reader", "permit"})
"""The words of all modes."""
Kept: TypeAlias = tuple[Claim, int]
"""A claim, and the number of its ticket (`Place.number`)."""
News: TypeAlias = Place | Gone | None
"""
News that a bell rings. A `Place` with a token: the ticket of that number holds, and lives as its latest answer said.
A `Gone` with a reason: an operator has ended it. Anything else: something has changed, and a ``keep`` says what.
"""
Bell: TypeAlias = Callable[[News], object]
"""Called in the event loop. Never raises, and runs no code of users."""


class Backend(Protocol):
    """
    A lock service: a line of tickets for each name, seen through six verbs and a bell. It knows no lock and no lease.

    An owner that wants a name draws a ticket at the end of its line, and keeps it alive. A ticket holds when it, and
    every one ahead of it, fits beside those before (`fencing_sdk.abc.line` has the rules). In the step in which it
    begins to hold it gets its token, which is higher than every earlier one of the name, whatever happened in between:
    release, expiry, clean-up, restart. Each verb is one atomic step on one name, and first passes over the dead.

    A verb tries exactly once; it may ask again where it knows that its first request did nothing. The request is sent
    when the verb is called, and goes on if the caller is cancelled: a verb is a coroutine, which the client runs in a
    task, or a function that returns an `Answer`. Many tasks of one event loop use a backend at once. Connections are
    opened by the first call, and again by a call that comes after `aclose`.

    Raises, from every verb:
        BackendUnavailableError: it is unknown whether the step happened.
        BackendRefusedError: it did not, and another try will not help.
    """

    @property
    def modes(self) -> Collection[str]:
        """The words of the modes that it takes (`Mode.word`): ``{"lock"}``, or all of them. An attribute will do."""
        ...

    @property
    def rings(self) -> bool:
        """
        True where a store has lines, and rings for those who wait. An attribute will do.

        Elsewhere claims are drawn with *only_if_it_holds* alone, and waiters try again.
        """
        ...

    def draw(self, claim: Claim, *, only_if_it_holds: bool = False) -> Awaitable[Place | Busy]:
        """
        Put a ticket at the end of the line for ``claim.name``. An owner that has one keeps it, as by `keep`.

        *only_if_it_holds*: draw none that would have to wait, and use up no token.
        """
        ...

    def keep(self, tickets: Sequence[Kept]) -> Awaitable[Sequence[Place | Gone | None]]:
        """
        Let tickets live for the ttl of their claims from now on; one answer each, in order.

        Never creates, revives or shortens one. A ticket that waits lives for `WAITER_TTL` at most. None: the server of
        this ticket did not answer. `HELD`: it holds as before, and its token was not read.

        Raises:
            BackendUnavailableError: no ticket has an answer.
        """
        ...

    def give_back(self, claim: Claim, *, after: float = 0.0) -> Awaitable[Gone | None]:
        """
        End the owner's ticket, whether it holds or waits. Idempotent; it never touches another owner's.

        *after*: a ticket that holds goes on to stand there, for so many seconds from now, and no `keep` reaches it. The
        same call again changes nothing.

        Returns:
            None if the ticket was there, or if the store does not know; else what became of it before.
        """
        ...

    def end(self, name: str, token: int, reason: str) -> Awaitable[bool]:
        """
        End every ticket that holds *name* with this *token*: an operator's `give_back`. False: none does.

        The bell of its owner rings, and its next `keep` and `give_back` answer with the *reason*.
        """
        ...

    def tickets(self, names: Sequence[str]) -> Awaitable[Sequence[Sequence[Seen]]]:
        """Return the living tickets of each name: those that hold, then those that wait in the order of the line."""
        ...

    def names(self, prefix: str, cursor: str | None, limit: int) -> Awaitable[tuple[Sequence[str], str | None]]:
        """
        Return about *limit* names that begin with *prefix* and may have tickets, and the cursor of the next page.

        A name that is held from the first page to the last appears at least once, in any order. A page may be empty
        before the end, where the cursor is None. It takes memory for one page, and holds up no other call.
        """
        ...

    def listen(self, claim: Claim, bell: Bell) -> Callable[[], object]:
        """
        Ring *bell* when the ticket of *claim* begins to hold without having asked, is ended, or is lost.

        Called before `draw`. A bell may be lost with a connection, and may ring for nothing: who waits keeps its ticket
        anyway, and learns from the answer. No bell rings once the returned call was made.
        """
        ...

    async def aclose(self) -> None:
        """Close the connections. Tickets stay until they are given back or die."""
        ...


@runtime_checkable
class PassesOn(Protocol):
    """A backend whose tickets change hands in one step."""

    def pass_on(self, claim: Claim, heir: Claim) -> Awaitable[Place | Gone]:
        """
        Give the place of a ticket that holds to *heir*, with the ttl and the label of that one. Idempotent.

        The token is new, except that readers keep the one that they share. Those who wait keep their places. From then
        on the ticket of *claim* is gone, whatever arrives late.
        """
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
