"""
The locks of other libraries, as they lie in their stores: what `beside` holds beside a lock of this package.

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
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary

from fencing_sdk._values.clock import wall_seconds
from fencing_sdk._values.drivers import imported_from
from fencing_sdk._values.timing import MAX_TTL, seconds
from fencing_sdk.errors import ConfigurationError, shown

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
