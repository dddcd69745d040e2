"""The lease of the code that runs now."""

import asyncio
import contextvars

import pytest

from fencing_sdk import LeaseLostError, LockClient, NoLeaseError, UsageError, current_lease, current_token, sync
from fencing_sdk._current_lease import held_here, pop, push
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.integrations.messages import current_metadata


async def test_without_a_lock_there_is_no_lease_and_the_error_says_where_there_would_be_one():
    for ask in (current_lease, current_token):
        with pytest.raises(NoLeaseError, match="no lease in this context; call from inside 'async with lock'"):
            ask()
        with pytest.raises(NoLeaseError, match="no lease on 'seats/42' in this context"):
            ask("seats/42")


async def test_having_no_lease_is_a_failed_lookup_and_a_misuse():
    with pytest.raises(LookupError):
        current_lease()
    with pytest.raises(UsageError):
        current_lease()


async def test_the_lease_and_its_token_are_current_inside_and_gone_outside(stage):
    async with stage.lock() as lease:
        assert current_lease() is lease
        assert current_token() == lease.token
        assert current_token().holder == lease.holder
    assert held_here() == ()


async def test_the_innermost_lease_is_current_and_each_is_found_by_its_name(stage):
    async with stage.lock("outer") as outer:
        async with stage.lock("inner") as inner:
            assert held_here() == (outer, inner)
            assert current_lease() is inner
            assert current_lease("outer") is outer
            assert current_token("inner") == inner.token
            with pytest.raises(NoLeaseError, match="'other'"):
                current_lease("other")
        assert current_lease() is outer


SHARES = {
    "permit": lambda locks: locks.semaphore("pool", permits=2),
    "reader": lambda locks: locks.rwlock("pool").reader,
}
"""What is passed over unless it is asked for by its name."""


def check_that_shares_are_passed_over(share, lock=None):
    """What the code sees under *share*, and perhaps under *lock*."""
    assert (current_token("pool"), current_token("pool").holder) == (share.token, share.token.holder)
    assert dict(current_metadata("pool")) == {"fencing-token": share.headers()["Fencing-Token"]}
    if lock is not None:
        assert sync.current_lease() is lock
        assert current_token() == lock.token
        assert dict(current_metadata()) == {"fencing-token": lock.headers()["Fencing-Token"]}
        return
    for ask in (sync.current_lease, current_token, current_metadata):
        with pytest.raises(NoLeaseError, match=r"by its name, such as current_token\('pool'\)") as none:
            ask()
        assert (none.value.name, none.value.shared) == (None, "pool")


@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.parametrize("outer", ["share", "lock"])
@pytest.mark.parametrize("alone", ["lock", "writer"])
async def test_permits_and_readers_are_current_on_request_only(kind, outer, alone):
    async with LockClient(MemoryBackend(tokens="counter")) as locks:
        share = SHARES[kind](locks)
        lock = locks.lock("seats") if alone == "lock" else locks.rwlock("seats").writer
        async with share as lease:
            check_that_shares_are_passed_over(lease)
        if outer == "share":
            async with share as lease, lock as held:
                check_that_shares_are_passed_over(lease, held)
        else:
            async with lock as held, share as lease:
                check_that_shares_are_passed_over(lease, held)


@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.parametrize("outer", ["share", "lock"])
@pytest.mark.parametrize("alone", ["lock", "writer"])
def test_in_threads_permits_and_readers_are_current_on_request_only(kind, outer, alone):
    with sync.SyncLockClient(LockClient(MemoryBackend(tokens="counter"))) as locks:
        share = SHARES[kind](locks)
        lock = locks.lock("seats") if alone == "lock" else locks.rwlock("seats").writer
        with share as lease:
            check_that_shares_are_passed_over(lease)
        if outer == "share":
            with share as lease, lock as held:
                check_that_shares_are_passed_over(lease, held)
        else:
            with lock as held, share as lease:
                check_that_shares_are_passed_over(lease, held)


async def test_a_lease_is_found_by_the_users_name_and_not_by_the_stores(stage):
    stage.client._namespace = "shop"
    async with stage.lock("seats") as lease:
        assert current_lease("seats") is lease
        with pytest.raises(NoLeaseError):
            current_lease("shop:seats")


async def test_a_lease_that_is_over_stays_current_so_that_its_token_is_refused_and_not_missing(stage):
    async with stage.lock() as lease:
        await lease.release()
        assert current_lease() is lease
        with pytest.raises(LeaseLostError):
            current_token()


async def test_a_plain_handle_is_not_current(stage):
    lease = await stage.lock().acquire()
    with pytest.raises(NoLeaseError):
        current_lease()
    await lease.release()


async def test_what_a_copied_context_was_entered_under_is_seen_there_only(stage):
    before = contextvars.copy_context()
    async with stage.lock() as lease:
        inside = contextvars.copy_context()
        assert before.run(held_here) == ()
    assert held_here() == ()
    assert inside.run(held_here) == (lease,)


async def test_undoing_in_another_context_does_nothing(stage):
    lease = await stage.lock().acquire()
    push(lease)
    contextvars.Context().run(pop, lease)
    assert current_lease() is lease
    pop(lease)
    assert held_here() == ()
    await lease.release()


async def test_a_child_that_enters_a_lock_does_not_change_its_parents_context(stage):
    async def child():
        async with stage.lock("inner"):
            assert [lease.name for lease in held_here()] == ["outer", "inner"]

    async with stage.lock("outer") as outer:
        await asyncio.create_task(child())
        assert held_here() == (outer,)
