"""
So many holders at a time, each with a number and a token of its own.

    gpus = locks.semaphore("gpu-pool", permits=4, fences=[guard])
    async with gpus as lease:
        await guard.write(lease.resource, lease.token, ...)  # "gpu-pool/2"

Tokens of different permits say nothing about each other: the oldest of four holders is as valid as the newest. So a
guard compares the tokens of one permit alone, and each permit is a resource of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import cast

from fencing_sdk._lease import PermitLease
from fencing_sdk._lock import Lock
from fencing_sdk._values.claim import Holder, Permit
from fencing_sdk._values.names import check_name
from fencing_sdk._values.timing import Seconds
from fencing_sdk.errors import ConfigurationError, shown

MOST_PERMITS = 1000
"""A store looks at every permit that is held whenever one is granted."""


class Semaphore(Lock):
    """
    A number of permits, described. Nothing is sent until it is entered or acquired. Made by `LockClient.semaphore`.

    ``async with semaphore as lease`` holds the lowest free permit, and does everything that ``async with lock`` does.
    Permits are granted in the order of arrival. A task that holds a permit and waits for another one without a limit
    gets a `UsageError`: pass ``wait``.

    Not promised: a rate. A semaphore bounds how many hold at the same moment, not how many begin in a minute. Nor
    that a holder whose permit has expired is refused before the next holder of that number has raised the fence.
    """

    __slots__ = ()

    @property
    def permits(self) -> int:
        """How many may be held at the same time."""
        return cast("Permit", self._terms.mode).of

    def __repr__(self) -> str:
        return f"<Semaphore {shown(self.name)} permits={self.permits} ttl={self._terms.timing.ttl:g}>"

    async def acquire(self, *, wait: Seconds | EllipsisType | None = ...) -> PermitLease:
        """Take a permit and return a plain handle. Arguments and errors are those of `Lock.acquire`."""
        return cast("PermitLease", await super().acquire(wait=wait))

    async def try_acquire(self) -> PermitLease | None:
        """Take a permit if one is free now. Errors are those of `Lock.try_acquire`."""
        return cast("PermitLease | None", await super().try_acquire())

    async def locked(self) -> bool:
        """
        Tell whether all permits are held. An answer may be outdated when it arrives.

        Raises:
            BackendError, UsageError: as `Lock.locked`.
        """
        return len(await self.holders()) >= self.permits

    async def holders(self) -> Sequence[Holder]:
        """
        Tell who holds which permit, in the order of their numbers. An answer may be outdated when it arrives.

        Raises:
            BackendError, UsageError: as `Lock.locked`.
        """
        return await self._engine().holders(self._terms.store_name)

    async def __aenter__(self) -> PermitLease:
        return cast("PermitLease", await super().__aenter__())


def check_permits(name: str, permits: object) -> Permit:
    """
    Return the mode of a semaphore.

    Raises:
        ConfigurationError: *permits* is no number from 1 to 1,000, or *name* leaves no room for the number of a permit.
    """
    if isinstance(permits, bool) or not isinstance(permits, int) or not 1 <= permits <= MOST_PERMITS:
        msg = f"permits must be a whole number from 1 to {MOST_PERMITS}, got {shown(permits)}"
        raise ConfigurationError(msg)
    check_name(f"{check_name(name)}/{permits - 1}")
    return Permit(of=permits)
