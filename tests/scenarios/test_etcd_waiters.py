"""Many waiters for one lock in etcd: in order, woken one by one, and none is forgotten."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from etcd_server import EtcdCluster
from etcd_stage import backend_on, count_of_keys, granted, keys
from fault_proxy import FaultProxy
from patience import until
from stays import Stay, opened, staying

from fencing_sdk.abc import Claim, Held
from fencing_sdk.backends.etcd import EtcdBackend

pytest_plugins = ["etcd_fixtures"]

WAITERS = 60


async def test_a_release_wakes_the_next_and_nobody_else(etcd_server: EtcdCluster, monkeypatch: pytest.MonkeyPatch):
    async with backend_on(etcd_server.url) as backend:
        holder, claims = Claim("a", 60.0), [Claim("a", 60.0) for _ in range(3)]
        await granted(backend, holder)
        async with backend.queue(claims[0]) as one, backend.queue(claims[1]) as two, backend.queue(claims[2]) as three:
            await backend.release(holder)
            async with asyncio.timeout(20):
                await one.wait()
            await granted(backend, claims[0])
            for turn in (two, three):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.3):
                        await turn.wait()
            await backend.release(claims[0])
            async with asyncio.timeout(20):
                await two.wait()


async def test_a_watch_from_a_revision_that_etcd_has_forgotten_looks_again(
    etcd_server: EtcdCluster, monkeypatch: pytest.MonkeyPatch
):
    """Compaction between the look at the line and the watch: etcd cancels it, and no wake-up is lost."""
    async with backend_on(etcd_server.url) as backend, backend_on(etcd_server.url) as rival:
        holder, waiter = Claim("a", 60.0), Claim("a", 60.0)
        await granted(rival, holder)
        looked = backend._requests.predecessor
        looks = 0

        async def old(operation: str, claim: Claim, created: int):
            nonlocal looks
            looks += 1
            entry, revision = await looked(operation, claim, created)
            return entry, 0 if looks == 1 else revision

        monkeypatch.setattr(backend._requests, "predecessor", old)
        for _ in range(5):
            await etcd_server.command("kv/put", {"key": "eA==", "value": "eA=="})
        await asyncio.to_thread(etcd_server.compact)
        async with backend.queue(waiter) as turn, asyncio.timeout(20):
            await until(lambda: looks >= 2, what="it looks again")
            await rival.release(holder)
            while isinstance(await backend.acquire(waiter), Held):
                await turn.wait()


async def test_compaction_under_a_watch_that_is_open_harms_nobody(etcd_server: EtcdCluster):
    async with opened(etcd_server.url) as (locks, _), staying(locks.lock("a")) as first:
        second = Stay(locks.lock("a"))
        await count_of_keys(etcd_server, "a", 2)
        for _ in range(3):
            await etcd_server.command("kv/put", {"key": "eA==", "value": "eA=="})
            await asyncio.to_thread(etcd_server.compact)
        await first.end()
        await second.begun()
        await second.end()


async def test_a_watch_that_breaks_is_opened_again(etcd_server: EtcdCluster, etcd_proxy: FaultProxy):
    """The release happens while there is no connection; the waiter is woken all the same, and not by its timer."""
    async with (
        backend_on(f"etcd://127.0.0.1:{etcd_proxy.port}") as backend,
        backend_on(etcd_server.url) as other,
    ):
        holder, waiter = Claim("a", 60.0), Claim("a", 60.0)
        await granted(other, holder)
        async with backend.queue(waiter) as turn:
            assert isinstance(await backend.acquire(waiter), Held)
            etcd_proxy.refuse()
            etcd_proxy.cut()
            await other.release(holder)
            etcd_proxy.heal()
            async with asyncio.timeout(20):
                await turn.wait()
            await granted(backend, waiter)


async def test_a_place_that_an_operator_removed_is_taken_again_at_the_end(etcd: EtcdBackend, etcd_server):
    holder, waiter, later = (Claim("a", 60.0) for _ in range(3))
    await granted(etcd, holder)
    async with etcd.queue(waiter) as turn:
        own = (await keys(etcd_server, "a"))[1]
        await asyncio.to_thread(etcd_server.delete, own)
        async with etcd.queue(later) as later_turn:
            assert isinstance(await etcd.acquire(waiter), Held)
            await etcd.release(holder)
            async with asyncio.timeout(20):
                await later_turn.wait()
                assert isinstance(await etcd.acquire(waiter), Held)
                await granted(etcd, later)
                with contextlib.suppress(TimeoutError):  # a wake-up that came for nothing
                    async with asyncio.timeout(0.5):
                        await turn.wait()
                assert isinstance(await etcd.acquire(waiter), Held)
                await etcd.release(later)
                await turn.wait()
                while isinstance(await etcd.acquire(waiter), Held):
                    await turn.wait()


async def test_a_release_between_the_look_at_the_line_and_the_watch_is_not_missed(
    etcd_server: EtcdCluster, monkeypatch: pytest.MonkeyPatch
):
    """The watch begins at the revision of the look, and so is told of what happened before it was opened."""
    async with backend_on(etcd_server.url) as backend:
        holder, waiter = Claim("a", 60.0), Claim("a", 60.0)
        await granted(backend, holder)
        looked = backend._requests.predecessor

        async def then_released(operation: str, claim: Claim, created: int):
            seen = await looked(operation, claim, created)
            await backend.release(holder)
            return seen

        monkeypatch.setattr(backend._requests, "predecessor", then_released)
        async with backend.queue(waiter) as turn:
            async with asyncio.timeout(20):
                await turn.wait()
            await granted(backend, waiter)


async def test_locks_that_are_taken_one_after_the_other_share_keep_alives(etcd_server: EtcdCluster):
    async with backend_on(etcd_server.url) as backend:
        await granted(backend, Claim("first", 15.0))
        before = etcd_server.calls("LeaseKeepAlive")
        started = asyncio.get_running_loop().time()
        for number in range(100):
            await granted(backend, Claim(f"a/{number}", 15.0))
        seconds = asyncio.get_running_loop().time() - started
        assert etcd_server.calls("LeaseKeepAlive") - before <= 3 + seconds / 0.4
