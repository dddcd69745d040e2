"""
Locks, permits, readers and writers, several locks at once, and elections, for threads: described once, entered by many.

In an election, the loop that stands is that of the client, and the body runs in the thread that asked:

    for term in locks.election("scheduler"):
        with term as lease:
            while not term.over:            # lost, resigned, or the client drains
                plan(lease.token)

A thread cannot be cancelled. So a term that is over goes on until its body ends, and its lock is released after that.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import EllipsisType
from typing import ParamSpec, TypeVar, cast

from fencing_sdk._lease import Lease as TaskLease
from fencing_sdk._lease import PermitLease as TaskPermitLease
from fencing_sdk._lease import state_of
from fencing_sdk._lock import Lock as TaskLock
from fencing_sdk._values.claim import Holder
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.timing import Seconds
from fencing_sdk.errors import AcquireCancelledError, ConfigurationError, LeaseLostError, LockHeldError, shown
from fencing_sdk.recipes.election import Election as TaskElection
from fencing_sdk.recipes.election import ElectionStanding, TermLife, candidacy_of
from fencing_sdk.recipes.jobs import JobCall, Ran, Skipped
from fencing_sdk.recipes.multilock import HeldLeases, acquire_all
from fencing_sdk.recipes.multilock import MultiLock as TaskMultiLock
from fencing_sdk.recipes.old_locks import OldLock
from fencing_sdk.recipes.old_locks import beside as both_locks
from fencing_sdk.recipes.shares import ReadWriteLock as TaskReadWriteLock
from fencing_sdk.recipes.shares import Semaphore as TaskSemaphore
from fencing_sdk.sync._bridge import Cancel, ClosedMeanwhileError
from fencing_sdk.sync._lease import Block, Bridge, Lease, PermitLease, begin, leave_block, owned, release_leases


class Lock(Uncopied):
    """
    A lock for threads, described. Nothing is sent until it is entered or acquired. Made by `LockClient.lock`.

    ``with lock as lease`` holds it, and raises `LeaseLostError` when it is left after a loss. Nothing stops the body
    meanwhile, so it reads ``lease.token`` for each write, and asks ``lease.check()`` in long work.
    """

    __slots__ = ("_blocks", "_bridge", "_cancel", "_lock")

    def __init__(self, bridge: Bridge, lock: TaskLock, cancel: threading.Event | None = None) -> None:
        self._bridge = bridge
        self._cancel = None if cancel is None else Cancel(cancel, lock.name)
        self._lock = lock
        self._blocks: list[Block] = []

    @property
    def name(self) -> str:
        """The name of the lock, without the client's namespace."""
        return self._lock.name

    def __repr__(self) -> str:
        return f"<sync.{type(self).__name__} {repr(self._lock).partition(' ')[2]}"

    def acquire(self, *, wait: Seconds | EllipsisType | None = ...) -> Lease:
        """
        Take the lock and return a plain handle, to be released by ``lease.release()`` in any thread.

        If the wait is interrupted, by `KeyboardInterrupt` or a time limit that a signal raises, nothing is left behind:
        neither the place in the line, nor a lock that was granted by then. *wait*: see `fencing_sdk.Lock.acquire`.

        Raises:
            AcquireCancelledError: the event ``cancel`` of the lock is set.
            FencingError: as `fencing_sdk.Lock.acquire`. `UsageError` when this thread is inside ``with`` of it.
            UnsupportedError: gevent or eventlet has replaced the threads of this process.
        """
        return self._take(wait)

    def try_acquire(self) -> Lease | None:
        """
        Take the lock if it is free now, and return a plain handle, or None. One that is dropped releases the lock.

        Raises:
            FencingError: as `fencing_sdk.Lock.try_acquire`.
        """

        async def taken() -> Lease | None:
            handle = await self._lock.try_acquire()
            return None if handle is None else self._lease(handle)

        return self._bridge().call(taken, undo=release_leases)

    def locked(self) -> bool:
        """Return whether the lock is held, by any holder. Errors are those of `fencing_sdk.Lock.locked`."""
        return self._bridge().call(self._lock.locked)

    def __enter__(self) -> Lease:
        return begin(self._blocks).hold(self._take)

    __exit__ = owned(leave_block)

    def _take(self, wait: Seconds | EllipsisType | None = ...) -> Lease:
        async def taken() -> Lease:
            return self._lease(await self._lock.acquire(wait=wait))

        return self._bridge().call(taken, undo=release_leases, cancel=self._cancel)

    def _lease(self, handle: TaskLease) -> Lease:
        """Make the lease of the thread, in the loop: no signal comes between it and its owner."""
        return (PermitLease if isinstance(handle, TaskPermitLease) else Lease)(handle, self._bridge)


