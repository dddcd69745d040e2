"""
The clients of other libraries that stand beside ours in a mixed fleet: real ones, as their users have them.

Redisson and ShedLock are for Java. Their stand-ins here run the scripts and statements that those libraries publish.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import redis
import redis.asyncio
import redis_lock
import sqlalchemy
import sqlalchemy.ext.asyncio
from kazoo.client import KazooClient
from kazoo.exceptions import LockTimeout

from fencing_sdk.recipes import KazooLock, OldLock, PythonRedisLock, RedisPyLock, RedissonLock, ShedLockRow

LONG = 60
"""Seconds for which an old client takes its lock: longer than any test waits."""


class Stage:
    """One kind of old lock in one store, at *address*."""

    ttl = 30.0
    """The longest ttl of ours beside it that tests use."""

    def __init__(self, address: str) -> None:
        self.address = address

    def for_tasks(self, name: str) -> OldLock:
        """Ours, with the client for asyncio of that store, if there is one."""
        return self.for_threads(name)

    def for_threads(self, name: str) -> OldLock:
        raise NotImplementedError

    @contextlib.contextmanager
    def old(self, name: str, wait: float = LONG) -> Iterator[bool]:
        """Hold the lock as an old client does, which waits so many seconds; yield whether it got the lock."""
        raise NotImplementedError

    def delete(self, name: str) -> None:
        """Take the lock away from its holder."""
        raise NotImplementedError

    def held(self, name: str) -> bool:
        """Whether there is anything in the store that keeps old clients out."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the clients for threads."""

    async def aclose(self) -> None:
        """Close the clients for asyncio."""


class OnRedis(Stage):
    kind: type[Any]
    prefix = ""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.redis = redis.Redis.from_url(address, socket_timeout=None)
        self.mine: redis.asyncio.Redis | None = None

    def for_tasks(self, name: str) -> OldLock:
        self.mine = self.mine or redis.asyncio.Redis.from_url(self.address)
        return self.kind(self.mine, name)  # type: ignore[no-any-return]

    def for_threads(self, name: str) -> OldLock:
        return self.kind(self.redis, name)  # type: ignore[no-any-return]

    def delete(self, name: str) -> None:
        assert self.redis.delete(f"{self.prefix}{name}")

    def held(self, name: str) -> bool:
        return bool(self.redis.exists(f"{self.prefix}{name}"))

    def close(self) -> None:
        self.redis.close()

    async def aclose(self) -> None:
        if self.mine is not None:
            await self.mine.aclose()
            self.mine = None


class OnRedisPy(OnRedis):
    kind = RedisPyLock

    @contextlib.contextmanager
    def old(self, name: str, wait: float = LONG) -> Iterator[bool]:
        lock = self.redis.lock(name, timeout=LONG, sleep=0.02)
        held = lock.acquire(blocking_timeout=wait)
        yield held
        if held:
            lock.release()


class OnPythonRedisLock(OnRedis):
    kind = PythonRedisLock
    prefix = "lock:"

    @contextlib.contextmanager
    def old(self, name: str, wait: float = LONG) -> Iterator[bool]:
        lock = redis_lock.Lock(self.redis, name, expire=LONG)
        held = lock.acquire(timeout=math.ceil(wait)) if wait else lock.acquire(blocking=False)
        yield held
        if held:
            lock.release()


class OnRedisson(OnRedis):
    """``RLock.tryLock(wait, lease)`` and ``unlock()`` of Redisson 3, by its scripts."""

    kind = RedissonLock

    LOCK = (
        "if ((redis.call('exists', KEYS[1]) == 0) or (redis.call('hexists', KEYS[1], ARGV[2]) == 1)) then "
        "redis.call('hincrby', KEYS[1], ARGV[2], 1); redis.call('pexpire', KEYS[1], ARGV[1]); return nil; end; "
        "return redis.call('pttl', KEYS[1]);"
    )
    UNLOCK = (
        "if (redis.call('hexists', KEYS[1], ARGV[3]) == 0) then return nil; end; "
        "local counter = redis.call('hincrby', KEYS[1], ARGV[3], -1); "
        "if (counter > 0) then redis.call('pexpire', KEYS[1], ARGV[2]); return 0; "
        "else redis.call('del', KEYS[1]); redis.call('publish', KEYS[2], ARGV[1]); return 1; end; return nil;"
    )

    @contextlib.contextmanager
    def old(self, name: str, wait: float = LONG) -> Iterator[bool]:
        owner, channel = f"{uuid.uuid4()}:{threading.get_ident()}", f"redisson_lock__channel:{{{name}}}"
        end = time.monotonic() + wait
        with self.redis.pubsub() as messages:
            left = self.redis.eval(self.LOCK, 1, name, LONG * 1000, owner)
            if left is not None:
                messages.subscribe(channel)
            while (left := self.redis.eval(self.LOCK, 1, name, LONG * 1000, owner)) is not None if left else False:
                patience = min(end - time.monotonic(), left / 1000)
                if patience <= 0:
                    break
                messages.get_message(timeout=patience)
        yield left is None
        if left is None:
            assert self.redis.eval(self.UNLOCK, 2, name, channel, 0, LONG * 1000, owner) == 1


