"""
Many readers, or one writer.

    catalog = locks.rwlock("catalog", fences=[guard])
    async with catalog.reader as lease: ...
    async with catalog.writer as lease: ...

Readers that hold together share one token, and to a guard they are one holder: with a token for each, a guard that has
seen the second would refuse the first, which holds as well. A writer's token is higher than that of every reader before
it, so one fence refuses the zombies of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from fencing_sdk._lock import Lock, engine_of
from fencing_sdk._values.claim import Holder
from fencing_sdk._values.names import in_namespace
from fencing_sdk._values.uncopied import Uncopied
from fencing_sdk.errors import UsageError, shown


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
        """What the lock protects, without the client's namespace."""
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

    async def __aenter__(self) -> NoReturn:
        """
        Never: one of the two locks is entered.

        Raises:
            UsageError: always.
        """
        raise enter_one_of_the_two(self.name, "async with")

    async def __aexit__(self, *_: object) -> None:
        """Never called."""

    async def holders(self) -> Sequence[Holder]:
        """
        Tell who holds it: readers, or one writer. An answer may be outdated when it arrives.

        Raises:
            BackendError, UsageError: as `Lock.locked`.
        """
        return await engine_of(self._writer).holders(in_namespace(self._namespace, self.name))


def enter_one_of_the_two(name: str, block: str) -> UsageError:
    """Return the error for a *block*, ``async with`` or ``with``, of both locks."""
    return UsageError(f"enter {shown(name)} as a reader or as the writer: {block} rwlock.reader, or rwlock.writer")
