"""
What the body of ``async with lock`` sees, and what its caller sees afterwards, on every loop.

Each test plays a caller in a task of its own. `stage.watch` tells what the caller saw at the very
moment it was left: the exception, the task's cancellation count, the locks that the store still
had granted, and the leases that were still in its context. ``tidy`` means: none of the last three.
"""

import asyncio
import contextlib
import sys
import threading
import time

import anyio
import pytest
from inside import state_of
from looking import holder

from fencing_sdk import LeaseLostError, LossReason, UsageError, current_lease, current_token
from fencing_sdk.abc import Claim
from fencing_sdk.errors import NoLeaseError

pytestmark = [pytest.mark.every_loop, pytest.mark.usefixtures("no_blocking_calls")]

REVOKED = ("a", LossReason.REVOKED)
SOON_OVER = {"ttl": 100, "max_hold": 0.05, "heartbeat_interval": 20}
"""A deadline that comes soon and for sure; and a loop has to be five seconds late before that counts as a stall."""
TASK_GROUPS_FORGET_TO_UNCANCEL = sys.version_info < (3, 13)


async def forever():
    await asyncio.Event().wait()


def block(seconds):
    """Keep the loop from turning, as a long computation does."""
    time.sleep(seconds)


class Felt(list):
    """What went through a piece of code: the names of the exceptions that came out of its awaits."""

    async def awaiting(self, work=forever):
        try:
            await work()
        except BaseException as error:
            self.append(type(error))
            raise


# A body that the lease outlives


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
async def test_an_error_of_the_body_leaves_as_the_same_object(stage, error):
    async def caller():
        async with stage.lock():
            raise error

    seen = await stage.watch(caller)
    assert seen.error is error
    assert seen.notes == []
    assert seen.error.__cause__ is None
    assert seen.tidy


# A lease that ends before the body


async def vanish(stage, lease):
    await stage.store.give_back(state_of(lease).claim)


async def pass_on(stage, lease):
    await vanish(stage, lease)
    await stage.store.draw(Claim("a", 60.0, owner="rival"))


async def revoke(stage, lease):
    stage.revoke()


async def expire(stage, lease):
    """Do nothing: its ``max_hold`` ends it."""


@pytest.mark.parametrize(
    ("reason", "happens", "options"),
    [
        (LossReason.EXPIRED, expire, SOON_OVER),
        (LossReason.REFUSED, vanish, {}),
        (LossReason.REVOKED, revoke, {}),
        (LossReason.TAKEN_OVER, pass_on, {}),
    ],
)
async def test_a_lost_lease_cancels_the_body_and_leaves_as_a_bare_error(stage, reason, happens, options):
    felt = Felt()

    async def caller():
        async with stage.lock(**options) as lease:
            await happens(stage, lease)
            await felt.awaiting()

    seen = await stage.watch(caller)
    assert felt == [asyncio.CancelledError]
    assert seen.kind is LeaseLostError
    assert seen.lost == ("a", reason)
    assert seen.error.token == 1
    assert seen.error.__cause__ is None
    assert seen.error.__suppress_context__  # the cancellation is how it was done, not what happened
    assert seen.cancelling == 0
    assert seen.leases == ()
    assert seen.held == (("a",) if reason is LossReason.TAKEN_OVER else ())
    if seen.held:
        rival = await holder(stage.store, "a")
        assert rival.token == 2  # the rival's grant was not touched by our leaving


async def test_closing_the_client_ends_the_work_under_its_leases(stage):
    async def caller():
        async with stage.lock():
            asyncio.get_running_loop().call_soon(lambda: closing.append(asyncio.ensure_future(stage.client.aclose())))
            await forever()

    closing = []
    seen = await stage.watch(caller)
    await closing[0]
    assert seen.lost == ("a", LossReason.CLOSED)
    assert seen.cancelling == 0
    assert await stage.free()


async def test_a_body_that_swallows_the_cancellation_is_cancelled_again_and_does_not_hide_the_loss(stage):
    felt = Felt()

    async def caller():
        async with stage.lock():
            stage.revoke_soon()
            for _ in range(3):
                with contextlib.suppress(asyncio.CancelledError):
                    await felt.awaiting()
            return "as if nothing had happened"

    seen = await stage.watch(caller)
    assert felt == [asyncio.CancelledError] * 3
    assert seen.value is None
    assert seen.lost == REVOKED
    assert seen.tidy


