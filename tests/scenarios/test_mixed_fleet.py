"""Clients of old libraries, clients that hold an old lock beside ours, and clients of ours alone, on real stores."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
import redis.asyncio
import sqlalchemy
import sqlalchemy.event
from both_worlds import Waiting, at_once, bare, comes, in_the_loop
from both_worlds import beside as meanwhile
from event_log import ENDED_BY_TIME, Log
from looking import holder
from old_locks_stage import STAGES, OnShedLock
from patience import until, wait_until
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from stays import eventually
from zookeeper_server import fresh_root

import fencing_sdk.sync
from fencing_sdk import (
    AcquireTimeoutError,
    BackendUnavailableError,
    ConfigurationError,
    DrainingError,
    LeaseLostError,
    LockHeldError,
    LossReason,
    UsageError,
    connect,
)
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.errors import AcquireCancelledError
from fencing_sdk.events import Lost, Renewed
from fencing_sdk.recipes import KazooLock, PythonRedisLock, RedisPyLock, ShedLockRow, Skipped, beside

pytest_plugins = ["redis_fixtures", "postgresql_fixtures", "zookeeper_fixtures"]
# A connection of an old client that is cancelled while it opens is left to the collector. Ours are in memory here.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PATIENCE = 60.0


@pytest.fixture(params=STAGES)
def kind(request):
    return request.param


@pytest.fixture
def stage(kind, request, tmp_path, redis_server):
    """A store of the old lock, with a real client of it."""
    if kind == "kazoo":
        address = f"{request.getfixturevalue('zookeeper_server').address}{fresh_root()}"
    elif kind == "shedlock":
        address = request.getfixturevalue("postgresql_server").url
    elif kind == "shedlock-sqlite":
        address = f"sqlite:///{tmp_path}/jobs.db"
    else:
        address = redis_server.url
    made = STAGES[kind](address)
    yield made
    made.close()


@pytest.fixture(params=["tasks", "threads"])
def world(request):
    return request.param


@pytest.fixture
def run(world):
    """Play a scenario in one of the two worlds: it takes a client, and that world's `beside`."""

    async def with_tasks(scenario, backend, options):
        async with connect(backend, **options) as locks:
            await scenario(locks, beside)

    def played(scenario, backend=None, **options):
        backend = backend or MemoryBackend()
        if world == "tasks":
            asyncio.run(with_tasks(scenario, backend, options))
        else:
            with fencing_sdk.sync.connect(backend, **options) as locks:

                def both(lock, old):
                    return Waiting(fencing_sdk.sync.beside(bare(lock), old))

                at_once(scenario(Waiting(locks), both))

    return played


@pytest.fixture
def play(run, world, stage):
    """Do the same with an old lock of the stage, of which the scenario gives the name."""

    def played(scenario, **options):
        async def on_stage(locks, both):
            old = stage.for_tasks if world == "tasks" else stage.for_threads
            await scenario(locks, lambda lock, name: both(lock, old(name)))
            if world == "tasks":
                await locks.aclose()
                await stage.aclose()

        run(on_stage, **options)

    played.world = world
    return played


async def gets_it_in_the_old_way(stage, name="report"):
    """Whether an old client that asks once gets the lock: in a thread, as the loop may be inside the store."""

    def ask():
        with stage.old(name, wait=0) as old:
            return old

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return ask()
    return await asyncio.to_thread(ask)


