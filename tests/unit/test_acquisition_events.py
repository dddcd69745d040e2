"""Every acquisition is reported from its one beginning to its one end, under one holder id."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence

import anyio
import pytest
from event_log import Log
from inside import LoopClock, memory_on, on_clock
from virtual_time import block, in_virtual_time, settle

from fencing_sdk import (
    BackendRefusedError,
    BackendUnavailableError,
    Lease,
    LeaseLostError,
    LockClient,
    LossReason,
    StaleTokenError,
    UsageError,
)
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.events import NotAcquired, NotAcquiredReason, Released
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.testing import FaultyBackend

TTL = 10.0


class Heard(Log):
    """Events that an observer heard, by their acquisitions."""

    def kinds(self, *, but: str = "") -> list[list[str]]:
        """The kinds of the events of each acquisition, in the order in which the acquisitions began."""
        by_holder: dict[str | None, list[str]] = defaultdict(list)
        for event in self.events:
            if event.kind != but:
                by_holder[event.holder].append(event.kind)
        return list(by_holder.values())

    def released(self) -> list[bool]:
        return [event.confirmed for event in self.of(Released)]

    def ends(self) -> list[tuple[NotAcquiredReason, float, int]]:
        return [(end.reason, round(end.waited, 6), end.unanswered) for end in self.of(NotAcquired)]


class Store(FaultyBackend):
    """A memory store on virtual time whose grants can be delayed past their deadline."""

    def __init__(self) -> None:
        self.table = memory_on(LoopClock())
        super().__init__(self.table)
        self.pauses: list[float] = []
        self.refusals: list[Exception] = []

    async def draw(self, claim, **options):
        if self.refusals:
            raise self.refusals.pop(0)
        grant = await super().draw(claim, **options)
        if self.pauses:
            block(self.pauses.pop(0))
        return grant


@contextlib.asynccontextmanager
async def opened(store: Store) -> AsyncIterator[tuple[LockClient, Heard]]:
    heard = Heard()
    async with on_clock(LockClient(store, observers=[heard]), LoopClock()) as locks:
        yield locks, heard
        store.heal()


@contextlib.asynccontextmanager
async def held_by_another(store: Store, name: str = "a") -> AsyncIterator[None]:
    async with on_clock(LockClient(store.table), LoopClock()) as others, others.lock(name):
        yield


NOT_ACQUIRED: Sequence[str] = ["acquiring", "not_acquired"]


@pytest.mark.parametrize("silent", [False, True])
@in_virtual_time
async def test_a_wait_that_is_cancelled_is_told(silent):
    store = Store()
    async with opened(store) as (locks, heard), held_by_another(store):
        if silent:
            store.hang("acquire")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await locks.lock("a").acquire()
        assert heard.kinds() == [NOT_ACQUIRED]
        assert heard.ends() == [(NotAcquiredReason.CANCELLED, 1.0, int(silent))]


ERRORS = [
    (BackendUnavailableError("Store", "acquire"), NotAcquiredReason.UNAVAILABLE, 1),
    (BackendRefusedError("Store", "acquire"), NotAcquiredReason.REFUSED, 0),
    (ZeroDivisionError(), NotAcquiredReason.FAILED, 1),
]


@pytest.mark.parametrize(("error", "reason", "unanswered"), ERRORS, ids=[str(reason) for _, reason, _ in ERRORS])
@in_virtual_time
async def test_an_error_of_the_store_is_told(error, reason, unanswered):
    store = Store()
    async with opened(store) as (locks, heard):
        store.refusals.append(error)
        with pytest.raises(type(error)):
            await locks.lock("a", wait=0).acquire()
        assert heard.kinds() == [NOT_ACQUIRED]
        assert heard.ends() == [(reason, 0.0, unanswered)]


@in_virtual_time
async def test_a_wait_strategy_that_fails_is_told():
    def broken(state: object) -> float:
        raise ZeroDivisionError

    store = Store()
    async with opened(store) as (locks, heard):
        store.refusals.append(BackendUnavailableError("Store", "acquire"))
        with pytest.raises(ZeroDivisionError):
            await locks.lock("a", backoff=broken).acquire()
        assert heard.kinds() == [NOT_ACQUIRED]
        assert heard.ends() == [(NotAcquiredReason.FAILED, 0.0, 1)]


@in_virtual_time
async def test_a_grant_that_comes_too_late_ends_one_acquisition_and_the_caller_begins_another():
    store = Store()
    async with opened(store) as (locks, heard):
        store.pauses.append(0.9 * TTL)
        lease = await locks.lock("a", ttl=TTL).acquire()
        await lease.release()
        assert heard.kinds() == [NOT_ACQUIRED, ["acquiring", "acquired", "released"]]
        ((reason, waited, unanswered),) = heard.ends()
        assert (reason, unanswered) == (NotAcquiredReason.TOO_LATE, 0)
        assert waited >= 0.9 * TTL
        assert heard.events[-1].holder == lease.holder


@in_virtual_time
async def test_a_grant_that_comes_too_late_for_the_caller_too_is_told_as_what_the_caller_sees():
    store = Store()
    async with opened(store) as (locks, heard):
        store.pauses.append(2 * TTL)
        with pytest.raises(BackendUnavailableError):
            await locks.lock("a", ttl=TTL).acquire()
        assert heard.kinds() == [NOT_ACQUIRED]
        assert heard.ends() == [(NotAcquiredReason.UNAVAILABLE, 2 * TTL, 0)]


@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "asking"])
@in_virtual_time
async def test_a_wait_that_the_closing_of_its_client_ends_is_told(waits):
    store = Store()
    async with opened(store) as (locks, heard):
        async with held_by_another(store):
            if not waits:
                store.delay("acquire", 1.0)
            waiting = asyncio.create_task(locks.lock("a" if waits else "b").acquire())
            await settle()
            await locks.aclose()
            with pytest.raises(UsageError):
                await waiting
        assert heard.kinds() == [NOT_ACQUIRED]
        assert {reason for reason, _, _ in heard.ends()} == {NotAcquiredReason.CLOSED}


# From Acquired to Released.

HELD: Sequence[str] = ["acquiring", "acquired", "released"]
LOST: Sequence[str] = ["acquiring", "acquired", "lost", "released"]


@in_virtual_time
async def test_a_handle_that_the_store_does_not_take_back_at_closing_ends_all_the_same():
    store = Store()
    async with opened(store) as (locks, heard):
        lease = await locks.lock("a", ttl=60).acquire()
        store.hang("release", stubborn=True)
        await locks.aclose()
        assert heard.kinds() == [LOST]
        assert heard.released() == [False]
        store.heal()
        await asyncio.sleep(100)
        assert lease.lost_reason is LossReason.CLOSED
        assert heard.kinds() == [LOST]


@in_virtual_time
async def test_the_lease_of_a_body_that_outlives_its_client_ends_when_the_client_does():
    store = Store()

    async def stubborn(locks: LockClient) -> None:
        async with locks.lock("a", ttl=60):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1000)
            with anyio.CancelScope(shield=True):
                await asyncio.sleep(60)

    async with opened(store) as (locks, heard):
        body = asyncio.create_task(stubborn(locks))
        await asyncio.sleep(1)
        await locks.aclose()
        assert not body.done()
        assert heard.kinds() == [LOST]
        assert heard.released() == [False]
        with pytest.raises(LeaseLostError):
            await body
        assert heard.kinds() == [LOST]


@pytest.mark.parametrize("how", ["held", "lost", "lost to a silent store"])
@in_virtual_time
async def test_a_handle_that_is_dropped_ends_once(how):
    store = Store()
    async with opened(store) as (locks, heard):
        lease = await locks.lock("a", ttl=TTL, max_hold=1.0 if how == "lost" else None).acquire()
        if how == "lost to a silent store":
            store.hang("renew")
        if how != "held":
            await lease.wait_lost()
            store.heal()
        with contextlib.nullcontext() if how != "held" else pytest.warns(ResourceWarning):
            del lease
        await settle()
        assert heard.kinds(but="renewal_failed") == [HELD if how == "held" else LOST]
        assert heard.released() == [True]


@in_virtual_time
async def test_a_release_that_is_cancelled_and_one_that_comes_twice_are_told_once():
    store = Store()
    async with opened(store) as (locks, heard):
        lease = await locks.lock("a").acquire()
        store.delay("release", 1.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await lease.release()
        await lease.release()
        assert heard.kinds() == [HELD]


@in_virtual_time
async def test_a_release_that_goes_on_in_the_background_is_told_when_its_caller_goes_on():
    store = Store()
    async with opened(store) as (locks, heard):
        lease = await locks.lock("a", ttl=60).acquire()
        store.hang("release", times=2)
        await lease.release()
        assert heard.released() == [False]
        await asyncio.sleep(60)
        assert heard.kinds() == [HELD]


@in_virtual_time
async def test_a_lease_whose_fence_is_refused_ends_too():
    guard = MemoryGuard()
    guard.admit("a", 2**52)
    async with opened(Store()) as (locks, heard):
        with pytest.raises(StaleTokenError):
            await locks.lock("a", fences=[guard]).acquire()
        assert heard.kinds() == [["acquiring", "acquired", "stale_rejected", "released"]]


def test_a_client_that_is_left_open_by_its_loop_ends_its_leases_in_the_next_one():
    heard = Heard()
    locks = LockClient(MemoryBackend(), observers=[heard])

    async def leave_open() -> Lease:
        await locks.__aenter__()
        return await locks.lock("a").acquire()

    lease = asyncio.run(leave_open())
    assert heard.kinds() == [["acquiring", "acquired", "lost"]], "its heartbeat was cancelled with all other tasks"
    asyncio.run(locks.aclose())
    assert heard.kinds() == [LOST]
    assert not lease.held


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_reports_nothing_about_the_leases_of_its_parent(tmp_path):
    """The parent goes on with them and reports their end: reported twice, a gauge would fall below zero."""
    script = """
