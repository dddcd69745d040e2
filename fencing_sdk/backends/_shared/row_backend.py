"""
The whole contract over a store of rows: every call is a rule of `rules`, run in one step of the store.

A store brings a `RowStore`: steps, signs of life, messages, and its errors. What wakes a waiter:

1. A message, where the store sends messages: it names the waiter at the head of the line, by its ticket.
2. A timer: once in `LINE_POLL` seconds, one timer for all waiters of this object gives their signs of life, and wakes
   those whose turn it is although no message came: the holder died, or the message was lost.

The timer is one of the event loop, so a loop that hangs gives no sign, and its waiters lose their places to waiters
that can use the lock.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from fencing_sdk._values.claim import Busy, Claim, Grant, Holder, Listing, Renewal, Revoked, Waiting
from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.loop_owner import LoopOwner, Uncopied
from fencing_sdk.abc import LossNotice, WaiterNotice
from fencing_sdk.backends._shared import rules
from fencing_sdk.backends._shared.losses import RevocationWatcher, StopListening, name_digest
from fencing_sdk.backends._shared.rules import Rows
from fencing_sdk.backends._shared.waiters import KeptPlace, KeptPlaces, Turn, Waiter, WaiterTable
from fencing_sdk.errors import BackendError

__all__ = ["MessageBox", "RowBackend", "RowStore", "Step", "WaiterAddress", "random_text"]

T = TypeVar("T")
_CLOCK = BootClock()
_LEAVES = 3
"""How often a waiter asks to leave the line."""
_KNOWN = 1.5 * rules.LINE_POLL
"""Seconds for which an answer to all waiters of a client is the answer to each of them."""
Step = tuple[str, Callable[[Rows], T]]
"""A name, and the rule that is run on its rows."""


def random_text() -> str:
    """32 characters that no other process can guess."""
    return os.urandom(16).hex()


@dataclass(frozen=True, slots=True)
class WaiterAddress:
    """How other processes reach a waiter, and how they know that it lives."""

    box: str
    """The name of its `MessageBox`, or "" for none."""
    group: str = field(default_factory=random_text)
    """The waiters of one backend object and loop, which give their signs of life together."""
    ticket: str = field(default_factory=random_text)
    """The message that wakes it."""


class MessageBox(Protocol):
    """Where messages for this client arrive, in the running loop."""

    @property
    def name(self) -> str:
        """The address at which others reach it."""
        ...

    def close(self) -> None:
        """Receive no more. A forked child closes only its copy."""
        ...


class RowStore(Protocol):
    """A store of rows. Its errors are those of the contract: `BackendError`."""

    async def open(self) -> None:
        """Open what `run` needs."""
        ...

    async def run(
        self,
        operation: str,
        name: str,
        rule: Callable[[Rows], T],
        *,
        look: Callable[[Rows], T | None] | None = None,
        reads: bool = False,
        durable: bool = False,
        surely: bool = False,
    ) -> T:
        """
        Run *rule* in a step that excludes all others about *name*; then send a message to the waiter it has woken.

        Args:
            operation: The call that errors name.

            name: The rows that the rule reads and changes.

            rule: One of `rules`. It may be run again if the step could not be carried out.

            look: A rule that changes nothing; if it has an answer, that is the answer.

            reads: The rule changes nothing.

            durable: The step must survive a power failure, because it draws a token.

            surely: The step is carried out although the caller is cancelled meanwhile.
        """
        ...

    async def look(self, operation: str, steps: Sequence[Step[T]]) -> Sequence[T]:
        """Run rules that change nothing."""
        ...

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal | Revoked | BackendError]:
        """
        Run `rules.renew` for each claim. These have a deadline, so they overtake other calls.

        A store with transactions makes them one. Another store puts an error in the place of each missing answer.
        """
        ...

    async def names(self, prefix: str, after: str | None, limit: int) -> Sequence[str]:
        """The next *limit* names in the order of names, at most, that begin with *prefix* and may be held."""
        ...

    async def attend(self, group: str, waiters: Sequence[tuple[Claim, WaiterAddress]]) -> Sequence[Claim]:
        """
        Give the signs of life of a *group* of waiters; return the claims that should try.

        These are the ones whose turn it is, and those that have lost their places and were put at the end of the line.
        Others of the group could not leave, and are deleted. A waiter that joins or leaves after this call is not
        touched by it: the request is made before the first suspension, and no later one overtakes it.
        """
        ...

    def open_box(self, on_message: Callable[[str], object]) -> MessageBox | None:
        """Receive messages for waiters; None where there are none."""
        ...

    async def hear_revocations(self, on_message: Callable[[str], object]) -> StopListening | None:
        """
        Receive what `announce` sends; return what stops that, or None where no messages arrive.

        An empty message: others may have been lost, because a connection had broken.
        """
        ...

    async def announce(self, message: str) -> None:
        """Send *message* to every client that hears of revocations."""
        ...

    async def aclose(self) -> None:
        """Close what is open, after the steps that are under way."""
        ...


class RowBackend(Uncopied):
    """The backend of one `RowStore`."""

    def __init__(self, store: RowStore) -> None:
        self._store = store
        self._places = KeptPlaces()
        self._waiters: RowWaiters | None = None
        self._losses = RowLosses(store)

    async def open(self) -> None:
        """See `fencing_sdk.abc.SupportsOpen.open`."""
        await self._store.open()

    async def acquire(self, claim: Claim) -> Grant | Busy:
        """See `fencing_sdk.abc.Backend.acquire`."""
        waiter = None if self._waiters is None else self._waiters.table.find(claim)
        if waiter is not None and (known := waiter.refusal()) is not None:
            return known
        look = None if waiter is None else partial(rules.refusal, claim=claim)
        rule = partial(rules.acquire, claim=claim)
        outcome = await self._store.run("acquire", claim.name, rule, look=look, durable=True)
        return self._answered(claim, outcome)

    def _answered(self, claim: Claim, outcome: Grant | Busy) -> Grant | Busy:
        waiter = None if self._waiters is None else self._waiters.table.find(claim)
        if waiter is not None:
            waiter.served = isinstance(outcome, Grant)
            waiter.refused(outcome)
        if isinstance(outcome, Grant):
            self._losses.granted(claim)
        return outcome

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal | Revoked]:
        """See `fencing_sdk.abc.Backend.renew`."""
        answers = await self._store.renew(claims)
        errors = [answer for answer in answers if isinstance(answer, BackendError)]
        if errors and len(errors) == len(answers):
            raise errors[0]
        renewals = [Renewal.UNKNOWN if isinstance(answer, BackendError) else answer for answer in answers]
        for claim, renewal in zip(claims, renewals, strict=True):
            if renewal is not Renewal.RENEWED and renewal is not Renewal.UNKNOWN:
                self._losses.ended(claim)
        return renewals

    async def release(self, claim: Claim) -> Renewal | Revoked | None:
        """See `fencing_sdk.abc.Backend.release`."""
        self._losses.ended(claim)
        return await self._store.run("release", claim.name, partial(rules.release, claim=claim), surely=True)

    async def transfer(self, of: Claim, to: Claim) -> Grant | Renewal | Revoked:
        """See `fencing_sdk.abc.SupportsTransfer.transfer`."""
        self._losses.ended(of)
        return await self._store.run("transfer", of.name, partial(rules.transfer, of=of, to=to), durable=True)

    async def inspect(self, name: str) -> Holder | None:
        """See `fencing_sdk.abc.Backend.inspect`."""
        return max(await self.holders(name), key=lambda holder: holder.remaining, default=None)

    async def holders(self, name: str) -> Sequence[Holder]:
        """See `fencing_sdk.abc.SupportsShares.holders`."""
        return await self._store.run("inspect", name, partial(rules.holders, name=name))

    async def list_holders(self, prefix: str, cursor: str | None, limit: int) -> Listing:
        """See `fencing_sdk.abc.SupportsListing.list_holders`."""
        names = await self._store.names(prefix, cursor, limit)
        steps = [(name, partial(rules.holders, name=name)) for name in names]
        pages = await self._store.look("list", steps)
        return Listing([holder for page in pages for holder in page], names[-1] if len(names) == limit else None)

    async def list_waiters(self, name: str) -> Sequence[Waiting]:
        """See `fencing_sdk.abc.SupportsListing.list_waiters`."""
        return await self._store.run("list", name, rules.waiting, reads=True)

    async def revoke(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.SupportsRevoking.revoke`."""
        rule = partial(rules.revoke, token=token, reason=reason)
        ended = await self._store.run("revoke", name, rule, surely=True)
        if ended:
            with suppress(BackendError):  # it is a hint: the next renewal notices the loss
                await self._store.announce(name_digest(name))
        return bool(ended)

    def on_loss(self, notice: LossNotice) -> Callable[[], None]:
        """See `fencing_sdk.abc.SupportsLossNotice.on_loss`."""
        return self._losses.on_loss(notice)

    def stand(self, claim: Claim, notify: WaiterNotice, *, hand_over: bool) -> KeptPlace:  # noqa: ARG002  (the store only wakes)
        """See `fencing_sdk.abc.SupportsLine.stand`."""
        return self._places.stand(self._in_line, claim, notify)

    @asynccontextmanager
    async def _in_line(self, claim: Claim) -> AsyncIterator[Turn]:
        if self._waiters is not None and not self._waiters.usable:
            self._close_waiters()
        if self._waiters is None:
            self._waiters = RowWaiters(self._store)
        waiters = self._waiters
        waiter = waiters.add(claim)
        try:
            await self._store.run("queue", claim.name, partial(rules.join, claim=claim, address=waiter.address))
            yield waiter
        finally:
            waiters.remove(waiter)
            # A request without an answer is repeated, unless this object is closed. Without signs of life the waiter
            # loses its place anyway, but another waiter of this object may give them.
            for _ in range(_LEAVES):
                with suppress(BackendError):
                    await self._store.run("queue", claim.name, partial(rules.leave, owner=claim.owner), surely=True)
                    break
                if self._waiters is not waiters:
                    break

    def _close_waiters(self) -> None:
        waiters, self._waiters = self._waiters, None
        if waiters is not None:
            waiters.close()

    async def aclose(self) -> None:
        """Close the connections after the calls that are under way. Grants stay until they are released or expire."""
        await self._losses.aclose()
        self._close_waiters()
        await self._store.aclose()


