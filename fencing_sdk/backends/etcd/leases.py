"""
Leases of etcd that many tickets share, one for each life in whole seconds.

A keep-alive proves that the lease lived when it was sent. A lease is a little longer than the life of its tickets, so
one keep-alive also serves the calls of the next fraction of a second: a thousand tickets, kept one by one or together,
cost as many keep-alives as one.

A key of a shared lease lives as long as the lease, and any other ticket of it keeps that alive. So after a keep-alive
the client looks for keys that no ticket of its own has, and deletes them: tickets that were not kept for their life,
and those of requests whose answers were lost. Each deletion compares that the key is still on this lease, because
another client of the same owner may have taken it over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from fencing_sdk._etcd import (
    GRANT,
    KEEP_ALIVE,
    TIME_TO_LIVE,
    TXN,
    GatewayReply,
    Json,
    compared,
    decoded,
    delete,
    nested,
    number,
    revision_in,
    txn,
)
from fencing_sdk._http.requests import UnreadableAnswerError
from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.tasks import SharedCall
from fencing_sdk._values.timing import DRIFT
from fencing_sdk.backends._shared.background_task import BackgroundTask
from fencing_sdk.errors import BackendError

BACKEND = "EtcdBackend"
BATCH = 60
"""Tickets in one transaction: etcd allows 128 operations, and a ticket may need two."""
SPARE = 0.5
"""Seconds by which a lease is at least longer than the life of its tickets."""
LATE_ARRIVAL = 600.0
"""Seconds for which a request without an answer may still arrive: longer than any kernel sends it again."""
_SWEEP_EVERY = 5.0


class Ask(Protocol):
    """A way to ask etcd."""

    async def __call__(self, operation: str, path: str, body: Json, *, hedged: bool = False) -> GatewayReply:
        """See `fencing_sdk._etcd.Gateway.call`."""
        ...


@dataclass(slots=True, eq=False)
class SharedLease:
    """A lease of etcd."""

    number: int
    ttl: int
    """The seconds that etcd granted: at least the requested ones, and at least its own minimum."""
    renewed_at: float
    ended: bool = False
    keep_alive: SharedCall[bool] | None = None
    suspect_until: float = 0.0
    """Until this moment it may have keys that no ticket of this client has."""
    swept_at: float = -math.inf


class SharedLeases:
    """
    The leases of one client.

    Args:
        ask: Asks etcd.

        unwanted: Of the keys of a lease, those that no ticket of this client has.

        overdue: Forgets the tickets of a lease that were not kept for their life; returns whether there are any.
    """

    def __init__(
        self,
        ask: Ask,
        unwanted: Callable[[Sequence[bytes]], Sequence[bytes]],
        overdue: Callable[[SharedLease], bool],
    ) -> None:
        self._ask = ask
        self._unwanted = unwanted
        self._overdue = overdue
        self._clock = BootClock()
        self._leases: dict[int, SharedLease] = {}  # by the requested seconds
        self._grants: dict[int, SharedCall[SharedLease]] = {}
        self._sweeping = BackgroundTask()

    def now(self) -> float:
        """Seconds on the clock by which lives are measured."""
        return self._clock.now()

    def clear(self) -> None:
        """Forget all of them: a forked child must not keep its parent's leases alive."""
        self._leases.clear()
        self._grants.clear()
        self._sweeping = BackgroundTask()

    async def grant(self, operation: str, seconds: float) -> tuple[int, int]:
        """Make a lease; return its id, and the seconds that etcd has granted."""
        fields, _ = await self._ask(operation, GRANT, {"TTL": str(math.ceil(seconds))})
        lease, ttl = number(fields, "ID"), number(fields, "TTL")
        if not lease or ttl <= 0:
            msg = "the answer has no lease"
            raise UnreadableAnswerError(msg)
        return lease, ttl

    async def remaining(self, operation: str, lease: int) -> float | None:
        """The whole seconds that a lease has left; None if it has ended."""
        fields, _ = await self._ask(operation, TIME_TO_LIVE, {"ID": str(lease)}, hedged=True)
        left = number(fields, "TTL")  # below zero between the expiry and the moment when etcd ends the lease
        return max(0.0, left) if number(fields, "grantedTTL") else None

    async def lease_for(self, operation: str, life: float) -> SharedLease:
        """Return a lease for tickets that live for so many seconds; it may have to be kept alive first: `fresh`."""
        seconds = math.ceil(life + SPARE)
        lease = self._leases.get(seconds)
        if lease is not None and not lease.ended:
            return lease
        now = self.now()

        async def grant() -> SharedLease:
            made = self._leases[seconds] = SharedLease(*await self.grant(operation, seconds), now)
            return made

        call = self._grants.get(seconds)
        if call is None or not call.can_join(now - SPARE):
            call = self._grants[seconds] = SharedCall(grant, now)
        return await call.join()

    @staticmethod
    def lives(lease: SharedLease, life: float, started: float) -> bool:
        """Return whether *lease* lives for *life* seconds from *started* on without another keep-alive."""
        return not lease.ended and lease.renewed_at >= started - max(0.0, lease.ttl - life) * (1 - DRIFT)

    async def fresh(self, operation: str, lease: SharedLease, life: float, started: float) -> bool:
        """Make sure that *lease* lives for *life* seconds from *started* on; False: it has ended."""
        if lease.ended or self.lives(lease, life, started):
            return not lease.ended
        since = started - max(0.0, lease.ttl - life) * (1 - DRIFT)

        async def send() -> bool:
            if self._overdue(lease):
                lease.suspect_until, lease.swept_at = max(lease.suspect_until, now + SPARE), -math.inf
            fields, _ = await self._ask(operation, KEEP_ALIVE, {"ID": str(lease.number)}, hedged=True)
            if number(fields, "TTL") <= 0:
                lease.ended = True
                return False
            if lease.suspect_until > now >= lease.swept_at + _SWEEP_EVERY:
                lease.swept_at = now
                self._sweeping.start(lambda: self._sweep_quietly(lease))
            lease.renewed_at = max(lease.renewed_at, now)
            return True

        call = lease.keep_alive
        if call is None or not call.can_join(since):
            now = self.now()
            call = lease.keep_alive = SharedCall(send, now)
        return await call.join()

    def not_found(self, *leases: SharedLease) -> None:
        """Take note that one of these *leases* has ended: one that can have, by this client's clock, or any."""
        now = self.now()
        old = [lease for lease in leases if lease.renewed_at + lease.ttl <= now]
        for lease in old or leases:
            lease.ended = True

    def suspect(self, *leases: SharedLease) -> None:
        """Take note that a request without an answer may still put a key."""
        for lease in leases:
            lease.suspect_until, lease.swept_at = self.now() + LATE_ARRIVAL, -math.inf

    async def _sweep_quietly(self, lease: SharedLease) -> None:
        with suppress(BackendError, UnreadableAnswerError):  # the next keep-alive tries again, as long as it is suspect
            await self.sweep(lease)

    async def sweep(self, lease: SharedLease) -> None:
        """Delete the keys of *lease* that no ticket of this client has."""
        fields, _ = await self._ask("release", TIME_TO_LIVE, {"ID": str(lease.number), "keys": True}, hedged=True)
        found, revision = fields.get("keys", []), revision_in(fields)
        unwanted = self._unwanted(list(map(decoded, found if isinstance(found, list) else ())))
        for start in range(0, len(unwanted), BATCH):
            deletions = [
                nested(
                    compare=[
                        compared(key, "LEASE", "EQUAL", lease.number),
                        compared(key, "CREATE", "LESS", revision + 1),  # it may have been drawn again meanwhile
                    ],
                    success=[delete(key)],
                )
                for key in unwanted[start : start + BATCH]
            ]
            await self._ask("release", TXN, txn(compare=[], success=deletions))

    async def aclose(self) -> None:
        """Cancel what is under way. Without keep-alives, the leases end by themselves."""
        await self._sweeping.aclose()
        grants, self._grants = self._grants, {}
        for call in grants.values():
            await call.aclose()
        for lease in self._leases.values():
            if lease.keep_alive is not None:
                await lease.keep_alive.aclose()
