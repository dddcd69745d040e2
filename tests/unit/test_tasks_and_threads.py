"""What is promised to tasks and to threads: each scenario runs in both worlds."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import pickle
import re
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from both_worlds import bare, in_both_worlds
from stays import PATIENCE

import fencing_sdk.sync
from fencing_sdk import (
    ConfigurationError,
    DrainingError,
    LeaseLostError,
    LossReason,
    Ran,
    Skipped,
    UsageError,
    current_lease,
)
from fencing_sdk._arguments import check_metadata
from fencing_sdk._values.holder_facts import METADATA_LIMIT, read_facts, say_kept
from fencing_sdk.backends import from_url
from fencing_sdk.guards.etcd import EtcdGuard
from fencing_sdk.guards.kahuna import KahunaGuard
from fencing_sdk.guards.redis import RedisGuard
from fencing_sdk.guards.sql import SqlGuard


@in_both_worlds
async def test_what_belongs_to_this_process_is_neither_copied_nor_pickled(locks):
    lock, rwlock = locks.lock("a"), locks.rwlock("c")
    async with lock as lease, locks.multilock("b") as held, locks.semaphore("d", permits=2) as permit:
        things = [locks, lock, rwlock, rwlock.reader, locks.multilock("a"), locks.semaphore("d", permits=2)]
        for thing in map(bare, [*things, locks.election("e"), lease, held, permit]):
            for twin in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(UsageError, match=f"^{type(thing).__name__} cannot be copied or pickled"):
                    twin(thing)
        lease.check()
        assert not await locks.lock("a").try_acquire()


SECRET = "n0t-for-pickles"
STORES = [
    "memory://",
    "sqlite:///locks.db",
    *(f"redis{kind}://:{SECRET}@h1:1,h2:2,h3:3" for kind in ("+quorum", "+cluster")),
    f"redis+sentinel://:{SECRET}@h1:1,h2:2/main",
    *(f"{scheme}://user:{SECRET}@h1:1" for scheme in ("redis", "postgresql", "etcd", "zk")),
    "kahuna://h1:1",
]
GUARDS = {
    "redis": lambda: RedisGuard(f"redis://:{SECRET}@h1:1"),
    "postgresql": lambda: SqlGuard(f"postgresql://user:{SECRET}@h1/x"),
    "etcd": lambda: EtcdGuard(f"etcd://user:{SECRET}@h1:1"),
    "kahuna": lambda: KahunaGuard("kahuna://h1:1"),
}


@pytest.mark.parametrize("make", [*(partial(from_url, url) for url in STORES), *GUARDS.values()])
def test_what_knows_a_password_is_neither_copied_nor_pickled(make):
    thing = make()
    for twin in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match=f"^{type(thing).__name__} cannot be copied or pickled") as refused:
            twin(thing)
        assert SECRET not in str(refused.value)


@in_both_worlds
async def test_both_locks_of_a_read_write_lock_are_not_entered_at_once(locks):
    with pytest.raises(UsageError, match=r"enter 'a' as a reader or as the writer: (async )?with rwlock"):
        async with locks.rwlock("a"):
            pass


# Waiting for oneself


async def lead(locks, name):
    async for term in locks.election(name):
        async with term:
            return


async def enter(block):
    async with block:
        pass


WAITS = {
    "lock": lambda locks: enter(locks.lock("a")),
    "lock with patience": lambda locks: enter(locks.lock("a", wait=PATIENCE)),
    "handle": lambda locks: locks.lock("a").acquire(),
    "multilock": lambda locks: enter(locks.multilock("0", "a", "b")),
    "reader": lambda locks: enter(locks.rwlock("a").reader),
    "permit": lambda locks: enter(locks.semaphore("a", permits=2)),
    "election": lambda locks: lead(locks, "a"),
}


@in_both_worlds
async def test_what_waits_for_a_lock_of_its_own_block_is_refused(locks):
    for name, wait in WAITS.items():
        for block in (locks.lock("a"), locks.multilock("a", "z"), locks.rwlock("a").writer):
            async with block:
                with pytest.raises(UsageError, match=r"this (task|thread) holds "):
                    await wait(locks)
        assert await locks.inspect("a") is None, name
    async with locks.semaphore("a", permits=2), locks.semaphore("a", permits=2, wait=PATIENCE):
        assert await locks.lock("a").try_acquire() is None


def test_the_body_of_a_job_that_waits_for_its_own_lock_is_refused_in_both_worlds():
    with fencing_sdk.sync.connect("memory://") as locks:

        @locks.job("a", at_least_for=0.01)
        def work():
            with pytest.raises(UsageError, match="this thread holds lock 'a' already"), locks.lock("a"):
                pass
            with pytest.raises(UsageError, match="this thread holds lock 'a' already"), locks.multilock("a", "b"):
                pass
            return "refused"

        assert work().value == "refused"
        with locks.lock("a", wait=PATIENCE):
            pass

    async def with_tasks():
        async with fencing_sdk.connect("memory://") as locks:

            @locks.job("a", at_least_for=0.01)
            async def work():
                with pytest.raises(UsageError, match="this task holds lock 'a' already"):
                    await enter(locks.lock("a"))
                with pytest.raises(UsageError, match="this task holds lock 'a' already"):
                    await enter(locks.multilock("a", "b"))
                return "refused"

            assert (await work()).value == "refused"

    asyncio.run(with_tasks())


@in_both_worlds
async def test_a_drain_and_a_closing_do_not_wait_for_the_locks_of_their_caller(locks):
    """They are held when the drain is over, and lost by the closing."""
    async with locks.lock("a") as lease, locks.multilock("b", "c") as held:
        assert await locks.drain(within=2 * PATIENCE)
        lease.check()
        held.check()


@in_both_worlds
async def test_a_drain_whose_bound_is_over_takes_no_lock_of_its_caller_away(locks):
    other = await locks.lock("b").acquire()
    async with locks.lock("a") as lease:
        assert not await locks.drain(within=0.05)
        lease.check()
        assert not other.held


@in_both_worlds
async def test_what_a_body_acquires_while_its_client_drains_is_a_part_of_what_runs(locks):
    async with locks.lock("a") as lease:
        assert await locks.drain(within=PATIENCE)
        async with (
            locks.lock("b"),
            locks.multilock("c", "d"),
            locks.semaphore("e", permits=1),
            locks.rwlock("f").reader,
        ):
            await (await locks.lock("g").acquire()).release()
            lease.check()
        handle = await locks.lock("h").try_acquire()
    for acquire in (locks.lock("b").acquire, locks.lock("b").try_acquire):
        with pytest.raises(DrainingError):
            await acquire()
    await handle.release()


async def outcomes_of_two_runs(first, **options):
    """Whether the second of two runs of a job found the lock free, after the *first* body: by tasks and by threads."""
    free = []
    async with fencing_sdk.connect("memory://") as locks:

        async def work(body):
            body()

        run = locks.job("a", at_least_for=60, **options)(work)
        with contextlib.suppress(BaseException):
            await run(first)
        free.append(isinstance(await run(lambda: None), Ran))

    def with_threads():
        with fencing_sdk.sync.connect("memory://") as locks:
            run = locks.job("a", at_least_for=60, **options)(lambda body: body())
            with contextlib.suppress(BaseException):
                run(first)
            free.append(isinstance(run(lambda: None), Ran))

    await asyncio.to_thread(with_threads)
    return free


@pytest.mark.parametrize(
    "error",
    [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError],
    ids=lambda kind: kind.__name__,
)
async def test_a_run_of_a_job_that_fails_gives_its_lock_back_at_once_unless_it_is_kept_on_any_end(error):
    def fail():
        raise error

    assert await outcomes_of_two_runs(fail) == [True, True]
    assert await outcomes_of_two_runs(fail, at_least_on="any") == [False, False]
    assert await outcomes_of_two_runs(lambda: None) == [False, False]


@in_both_worlds
async def test_the_end_on_which_a_job_keeps_its_lock_is_checked_at_decoration(locks):
    with pytest.raises(ConfigurationError, match=r"^at_least_on must be 'success' or 'any', not 'never'"):
        locks.job("a", at_least_for=60, at_least_on="never")


def test_the_lock_of_a_job_stays_taken_although_its_body_releases_it_in_both_worlds():
    async def releases():
        await current_lease().release()

    async def tasks():
        async with fencing_sdk.connect("memory://") as locks:
            job = locks.job("a", at_least_for=60)(releases)
            await job()
            assert isinstance(await job(), Skipped)

    asyncio.run(tasks())
    with fencing_sdk.sync.connect("memory://") as locks:
        job = locks.job("a", at_least_for=60)(lambda: locks.run(releases))
        job()
        assert isinstance(job(), Skipped)


@in_both_worlds
async def test_what_max_hold_ends_is_free_although_a_plain_handle_is_kept(locks):
    """And not only after the ttl, which is longer than the other one waits."""
    shared = (
        locks.semaphore("b", permits=1, ttl=3600, max_hold=0.05),
        locks.rwlock("c", ttl=3600, max_hold=0.05).reader,
    )
    others = (locks.semaphore("b", permits=1, wait=PATIENCE), locks.rwlock("c", wait=PATIENCE).writer)
    for lock, other in zip(
        (locks.lock("a", ttl=3600, max_hold=0.05), *shared), (locks.lock("a", wait=PATIENCE), *others), strict=True
    ):
        lease = await lock.acquire()
        async with other as next_one:
            assert next_one.token > bare(lease)._state.number or lock is shared[1]
        assert lease.lost_reason is LossReason.EXPIRED
        await lease.release()
        with pytest.raises(LeaseLostError, match="max_hold="):
            lease.check()


def test_others_see_until_when_the_lock_of_a_job_is_kept_and_that_nothing_runs_in_both_worlds():
    seen = {"tasks": [], "threads": []}

    async def with_tasks():
        async with fencing_sdk.connect("memory://") as locks:

            async def work():
                seen["tasks"].append(await locks.inspect("a"))

            await locks.job("a", at_least_for=60, metadata="worker 3")(work)()
            seen["tasks"].append(await locks.inspect("a"))

    asyncio.run(with_tasks())
    with fencing_sdk.sync.connect("memory://") as locks:
        locks.job("a", at_least_for=60, metadata="worker 3")(lambda: seen["threads"].append(locks.inspect("a")))()
        seen["threads"].append(locks.inspect("a"))
    for running, parked in seen.values():
        assert running.metadata == parked.metadata
        note = re.fullmatch(r"when its run has ended, kept until (\S+) \(ttl 15 s\); worker 3", parked.metadata)
        until = datetime.fromisoformat(note[1])
        assert read_facts(running) == (None, f"when its run has ended, kept until {note[1]}", None, "worker 3")
        assert read_facts(parked) == (note[1], f"kept until {note[1]}, nothing runs", None, "worker 3")
        assert timedelta(0) < until - datetime.now(UTC) <= timedelta(seconds=60)


def test_the_note_of_a_parked_lock_leaves_the_metadata_as_long_as_a_store_can_keep():
    for metadata in ("", "x" * METADATA_LIMIT):
        assert check_metadata(say_kept(metadata, 60, 15)).startswith("when its run has ended, kept until ")


@in_both_worlds
async def test_others_see_the_host_the_process_and_the_program_unless_other_metadata_are_given(locks):
    for lock in (locks.lock("a"), locks.multilock("a"), locks.semaphore("a", permits=2), locks.rwlock("a").reader):
        async with lock:
            (holder,) = await locks.holders("a")
            assert json.loads(holder.metadata).keys() == {"host", "pid", "program"}
            assert json.loads(holder.metadata)["pid"] == os.getpid()
    for metadata, stored in (("", None), ("worker 3", "worker 3")):
        async with locks.lock("a", metadata=metadata):
            assert (await locks.inspect("a")).metadata == stored


@pytest.mark.parametrize(("of_client", "stored"), [("pod 7", "pod 7"), ("", None)])
async def test_a_client_may_have_metadata_of_its_own_or_none_for_all_its_locks(of_client, stored):
    found = {}

    async def look():
        found["job"] = (await tasks.inspect("job")).metadata

    async with fencing_sdk.connect("memory://", metadata=of_client) as tasks:
        await tasks.job("job", at_least_for=60)(look)()
        async with tasks.lock("a"), tasks.lock("b", metadata="worker 3"):
            found["tasks"] = [(await tasks.inspect(name)).metadata for name in "ab"]

    def with_threads():
        with fencing_sdk.sync.connect("memory://", metadata=of_client) as threads, threads.lock("a"):
            found["threads"] = threads.inspect("a").metadata

    await asyncio.to_thread(with_threads)
    assert found["tasks"] == [stored, "worker 3"]
    assert found["threads"] == stored
    assert re.fullmatch(rf"when its run has ended, kept until \S+ \(ttl 15 s\)(; {stored})?", found["job"])
    for connect in (fencing_sdk.connect, fencing_sdk.sync.connect):
        with pytest.raises(ConfigurationError, match=r"^metadata must be a str of at most 1024"):
            connect("memory://", metadata="x" * 1025)