async def pause(seconds):
    """Sleep in a task, or in a thread that has no loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        time.sleep(seconds)  # noqa: ASYNC251
    else:
        await asyncio.sleep(seconds)


# What one holder sees.


@pytest.mark.slow
def test_old_clients_wait_for_a_holder_of_both_and_it_waits_for_them(play, stage):
    async def scenario(locks, both):
        async with both(locks.lock("report", ttl=3, safety_buffer=0.3), "report") as lease:
            await pause(5)  # beyond what either lock is kept for without renewals
            assert not await gets_it_in_the_old_way(stage)
            assert lease.token == (await locks.inspect("report")).token
        lock = both(locks.lock("report", ttl=stage.ttl, wait=0.3), "report")
        with stage.old("report", wait=0) as old:
            assert old
            with pytest.raises(AcquireTimeoutError):
                await lock.acquire()
            with pytest.raises(LockHeldError):
                await lock.acquire(wait=0)
            assert await lock.try_acquire() is None
            await soon(lambda: is_released(locks))
        async with lock:
            assert stage.held("report")
        await soon(lambda: not_held(stage))

    play(scenario)


@pytest.mark.slow
def test_a_lost_old_lock_ends_the_lease(play, stage):
    log = Log()

    async def scenario(locks, both):
        lock = both(locks.lock("report", ttl=min(6.0, stage.ttl), safety_buffer=0.6), "report")
        with pytest.raises(LeaseLostError, match="beside it was lost") as caught:
            async with lock as lease:
                stage.delete("report")
                if play.world == "tasks":
                    await asyncio.sleep(PATIENCE)
                else:
                    assert lease.thing.wait_lost(PATIENCE) is LossReason.TAKEN_OVER
        assert caught.value.reason is LossReason.TAKEN_OVER
        with pytest.raises(LeaseLostError):
            _ = lease.token
        await soon(lambda: is_released(locks), within=4)

    began = time.monotonic()
    play(scenario, observers=[log])
    assert time.monotonic() - began < PATIENCE / 2
    assert [event.reason for event in log.of(Lost)] == [LossReason.TAKEN_OVER]


def test_a_holder_that_releases_wakes_the_old_clients(play, stage):
    """The old client would sleep for a minute, as long as it believes that the lock is held."""
    waited = []

    def wait_in_the_old_way():
        with stage.old("report") as held:
            waited.append(held)

    async def scenario(locks, both):
        other = threading.Thread(target=wait_in_the_old_way)
        async with both(locks.lock("report", ttl=stage.ttl), "report"):
            other.start()
            await pause(0.3)
            assert not waited
        began = time.monotonic()
        other.join(PATIENCE)
        assert time.monotonic() - began < 10
        assert waited == [True]

    play(scenario)


def test_a_wait_that_is_given_up_leaves_nothing_behind(stage):
    async def scenario():
        async with connect(MemoryBackend()) as locks:
            lock = beside(locks.lock("report", ttl=stage.ttl), stage.for_tasks("report"))
            with stage.old("report"):
                waiting = asyncio.create_task(lock.acquire())
                await eventually(lambda: locks.inspect("report"), what="ours is held")
                await asyncio.sleep(0.2)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                await soon(lambda: is_released(locks))
            await soon(lambda: not_held(stage))
        await stage.aclose()

    asyncio.run(scenario())


# How a wait for the old lock ends.


class Taken:
    """A lock that an old client has for ever."""

    async def take(self, owner, ttl):
        return False

    async def renew(self, owner, ttl):
        return False

    async def release(self, owner):
        pass


class Silent(Taken):
    """A lock whose store does not answer."""

    async def take(self, owner, ttl):
        await asyncio.Event().wait()


@pytest.mark.parametrize("within", [0, PATIENCE])
@pytest.mark.parametrize("old", [Taken, Silent])
def test_a_drain_ends_the_wait_for_an_old_lock(run, old, within):
    async def scenario(locks, both):
        acquiring = meanwhile(both(locks.lock("report", ttl=20), old()).acquire)
        await comes(lambda: locks.inspect("report"))
        began = time.monotonic()
        await locks.drain(within=within)
        with pytest.raises(DrainingError, match="is draining"):
            await acquiring()
        assert time.monotonic() - began < 15, "an answer of the old store is not waited for"
        await soon(lambda: is_released(locks))

    run(scenario)


def test_a_body_may_wait_for_an_old_lock_while_its_client_drains(run):
    """Until the bound, as for any lock."""

    async def scenario(locks, both):
        async def nested():
            async with locks.lock("outer"):
                await both(locks.lock("report", ttl=20), Taken()).acquire()

        body = meanwhile(nested)
        await comes(lambda: locks.inspect("report"))
        began = time.monotonic()
        assert not await locks.drain(within=0.6)
        assert time.monotonic() - began >= 0.6
        with pytest.raises((DrainingError, LeaseLostError)):
            await body()

    run(scenario)


@pytest.mark.parametrize("old", [Taken, Silent])
def test_closing_ends_the_wait_for_an_old_lock(run, old):
    async def scenario(locks, both):
        acquiring = meanwhile(both(locks.lock("report", ttl=20), old()).acquire)
        await comes(lambda: locks.inspect("report"))
        await (locks.close() if isinstance(locks, Waiting) else locks.aclose())
        with pytest.raises(UsageError, match="the client was closed while it waited for lock 'report'"):
            await acquiring()

    run(scenario, backend := MemoryBackend())
    assert asyncio.run(is_free(backend))


async def is_free(backend):
    async with connect(backend) as locks:
        return await is_released(locks)


async def is_released(locks):
    return await locks.inspect("report") is None


async def not_held(stage, name="report"):
    return not stage.held(name)


async def soon(ask, within=10.0):
    """Wait for what a release does in the background, and see that no ttl did it."""
    began = time.monotonic()
    await comes(ask)
    assert time.monotonic() - began < within


@pytest.mark.parametrize("kind", ["redis-py"], indirect=True)
def test_max_hold_counts_from_the_moment_at_which_both_are_held(play, stage):
    async def scenario(locks, both):
        lock = both(locks.lock("report", ttl=20, max_hold=0.5), "report")
        with stage.old("report"):
            acquiring = meanwhile(lock.acquire)
            await comes(lambda: locks.inspect("report"))
            await pause(0.7)
            freed = time.monotonic()
        lease = await acquiring()
        assert await lease.wait_lost() in {LossReason.EXPIRED, LossReason.STALLED}  # the latter on a busy machine
        assert time.monotonic() - freed >= 0.49
        await comes(lambda: gets_it_in_the_old_way(stage))
        await comes(lambda: is_released(locks))  # after the old lock

    play(scenario)


# The old lock outlives our lease.


@pytest.mark.parametrize("kind", ["redis-py"], indirect=True)
def test_the_old_lock_outlives_the_lease_of_a_loop_that_stood_still(stage):
    async def scenario():
        async with connect(MemoryBackend()) as locks:
            lock = beside(locks.lock("report", ttl=8.0, safety_buffer=5.5), stage.for_tasks("report"))
            with pytest.raises(LeaseLostError) as caught:
                async with lock as lease:
                    deadline = lease._state.deadline
                    while lease._state.clock.now() < deadline:
                        time.sleep(0.01)  # noqa: ASYNC251
                    with pytest.raises(LeaseLostError):
                        _ = lease.token
                    with stage.old("report", wait=0) as old:
                        assert not old
                    await asyncio.sleep(PATIENCE)
            assert caught.value.reason is LossReason.STALLED
        await stage.aclose()

    asyncio.run(scenario())


@pytest.fixture
def silent(start_redis):
    """A Redis of this test alone, which may be stopped."""
    return start_redis()


async def test_the_lease_ends_before_an_old_lock_that_nobody_can_renew(silent):
    """The store of ours answers all the time."""
    mine = redis.asyncio.Redis.from_url(silent.url)
    times = {"ttl": 6.0, "safety_buffer": 3.0, "heartbeat_interval": 0.3}
    async with connect(MemoryBackend()) as locks:
        lock = beside(locks.lock("report", **times), RedisPyLock(mine, "report"))
        with pytest.raises(LeaseLostError) as caught:
            async with lock as lease:
                state = lease._state
                silent.pause()
                try:
                    await asyncio.sleep(PATIENCE)
                finally:
                    body_ended = state.clock.now()
                    expected = state.covered_until
                    silent.resume()
        assert caught.value.reason in ENDED_BY_TIME
        if caught.value.reason is LossReason.EXPIRED:
            assert "the old lock beside it was not renewed in time" in str(caught.value)
        assert expected - 0.001 <= body_ended < expected + times["safety_buffer"]
    await mine.aclose()


async def test_an_old_store_that_is_silent_for_a_moment_costs_nothing(silent):
    mine = redis.asyncio.Redis.from_url(silent.url)
    log, times = Log(), {"ttl": 8, "safety_buffer": 1.2, "heartbeat_interval": 2.2}
    async with connect(MemoryBackend(), observers=[log]) as locks:
        async with beside(locks.lock("report", **times), RedisPyLock(mine, "report")) as lease:
            state = lease._state
            silent.pause()
            await until(lambda: state.deadline == state.covered_until, what="the silence bounds the deadline")
            before = len(log.of(Renewed))
            await until(lambda: state.deadline - state.clock.now() < state.timing.heartbeat_interval)
            assert len(log.of(Renewed)) >= before + 3, "the next beat at the usual pace may come too late"
            silent.resume()
            before = state.deadline
            await until(lambda: state.deadline > before + 1 or not lease.held, what="the deadline moves on")
            _ = lease.token
    await mine.aclose()


# What is asked for and not answered.


@pytest.mark.parametrize("fault", ["blackhole", "half_open"])
async def test_a_question_without_an_answer_leaves_nothing_behind(fault, redis_server, proxy):
    """The old lock is asked through the proxy, and is granted: before the caller gives up, or when it has done so."""
    far = redis.asyncio.Redis.from_url(proxy.url, socket_timeout=None)
    with redis.Redis.from_url(redis_server.url) as here:
        here.config_resetstat()
        async with connect(MemoryBackend()) as locks:
            await far.ping()
            getattr(proxy, fault)()
            asked = proxy.saw(of="NX")
            lock = beside(locks.lock("report", ttl=60, safety_buffer=57), RedisPyLock(far, "report"))
            with pytest.raises(BackendUnavailableError, match="RedisPyLock: take failed: no answer"):
                await lock.acquire()
            assert asked.done()
            assert here.exists("report") == (fault == "half_open")
            await soon(lambda: is_released(locks))
            proxy.heal()
            await until(lambda: "cmdstat_del" in here.info("commandstats"), what="it is released")
            assert not here.exists("report")
    await far.aclose()


async def test_a_request_that_the_driver_repeats_finds_its_own_grant(redis_server, proxy):
    """The first reply is lost, and redis-py sends the request again: the lock is held already, by this very owner."""
    far = redis.asyncio.Redis.from_url(proxy.url, retry=Retry(NoBackoff(), 2))
    async with connect(MemoryBackend()) as locks:
        await far.ping()
        lost = proxy.lose_replies(1, of="NX")
        async with beside(locks.lock("report", ttl=30, wait=5), RedisPyLock(far, "report")):
            assert lost.done()
    await far.aclose()


async def test_what_the_old_client_raises_leaves_as_it_is(redis_server):
    with redis.Redis.from_url(redis_server.url) as here:
        here.rpush("report", "no lock")
    mine = redis.asyncio.Redis.from_url(redis_server.url)
    async with connect(MemoryBackend()) as locks:
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            await beside(locks.lock("report", ttl=2), RedisPyLock(mine, "report")).acquire()
        assert await locks.inspect("report") is None
    await mine.aclose()


async def test_one_wait_is_for_both(redis_server):
    mine, loop = redis.asyncio.Redis.from_url(redis_server.url), asyncio.get_running_loop()
    async with connect(MemoryBackend()) as locks:
        first = await locks.lock("report", ttl=30).acquire()
        async with mine.lock("report", timeout=60):
            loop.call_later(2.5, lambda: waits.append(asyncio.ensure_future(first.release())))
            waits, began = [], loop.time()
            with pytest.raises(AcquireTimeoutError) as caught:
                await beside(locks.lock("report", ttl=30, wait=3.0), RedisPyLock(mine, "report")).acquire()
            assert 3.0 <= caught.value.waited < 5.4
            assert loop.time() - began < 5.4, "a second wait would end after 5.5 s"
    await mine.aclose()


# What is particular to one kind.


@pytest.mark.parametrize("kind", ["shedlock", "shedlock-sqlite"], indirect=True)
@pytest.mark.parametrize("world", ["tasks", "threads"])
def test_a_job_of_shedlock_is_kept_for_as_long_as_its_old_ones_are(stage, world):
    """So is ours: else a client of ours alone would run the job of one tick twice."""
    assert isinstance(stage, OnShedLock)

    async def run():
        engine = async_engine_of(stage) if world == "tasks" else stage.engine
        row = ShedLockRow(engine, "nightly", at_least_for=4.0)
        async with connect(MemoryBackend()) as locks:

            @locks.job("nightly", at_least_for=1)
            async def nightly():
                return "ran"

            began = time.monotonic()
            async with beside(locks.lock("nightly", wait=0), row):
                pass
            assert isinstance(await nightly(), Skipped)
            assert not await gets_it_in_the_old_way(stage, "nightly")
            with stage.old("nightly", wait=PATIENCE) as old:
                assert old
            assert time.monotonic() - began >= 4.0
        await stage.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["shedlock", "shedlock-sqlite"], indirect=True)
def test_an_acquisition_that_is_given_up_keeps_no_row_of_shedlock(run, world, stage):
    """Its row is granted when the caller waits no more, so nothing was done under it."""
    asked, given_up, cancel = threading.Event(), threading.Event(), threading.Event()

    @sqlalchemy.event.listens_for(stage.engine, "commit")
    def hold_up(_):
        asked.set()
        assert given_up.wait(PATIENCE)

    async def scenario(locks, both):
        lock = locks.lock("report", ttl=20, **({"cancel": cancel} if world == "threads" else {}))
        lock = both(lock, ShedLockRow(stage.engine, "report", at_least_for=PATIENCE))
        if world == "tasks":
            acquiring = asyncio.create_task(lock.acquire())
            assert await asyncio.to_thread(asked.wait, PATIENCE)
            acquiring.cancel()
            asyncio.get_running_loop().call_later(0.1, given_up.set)
            with pytest.raises(asyncio.CancelledError):
                await acquiring
        else:
            acquiring = meanwhile(lock.acquire)
            assert asked.wait(PATIENCE)
            cancel.set()
            with pytest.raises(AcquireCancelledError):
                await acquiring()
            given_up.set()
        await soon(lambda: gets_it_in_the_old_way(stage))

    run(scenario)
    with stage.old("report", wait=0) as held:  # the row is there: old processes believe that for ever
        assert held
        assert stage.held("report")


def async_engine_of(stage):
    stage.for_tasks("nightly")
    return stage.async_engine


@pytest.mark.parametrize("kind", ["kazoo"], indirect=True)
def test_a_holder_of_both_stands_in_the_line_of_kazoo(stage):
    """One that only asked would never be served while old clients stand there."""
    order = []

    def stand(who):
        with stage.old("report"):
            order.append(who)

    with fencing_sdk.sync.connect(MemoryBackend()) as locks, ThreadPoolExecutor(3) as pool:
        lock = fencing_sdk.sync.beside(locks.lock("report", ttl=3), stage.for_threads("report"))

        def stand_with_both():
            with lock:
                order.append("both")

        def standing(number):
            wait_until(lambda: len(stage.client.get_children(f"/{stage.root}/report")) == number)

        with stage.old("report"):
            ends = []
            for number, enter in enumerate([lambda: stand("first"), stand_with_both, lambda: stand("last")], 2):
                ends.append(pool.submit(enter))
                standing(number)
        for end in ends:
            end.result(PATIENCE)
    assert order == ["first", "both", "last"]


@pytest.mark.parametrize("kind", ["kazoo"], indirect=True)
def test_a_session_that_is_too_short_for_the_ttl_is_refused(stage):
    with fencing_sdk.sync.connect(MemoryBackend()) as locks:
        lock = fencing_sdk.sync.beside(locks.lock("report", ttl=15), stage.for_threads("report"))
        with pytest.raises(ConfigurationError, match=r"make the ttl of our lock at most 3.33"):
            lock.acquire()


class Hanging:
    """A lock of one's own whose functions are plain, and return when they may."""

    def __init__(self):
        self.hanging, self.may_go_on = [], threading.Event()

    def take(self, owner, ttl):
        self.hanging.append(threading.current_thread())
        return self.may_go_on.wait(PATIENCE)

    def renew(self, owner, ttl):
        return True

    def release(self, owner):
        pass