async def test_a_body_that_ends_late_without_awaiting_is_told_at_the_end(stage):
    async def caller():
        async with stage.lock(ttl=0.6, heartbeat_interval=0.15):
            block(0.6)
            return "too late"

    seen = await stage.watch(caller)
    assert seen.value is None
    assert seen.lost == ("a", LossReason.STALLED)
    assert seen.tidy


async def test_an_error_of_the_body_is_noted_when_the_lease_was_lost_as_well(stage):
    async def caller():
        async with stage.lock():
            stage.revoke()
            raise ValueError("mine")

    seen = await stage.watch(caller)
    assert seen.kind is ValueError
    assert seen.notes == ["fencing_sdk: the lease on 'a' (token 1) was lost too: revoked"]
    assert seen.tidy


async def test_an_error_of_the_bodys_clean_up_leaves_with_a_note_about_the_loss(stage):
    async def caller():
        async with stage.lock():
            stage.revoke_soon()
            try:
                await forever()
            finally:
                raise ValueError("clean-up failed")

    seen = await stage.watch(caller)
    assert seen.kind is ValueError
    assert len(seen.notes) == 1
    assert isinstance(seen.error.__context__, asyncio.CancelledError)
    assert seen.tidy


async def test_clean_up_that_takes_more_than_half_of_the_safety_buffer_needs_a_shield(stage):
    done = []

    async def caller():
        async with stage.lock(safety_buffer=0.6):
            stage.revoke_soon()
            try:
                await forever()
            finally:
                await asyncio.sleep(0.01)
                done.append("short")
                with contextlib.suppress(asyncio.CancelledError):
                    await forever()
                    done.append("long")
                with anyio.CancelScope(shield=True):
                    await asyncio.sleep(0.9)
                    done.append("shielded")

    seen = await stage.watch(caller)
    assert done == ["short", "shielded"]
    assert seen.lost == REVOKED
    assert seen.tidy


# Timeouts around the lock, and inside it


