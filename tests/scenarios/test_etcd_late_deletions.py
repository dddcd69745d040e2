"""Deletions in etcd that are carried out late: a key that the same claim has put again is none of theirs."""

from __future__ import annotations

import asyncio
import json
import math
from contextlib import suppress
from typing import Any

import pytest
from etcd_server import EtcdCluster
from etcd_stage import ask_first, backend_on, count_of_keys, granted, keys
from event_log import CLOCK
from fault_proxy import FaultProxy
from patience import until
from stays import Stay, opened, staying

from fencing_sdk import LockClient
from fencing_sdk.abc import Claim, Held, Renewal
from fencing_sdk.backends.etcd import EtcdBackend, from_url
from fencing_sdk.errors import BackendUnavailableError

pytest_plugins = ["etcd_fixtures"]
pytestmark = pytest.mark.usefixtures("no_blocking_calls")


class Post:
    """The requests of a backend that delete and put nothing; those held back arrive when `deliver` is called."""

    def __init__(self, backend: EtcdBackend) -> None:
        self.deletions = 0
        self.to_hold_back: float = 0
        """How many of the next deletions."""
        self._call = backend._gateway.call
        self._delivered = asyncio.Event()
        self._late: list[asyncio.Task[Any]] = []
        backend._gateway.call = self._pass  # type: ignore[method-assign]

    async def _pass(self, operation: str, path: str, body: dict[str, Any], **options: bool) -> Any:
        if "delete" not in (sent := json.dumps(body)) or "request_put" in sent:
            return await self._call(operation, path, body, **options)
        self.deletions += 1
        if self.to_hold_back < 1:
            return await self._call(operation, path, body, **options)
        self.to_hold_back -= 1
        self._late.append(asyncio.create_task(self._deliver(operation, path, body, **options)))
        return await asyncio.shield(self._late[-1])  # a caller that is cancelled does not take the request back

    async def _deliver(self, *request: Any, **options: bool) -> Any:
        await self._delivered.wait()
        return await self._call(*request, **options)

    @property
    def held_back(self) -> int:
        return len(self._late)

    async def deliver(self) -> None:
        """See all that was held back carried out."""
        self._delivered.set()
        await asyncio.wait(self._late)


async def watched(cluster: EtcdCluster, count: int) -> None:
    """Wait until so many keys are watched."""
    stop = CLOCK.now() + 20
    while await asyncio.to_thread(cluster.metric, "etcd_debugging_mvcc_watcher_total") != count:
        assert CLOCK.now() < stop, "the watch was not opened, or an old one goes on"
        await asyncio.sleep(0.05)


async def test_a_late_deletion_of_a_place_does_not_end_the_grant_that_came_after_it(etcd_server: EtcdCluster):
    """One of two members gets the request when the claim that left the line holds the lock; the other got it before."""
    port = etcd_server.members[0].port
    async with (
        FaultProxy(port) as slow,
        backend_on(f"etcd://127.0.0.1:{slow.port},127.0.0.1:{port}") as backend,
        backend_on(etcd_server.url) as rival,
    ):
        holder, claim, next_one = (Claim("a", 60.0) for _ in range(3))
        await granted(rival, holder)
        ask_first(backend._gateway, slow.port)
        async with backend.queue(claim):
            assert isinstance(await backend.acquire(claim), Held)
            await watched(etcd_server, 1)  # nothing is under way that would be given up for another member
            ask_first(backend._gateway, slow.port)  # it may have been slow to answer
            slow.blackhole()
            slow.lose_ends()  # etcd would drop the request of a client that is known to be gone
        await count_of_keys(etcd_server, "a", 1)
        await rival.release(holder)
        token = await granted(backend, claim)
        answered = slow.bytes_down
        slow.heal()
        await until(lambda: slow.bytes_down > answered, what="the deletion is carried out late")
        found = await rival.inspect("a")
        assert found is not None
        assert found.token == token
        assert list(await backend.renew([claim])) == [Renewal.RENEWED]
        assert isinstance(await rival.acquire(next_one), Held)


async def test_work_goes_on_alone_although_the_deletion_of_an_earlier_place_comes_late(etcd_server: EtcdCluster):
    """The answer to joining is lost, so the line is left and joined again; then the lock is granted."""
    backend = from_url(etcd_server.url)
    post, stand, stood = Post(backend), backend._requests.join_line, 0

    async def lost_at_first(*arguments: Any) -> Any:
        nonlocal stood
        stood += 1
        standing = await stand(*arguments)
        if stood == 1:
            post.to_hold_back = 1  # the lock waits for one that is sent again
            raise BackendUnavailableError("EtcdBackend", "queue", "the answer was lost")
        return standing

    backend._requests.join_line = lost_at_first  # type: ignore[method-assign]
    async with opened(etcd_server.url) as (others, _), LockClient(backend) as locks:
        async with staying(others.lock("a", ttl=60)) as first:
            second = Stay(locks.lock("a", ttl=60, heartbeat_interval=0.5))
            await until(lambda: post.held_back, what="the line is left")
            await until(lambda: stood > 1, what="the line is joined again")
            await first.end()
        await second.begun()
        await post.deliver()
        assert await others.lock("a").try_acquire() is None
        assert second.lost is None
        await second.end()


