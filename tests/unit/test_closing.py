"""Closing: what ends, in which order, within what time, and in which loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator
from functools import partial

import anyio
import pytest
from inside import LoopClock, memory_on, on_clock
from looking import holder
from virtual_time import in_virtual_time, now, settle

from fencing_sdk import LeaseLostError, LockClient, LossReason, UsageError
from fencing_sdk._values.loop_owner import ForkDetector, LoopOwner
from fencing_sdk.abc import Gone, Place
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.events import Lost
from fencing_sdk.testing import FaultyBackend

# A client that is closed: once and to the end, and not before the bodies under its locks have ended (P1).


TTL = 10.0
PATIENCE = 5.0
"""Seconds for which closing waits for bodies."""


class TwoClients:
    """One that will be closed, and one that waits for the same lock."""

    def __init__(self) -> None:
        store = memory_on(LoopClock())
        self.ours, self.theirs = (on_clock(LockClient(store), LoopClock()) for _ in range(2))
        self.log: list[str] = []

    async def __aenter__(self):
        await self.theirs.__aenter__()
        await self.ours.__aenter__()
        return self

    async def __aexit__(self, *_):
        await self.ours.aclose()
        await self.theirs.aclose()

    async def next_holder(self) -> float:
        async with self.theirs.lock("a", ttl=TTL):
            self.log.append("next holder")
            return now()


@in_virtual_time
async def test_the_lock_is_released_when_the_body_has_cleaned_up():
    async with TwoClients() as clients:

        async def body():
            async with clients.ours.lock("a", ttl=TTL):
                try:
                    await asyncio.sleep(3600)
                finally:
                    with anyio.CancelScope(shield=True):
                        await asyncio.sleep(1)
                    clients.log.append("cleaned up")

        working = asyncio.create_task(body())
        await asyncio.sleep(1)
        waiting = asyncio.create_task(clients.next_holder())
        await asyncio.sleep(1)
        await clients.ours.aclose()
        assert await waiting == pytest.approx(3, abs=0.01), "as soon as the body has ended, and not by the ttl"
        assert clients.log == ["cleaned up", "next holder"]
        with pytest.raises(LeaseLostError) as left:
            await working
        assert left.value.reason is LossReason.CLOSED


@in_virtual_time
async def test_the_lock_of_a_body_that_goes_on_is_left_to_its_ttl():
    async with TwoClients() as clients:

        async def body():
            async with clients.ours.lock("a", ttl=TTL):
                with anyio.CancelScope(shield=True):
                    await asyncio.sleep(30)

        working = asyncio.create_task(body())
        await asyncio.sleep(1)
        waiting = asyncio.create_task(clients.next_holder())
        closed = now()
        await clients.ours.aclose()
        assert now() - closed == pytest.approx(PATIENCE, abs=0.01), "closing is bounded"
        assert await waiting >= TTL
        assert not working.done()
        with contextlib.suppress(LeaseLostError):
            await working


@in_virtual_time
@pytest.mark.parametrize("names", [("a",), ("a", "b", "c")])
async def test_a_release_that_the_store_does_not_confirm_before_the_closing_ends_is_logged(names, caplog):
    store = FaultyBackend(memory_on(LoopClock()))
    client = on_clock(LockClient(store), LoopClock())
    async with client:
        leases = [await client.lock(name, ttl=TTL).acquire() for name in names]
        store.drop("release")
    others = " and 2 others" if names[1:] else ""
    first = next(repr(name) for name in names if f" of {name!r}" in caplog.text)
    assert caplog.messages == [f"closed; the store did not confirm the release of {first}{others}: the ttl frees them"]
    assert {lease.lost_reason for lease in leases} == {LossReason.CLOSED}


@in_virtual_time
async def test_whoever_closes_the_client_in_its_own_body_does_not_wait_for_itself():
    async with TwoClients() as clients:
        with pytest.raises(LeaseLostError):
            async with clients.ours.lock("a", ttl=TTL):
                await clients.ours.aclose()
                assert now() == 0.0
        assert await clients.next_holder() == 0.0


# One end for all who ask for it


class Store(MemoryBackend):
    """Notes what was called, and opens or closes no earlier than it may."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.log: list[str] = []
        self.may_open = asyncio.Event()
        self.may_open.set()
        self.may_close = asyncio.Event()
        self.may_close.set()

    async def open(self) -> None:
        await self.may_open.wait()
        self.log.append("opened")

    async def aclose(self) -> None:
        await self.may_close.wait()
        self.log.append("closed")


class SlowBody:
    """A body under the lock that cleans up until it is let go."""

    def __init__(self, client: LockClient) -> None:
        self._client = client
        self._holds = asyncio.Event()
        self.cleaning = asyncio.Event()
        self.may_end = asyncio.Event()
        self.task = asyncio.create_task(self._work())

    async def _work(self) -> None:
        with contextlib.suppress(LeaseLostError):
            async with self._client.lock("a", ttl=30):
                self._holds.set()
                try:
                    await asyncio.sleep(3600)
                finally:
                    with anyio.CancelScope(shield=True):
                        self.cleaning.set()
                        await self.may_end.wait()

    async def holds(self) -> None:
        await self._holds.wait()


