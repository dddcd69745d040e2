"""How a stay inside ``async with lock`` is judged when it ends."""

import asyncio

import pytest

from fencing_sdk import LeaseLostError, LockClient, LossReason, NoLeaseError, current_lease
from fencing_sdk._clock import BootClock
from fencing_sdk._tenure import Departure, Tenure
from fencing_sdk.backends.memory import MemoryBackend

HELD = None
LOST = LossReason.REVOKED


@pytest.fixture
async def tenure(stage):
    lease = await stage.lock().acquire()
    tenure = Tenure(lease)
    yield tenure
    tenure.lease.forget_scope()
    await lease.release()


def leaves(tenure, departure, original):
    """What leaves the ``async with``: what `conclude` raises, or else the original error."""
    try:
        tenure.conclude(departure, original)
    except BaseException as error:
        return error
    return original


async def test_a_clean_end_under_a_held_lease_leaves_nothing(tenure):
    assert leaves(tenure, Departure(None, swallowed=False, outer=False, lost=HELD), None) is None


async def test_a_clean_end_after_the_lease_leaves_the_loss(tenure):
    error = leaves(tenure, Departure(None, swallowed=False, outer=False, lost=LOST), None)
    assert isinstance(error, LeaseLostError)
    assert error.reason is LOST
    assert error.__suppress_context__


async def test_a_cancellation_by_the_lease_leaves_the_loss(tenure):
    error = leaves(tenure, Departure(None, swallowed=True, outer=False, lost=LOST), asyncio.CancelledError())
    assert isinstance(error, LeaseLostError)


async def test_a_cancellation_from_outside_wins_over_one_by_the_lease(tenure):
    error = leaves(tenure, Departure(None, swallowed=True, outer=True, lost=LOST), asyncio.CancelledError())
    assert isinstance(error, asyncio.CancelledError)


@pytest.mark.parametrize("lost", [HELD, LOST])
async def test_a_cancellation_from_outside_alone_leaves_as_it_is(tenure, lost):
    cancelled = asyncio.CancelledError("mine")
    assert leaves(tenure, Departure(cancelled, swallowed=False, outer=True, lost=lost), cancelled) is cancelled
    assert not hasattr(cancelled, "__notes__")


async def test_an_error_of_the_body_leaves_as_it_is(tenure):
    mine = ValueError("mine")
    assert leaves(tenure, Departure(mine, swallowed=False, outer=False, lost=HELD), mine) is mine
    assert not hasattr(mine, "__notes__")


async def test_an_error_of_the_body_gets_a_note_about_a_loss(tenure):
    mine = ValueError("mine")
    assert leaves(tenure, Departure(mine, swallowed=False, outer=False, lost=LOST), mine) is mine
    assert mine.__notes__ == ["fencing_sdk: the lease on 'a' (token 1) was lost too: revoked"]


async def test_the_loss_itself_needs_no_note_about_the_loss(tenure):
    refused = LeaseLostError("a", 1, LOST)
    assert leaves(tenure, Departure(refused, swallowed=False, outer=False, lost=LOST), refused) is refused
    assert not hasattr(refused, "__notes__")


@pytest.mark.parametrize("token", [7, 1])
async def test_the_loss_of_another_lease_gets_a_note_about_this_one(tenure, token):
    other = LeaseLostError("b", token, LOST)
    assert leaves(tenure, Departure(other, swallowed=False, outer=False, lost=LOST), other) is other
    assert len(other.__notes__) == 1


@pytest.mark.parametrize("original", [SystemExit(1), KeyboardInterrupt()])
async def test_what_ends_the_process_is_not_held_up_by_a_loss(tenure, original):
    assert leaves(tenure, Departure(original, swallowed=False, outer=False, lost=LOST), original) is original


async def test_a_closing_generator_counts_as_a_clean_end(tenure):
    closing = GeneratorExit()
    assert leaves(tenure, Departure(closing, swallowed=False, outer=False, lost=HELD), closing) is closing
    error = leaves(tenure, Departure(closing, swallowed=False, outer=False, lost=LOST), closing)
    assert isinstance(error, LeaseLostError)


async def test_what_remains_of_a_group_leaves_instead_of_the_group(tenure):
    rest = ExceptionGroup("rest", [ValueError()])
    group = BaseExceptionGroup("all", [ValueError(), asyncio.CancelledError()])
    assert leaves(tenure, Departure(rest, swallowed=False, outer=False, lost=LOST), group) is rest
    assert len(rest.__notes__) == 1


async def test_entering_makes_the_lease_current_and_leaving_undoes_it(stage):
    lease = await stage.lock().acquire()
    tenure = Tenure(lease)
    assert current_lease() is lease
    assert lease.host is tenure.task is asyncio.current_task()
    departure = tenure.leave(None)
    assert departure == Departure(None, swallowed=False, outer=False, lost=None)
    assert lease.host is None
    with pytest.raises(NoLeaseError):
        current_lease()
    await lease.release()


async def test_leaving_notices_a_cancellation_that_came_meanwhile(stage):
    async def stay():
        lease = await stage.lock().acquire()
        tenure = Tenure(lease)
        task = asyncio.current_task()
        task.cancel()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError as error:
            departure = tenure.leave(error)
        finally:
            task.uncancel()
        await lease.release()
        return departure

    departure = await asyncio.create_task(stay())
    assert departure.outer
    assert not departure.swallowed
    assert isinstance(departure.raised, asyncio.CancelledError)


async def test_a_cancellation_from_before_the_stay_is_not_counted(stage):
    async def stay():
        task = asyncio.current_task()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(30)
        async with stage.lock():
            stage.revoke_soon()
            await asyncio.sleep(30)

    staying = asyncio.create_task(stay())
    with pytest.raises(LeaseLostError):
        await staying
    assert staying.cancelling() == 1


async def test_a_body_stopped_by_a_timer_that_fired_early_is_told_that_the_lease_expired():
    """An event loop may round a timer down; here the clock of the lease runs slow, with the same effect."""

    class SlowClock(BootClock):
        def now(self):
            return super().now() / 2

    locks = LockClient(MemoryBackend(), clock=SlowClock())
    async with locks:
        with pytest.raises(LeaseLostError) as loss:
            async with locks.lock("a", max_hold=0.1) as lease:
                await asyncio.sleep(30)
        assert lease.lost_reason is LossReason.EXPIRED
    assert loss.value.reason is LossReason.EXPIRED


async def test_aborting_disarms_the_scope_and_names_the_plain_handle(stage):
    lease = await stage.lock(max_hold=0.1).acquire()
    tenure = Tenure(lease)
    error = tenure.abort()
    assert "lease = await lock.acquire() ... await lease.release()" in str(error)
    await asyncio.sleep(0.2)  # past the deadline
    assert not lease.held
    with pytest.raises(NoLeaseError):
        current_lease()
    tenure._scope.__exit__(None, None, None)
    await lease.release()
