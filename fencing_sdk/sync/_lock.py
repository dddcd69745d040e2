"""Locks, permits, and readers and writers, for threads: stateless, reusable, shared by many threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import EllipsisType
from typing import NoReturn, cast

from fencing_sdk._lease import Lease, PermitLease
from fencing_sdk._lock import Lock
from fencing_sdk._values.claim import Holder
from fencing_sdk._values.timing import Seconds
from fencing_sdk._values.uncopied import Uncopied
from fencing_sdk.errors import shown
from fencing_sdk.recipes.rwlock import ReadWriteLock, enter_one_of_the_two
from fencing_sdk.recipes.semaphore import Semaphore
from fencing_sdk.sync._lease import Block, Bridge, SyncLease, SyncPermitLease, begin, give_back, owned
from fencing_sdk.sync._loop_thread import LoopThread
from fencing_sdk.sync._thread_call import Cancel


class SyncLock(Uncopied):
    """
    A lock for threads, described. Nothing is sent until it is entered or acquired. Made by `SyncLockClient.lock`.

    ``with lock as lease`` holds it, and raises `LeaseLostError` when it is left after a loss. Nothing stops the body
    meanwhile, so it reads ``lease.token`` for each write, and asks ``lease.check()`` in long work.
    """

    __slots__ = ("_blocks", "_bridge", "_cancel", "_lock")

    def __init__(self, bridge: Bridge, lock: Lock, cancel: threading.Event | None = None) -> None:
        self._bridge = bridge
        self._cancel = None if cancel is None else Cancel(cancel, lock.name)
        self._lock = lock
        self._blocks: list[Block] = []

    @property
    def name(self) -> str:
        """What the lock protects, without the client's namespace."""
        return self._lock.name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {repr(self._lock).partition(' ')[2]}"

    def acquire(self, *, wait: Seconds | EllipsisType | None = ...) -> SyncLease:
        """
        Take the lock and return a plain handle, to be released by ``lease.release()`` in any thread.

        If the wait is interrupted, by `KeyboardInterrupt` or a time limit that a signal raises, nothing is left behind:
        neither the place in the line, nor a lock that was granted by then.

        Args:
            wait: Seconds to wait for another holder, this time. None waits for ever, 0 asks once. The lock's
                own ``wait`` by default.

        Raises:
            AcquireCancelledError: the event ``cancel`` of the lock is set.
            FencingError: as `Lock.acquire`. `UsageError` when this thread is inside ``with`` of this lock.
            UnsupportedError: gevent or eventlet has replaced the threads of this process.
        """
        return self._take(wait)

    def try_acquire(self) -> SyncLease | None:
        """
        Take the lock if it is free now, and return a plain handle, or None. One that is dropped gives the lock back.

        Raises:
            FencingError: as `Lock.try_acquire`.
        """
        bridge = self._bridge()

        async def taken() -> SyncLease | None:
            handle = await self._lock.try_acquire()
            return None if handle is None else self._lease(handle, bridge)

        return bridge.call(taken, undo=give_back)

    def locked(self) -> bool:
        """
        Tell whether the lock is held, by any holder. An answer may be outdated when it arrives.

        Raises:
            BackendError: the store did not answer, or refused.
        """
        return self._bridge().call(self._lock.locked)

    def __enter__(self) -> SyncLease:
        return self._enter(begin(self._blocks))

    def _enter(self, block: Block) -> SyncLease:
        try:
            lease = block.held = self._take()
            block.enter()
        except BaseException:
            block.drop()
            raise
        return lease

    def _end(self, block: Block, raised: BaseException | None) -> None:
        block.leave(raised)

    __exit__ = owned(_end)

    def _take(self, wait: Seconds | EllipsisType | None = ...) -> SyncLease:
        bridge = self._bridge()

        async def taken() -> SyncLease:
            return self._lease(await self._lock.acquire(wait=wait), bridge)

        return bridge.call(taken, undo=give_back, cancel=self._cancel)

    def _lease(self, handle: Lease, bridge: LoopThread) -> SyncLease:
        """Make the lease of the thread, in the loop: no signal comes between it and its owner."""
        return (SyncPermitLease if isinstance(handle, PermitLease) else SyncLease)(handle, bridge, self._bridge)


class SyncSemaphore(SyncLock):
    """A number of permits for threads, described, as a `Semaphore` for tasks. Made by `SyncLockClient.semaphore`."""

    __slots__ = ()

    @property
    def permits(self) -> int:
        """How many may be held at the same time."""
        return cast("Semaphore", self._lock).permits

    def acquire(self, *, wait: Seconds | EllipsisType | None = ...) -> SyncPermitLease:
        """Take a permit and return a plain handle. Arguments and errors are those of `SyncLock.acquire`."""
        return super().acquire(wait=wait)  # type: ignore[return-value]  # no call of cast: a signal could come in it

    def try_acquire(self) -> SyncPermitLease | None:
        """Take a permit if one is free now. Errors are those of `SyncLock.try_acquire`."""
        return super().try_acquire()  # type: ignore[return-value]

    def holders(self) -> Sequence[Holder]:
        """Tell who holds which permit, in the order of their numbers. An answer may be outdated when it arrives."""
        return self._bridge().call(cast("Semaphore", self._lock).holders)

    def __enter__(self) -> SyncPermitLease:
        return super().__enter__()  # type: ignore[return-value]


class SyncReadWriteLock(Uncopied):
    """
    Two locks on one name for threads: `reader`, which many may hold together, and `writer`.

    As a `ReadWriteLock` for tasks. Made by `SyncLockClient.rwlock`.
    """

    __slots__ = ("_bridge", "_lock", "_reader", "_writer")

    def __init__(self, bridge: Bridge, lock: ReadWriteLock, cancel: threading.Event | None = None) -> None:
        self._bridge = bridge
        self._lock = lock
        self._reader = SyncLock(bridge, lock.reader, cancel)
        self._writer = SyncLock(bridge, lock.writer, cancel)

    @property
    def name(self) -> str:
        """What the lock protects, without the client's namespace."""
        return self._lock.name

    @property
    def reader(self) -> SyncLock:
        """Held together with other readers, whose token it has."""
        return self._reader

    @property
    def writer(self) -> SyncLock:
        """Held alone."""
        return self._writer

    def __repr__(self) -> str:
        return f"<SyncReadWriteLock {shown(self.name)}>"

    def __enter__(self) -> NoReturn:
        """
        Never: one of the two locks is entered.

        Raises:
            UsageError: always.
        """
        raise enter_one_of_the_two(self.name, "with")

    def __exit__(self, *_: object) -> None:
        """Never called."""

    def holders(self) -> Sequence[Holder]:
        """Tell who holds it: readers, or one writer. An answer may be outdated when it arrives."""
        return self._bridge().call(self._lock.holders)
