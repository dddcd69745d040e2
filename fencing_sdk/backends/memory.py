"""
Locks within one process and one event loop: the reference backend, for tests and single-process services.

Tokens: hybrid by default (see `token_source`), so they keep growing when the process restarts.
Clock: the process's own. Waiters: first come, first served, woken directly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any

from fencing_sdk._values.claim import Busy, Claim, Grant, Holder, Listing, Renewal, Revoked, Waiting
from fencing_sdk._values.clock import BootClock, Clock, wall_ticks
from fencing_sdk._values.loop_owner import OneLoop, Uncopied
from fencing_sdk._values.url import option_names
from fencing_sdk.abc import LossNotice, PlaceInLine, WaiterNotice
from fencing_sdk.abc._powers import PendingPost, PostOutcome
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared import rules
from fencing_sdk.backends._shared.losses import LossNotices
from fencing_sdk.backends._shared.row_table import RowTable
from fencing_sdk.backends._shared.rules import token_source
from fencing_sdk.backends._shared.waiters import Waiter, WaiterTable
from fencing_sdk.errors import BackendError, ConfigurationError, LossReason


class MemoryBackend(Uncopied):
    """
    A lock table in this process.

    Share one object between clients of one event loop that are to exclude each other; its table stays when they close.

    Args:
        tokens: ``"hybrid"``, or ``"counter"`` for 1, 2, 3, which start again with the process.
    """

    def __init__(self, *, tokens: str = "hybrid") -> None:
        self._clock: Clock = BootClock()
        self._table = RowTable(token_source(tokens, wall_ticks))
        self._hybrid = tokens != "counter"
        self._waiters: WaiterTable[MemoryWaiter] = WaiterTable()
        self._loss_notices = LossNotices()
        self._loop = OneLoop()

    async def acquire(self, claim: Claim) -> Grant | Busy:
        """See `fencing_sdk.abc.Backend.acquire`."""
        self._loop.check(self)
        now = self._clock.now()
        if self._waiters.find(claim) is not None:
            self._table.join(claim, now)  # a waiter that was silent for too long was dropped: it joins at the end
        answer = self._table.acquire(claim, now)
        if claim.mode.shared and isinstance(answer, Grant):
            self._wake_next(claim.name)  # the next waiter may fit beside this one
        return answer

    def post_acquire(
        self, claim: Claim, answer: Callable[[Grant | Busy | PostOutcome | BackendError], None]
    ) -> PendingPost | None:
        """See ``abc._powers.SupportsPosts.post_acquire``."""
        self._loop.check(self)
        try:
            outcome: Grant | Busy | BackendError = self._table.acquire(claim, self._clock.now())
        except BackendError as error:
            outcome = error
        answer(outcome)
        return None

    def post_release(
        self, claim: Claim, answer: Callable[[PostOutcome | Renewal | Revoked | BackendError], None]
    ) -> PendingPost | None:
        """See ``abc._powers.SupportsPosts.post_release``."""
        answer(self._release(claim) or PostOutcome.RELEASED)
        return None

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal | Revoked]:
        """See `fencing_sdk.abc.Backend.renew`."""
        self._loop.check(self)
        now = self._clock.now()
        return [self._table.renew(claim, now) for claim in claims]

    async def release(self, claim: Claim) -> Renewal | Revoked | None:
        """See `fencing_sdk.abc.Backend.release`."""
        self._loop.check(self)
        return self._release(claim)

    def _release(self, claim: Claim) -> Renewal | Revoked | None:
        others_wait = self._table.leave(claim)
        refusal = self._table.release(claim, self._clock.now())
        if others_wait:
            self._wake_next(claim.name)
        return refusal

    async def transfer(self, of: Claim, to: Claim) -> Grant | Renewal | Revoked:
        """See `fencing_sdk.abc.SupportsTransfer.transfer`."""
        self._loop.check(self)
        return self._table.transfer(of, to, self._clock.now())

    async def inspect(self, name: str) -> Holder | None:
        """See `fencing_sdk.abc.Backend.inspect`."""
        return self._table.inspect(name, self._clock.now())

    async def holders(self, name: str) -> Sequence[Holder]:
        """See `fencing_sdk.abc.SupportsShares.holders`."""
        return self._table.holders(name, self._clock.now())

    async def aclose(self) -> None:
        """Nothing is open; the grants stay for the other clients of this object, which may be in the next loop."""
        self._loop.forget()

    async def list_holders(self, prefix: str, cursor: str | None, limit: int) -> Listing:
        """See `fencing_sdk.abc.SupportsListing.list_holders`."""
        now = self._clock.now()
        names = self._table.names(prefix, cursor, limit)
        holders = [holder for name in names for holder in self._table.holders(name, now)]
        return Listing(holders, names[-1] if len(names) == limit else None)

    async def list_waiters(self, name: str) -> Sequence[Waiting]:
        """See `fencing_sdk.abc.SupportsListing.list_waiters`."""
        return self._table.waiting(name, self._clock.now())

    async def revoke(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.SupportsRevoking.revoke`."""
        ended = self._revoke(name, token, reason)
        # In a later turn: from Python 3.12 on this may run inside a step of the holder's own task, and 3.12 keeps a
        # cancellation that is made there although the block has taken it back.
        asyncio.get_running_loop().call_soon(self._notify, ended, reason, context=Context())
        return bool(ended)

    def take_away(self, name: str) -> None:
        """Take the lock away from all who hold it, for tests: they lose their leases with `LossReason.REVOKED`."""
        self._notify(self._revoke(name, None, None), "")

    def _revoke(self, name: str, token: int | None, reason: str | None) -> list[Claim]:
        ended = self._table.revoke(name, self._clock.now(), token, reason)
        self._wake_next(name)
        return [Claim(name, 0.0, owner) for owner in ended]

    def _notify(self, ended: Sequence[Claim], reason: str) -> None:
        for claim in ended:
            self._loss_notices.notify(claim, LossReason.REVOKED, reason)

    def on_loss(self, notice: LossNotice) -> Callable[[], None]:
        """See `fencing_sdk.abc.SupportsLossNotice.on_loss`."""
        return self._loss_notices.on_loss(notice)

    def stand(self, claim: Claim, notify: WaiterNotice, *, hand_over: bool) -> MemoryWaiter:
        """See `fencing_sdk.abc.SupportsLine.stand`."""
        self._loop.check(self)
        waiter = self._waiters.add(MemoryWaiter(claim, notify, self._leave, hands_over=hand_over))
        self._table.join(claim, self._clock.now())
        self._wake_next(claim.name)  # it was released after the try of this waiter
        return waiter

    def _leave(self, waiter: MemoryWaiter) -> None:
        """Forget *waiter*. One that is woken leaves the line, and passes its turn on; another releases its claim."""
        self._waiters.remove(waiter)
        if not waiter.hands_over:
            self._table.leave(waiter.claim)
            self._wake_next(waiter.claim.name)

    def _wake_next(self, name: str) -> None:
        """Hand a free lock to the head of the line, or wake it."""
        now = self._clock.now()
        waiter = self._next_in_line(name, now)
        while waiter is not None and waiter.loop.is_closed():
            self._table.leave(waiter.claim)
            waiter = self._next_in_line(name, now)
        if waiter is not None and waiter.hands_over:
            waiter.notify(self._table.hand_over(waiter.claim, now))
        elif waiter is not None:
            waiter.notify()

    def _next_in_line(self, name: str, now: float) -> MemoryWaiter | None:
        owner = self._table.next_in_line(name, now)
        return None if owner is None else self._waiters.find(Claim(name, 0.0, owner))


