"""
Locks within one process and one event loop: the reference backend, for tests and single-process services.

Tokens: hybrid by default (see `token_source`), so they keep growing when the process restarts.
Clock: the process's own. Waiters: first come, first served, woken directly.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from fencing_sdk._values.claim import Claim, Grant, Held, Holder, Listing, Renewal, Waiting
from fencing_sdk._values.clock import BootClock, Clock, wall_micros
from fencing_sdk._values.findings import Finding, warning
from fencing_sdk._values.loop_owner import OneLoop
from fencing_sdk._values.uncopied import Uncopied
from fencing_sdk.abc import LossNotice, Posted, Sent, Tell, Turn
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared import lock_table
from fencing_sdk.backends._shared.lock_table import token_source
from fencing_sdk.backends._shared.loss_notices import LossNotices
from fencing_sdk.backends._shared.share_table import ShareTable
from fencing_sdk.backends._shared.waiters import Waiter, WaiterTable
from fencing_sdk.errors import BackendError, ConfigurationError, LossReason

_REPEATING = warning(
    "memory.tokens",
    "tokens is counter",
    "after a restart of the process tokens repeat, so that a resource outside of it accepts a stale writer",
    "leave tokens out, or use a store with a memory of its own",
)


class MemoryBackend(Uncopied):
    """
    A lock table in this process.

    Share one object between clients of one event loop that are to exclude each other; its table stays when they close.

    Args:
        clock: The monotonic clock that grants expire on.

        tokens: ``"hybrid"``, or ``"counter"`` for 1, 2, 3, which start again with the process.
    """

    def __init__(self, *, clock: Clock | None = None, tokens: str = "hybrid") -> None:
        self._clock = BootClock() if clock is None else clock
        self._table = ShareTable(token_source(tokens, wall_micros))
        self._hybrid = tokens != "counter"
        self._waiters: WaiterTable[Waiter] = WaiterTable()
        self._loss_notices = LossNotices()
        self._loop = OneLoop()

    async def acquire(self, claim: Claim) -> Grant | Held:
        """See `fencing_sdk.abc.Backend.acquire`."""
        self._loop.check(self)
        now = self._clock.now()
        if self._waiters.find(claim) is not None:
            self._table.join(claim, now)  # a waiter that was silent for too long was dropped: it joins at the end
        answer = self._table.acquire(claim, now)
        if claim.mode.shared and isinstance(answer, Grant):
            self._wake_next(claim.name)  # the next waiter may fit beside this one
        return answer

    def post_acquire(self, claim: Claim, answer: Callable[[Grant | Held | Posted | BackendError], None]) -> Sent | None:
        """See `fencing_sdk.abc.SupportsPosts.post_acquire`."""
        self._loop.check(self)
        try:
            outcome: Grant | Held | BackendError = self._table.acquire(claim, self._clock.now())
        except BackendError as error:
            outcome = error
        answer(outcome)
        return None

    def post_release(self, claim: Claim, answer: Callable[[Posted | Renewal | BackendError], None]) -> Sent | None:
        """See `fencing_sdk.abc.SupportsPosts.post_release`."""
        answer(self._release(claim) or Posted.RELEASED)
        return None

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal]:
        """See `fencing_sdk.abc.Backend.renew`."""
        self._loop.check(self)
        now = self._clock.now()
        return [self._table.renew(claim, now) for claim in claims]

    async def release(self, claim: Claim) -> Renewal | None:
        """See `fencing_sdk.abc.Backend.release`."""
        self._loop.check(self)
        return self._release(claim)

    def _release(self, claim: Claim) -> Renewal | None:
        others_wait = self._table.leave(claim)
        refusal = self._table.release(claim, self._clock.now())
        if others_wait:
            self._wake_next(claim.name)
        return refusal

    async def inspect(self, name: str) -> Holder | None:
        """See `fencing_sdk.abc.Backend.inspect`."""
        return self._table.inspect(name, self._clock.now())

    async def holders(self, name: str) -> Sequence[Holder]:
        """See `fencing_sdk.abc.SupportsShares.holders`."""
        return self._table.holders(name, self._clock.now())

    async def diagnose(self, ttl: float) -> Sequence[Finding]:  # noqa: ARG002  (no setting depends on it)
        """See `fencing_sdk.abc.SupportsDiagnosis.diagnose`."""
        return () if self._hybrid else (_REPEATING,)

    async def server_time(self) -> None:
        """Return None: the clock is this machine's."""

    async def aclose(self) -> None:
        """Nothing is open; the grants stay for the other clients of this object, which may be in the next loop."""
        self._loop.forget()

    async def list_held(self, prefix: str, cursor: str | None, limit: int) -> Listing:
        """See `fencing_sdk.abc.SupportsListing.list_held`."""
        now = self._clock.now()
        names, last = self._table.page(prefix, -1 if cursor is None else int(cursor), limit, now)
        holders = [holder for name in names for holder in self._table.holders(name, now)]
        return Listing(holders, None if last is None else str(last))

    async def list_waiters(self, name: str) -> Sequence[Waiting]:
        """See `fencing_sdk.abc.SupportsListing.list_waiters`."""
        return self._table.waiting(name, self._clock.now())

    async def revoke(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.SupportsRevoking.revoke`."""
        return self._revoke(name, token, reason)

    def take_away(self, name: str) -> None:
        """Take the lock away from all who hold it, for tests: they lose their leases with `LossReason.REVOKED`."""
        self._revoke(name, None, "")

    def _revoke(self, name: str, token: int | None, reason: str) -> bool:
        ended = self._table.revoke(name, self._clock.now(), token)
        for owner in ended:
            self._loss_notices.tell(Claim(name, 0.0, owner), LossReason.REVOKED, reason)
        self._wake_next(name)
        return bool(ended)

    def on_loss(self, notice: LossNotice) -> Callable[[], None]:
        """See `fencing_sdk.abc.SupportsLossNotice.on_loss`."""
        return self._loss_notices.on_loss(notice)

    @asynccontextmanager
    async def queue(self, claim: Claim) -> AsyncIterator[Turn]:
        """See `fencing_sdk.abc.SupportsQueue.queue`."""
        self._loop.check(self)
        waiter = self._waiters.add(Waiter(claim))
        self._table.join(claim, self._clock.now())
        try:
            yield waiter
        finally:
            self._waiters.remove(waiter)
            self._table.leave(claim)
            self._wake_next(claim.name)  # a waiter that leaves when it is its turn passes the turn on

    def stand(self, claim: Claim, tell: Tell) -> MemoryWaiter:
        """See `fencing_sdk.abc.SupportsDirectGrant.stand`."""
        self._loop.check(self)
        waiter = MemoryWaiter(claim, tell, self._waiters)
        self._waiters.add(waiter)
        self._table.join(claim, self._clock.now())
        self._wake_next(claim.name)  # it was released after the try of this waiter
        return waiter

    def _wake_next(self, name: str) -> None:
        """Hand a free lock to the head of the line, or wake it."""
        now = self._clock.now()
        waiter = self._next_in_line(name, now)
        while isinstance(waiter, MemoryWaiter) and waiter.loop.is_closed():
            self._table.leave(waiter.claim)
            waiter = self._next_in_line(name, now)
        if isinstance(waiter, MemoryWaiter):
            waiter.tell(self._table.hand_over(waiter.claim, now))
        elif waiter is not None:
            waiter.wake()

    def _next_in_line(self, name: str, now: float) -> Waiter | None:
        owner = self._table.next_in_line(name, now)
        return None if owner is None else self._waiters.find(Claim(name, 0.0, owner))


class MemoryWaiter(Waiter):
    """A waiter to which a release hands the lock."""

    __slots__ = ("_table", "loop", "tell")

    def __init__(self, claim: Claim, tell: Tell, table: WaiterTable[Waiter]) -> None:
        super().__init__(claim)
        self.tell = tell
        self._table = table
        self.loop = asyncio.get_running_loop()

    def nap(self, advice: float) -> float:
        """See `fencing_sdk.abc.PlaceInLine.nap`. A try is also the sign of life that keeps the waiter in the line."""
        return min(advice, lock_table.LINE_POLL)

    def leave(self) -> None:
        """See `fencing_sdk.abc.PlaceInLine.leave`."""
        self._table.remove(self)


def from_url(url: str, **options: object) -> MemoryBackend:
    """
    Make a backend for ``memory://``. Option: ``tokens``.

    Raises:
        ConfigurationError: the URL has a path, or an option is unknown.
    """
    chosen = take_options(url, options, ("tokens",))
    if url.partition("://")[2].partition("?")[0]:
        msg = "memory:// takes no path; pass one MemoryBackend object to every client that shares it"
        raise ConfigurationError(msg)
    return MemoryBackend(tokens=str(chosen.get("tokens", "hybrid")))
