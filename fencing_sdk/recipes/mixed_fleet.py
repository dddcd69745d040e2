"""
A lock of this package and the lock of another library, held together while clients of both run.

    async with beside(locks.lock("report", ttl=15, wait=60), RedisPyLock(redis, "report")) as lease: ...

    fleet           they exclude each other by
    old + both      the old lock
    both + ours     our lock
    old + ours      nothing: never let these two meet

So there are three deployments, old -> both -> ours, each complete before the next one begins. Four rules:

1. Ours is taken first and released last. Clients that take both stand in our line, and only its head asks for the old
   lock.
2. The old lock outlives our lease. It is taken for `LONGER` times our ttl, and renewed every third of the ttl while our
   lease is held. No renewal moves the deadline of our lease beyond the moment until which the old lock is surely held.
3. If the old lock is lost, so is our lease: `LossReason.TAKEN_OVER`.
4. What the store of the old lock may have granted is released: the id of its owner exists before the store is asked.

Not promised: fencing. Clients of the old lock have no tokens, so guards cannot refuse them.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from fencing_sdk._engine.acquisition import Terms, closed_meanwhile
from fencing_sdk._engine.draining import work_of
from fencing_sdk._engine.store_calls import backend_name
from fencing_sdk._lease import Lease, state_of
from fencing_sdk._lease_state import LeaseState
from fencing_sdk._lock import Lock, copied
from fencing_sdk._values.claim import LOCK
from fencing_sdk._values.clock import LoopClock
from fencing_sdk._values.observers import logger
from fencing_sdk._values.tasks import move_on_after, outlast_cancellation, retrieve
from fencing_sdk._values.timing import RELEASE_LIMIT
from fencing_sdk.errors import (
    AcquireTimeoutError,
    BackendUnavailableError,
    ConfigurationError,
    DrainingError,
    LockHeldError,
    LossReason,
    shown,
)
from fencing_sdk.recipes.old_locks import KazooLock, called

LONGER = 1.5
"""How much longer than ours the old lock is kept without a renewal."""
_POLL = 0.05
"""Seconds between two questions for the old lock."""
_FIRST_RETRY = 0.05
_LAST_RETRY = 2.0
"""Seconds between two tries to release the old lock, until its store answers or the lock has ended by itself."""

_NOT_RELEASED = "%s beside %s was not released; it ends by itself"

T = TypeVar("T")

_running: set[asyncio.Task[Any]] = set()
"""Tasks that renew and release old locks: an event loop keeps none alive by itself."""


class OldLock(Protocol):
    """
    A lock of another library, as `beside` takes it. Write one for a lock of your own.

    Each method is one atomic step: a script, or one statement. It may be a coroutine function, or a plain one, which
    runs in a worker thread. *owner* is new for each acquisition, and begins with ``fencing-``.
    """

    def take(self, owner: str, ttl: float, /) -> Awaitable[bool] | bool:
        """Take the lock for *ttl* seconds if it is free or *owner* has it already. Return whether that succeeded."""

    def renew(self, owner: str, ttl: float, /) -> Awaitable[bool] | bool:
        """Keep the lock for *ttl* seconds from now if *owner* has it. Return whether *owner* has it."""

    def release(self, owner: str, /) -> object:
        """Release the lock if *owner* has it, and wake those that wait for it. The rule ignores what this returns."""


def beside(lock: Lock, old: OldLock) -> Lock:
    """
    Describe *lock* again, as one that holds *old* beside it. It does all that a lock does.

    Args:
        lock: A lock of `LockClient.lock`. Its ``wait`` bounds the wait for both, its ``ttl`` is that of both, and its
            ``max_hold`` counts from the moment at which both are held.

        old: `RedisPyLock`, `PythonRedisLock`, `RedissonLock`, `KazooLock`, `ShedLockRow`, or one of your own.

    An acquisition raises what `Lock.acquire` raises, `BackendUnavailableError` if *old* does not answer, and what *old*
    raises itself. `Lock.locked` asks for our lock alone.

    Raises:
        ConfigurationError: *lock* is another kind of lock, or *old* lacks a method.
    """
    given: object = lock
    if type(given) is not Lock or (both := copied(lock, BothLocks)).is_shared:
        msg = f"beside() takes a lock of LockClient.lock(), not {shown(given)}"
        raise ConfigurationError(msg)
    for method in ("take", "renew", "release"):
        if isinstance(old, type) or not callable(getattr(old, method, None)):
            msg = f"beside() takes an old lock with the methods take, renew and release, not {shown(old)}"
            raise ConfigurationError(msg)
    both.old = old
    return both


class BothLocks(Lock):
    """A lock that holds one of another library beside it. Made by `beside`."""

    __slots__ = ("old",)

    old: OldLock

    @property
    def is_shared(self) -> bool:
        """True for a permit, and for the lock of readers or writers."""
        return self._terms.mode is not LOCK

    async def _acquire(self, terms: Terms) -> Lease:
        began, engine = LoopClock().now(), self._engine()
        lease = await super()._acquire(terms._replace(timing=replace(terms.timing, max_hold=None)))
        state = state_of(lease)
        hold = state.companion = OldHold(self.old, state)
        engine.draining.waiting[hold] = work_of(terms)
        try:
            try:
                await hold.wait(terms, began)
            except BaseException:
                await lease.release()  # and the old lock before it: its store may have granted it
                raise
            finally:
                engine.draining.waits_no_more(hold)
        except DrainingError:
            await engine.draining.let_bodies_end()
            raise
        if (max_hold := terms.timing.max_hold) is not None:
            state.bound_hold(max_hold)
        return lease


class OldHold:
    """The old lock beside one lease, from the first question to its release: the companion of the lease."""

    __slots__ = (
        "_asking",
        "_interrupt",
        "_keep_until",
        "_keeping",
        "_kept",
        "_old",
        "_owner",
        "_returning",
        "_state",
        "_stop",
    )

    def __init__(self, old: OldLock, state: LeaseState) -> None:
        self._old = old
        self._owner = f"fencing-{os.urandom(16).hex()}"
        self._state = state
        self._kept = state.timing.ttl * LONGER
        self._stop = asyncio.Event()
        self._asking: asyncio.Task[object] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._keep_until = -math.inf
        """The moment until which the old lock stays taken, also if it is released before."""
        self._returning = False
        self._interrupt: Callable[[], object] = lambda: None

    async def wait(self, terms: Terms, began: float) -> None:
        """
        Ask for the old lock until it is granted. The patience of *terms* counts since *began*.

        Raises:
            LockHeldError: asked once, and another holder has it.
            AcquireTimeoutError: another holder still has it when the patience ends.
            DrainingError: the client drains.
            UsageError: the client was closed.
            BackendUnavailableError, LeaseLostError, Exception: as `take`.
        """
        clock, state = LoopClock(), self._state
        with move_on_after(None) as scope:
            self._interrupt = scope.cancel
            state.watch(scope)
            while not await self.take(terms.limit(began, clock.now())):
                waited = clock.now() - began
                left = math.inf if terms.wait is None else terms.wait - waited
                if left <= 0:
                    raise (AcquireTimeoutError if terms.wait else LockHeldError)(terms.name, waited)
                await asyncio.sleep(min(_POLL, left))
        state.forget_scope()
        if scope.cancel_called:
            if (reason := state.lost_reason) is LossReason.CLOSED:
                raise closed_meanwhile(terms.name)
            if reason not in {LossReason.DRAINED, None}:
                raise state.loss()
            raise DrainingError(terms.name, clock.now() - began)

    def interrupt(self) -> None:
        """See `Interruptible.interrupt`."""
        self._interrupt()

    async def take(self, limit: float) -> bool:
        """
        Ask for the old lock once, and keep it from now on if it is granted. An answer is waited for *limit* seconds.

        Raises:
            BackendUnavailableError: there was no answer.
            LeaseLostError: our lease was lost meanwhile.
            Exception: what the old lock raised.
        """
        for operation in ("take", "renew"):  # the latter where the answer came so late that it covers too little
            asked = self._state.clock.now()
            if not await self._ask(operation, limit):
                return False
            self._state.check()
            if self._covers(asked) >= self._state.deadline:
                self._state.covered_until = self._covers(asked)
                self._state.keep_for = getattr(self._old, "at_least_for", 0.0)
                self._keep_until = self._state.clock.now() + self._state.keep_for
                self._keeping = _start(self._keep())
                self._keeping.add_done_callback(self._kept_no_longer, context=Context())
                return True
        return False

    async def release(self) -> None:
        """Release it, and wait for that for a bounded time. What is left happens in the background."""
        if self._state.loop is not asyncio.get_running_loop():  # it is closed, and so are the old client's connections
            logger.warning(_NOT_RELEASED, *self._names)
            return
        self._stop.set()
        if self._keeping is None or (self._keeping.done() and not self._returning):
            self._keeping = _start(self._release())
        await asyncio.wait((self._keeping,), timeout=min(self._state.timing.call_limit, RELEASE_LIMIT))

    def _covers(self, asked: float) -> float:
        """The moment until which a grant or a renewal that was *asked* for then covers our lease."""
        return asked + self._state.timing.validity(self._kept)

    async def _ask(self, operation: str, limit: float) -> bool:
        """Ask in a task of its own: the store may grant a request whose caller has given up, so the task goes on."""
        asking = self._asking = _start(called(getattr(self._old, operation), self._owner, self._kept))
        await asyncio.wait((asking,), timeout=limit)
        if not asking.done():
            raise BackendUnavailableError(backend_name(self._old), operation, f"no answer within {limit:.3g} s")
        if asking.cancelled():
            raise BackendUnavailableError(backend_name(self._old), operation, "its driver was cancelled from inside")
        return bool(asking.result())

    async def _keep(self) -> None:
        """Renew the old lock while our lease is held. Release it when that is asked, or when it has expired."""
        state, timing = self._state, self._state.timing
        pause = third = min(timing.ttl, timing.validity(self._kept)) / 3
        while not await self._stopped_within(pause) and state.held:
            pause = third if await self._renewed(third) else third / 4
        await self._stopped_within(state.covered_until - state.clock.now())  # the body may go on
        await self._release()

    def _kept_no_longer(self, _: asyncio.Task[None]) -> None:
        """Lose our lease if the task that renews the old lock was cancelled. The old lock covers the body meanwhile."""
        if not self._returning and not self._stop.is_set():
            self._state.lose(LossReason.CLOSED)

    async def _stopped_within(self, seconds: float) -> bool:
        with move_on_after(max(seconds, 0.0)):
            await self._stop.wait()
        return self._stop.is_set()

    async def _renewed(self, limit: float) -> bool:
        """Renew once; False if there was no answer. If the old lock was lost, so is our lease."""
        state, asked = self._state, self._state.clock.now()
        try:
            kept = await self._ask("renew", limit)
        except Exception as error:  # noqa: BLE001  (whatever a driver raises, it proves no loss)
            logger.warning("%s beside %s was not renewed: %s", *self._names, type(error).__name__)
            if self._asking is not None:
                self._asking.cancel()
            return False
        if kept and state.held:
            state.covered_until = self._covers(asked)
        elif not kept and not self._stop.is_set():
            state.lose(LossReason.TAKEN_OVER, f"{shown(self._old)} beside it was lost")
        return True

    @property
    def _names(self) -> tuple[str, str]:
        return backend_name(self._old), shown(self._state.name)

    async def _release(self) -> None:
        """
        Release the lock, also one that a request without an answer may still get.

        Errors are tried again until the lock has ended by itself. A cancellation waits for the try that is under way.
        """
        self._returning = True
        if self._asking is not None:
            await _ended(self._asking, self._kept)
            self._asking.cancel()
        # A node of kazoo has no ttl: it stays as long as the session.
        stop = math.inf if isinstance(self._old, KazooLock) else LoopClock().now() + self._kept
        pause = _FIRST_RETRY
        while True:
            rest = self._keep_until - self._state.clock.now()
            giving = _start(
                called(self._old.renew, self._owner, rest) if rest > 0 else called(self._old.release, self._owner)
            )
            cancelled = await _ended(giving, RELEASE_LIMIT)
            if giving.done() and not giving.cancelled() and giving.exception() is None:
                return
            giving.cancel()
            if cancelled is not None or LoopClock().now() + pause >= stop:
                break
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LAST_RETRY)
        logger.warning(_NOT_RELEASED, *self._names)


def _start(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    task = asyncio.get_running_loop().create_task(work, context=Context(), name="fencing-old-lock")
    _running.add(task)
    task.add_done_callback(_running.discard, context=Context())
    task.add_done_callback(retrieve, context=Context())
    return task


async def _ended(task: asyncio.Task[Any], limit: float) -> asyncio.CancelledError | None:
    """Wait for the end of *task*, at most *limit* seconds; return a cancellation that came meanwhile."""
    clock = LoopClock()
    until = clock.now() + limit
    return await outlast_cancellation(
        lambda: asyncio.wait((task,), timeout=until - clock.now()), lambda: task.done() or clock.now() >= until
    )