import asyncio, os, sys
from fencing_sdk import connect

async def main():
    events = []
    async with connect("memory://", observers=[events.append]) as locks:
        lease = await locks.lock("a").acquire()
        if child := os.fork():
            os.waitpid(child, 0)
        else:
            lease.held
            await lease.release()
            await locks.aclose()
            del lease
            print([event.kind for event in events], flush=True)
            os._exit(0)
        await lease.release()
    print([event.kind for event in events])

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.splitlines() == [str(["acquiring", "acquired"]), str(HELD)]


@in_virtual_time
async def test_all_events_of_an_acquisition_have_its_holder():
    store = Store()
    async with opened(store) as (locks, heard):
        async with locks.lock("a", ttl=TTL) as lease, locks.lock("b", ttl=TTL) as other:
            await asyncio.sleep(TTL / 3)
            store.fail("renew", times=2)
            await asyncio.sleep(TTL / 3)
            block(TTL / 3)
            await asyncio.sleep(TTL / 3)
        for held in (lease, other):
            mine = [event for event in heard.events if event.holder == held.holder]
            assert {event.name for event in mine} == {held.name}
            kinds = {event.kind for event in mine}
            assert kinds == {"acquiring", "acquired", "renewed", "renewal_failed", "renewal_late", "released"}
        assert all(event.holder for event in heard.events)
