"""
Promises to tasks and to threads: each scenario runs in both worlds.

The last tests compare the two fronts: what one of them has, the other has too, and a scenario here asks for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import json
import os
import pickle
import re
import signal
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from both_worlds import bare, beside, comes, in_both_worlds, shown
from inside import LABEL_LIMIT, check_label, read_facts, say_kept, state_of
from stays import PATIENCE

import fencing_sdk.sync
from fencing_sdk import (
    AcquireTimeoutError,
    ConfigurationError,
    DrainingError,
    LeaseLostError,
    LockHeldError,
    LossReason,
    StaleTokenError,
    UsageError,
    current_token,
)
from fencing_sdk.backends import from_url
from fencing_sdk.errors import NoLeaseError
from fencing_sdk.guards.etcd import EtcdGuard
from fencing_sdk.guards.kahuna import KahunaGuard
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.guards.redis import RedisGuard
from fencing_sdk.guards.sql import SqlGuard
from fencing_sdk.integrations.messages import current_metadata
from fencing_sdk.recipes import ElectionStanding, Ran, Skipped, holding
from fencing_sdk.sync import current_lease


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


@in_both_worlds
async def test_the_body_of_a_job_that_waits_for_its_own_lock_is_refused(locks):
    @locks.job("a", at_least_for=0.01)
    async def work():
        for block in (locks.lock("a"), locks.multilock("a", "b")):
            with pytest.raises(UsageError, match=r"this (task|thread) holds lock 'a' already"):
                await enter(block)
        return "refused"

    assert (await work()).value == "refused"
    await enter(locks.lock("a", wait=PATIENCE))


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


@in_both_worlds
async def test_a_run_of_a_job_that_fails_gives_its_lock_back_at_once_unless_it_is_kept_on_any_end(locks):
    errors = (None, ValueError, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)
    for number, error in enumerate(errors):
        for on in ("success", "any"):

            @locks.job(f"{number}/{on}", at_least_for=60, at_least_on=on)
            async def work(error):
                if error is not None:
                    raise error

            with contextlib.nullcontext() if error is None else pytest.raises(error):
                assert isinstance(await work(error), Ran)
            assert isinstance(await work(None), Skipped if error is None or on == "any" else Ran), (error, on)


@in_both_worlds
async def test_the_end_on_which_a_job_keeps_its_lock_is_checked_at_decoration(locks):
    with pytest.raises(ConfigurationError, match=r"^at_least_on must be 'success' or 'any', not 'never'"):
        locks.job("a", at_least_for=60, at_least_on="never")


@in_both_worlds
async def test_the_lock_of_a_job_stays_taken_although_its_body_releases_it(locks):
    @locks.job("a", at_least_for=60)
    async def work():
        if (releasing := current_lease().release()) is not None:  # of a task
            await releasing

    assert isinstance(await work(), Ran)
    assert isinstance(await work(), Skipped)


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
            assert next_one.token > state_of(bare(lease)).number or lock is shared[1]
        assert lease.lost_reason is LossReason.EXPIRED
        await lease.release()
        with pytest.raises(LeaseLostError, match="max_hold="):
            lease.check()


@in_both_worlds
async def test_others_see_until_when_the_lock_of_a_job_is_kept_and_that_nothing_runs(locks):
    seen = []

    @locks.job("a", at_least_for=60, label="worker 3")
    async def work():
        seen.append(await locks.inspect("a"))

    await work()
    (running,), parked = seen, await locks.inspect("a")
    assert running.label == parked.label == "when its run has ended, kept for 60 s from its start (ttl 15 s); worker 3"
    assert read_facts(running).state.startswith("when its run has ended, kept until 20")
    facts = read_facts(parked)
    assert facts == (facts.kept_until, f"kept until {facts.kept_until}, nothing runs", None, "worker 3", None)
    until = datetime.fromisoformat(facts.kept_until)
    assert timedelta(0) < until - datetime.now(UTC) <= timedelta(seconds=60 / 0.99)


@in_both_worlds
async def test_a_lease_is_detached_and_goes_on_by_its_ticket(locks):
    async with locks.lock("a", ttl=60) as lease:
        ticket = await lease.detach(600)
        with pytest.raises(LeaseLostError, match="handed over by its ticket"):
            lease.check()
    async with locks.resume(await locks.renew(ticket), ttl=60) as resumed:
        assert (lease.holder != resumed.holder, resumed.token) == (True, ticket.token + 1)
    async with locks.semaphore("pool", permits=2, ttl=60) as lease:
        ticket = await lease.detach()
    assert (ticket.permit, ticket.ttl) == (0, 60)
    await locks.release(ticket)
    ticket = await locks.take(locks.detached("a", ttl=600))
    assert await locks.lock("a").try_acquire() is None
    await locks.release(ticket)
    assert await locks.inspect("a") is None


def test_the_note_of_a_parked_lock_leaves_the_label_as_long_as_a_store_can_keep():
    for label in ("", "x" * LABEL_LIMIT):
        assert check_label(say_kept(label, 60, 15)).startswith("when its run has ended, kept for 60 s")


@in_both_worlds
async def test_others_see_the_host_the_process_and_the_program_unless_another_label_is_given(locks):
    for lock in (locks.lock("a"), locks.multilock("a"), locks.semaphore("a", permits=2), locks.rwlock("a").reader):
        async with lock:
            (holder,) = await locks.holders("a")
            assert json.loads(holder.label).keys() == {"host", "pid", "program"}
            assert json.loads(holder.label)["pid"] == os.getpid()
    for label, stored in (("", None), ("worker 3", "worker 3")):
        async with locks.lock("a", label=label):
            assert (await locks.inspect("a")).label == stored


@pytest.mark.parametrize(("of_client", "stored"), [("pod 7", "pod 7"), ("", None)])
@pytest.mark.parametrize("world", ["tasks", "threads"])
def test_a_client_may_have_a_label_of_its_own_or_none_for_all_its_locks(world, of_client, stored):
    async def scenario(locks):
        @locks.job("job", at_least_for=60)
        async def work():
            return (await locks.inspect("job")).label

        async with locks.lock("a"), locks.lock("b", label="worker 3"):
            assert [(await locks.inspect(name)).label for name in "ab"] == [stored, "worker 3"]
        kept = rf"when its run has ended, kept for \S+ s from its start \(ttl 15 s\)(; {stored})?"
        assert re.fullmatch(kept, (await work()).value)

    in_both_worlds(scenario, label=of_client)(world)
    for connect in (fencing_sdk.connect, fencing_sdk.sync.connect):
        with pytest.raises(ConfigurationError, match=r"^label must be a str of at most 1024"):
            connect("memory://", label="x" * 1025)


# A block, a handle, and what is lost


def free(locks, name="a"):
    async def ask():
        return await locks.inspect(name) is None

    return ask


async def lose(locks, name="a"):
    """An operator takes the lock away; tasks are cancelled, and threads go on."""
    holder = await locks.inspect(name)
    assert await locks.revoke(name, token=holder.token, reason="maintenance")
    await shown(current_lease(name)).wait_lost()


@in_both_worlds
async def test_a_block_holds_the_lock_and_its_lease_is_current(locks):
    async with locks.lock("a", ttl=10, label="mine") as lease:
        assert (lease.name, lease.resource, lease.token, lease.held, lease.ttl) == ("a", "a", 1, True, 10)
        assert (lease.lost_reason, lease.label, lease.token.holder) == (None, "mine", lease.holder)
        assert 0 < lease.remaining <= 10
        assert bare(lease) is current_lease() is fencing_sdk.current_lease("a")
        assert current_token() == fencing_sdk.sync.current_token("a") == 1
        assert lease.headers()["Fencing-Token"].startswith("1;holder=")
        async with locks.lock("b") as inner:
            assert current_lease() is bare(inner)
            assert current_lease("a") is bare(lease)
        assert await locks.lock("a").locked()
        assert lease.owner not in repr(bare(lease))
    assert not await locks.lock("a").locked()
    assert not lease.held
    with pytest.raises(NoLeaseError):
        current_lease()


SHARES = {
    "permit": lambda locks: locks.semaphore("pool", permits=2),
    "reader": lambda locks: locks.rwlock("pool").reader,
}
"""Shares, which are passed over unless they are asked for by their name."""


def check_that_shares_are_passed_over(share, lock=None):
    """Check what the code sees under *share*, and perhaps under *lock*."""
    assert (current_token("pool"), current_token("pool").holder) == (share.token, share.token.holder)
    assert dict(current_metadata("pool")) == {"fencing-token": share.headers()["Fencing-Token"]}
    if lock is not None:
        assert current_lease() is bare(lock)
        assert current_token() == lock.token
        assert dict(current_metadata()) == {"fencing-token": lock.headers()["Fencing-Token"]}
        return
    for ask in (current_lease, current_token, current_metadata):
        with pytest.raises(NoLeaseError, match=r"by its name, such as current_token\('pool'\)") as none:
            ask()
        assert (none.value.name, none.value.shared) == (None, "pool")


@in_both_worlds
async def test_permits_and_readers_are_current_on_request_only(locks):
    for share in (describe(locks) for describe in SHARES.values()):
        for lock in (locks.lock("seats"), locks.rwlock("seats").writer):
            async with share as lease:
                check_that_shares_are_passed_over(lease)
            async with share as lease, lock as held:
                check_that_shares_are_passed_over(lease, held)
            async with lock as held, share as lease:
                check_that_shares_are_passed_over(lease, held)


@in_both_worlds
async def test_a_lock_that_is_lost_leaves_its_block_as_an_error_or_as_a_note_of_that_of_the_body(locks):
    with pytest.raises(LeaseLostError, match="maintenance") as lost:
        async with locks.lock("a"):
            await lose(locks)
    assert lost.value.reason is LossReason.REVOKED
    assert pickle.loads(pickle.dumps(lost.value)).args == lost.value.args
    with pytest.raises(ValueError, match="mine") as left:
        async with locks.lock("a"):
            try:
                await lose(locks)
            finally:
                raise ValueError("mine")
    assert "was lost too: revoked" in left.value.__notes__[0]


async def in_a_term(locks, body):
    async for term in locks.election("a"):
        async with term:
            await body()


async def in_a_block(block, body):
    async with block:
        await body()


BODIES = {
    "block": lambda locks, body: in_a_block(locks.lock("a"), body),
    "multilock": lambda locks, body: in_a_block(locks.multilock("a", "b"), body),
    "permit": lambda locks, body: in_a_block(locks.semaphore("a", permits=2), body),
    "reader": lambda locks, body: in_a_block(locks.rwlock("a").reader, body),
    "writer": lambda locks, body: in_a_block(locks.rwlock("a").writer, body),
    "term": in_a_term,
    "locking": lambda locks, body: locks.locking("a")(body)(),
    "job": lambda locks, body: locks.job("a", at_least_for=60)(body)(),
    "elected": lambda locks, body: locks.elected("a")(body)(),
}


@in_both_worlds
async def test_the_error_of_a_body_leaves_as_it_is_and_its_locks_are_free(locks):
    for name, run in BODIES.items():
        mine = ValueError("mine")

        async def fail(mine=mine):
            assert current_lease("a").held
            raise mine

        with pytest.raises(ValueError) as left:
            await run(locks, fail)
        assert left.value is mine, name
        assert not hasattr(mine, "__notes__"), name
        assert await free(locks)(), name


@in_both_worlds
async def test_a_handle_belongs_to_no_code_and_gives_its_lock_back_once(locks):
    lock = locks.lock("a", wait=30)
    lease = await lock.acquire()
    with pytest.raises(NoLeaseError):
        current_lease()
    await lease.renew()
    lease.check()
    assert await lock.try_acquire() is None
    with pytest.raises(LockHeldError):
        await lock.acquire(wait=0)
    with pytest.raises(AcquireTimeoutError):
        await lock.acquire(wait=0.01)
    await lease.release()
    await lease.release()
    for ask in (lease.renew, lease.__aenter__):
        with pytest.raises(LeaseLostError):
            await ask()
    assert await lease.wait_lost() is None
    async with await lock.acquire() as again:
        assert again.held
    assert await free(locks)()


TOLD = []


@in_both_worlds(observers=[TOLD.append])
async def test_a_fence_is_raised_with_the_lock_and_a_refusal_of_a_guard_leaves_the_body(locks):
    TOLD.clear()
    guard = MemoryGuard()
    async with locks.lock("a", fences=[guard]) as lease:
        assert guard.write("a", lease.token, lambda: "written") == "written"
    with pytest.raises(StaleTokenError):
        async with locks.lock("a", fences=[(guard, "b")]) as lease:
            guard.admit("b", lease.token + 1)
            guard.write("b", lease.token, lambda: pytest.fail("a stale write"))
    assert [event.resource for event in TOLD if event.kind == "stale_rejected"] == ["b"]
    async with locks.multilock("c", "d", fences=[guard]) as held:
        guard.write_all(held.tokens, lambda: None)


# What is made of locks


@in_both_worlds
async def test_a_decorated_function_holds_the_lock_of_its_arguments_and_stays_what_it_was(locks):
    @holding("report/{number}")
    def page(number):
        return current_token(f"report/{number}")

    @locks.locking("report/{number}", ttl=30)
    async def build(number: int) -> tuple[str, int]:
        """Build it."""
        return current_lease().name, page(number)

    assert await build(7) == ("report/7", 1)
    assert await build(number=7) == ("report/7", 2)
    assert build.__doc__ == "Build it."
    with pytest.raises(NoLeaseError):
        page(7)
    for decorate in (locks.locking, locks.elected, partial(locks.job, at_least_for=1)):
        with pytest.raises(ConfigurationError, match="placeholder"):
            decorate("{other}")(build)
        with pytest.raises(ConfigurationError):
            decorate("a", ttl=-1)


@in_both_worlds
async def test_a_job_runs_once_for_each_name_that_its_arguments_make(locks):
    @locks.job("report/{number}", at_least_for=60)
    async def build(number):
        return current_lease().name

    ran = await build(7)
    assert (ran.value, ran.token, ran.held_for > 0) == ("report/7", 1, True)
    skipped = await build(7)
    assert skipped.name == "report/7"
    assert isinstance(await build(8), Ran)


@in_both_worlds
async def test_several_locks_are_held_together_or_not_at_all(locks):
    several = locks.multilock("b", "a", ttl=30)
    assert several.names == ("a", "b")
    for _ in range(2):
        async with several as held:
            assert held.tokens == {"a": current_token("a"), "b": current_token("b")}
            held.check()
            assert list(bare(held)) == ["a", "b"]
            assert bare(held)["b"].name == "b"
        assert await free(locks)()
    async with locks.lock("b"):
        with pytest.raises(LockHeldError, match="'b'"):
            await beside(lambda: enter(locks.multilock("a", "b", wait=0)))()
        with pytest.raises(AcquireTimeoutError) as over:
            await beside(lambda: enter(locks.multilock("a", "b", wait=0.05)))()
    assert over.value.name == "b"
    assert await free(locks)()
    with pytest.raises(LeaseLostError) as lost:
        async with several:
            await lose(locks, "b")
    assert lost.value.name == "b"
    assert await free(locks)()


@in_both_worlds
async def test_one_description_serves_many(locks):
    inside = []
    descriptions = (
        locks.lock("a"),
        locks.multilock("a", "b"),
        locks.rwlock("a").writer,
        locks.semaphore("a", permits=1),
    )
    for block in descriptions:

        async def work(block=block):
            async with block:
                assert inside == []
                inside.append(1)
                assert await locks.lock("a").locked()
                inside.clear()

        for ended in [beside(work) for _ in range(4)]:
            await ended()


@in_both_worlds
async def test_permits_and_readers_are_held_together(locks):
    pool = locks.semaphore("pool", permits=2)
    assert (pool.name, pool.permits) == ("pool", 2)
    async with pool as one:
        two = await pool.acquire(wait=1)
        assert [(lease.permit, lease.resource) for lease in (one, two)] == [(0, "pool/0"), (1, "pool/1")]
        assert await pool.try_acquire() is None
        assert await pool.locked()
        assert [holder.permit for holder in await pool.holders()] == [0, 1]
        await two.release()
        assert not await pool.locked()
    catalog = locks.rwlock("catalog")
    async with catalog.reader as one:
        two = await beside(catalog.reader.acquire)()
        assert two.token == one.token
        assert len(await catalog.holders()) == 2
        assert await catalog.writer.try_acquire() is None
        await two.release()
    async with catalog.writer as writer:
        assert writer.token > two.token if two.held else True
        assert (catalog.name, catalog.reader.name, await catalog.reader.try_acquire()) == ("catalog", "catalog", None)


@in_both_worlds
async def test_an_operator_sees_who_holds_and_who_waits_and_takes_a_lock_away(locks):
    with pytest.raises(LeaseLostError, match="maintenance"):
        async with locks.lock("a") as lease:
            waiting = beside(locks.lock("a").acquire)
            (waiter,) = await comes(lambda: locks.waiters("a"))
            assert json.loads(waiter.label).keys() == {"host", "pid", "program"}
            held = locks.all_holders("a*")
            (holder,) = [one async for one in held] if hasattr(held, "__aiter__") else await held
            assert holder.token == lease.token
            assert [one.token for one in await locks.holders("a")] == [lease.token]
            assert not await locks.revoke("a", token=lease.token + 1, reason="another one")
            await lose(locks)
    await (await waiting()).release()


# Elections


@in_both_worlds
async def test_a_leader_leads_term_after_term_and_gives_the_lock_back_when_it_leaves(locks):
    election, tokens = locks.election("a"), []
    assert (election.name, election.leading, election.standing) == ("a", False, ElectionStanding.IDLE)
    async for term in election:
        async with term as lease:
            assert bare(term.lease) is bare(lease)
            assert (election.leading, election.standing) == (True, ElectionStanding.LEADING)
            assert (await election.leader()).token == current_token() == lease.token
            assert locks.status().leader_of == ("a",)
            tokens.append(lease.token)
        if len(tokens) == 3:
            break
    assert tokens == [1, 2, 3]
    assert (election.leading, election.standing) == (False, ElectionStanding.IDLE)
    assert await election.leader() is None


@in_both_worlds
async def test_a_lead_that_is_lost_ends_the_term_and_the_loop_stands_again(locks):
    tokens = []
    async for term in locks.election("a"):
        async with term as lease:
            tokens.append(lease.token)
            if len(tokens) == 3:
                break
            await lose(locks)
            if len(tokens) == 1:
                lease.check()
                pytest.fail("the body goes on without the lead")
    assert tokens == [1, 2, 3]
    assert await free(locks)()


@in_both_worlds
async def test_a_loss_of_another_lock_is_an_error_of_the_body_of_a_term(locks):
    with pytest.raises(LeaseLostError) as left:
        async for term in locks.election("a"):
            async with term, locks.lock("b"):
                await lose(locks, "b")
    assert left.value.name == "b"
    assert await free(locks)()


@in_both_worlds
async def test_a_leader_that_resigns_is_followed_by_another(locks):
    mine, led = locks.election("a"), []

    async def stand(election, name):
        async for term in election:
            async with term as lease:
                led.append((name, lease.token))
                if name == "one":
                    await comes(lambda: locks.waiters("a"))
                    assert (lease.held, term.over) == (True, False)
                    election.resign()
                    assert term.over
                    assert election.leading, "the lock is released when the body has ended"
                    assert election.standing is ElectionStanding.ENDING
            return

    one = beside(lambda: stand(mine, "one"))
    await comes(lambda: locks.holders("a"))
    two = beside(lambda: stand(locks.election("a"), "two"))
    await one()
    await two()
    assert led == [("one", 1), ("two", 2)]


@in_both_worlds
async def test_a_drain_ends_the_loop_of_a_leader_and_of_a_candidate_in_order(locks):
    ended = []

    async def stand(name):
        async for term in locks.election("a"):
            async with term:
                ended.append("leads")
                await comes(partial(drains, locks))
                assert term.over
        ended.append(name)

    async def leads():
        return ended == ["leads"]

    leader = beside(lambda: stand("leader"))
    await comes(leads)
    candidate = beside(lambda: stand("candidate"))
    await comes(lambda: locks.waiters("a"))
    assert await locks.drain(within=PATIENCE)
    await leader()
    await candidate()
    assert ended[0] == "leads"
    assert sorted(ended[1:]) == ["candidate", "leader"]


async def drains(locks):
    return locks.draining


@in_both_worlds
async def test_a_term_is_entered_at_once_and_once(locks):
    async for term in locks.election("a"):
        async with term:
            pass
        with pytest.raises(UsageError, match="entered once"):
            await term.__aenter__()
        break
    with pytest.raises(UsageError, match=r"before its loop went on.*'(async )?with term as lease:' as the first line"):
        async for _ in locks.election("a"):
            pass
    await comes(free(locks))
    async for term in locks.election("a"):  # noqa: B007  (used below)
        break
    await comes(free(locks))
    with pytest.raises(UsageError, match="not entered before its loop was left, so its lock was released"):
        await term.__aenter__()


@in_both_worlds
async def test_an_elected_function_runs_as_the_leader_and_again_after_a_loss(locks):
    runs = []

    @locks.elected("{name}")
    async def plan(name: str) -> int:
        """Make a plan."""
        runs.append(current_token())
        if len(runs) == 1:
            await lose(locks)
        return current_token()

    assert plan.__doc__ == "Make a plan."
    assert await plan("a") == 2
    assert runs == [1, 2]
    assert await locks.drain(within=0)
    assert await plan("a") is None


@in_both_worlds
async def test_a_candidate_waits_without_a_limit(locks):
    for describe in (locks.election, locks.elected):
        with pytest.raises(ConfigurationError, match="takes no wait"):
            describe("a", wait=3)


# Drains


SIGNAL = signal.SIGWINCH
"""One that does nothing by default."""


@contextlib.contextmanager
def handlers_left_as_they_were():
    before = signal.getsignal(SIGNAL)
    yield
    assert signal.getsignal(SIGNAL) == before


@in_both_worlds
async def test_a_client_that_drains_begins_nothing_new_and_waits_for_what_runs(locks):
    lease = await locks.lock("a").acquire()
    drained = beside(lambda: locks.drain(within=PATIENCE))
    await comes(partial(drains, locks))
    assert (locks.status().open, locks.status().draining, locks.status().leases) == (True, True, 1)
    for acquire in (
        locks.lock("b").acquire,
        locks.multilock("b", "c").__aenter__,
        locks.semaphore("b", permits=1).acquire,
    ):
        with pytest.raises(DrainingError):
            await acquire()
    await lease.release()
    assert await drained()


@in_both_worlds
async def test_a_worker_loop_ends_in_order_by_a_signal_however_often_it_is_named(locks):
    worked = 0
    with handlers_left_as_they_were():
        async with locks.draining_on(SIGNAL, int(SIGNAL), within=PATIENCE):
            while True:
                async with locks.lock("a") as lease:
                    worked += 1
                    if worked == 3:
                        signal.raise_signal(SIGNAL)
                        await comes(partial(drains, locks))
                    lease.check()
    assert worked == 3


@in_both_worlds
async def test_a_second_signal_ends_the_leases_and_the_third_does_what_it_did_before(locks):
    received = []
    before = signal.signal(SIGNAL, lambda number, _: received.append(number))
    try:
        with pytest.raises(LeaseLostError) as lost:
            async with locks.draining_on(SIGNAL, within=PATIENCE), locks.lock("a") as lease:
                signal.raise_signal(SIGNAL)
                await comes(partial(drains, locks))
                assert lease.held
                signal.raise_signal(SIGNAL)
                await lease.wait_lost()
                lease.check()
        signal.raise_signal(SIGNAL)
    finally:
        signal.signal(SIGNAL, before)
    assert lost.value.reason is LossReason.DRAINED
    assert received == [SIGNAL] * 3, "the handler of a program is called too"


@in_both_worlds
async def test_errors_of_the_block_leave_and_without_a_signal_so_does_a_refusal(locks):
    with handlers_left_as_they_were():
        async with locks.draining_on(SIGNAL, within=PATIENCE):
            pass
        assert not locks.draining
        with pytest.raises(DrainingError):
            async with locks.draining_on(SIGNAL, within=PATIENCE):
                raise DrainingError("a", 0.0)
        with pytest.raises(ValueError, match="mine"):
            async with locks.draining_on(SIGNAL, within=PATIENCE):
                signal.raise_signal(SIGNAL)
                await comes(partial(drains, locks))
                raise ValueError("mine")


@in_both_worlds
async def test_what_cannot_drain_is_refused(locks):
    for signals in ((), ("SIGTERM",), (signal.SIGKILL,), (signal.SIGSTOP,), (0,), (9999,), (None,)):
        with pytest.raises(ConfigurationError, match="signal"):
            locks.draining_on(*signals, within=25)
    with pytest.raises(ConfigurationError, match="within"):
        locks.draining_on(SIGNAL, within=-1)
    block = locks.draining_on(SIGNAL, within=25)
    async with block:
        pass
    with pytest.raises(UsageError, match="once"):
        await block.__aenter__()


@in_both_worlds
async def test_a_lock_around_the_block_of_a_drain_is_no_body_in_it(locks):
    async with locks.lock("only one") as lease, locks.multilock("b", "c") as held:
        async with locks.draining_on(SIGNAL, within=2 * PATIENCE):
            while True:
                async with locks.lock("a"):
                    signal.raise_signal(SIGNAL)
                    await comes(partial(drains, locks))
        lease.check()
        held.check()


# The two fronts


class Fronts:
    """A class for tasks and the one for threads, and what one of them has alone."""

    def __init__(self, tasks, *, only_tasks=(), only_threads=()):
        self.tasks = tasks
        self.threads = getattr(fencing_sdk.sync, tasks.__name__)
        self.only_tasks = set(only_tasks)
        self.only_threads = set(only_threads)


FRONTS = [
    # `aclose` and `close` are one promise, and to run a coroutine and to diagnose are asked where a loop runs.
    Fronts(fencing_sdk.LockClient, only_tasks={"aclose", "diagnose"}, only_threads={"close", "run"}),
    Fronts(fencing_sdk.Lock),
    Fronts(fencing_sdk.recipes.Semaphore),
    Fronts(fencing_sdk.recipes.ReadWriteLock),
    # Tasks are cancelled by a loss. Threads ask, or are called.
    Fronts(fencing_sdk.Lease, only_threads={"on_lost"}),
    Fronts(fencing_sdk.recipes.PermitLease, only_threads={"on_lost"}),
    Fronts(fencing_sdk.recipes.MultiLock),
    Fronts(fencing_sdk.recipes.HeldLocks),
    Fronts(fencing_sdk.recipes.Election),
    Fronts(fencing_sdk.recipes.ElectionTerm),
]
WAITS_OF_THREADS = {"cancel", "interrupt", "timeout"}
"""Arguments of threads alone: a task is cancelled from outside."""


def members(front):
    return {name for name in dir(front) if not name.startswith("_")}


@pytest.mark.parametrize("fronts", FRONTS, ids=lambda fronts: fronts.tasks.__name__)
def test_what_one_front_has_the_other_has_too(fronts):
    for_tasks, for_threads = members(fronts.tasks), members(fronts.threads)
    assert for_tasks - for_threads == fronts.only_tasks
    assert for_threads - for_tasks == fronts.only_threads
    for name in for_tasks & for_threads:
        of_tasks, of_threads = getattr(fronts.tasks, name), getattr(fronts.threads, name)
        assert callable(of_tasks) == callable(of_threads), name
        if callable(of_tasks) and "options" not in inspect.signature(of_threads).parameters:
            parameters = [inspect.signature(of).parameters for of in (of_tasks, of_threads)]
            assert parameters[0].keys() == parameters[1].keys() - WAITS_OF_THREADS, name


ASKED = set(re.findall(r"\.([a-z_]+)", Path(__file__).read_text(encoding="utf-8")))
"""The attributes that the scenarios of this file ask for."""


@pytest.mark.parametrize("fronts", FRONTS, ids=lambda fronts: fronts.tasks.__name__)
def test_a_scenario_asks_for_everything_that_both_fronts_have(fronts):
    assert members(fronts.tasks) & members(fronts.threads) - {"get", "items", "keys", "values"} <= ASKED