def beside(lock: Lock, old: OldLock) -> Lock:
    """
    Describe *lock* again, as one that holds *old* beside it. Arguments are those of `fencing_sdk.recipes.beside`.

    The client's own thread takes *old*, renews it and releases it; an *old* that blocks is asked in worker threads. The
    loss of *old* ends the lease. Nothing stops the body.
    """
    given: object = lock
    if not isinstance(given, Lock):
        msg = f"beside() of fencing_sdk.sync takes a lock of fencing_sdk.sync, not {shown(given)}"
        raise ConfigurationError(msg)
    both = type(lock)(lock._bridge, both_locks(lock._lock, old))  # noqa: SLF001  (of its own module)
    both._cancel = lock._cancel  # noqa: SLF001
    return both


class Semaphore(Lock):
    """
    A number of permits for threads, described. Made by `LockClient.semaphore`.

    As a `fencing_sdk.recipes.Semaphore` for tasks.
    """

    __slots__ = ()

    @property
    def permits(self) -> int:
        """Number of permits that may be held at the same time."""
        return cast("TaskSemaphore", self._lock).permits

    def acquire(self, *, wait: Seconds | EllipsisType | None = ...) -> PermitLease:
        """Take a permit and return a plain handle. Arguments and errors are those of `Lock.acquire`."""
        return super().acquire(wait=wait)  # type: ignore[return-value]  # no call of cast: a signal could come in it

    def try_acquire(self) -> PermitLease | None:
        """Take a permit if one is free now. Errors are those of `Lock.try_acquire`."""
        return super().try_acquire()  # type: ignore[return-value]

    def holders(self) -> Sequence[Holder]:
        """See `fencing_sdk.recipes.Semaphore.holders`."""
        return self._bridge().call(cast("TaskSemaphore", self._lock).holders)

    def __enter__(self) -> PermitLease:
        return super().__enter__()  # type: ignore[return-value]


class ReadWriteLock(Uncopied):
    """
    Two locks on one name for threads: `reader`, which many may hold together, and `writer`.

    As a `fencing_sdk.recipes.ReadWriteLock` for tasks. Made by `LockClient.rwlock`.
    """

    __slots__ = ("_bridge", "_lock", "_reader", "_writer")

    def __init__(self, bridge: Bridge, lock: TaskReadWriteLock, cancel: threading.Event | None = None) -> None:
        self._bridge = bridge
        self._lock = lock
        self._reader = Lock(bridge, lock.reader, cancel)
        self._writer = Lock(bridge, lock.writer, cancel)

    @property
    def name(self) -> str:
        """The name of the two locks, without the client's namespace."""
        return self._lock.name

    @property
    def reader(self) -> Lock:
        """Held together with other readers, whose token it has."""
        return self._reader

    @property
    def writer(self) -> Lock:
        """Held alone."""
        return self._writer

    def __repr__(self) -> str:
        return f"<sync.ReadWriteLock {shown(self.name)}>"

    def holders(self) -> Sequence[Holder]:
        """See `fencing_sdk.recipes.ReadWriteLock.holders`."""
        return self._bridge().call(self._lock.holders)


class HeldLocks(HeldLeases[Lease]):
    """
    The leases of a `MultiLock` that is held, by the names of the locks, in the order of their names.

    ``held["accounts/7"].token`` is the token of one lock, ``held.tokens`` those of all.
    """

    __slots__ = ()