class OnKazoo(Stage):
    ttl = 3.0  # of a session of five seconds

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.server, _, self.root = address.partition("/")
        self.client = self._client()
        self.mine = self._client()

    def _client(self) -> KazooClient:
        client = KazooClient(self.server, timeout=5)
        client.start()
        return client

    def for_threads(self, name: str) -> OldLock:
        return KazooLock(self.mine, f"/{self.root}/{name}", session=5)

    @contextlib.contextmanager
    def old(self, name: str, wait: float = LONG) -> Iterator[bool]:
        lock = self.client.Lock(f"/{self.root}/{name}", "old")
        try:
            held = lock.acquire(timeout=wait) if wait else lock.acquire(blocking=False)
        except LockTimeout:
            held = False
        yield held
        if held:
            lock.release()

    def delete(self, name: str) -> None:
        (node,) = self.client.get_children(f"/{self.root}/{name}")
        self.client.delete(f"/{self.root}/{name}/{node}")

    def held(self, name: str) -> bool:
        return bool(self.client.exists(f"/{self.root}/{name}") and self.client.get_children(f"/{self.root}/{name}"))

    def close(self) -> None:
        for client in (self.client, self.mine):
            client.stop()
            client.close()


class OnShedLock(Stage):
    """A job of ShedLock by its statements: on PostgreSQL those of ``usingDbTime()``, else those with a host's clock."""

    TABLE = (
        "CREATE TABLE IF NOT EXISTS shedlock(name VARCHAR(64) NOT NULL, lock_until TIMESTAMP NOT NULL, "
        "locked_at TIMESTAMP NOT NULL, locked_by VARCHAR(255) NOT NULL, PRIMARY KEY (name))"
    )

    def __init__(self, address: str) -> None:
        super().__init__(address)
        on_postgresql = address.startswith("postgresql")
        self.engine = sqlalchemy.create_engine(address.replace("://", "+psycopg://", 1) if on_postgresql else address)
        driver = "+asyncpg://" if on_postgresql else "+aiosqlite://"
        self.async_url = address.replace("://", driver, 1)
        self.async_engine: Any = None
        self.now = "timezone('utc', CURRENT_TIMESTAMP)" if on_postgresql else ":now"
        self.until = f"{self.now} + cast(:interval as interval)" if on_postgresql else ":until"
        with contextlib.suppress(sqlalchemy.exc.IntegrityError), self.engine.begin() as connection:  # made by another
            connection.execute(sqlalchemy.text(self.TABLE))

    def for_threads(self, name: str) -> OldLock:
        return ShedLockRow(self.engine, name)

    def for_tasks(self, name: str) -> OldLock:
        self.async_engine = self.async_engine or sqlalchemy.ext.asyncio.create_async_engine(self.async_url)
        return ShedLockRow(self.async_engine, name)

    def changed(self, statement: str, **values: object) -> int:
        now = datetime.now(UTC).replace(tzinfo=None)
        values |= {"now": now, "until": now + timedelta(seconds=LONG), "interval": f"{LONG} seconds"}
        text = sqlalchemy.text(statement.format(now=self.now, until=self.until))
        dates = [
            sqlalchemy.bindparam(key, type_=sqlalchemy.DateTime) for key in ("now", "until") if f":{key}" in str(text)
        ]
        with self.engine.begin() as connection:
            return connection.execute(
                text.bindparams(*dates), {k: v for k, v in values.items() if f":{k}" in str(text)}
            ).rowcount

    @contextlib.contextmanager
    def old(self, name: str, wait: float = LONG) -> Iterator[bool]:
        who, end = f"host-{uuid.uuid4()}", time.monotonic() + wait
        while not (held := self._locked(name, who)) and time.monotonic() < end:
            time.sleep(0.02)
        yield held
        if held:
            self.changed(
                "UPDATE shedlock SET lock_until = {now} WHERE name = :name AND locked_by = :who", name=name, who=who
            )

    def _locked(self, name: str, who: str) -> bool:
        insert = "INSERT INTO shedlock(name, lock_until, locked_at, locked_by) VALUES(:name, {until}, {now}, :who)"
        update = (
            "UPDATE shedlock SET lock_until = {until}, locked_at = {now}, locked_by = :who "
            "WHERE name = :name AND lock_until <= {now}"
        )
        return bool(
            self.changed(f"{insert} ON CONFLICT (name) DO NOTHING", name=name, who=who)
            or self.changed(update, name=name, who=who)
        )

    def delete(self, name: str) -> None:
        assert self.changed("DELETE FROM shedlock WHERE name = :name", name=name)

    def held(self, name: str) -> bool:
        statement = "UPDATE shedlock SET name = name WHERE name = :name AND lock_until > {now}"
        return bool(self.changed(statement, name=name))

    def close(self) -> None:
        self.engine.dispose()

    async def aclose(self) -> None:
        if self.async_engine is not None:
            await self.async_engine.dispose()
            self.async_engine = None


STAGES: dict[str, type[Stage]] = {
    "redis-py": OnRedisPy,
    "python-redis-lock": OnPythonRedisLock,
    "redisson": OnRedisson,
    "kazoo": OnKazoo,
    "shedlock": OnShedLock,
    "shedlock-sqlite": OnShedLock,
}
