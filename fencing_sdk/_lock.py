"""
A name and a way to hold it: stateless, reusable, shared by many tasks.

Every entry is a lease of its own with an owner of its own. The list of scopes only pairs each
exit with its entry, by task: the task that lost its lease may leave after the next holder came
through the same object.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from functools import partial
from types import EllipsisType, TracebackType
from typing import Any, TypeVar

from fencing_sdk._engine.acquisition import Terms
from fencing_sdk._engine.engine import Engine, Fences
from fencing_sdk._engine.lease_scope import LeaseScope
from fencing_sdk._lease import AnyLease, Lease, WaitingThread, held_here, state_of, waiting_thread
from fencing_sdk._lease_state import LeaseState
from fencing_sdk._lease_ticket import LeaseTicket
from fencing_sdk._values.claim import LOCK, Mode, Permit, name_for
from fencing_sdk._values.loop_owner import Uncopied, no_task
from fencing_sdk._values.observers import logger
from fencing_sdk._values.timing import Seconds, patience
from fencing_sdk.errors import LockHeldError, StaleTokenError, UsageError, shown

_IN_COROUTINES = "in coroutines use the client of fencing_sdk.connect(): async with"

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
        """Name of the lock, without the client's namespace."""
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
        if (held_here() or waiting_thread() is not None) and (doubt := _doubt_about(terms, engine)) is not None:
            return _hold_in_doubt(doubt, terms, engine.hold(terms, self._fences))
        return engine.hold(terms, self._fences)

    async def __aenter__(
        self,
    ) -> Lease:  # a plain method that returns a coroutine is no context manager to most checkers
        lease = await self._acquire(self._terms)
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


# A task or a thread that waits for itself. The heartbeat renews every lease, so such a wait has no end.
#
#     it holds the lock itself            refused
#     its parent holds the lock (tasks)   a warning after one ttl: it may wait for its turn while its parent works on
#     it runs an event loop (threads)     a warning after one ttl: the holder may be a task of that loop

Doubt = Callable[[asyncio.Task[object]], str]
"""Returns why the task that waits may wait for ever. Empty when the reason has gone."""


def _doubt_about(terms: Terms, engine: Engine) -> Doubt | None:
    """
    Return what makes this wait suspicious, or None.

    Raises:
        UsageError: this task holds the lock itself, or the thread that waits for it does.
    """
    thread = waiting_thread()
    if thread is not None and not (thread.inside or thread.runs_a_loop or held_here()):
        return None  # as for nearly every thread
    if terms.wait == 0 or terms.resumes is not None or (isinstance(terms.mode, Permit) and terms.wait is not None):
        return None  # the wait ends; another permit may be free by then
    if thread is not None:
        for lease in tuple(thread.inside):
            if _is_on(lease, terms, engine):
                raise _already_held(terms, lease, thread)
    for lease in map(state_of, held_here()):
        if lease.task is not None and _is_on(lease, terms, engine):
            if lease.task is asyncio.current_task():
                raise _already_held(terms, lease, None)
            return partial(_child_of, lease, terms)
    return None if thread is None or not thread.runs_a_loop else partial(_stops_a_loop, thread, terms)


def _is_on(lease: LeaseState, terms: Terms, engine: Engine) -> bool:
    return lease.claim.name == terms.store_name and lease.keeper is engine and lease.held


def _already_held(terms: Terms, lease: LeaseState, thread: WaitingThread | None) -> UsageError:
    """Return the error for a *thread*, or for this task, that waits for what it holds by *lease*."""
    name, held, wanted = shown(terms.name), lease.claim.mode, terms.mode
    caller = "task" if thread is None else "thread"
    if thread is not None and thread.runs_a_loop:
        return UsageError(
            f"this thread is inside a block of {name}, and would wait for it while its event loop stands still; "
            f"{_IN_COROUTINES}"
        )
    if isinstance(wanted, Permit) and isinstance(held, Permit):
        return UsageError(
            f"this {caller} holds a permit of {name} already, and would wait for another one for ever: {caller}s "
            "that each hold one and wait for one more wait for each other; pass wait="
        )
    if wanted == LOCK == held:
        hint = "" if thread is None else "; in a test, let another client or a plain handle hold it"
        return UsageError(f"this {caller} holds lock {name} already; locks are not reentrant{hint}")
    return UsageError(
        f"this {caller} holds {name} as a {held.word} already and would wait for itself as a {wanted.word}; "
        f"leave the {held.word} first, and look again at what was read when the {wanted.word} is held"
    )


async def _hold_in_doubt(doubt: Doubt, terms: Terms, holding: Awaitable[Lease]) -> Lease:
    """Await the lease. After one ttl, log what makes the wait suspicious."""
    if (task := asyncio.current_task()) is None:
        raise no_task()
    timer = task.get_loop().call_later(terms.timing.ttl, _warn, doubt, task, context=Context())
    try:
        return await holding
    finally:
        timer.cancel()


def _warn(doubt: Doubt, waiter: asyncio.Task[object]) -> None:
    if reason := doubt(waiter):
        logger.warning("%s", reason)


def _child_of(lease: LeaseState, terms: Terms, waiter: asyncio.Task[object]) -> str:
    holder = lease.task
    if not lease.held or holder is None or holder.done():
        return ""
    return (
        f"task {shown(waiter.get_name())} has waited {terms.timing.ttl:.3g} s for lock {shown(terms.name)}, which task "
        f"{shown(holder.get_name())} holds and under which it was started; "
        "if that task waits for it, neither goes on: locks are not reentrant"
    )


def _stops_a_loop(thread: WaitingThread, terms: Terms, _: asyncio.Task[object]) -> str:
    return (
        f"thread {shown(thread.name)} has waited {terms.timing.ttl:.3g} s for lock {shown(terms.name)} and runs an "
        f"event loop, which stands still meanwhile; {_IN_COROUTINES}"
    )


# What the rest of this package may do with a lock, and users may not. Only these functions read its private names.


async def enter(lock: Lock, *, wait: float | None, under: tuple[AnyLease, ...]) -> Lease:
    """
    Do what ``async with`` does first, with another patience. For this package alone: the caller leaves *lock*.

    *under*: the leases that the caller works under.
    """
    entered = Lock(lock._engine, lock._terms._replace(wait=wait, under=under), lock._fences)  # noqa: SLF001
    entered._scopes = lock._scopes  # noqa: SLF001
    return await entered.__aenter__()


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


def resuming(lock: Lock, ticket: LeaseTicket) -> Lock:
    """Describe *lock* again, as one that goes on with what *ticket* stands for. For this package alone."""
    terms = lock._terms._replace(resumes=ticket, mode=ticket.mode)  # noqa: SLF001
    return Lock(lock._engine, terms, lock._fences)  # noqa: SLF001
