"""
The lock service of a world: the reference table behind the network, on a clock of its own.

Tokens are 1, 2, 3, over all names. Waiters poll: this service has no line and sends no wake-ups.
"""

from __future__ import annotations

from collections.abc import Sequence

from fencing_sdk._values.claim import Claim, Grant, Held, Holder, Renewal, holder_of
from fencing_sdk._values.clock import Clock
from fencing_sdk.backends._shared.share_table import ShareTable
from fencing_sdk.testing._network import Link

SERVICE = "locks"
"""The lock service in histories."""


class LockService:
    """Grants locks to clients, and remembers by which name it knows them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._table = ShareTable(lambda last: last + 1)
        self._clients: dict[str, str] = {}

    def acquire(self, client: str, claim: Claim) -> Grant | Held:
        """One try of *client*."""
        self._clients[holder_of(claim.owner)] = client
        return self._table.acquire(claim, self._clock.now())

    def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal]:
        """Restart the ttl of every claim that still holds."""
        now = self._clock.now()
        return [self._table.renew(claim, now) for claim in claims]

    def release(self, claim: Claim) -> Renewal | None:
        """Give the lock back, if *claim* has it; answer as `Backend.release`."""
        return self._table.release(claim, self._clock.now())

    def revoke(self, name: str) -> None:
        """Take *name* away from its holder, without telling the holder's client."""
        self._table.revoke(name, self._clock.now())

    def inspect(self, name: str) -> Holder | None:
        """Return the holder of *name*."""
        return self._table.inspect(name, self._clock.now())

    def holders(self, name: str) -> Sequence[Holder]:
        """Return every holder of *name*."""
        return self._table.holders(name, self._clock.now())

    def holder(self, name: str) -> str | None:
        """The client that holds *name* in the eyes of the service."""
        holder = self.inspect(name)
        return None if holder is None else self._clients[holder.holder]


class WorldBackend:
    """The client's end: a backend whose five calls are messages."""

    def __init__(self, link: Link, service: LockService) -> None:
        self._link = link
        self._service = service

    async def acquire(self, claim: Claim) -> Grant | Held:
        """See `fencing_sdk.abc.Backend.acquire`."""
        return await self._link.ask(SERVICE, "acquire", claim.name, lambda me: self._service.acquire(me, claim))

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal]:
        """See `fencing_sdk.abc.Backend.renew`."""
        names = ", ".join(claim.name for claim in claims)
        return await self._link.ask(SERVICE, "renew", names, lambda _: self._service.renew(claims))

    async def release(self, claim: Claim) -> Renewal | None:
        """See `fencing_sdk.abc.Backend.release`."""
        return await self._link.ask(SERVICE, "release", claim.name, lambda _: self._service.release(claim))

    async def inspect(self, name: str) -> Holder | None:
        """See `fencing_sdk.abc.Backend.inspect`."""
        return await self._link.ask(SERVICE, "inspect", name, lambda _: self._service.inspect(name))

    async def holders(self, name: str) -> Sequence[Holder]:
        """See `fencing_sdk.abc.SupportsShares.holders`."""
        return await self._link.ask(SERVICE, "inspect", name, lambda _: self._service.holders(name))

    async def aclose(self) -> None:
        """Nothing is open."""
