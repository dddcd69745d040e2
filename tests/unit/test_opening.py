"""The opening of a store by a client, and the callers that wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from datetime import timedelta

import pytest
from both_worlds import in_both_worlds
from inside import LoopClock, memory_on, on_clock
from stays import PATIENCE
from virtual_time import in_virtual_time, now, settle

import fencing_sdk.sync
from fencing_sdk import (
    BackendRefusedError,
    BackendUnavailableError,
    ConfigurationError,
    DrainingError,
    LockClient,
    Status,
    UsageError,
    connect,
)
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.errors import AcquireCancelledError
from fencing_sdk.events import NotAcquired, NotAcquiredReason

# A client whose store is away when it is opened: the wait for a lock is a wait for the store, too.


class Away(MemoryBackend):
    """A store that is away for so many tries, or whose tries take so long, or that refuses."""

    def __init__(self, tries: float = math.inf, *, takes: float = 0.0, refuses: bool = False, **options) -> None:
        super().__init__(**options)
        self.tries, self.takes, self.refuses = tries, takes, refuses
        self.opened: list[float] = []
        """When it was asked to open."""
        self.asked = 0
        """Number of requests for a lock that came."""

    async def open(self) -> None:
        self.opened.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.takes)
        if self.refuses:
            raise BackendRefusedError("Away", "open", "wrong user or password")
        if len(self.opened) <= self.tries:
            raise BackendUnavailableError("Away", "open", "no connection")

    async def draw(self, claim, **options):
        self.asked += 1
        return await super().draw(claim, **options)


def client(store: Away, **options) -> LockClient:
    return on_clock(LockClient(store, **options), LoopClock())


def away(tries: float = math.inf, **options) -> Away:
    return memory_on(LoopClock(), Away, tries=tries, **options)


def others() -> list[str]:
    """The tasks beside this one and the heartbeat."""
    named = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    return [name for name in named if name != "fencing-heartbeat"]


@contextlib.asynccontextmanager
async def waiting(locks: LockClient, **options):
    """A task that waits for a lock while the store is away."""
    task = asyncio.create_task(locks.lock("a", **options).acquire())
    await asyncio.sleep(7)
    assert not task.done()
    yield task
    assert task.done()
    assert others() == []


# Tasks


@in_virtual_time
async def test_the_wait_for_a_lock_outlasts_an_absence_of_the_store_longer_than_its_ttl():
    store = away(takes=1)
    async with client(store, open_wait=None) as locks:
        assert store.opened == []
        async with waiting(locks, ttl=3, wait=300) as task:
            await asyncio.sleep(60)
            store.tries = 0
            lease = await task
            assert lease.held
        assert 67 < now() < 70
        assert store.asked == 1


@in_virtual_time
async def test_at_the_end_of_the_wait_the_store_is_what_was_waited_for():
    events = []
    async with client(away(), open_wait=None, observers=[events.append]) as locks:
        with pytest.raises(BackendUnavailableError) as over:
            await locks.lock("a", ttl=3, wait=300).acquire()
        assert now() == over.value.waited == 300
        assert str(over.value) == "Away: open failed: no connection; waited 300 s"
    assert [event.reason for event in events if isinstance(event, NotAcquired)] == [NotAcquiredReason.UNAVAILABLE]


@in_virtual_time
async def test_without_a_limit_a_store_is_waited_for_one_ttl():
    async with client(away(), open_wait=None) as locks:
        with pytest.raises(BackendUnavailableError) as over:
            await locks.lock("a", ttl=20).acquire()
        assert 20 <= now() == over.value.waited < 22


@in_virtual_time
async def test_asked_once_it_asks_once():
    store = away()
    async with client(store, open_wait=None) as locks:
        for ask in (locks.lock("a", wait=0).acquire, locks.lock("a").try_acquire, lambda: locks.inspect("a")):
            with pytest.raises(BackendUnavailableError) as refused:
                await ask()
            assert refused.value.waited is None
            assert str(refused.value) == "Away: open failed: no connection"
    assert len(store.opened) == 3
    assert now() == 0


@in_virtual_time
async def test_a_refusal_is_raised_at_once():
    async with client(away(refuses=True), open_wait=None) as locks:
        with pytest.raises(BackendRefusedError):
            await locks.lock("a", wait=300).acquire()
    with pytest.raises(BackendRefusedError):
        await client(away(refuses=True), open_wait=300).__aenter__()
    assert now() == 0


@in_virtual_time
async def test_those_who_wait_share_one_connection_attempt_and_raise_errors_of_their_own():
    store = away(takes=1)
    async with client(store, open_wait=None) as locks:
        waits = [locks.lock(f"n{number}", wait=wait).acquire() for number, wait in enumerate([2, 2, 60, 60])]
        tasks = [asyncio.create_task(wait) for wait in waits]
        await asyncio.sleep(10)
        short, other = [task.exception() for task in tasks[:2]]
        assert isinstance(short, BackendUnavailableError)
        assert isinstance(other, BackendUnavailableError)
        assert short is not other
        assert len(store.opened) <= 10
        store.tries = 0
        assert [(await task).held for task in tasks[2:]] == [True, True]


@in_virtual_time
async def test_a_store_that_hangs_is_left_after_five_seconds_of_each_try():
    store = away(takes=3600)
    async with client(store, open_wait=None) as locks:
        async with waiting(locks, wait=12) as task:
            with pytest.raises(BackendUnavailableError, match="no answer within 5 s"):
                await task
        assert 12 <= now() < 18


@in_virtual_time
async def test_a_wait_that_is_drained_ends_as_every_wait():
    async with client(away(), open_wait=None) as locks:
        async with waiting(locks, wait=60) as task:
            assert await locks.drain(within=5)
            with pytest.raises(DrainingError) as drained:
                await task
            assert drained.value.waited == 7


@pytest.mark.parametrize("takes", [0, 3600], ids=["between two tries", "in the middle of one"])
@in_virtual_time
async def test_closing_ends_the_wait_at_once(takes):
    locks = client(away(takes=takes), open_wait=None)
    async with locks:
        async with waiting(locks, wait=60) as task:
            await locks.aclose()
            with pytest.raises(UsageError, match="was closed while it waited for lock 'a'"):
                await task
    assert now() < 7.1


# Opening alone


@in_virtual_time
async def test_opening_waits_for_the_store_as_long_as_it_was_told():
    store = away(takes=1)
    opening = asyncio.create_task(client(store, open_wait=timedelta(minutes=1)).__aenter__())
    await asyncio.sleep(30)
    store.tries = 0
    async with asyncio.timeout(3):
        locks = await opening
    assert locks.status().open
    await locks.aclose()


@in_virtual_time
async def test_opening_raises_the_last_error_at_the_end_of_its_wait_and_closes_the_client():
    locks = client(away(), open_wait=60)
    with pytest.raises(BackendUnavailableError, match="no connection; waited 60 s") as over:
        await locks.__aenter__()
    assert over.value.waited == now() == 60
    assert locks.status() == Status(open=False)
    assert others() == []


@pytest.mark.parametrize("end", ["cancelled", "closed"])
@in_virtual_time
async def test_opening_that_waits_is_ended(end):
    locks = client(away(), open_wait=60)
    opening = asyncio.create_task(locks.__aenter__())
    await asyncio.sleep(7)
    with pytest.raises(UsageError, match="still opening"):
        await locks.lock("a").acquire()
    if end == "cancelled":
        opening.cancel()
    else:
        await locks.aclose()
    await asyncio.wait((opening,))
    assert opening.cancelled() if end == "cancelled" else isinstance(opening.exception(), UsageError)
    assert now() < 7.1
    await settle()
    assert others() == []


@pytest.mark.parametrize("wait", [-1, "5", True, math.inf])
@pytest.mark.parametrize("make", [connect, fencing_sdk.sync.connect])
def test_a_wait_that_is_no_time_is_refused_when_the_client_is_made(make, wait):
    with pytest.raises(ConfigurationError, match=r"^open_wait must be"):
        make("memory://", open_wait=wait)


# Both worlds: what a lock is for waits for the store


class AwayTwice(Away):
    def __init__(self) -> None:
        super().__init__(2, tokens="counter")


@in_both_worlds(on=AwayTwice, open_wait=None)
async def test_a_lock(locks):
    async with locks.lock("a", wait=PATIENCE) as lease:
        assert lease.held


@in_both_worlds(on=AwayTwice, open_wait=None)
async def test_a_plain_handle(locks):
    lease = await locks.lock("a").acquire()
    assert lease.held
    await lease.release()


@in_both_worlds(on=AwayTwice, open_wait=None)
async def test_an_election(locks):
    async for term in locks.election("a"):
        async with term as lease:
            assert lease.held
        break


@in_both_worlds(on=AwayTwice, open_wait=PATIENCE)
async def test_a_job_asks_once_for_its_lock_and_opens_the_client_as_patiently_as_the_client_is(locks):
    @locks.job("a", at_least_for=0.01)
    async def work():
        return 34

    assert (await work()).value == 34


def test_a_job_of_a_client_without_patience_asks_once_and_does_not_run():
    store = Away()
    locks = fencing_sdk.sync.connect(store)
    with pytest.raises(BackendUnavailableError):
        locks.job("a", at_least_for=1)(lambda: None)()
    assert len(store.opened) == 1
    locks.close()


# Threads: no `with` opens the client


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fencing-sync"]


class Watched(Away):
    """Notes that it was asked to open twice, so that a caller waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_for = threading.Event()

    async def open(self) -> None:
        if len(self.opened) > 1:
            self.waited_for.set()
        await super().open()


