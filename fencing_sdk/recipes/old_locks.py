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

The locks of other libraries, as they lie in their stores:

    class                  of                              what is in the store
    RedisPyLock            redis-py's ``Lock``             a string at NAME: the owner
    PythonRedisLock        python-redis-lock's ``Lock``    a string at ``lock:NAME``, and a list on which waiters block
    RedissonLock           Redisson's ``getLock``          a hash at NAME: how often an owner has it; a channel
    KazooLock              kazoo's ``Lock``                an ephemeral node ``OWNER__lock__SEQUENCE`` below the path
    ShedLockRow            ShedLock's table                a row: the name, until when, since when, by which owner

Each takes the client that you have: for tasks one of asyncio, for threads one that blocks. One that blocks works for
tasks, too: it is asked in worker threads.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import re
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar
from weakref import WeakKeyDictionary

from fencing_sdk._engine.acquisition import Terms, closed_meanwhile
from fencing_sdk._engine.draining import work_of
from fencing_sdk._engine.store_calls import backend_name
from fencing_sdk._lease import Lease, state_of
from fencing_sdk._lease_state import LeaseState
from fencing_sdk._lock import Lock, copied
from fencing_sdk._values.claim import LOCK
from fencing_sdk._values.clock import LoopClock, wall_seconds
from fencing_sdk._values.drivers import imported_from
from fencing_sdk._values.observers import logger
from fencing_sdk._values.tasks import move_on_after, outlast_cancellation, retrieve, start_task
from fencing_sdk._values.timing import MAX_TTL, RELEASE_LIMIT, seconds
from fencing_sdk.errors import (
    AcquireTimeoutError,
    BackendUnavailableError,
    ConfigurationError,
    DrainingError,
    LockHeldError,
    LossReason,
    UsageError,
    shown,
)

LONGER = 1.5
"""Multiple of our ttl for which the old lock is kept without a renewal."""
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
    runs in a worker thread. *owner* is new for each acquisition, and begins with ``fencing-``. What `take` and `renew`
    return must be a bool: anything else is refused with a `UsageError`, and a lease then ends without its renewal.
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
        if not isinstance(answer := asking.result(), bool):  # a row of one zero would be a grant
            name = f"{type(self._old).__name__}.{operation}()"
            msg = f"{name} must return True or False, not {shown(answer)}; compare what the store says: value == 1"
            raise UsageError(msg)
        return answer

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
    task = start_task(work, "fencing-old-lock")
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


_MOST_THREADS = 32
_threads: WeakKeyDictionary[asyncio.AbstractEventLoop, ThreadPoolExecutor] = WeakKeyDictionary()
"""One thread pool per event loop: a hanging call would exhaust the loop's shared executor."""


