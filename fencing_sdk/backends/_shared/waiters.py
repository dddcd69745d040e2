"""
The waiters of one backend object: each stands in the line of a lock until it is woken for another try.

What wakes a waiter differs from store to store, as each store's `waiters` module explains: a message
with the waiter's ticket, a watch on the waiter before it, a datagram, or nothing (`polling_line`). What most of them
share is here: a waiter that can be woken, a table that finds it by its claim or by its ticket, the places of stores
that join by a request of their own, and the owners with a request that the store may still carry out. What ends the
pause of a waiter in the client, such as its patience, is in `fencing_sdk._engine.acquisition`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from contextvars import Context
from typing import Generic, Protocol, TypeVar

from fencing_sdk._values.claim import Busy, Claim, Grant
from fencing_sdk._values.clock import JITTER
from fencing_sdk._values.loop_owner import LoopOwner
from fencing_sdk._values.observers import logger
from fencing_sdk._values.tasks import Turns, waiting_for
from fencing_sdk._values.timing import RELEASE_LIMIT
from fencing_sdk.abc import PlaceInLine, WaiterNotice
from fencing_sdk.backends._shared.background_task import BackgroundTasks
from fencing_sdk.errors import BackendError, BackendUnavailableError

__all__ = [
    "LEAVING",
    "FirstAsks",
    "KeptPlace",
    "KeptPlaces",
    "Turn",
    "UnansweredRequests",
    "Waiter",
    "WaiterTable",
    "WakeUp",
    "new_ticket",
]


class WakeUp(asyncio.Event):
    """
    An event that may be set although the loop of its waiter was closed: that waiter cannot be woken.

    `asyncio.Event.set` raises then, in the task that wakes the waiters, which has others to serve.
    """

    def set(self) -> None:
        """Wake the waiter, if its loop still runs."""
        with contextlib.suppress(RuntimeError):
            super().set()


Outcome = Grant | Busy | None
_MOST_JOINING = 32
"""Waiters that join their lines at once."""
LEAVING = RELEASE_LIMIT
"""Seconds that leaving a line may take."""


def new_ticket() -> str:
    """Name a waiter in the messages of its store, by at most 19 random digits."""
    return str(JITTER.getrandbits(63))


class Waiter:
    """
    One caller that waits for a lock.

    Args:
        claim: What it waits for.

        ticket: The text by which a message of the store names it, where the store sends messages.
    """

    __slots__ = ("_error", "_woken", "claim", "served", "ticket")

    def __init__(self, claim: Claim, ticket: str = "") -> None:
        self.claim = claim
        self.ticket = ticket
        self.served = False
        """True if the lock was granted to it: the store has taken it out of the line then."""
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
        """See `Turn.wait`."""
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


class Turn(Protocol):
    """The turn of a waiter in the line."""

    async def wait(self) -> None:
        """
        Return when another try may succeed.

        Raises:
            BackendUnavailableError: the place in the line is lost.
        """
        ...


Join = Callable[[Claim], AbstractAsyncContextManager[Turn]]
"""Joins the line; entering returns when no release can be missed. To leave the context is to leave the line."""


class KeptPlaces:
    """The places of one backend object, in a store that joins by a request of its own: a task keeps each of them."""

    def __init__(self) -> None:
        self._owner: LoopOwner | None = None
        self._joining = Turns(_MOST_JOINING)
        self._tasks = BackgroundTasks()

    def stand(self, join: Join, claim: Claim, notify: WaiterNotice) -> KeptPlace:
        """See `fencing_sdk.abc.SupportsLine.stand`."""
        if self._owner is None or not self._owner.is_current:  # the turns of a loop that has ended never end
            self._owner, self._joining = LoopOwner(), Turns(_MOST_JOINING)
            self._tasks.forget()
        return KeptPlace(join, claim, notify, self._joining, self._tasks)


class KeptPlace(PlaceInLine):
    """A place that a task of its own keeps, so that joining and leaving never hold up the waiter."""

    notices_joining = True

    def __init__(self, join: Join, claim: Claim, notify: WaiterNotice, joining: Turns, tasks: BackgroundTasks) -> None:
        self._join = join
        self._claim = claim
        self._notify = notify
        self._joining = joining
        self._joined = False
        self._queued = False  # whether this client has to let other waiters join first
        self._left = False
        self._task = tasks.start(self._keep(), waiting_for(claim.name))

    def retry_after(self, advice: float) -> float | None:
        """See `fencing_sdk.abc.PlaceInLine.retry_after`."""
        return advice if self._joined or self._queued else None

    def leave(self) -> asyncio.Future[None] | None:
        """
        See `fencing_sdk.abc.PlaceInLine.leave`.

        The task is cancelled once, and again only after a while: a second cancellation would interrupt the leaving,
        and the store would keep the place of a waiter that is gone.
        """
        task = self._task
        if task.done():
            return None
        if not self._left:
            self._left, self._notify = True, _ignore
            if not task.cancelling():  # a loop that ends has cancelled it already
                task.cancel()
            again = task.get_loop().call_later(LEAVING, task.cancel, context=Context())
            task.add_done_callback(lambda _: again.cancel(), context=Context())
        return task

    async def _keep(self) -> None:
        """Stay in the line until cancelled; join again after a fault, and let the waiter poll meanwhile."""
        try:
            while True:
                with contextlib.suppress(BackendUnavailableError):
                    await self._stand()
                self._joined = False
                await asyncio.sleep(JITTER.uniform(0.5, 1.0))
        except Exception as error:  # noqa: BLE001  (whatever it is, the waiter tries by itself, and its call says what)
            if not isinstance(error, BackendError):
                logger.debug("a place in line was lost", exc_info=error)
        finally:
            self._joined = self._queued = False
            self._notify()

    async def _stand(self) -> None:
        async with AsyncExitStack() as staying:
            self._queued = True
            async with self._joining.turn():
                self._queued = False
                turn = await staying.enter_async_context(self._join(self._claim))
            self._joined = True
            self._notify()  # joined first, then one more try: a release in between is not missed
            while True:
                await turn.wait()
                self._notify()


def _ignore(grant: Grant | None = None, age: float = 0.0) -> None:
    pass


class FirstAsks:
    """Claims of one client that ask for a lock at the same time: the first one asks, and its outcome refuses others."""

    def __init__(self) -> None:
        self._asking: dict[str, tuple[str, asyncio.Future[Outcome]]] = {}
        """The owner that asks for a name, and its outcome."""

    async def refusal(self, claim: Claim) -> Busy | None:
        """Return the refusal that *claim* learns from another claim that asks already; None if it has to ask itself."""
        loop = asyncio.get_running_loop()
        while (first := self._asking.get(claim.name)) is not None:
            owner, asking = first
            if owner == claim.owner or asking.get_loop() is not loop:
                break
            outcome = await asyncio.shield(asking)
            if isinstance(outcome, Busy):
                return outcome
            if isinstance(outcome, Grant):
                return Busy(None)
        return None

    @contextlib.contextmanager
    def asking(self, claim: Claim) -> Iterator[Callable[[Grant | Busy], None]]:
        """Let the others wait until this try has an outcome, and yield the function that takes it."""
        asking: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._asking.setdefault(claim.name, (claim.owner, asking))
        try:
            yield asking.set_result
        finally:
            if not asking.done():
                asking.set_result(None)
            if self._asking.get(claim.name, (None, None))[1] is asking:
                del self._asking[claim.name]


class UnansweredRequests:
    """
    Owners with a request that was not clearly answered: the store may have carried it out, or still may.

    Requests of one owner may overlap, so they are counted: the answer to one proves nothing about another.
    The table is bounded: owners that have not asked for the longest time have given up, and are forgotten.
    """

    LIMIT = 100_000

    def __init__(self) -> None:
        self._owners: OrderedDict[str, int] = OrderedDict()

    def begin(self, owner: str) -> bool:
        """Count a request of *owner* until `answered` or `end`; return whether an earlier one is unanswered."""
        unanswered = self._owners.get(owner, 0)
        self._owners[owner] = unanswered + 1
        if unanswered:
            self._owners.move_to_end(owner)
        elif len(self._owners) > self.LIMIT:
            self._owners.popitem(last=False)
        return unanswered > 0

    def answered(self, owner: str) -> None:
        """Take note that one request of *owner* was answered."""
        unanswered = self._owners.pop(owner, 0) - 1
        if unanswered > 0:
            self._owners[owner] = unanswered

    def end(self, owner: str) -> None:
        """Take note that every request of *owner* was answered."""
        self._owners.pop(owner, None)

    def has(self, owner: str) -> bool:
        """Return whether a request of *owner* may still arrive."""
        return owner in self._owners