def test_plain_functions_that_hang_hold_up_nothing_else(run):
    """There are more of them than threads for old locks, and than threads of the event loop."""
    old, many = Hanging(), 40

    async def scenario(locks, both):
        acquiring = [meanwhile(both(locks.lock(f"report/{n}", ttl=100), old).acquire) for n in range(many)]
        try:
            await comes(lambda: hangs(32))
            assert await in_the_loop(locks, lambda: asyncio.wait_for(asyncio.to_thread(int), 10)) == 0
            assert len(old.hanging) == 32
        finally:
            old.may_go_on.set()
        for acquired in acquiring:
            await (await acquired()).release()

    async def hangs(number):
        return len(old.hanging) >= number

    run(scenario)
    assert len(old.hanging) == many
    assert len(set(old.hanging)) <= 32


class Shelf:
    """An old lock in this process: who has it until when, and what its owner may find out meanwhile."""

    def __init__(self):
        self.owner, self.until, self.errors, self.releasing = None, 0.0, 0, None

    @property
    def taken(self):
        return self.owner is not None and time.monotonic() < self.until

    async def take(self, owner, ttl):
        if self.taken and self.owner != owner:
            return False
        self.owner, self.until = owner, time.monotonic() + ttl
        return True

    async def renew(self, owner, ttl):
        return self.owner == owner and await self.take(owner, ttl)

    async def release(self, owner):
        if self.errors:
            self.errors -= 1
            raise ConnectionError
        if self.owner == owner:
            self.owner = None
            if self.releasing is not None:  # the answer is on its way for so long
                await self.releasing()