class RowWaiter(Waiter):
    """
    A waiter, and the address that is written into its row.

    The engine lets every waiter try again after some seconds. If the store has just said that it is another one's
    turn, and the holder's ttl has not ended, the answer is known: a hundred would ask twenty times a second in vain.
    """

    __slots__ = ("_attended", "_busy_until", "_woken_at", "address")

    def __init__(self, claim: Claim, address: WaiterAddress) -> None:
        super().__init__(claim, address.ticket)
        self.address = address
        self._attended = -math.inf
        """When the store was last asked whose turn it is, and it was not that of this waiter."""
        self._busy_until = -math.inf
        """Until when the store has refused the last try."""
        self._woken_at = -math.inf

    def wake(self) -> None:
        """See `Waiter.wake`. What was known before is out of date."""
        self._woken_at, self._attended = _CLOCK.now(), -math.inf
        super().wake()

    def attended(self, asked: float) -> None:
        """Note that at the moment *asked* it was not the turn of this waiter; a message since then counts more."""
        if asked > self._woken_at:
            self._attended = asked

    def refused(self, outcome: Grant | Busy) -> None:
        """Note the answer to a try."""
        advice = outcome.retry_after if isinstance(outcome, Busy) else None
        self._busy_until = -math.inf if advice is None else _CLOCK.now() + advice

    def refusal(self) -> Busy | None:
        """
        The answer to a try, if it is known without the store.

        Its advice is `LINE_TTL` at most: one that is ahead by now keeps its turn for that long without a sign of life.
        """
        now = _CLOCK.now()
        known = now - self._attended < _KNOWN and now < self._busy_until
        return Busy(min(self._busy_until - now, rules.LINE_TTL)) if known else None


