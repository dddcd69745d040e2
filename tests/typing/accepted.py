"""
What a type checker is to accept and to infer. Never run: mypy, basedpyright, ty, pyrefly and zuban read it.

Every face of the README is in it, and each way to enter what ``async with`` enters.
"""

import signal
import sqlite3
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, ExitStack
from datetime import timedelta
from typing import Any, assert_type

import redis
import redis.asyncio
from aiohttp import web
from django.http import HttpRequest
from tenacity import wait_exponential, wait_random

import fencing_sdk.sync
from fencing_sdk import (
    AcquireTimeoutError,
    Holder,
    Lease,
    LeaseLostError,
    Lock,
    LockClient,
    LockHeldError,
    LossReason,
    StaleTokenError,
    Token,
    connect,
    current_lease,
    current_token,
)
from fencing_sdk.abc import Backend, Guard
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.events import Event, NotAcquired, NotAcquiredReason, Observer
from fencing_sdk.guards.etcd import EtcdGuard, put
from fencing_sdk.guards.files import FileGuard
from fencing_sdk.guards.kahuna import KahunaGuard
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.guards.redis import RedisGuard
from fencing_sdk.guards.sql import SqlGuard
from fencing_sdk.integrations import aiohttp, asgi, django, wsgi
from fencing_sdk.recipes import (
    Election,
    ElectionStanding,
    ElectionTerm,
    HeldLocks,
    MultiLock,
    OldLock,
    PermitLease,
    Ran,
    RedisPyLock,
    Skipped,
    beside,
    holding,
)
from fencing_sdk.testing import FaultyBackend

locks = connect("memory://", namespace="shop", tokens="counter")


@locks.locking("report/{report_id}", ttl=30, wait=timedelta(seconds=5), backoff=wait_exponential() + wait_random(0, 1))
async def build_report(report_id: int, /, *parts: str, scale: float = 1.0) -> list[bytes]:
    return [b"%d" % report_id, *(part.encode() for part in parts)]


class Tenant:
    @locks.locking("tenant/{self.key}")
    async def update(self, price: int) -> str:
        return str(price)

    key = "acme"


@holding("accounts/{account_id}")
async def withdraw(account_id: int, *, cents: int) -> bytes:
    return b"%d" % (account_id + cents)


@holding("accounts/{account_id}")
def withdraw_at_once(account_id: int, *, cents: int) -> bytes:
    return b"%d" % (account_id + cents)


async def a_function_that_needs_a_lock_keeps_its_signature() -> None:
    assert_type(await withdraw(7, cents=5), bytes)
    assert_type(withdraw_at_once(7, cents=5), bytes)


@locks.job("report/{report_id}", at_least_for=timedelta(minutes=1), max_hold=1800)
async def nightly(report_id: int) -> bytes:
    return b"%d" % report_id


async def a_job_tells_whether_it_ran() -> None:
    outcome = await nightly(7)
    assert_type(outcome, Ran[bytes] | Skipped)
    if isinstance(outcome, Ran):
        assert_type(outcome.value, bytes)
    else:
        assert_type(outcome.retry_after, float | None)


async def several_locks_have_a_lease_each() -> None:
    several = locks.multilock("accounts/1", "accounts/7", wait=5, ttl=timedelta(seconds=15))
    assert_type(several, MultiLock)
    async with several as held:
        assert_type(held, HeldLocks)
        assert_type(held["accounts/1"], Lease)
        assert_type(held.tokens, dict[str, Token])


async def a_decorated_coroutine_keeps_its_signature() -> None:
    assert_type(await build_report(7), list[bytes])
    assert_type(await build_report(7, "head", "tail", scale=2.0), list[bytes])
    report: Coroutine[Any, Any, list[bytes]] = build_report(7)
    await report
    assert_type(await Tenant().update(5), str)
    assert_type(await Tenant().update(price=5), str)
    job: Callable[[int], Coroutine[Any, Any, list[bytes]]] = build_report
    await job(1)


@locks.elected("scheduler/{shard}", ttl=15, finish_within=5)
async def schedule(shard: int) -> bytes:
    return b"%d" % shard


async def an_election_gives_terms() -> None:
    election = locks.election("scheduler", ttl=15, finish_within=timedelta(seconds=5), label="pod-7")
    assert_type(election, Election)
    async for term in election:
        assert_type(term, ElectionTerm)
        async with term as lease:
            assert_type(lease, Lease)
    assert_type(election.leading, bool)
    assert_type(election.standing, ElectionStanding)
    assert_type(await election.leader(), Holder | None)
    assert_type(await schedule(7), bytes | None)