class MemoryWaiter(Waiter, PlaceInLine):
    """A waiter, and its place in the line."""

    def __init__(
        self, claim: Claim, notify: WaiterNotice, leave: Callable[[MemoryWaiter], None], *, hands_over: bool
    ) -> None:
        super().__init__(claim)
        self.notify = notify
        self.hands_over = hands_over
        self.loop = asyncio.get_running_loop()
        self._leave = leave

    def retry_after(self, advice: float) -> float:
        """See `fencing_sdk.abc.PlaceInLine.retry_after`. A try is also a sign of life: the waiter stays in the line."""
        return min(advice, rules.LINE_POLL)

    def leave(self) -> None:
        """See `fencing_sdk.abc.PlaceInLine.leave`."""
        self._leave(self)


def from_url(url: str, **options: object) -> MemoryBackend:
    """
    Make a backend for ``memory://``; `MemoryBackend` explains the options.

    Raises:
        ConfigurationError: the URL has a path, or an option is unknown.
    """
    chosen: dict[str, Any] = take_options(url, options, option_names(MemoryBackend))
    if url.partition("://")[2].partition("?")[0]:
        msg = "memory:// takes no path; pass one MemoryBackend object to every client that shares it"
        raise ConfigurationError(msg)
    return MemoryBackend(**chosen)