class MultiLock(Uncopied):
    """
    Several locks for a thread, described: ``with locks.multilock("accounts/1", "accounts/7") as held:``.

    One description serves many threads. The end of the block raises `LeaseLostError` when one of the locks was lost,
    and names it.
    """

    __slots__ = ("_blocks", "_bridge", "_cancel", "_multilock")

    def __init__(self, bridge: Bridge, multilock: TaskMultiLock, cancel: threading.Event | None = None) -> None:
        self._bridge = bridge
        self._cancel = None if cancel is None else Cancel(cancel, ", ".join(multilock.names))
        self._multilock = multilock
        self._blocks: list[Block] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order in which the locks are acquired."""
        return self._multilock.names

    def __repr__(self) -> str:
        return f"<sync.MultiLock {', '.join(map(shown, self.names))}>"

    def __enter__(self) -> HeldLocks:
        block = begin(self._blocks)

        async def taken() -> HeldLocks:
            handles = await acquire_all(self._multilock)
            return HeldLocks({name: Lease(handle, self._bridge) for name, handle in handles.items()})

        def take() -> HeldLocks:  # no partial: a signal could strike between its end and the keeping of its value
            return self._bridge().call(taken, undo=lambda held: release_leases(*held.values()), cancel=self._cancel)

        return block.hold(take)

    __exit__ = owned(leave_block)


P = ParamSpec("P")
R = TypeVar("R")


class ElectionTerm(Uncopied):
    """
    The lead of this process, for as long as its lease is held: ``with term as lease``, at once and once.

    A `LeaseLostError` that says that this lease is over ends the block without an error, and the loop goes on.
    Everything else that the body raises leaves as it is.
    """

    __slots__ = ("_blocks", "_life")

    def __init__(self, life: TermLife[Lease]) -> None:
        self._life = life
        self._blocks: list[Block] = []

    def __repr__(self) -> str:
        return f"<sync.ElectionTerm of {self.lease!r}>"

    @property
    def lease(self) -> Lease:
        """The lease of the term."""
        return self._life.lease

    @property
    def over(self) -> bool:
        """True if the body is to end: the lead was lost, the election resigned, or the client drains."""
        return self._life.over

    def __enter__(self) -> Lease:
        life = self._life
        life.check_enterable()
        block = begin(self._blocks)
        block.ending = life.end
        block.hold(lambda: life.lease)
        life.entered = True
        return life.lease

    def _leave(self, block: Block, raised: BaseException | None) -> bool:
        end = raised
        try:
            block.leave(raised)
        except LeaseLostError as error:
            end = error
        return self._life.swallows(raised, end)

    __exit__ = owned(_leave)


class Election(Uncopied):
    """
    An election for threads, described. Nothing is sent until ``for`` stands in it. Made by `LockClient.election`.

    The loop ends in order when the client drains, or when ``cancel`` is set while it waits. It raises what is not an
    outage, as a `fencing_sdk.recipes.Election` for tasks.
    """

    __slots__ = ("_bridge", "_cancel", "_election")

    def __init__(self, bridge: Bridge, election: TaskElection, cancel: threading.Event | None = None) -> None:
        self._bridge = bridge
        self._cancel = None if cancel is None else Cancel(cancel, election.name)
        self._election = election

    @property
    def name(self) -> str:
        """The name of the election, without the client's namespace."""
        return self._election.name

    @property
    def leading(self) -> bool:
        """True if this process leads at this moment, by the clock."""
        return self._election.leading

    @property
    def standing(self) -> ElectionStanding:
        """Standing of this process, for health endpoints."""
        return self._election.standing

    def __repr__(self) -> str:
        return f"<sync.Election {shown(self.name)} {self.standing.value}>"

    def leader(self) -> Holder | None:
        """See `fencing_sdk.recipes.Election.leader`."""
        return self._bridge().call(self._election.leader)

    def resign(self) -> None:
        """
        End the term of this process, if it leads: `ElectionTerm.over` is true from now on.

        The lock is released when the body has ended, and the loop stands again, behind those who wait. To leave the
        election, ``break`` out of the loop.

        Raises:
            UsageError: the client is not open.
        """
        self._election.resign()

    def __iter__(self) -> Iterator[ElectionTerm]:
        resigned = False
        while (life := self._stand(resigned=resigned)) is not None:
            try:
                life.begin()
                yield ElectionTerm(life)
                if (error := life.refuse_unentered()) is not None:
                    life.lease.release()
                    raise error
            finally:
                if life.abandon("before its loop was left"):
                    life.lease.release()
            resigned = life.stopped

    def _stand(self, *, resigned: bool) -> TermLife[Lease] | None:
        """Wait for the lead as this process: a forked child may go on with the loop of its parent."""
        candidacy = candidacy_of(self._election)

        async def stood() -> TermLife[Lease] | None:
            handle = await candidacy.stand(resigned=resigned)
            return None if handle is None else TermLife(candidacy.election, Lease(handle, self._bridge), "with")

        async def release(life: TermLife[Lease] | None) -> None:
            await release_leases(None if life is None else life.lease)

        try:
            return self._bridge().call(stood, undo=release, cancel=self._cancel)
        except AcquireCancelledError:
            return None


def as_leader(
    function: Callable[P, R], election_of: Callable[[tuple[object, ...], dict[str, object]], Election]
) -> Callable[P, R | None]:
    """Run *function* as the leader of the election that the arguments of each call name."""

    @functools.wraps(function)
    def elected(*args: P.args, **kwargs: P.kwargs) -> R | None:
        for term in election_of(args, kwargs):
            returned: list[R] = []
            with term as lease:
                returned.append(function(*args, **kwargs))
                lease.check()  # a function that ended too late was not covered: another term
            if returned and lease.lost_reason is None:  # its release may have found that, too
                return returned[0]
        return None

    return elected


def run_job(bridge: Bridge, call: JobCall, function: Callable[[], R]) -> Ran[R] | Skipped:
    """
    Run *function* in this thread, under the lock of *call*.

    Raises:
        BaseException: as `fencing_sdk.recipes.jobs.JobCall.run`.
    """
    try:
        with Lock(bridge, cast("TaskLock", call)) as lease:
            try:
                value = function()
            except BaseException as error:
                with contextlib.suppress(ClosedMeanwhileError):  # the lease is lost, which the end of the block says
                    bridge().call(partial(call.park_failed, error), only=state_of(lease).loop)
                raise
            call.end()
    except BaseException as error:
        if call.state is not None:
            _report(bridge, call, error)
        elif isinstance(error, LockHeldError):
            return Skipped(call.name, error.retry_after)
        raise
    _report(bridge, call)
    return call.ran(value)


def _report(bridge: Bridge, call: JobCall, error: BaseException | None = None) -> None:
    """Report the end in the loop, where observers run."""

    async def report() -> None:
        call.report(error)

    assert call.state is not None  # the function has run
    try:
        bridge().watch(report, call.state.loop)
    except ClosedMeanwhileError:
        call.report(error)