async def a_client_drains() -> None:
    assert_type(await locks.drain(within=timedelta(seconds=25)), bool)
    assert_type(locks.draining, bool)
    async with locks, locks.draining_on(signal.SIGTERM, signal.SIGINT, within=25):
        pass
    assert_type(connect("memory://", drain=25), LockClient)


async def a_lock_gives_leases() -> None:
    lock = locks.lock("seats/42", ttl=timedelta(minutes=1), max_hold=3600, label="worker 3")
    assert_type(lock, Lock)
    async with lock as lease:
        assert_type(lease, Lease)
        assert_type(lease.token, Token)
        assert_type(lease.remaining, float)
        assert_type(lease.held, bool)
        assert_type(lease.lost_reason, LossReason | None)
        assert_type(lease.headers(), dict[str, str])
        assert_type(await lease.wait_lost(), LossReason | None)
    assert_type(await lock.acquire(), Lease)
    assert_type(await lock.acquire(wait=0.5), Lease)
    assert_type(await lock.acquire(wait=timedelta(seconds=5)), Lease)
    assert_type(await lock.acquire(wait=None), Lease)
    assert_type(await lock.locked(), bool)
    async with await lock.acquire() as handle:
        assert_type(handle, Lease)
    assert_type(await lock.try_acquire(), Lease | None)
    assert_type(current_lease(), Lease)
    assert_type(current_token("seats/42"), Token)
    number: int = current_token()
    print(number)  # noqa: T201  (never run)


async def the_body_may_return_and_the_code_behind_it_is_reachable() -> int:
    """An exit that swallowed exceptions would be typed so, and a return after the block demanded."""
    async with locks.lock("a") as lease:
        return int(lease.token)


async def a_handle_may_be_left_to_a_block_that_returns() -> int:
    async with await locks.lock("a").acquire() as lease:
        return int(lease.token)


async def an_exit_stack_enters_whatever_async_with_enters() -> None:
    async with AsyncExitStack() as stack:
        assert_type(await stack.enter_async_context(locks), LockClient)
        assert_type(await stack.enter_async_context(locks.lock("a")), Lease)
        assert_type(await stack.enter_async_context(locks.rwlock("a").reader), Lease)
        assert_type(await stack.enter_async_context(locks.rwlock("a").writer), Lease)
        assert_type(await stack.enter_async_context(locks.semaphore("a", permits=4)), PermitLease)
        assert_type(await stack.enter_async_context(locks.multilock("a", "b")), HeldLocks)
        assert_type(await stack.enter_async_context(await locks.lock("a").acquire()), Lease)
        assert_type(await stack.enter_async_context(await locks.semaphore("a", permits=4).acquire()), PermitLease)
        assert_type(await stack.enter_async_context(beside(locks.lock("a"), OldLockOfCoroutines())), Lease)
        async for term in locks.election("a"):
            assert_type(await stack.enter_async_context(term), Lease)
        await stack.enter_async_context(locks.draining_on(signal.SIGTERM, within=25))
        assert_type(await stack.enter_async_context(RedisGuard("redis://localhost")), RedisGuard)


async def under(lock: AbstractAsyncContextManager[Lease]) -> Token:
    async with lock as lease:
        return lease.token


async def a_lock_is_passed_on_as_a_context_manager(term: ElectionTerm) -> None:
    for lock in (locks.lock("a"), locks.rwlock("a").reader, locks.rwlock("a").writer, term):
        await under(lock)
    await under(locks.semaphore("a", permits=4))
    await under(await locks.lock("a").acquire())


def a_blocking_lock_is_entered_likewise(threads: fencing_sdk.sync.LockClient) -> None:
    lock: AbstractContextManager[fencing_sdk.sync.Lease] = threads.lock("a")
    with ExitStack() as stack:
        assert_type(stack.enter_context(threads), fencing_sdk.sync.LockClient)
        assert_type(stack.enter_context(lock), fencing_sdk.sync.Lease)
        assert_type(stack.enter_context(threads.rwlock("a").reader), fencing_sdk.sync.Lease)
        assert_type(stack.enter_context(threads.semaphore("a", permits=4)), fencing_sdk.sync.PermitLease)
        held = stack.enter_context(threads.multilock("a", "b"))
        assert_type(held.tokens, dict[str, Token])


