"""Waiters of a store that wakes none: those of one client stand in line, and its head asks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from kahuna_server import KahunaServer
from tenacity import wait_fixed

from fencing_sdk import AcquireTimeoutError, Lease, LockClient, connect
from fencing_sdk.abc import Claim, Grant, Held
from fencing_sdk.backends.kahuna import KahunaBackend, from_url

pytest_plugins = ["kahuna_fixtures"]

PATIENCE = 30.0


@contextlib.asynccontextmanager
async def client_of(server: KahunaServer) -> AsyncIterator[LockClient]:
    async with asyncio.timeout(PATIENCE), connect(server.url) as locks:
        yield locks


async def waiting(locks: LockClient, count: int, **options: float) -> list[asyncio.Task[Lease]]:
    """So many tasks that wait for "a" one behind the other."""
    tasks = []
    for _ in range(count):
        tasks.append(asyncio.create_task(locks.lock("a", **options).acquire()))
        backend = locks._engine._backend  # type: ignore[union-attr]
        while len(backend._waiters._line._name("a").waiting) < len(tasks):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return tasks


async def test_waiters_of_one_client_are_served_in_the_order_of_their_arrival(kahuna_server: KahunaServer):
    async with client_of(kahuna_server) as locks:
        holder = await locks.lock("a").acquire()
        tasks = await waiting(locks, 5)
        kahuna_server.seen()
        before = len(kahuna_server.seen())
        await holder.release()
        for task in tasks:
            lease = await task
            assert [other.done() for other in tasks[tasks.index(task) + 1 :]].count(True) == 0
            await lease.release()
        calls = [request["call"] for request in kahuna_server.seen()[before:]]
        assert calls == ["try-unlock", *["try-lock", "try-unlock"] * 5], "no request was in vain"


async def test_a_release_in_the_same_client_wakes_the_head_at_once(kahuna_server: KahunaServer):
    async with client_of(kahuna_server) as locks:
        holder = await locks.lock("a", ttl=60).acquire()
        (task,) = await waiting(locks, 1)
        await holder.release()
        async with asyncio.timeout(3.5):  # a waiter that is not woken naps for 3.75 s at least
            await (await task).release()


@pytest.mark.parametrize("how", ["gives up", "is cancelled"])
async def test_a_head_that_leaves_passes_its_place_on(kahuna_server: KahunaServer, how: str):
    async with client_of(kahuna_server) as locks, client_of(kahuna_server) as others:
        holder = await others.lock("a").acquire()
        (head,) = await waiting(locks, 1, **({"wait": 2.0} if how == "gives up" else {}))
        second = asyncio.create_task(locks.lock("a").acquire())
        if how == "is cancelled":
            await asyncio.sleep(0.05)
            head.cancel()
        with pytest.raises(AcquireTimeoutError if how == "gives up" else asyncio.CancelledError):
            await head
        await holder.release()
        await (await second).release()


async def test_a_lock_that_another_client_releases_is_found(kahuna_server: KahunaServer):
    async with client_of(kahuna_server) as locks, client_of(kahuna_server) as others:
        holder = await others.lock("a").acquire()
        tasks = await waiting(locks, 3)
        await holder.release()
        for task in tasks:
            await (await task).release()


async def test_claims_that_ask_together_send_one_request(kahuna_server: KahunaServer, kahuna: KahunaBackend):
    async with contextlib.aclosing(from_url(kahuna_server.url)) as other:
        assert isinstance(await other.acquire(Claim("a", 60.0)), Grant)
    before = len(kahuna_server.seen())
    outcomes = await asyncio.gather(*(kahuna.acquire(Claim("a", 60.0)) for _ in range(10)))
    assert all(isinstance(outcome, Held) for outcome in outcomes)
    assert [request["call"] for request in kahuna_server.seen()[before:]] == ["try-lock", "get-info"]


async def test_a_claim_does_not_suffer_from_the_end_of_another_that_asks(
    kahuna_server: KahunaServer, kahuna: KahunaBackend
):
    """It was cancelled, so the next one asks for itself."""
    kahuna_server.fault("hang", call="try-lock", times=1, apply=False)
    first = asyncio.create_task(kahuna.acquire(Claim("a", 60.0)))
    await asyncio.sleep(0.1)
    second = asyncio.create_task(kahuna.acquire(Claim("a", 60.0)))
    await asyncio.sleep(0.1)
    first.cancel()
    async with asyncio.timeout(PATIENCE):
        assert isinstance(await second, Grant)


async def test_a_claim_that_may_have_been_granted_asks_although_others_stand_in_line(
    kahuna_server: KahunaServer, kahuna: KahunaBackend
):
    """Its grant would block them."""
    claim = Claim("a", 60.0)
    kahuna_server.fault("drop", call="try-lock", times=1)
    with contextlib.suppress(Exception):
        await kahuna.acquire(claim)
    kahuna.line_up(Claim("a", 60.0), lambda *_: None)
    assert isinstance(await kahuna.acquire(claim), Grant)


async def test_a_claim_that_holds_finds_its_grant_although_others_ask_and_wait(kahuna: KahunaBackend):
    claim, other = Claim("a", 60.0), Claim("a", 60.0)
    assert await kahuna.acquire(claim) == Grant(0, restarted=False)
    outcomes = await asyncio.gather(*(kahuna.acquire(one) for one in (other, claim, other, claim)))
    assert [type(outcome) for outcome in outcomes] == [Held, Grant, Held, Grant]
    kahuna.line_up(other, lambda *_: None)
    assert await kahuna.acquire(claim) == Grant(0, restarted=False)


@pytest.mark.parametrize("clients", [1, 5])
async def test_a_lock_that_is_held_for_long_is_asked_for_seldom(kahuna_server: KahunaServer, clients: int):
    """At most 2 requests a second from one client with all its waiters; benchmarks/kahuna.py measures more of it."""
    async with contextlib.AsyncExitStack() as opened:
        holding = await opened.enter_async_context(client_of(kahuna_server))
        rivals = [await opened.enter_async_context(client_of(kahuna_server)) for _ in range(clients)]
        holder = await holding.lock("a", ttl=60).acquire()
        tasks = [task for locks in rivals for task in await waiting(locks, 10 // clients)]
        await asyncio.sleep(1.0)
        before, began = len(kahuna_server.seen()), asyncio.get_running_loop().time()
        await asyncio.sleep(3.0)
        requests = kahuna_server.seen()[before:]
        seconds = asyncio.get_running_loop().time() - began
        assert 0 < len(requests) <= seconds * clients * 2.5
        assert {request["call"] for request in requests} == {"get-info"}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await holder.release()


async def test_a_pause_that_was_chosen_is_kept(kahuna_server: KahunaServer):
    async with client_of(kahuna_server) as locks, client_of(kahuna_server) as others:
        holder = await others.lock("a").acquire()
        waiter = asyncio.create_task(locks.lock("a", backoff=wait_fixed(0.02)).acquire())
        async with asyncio.timeout(10):  # at the usual pace, it looks twenty times in so long
            while len(kahuna_server.seen("get-info")) <= 40:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await holder.release()
        await (await waiter).release()