async def called(function: Callable[..., object], *arguments: object) -> object:
    """Return what *function* returns. A plain function runs in a worker thread, a coroutine function in this task."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    loop = asyncio.get_running_loop()
    threads = _threads.get(loop)
    if threads is None:
        threads = _threads[loop] = ThreadPoolExecutor(_MOST_THREADS, "fencing-old-lock")
    try:
        running = loop.run_in_executor(threads, partial(function, *arguments))
    except RuntimeError:  # the interpreter ends, and starts no more threads
        answer = function(*arguments)
    else:
        answer = await running
    return await answer if inspect.isawaitable(answer) else answer


class RedisClient(Protocol):
    """A client of redis-py or valkey-py, for asyncio or for threads."""

    def eval(self, script: str, numkeys: int, /, *keys_and_args: Any) -> Any:
        """Run a script."""


class ScriptedLock:
    """A lock in Redis: three scripts on its keys, which get the owner and milliseconds."""

    _TAKE: ClassVar[str]
    _RENEW: ClassVar[str]
    _RELEASE: ClassVar[str]

    def __init__(self, redis: RedisClient, *keys: str) -> None:
        if not callable(getattr(redis, "eval", None)):
            msg = f"{type(self).__name__}() takes a client of redis-py or valkey-py, not {shown(redis)}"
            raise ConfigurationError(msg)
        self._keys = keys
        self._redis = redis
        self._is_async = inspect.iscoroutinefunction(getattr(redis, "execute_command", None))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {shown(self._keys[0])}>"

    async def take(self, owner: str, ttl: float) -> bool:
        """See `OldLock.take`."""
        return await self._run(self._TAKE, owner, round(ttl * 1000))

    async def renew(self, owner: str, ttl: float) -> bool:
        """See `OldLock.renew`."""
        return await self._run(self._RENEW, owner, round(ttl * 1000))

    async def release(self, owner: str) -> bool:
        """See `OldLock.release`."""
        return await self._run(self._RELEASE, owner)

    async def _run(self, script: str, *arguments: object) -> bool:
        call = partial(self._redis.eval, script, len(self._keys), *self._keys, *arguments)
        return bool(await call() if self._is_async else await called(call))


class RedisPyLock(ScriptedLock):
    """
    ``redis.lock(name, timeout=...)`` of redis-py and valkey-py, for asyncio and for threads.

    Args:
        redis: A client of the server and the database in which the old locks are.

        name: The name of the old lock, which is its key.
    """

    _TAKE = """
    if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
    return redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) and 1 or 0"""
    _RENEW = """
    if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
    return redis.call('PEXPIRE', KEYS[1], ARGV[2])"""
    _RELEASE = """
    if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
    return redis.call('DEL', KEYS[1])"""

    def __init__(self, redis: RedisClient, name: str) -> None:
        super().__init__(redis, name)


class PythonRedisLock(ScriptedLock):
    """
    ``redis_lock.Lock(redis, name)`` of python-redis-lock. Arguments are those of `RedisPyLock`.

    Its waiters sleep until a signal comes, without a limit if their ``expire`` is None: the release sends one.
    """

    _TAKE = RedisPyLock._TAKE  # noqa: SLF001  (the same string, at another key)
    _RENEW = RedisPyLock._RENEW  # noqa: SLF001
    _RELEASE = """
    local owner = redis.call('GET', KEYS[1])  -- where it has expired, a waiter without a limit still sleeps
    if owner and owner ~= ARGV[1] then return 0 end
    redis.call('DEL', KEYS[2])
    redis.call('LPUSH', KEYS[2], 1)
    redis.call('PEXPIRE', KEYS[2], 1000)
    return redis.call('DEL', KEYS[1])"""

    def __init__(self, redis: RedisClient, name: str) -> None:
        super().__init__(redis, f"lock:{name}", f"lock-signal:{name}")


class RedissonLock(ScriptedLock):
    """
    ``redisson.getLock(name)`` of Redisson for Java. Arguments are those of `RedisPyLock`.

    Other locks of Redisson (fair, read/write, spin, fenced) have other layouts.
    """

    _TAKE = """
    if redis.call('EXISTS', KEYS[1]) == 1 and redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
    redis.call('HSET', KEYS[1], ARGV[1], 1)
    return redis.call('PEXPIRE', KEYS[1], ARGV[2])"""
    _RENEW = """
    if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
    return redis.call('PEXPIRE', KEYS[1], ARGV[2])"""
    _RELEASE = """
    if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
    redis.call('DEL', KEYS[1])
    redis.call('PUBLISH', KEYS[2], 0)
    return 1"""

    def __init__(self, redis: RedisClient, name: str) -> None:
        tagged = name if "{" in name else f"{{{name}}}"
        super().__init__(redis, name, f"redisson_lock__channel:{tagged}")

    async def _run(self, script: str, *arguments: object) -> bool:
        owner, *others = arguments
        return await super()._run(script, f"{owner}:1", *others)  # Redisson's owners are UUID:thread


_CALL_LIMIT = 5.0
"""Seconds that kazoo waits for an answer: a client without a connection keeps its requests."""


class KazooLock:
    """
    ``client.Lock(path)`` of kazoo. An acquisition stands in kazoo's own line, in order of arrival.

    Args:
        client: A ``KazooClient`` that was started.

        path: The path of the old lock.

        session: Seconds after which the server ends a session that is silent: what ``KazooClient(timeout=...)`` asked
            for, and no more than ``maxSessionTimeout`` of the server. It must be at least 1.5 times the ttl of the
            lock, as no session can be made to live longer.
    """

    def __init__(self, client: Any, path: str, *, session: float = 10.0) -> None:
        if not callable(getattr(client, "ensure_path_async", None)):
            msg = f"KazooLock() takes a KazooClient, not {shown(client)}"
            raise ConfigurationError(msg)
        self._client = client
        self._path = path.rstrip("/")
        self._session = seconds(session, "session", above=True)

    def __repr__(self) -> str:
        return f"<KazooLock {shown(self._path)}>"

    def take(self, owner: str, ttl: float) -> bool:
        """See `OldLock.take`. The owner keeps its place in the line until it releases."""
        if ttl > self._session:
            msg = (
                f"a session of {self._session:g} s cannot keep {self!r} for {ttl:g} s: make the ttl of our lock "
                f"at most {self._session / 1.5:.3g}, or pass session= with what KazooClient(timeout=...) has"
            )
            raise ConfigurationError(msg)
        line = self._line()
        if not any(node.startswith(owner) for node in line):
            self._answer(self._client.ensure_path_async(self._path))
            name = f"{self._path}/{owner}__lock__"
            self._answer(self._client.create_async(name, owner.encode(), ephemeral=True, sequence=True))
            line = self._line()
        return any(node.startswith(owner) for node in line[:1])

    def renew(self, owner: str, ttl: float) -> bool:  # noqa: ARG002  (a session has a timeout of its own)
        """See `OldLock.renew`. The question itself prolongs the session."""
        return any(node.startswith(owner) for node in self._line()[:1])

    def release(self, owner: str) -> None:
        """See `OldLock.release`."""
        for node in self._line():
            if node.startswith(owner):
                self._answer(self._client.delete_async(f"{self._path}/{node}"))

    def _line(self) -> list[str]:
        """Return the nodes of the line, the oldest first."""
        with imported_from("zookeeper", "kazoo"):
            from kazoo.exceptions import NoNodeError  # noqa: PLC0415  (a driver is imported when it is used)
        try:
            nodes = self._answer(self._client.get_children_async(self._path))
        except NoNodeError:
            return []
        return sorted(filter(_CONTENDER.search, nodes), key=lambda node: node.rpartition("__")[2])

    @staticmethod
    def _answer(asked: Any) -> Any:
        return asked.get(timeout=_CALL_LIMIT)


_CONTENDER = re.compile(r"__lock__-?\d{10}$")
_TABLE = re.compile(r"[A-Za-z_][\w.]*")


class ShedLockRow:
    """
    The row of a job in ShedLock's table, by SQLAlchemy.

    In PostgreSQL its own clock counts, as with ``usingDbTime()``. On other databases it is the clock of this host in
    UTC, as with ``withTimeZone(UTC)``. A row that an old job has is free when its ``lock_until`` is over: such jobs do
    not renew.

    Args:
        engine: A SQLAlchemy ``Engine`` or ``AsyncEngine``.

        name: The name of the job.

        table: The name of the table.

        at_least_for: ``lockAtLeastFor`` in seconds. The row stays taken for so long after its grant, and so does our
            lock.
    """

    def __init__(self, engine: Any, name: str, *, table: str = "shedlock", at_least_for: float = 0.0) -> None:
        if not callable(getattr(engine, "begin", None)):
            msg = f"ShedLockRow() takes an Engine or an AsyncEngine of SQLAlchemy, not {shown(engine)}"
            raise ConfigurationError(msg)
        if not _TABLE.fullmatch(table):
            msg = f"table must be the name of a table, such as 'shedlock', not {shown(table)}"
            raise ConfigurationError(msg)
        self._engine = engine
        self._name = name
        self._table = table
        self.at_least_for = seconds(at_least_for, "at_least_for", high=MAX_TTL)

    def __repr__(self) -> str:
        return f"<ShedLockRow {shown(self._name)}>"

    async def take(self, owner: str, ttl: float) -> bool:
        """See `OldLock.take`."""
        with imported_from("sqlalchemy", "sqlalchemy"):
            from sqlalchemy.exc import IntegrityError  # noqa: PLC0415  (a driver is imported when it is used)
        update = (
            "UPDATE {table} SET lock_until = {until}, locked_at = {now}, locked_by = :owner "
            "WHERE name = :name AND (lock_until <= {now} OR locked_by = :owner)"
        )
        insert = "INSERT INTO {table} (name, lock_until, locked_at, locked_by) VALUES (:name, {until}, {now}, :owner)"

        def take(connection: Any) -> bool:
            if self._changed(connection, update, owner, ttl):
                return True
            if connection.execute(self._statement("SELECT 1 FROM {table} WHERE name = :name", owner, ttl)).first():
                return False
            return self._changed(connection, insert, owner, ttl)

        try:
            return await self._transaction(take)
        except IntegrityError:  # another client has inserted the row
            return False

    async def renew(self, owner: str, ttl: float) -> bool:
        """See `OldLock.renew`."""
        statement = (
            "UPDATE {table} SET lock_until = {until} WHERE name = :name AND locked_by = :owner AND lock_until > {now}"
        )
        return await self._transaction(lambda connection: self._changed(connection, statement, owner, ttl))

    async def release(self, owner: str) -> None:
        """See `OldLock.release`. The row stays, as old jobs that have seen it never insert it again."""
        await self.renew(owner, 0.0)

    async def _transaction(self, work: Callable[[Any], bool]) -> bool:
        def run() -> bool:
            with self._engine.begin() as connection:
                return work(connection)

        if not hasattr(self._engine, "sync_engine"):
            return bool(await called(run))
        async with self._engine.begin() as connection:
            return bool(await connection.run_sync(work))

    def _changed(self, connection: Any, statement: str, owner: str, kept: float) -> bool:
        return bool(connection.execute(self._statement(statement, owner, kept)).rowcount)

    def _statement(self, statement: str, owner: str, kept: float) -> Any:
        """Bind *statement*, in which ``{until}`` is *kept* seconds from ``{now}``."""
        from sqlalchemy import DateTime, Float, bindparam, text  # noqa: PLC0415

        now = datetime.fromtimestamp(wall_seconds(), UTC).replace(tzinfo=None)
        own_clock = self._engine.dialect.name == "postgresql"
        sql = statement.format(
            table=self._table,
            now=_DATABASE_NOW if own_clock else ":now",
            until=f"{_DATABASE_NOW} + :kept * interval '1 second'" if own_clock else ":until",
        )
        values = {
            "name": bindparam("name", self._name),
            "owner": bindparam("owner", owner),
            "kept": bindparam("kept", kept, type_=Float),
            "now": bindparam("now", now, type_=DateTime),
            "until": bindparam("until", now + timedelta(seconds=kept), type_=DateTime),
        }
        return text(sql).bindparams(*(value for key, value in values.items() if f":{key}" in sql))


_DATABASE_NOW = "timezone('utc', clock_timestamp())"