@contextlib.asynccontextmanager
async def asyncio_timeout():
    """Yields a function that makes the timeout come soon; before that it is far away."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(3600) as timeout:
        yield lambda: timeout.reschedule(loop.time() + 0.01)


@contextlib.asynccontextmanager
async def anyio_fail_after():
    with anyio.fail_after(3600) as scope:
        yield lambda: setattr(scope, "deadline", anyio.current_time() + 0.01)


@contextlib.asynccontextmanager
async def anyio_move_on_after():
    with anyio.move_on_after(3600) as scope:
        yield lambda: setattr(scope, "deadline", anyio.current_time() + 0.01)


TIMEOUTS = pytest.mark.parametrize("timeout", [asyncio_timeout, anyio_fail_after])
SCOPES = pytest.mark.parametrize("timeout", [asyncio_timeout, anyio_fail_after, anyio_move_on_after])


@TIMEOUTS
async def test_a_timeout_around_the_lock_surfaces_after_the_lock_is_free(stage, timeout):
    async def caller():
        async with timeout() as come_soon, stage.lock():
            come_soon()
            await forever()

    seen = await stage.watch(caller)
    assert seen.kind is TimeoutError
    assert seen.tidy


@SCOPES
async def test_a_loss_passes_through_a_timeout_around_the_lock_that_is_not_due(stage, timeout):
    async def caller():
        async with timeout(), stage.lock():
            stage.revoke_soon()
            await forever()

    seen = await stage.watch(caller)
    assert seen.lost == REVOKED
    assert seen.tidy


@SCOPES
async def test_a_loss_passes_through_a_timeout_in_the_body_that_is_not_due(stage, timeout):
    async def caller():
        async with stage.lock():
            stage.revoke_soon()
            async with timeout():
                await forever()

    seen = await stage.watch(caller)
    assert seen.lost == REVOKED
    assert seen.tidy


def both_in_one_turn(stage, timeout, *, loss_first):
    """Make a loss and *timeout* fall due while the loop is blocked, so that one turn of it handles both, in order."""
    loop = asyncio.get_running_loop()
    due = loop.time() + 0.01
    # The earlier timer is set first: uvloop counts the delay of each from the moment at which it is set.
    if loss_first:
        loop.call_at(due - 0.005, stage.revoke_and_ring)
    timeout.reschedule(due)
    if not loss_first:
        loop.call_at(due + 0.005, stage.revoke)
    block(0.03)


@pytest.mark.parametrize("loss_first", [True, False])
async def test_an_outer_timeout_wins_over_a_loss_in_the_same_turn_of_the_loop(stage, loss_first):
    async def caller():
        async with asyncio.timeout(None) as timeout:
            async with stage.lock():
                both_in_one_turn(stage, timeout, loss_first=loss_first)
                await forever()

    seen = await stage.watch(caller)
    assert seen.kind is TimeoutError
    assert seen.tidy


async def test_a_loss_that_comes_first_in_a_turn_wins_over_an_inner_timeout(stage):
    async def caller():
        async with stage.lock():
            async with asyncio.timeout(None) as timeout:
                both_in_one_turn(stage, timeout, loss_first=True)
                await forever()

    seen = await stage.watch(caller)
    assert seen.lost == REVOKED
    assert seen.tidy


@pytest.mark.parametrize("loss_first", [True, False])
async def test_an_outer_anyio_scope_wins_over_a_loss_in_the_same_turn(stage, loss_first):
    async def caller():
        with anyio.CancelScope() as scope:
            async with stage.lock():
                both = (stage.revoke, scope.cancel)
                stage.soon(*(both if loss_first else reversed(both)))
                await forever()
        return scope.cancelled_caught

    seen = await stage.watch(caller)
    assert seen.error is None
    assert seen.value is True
    assert seen.tidy


async def test_wait_for_in_the_body_gives_way_to_a_loss(stage):
    felt = Felt()

    async def caller():
        async with stage.lock():
            stage.revoke_soon()
            await asyncio.wait_for(felt.awaiting(), 30)

    seen = await stage.watch(caller)
    assert felt == [asyncio.CancelledError]
    assert seen.lost == REVOKED
    assert seen.tidy


async def test_gather_in_the_body_is_cancelled_with_all_its_children(stage):
    felt = Felt()

    async def caller():
        async with stage.lock():
            stage.revoke_soon()
            await asyncio.gather(felt.awaiting(), felt.awaiting())

    seen = await stage.watch(caller)
    assert felt == [asyncio.CancelledError] * 2
    assert seen.lost == REVOKED
    assert seen.tidy


# Somebody else cancels the task


def cancel_me():
    task = asyncio.current_task()
    assert task is not None
    return task.cancel


async def test_a_cancelled_task_leaves_as_without_us_and_with_the_lock_free(stage):
    async def caller():
        async with stage.lock():
            stage.soon(cancel_me())
            await forever()

    seen = await stage.watch(caller)
    assert seen.kind is asyncio.CancelledError
    assert seen.cancelling == 1
    assert seen.held == ()
    assert seen.leases == ()


@pytest.mark.parametrize("loss_first", [True, False])
async def test_a_cancellation_wins_over_a_loss_in_the_same_turn(stage, loss_first):
    async def caller():
        async with stage.lock():
            both = (stage.revoke, cancel_me())
            stage.soon(*(both if loss_first else reversed(both)))
            await forever()

    seen = await stage.watch(caller)
    assert seen.kind is asyncio.CancelledError
    assert seen.cancelling == 1
    assert seen.held == ()


async def test_a_cancellation_that_the_body_is_still_cleaning_up_after_wins_over_a_later_loss(stage):
    async def caller():
        async with stage.lock():
            stage.soon(cancel_me())
            try:
                await forever()
            finally:
                with anyio.CancelScope(shield=True):
                    stage.revoke()
                    await asyncio.sleep(0.01)

    seen = await stage.watch(caller)
    assert seen.kind is asyncio.CancelledError
    assert seen.cancelling == 1
    assert seen.held == ()


async def test_a_cancellation_during_the_release_waits_for_it_and_then_leaves(stage):
    stage.network.delay("release", 0.05)
    released = []

    async def caller():
        try:
            async with stage.lock():
                stage.soon(cancel_me(), lambda: released.append(stage.network.calls[-1][0]))
        finally:
            released.append(await stage.free())

    seen = await stage.watch(caller)
    assert released == ["release", True]  # cancelled while the release was on its way, left when it had arrived
    assert seen.kind is asyncio.CancelledError
    assert seen.cancelling == 1
    assert seen.held == ()


async def test_a_cancellation_during_the_release_after_a_loss_wins(stage):
    stage.network.delay("release", 0.05)

    async def caller():
        async with stage.lock():
            stage.revoke()
            stage.soon(cancel_me())

    seen = await stage.watch(caller)
    assert seen.kind is asyncio.CancelledError
    assert seen.cancelling == 1


async def test_an_outer_scope_that_is_cancelled_already_does_not_cut_the_release_short(stage):
    stage.network.delay("release", 0.05)

    async def caller():
        with anyio.CancelScope() as scope:
            async with stage.lock():
                scope.cancel()
        return await stage.free()

    seen = await stage.watch(caller)
    assert seen.value is True
    assert seen.tidy


async def test_an_outer_scope_that_is_cancelled_already_does_not_replace_the_error_of_the_body(stage):
    stage.network.delay("release", 0.05)

    async def caller():
        with anyio.CancelScope() as scope:
            async with stage.lock():
                scope.cancel()
                raise ValueError("mine")

    seen = await stage.watch(caller)
    assert seen.kind is ValueError
    assert seen.tidy


async def test_a_cancelled_await_of_another_task_is_not_mistaken_for_a_cancellation_of_ours(stage):
    async def caller():
        async with stage.lock():
            other = asyncio.ensure_future(forever())
            stage.soon(other.cancel)
            await other

    seen = await stage.watch(caller)
    assert seen.kind is asyncio.CancelledError
    assert seen.tidy


# One lock inside another


@pytest.mark.parametrize(("lost", "reported"), [("i", "i"), ("o", "o"), ("io", "o"), ("oi", "o")])
async def test_of_nested_locks_the_outermost_lost_one_is_reported_and_all_are_free(stage, lost, reported):
    async def caller():
        async with stage.lock("o"), stage.lock("i"):
            stage.soon(*(lambda name=name: stage.revoke(name) for name in lost))
            await forever()

    seen = await stage.watch(caller)
    assert seen.lost == (reported, LossReason.REVOKED)
    assert seen.notes == []
    assert seen.tidy


async def test_the_innermost_lease_is_current_and_the_outer_one_is_found_by_name(stage):
    async def caller():
        async with stage.lock("o") as outer:
            async with stage.lock("i") as inner:
                assert current_lease() is inner
                assert current_lease("o") is outer
                assert current_token("o") == outer.token
            assert current_lease() is outer
            with pytest.raises(NoLeaseError):
                current_lease("i")

    seen = await stage.watch(caller)
    assert seen.error is None
    assert seen.tidy


# Task groups


async def in_asyncio_group(*work):
    async with asyncio.TaskGroup() as group:
        for each in work:
            group.create_task(each())


async def in_anyio_group(*work):
    async with anyio.create_task_group() as group:
        for each in work:
            group.start_soon(each)


GROUPS = pytest.mark.parametrize("in_group", [in_asyncio_group, in_anyio_group])


@GROUPS
async def test_the_children_of_a_task_group_in_the_body_are_cancelled_and_one_bare_error_leaves(stage, in_group):
    felt = Felt()

    async def caller():
        async with stage.lock():
            stage.revoke_soon()
            await in_group(felt.awaiting, felt.awaiting, felt.awaiting)

    seen = await stage.watch(caller)
    assert felt == [asyncio.CancelledError] * 3
    assert seen.lost == REVOKED
    assert seen.tidy


@GROUPS
async def test_a_loss_in_one_child_of_a_group_leaves_as_the_groups_error_and_cancels_the_siblings(stage, in_group):
    felt = Felt()

    async def holder():
        async with stage.lock():
            stage.revoke_soon()
            await forever()

    async def caller():
        await in_group(holder, felt.awaiting)

    seen = await stage.watch(caller)
    assert felt == [asyncio.CancelledError]
    assert seen.kind is ExceptionGroup
    assert [repr(error) for error in seen.error.exceptions] == [repr(LeaseLostError("a", 1, LossReason.REVOKED))]
    assert seen.held == ()
    assert seen.leases == ()
    if in_group is in_anyio_group or not TASK_GROUPS_FORGET_TO_UNCANCEL:
        assert seen.cancelling == 0


# What cancellation does not reach: threads, shields, orphans


def worker(may_end, ended):
    may_end.wait(30)
    ended.set()


async def test_a_thread_that_must_not_be_abandoned_is_waited_for(stage):
    may_end, ended = threading.Event(), threading.Event()

    async def caller():
        async with stage.lock():
            stage.soon(stage.revoke, lambda: asyncio.get_running_loop().call_later(0.05, may_end.set))
            await anyio.to_thread.run_sync(worker, may_end, ended)

    seen = await stage.watch(caller)
    assert ended.is_set()
    assert seen.lost == REVOKED
    assert seen.tidy


async def in_asyncio_thread(*call):
    await asyncio.to_thread(*call)


async def in_abandoned_thread(*call):
    await anyio.to_thread.run_sync(*call, abandon_on_cancel=True)


@pytest.mark.parametrize("in_thread", [in_asyncio_thread, in_abandoned_thread])
async def test_an_abandoned_thread_runs_on_without_a_token(stage, in_thread):
    loop = asyncio.get_running_loop()
    lost, refused, may_end = threading.Event(), threading.Event(), threading.Event()

    def work():
        loop.call_soon_threadsafe(stage.revoke)
        lost.wait(30)
        with contextlib.suppress(LeaseLostError):
            current_token()
            return
        refused.set()
        may_end.wait(30)

    async def caller():
        async with stage.lock():
            await in_thread(work)

    seen = await stage.watch(caller)
    assert seen.lost == REVOKED
    assert seen.tidy
    lost.set()
    try:
        await asyncio.to_thread(refused.wait, 30)
        assert refused.is_set()
    finally:
        may_end.set()


async def test_a_thread_may_be_the_first_to_see_that_the_lease_is_over(stage):
    read = []

    def work(lease):
        block(0.06)
        for _ in range(2):
            try:
                read.append(lease.token)
            except LeaseLostError as error:
                read.append(error.reason)

    async def caller():
        async with stage.lock(**SOON_OVER) as lease:
            thread = threading.Thread(target=work, args=(lease,))
            thread.start()
            while thread.is_alive():
                block(0.01)  # so that this thread cannot be the first
            await forever()

    seen = await stage.watch(caller)
    assert read == [LossReason.EXPIRED] * 2
    assert seen.lost == ("a", LossReason.EXPIRED)
    assert seen.tidy


async def test_a_shielded_block_runs_to_its_end_without_a_token(stage):
    went_on = []

    async def caller():
        async with stage.lock() as lease:
            stage.revoke_soon()
            with anyio.CancelScope(shield=True):
                await lease.wait_lost()
                await asyncio.sleep(0.01)
                with pytest.raises(LeaseLostError):
                    _ = lease.token
                went_on.append(True)
            await forever()

    seen = await stage.watch(caller)
    assert went_on
    assert seen.lost == REVOKED
    assert seen.tidy


# Wrapped in other context managers


# One lock object, many tasks


async def test_a_late_leaver_does_not_touch_the_next_holder_on_the_same_lock_object(stage):
    lock = stage.lock(backoff=lambda _: 0.001)
    first_holds, next_holds, loser_left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def loser():
        async with lock:
            first_holds.set()
            with anyio.CancelScope(shield=True):
                await next_holds.wait()

    async def next_holder():
        async with lock as lease:
            next_holds.set()
            await loser_left.wait()
            await lease.renew()  # the store agrees
            return lease.token

    losing = asyncio.ensure_future(stage.watch(loser))
    await first_holds.wait()
    stage.revoke()
    winning = asyncio.ensure_future(stage.watch(next_holder))
    lost = await losing
    loser_left.set()
    won = await winning
    assert lost.lost == REVOKED
    assert lost.held == ("a",)
    assert won.value == 2
    assert won.tidy


async def test_a_task_that_did_not_enter_cannot_leave_while_two_tasks_are_inside(stage):
    lock = stage.lock(backoff=lambda _: 0.001)
    may_leave = asyncio.Event()

    async def user(inside):
        async with lock as lease:
            inside.set_result(lease)
            with anyio.CancelScope(shield=True):
                await may_leave.wait()

    users, leases = [], []
    for _ in range(2):
        stage.revoke_and_ring()
        inside = asyncio.get_running_loop().create_future()
        users.append(asyncio.ensure_future(stage.watch(lambda inside=inside: user(inside))))
        leases.append(await inside)
    with pytest.raises(UsageError, match="did not enter"):
        await lock.__aexit__(None, None, None)
    assert [lease.held for lease in leases] == [False, True]
    may_leave.set()
    assert (await users[0]).lost == REVOKED
    assert (await users[1]).error is None
    assert await stage.free()