@pytest.mark.parametrize("operation", ["take", "renew"])
@pytest.mark.parametrize("answer", [(0,), "0", 1, None])
def test_an_answer_that_is_no_bool_is_no_grant(run, operation, answer):
    """Such as a row of GET_LOCK, which is true whatever it holds."""
    old = Shelf()

    async def scenario(locks, both):
        async def answering(*_):
            return answer

        setattr(old, operation, answering)
        if operation == "take":
            with pytest.raises(
                UsageError, match=r"Shelf\.take\(\) must return True or False, not " + re.escape(repr(answer))
            ):
                await both(locks.lock("report", wait=0), old).acquire()
        else:
            with pytest.raises(LeaseLostError) as lost:
                async with both(locks.lock("report", ttl=1.0, max_hold=5.0), old) as lease:
                    await lease.wait_lost()
            assert "max_hold" not in str(lost.value)
        await soon(lambda: is_released(locks))

    run(scenario)
    assert not old.taken


@pytest.mark.parametrize("releases", [1, 2])
async def test_the_lease_ends_before_the_old_lock_and_ours_is_released_after_it(releases):
    old, seen = Shelf(), []

    async def releasing():
        seen.append((lease.held, await locks.inspect("report") is not None))
        await asyncio.sleep(0.2)
        seen.append((lease.held, await locks.inspect("report") is not None))

    async with connect(MemoryBackend()) as locks:
        lease = await beside(locks.lock("report"), old).acquire()
        old.releasing = releasing
        await asyncio.gather(*(lease.release() for _ in range(releases)))
        assert seen == [(False, True), (False, True)]
        assert await locks.inspect("report") is None


