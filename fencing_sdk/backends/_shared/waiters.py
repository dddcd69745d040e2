"""
The waiters of one backend object: each stands in the line of a lock until it is woken for another try.

What wakes a waiter differs from store to store, and each store's `waiters` module tells it: a message
with the waiter's ticket, a watch on the waiter before it, a datagram, or nothing (`polling_line`). What most of them
share is here: a turn that can be woken, and a table that finds it by its claim or by its ticket. What ends the pause of
a waiter in the client, such as its patience, is told by `fencing_sdk._engine.acquisition`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from fencing_sdk._values.claim import Claim, Grant, Held
from fencing_sdk._values.jitter import JITTER
from fencing_sdk.backends._shared.wakeup import WakeUp
from fencing_sdk.errors import BackendError

__all__ = ["FirstAsks", "Waiter", "WaiterTable", "new_ticket"]

Outcome = Grant | Held | None


def new_ticket() -> str:
    """
    Name a waiter in the messages of its store, by at most 19 digits.

    They are random. Two copies of one process (a fork in C, a snapshot that was restored) listen on one channel, and
    with numbers that count each would take the grants of the other.
    """
    return str(JITTER.getrandbits(63))


class Waiter:
    """
    One caller that waits for a lock: the `fencing_sdk.abc.Turn` that `SupportsQueue.queue` yields.

    Args:
        claim: What it waits for.

        ticket: The text by which a message of the store names it, where the store sends messages.
    """

    __slots__ = ("_error", "_woken", "claim", "served", "ticket")

    def __init__(self, claim: Claim, ticket: str = "") -> None:
        self.claim = claim
        self.ticket = ticket
        self.served = False
        """Whether the lock was granted to it: the store has taken it out of the line then."""
        self._woken = WakeUp()
        self._error: BackendError | None = None

    def wake(self) -> None:
        """Let it try again: another try may succeed."""
        self._woken.set()

    def fail(self, error: BackendError) -> None:
        """Wake it with *error*: its place in the line is lost, and the caller has to join again."""
        self._error = error
        self._woken.set()

    async def wait(self) -> None:
        """See `fencing_sdk.abc.Turn.wait`."""
        await self._woken.wait()
        self._woken.clear()
        if self._error is not None:
            raise self._error


W = TypeVar("W", bound=Waiter)


class WaiterTable(Generic[W]):
    """The waiters of one backend object, by claim and by ticket."""

    __slots__ = ("_by_claim", "_by_ticket")

    def __init__(self) -> None:
        self._by_claim: dict[tuple[str, str], W] = {}
        self._by_ticket: dict[str, W] = {}

    def __iter__(self) -> Iterator[W]:
        return iter(tuple(self._by_claim.values()))

    def __len__(self) -> int:
        return len(self._by_claim)

    def add(self, waiter: W) -> W:
        """Enter *waiter*; return it."""
        self._by_claim[waiter.claim.name, waiter.claim.owner] = waiter
        if waiter.ticket:
            self._by_ticket[waiter.ticket] = waiter
        return waiter

    def find(self, claim: Claim) -> W | None:
        """The waiter of *claim*, if it waits by way of this object."""
        return self._by_claim.get((claim.name, claim.owner))

    def find_ticket(self, ticket: str) -> W | None:
        """The waiter that a message names."""
        return self._by_ticket.get(ticket)

    def remove(self, waiter: W) -> None:
        """Forget *waiter*, but not a later one of the same claim."""
        key = waiter.claim.name, waiter.claim.owner
        if self._by_claim.get(key) is waiter:
            del self._by_claim[key]
        if self._by_ticket.get(waiter.ticket) is waiter:
            del self._by_ticket[waiter.ticket]

    def clear(self) -> None:
        """Forget all of them."""
        self._by_claim.clear()
        self._by_ticket.clear()

    def wake(self, ticket: str) -> None:
        """Wake the waiter that a message names, if it still waits."""
        if (waiter := self._by_ticket.get(ticket)) is not None:
            waiter.wake()

    def wake_all(self) -> None:
        """Let every waiter try: messages may have been lost until now."""
        for waiter in self:
            waiter.wake()


class FirstAsks:
    """Claims of one client that ask for a lock at the same time: the first one asks, and its outcome refuses others."""

    def __init__(self) -> None:
        self._asking: dict[str, tuple[str, asyncio.Future[Outcome]]] = {}
        """By name: the owner that asks, and what it will know."""

    async def refusal(self, claim: Claim) -> Held | None:
        """What *claim* learns from another claim that is asking already; None if it has to ask itself."""
        loop = asyncio.get_running_loop()
        while (first := self._asking.get(claim.name)) is not None:
            owner, asking = first
            if owner == claim.owner or asking.get_loop() is not loop:
                break
            outcome = await asyncio.shield(asking)
            if isinstance(outcome, Held):
                return outcome
            if isinstance(outcome, Grant):
                return Held(None)
        return None

    @contextlib.contextmanager
    def asking(self, claim: Claim) -> Iterator[Callable[[Grant | Held], None]]:
        """Let the others wait until this try has an outcome, which the caller tells by what is given here."""
        asking: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._asking.setdefault(claim.name, (claim.owner, asking))
        try:
            yield asking.set_result
        finally:
            if not asking.done():
                asking.set_result(None)
            if self._asking.get(claim.name, (None, None))[1] is asking:
                del self._asking[claim.name]
