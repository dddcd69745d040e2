"""
A name and a way to hold it: stateless, reusable, shared by many tasks.

Every entry is a lease of its own with an owner of its own. The list of scopes only pairs each
exit with its entry, by task: the task that lost its lease may leave after the next holder came
through the same object.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from types import EllipsisType, TracebackType
from typing import Any, TypeVar

from fencing_sdk._engine.acquisition import Terms
from fencing_sdk._engine.deadlock import doubt_about, hold_in_doubt
from fencing_sdk._engine.engine import Engine, Fences
from fencing_sdk._engine.lease_scope import LeaseScope
from fencing_sdk._lease import AnyLease, Lease, held_here, waiting_thread
from fencing_sdk._values.claim import Mode, name_for
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.timing import Seconds, patience
from fencing_sdk.errors import LockHeldError, StaleTokenError, UsageError, shown

L = TypeVar("L", bound="Lock")


class Lock(Uncopied):
    """
    A lock, described. Nothing is sent until it is entered or acquired.

    ``async with lock as lease`` holds it, cancels the body when the lease is lost, and then raises
    `LeaseLostError`. `acquire` gives a plain handle instead, for places where the exit runs in
    another task than the entry. ``async with`` raises what `acquire` raises. Made by `LockClient.lock`.
    """

    __slots__ = ("_engine", "_fences", "_scopes", "_terms")

    def __init__(self, engine: Callable[[], Engine], terms: Terms, fences: Fences) -> None:
        self._engine = engine
        self._terms = terms
        self._fences = fences
        self._scopes: list[LeaseScope] = []

    @property
    def name(self) -> str:
        """What the lock protects, without the client's namespace."""
        return self._terms.name

    def __repr__(self) -> str:
        return f"<Lock {shown(self.name)} ttl={self._terms.timing.ttl:g}>"

    async def acquire(self, *, wait: Seconds | EllipsisType | None = ...) -> Lease:
        """
        Take the lock and return a plain handle, to be released by ``await lease.release()`` anywhere.

        The handle is renewed like any lease, but nothing cancels your work when it is lost: ask
        ``lease.check()``, read ``lease.token``, or wait for ``lease.wait_lost()``. It can release itself,
        also in a fixture whose exit runs in another task: ``async with await lock.acquire() as lease``.
        Keep the handle: one that is dropped releases the lock at once, with a line in the log and a `ResourceWarning`.

        Args:
            wait: Seconds to wait for another holder, this time. None waits for ever, 0 asks once. The lock's
                own ``wait`` by default.

        Raises:
            ConfigurationError: *wait* is not a valid time.
            LockHeldError: asked once (``wait=0``), and it is held.
            AcquireTimeoutError: it was still held when ``wait`` was over.
            StaleTokenError: a fence could not be raised, the resource has seen a later token.
            LeaseLostError: the lease was lost while fences were raised.
            BackendError: the store or a guard did not answer, or the store refused.
            UsageError: the client is not open, or this task is inside ``async with`` of this lock. Locks
                are not reentrant; a task that waits for a lock of which it has a handle waits for ever.
            Exception: what a guard of ``fences`` raised, such as the error of its database.
        """
        return await self._acquire(self._terms if wait is ... else self._terms._replace(wait=patience(wait)))

    async def try_acquire(self) -> Lease | None:
        """
        Take the lock if it is free now, and return a plain handle, or None.

        ``if await lock.try_acquire() is not None:`` drops the handle. The client then releases the lock, and the next
        caller gets it too. For work that one of several processes is to do, there is `LockClient.job`.

        Raises:
            StaleTokenError, LeaseLostError, BackendError, Exception: as `acquire`.
            UsageError: the client is not open.
        """
        try:
            return await self._acquire(self._terms._replace(wait=0.0))
        except LockHeldError:
            return None

    async def locked(self) -> bool:
        """
        Return whether any holder has the lock. An answer may be outdated when it arrives.

        To act on the answer, use `try_acquire`. `LockClient.inspect` returns the holder.

        Raises:
            BackendError: the store did not answer, or refused.
            UsageError: the client is not open.
        """
        return await self._engine().inspect(self._terms.store_name) is not None

    def _acquire(self, terms: Terms) -> Coroutine[Any, Any, Lease]:
        """Return the coroutine that waits for the lease, not awaited: each one in between would cost a resumption."""
        engine = self._engine()
        if (held_here() or waiting_thread() is not None) and (doubt := doubt_about(terms, engine)) is not None:
            return hold_in_doubt(doubt, terms, engine.hold(terms, self._fences))
        return engine.hold(terms, self._fences)

    def __aenter__(self) -> Coroutine[Any, Any, Lease]:
        return self._enter(self._terms)

    async def _enter(self, terms: Terms) -> Lease:
        lease = await self._acquire(terms)
        try:
            self._scopes.append(LeaseScope(lease))
        except BaseException:
            await lease.release()
            raise
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task = asyncio.current_task()
        scopes = self._scopes
        scope = scopes.pop() if scopes and scopes[-1].task is task else self._take_scope(task)
        lease = scope.state
        if scope.task is not task:
            error = scope.abort()
            await scope.lease.release()  # finds the loop of the lease, which may not be this one
            raise error from raised
        try:
            end = scope.leave(raised)
        except UsageError:
            await lease.keeper.release(lease)
            raise
        if end is not None and isinstance(end.raised, StaleTokenError):
            lease.report_stale(end.raised)
        await lease.keeper.release(lease)  # in the loop of the lease, as this is its task
        if end is not None or lease.lost is not None:
            scope.conclude(end, raised)

    def _take_scope(self, task: asyncio.Task[object] | None) -> LeaseScope:
        """
        Find the entry that is left now: the last one of this *task*.

        If the task never entered, which is an error, take an entry whose task has ended and so can no longer leave, or
        the only entry. If several tasks go on, the lease of the first one that ends without leaving is released. So no
        lease is renewed for ever, and a task that still works under a lease keeps it.
        """
        candidates = [scope for scope in self._scopes if scope.task is task][-1:]
        candidates = candidates or [scope for scope in self._scopes if scope.task.done()][:1] or self._scopes
        if len(candidates) != 1:
            self._release_behind_the_first_to_end()
            msg = f"lock {shown(self.name)} is left by a task that did not enter it"
            raise UsageError(msg)
        scope = candidates[0]
        self._scopes.remove(scope)
        return scope

    def _release_behind_the_first_to_end(self) -> None:
        """Schedule the release of a lease: that of the first task that ended without exiting the block."""
        released: list[LeaseScope] = []

        def on_end(scope: LeaseScope, _: asyncio.Task[object]) -> None:
            if released or scope not in self._scopes:
                return
            released.append(scope)
            self._scopes.remove(scope)
            scope.abort()
            scope.state.keeper.abandon(scope.state)

        for scope in self._scopes:
            scope.task.add_done_callback(partial(on_end, scope))


