"""``locks.semaphore`` and ``locks.rwlock``: so many at a time; or many readers, or one writer. All with tokens."""

import asyncio

import pytest
from inside import LoopClock, memory_on, on_clock
from virtual_time import in_virtual_time, settle

from fencing_sdk import (
    AcquireTimeoutError,
    ConfigurationError,
    InvalidNameError,
    LeaseLostError,
    LockClient,
    LockHeldError,
    LossReason,
    StaleTokenError,
    UsageError,
)
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.errors import UnsupportedError
from fencing_sdk.events import Acquired, FenceRaised
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.testing.faults import FaultyBackend


@pytest.fixture
def store():
    return MemoryBackend(tokens="counter")


@pytest.fixture
def seen():
    return []


@pytest.fixture
async def locks(store, seen):
    async with LockClient(store, observers=[seen.append]) as locks:
        yield locks


def in_virtual_locks(visit, **options):
    async def main():
        clock = LoopClock()
        store = memory_on(clock, tokens="counter")
        async with on_clock(LockClient(store, **options), clock) as locks:
            await visit(locks)

    in_virtual_time(main)()


# A semaphore


def test_no_more_hold_than_there_are_permits_and_all_get_one():
    async def visit(locks):
        inside, most, served = 0, 0, []

        async def work(number):
            nonlocal inside, most
            async with locks.semaphore("gpu-pool", permits=3) as lease:
                inside += 1
                most = max(most, inside)
                served.append((number, lease.permit))
                await asyncio.sleep(1.0)
                inside -= 1

        async with asyncio.TaskGroup() as tasks:
            for number in range(12):
                tasks.create_task(work(number))
                await settle()
        assert most == 3
        assert [number for number, _ in served] == list(range(12))
        assert {permit for _, permit in served} == {0, 1, 2}

    in_virtual_locks(visit)


async def test_a_guard_has_a_fence_for_each_permit(locks, seen):
    guard = MemoryGuard()
    gpus = locks.semaphore("gpu-pool", permits=2, fences=[guard, (guard, "gpus")])
    async with gpus as one:
        two = await gpus.acquire(wait=1)
        assert two.token > one.token
        guard.write(one.resource, one.token, lambda: None)  # a later permit does not make it stale
        assert [await guard.highest(name) for name in ("gpu-pool/0", "gpu-pool/1", "gpus/1")] == [
            one.token,
            two.token,
            two.token,
        ]
        kept = one.token
        await two.release()
    async with gpus as next_holder:
        assert next_holder.permit == 0
        with pytest.raises(StaleTokenError):
            guard.write("gpu-pool/0", kept, lambda: None)
    assert {event.resource for event in seen if isinstance(event, FenceRaised)} == {
        "gpu-pool/0",
        "gpu-pool/1",
        "gpus/0",
        "gpus/1",
    }


async def test_observers_are_told_of_the_mode_and_the_permit(locks, seen):
    async with locks.semaphore("gpu-pool", permits=2), locks.rwlock("catalog").reader, locks.lock("a"):
        pass
    acquired = [event for event in seen if isinstance(event, Acquired)]
    assert [(event.mode, event.permit, event.permits) for event in acquired] == [
        ("permit", 0, 2),
        ("reader", None, None),
        ("lock", None, None),
    ]


async def test_a_second_permit_in_one_task_needs_a_limit(locks):
    gpus = locks.semaphore("gpu-pool", permits=2)
    async with gpus:
        with pytest.raises(UsageError, match=r"holds a permit of 'gpu-pool' already.*pass wait="):
            await gpus.acquire()
        lease = await gpus.acquire(wait=1)
        assert await gpus.try_acquire() is None
        with pytest.raises(AcquireTimeoutError):
            await gpus.acquire(wait=0.01)
        await lease.release()


async def test_a_lock_and_a_semaphore_of_one_name_are_told_apart_in_the_error(locks):
    async with locks.lock("gpu-pool"):
        with pytest.raises(UsageError, match=r"holds 'gpu-pool' as a lock already and would wait .* as a permit"):
            await locks.semaphore("gpu-pool", permits=2).acquire()
    async with locks.semaphore("gpu-pool", permits=2):
        with pytest.raises(UsageError, match=r"holds 'gpu-pool' as a permit already and would wait .* as a lock"):
            await locks.lock("gpu-pool").acquire()


async def test_a_permit_that_is_taken_away_ends_the_work(locks, store):
    entered = asyncio.Barrier(3)

    async def work():
        async with locks.semaphore("gpu-pool", permits=2):
            await entered.wait()
            await asyncio.sleep(3600)

    tasks = [asyncio.create_task(work()) for _ in range(2)]
    await entered.wait()
    store.take_away("gpu-pool")
    for task in tasks:
        with pytest.raises(LeaseLostError) as lost:
            await task
        assert lost.value.reason is LossReason.REVOKED


def test_a_permit_is_renewed_beyond_its_ttl():
    async def visit(locks):
        gpus = locks.semaphore("gpu-pool", permits=1, ttl=3)
        async with gpus as lease:
            await asyncio.sleep(30)
            assert lease.held
            with pytest.raises(LockHeldError):
                await gpus.acquire(wait=0)
        async with gpus:
            pass

    in_virtual_locks(visit)


