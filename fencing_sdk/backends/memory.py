"""
Locks within one process and one event loop: the reference backend, for tests and single-process services.

Tokens: hybrid by default (see `token_source`), so they keep growing when the process restarts.
Clock: the process's own. Waiters: first come, first served, woken directly.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fencing_sdk._values.claim import Claim, Grant, Held, Holder, Renewal
from fencing_sdk._values.clock import BootClock, Clock, wall_micros
from fencing_sdk.abc import LossNotice, Turn
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared.lock_table import LockTable, token_source
from fencing_sdk.backends._shared.wakeup import WakeUp
from fencing_sdk.errors import ConfigurationError, LossReason


class MemoryBackend:
    """
    A lock table in this process.

    Share one object between clients that are to exclude each other; its table stays when they close.

    Args:
        clock: The monotonic clock that grants expire on.

        tokens: ``"hybrid"``, or ``"counter"`` for 1, 2, 3, which start again with the process.
    """

    def __init__(self, *, clock: Clock | None = None, tokens: str = "hybrid") -> None:
        self._clock = BootClock() if clock is None else clock
        self._table = LockTable(token_source(tokens, wall_micros))
        self._woken: dict[tuple[str, str], asyncio.Event] = {}  # name and owner of those who stand in line
        self._notices: dict[LossNotice, None] = {}

    async def acquire(self, claim: Claim) -> Grant | Held:
        """See `fencing_sdk.abc.Backend.acquire`."""
        now = self._clock.now()
        if (claim.name, claim.owner) in self._woken:
            self._table.join(claim, now)  # one who was silent for too long, and passed over, stands at the end
        return self._table.acquire(claim, now)

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal]:
        """See `fencing_sdk.abc.Backend.renew`."""
        now = self._clock.now()
        return [self._table.renew(claim, now) for claim in claims]

    async def release(self, claim: Claim) -> None:
        """See `fencing_sdk.abc.Backend.release`."""
        if self._table.release(claim):
            self._wake(claim.name)

    async def inspect(self, name: str) -> Holder | None:
        """See `fencing_sdk.abc.Backend.inspect`."""
        return self._table.inspect(name, self._clock.now())

    async def aclose(self) -> None:
        """Nothing is open; the grants stay for the other clients of this object."""

    def revoke(self, name: str) -> None:
        """Take the lock away from whoever holds it; the holder loses its lease with `LossReason.REVOKED`."""
        owner = self._table.revoke(name, self._clock.now())
        if owner is not None:
            for notice in tuple(self._notices):
                notice(Claim(name, 0.0, owner), LossReason.REVOKED)
            self._wake(name)

    def on_loss(self, notice: LossNotice) -> Callable[[], None]:
        """See `fencing_sdk.abc.SupportsLossNotice.on_loss`."""
        self._notices[notice] = None
        return lambda: self._notices.pop(notice, None)

    def queue(self, claim: Claim) -> AbstractAsyncContextManager[Turn]:
        """See `fencing_sdk.abc.SupportsQueue.queue`."""
        return self._stand(claim)

    @asynccontextmanager
    async def _stand(self, claim: Claim) -> AsyncIterator[Turn]:
        woken = self._woken[claim.name, claim.owner] = WakeUp()
        self._table.join(claim, self._clock.now())
        try:
            yield _Turn(woken)
        finally:
            self._woken.pop((claim.name, claim.owner), None)
            self._table.leave(claim)
            self._wake(claim.name)  # whoever leaves while it is its turn passes the turn on

    def _wake(self, name: str) -> None:
        owner = self._table.next_in_line(name, self._clock.now())
        if owner is not None and (woken := self._woken.get((name, owner))) is not None:
            woken.set()


class _Turn:
    """A place in the line of this process."""

    def __init__(self, woken: asyncio.Event) -> None:
        self._woken = woken

    async def wait(self) -> None:
        await self._woken.wait()
        self._woken.clear()


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