class RowWaiters:
    """The waiters of one backend object in the running event loop. It refers to no backend, only to its store."""

    def __init__(self, store: RowStore) -> None:
        self._store = store
        self._owner = LoopOwner()
        self.table: WaiterTable[RowWaiter] = WaiterTable()
        self._box = store.open_box(self.table.wake)
        self._group = random_text()
        self._timer: asyncio.TimerHandle | None = None
        self._attending: asyncio.Task[Sequence[Claim]] | None = None

    @property
    def usable(self) -> bool:
        """True if this loop of this process owns them: not in a forked child, and not in the next loop."""
        return self._owner.is_current

    def add(self, claim: Claim) -> RowWaiter:
        """Make a waiter for *claim*. The caller writes its row."""
        address = WaiterAddress("" if self._box is None else self._box.name, self._group)
        waiter = self.table.add(RowWaiter(claim, address))
        self._set_timer()
        return waiter

    def remove(self, waiter: RowWaiter) -> None:
        """Forget *waiter*; without waiters, the timer stops."""
        self.table.remove(waiter)
        if not self.table:
            self._stop()

    def close(self) -> None:
        """Receive no more messages, and give no more signs of life."""
        if self._box is not None:
            self._box.close()
        if self._owner.in_this_process:
            self._stop()

    def _set_timer(self) -> None:
        if self._timer is None and self._attending is None:
            self._timer = self._owner.loop.call_later(rules.LINE_POLL, self._give_signs)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._attending is not None and not self._owner.loop.is_closed():
            self._attending.cancel()
        self._attending = None

    def _give_signs(self) -> None:
        self._timer = None
        loop = self._owner.loop
        self._attending = asyncio.Task(self._attend(), loop=loop, context=Context(), name="fencing-store")
        self._attending.add_done_callback(self._attended)

    async def _attend(self) -> Sequence[Claim]:
        """Attend those that wait when the request is made: the store puts back whom it does not find in the line."""
        asked, waiting = _CLOCK.now(), [waiter for waiter in self.table if not waiter.served]
        due = await self._store.attend(self._group, [(waiter.claim, waiter.address) for waiter in waiting])
        for waiter in waiting:
            waiter.attended(asked)
        return due

    def _attended(self, answer: asyncio.Task[Sequence[Claim]]) -> None:
        failed = answer.cancelled() or answer.exception() is not None
        if answer is not self._attending:
            return  # stopped meanwhile
        self._attending = None
        # After a failure all of them try, and their calls raise the store's error.
        self._wake([waiter.claim for waiter in self.table] if failed else answer.result())

    def _wake(self, due: Iterable[Claim]) -> None:
        for claim in due:
            waiter = self.table.find(claim)
            if waiter is not None:
                waiter.wake()
        self._set_timer()


class RowLosses(RevocationWatcher):
    """The grants of one backend, each until it ends."""

    def __init__(self, store: RowStore) -> None:
        super().__init__()
        self._store = store

    async def listen(self) -> StopListening | None:
        """See `RevocationWatcher.listen`."""
        return await self._store.hear_revocations(self.on_message)

    def on_message(self, digest: str) -> None:
        """See `RevocationWatcher.on_message`; without a digest all grants are looked at."""
        if digest:
            super().on_message(digest)
        elif self._held:
            self.cut_off()

    async def reasons(self, claims: Sequence[Claim]) -> Sequence[str | None]:
        """See `RevocationWatcher.reasons`."""
        steps = [(claim.name, partial(rules.reason, claim=claim)) for claim in claims]
        return await self._store.look("renew", steps)