@pytest.mark.parametrize("begun", [False, True])
async def test_a_keeper_that_is_cancelled_ends_the_lease_and_the_old_lock_covers_its_body(begun):
    old = Shelf()
    async with connect(MemoryBackend()) as locks:
        with pytest.raises(LeaseLostError) as lost:
            async with beside(locks.lock("report"), old) as lease:
                await asyncio.sleep(0.1 if begun else 0)
                for task in asyncio.all_tasks():
                    if task.get_name() == "fencing-old-lock":
                        task.cancel()
                try:
                    await asyncio.sleep(PATIENCE)
                finally:
                    assert not lease.held
                    assert old.taken, "no client of the old lock is inside with this body"
        assert lost.value.reason is LossReason.CLOSED
        await eventually(lambda: not_taken(old), what="the old lock is released")


@pytest.mark.parametrize("end", ["release", "drop", "max_hold", "drain", "close"])
def test_ours_is_released_after_the_old_lock_however_the_lease_ends(run, end):
    old, backend, seen = Shelf(), MemoryBackend(), []

    async def releasing():
        for _ in range(2):
            seen.append(await holder(backend, "report") is not None)
            await asyncio.sleep(0.2)

    async def scenario(locks, both):
        options = {"max_hold": 0.3} if end == "max_hold" else {}
        lease = await both(locks.lock("report", ttl=4, **options), old).acquire()
        old.releasing = releasing
        if end == "release":
            await lease.release()
        elif end == "drain":
            await locks.drain(within=0)
        elif end == "close":
            await (locks.close() if isinstance(locks, Waiting) else locks.aclose())
        elif end == "drop":
            with pytest.warns(ResourceWarning, match="dropped without release"):
                del lease
        if end in {"drop", "max_hold"}:
            await comes(lambda: is_released(locks))
        seen.append("end")

    run(scenario, backend)
    assert seen == [True, True, "end"] if end != "drain" else [each for each in seen if each != "end"] == [True, True]
    assert not old.taken
    assert asyncio.run(is_free(backend))