async def test_clients_with_a_namespace_share_nothing_with_others(store):
    async with LockClient(store, namespace="one:") as one, LockClient(store, namespace="two:") as two:
        gpus, others = (locks.semaphore("gpu-pool", permits=1) for locks in (one, two))
        async with gpus as lease, others as other:
            assert lease.resource == other.resource == "gpu-pool/0"
            assert [len(await semaphore.holders()) for semaphore in (gpus, others)] == [1, 1]


@pytest.mark.parametrize("permits", [0, -1, 1001, 2.0, "3", None, True])
async def test_odd_numbers_of_permits_are_refused_when_it_is_described(locks, permits):
    with pytest.raises(ConfigurationError, match="permits must be a whole number from 1 to 1000"):
        locks.semaphore("gpu-pool", permits=permits)


async def test_a_name_leaves_room_for_the_number_of_a_permit(locks):
    locks.semaphore("a" * 510, permits=10)
    with pytest.raises(InvalidNameError):
        locks.semaphore("a" * 510, permits=11)


class LocksAlone(MemoryBackend):
    modes = frozenset({"lock"})


async def test_a_backend_without_shares_says_so_when_it_is_described():
    for backend in (LocksAlone(), FaultyBackend(LocksAlone())):
        locks = LockClient(backend)
        with pytest.raises(UnsupportedError, match=f"{type(backend).__name__} has no semaphores"):
            locks.semaphore("gpu-pool", permits=4)
        with pytest.raises(UnsupportedError, match=f"{type(backend).__name__} has no read/write locks"):
            locks.rwlock("catalog")


# A read/write lock


@pytest.mark.every_loop
async def test_readers_hold_together_and_are_one_holder_to_a_guard(locks):
    guard = MemoryGuard()
    catalog = locks.rwlock("catalog", fences=[guard])
    async with catalog.reader as one:
        assert await catalog.writer.try_acquire() is None
        two = await catalog.reader.try_acquire()
        assert (one.token, one.token.holder) == (two.token, two.token.holder)
        assert one.holder != two.holder
        assert {holder.id for holder in await catalog.holders()} == {one.holder, two.holder}
        guard.write("catalog", one.token, lambda: None)
        guard.write("catalog", two.token, lambda: None)
        kept = one.token
        await two.release()
    async with catalog.writer as writer:
        assert writer.token > kept
        assert await catalog.reader.try_acquire() is None
        assert [holder.id for holder in await catalog.holders()] == [writer.holder]
        with pytest.raises(StaleTokenError):
            guard.write("catalog", kept, lambda: None)
        kept = writer.token
    async with catalog.reader as later:
        assert later.token > kept
        with pytest.raises(StaleTokenError):
            guard.write("catalog", kept, lambda: None)


def test_a_writer_is_not_overtaken_by_readers():
    async def visit(locks):
        catalog = locks.rwlock("catalog")
        order = []

        async def hold(lock, what):
            async with lock:
                order.append(what)
                await asyncio.sleep(1.0)

        async with asyncio.TaskGroup() as tasks:
            for lock, what in (
                (catalog.reader, "r1"),
                (catalog.writer, "w"),
                (catalog.reader, "r2"),
                (catalog.reader, "r3"),
            ):
                tasks.create_task(hold(lock, what))
                await settle()
        assert order[:2] == ["r1", "w"]
        assert set(order[2:]) == {"r2", "r3"}

    in_virtual_locks(visit)


def test_four_hundred_readers_are_let_in_at_once():
    async def visit(locks):
        catalog = locks.rwlock("catalog")
        loop = asyncio.get_running_loop()
        entered = []

        async def read():
            async with catalog.reader:
                entered.append(loop.time())
                await asyncio.sleep(10)

        async with catalog.writer:
            readers = [asyncio.create_task(read()) for _ in range(400)]
            await settle()
            await asyncio.sleep(1)
            assert not entered
            freed = loop.time()
        await asyncio.gather(*readers)
        assert len(entered) == 400
        assert max(entered) - freed < 0.15

    in_virtual_locks(visit)


@pytest.mark.parametrize(("first", "second"), [("reader", "writer"), ("writer", "reader"), ("reader", "reader")])
async def test_a_task_does_not_wait_for_itself(locks, first, second):
    catalog = locks.rwlock("catalog")
    async with getattr(catalog, first):
        with pytest.raises(UsageError, match=rf"holds 'catalog' as a {first} already.*as a {second}"):
            await getattr(catalog, second).acquire()


async def test_readers_may_ask_for_different_ttls(locks):
    short, long = (locks.rwlock("catalog", ttl=ttl) for ttl in (5, 50))
    async with short.reader as one:
        two = await long.reader.try_acquire()
        assert (one.ttl, two.ttl, one.token == two.token) == (5, 50, True)
        remaining = sorted(holder.remaining for holder in await short.holders())
        assert remaining[0] < 6 < 40 < remaining[1]
        await two.release()