async def test_a_debt_that_is_being_paid_while_its_owner_comes_back_is_not_paid_with_the_new_grant(
    etcd: EtcdBackend, etcd_server: EtcdCluster
):
    post, claim, kept = Post(etcd), Claim("a", 4.0), Claim("kept", 4.0)
    await granted(etcd, kept)
    await granted(etcd, claim)
    post.to_hold_back = math.inf
    with suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            await etcd.release(claim)
    async with asyncio.timeout(20):
        while post.held_back < 2:  # the second one goes along with a keep-alive
            assert list(await etcd.renew([kept])) == [Renewal.RENEWED]
            await asyncio.sleep(0.05)
    post.to_hold_back = 0
    token = await granted(etcd, claim)
    await post.deliver()
    found = await etcd.inspect("a")
    assert found is not None
    assert found.token == token


async def test_a_place_that_was_left_and_taken_again_is_not_deleted_as_a_debt(
    etcd: EtcdBackend, etcd_server: EtcdCluster
):
    """No later waiter is served before it."""
    post, kept = Post(etcd), Claim("kept", 4.0)
    holder, claim, later = (Claim("a", 60.0) for _ in range(3))
    await granted(etcd, holder)
    async with etcd.queue(claim):
        post.to_hold_back = math.inf
    assert post.held_back
    post.to_hold_back = 0
    async with etcd.queue(claim) as turn, etcd.queue(later):
        before = await keys(etcd_server, "a")
        await post.deliver()
        await granted(etcd, kept)
        for _ in range(10):
            assert list(await etcd.renew([kept])) == [Renewal.RENEWED]
            assert isinstance(await etcd.acquire(claim), Held)
            await asyncio.sleep(0.1)
        assert await keys(etcd_server, "a") == before
        await etcd.release(holder)
        async with asyncio.timeout(20):
            await turn.wait()
        await granted(etcd, claim)


async def test_an_answer_from_before_the_place_was_left_and_taken_again_grants_nothing(
    etcd: EtcdBackend, etcd_server: EtcdCluster
):
    """The key that it tells of was deleted in between."""
    claim, take, taken, free = Claim("a", 60.0), etcd._requests.take, asyncio.Event(), asyncio.Event()

    async def answered_late(*arguments: Any) -> Any:
        standing = await take(*arguments)
        taken.set()
        await free.wait()
        return standing

    etcd._requests.take = answered_late  # type: ignore[method-assign]
    asking = asyncio.create_task(etcd.acquire(claim))
    await taken.wait()
    async with etcd.queue(claim):
        pass
    await count_of_keys(etcd_server, "a", 0)
    async with etcd.queue(claim):
        free.set()
        with pytest.raises(BackendUnavailableError):
            await asking
        token = await granted(etcd, claim)
        found = await etcd.inspect("a")
        assert found is not None
        assert found.token == token


async def test_a_release_costs_one_request_and_finds_what_was_put_without_an_answer(
    etcd: EtcdBackend, etcd_server: EtcdCluster
):
    post, known, unknown = Post(etcd), Claim("a", 60.0), Claim("b", 60.0)
    await granted(etcd, known)
    await etcd.release(known)
    assert post.deletions == 1
    call = etcd._gateway.call

    async def lost(operation: str, *arguments: Any, **options: bool) -> Any:
        reply = await call(operation, *arguments, **options)
        if operation == "acquire":
            raise BackendUnavailableError("EtcdBackend", operation, "the answer was lost")
        return reply

    etcd._gateway.call = lost  # type: ignore[method-assign]
    with pytest.raises(BackendUnavailableError):
        await etcd.acquire(unknown)
    await count_of_keys(etcd_server, "b", 1)
    await etcd.release(unknown)
    await count_of_keys(etcd_server, "b", 0)
    assert post.deletions <= 3, "one that learns of the key, and one that deletes it"


async def test_a_place_that_a_deletion_on_its_way_may_hit_is_left_for_another(
    etcd: EtcdBackend, etcd_server: EtcdCluster
):
    """A request without an answer has made it, after one deletion and before another."""
    claim, pending = Claim("a", 60.0), etcd._leases.pending_deletes
    key, now = etcd._keys.own(claim), etcd._leases.now()
    async with backend_on(etcd_server.url) as other:
        made = await granted(other, claim)
    pending.add(key, now, may_return=True)
    pending.cancel(key, now, made)
    with pytest.raises(BackendUnavailableError):
        async with etcd.queue(claim):
            pytest.fail("this place may go at any time")
    async with etcd.queue(claim):
        assert await granted(etcd, claim) > made
