"""
Locks that several owners may hold at a time: the permits of a semaphore, or a lock for many readers or one writer.

    gpus = locks.semaphore("gpu-pool", permits=4, fences=[guard])
    async with gpus as lease:
        await guard.write(lease.resource, lease.token, ...)  # "gpu-pool/2"

    catalog = locks.rwlock("catalog", fences=[guard])
    async with catalog.reader as lease: ...
    async with catalog.writer as lease: ...

Tokens of different permits say nothing about each other: the oldest of four holders is as valid as the newest. So a
guard compares the tokens of one permit alone, and each permit is a resource of its own.

Readers that hold together share one token, and to a guard they are one holder: with a token for each, a guard that has
seen the second would refuse the first, which holds as well. A writer's token is higher than that of every reader before
it, so one fence refuses the zombies of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import cast

from fencing_sdk._lease import PermitLease
from fencing_sdk._lock import Lock, engine_of
from fencing_sdk._values.claim import Holder, Permit, check_name, in_namespace
from fencing_sdk._values.loop_owner import Uncopied
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
        """Number of permits that may be held at the same time."""
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
        Return whether all permits are held. An answer may be outdated when it arrives.

        Raises:
            BackendError, UsageError: as `Lock.locked`.
        """
        return len(await self.holders()) >= self.permits

    async def holders(self) -> Sequence[Holder]:
        """
        Return the holders of the permits, in the order of their numbers. An answer may be outdated when it arrives.

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
        ConfigurationError: *permits* is not a number from 1 to 1,000, or *name* leaves no room for the number of a
        permit.
    """
    if isinstance(permits, bool) or not isinstance(permits, int) or not 1 <= permits <= MOST_PERMITS:
        msg = f"permits must be a whole number from 1 to {MOST_PERMITS}, got {shown(permits)}"
        raise ConfigurationError(msg)
    check_name(f"{check_name(name)}/{permits - 1}")
    return Permit(of=permits)


class ReadWriteLock(Uncopied):
    """
    Two locks on one name: `reader`, which many may hold together, and `writer`. Made by `LockClient.rwlock`.

    There is one line, in order of arrival: a reader that comes after a waiting writer waits behind it, so writers do
    not starve. A task that holds one of the two cannot wait for the other: that is a `UsageError`, not an upgrade.

    Not promised: that a reader which has lost its lease stops reading. Read, then call ``lease.check()``; what was read
    before a check that passes was read under the lease.
    """

    __slots__ = ("_namespace", "_reader", "_writer")

    def __init__(self, namespace: str, reader: Lock, writer: Lock) -> None:
        self._namespace = namespace
        self._reader = reader
        self._writer = writer

    @property
    def name(self) -> str:
        """The name, without the client's namespace."""
        return self._writer.name

    @property
    def reader(self) -> Lock:
        """Held together with other readers, whose token it has."""
        return self._reader

    @property
    def writer(self) -> Lock:
        """Held alone."""
        return self._writer

    def __repr__(self) -> str:
        return f"<ReadWriteLock {shown(self.name)}>"

    async def holders(self) -> Sequence[Holder]:
        """
        Return the holders: readers, or one writer. An answer may be outdated when it arrives.

        Raises:
            BackendError, UsageError: as `Lock.locked`.
        """
        return await engine_of(self._writer).holders(in_namespace(self._namespace, self.name))
