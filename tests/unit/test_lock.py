"""A lock: how it is taken and released, by a block, by calls, and by a decorator."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import time
from datetime import timedelta
from functools import partial

import pytest
from inside import THIS_PROCESS, state_of
from looking import holder

import fencing_sdk._engine.lease_scope
from fencing_sdk import (
    AcquireTimeoutError,
    BackendUnavailableError,
    LeaseLostError,
    LockClient,
    LockHeldError,
    LossReason,
    StaleTokenError,
    UsageError,
)
from fencing_sdk.backends.memory import MemoryBackend

# A name and a way to hold it: entering, the plain handle, and what goes with a grant.


async def forever():
    await asyncio.Event().wait()


def test_a_locks_text_escapes_and_cuts_its_name():
    text = repr(LockClient(MemoryBackend()).lock("ü" * 200))
    assert text.isascii()
    assert len(text) < 150


async def test_a_token_of_zero_is_a_token_like_any_other(stage):
    """Some stores begin to count there."""
    stage.store._lines._next_token = lambda last: 0
    async with stage.lock() as lease:
        assert lease.token == 0
        assert lease.headers()["Fencing-Token"].startswith("0;")


async def test_a_forked_child_that_leaves_the_block_gives_nothing_back(monkeypatch):
    store = MemoryBackend()
    async with LockClient(store) as locks:
        with monkeypatch.context() as in_the_child, pytest.raises(LeaseLostError) as lost:
            async with locks.lock("a"):
                in_the_child.setattr(os, "getpid", partial(int, os.getpid() + 1))
                in_the_child.setattr(THIS_PROCESS, os.getpid())
        assert lost.value.reason is LossReason.CLOSED
        assert await holder(store, "a") is not None


async def test_a_forked_child_acquires_nothing_by_the_client_of_its_parent(monkeypatch):
    async with LockClient(MemoryBackend()) as locks:
        with monkeypatch.context() as in_the_child:
            in_the_child.setattr(os, "getpid", partial(int, os.getpid() + 1))
            with pytest.raises(UsageError, match="before a fork"):
                await locks.lock("a").acquire()


async def test_a_loss_that_only_the_clock_has_shown_is_told_before_the_release():
    kinds = []
    async with LockClient(MemoryBackend(), observers=[lambda event: kinds.append(event.kind)]) as locks:
        with pytest.raises(LeaseLostError):
            async with locks.lock("a", max_hold=0.05):
                time.sleep(0.1)  # noqa: ASYNC251  (the event loop is blocked: no timer has shown the loss)
        await asyncio.sleep(0)
    assert kinds.index("lost") < kinds.index("released")


async def test_attempts_without_an_answer_are_known_when_observers_hear_of_the_lease():
    """An observer may close the client, which then has to undo them."""

    class SilentAtFirst(MemoryBackend):
        attempts = 0

        async def draw(self, claim, **options):
            self.attempts += 1
            if self.attempts == 1:
                await asyncio.sleep(30)
            return await super().draw(claim, **options)

    def see(event):
        if event.kind == "acquired":
            known.extend(lease.unanswered_calls for lease in locks._engine._heartbeat.leases.values())

    known = []
    async with LockClient(SilentAtFirst(), observers=[see]) as locks, locks.lock("a", ttl=1, wait=30):
        assert [len(calls) for calls in known] == [1]


# Patience


async def test_asked_once_a_held_lock_tells_how_long_its_lease_has_left(stage):
    async with stage.lock():
        with pytest.raises(LockHeldError) as refusal:
            async with stage.lock(wait=0):
                pass
    assert refusal.value.name == "a"
    assert 0 < refusal.value.retry_after <= 10


async def test_trying_once_gives_the_lease_or_none(stage):
    lock = stage.lock()
    lease = await lock.try_acquire()
    assert lease.held
    assert await lock.try_acquire() is None
    await lease.release()
    again = await lock.try_acquire()
    assert again.token > state_of(lease).number
    await again.release()


async def test_trying_once_raises_when_the_store_does_not_answer_because_that_is_no_no(stage):
    stage.network.fail("acquire")
    with pytest.raises(BackendUnavailableError):
        await stage.lock().try_acquire()


async def test_trying_once_does_not_change_the_patience_of_the_lock(stage):
    lock = stage.lock(backoff=lambda _: 0.001)
    held = await lock.acquire()
    assert await lock.try_acquire() is None
    waiting = asyncio.ensure_future(lock.acquire())
    stage.soon(lambda: asyncio.ensure_future(held.release()))
    await (await waiting).release()


# The plain handle


async def test_a_plain_handle_may_be_released_by_another_task(stage):
    lease = await stage.lock().acquire()
    await asyncio.create_task(lease.release())
    assert not lease.held
    assert await stage.free()


async def test_the_block_of_a_plain_handle_may_be_left_by_another_task(stage):
    """As in a fixture, whose set-up and clean-up may run in different tasks."""

    async def fixture():
        async with await stage.lock().acquire() as lease:
            yield lease

    generator = fixture()
    lease = await asyncio.create_task(anext(generator))
    assert lease.held
    await asyncio.create_task(generator.aclose())
    assert not lease.held
    assert await stage.free()


async def test_the_block_of_a_plain_handle_is_not_cancelled_when_the_lease_is_lost(stage):
    ended = []

    async def caller():
        async with await stage.lock().acquire() as lease:
            stage.revoke()
            await asyncio.sleep(0.01)
            assert lease.lost_reason is LossReason.REVOKED
            ended.append("to the end")

    seen = await stage.watch(caller)
    assert ended == ["to the end"]
    assert isinstance(seen.error, LeaseLostError)
    assert seen.tidy


async def test_the_errors_of_the_block_of_a_plain_handle_leave_it_as_they_are(stage):
    mine = ValueError("mine")

    async def caller():
        async with await stage.lock().acquire():
            raise mine

    seen = await stage.watch(caller)
    assert seen.error is mine
    assert seen.notes == []
    assert seen.tidy


async def test_a_refused_write_in_the_block_of_a_plain_handle_is_told(stage):
    with pytest.raises(StaleTokenError):
        async with await stage.lock().acquire() as lease:
            raise StaleTokenError("a", lease.token, lease.token + 1)
    assert [event.kind for event in stage.events] == ["acquiring", "acquired", "stale_rejected", "released"]


async def test_the_patience_of_one_call_is_its_own(stage):
    lock = stage.lock(wait=30)
    async with await lock.acquire():
        with pytest.raises(LockHeldError):
            await lock.acquire(wait=0)
        with pytest.raises(AcquireTimeoutError):
            await lock.acquire(wait=timedelta(milliseconds=20))
    impatient = stage.lock(wait=0)
    held = await impatient.acquire()
    waiting = asyncio.create_task(impatient.acquire(wait=None))
    await stage.heard("acquiring")
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await held.release()
    async with await waiting as lease:
        assert lease.held
    with pytest.raises(LockHeldError):
        async with impatient:
            await impatient.acquire()


async def test_a_task_that_waits_for_its_own_lock_is_refused_by_the_patience_of_the_call(stage):
    lock = stage.lock(wait=0)
    async with lock:
        with pytest.raises(UsageError, match="not reentrant"):
            await lock.acquire(wait=5)


async def test_a_lock_tells_whether_any_holder_has_it(stage):
    lock = stage.lock()
    assert await lock.locked() is False
    async with stage.lock():
        assert await lock.locked() is True
    assert await lock.locked() is False
    stage.network.fail("inspect")
    with pytest.raises(BackendUnavailableError):
        await lock.locked()


async def test_a_lock_asks_for_itself_in_its_namespace():
    store = MemoryBackend()
    async with LockClient(store, namespace="shop") as ours, LockClient(store) as theirs, theirs.lock("a"):
        assert not await ours.lock("a").locked()
        async with ours.lock("a"):
            assert await ours.lock("a").locked()


async def test_renewing_by_hand_moves_the_deadline_and_tells_a_loss_at_once(stage):
    lease = await stage.lock(heartbeat_interval=2).acquire()
    before = state_of(lease).deadline
    await asyncio.sleep(0.01)
    await lease.renew()
    assert state_of(lease).deadline > before
    await stage.store.give_back(state_of(lease).claim)
    with pytest.raises(LeaseLostError) as loss:
        await lease.renew()
    assert loss.value.reason is LossReason.REFUSED
    await lease.release()


async def test_renewing_by_hand_without_an_answer_is_no_loss(stage):
    lease = await stage.lock(heartbeat_interval=2).acquire()
    stage.network.fail("renew", times=1)
    with pytest.raises(BackendUnavailableError):
        await lease.renew()
    assert lease.held
    await lease.release()


async def test_a_lease_that_is_released_while_it_is_renewed_by_hand_is_over(stage):
    """The store may have renewed it before it was released: both answers are under way."""
    lease = await stage.lock(heartbeat_interval=2).acquire()
    stage.network.delay("renew", 0.05)
    renewing = asyncio.create_task(lease.renew())
    await asyncio.sleep(0.01)
    await lease.release()
    with pytest.raises(LeaseLostError, match="was released"):
        await renewing
    assert [event.kind for event in stage.events] == ["acquiring", "acquired", "released"]


async def test_so_it_is_when_the_renewal_gets_no_answer(stage):
    lease = await stage.lock(heartbeat_interval=0.1).acquire()
    stage.network.hang("renew")
    renewing = asyncio.create_task(lease.renew())
    await asyncio.sleep(0.01)
    await lease.release()
    with pytest.raises(LeaseLostError, match="was released"):
        await renewing


async def test_max_hold_ends_work_that_would_be_renewed_for_ever(stage):
    async def caller():
        async with stage.lock(ttl=4, heartbeat_interval=0.1, max_hold=3.6):
            await forever()

    seen = await stage.watch(caller)
    assert seen.kind is LeaseLostError
    assert [event for event in stage.events if event.kind == "renewed"]
    assert seen.tidy


# What goes with a grant


async def test_the_label_and_the_holders_digest_are_shown_to_whoever_asks(stage):
    async with stage.lock(label="worker 3") as lease:
        holder = await stage.client.inspect("a")
        assert holder.name == "a"
        assert holder.label == "worker 3"
        assert holder.token == lease.token
        assert holder.id == lease.holder
        assert 0 < holder.remaining <= 10
        assert lease.owner not in repr(holder)
    assert await stage.client.inspect("a") is None


async def test_a_lock_whose_body_cannot_be_entered_is_released(stage, monkeypatch):
    def push(lease):
        raise MemoryError

    monkeypatch.setattr(fencing_sdk._engine.lease_scope, "push", push)
    with pytest.raises(MemoryError):
        async with stage.lock():
            raise AssertionError("never entered")
    assert await stage.free()


async def test_the_life_of_a_lease_is_told_in_order(stage):
    async with stage.lock(heartbeat_interval=2) as lease:
        await lease.renew()
    assert [event.kind for event in stage.events] == ["acquiring", "acquired", "renewed", "released"]
    assert {event.name for event in stage.events} == {"a"}
    assert stage.events[-1].confirmed
    stage.events.clear()
    with pytest.raises(LeaseLostError):
        async with stage.lock():
            stage.revoke_soon()
            await forever()
    kinds = [event.kind for event in stage.events if event.kind not in {"renewed", "renewal_late"}]
    assert kinds == ["acquiring", "acquired", "lost", "released"]


# ``@locks.locking``: every call holds the lock, and the function stays what it was.


@pytest.fixture
async def locks():
    async with LockClient(MemoryBackend(tokens="counter")) as locks:
        yield locks


async def test_the_function_stays_what_it_was_for_those_who_look_at_it(locks):
    async def build(report_id: int, /, *parts: str, scale: float = 1.0) -> str:
        """Build a report."""

    locked = locks.locking("report/{report_id}")(build)
    assert locked.__wrapped__ is build
    assert locked.__name__ == "build"
    assert locked.__qualname__ == build.__qualname__
    assert locked.__module__ == __name__
    assert locked.__doc__ == "Build a report."
    assert inspect.signature(locked) == inspect.signature(build)
    assert inspect.iscoroutinefunction(locked)


# The name


async def test_the_namespace_of_the_client_applies():
    store = MemoryBackend()

    @(client := LockClient(store, namespace="shop")).locking("a")
    async def build():
        return await holder(store, "shop:a")

    async with client:
        assert await build() is not None


# Mistakes


async def test_a_call_that_does_not_fit_the_function_fails_as_without_the_lock(stage):
    @stage.client.locking("report/{report_id}")
    async def build(report_id): ...

    with pytest.raises(TypeError, match="report_id"):
        await build()
    with pytest.raises(TypeError, match="unexpected"):
        await build(1, colour="red")
    assert stage.network.calls == []


async def test_a_function_decorated_at_import_time_needs_its_client_open_when_it_is_called():
    locks = LockClient(MemoryBackend())

    @locks.locking("a")
    async def build():
        return "built"

    with pytest.raises(UsageError, match="async with"):
        await build()
    async with locks:
        assert await build() == "built"


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((1, 2), {}), ((1,), {"report_id": 1}), ((1,), {"day": 2})], ids=str
)
async def test_a_call_that_does_not_fit_fails_as_without_the_decorator(locks, args, kwargs):
    async def build(report_id, *, scale=2):
        raise AssertionError

    with pytest.raises(TypeError) as plain:
        build(*args, **kwargs)
    with pytest.raises(TypeError) as decorated:
        await locks.locking("report/{report_id}")(build)(*args, **kwargs)
    assert str(decorated.value) == str(plain.value)
    assert "build() " in str(plain.value)
    assert decorated.value.__context__ is None


async def test_a_call_that_does_not_fit_a_wrapped_function_names_it_and_runs_nothing(locks):
    async def build(report_id):
        raise AssertionError

    @functools.wraps(build)
    async def wrapped(*args, **kwargs):
        raise AssertionError

    for function in (wrapped, functools.partial(wrapped), functools.wraps(build)(functools.partial(wrapped))):
        with pytest.raises(TypeError, match=r"build.*\(\): missing a required argument: 'report_id'$") as refused:
            await locks.locking("report/{report_id}")(function)()
        assert refused.value.__context__ is None