async def not_taken(old):
    return not old.taken


async def test_a_driver_that_cancels_itself_is_no_end_of_the_old_lock():
    class Cancelled(Shelf):
        async def renew(self, owner, ttl):
            raise asyncio.CancelledError

    old = Cancelled()
    async with connect(MemoryBackend()) as locks:
        with pytest.raises(LeaseLostError) as lost:
            async with beside(locks.lock("report", ttl=4.0, safety_buffer=3.0), old) as lease:
                try:
                    await lease.wait_lost()
                finally:
                    assert old.taken
        assert lost.value.reason in ENDED_BY_TIME


async def test_a_store_that_is_away_for_a_moment_gets_its_release():
    old = Shelf()
    async with connect(MemoryBackend()) as locks:
        async with beside(locks.lock("report"), old):
            old.errors = 5
        await eventually(lambda: not_taken(old), what="the old lock is released")
    assert old.errors == 0


def test_a_waiter_of_python_redis_lock_is_woken_although_the_lock_has_expired(redis_server):
    with redis.Redis.from_url(redis_server.url) as here:
        asyncio.run(PythonRedisLock(here, "report").release("fencing-1"))
        assert here.llen("lock-signal:report") == 1
        here.set("lock:report", "another owner")
        here.delete("lock-signal:report")
        asyncio.run(PythonRedisLock(here, "report").release("fencing-1"))
        assert here.exists("lock:report", "lock-signal:report") == 1