@contextlib.asynccontextmanager
async def closing_client(**options: object) -> AsyncIterator[tuple[LockClient, Store, SlowBody, asyncio.Task[None]]]:
    """A client whose closing waits for a body."""
    store = memory_on(LoopClock(), Store)
    client = await on_clock(LockClient(store, **options), LoopClock()).__aenter__()
    body = SlowBody(client)
    await body.holds()
    closing = asyncio.create_task(client.aclose())
    await body.cleaning.wait()
    yield client, store, body, closing
    body.may_end.set()
    await asyncio.gather(closing, body.task, return_exceptions=True)
    await client.aclose()


_of_others: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def threads_of_other_tests() -> None:
    """A thread that another test has stopped may still end."""
    _of_others.clear()
    _of_others.update(threading.enumerate())


def ours() -> list[str]:
    """Return the tasks and the threads that the package still runs."""
    tasks = [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("fencing")]
    threads = [thread.name for thread in set(threading.enumerate()) - _of_others if thread.name.startswith("fencing")]
    return tasks + threads


async def nothing_runs() -> None:
    """Wait for the thread that was stopped."""
    for thread in threading.enumerate():
        if thread.name.startswith("fencing"):
            await asyncio.to_thread(thread.join, 5)
    assert ours() == []


@pytest.mark.every_loop
async def test_a_closing_that_is_cancelled_is_finished_first():
    async with closing_client() as (client, store, body, closing):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01) as patience:
                asyncio.get_running_loop().call_later(0.05, body.may_end.set)
                await client.aclose()
        assert patience.expired()
        assert closing.done()
        assert body.task.done()
        assert await holder(store, "a") is None
        assert store.log == ["opened", "closed"]
        assert repr(client).endswith("closed>")
        await nothing_runs()


@pytest.mark.every_loop
async def test_a_closing_in_a_cancelled_scope_is_finished_first_and_burns_no_processor():
    async with closing_client() as (client, store, body, _):
        turns = 0

        def count() -> None:
            nonlocal turns
            turns += 1
            if not body.may_end.is_set():
                asyncio.get_running_loop().call_later(0.01, count)

        with anyio.CancelScope() as scope:
            scope.cancel()
            asyncio.get_running_loop().call_later(0.1, body.may_end.set)
            count()
            await client.aclose()
        assert store.log == ["opened", "closed"]
        assert 1 < turns < 15


@pytest.mark.every_loop
async def test_every_caller_returns_when_the_client_is_closed_and_not_before():
    async with closing_client() as (client, store, body, first):
        second = asyncio.create_task(client.aclose())
        await settle()
        assert not second.done()
        assert await holder(store, "a") is not None
        body.may_end.set()
        await second
        assert await holder(store, "a") is None
        assert store.log == ["opened", "closed"]
        await first


@pytest.mark.every_loop
async def test_opening_again_waits_for_the_closing_and_keeps_its_store():
    async with closing_client() as (client, store, body, closing):
        reopening = [asyncio.create_task(client.__aenter__()) for _ in range(2)]
        await settle()
        assert store.log == ["opened"]
        body.may_end.set()
        opened, refused = await asyncio.gather(*reopening, return_exceptions=True)
        assert opened is client
        assert isinstance(refused, UsageError), "as of a client that is open"
        await closing
        assert store.log == ["opened", "closed", "opened"]
        async with client.lock("a") as lease:
            assert lease.held


@in_virtual_time
async def test_giving_up_to_open_again_leaves_the_closing_alone():
    async with closing_client() as (client, store, body, closing):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await client.__aenter__()
        assert not closing.done()
        body.may_end.set()
        await closing
        assert store.log == ["opened", "closed"]


@in_virtual_time
async def test_a_body_that_joins_the_closing_is_not_waited_for():
    async with TwoClients() as clients:

        async def body(name: str) -> None:
            with contextlib.suppress(LeaseLostError):
                async with clients.ours.lock(name, ttl=TTL):
                    try:
                        await asyncio.sleep(3600)
                    finally:
                        with anyio.CancelScope(shield=True):
                            await asyncio.sleep(1)
                            await clients.ours.aclose()

        bodies = [asyncio.create_task(body(name)) for name in "ab"]
        await asyncio.sleep(1)
        await clients.ours.aclose()
        assert now() == 2.0
        await asyncio.gather(*bodies)
        assert now() == 2.0


@in_virtual_time
async def test_a_closing_whose_task_the_loop_cancels_takes_its_other_steps():
    """As `asyncio.run` does to every task when it is interrupted again."""
    async with closing_client() as (client, store, _, closing):
        [task] = [task for task in asyncio.all_tasks() if task.get_name() == "fencing-closing"]
        task.cancel()
        await closing
        assert store.log == ["opened", "closed"]
        assert ours() == []
        assert repr(client).endswith("closed>")
        assert await holder(store, "a") is not None, "its body still runs: its lock is left to the ttl"


