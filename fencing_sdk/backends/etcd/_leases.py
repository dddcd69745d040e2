"""
Leases of etcd that many locks share: one for each ttl, in whole seconds.

A keep-alive is proof from the moment before it was sent. A lease is a little longer than the ttl of
its locks, so one keep-alive also serves whoever comes within the next fraction of a second: a
thousand locks, renewed one by one or together, cost no more keep-alives than one does.

Sharing has a price: a key lives as long as its lease, whoever keeps that alive. So a claim that was
not renewed for its ttl is given up here, before anybody prolongs its lease, and its key is deleted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from typing import TypeVar

from fencing_sdk._etcd.gateway import NotFoundError
from fencing_sdk._etcd.shared_call import SharedCall, ended
from fencing_sdk._values.claim import Claim
from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.process import generation
from fencing_sdk._values.timing import MAX_DRIFT
from fencing_sdk.backends.etcd._calls import BATCH, Calls, Standing
from fencing_sdk.backends.etcd._debts import Debts
from fencing_sdk.errors import BackendError, BackendUnavailableError

__all__ = ["BACKEND", "Holding", "Leases", "SharedLease"]

BACKEND = "EtcdBackend"
T = TypeVar("T")
SPARE = 0.5
"""Seconds by which a lease is at least longer than the ttl of its locks."""
_TRIES = 3


@dataclass(slots=True)
class Holding:
    """A key of ours that was first in its line."""

    key: bytes
    ttl: float
    created: int
    """The token."""
    modified: int
    renewed_at: float
    """When the last call that proved it began."""
    proven: int
    """A revision at which it was there."""


@dataclass(slots=True, eq=False)
class SharedLease:
    """A lease of etcd."""

    number: int
    ttl: int
    """What etcd granted: at least what was asked for, and at least its own minimum."""
    renewed_at: float
    ended: bool = False
    holdings: dict[bytes, Holding] = field(default_factory=dict)
    flight: SharedCall[bool] | None = None

    def needed_since(self, ttl: float, started: float) -> float:
        """How old a keep-alive may be for a call that began at *started*, whatever the drift of the clocks."""
        return started - max(0.0, self.ttl - ttl) * (1 - MAX_DRIFT)


class Leases:
    """The leases of one client, and what it holds by them."""

    def __init__(self, calls: Calls) -> None:
        self.debts = Debts()
        self._calls = calls
        self._clock = BootClock()
        self._leases: dict[int, SharedLease] = {}  # by the seconds that were asked for
        self._making: dict[int, SharedCall[SharedLease]] = {}
        self._paying: asyncio.Task[None] | None = None
        self._generation = generation()

    def now(self) -> float:
        """
        The moment a call begins.

        A forked child begins with nothing: if it kept the leases of its parent alive, the locks of
        a parent that died would never be free.
        """
        if self._generation != generation():
            self._generation = generation()
            self._leases.clear()
            self._making.clear()
            self.debts.clear()
            self._paying = None
        return self._clock.now()

    # Keep-alives

    async def fresh(self, operation: str, ttl: float, started: float) -> SharedLease:
        """
        A lease that lives for *ttl* seconds from *started* on, or longer.

        Raises:
            BackendError: etcd cannot be asked, or does not grant one.
        """
        seconds = math.ceil(ttl + SPARE)
        for _ in range(_TRIES):
            lease = self._leases.get(seconds)
            if lease is None:
                lease = await self._made(operation, seconds, started)
            if await self.keep(operation, lease, ttl, started):
                return lease
        raise BackendUnavailableError(BACKEND, operation, "a lease ends as soon as it is made")

    async def _made(self, operation: str, seconds: int, started: float) -> SharedLease:
        flight = self._making.get(seconds)
        if flight is None or not flight.takes(started - SPARE):
            now = self.now()
            flight = self._making[seconds] = SharedCall(lambda: self._make(operation, seconds, now), now)
        return await flight.join()

    async def _make(self, operation: str, seconds: int, now: float) -> SharedLease:
        lease = SharedLease(*await self._calls.grant_lease(operation, seconds), now)
        return self._leases.setdefault(seconds, lease)

    async def keep(self, operation: str, lease: SharedLease, ttl: float, started: float) -> bool:
        """Make sure that *lease* lives for *ttl* seconds from *started* on; False: it has ended."""
        since = lease.needed_since(ttl, started)
        if lease.ended or lease.renewed_at >= since:
            return not lease.ended
        flight = lease.flight
        if flight is None or not flight.takes(since):
            now = self.now()
            flight = lease.flight = SharedCall(lambda: self._keep_alive(operation, lease, now), now)
        return await flight.join()

    async def _keep_alive(self, operation: str, lease: SharedLease, now: float) -> bool:
        self.give_up_overdue(now)
        self._pay(now)
        if await self._calls.keep_alive(operation, lease.number) <= 0:
            self.end(lease)
            return False
        lease.renewed_at = max(lease.renewed_at, now)
        return True

    def end(self, lease: SharedLease) -> None:
        """The lease does not exist any more; the next call makes another one."""
        lease.ended = True
        lease.holdings.clear()
        for seconds, found in list(self._leases.items()):
            if found is lease:
                del self._leases[seconds]

    async def on_lease(
        self, operation: str, claim: Claim, started: float, call: Callable[[SharedLease], Awaitable[T]]
    ) -> tuple[T, SharedLease]:
        """Make a call that needs a lease for *claim*; once more with a new one when the lease has just ended."""
        lease = await self.fresh(operation, claim.ttl, started)
        try:
            return await call(lease), lease
        except NotFoundError:
            self.end(lease)
        lease = await self.fresh(operation, claim.ttl, started)
        return await call(lease), lease

    # Holdings

    async def take_over(self, operation: str, claim: Claim, standing: Standing, started: float) -> SharedLease | None:
        """
        Hold the key of *claim*, on a lease of ours that lives for its ttl; None: the key has gone.

        It is on another lease when another client has made it with this claim, or this one before a fork.
        """
        own = standing.own
        assert own is not None  # or nothing is held

        async def move(lease: SharedLease) -> int | None:
            same = own.lease == lease.number
            return own.modified if same else await self._calls.adopt(operation, own, lease.number)

        modified, lease = await self.on_lease(operation, claim, started, move)
        if modified is None:
            return None
        self.hold(lease, Holding(own.key, claim.ttl, own.created, modified, started, modified))
        return lease

    def hold(self, lease: SharedLease, holding: Holding) -> None:
        """Remember what was granted."""
        self.forget(holding.key)
        lease.holdings[holding.key] = holding

    def find(self, key: bytes) -> tuple[SharedLease, Holding] | None:
        """The holding with this key."""
        for lease in self._leases.values():
            if (holding := lease.holdings.get(key)) is not None:
                return lease, holding
        return None

    def forget(self, key: bytes) -> None:
        for lease in self._leases.values():
            lease.holdings.pop(key, None)

    def give_up_overdue(self, now: float, keys: Iterable[bytes] | None = None) -> None:
        """What nobody has renewed for its ttl has ended, although its key may still be there."""
        for lease in self._leases.values():
            holdings = lease.holdings
            found = list(holdings.values()) if keys is None else [holdings[key] for key in keys if key in holdings]
            for holding in found:
                if holding.renewed_at + holding.ttl <= now:
                    del holdings[holding.key]
                    self.debts.owe(holding.key, now, modified=holding.modified)

    # Debts

    async def pay(self, operation: str, keys: Sequence[bytes]) -> None:
        """
        Delete keys that are owed, and see it confirmed.

        Another try reaches keys whose creation was not known of. It leaves out what was waived meanwhile.

        Raises:
            BackendError: it is not confirmed.
        """
        for _ in range(_TRIES):
            now, owed = self.now(), [key for key in keys if key in self.debts]
            if not owed:
                return
            if await self._calls.delete(operation, owed):
                for key in owed:
                    self.debts.paid(key, now)
                return
        raise BackendUnavailableError(BACKEND, operation, "a key is made again whenever it is to be deleted")

    async def settle(self, operation: str, key: bytes) -> None:
        """Its owner wants it again: see deleted what is left of the earlier one."""
        while key in self.debts:
            now = self.now()
            await self.pay(operation, [key])
            self.debts.waive(key, now, self._calls.seen)

    def usable(self, key: bytes, created: int) -> bool:
        """Whether no deletion can hit the key that was created at this revision; if one can, it is owed again."""
        if not self.debts.doomed(key, created):
            return True
        self.forget(key)
        self.debts.owe(key, self.now(), stray=True)
        return False

    def _pay(self, now: float) -> None:
        paying = self._paying
        if paying is not None and not paying.done() and paying.get_loop() is asyncio.get_running_loop():
            return
        if due := self.debts.due(now):
            self._paying = asyncio.get_running_loop().create_task(self._pay_all(due, now), context=Context())

    async def _pay_all(self, due: dict[bytes, int | None], now: float) -> None:
        """A failure changes nothing: what is owed is tried again with a later keep-alive."""
        plain = [key for key, modified in due.items() if modified is None]
        try:
            for start in range(0, len(plain), BATCH):
                await self.pay("release", plain[start : start + BATCH])
            for key, modified in due.items():
                if modified is not None:
                    await self._calls.delete_unchanged("release", key, modified)
                    self.debts.paid(key, now)
        except BackendError:
            pass

    async def aclose(self) -> None:
        """Stop what is on its way. The leases end by themselves, when nobody keeps them alive."""
        paying, self._paying = self._paying, None
        if paying is not None and paying.get_loop() is asyncio.get_running_loop():
            await ended(paying)
        making, self._making = self._making, {}
        for flight in making.values():
            await flight.aclose()
        for lease in self._leases.values():
            if lease.flight is not None:
                await lease.flight.aclose()
