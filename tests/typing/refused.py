"""
What a type checker is to refuse. Never run; `mypy tests/typing` reads it.

Every mistake is marked with the error that it must cause. A mark on a line that is accepted is an error itself
(``warn_unused_ignores``), so nothing here can pass unnoticed.
"""

import sqlite3

from fencing_sdk import LockClient, connect, current_token
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.events import Event
from fencing_sdk.guards.sql import FenceColumn
from fencing_sdk.recipes import holding

locks = connect("memory://")


@locks.locking("report/{report_id}")
async def build_report(report_id: int) -> str:
    return str(report_id)


async def calls_of_a_decorated_coroutine() -> None:
    await build_report("seven")  # type: ignore[arg-type]
    await build_report()  # type: ignore[call-arg]
    withdraw("seven")  # type: ignore[arg-type]
    await build_report(7, colour="red")  # type: ignore[call-arg]
    number: int = await build_report(7)  # type: ignore[assignment]
    build_report(7)  # type: ignore[unused-coroutine]
    print(number)  # noqa: T201  (never run)


@locks.job("nightly")  # type: ignore[call-arg]
async def nightly() -> None: ...


@locks.job("nightly", at_least_for=60)  # type: ignore[arg-type]
def nightly_at_once() -> None: ...


@holding("accounts/{account_id}")
def withdraw(account_id: int) -> None: ...


@locks.locking("a")  # type: ignore[arg-type]
def not_a_coroutine() -> None: ...


@locks.locking("a", timeout=5)  # type: ignore[call-arg]
async def misspelt_option() -> None: ...


@locks.locking("a", ttl="30")  # type: ignore[arg-type]
async def wrong_type_of_option() -> None: ...


async def options_of_an_election() -> None:
    locks.election("a", wait=5)  # type: ignore[call-arg]
    locks.election("a", finish_within="5")  # type: ignore[arg-type]
    for term in locks.election("a"):  # type: ignore[attr-defined]
        print(term)  # noqa: T201  (never run)


async def bounds_of_a_drain() -> None:
    await locks.drain(25)  # type: ignore[call-arg]
    await locks.drain(within=None)  # type: ignore[arg-type]
    locks.draining_on("SIGTERM", within=25)  # type: ignore[arg-type]
    locks.draining_on(15)  # type: ignore[call-arg]
    locks.draining = True  # type: ignore[misc]


lock_of_one_call = locks.lock("a")


async def descriptions_of_a_lock() -> None:
    locks.lock(42)  # type: ignore[arg-type]
    locks.lock("a", 30)  # type: ignore[call-arg]
    locks.lock("a", timeout=5)  # type: ignore[call-arg]
    locks.lock("a", ttl="30")  # type: ignore[arg-type]
    locks.lock("a", fences=["resource"])  # type: ignore[list-item]
    locks.lock("a", backoff=0.5)  # type: ignore[arg-type]
    locks.lock("a", label=b"worker")  # type: ignore[arg-type]


async def uses_of_a_lock() -> None:
    await lock_of_one_call.acquire(5)  # type: ignore[call-arg]
    await lock_of_one_call.acquire(wait="5")  # type: ignore[arg-type]
    async with lock_of_one_call.acquire():  # type: ignore[attr-defined]
        pass
    with locks.lock("a"):  # type: ignore[attr-defined]
        pass
    async with locks.lock("a") as lease:
        lease.token = 5  # type: ignore[misc, assignment]
        lease.release()  # type: ignore[unused-coroutine]
        text: str = lease.token  # type: ignore[assignment]
    handle = await locks.lock("a").try_acquire()
    handle.check()  # type: ignore[union-attr]
    current_token(42)  # type: ignore[arg-type]
    print(text)  # noqa: T201  (never run)


class HalfABackend:
    async def release(self, claim: object) -> None: ...


def clients() -> None:
    LockClient(HalfABackend())  # type: ignore[arg-type]
    LockClient("memory://")  # type: ignore[arg-type]
    LockClient(MemoryBackend(), observers=[lambda: None])  # type: ignore[misc, list-item]
    LockClient(MemoryBackend(), "shop")  # type: ignore[call-arg]
    LockClient(MemoryBackend(), namespace=None)  # type: ignore[arg-type]


def watch(event: Event) -> None:
    event.name = "b"  # type: ignore[misc]


def column(file: sqlite3.Connection, cursor: sqlite3.Cursor) -> None:
    FenceColumn("seats").written_sync(file, 42, 7, cursor)  # type: ignore[call-arg]


def shares(locks: LockClient) -> None:
    locks.semaphore("gpu-pool")  # type: ignore[call-arg]
    locks.semaphore("gpu-pool", 4)  # type: ignore[call-arg]
    locks.semaphore("gpu-pool", permits="4")  # type: ignore[arg-type]
    locks.rwlock("catalog", permits=4)  # type: ignore[call-arg]
    locks.rwlock("catalog").acquire()  # type: ignore[attr-defined]