@pytest.mark.every_loop
async def test_an_observer_that_closes_the_client_joins_the_closing():
    closings: list[asyncio.Task[None]] = []

    def close(event: object) -> None:
        if isinstance(event, Lost):
            closings.append(asyncio.create_task(client.aclose()))

    store = Store()
    client = await LockClient(store, observers=[close]).__aenter__()
    handle = await client.lock("a").acquire()
    await client.aclose()
    await asyncio.gather(*closings)
    assert handle.lost_reason is LossReason.CLOSED
    assert len(closings) == 1
    assert store.log == ["opened", "closed"]


# A client that is opening


@in_virtual_time
async def test_a_client_that_is_still_opening_says_so():
    store = memory_on(LoopClock(), Store)
    store.may_open.clear()
    client = on_clock(LockClient(store), LoopClock())
    opening = asyncio.create_task(client.__aenter__())
    await settle()
    with pytest.raises(UsageError, match="still opening"):
        await client.lock("a").acquire()
    store.may_open.set()
    await opening
    async with client.lock("a") as lease:
        assert lease.held
    await client.aclose()


@in_virtual_time
async def test_a_client_that_is_closed_while_it_opens_leaves_nothing_behind():
    store = memory_on(LoopClock(), Store)
    store.may_open.clear()
    client = on_clock(LockClient(store), LoopClock())
    opening = asyncio.create_task(client.__aenter__())
    await settle()
    closing = asyncio.create_task(client.aclose())
    await settle()
    with pytest.raises(UsageError, match="closed while it was opening"):
        await opening
    await closing
    assert store.log == ["closed"]
    assert now() < 1, "closing does not wait for the store"
    assert ours() == []


# A loop that is gone


def left_behind(client: LockClient, *, closing: bool = False) -> list[object]:
    """Leave the client open in a loop that is closed without ending its tasks; return what must not be collected."""
    loop = asyncio.new_event_loop()

    async def body() -> None:
        async with client.lock("body"):
            try:
                await asyncio.sleep(3600)
            finally:
                with anyio.CancelScope(shield=True):
                    await asyncio.sleep(3600)

    async def begin() -> list[object]:
        await client.__aenter__()
        handle = await client.lock("handle").acquire()
        tasks = [asyncio.create_task(body()), asyncio.create_task(handle.wait_lost())]
        await asyncio.sleep(0.01)
        if closing:
            tasks.append(asyncio.create_task(client.aclose()))
            await asyncio.sleep(0.01)
        return [handle, *tasks]

    try:
        return loop.run_until_complete(begin())
    finally:
        loop.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("closing", [False, True], ids=["open", "in the middle of closing"])
async def test_a_client_of_a_loop_that_is_gone_can_be_closed_and_opened_again(closing):
    store, heard = MemoryBackend(), []
    client = LockClient(store, observers=[heard.append])
    kept = await asyncio.to_thread(left_behind, client, closing=closing)
    async with asyncio.timeout(4):
        await client.aclose()
    handle = kept[0]
    assert handle.lost_reason is LossReason.CLOSED
    assert sorted(event.name for event in heard if isinstance(event, Lost)) == ["body", "handle"]
    await nothing_runs()
    assert await holder(store, "handle") is None
    assert await holder(store, "body") is None
    async with client, client.lock("handle") as lease:
        assert lease.held
    for task in kept[1:]:
        task._log_destroy_pending = False


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_a_bell_for_a_loop_that_is_gone_harms_no_other_and_is_taken_down_by_the_closing():
    store = MemoryBackend()
    client = LockClient(store)
    loop = asyncio.new_event_loop()

    async def begin() -> list[object]:
        await client.__aenter__()
        handle = await client.lock("a").acquire()
        waiter = asyncio.create_task(client.lock("a").acquire())
        await asyncio.sleep(0.01)
        return [handle, waiter]

    try:
        handle, waiter = await asyncio.to_thread(loop.run_until_complete, begin())
    finally:
        loop.close()
    assert len(store._bells) == 2
    for bell in store._bells.values():
        for news in (None, Place(34, None, 1), Place(34, None, 2), Gone("ended")):
            bell(news)
    await client.aclose()
    assert handle.lost_reason is LossReason.CLOSED
    assert not store._bells
    assert await store.tickets(["a"]) == [[]]
    waiter._log_destroy_pending = False


# What one loop of one process has opened, neither another loop nor a forked child may use.


@pytest.fixture
def fork(monkeypatch: pytest.MonkeyPatch):
    """Changes of a fork in the child."""
    return lambda: monkeypatch.setattr(os, "getpid", partial(int, os.getpid() + 1))


def test_the_next_loop_does_not_own_it():
    async def make() -> LoopOwner:
        return LoopOwner()

    async def look(owner: LoopOwner) -> tuple[bool, bool]:
        return owner.is_current, owner.in_this_process

    assert asyncio.run(look(asyncio.run(make()))) == (False, True)


async def test_a_child_may_ask_without_a_loop_whether_it_may_close_what_it_inherited(fork):
    owner = LoopOwner()
    fork()
    assert await asyncio.to_thread(lambda: owner.in_this_process) is False


def test_a_fork_is_told_once(fork):
    detector = ForkDetector()
    assert not detector.forked()
    fork()
    assert [detector.forked(), detector.forked()] == [True, False]