# What the rest of this package may do with a lock, and users may not. Only these functions read its private names.


async def enter(lock: Lock, *, wait: float | None, under: tuple[AnyLease, ...]) -> Lease:
    """
    Do what ``async with`` does first, with another patience. For this package alone: the caller leaves *lock*.

    *under*: the leases that the caller works under.
    """
    return await lock._enter(lock._terms._replace(wait=wait, under=under))  # noqa: SLF001


def enter_with(lock: Lock, lease: Lease) -> None:
    """Do what ``async with`` does when it has got its *lease*. For this package alone: the caller leaves *lock*."""
    lock._scopes.append(LeaseScope(lease))  # noqa: SLF001


def engine_of(lock: Lock) -> Engine:
    """
    Return what keeps the leases of *lock*. For this package alone.

    Raises:
        UsageError: the client is not open.
    """
    return lock._engine()  # noqa: SLF001


def telling(lock: Lock, on_held: Callable[[], object]) -> Lock:
    """Describe *lock* again, as one that calls *on_held* when it is held elsewhere. For this package alone."""
    return Lock(lock._engine, lock._terms._replace(on_held=on_held), lock._fences)  # noqa: SLF001


def copied(lock: Lock, kind: type[L]) -> L:
    """Describe *lock* again, as one of another *kind*. For this package alone."""
    return kind(lock._engine, lock._terms, lock._fences)  # noqa: SLF001


def in_mode(lock: Lock, mode: Mode, kind: type[L], recipe: str) -> L:
    """Describe *lock* again, as one of another *kind* that is held in another way. For this package alone."""
    terms = lock._terms._replace(mode=mode, name=name_for(recipe, lock.name))  # noqa: SLF001
    return kind(lock._engine, terms, lock._fences)  # noqa: SLF001