@pytest.fixture
def watched():
    return Watched()


def taking(locks, **options):
    """A thread that waits for a lock while the store is away, and what it got."""
    got = []

    def take() -> None:
        try:
            got.append(locks.lock("a", **options).acquire())
        except Exception as error:
            got.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    assert locks._client._backend.waited_for.wait(PATIENCE)
    return thread, got


def test_an_event_ends_the_wait_of_a_thread_for_the_store(watched):
    stop, locks = threading.Event(), fencing_sdk.sync.connect(watched)
    thread, got = taking(locks, cancel=stop, wait=3600)
    stop.set()
    thread.join(PATIENCE)
    assert isinstance(got[0], AcquireCancelledError)
    locks.close()
    assert watched.asked == 0


@pytest.mark.parametrize(("end", "error"), [("drain", DrainingError), ("close", UsageError)])
def test_draining_and_closing_end_the_wait_of_a_thread_for_the_store(watched, end, error):
    before, locks = threads(), fencing_sdk.sync.connect(watched)
    thread, got = taking(locks, wait=3600)
    locks.drain(within=5) if end == "drain" else locks.close()
    thread.join(PATIENCE)
    assert isinstance(got[0], error)
    locks.close()
    assert threads() == before
    assert watched.asked == 0


def test_a_with_that_cannot_open_the_client_leaves_no_thread_behind():
    before = threads()
    with (
        pytest.raises(BackendUnavailableError, match=r"waited \d+(\.\d+)? s"),
        fencing_sdk.sync.connect(Away(), open_wait=0.1),
    ):
        pass
    assert threads() == before