async def the_readme_books_a_seat(seats: SqlGuard, database: sqlite3.Connection) -> None:
    try:
        async with locks.lock("seats/42", ttl=15, wait=5, fences=[seats]) as lease:
            seats.admit_sync(database, "seats/42", lease.token)
    except (LockHeldError, AcquireTimeoutError):
        raise
    except LeaseLostError as error:
        assert_type(error.reason, LossReason)
    except StaleTokenError as error:
        assert_type(error.fence, int)


async def every_guard_takes_a_token(lease: Lease) -> None:
    await RedisGuard("redis://localhost").execute("a", lease.token, ("SET", "a", 1))
    await EtcdGuard("etcd://localhost").execute("a", lease.token, put("a", "1"))
    await KahunaGuard("kahuna://localhost").raise_to("a", lease.token)
    await FileGuard("folder").write("a", lease.token, b"1")
    MemoryGuard().write("a", lease.token, print, 1)


async def and_so_does_the_token_of_a_request(
    request: web.Request, scope: asgi.Scope, environ: wsgi.Environ, view: HttpRequest, database: sqlite3.Connection
) -> None:
    guard = SqlGuard("app.db")
    await guard.admit(database, "a", aiohttp.request_token(request))
    await guard.admit(database, "a", asgi.request_token(scope))
    guard.admit_sync(database, "a", django.request_token(view))
    guard.admit_sync(database, "a", wsgi.request_token(environ))
    assert_type(asgi.request_token(scope), Token)
    assert_type(asgi.request_token(scope, required=False), Token | None)


async def a_client_is_a_context_manager_of_itself() -> None:
    async with connect("memory://") as client:
        assert_type(client, LockClient)
    async with connect() as client:
        assert_type(client, LockClient)
        assert_type(await client.inspect("a"), Holder | None)
    async with LockClient(MemoryBackend(), observers=[watch]) as client:
        await client.aclose()


def watch(event: Event) -> None:
    assert_type(event.kind, str)
    assert_type(event.holder, str | None)
    match event:
        case NotAcquired():
            assert_type(event.holder, str)  # a client always knows it
            assert_type(event.reason, NotAcquiredReason)
    assert_type(event.name, str)


def an_error_carries_plain_values(error: LeaseLostError) -> None:
    assert_type(error.name, str)
    assert_type(error.token, int)
    assert_type(error.reason, LossReason)


class OwnGuard:
    async def raise_to(self, resource: str, token: int) -> None: ...

    async def highest(self, resource: str) -> Token | None: ...


def things_of_ones_own_fit_the_contracts() -> None:
    backend: Backend = FaultyBackend(MemoryBackend())
    guard: Guard = OwnGuard()
    observer: Observer = watch
    client = LockClient(backend, observers=[observer])
    client.lock("a", fences=[guard, (guard, "other/resource")])


async def shares() -> None:
    gpus = locks.semaphore("gpu-pool", permits=4, ttl=15, wait=None, fences=[OwnGuard()])
    async with gpus as lease:
        assert_type(lease, PermitLease)
        assert_type(lease.permit, int)
        assert_type(lease.resource, str)
    assert_type(await gpus.acquire(wait=3), PermitLease)
    assert_type(await gpus.try_acquire(), PermitLease | None)
    assert_type(await gpus.holders(), Sequence[Holder])
    catalog = locks.rwlock("catalog", ttl=15)
    assert_type(catalog.reader, Lock)
    async with catalog.writer as writer:
        assert_type(writer, Lease)
    assert_type(await catalog.holders(), Sequence[Holder])


class OldLockOfCoroutines:
    async def take(self, owner: str, ttl: float) -> bool:
        return bool(owner and ttl)

    async def renew(self, owner: str, ttl: float) -> bool:
        return bool(owner and ttl)

    async def release(self, owner: str) -> None: ...


class OldLockOfFunctions:
    def take(self, owner: str, ttl: float) -> bool:
        return bool(owner and ttl)

    def renew(self, owner: str, ttl: float) -> bool:
        return bool(owner and ttl)

    def release(self, owner: str) -> int:
        return len(owner)


async def hold_old_locks(client: redis.asyncio.Redis, blocking: redis.Redis) -> None:
    old_locks: list[OldLock] = [OldLockOfCoroutines(), OldLockOfFunctions(), RedisPyLock(client, "a")]
    for old in old_locks:
        async with beside(locks.lock("a"), old) as lease:
            assert_type(lease, Lease)
    with fencing_sdk.sync.beside(fencing_sdk.sync.connect("memory://").lock("a"), RedisPyLock(blocking, "a")) as held:
        assert_type(held, fencing_sdk.sync.Lease)