@pytest.mark.parametrize("connected", [connect, fencing_sdk.sync.connect])
def test_other_things_are_refused(connected):
    locks = connected(MemoryBackend())
    function = beside if connected is connect else fencing_sdk.sync.beside
    old = Taken()
    lock = locks.lock("a")
    for wrong in (locks.semaphore("a", permits=2), locks.rwlock("a").reader, "a", function(lock, old)):
        with pytest.raises(ConfigurationError, match="takes a lock of"):
            function(wrong, old)
    for wrong in (Taken, "report", None):
        with pytest.raises(ConfigurationError, match="take, renew and release"):
            function(lock, wrong)


def test_old_locks_refuse_what_is_no_client():
    for make in (RedisPyLock, KazooLock, ShedLockRow):
        with pytest.raises(ConfigurationError, match="takes a"):
            make("redis://localhost", "report")
    with pytest.raises(ConfigurationError, match="table must be the name of a table"):
        ShedLockRow(type("Engine", (), {"begin": print})(), "nightly", table="shedlock; DROP TABLE x")


def test_old_clients_and_ours_alone_do_not_exclude_each_other(stage):
    """The control: why no import swap is safe."""
    with fencing_sdk.sync.connect(MemoryBackend()) as locks, locks.lock("report"), stage.old("report", wait=0) as old:
        assert old
