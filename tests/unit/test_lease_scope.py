"""The block of a lease: cancellation by a loss, and the scopes under it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import re
from collections.abc import Iterator

import anyio
import pytest
from anyio._backends import _asyncio
from inside import BootClock, on_clock, state_of
from looking import holder
from virtual_time import in_virtual_time

from fencing_sdk import LeaseLostError, LockClient, LossReason, UsageError, current_lease
from fencing_sdk._engine import lease_scope
from fencing_sdk._engine.lease_scope import LeaseScope, ScopeExit
from fencing_sdk._values import tasks
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.errors import NoLeaseError

# How a stay inside ``async with lock`` is judged when it ends.


HELD = None
LOST = LossReason.REVOKED


@pytest.fixture
async def scope(stage):
    lease = await stage.lock().acquire()
    scope = LeaseScope(lease)
    yield scope
    state_of(scope.lease).forget_scope()
    await lease.release()


def leaves(scope, end, original, lost):
    """Return the error that leaves the ``async with``: what `conclude` raises, or else the original error."""
    scope.state.lost = lost
    try:
        scope.conclude(end, original)
    except BaseException as error:
        return error
    return original


async def test_a_cancellation_from_outside_wins_over_one_by_the_lease(scope):
    error = leaves(scope, ScopeExit(None, swallowed=True, outer=True), asyncio.CancelledError(), LOST)
    assert isinstance(error, asyncio.CancelledError)


async def test_the_loss_itself_needs_no_note_about_the_loss(scope):
    refused = LeaseLostError("a", 1, LOST)
    assert leaves(scope, ScopeExit(refused, swallowed=False, outer=False), refused, LOST) is refused
    assert not hasattr(refused, "__notes__")


@pytest.mark.parametrize("token", [7, 1])
async def test_the_loss_of_another_lease_gets_a_note_about_this_one(scope, token):
    other = LeaseLostError("b", token, LOST)
    assert leaves(scope, ScopeExit(other, swallowed=False, outer=False), other, LOST) is other
    assert len(other.__notes__) == 1


@pytest.mark.parametrize("original", [SystemExit(1), KeyboardInterrupt()])
async def test_what_ends_the_process_is_not_held_up_by_a_loss(scope, original):
    assert leaves(scope, ScopeExit(original, swallowed=False, outer=False), original, LOST) is original


async def test_a_closing_generator_counts_as_a_clean_end(scope):
    closing = GeneratorExit()
    assert leaves(scope, ScopeExit(closing, swallowed=False, outer=False), closing, HELD) is closing
    error = leaves(scope, ScopeExit(closing, swallowed=False, outer=False), closing, LOST)
    assert isinstance(error, LeaseLostError)


async def test_what_remains_of_a_group_leaves_instead_of_the_group(scope):
    rest = ExceptionGroup("rest", [ValueError()])
    group = BaseExceptionGroup("all", [ValueError(), asyncio.CancelledError()])
    assert leaves(scope, ScopeExit(rest, swallowed=False, outer=False), group, LOST) is rest
    assert len(rest.__notes__) == 1


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

    locks = on_clock(LockClient(MemoryBackend()), SlowClock())
    async with locks:
        with pytest.raises(LeaseLostError) as loss:
            async with locks.lock("a", ttl=120, max_hold=0.1) as lease:  # a loop that is seconds late has not stalled
                await asyncio.sleep(30)
        assert lease.lost_reason is LossReason.EXPIRED
    assert loss.value.reason is LossReason.EXPIRED


async def test_aborting_disarms_the_scope_and_names_the_plain_handle(stage):
    lease = await stage.lock(max_hold=0.1).acquire()
    scope = LeaseScope(lease)
    error = scope.abort()
    assert "async with await lock.acquire() as lease" in str(error)
    await asyncio.sleep(0.2)  # past the deadline
    assert not lease.held
    with pytest.raises(NoLeaseError):
        current_lease()
    scope._scope.__exit__(None, None, None)
    await lease.release()


async def test_a_stay_that_another_task_has_ended_is_cancelled_no_more(stage):
    async def stay():
        lock = stage.lock(safety_buffer=0.1)
        await lock.__aenter__()
        stage.revoke()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(30)
        with pytest.raises(UsageError):
            await asyncio.create_task(lock.__aexit__(None, None, None))
        await asyncio.sleep(0.3)  # it would be cancelled again after 0.05 s
        return asyncio.current_task().cancelling()

    assert await asyncio.create_task(stay()) == 0


# Two locks that are left in the order of their entry


async def test_the_loss_of_an_outer_lock_reaches_a_body_that_has_left_one_of_two_inner_locks_first(stage):
    async def stay():
        async with stage.lock("c"):
            first, second = stage.lock("a"), stage.lock("b")
            await first.__aenter__()
            await second.__aenter__()
            await first.__aexit__(None, None, None)
            stage.revoke_soon("c")
            try:
                await asyncio.sleep(60)
            finally:
                await second.__aexit__(None, None, None)

    with pytest.raises(LeaseLostError) as loss:
        await asyncio.wait_for(asyncio.create_task(stay()), 20)
    assert loss.value.name == "c"


# How a body is cancelled


async def cleaning_up(seconds):
    try:
        await asyncio.sleep(30)
    finally:
        await asyncio.sleep(seconds)


class CancelledTask(asyncio.Task):
    """A task that notes when it is cancelled, which no stall of the machine can bring closer together."""

    def __init__(self, body, on_cancel):
        super().__init__(body, loop=asyncio.get_running_loop())
        self._on_cancel = on_cancel

    def cancel(self, msg=None):
        self._on_cancel(asyncio.get_running_loop().time())
        return super().cancel(msg)


@pytest.mark.every_loop
async def test_a_body_that_cleans_up_after_a_loss_costs_next_to_no_processor_time(stage):
    """A cancellation in every turn of the loop would take a core until the children have cleaned up."""

    async def body():
        with pytest.raises(LeaseLostError):
            async with stage.lock(safety_buffer=0.4):
                stage.revoke_soon()
                async with asyncio.TaskGroup() as children:
                    children.create_task(cleaning_up(0.5))
                    children.create_task(cleaning_up(0.5))

    cancelled_at = []
    await CancelledTask(body(), cancelled_at.append)
    pauses = [later - earlier for earlier, later in itertools.pairwise(cancelled_at)]
    assert len(pauses) >= 1
    assert all(pause >= 0.19 * 2**number for number, pause in enumerate(pauses))


@pytest.mark.every_loop
async def test_a_clean_up_that_is_shorter_than_the_pause_is_not_cancelled_again(stage):
    """A driver that asks its server to stop the query awaits the answer."""
    cleaned_up = False
    with pytest.raises(LeaseLostError):
        async with stage.lock(ttl=3):
            stage.revoke_soon()
            try:
                await asyncio.sleep(30)
            finally:
                await asyncio.sleep(0.1)
                cleaned_up = True
    assert cleaned_up


@pytest.mark.every_loop
async def test_a_body_that_swallows_its_cancellation_is_cancelled_again_within_the_safety_buffer(stage):
    buffer, heard = 0.4, []

    async def body():
        swallowed = 0
        with pytest.raises(LeaseLostError):
            async with stage.lock(safety_buffer=buffer):
                stage.revoke_soon()
                while swallowed < 3:
                    try:
                        await asyncio.sleep(30)
                    except asyncio.CancelledError:
                        swallowed += 1
        assert asyncio.current_task().cancelling() == 0

    def tell(at):
        if not heard:
            asyncio.get_running_loop().call_at(at + buffer, heard.append, "the safety buffer is over")
        heard.append("cancelled")

    await CancelledTask(body(), tell)
    assert heard == ["cancelled", "cancelled", "the safety buffer is over", "cancelled"]


@pytest.mark.every_loop
async def test_a_shield_in_the_body_is_respected_and_the_cancellation_comes_right_after_it(stage):
    heard = []

    async def body():
        with pytest.raises(LeaseLostError):
            async with stage.lock():
                with anyio.CancelScope(shield=True):
                    stage.revoke_soon()
                    await asyncio.sleep(0.3)
                    heard.append("end of the shield")
                asyncio.get_running_loop().call_later(0.1, heard.append, "long after it")
                await asyncio.sleep(30)

    await CancelledTask(body(), lambda _: heard.append("cancelled"))
    assert heard[:2] == ["end of the shield", "cancelled"]


@pytest.mark.every_loop
async def test_a_lost_lease_leaves_no_timer_that_would_cancel_what_comes_after_the_body(stage):
    with pytest.raises(LeaseLostError):
        async with stage.lock(ttl=1):
            stage.revoke_soon()
            await asyncio.sleep(30)
    await asyncio.sleep(0.3)  # longer than the first pause
    assert asyncio.current_task().cancelling() == 0


# Leaving in another order than entering


async def test_locks_left_in_the_order_in_which_they_were_entered_are_released_one_by_one(stage):
    first, second = contextlib.AsyncExitStack(), contextlib.AsyncExitStack()
    await first.enter_async_context(stage.lock("a"))
    lease = await second.enter_async_context(stage.lock("b"))
    await first.aclose()
    assert current_lease("b") is current_lease() is lease
    assert await stage.client.inspect("a") is None
    assert await stage.client.inspect("b") is not None
    await second.aclose()
    with pytest.raises(NoLeaseError):
        current_lease()
    assert await stage.client.inspect("b") is None
    with anyio.move_on_after(0.01) as scope:  # the scopes of this task are in order again
        await asyncio.sleep(30)
    assert scope.cancelled_caught


async def test_a_body_error_leaves_bare_from_locks_that_are_left_in_the_order_of_entry(stage):
    mine = ValueError("mine")
    first, second = contextlib.AsyncExitStack(), contextlib.AsyncExitStack()
    await first.enter_async_context(stage.lock("a"))
    await second.enter_async_context(stage.lock("b"))
    assert not await first.__aexit__(ValueError, mine, None)
    assert not await second.__aexit__(ValueError, mine, None)
    assert not hasattr(mine, "__notes__")


async def test_a_lock_left_inside_of_a_foreign_scope_is_released_and_says_so_with_the_bodys_error(stage):
    mine = ValueError("mine")

    async def body():
        stack = contextlib.AsyncExitStack()
        await stack.enter_async_context(stage.lock("a"))
        with anyio.CancelScope():
            with pytest.raises(UsageError, match="leave the inner one first") as refusal:
                await stack.__aexit__(ValueError, mine, None)
            assert refusal.value.__cause__ is mine
            with pytest.raises(NoLeaseError):
                current_lease()

    await asyncio.create_task(body())
    assert await stage.client.inspect("a") is None


async def test_every_exit_in_a_foreign_task_gives_one_entry_of_a_shared_lock_back(stage):
    """An entry whose task has ended goes first, as that task cannot leave any more."""
    shared = stage.lock("a")
    lost = await asyncio.create_task(shared.__aenter__())
    stage.revoke()
    await lost.wait_lost()
    entered, leave = asyncio.Event(), asyncio.Event()
    live = []

    async def hold():
        live.append(await shared.__aenter__())
        entered.set()
        await leave.wait()

    holding = asyncio.create_task(hold())
    await entered.wait()
    with pytest.raises(UsageError, match="entered in one task and left in another"):
        await asyncio.create_task(shared.__aexit__(None, None, None))
    assert live[0].held
    with pytest.raises(UsageError, match="entered in one task and left in another"):
        await asyncio.create_task(shared.__aexit__(None, None, None))
    assert not live[0].held
    assert await stage.client.inspect("a") is None
    with pytest.raises(UsageError, match="left by a task that did not enter it"):
        await shared.__aexit__(None, None, None)
    leave.set()
    await holding


@pytest.mark.parametrize("ends_first", ["dropped", "live"])
async def test_a_generator_that_was_dropped_gives_its_permit_back_when_its_task_ends(ends_first):
    """Two tasks hold one semaphore when the generator is closed in a third, so nothing shows whose permit it was."""
    entered = asyncio.Barrier(3)
    end = {"dropped": asyncio.Event(), "live": asyncio.Event()}

    async def hold_in_a_generator(permits):
        await permits.__aenter__()
        await entered.wait()
        await end["dropped"].wait()

    async def hold(permits):
        async with permits as lease:
            await entered.wait()
            await end["live"].wait()
            assert lease.held

    async with LockClient(MemoryBackend()) as locks, asyncio.timeout(10):
        permits = locks.semaphore("a", permits=2)
        tasks = {
            "dropped": asyncio.create_task(hold_in_a_generator(permits)),
            "live": asyncio.create_task(hold(permits)),
        }
        await entered.wait()
        with pytest.raises(UsageError, match="left by a task that did not enter it"):
            await permits.__aexit__(None, None, None)
        for name in sorted(tasks, key=lambda name: name != ends_first):
            end[name].set()
            await tasks[name]
            await (await permits.acquire()).release()
        for lease in [await permits.acquire() for _ in range(2)]:
            await lease.release()


# Cancel scopes lose no cancellation with an older anyio, and do without the private names of a later one.


class BeforeCounting(_asyncio.CancelScope):
    """anyio's scope before 4.16: it takes a cancellation that came in the same turn for its own."""

    _cancelling_at_enter = property(lambda _: 1000, lambda _, __: None)


def without(name: str) -> type[anyio.CancelScope]:
    """Return anyio's scope with another private name for *name*."""
    source = inspect.getsource(_asyncio.CancelScope)
    known = dict(vars(_asyncio))
    exec(re.sub(rf"\b{name}\b", f"{name}_renamed", source), known)
    return known["CancelScope"]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Have the package find another scope of anyio."""

    def use(found: type[anyio.CancelScope]) -> None:
        monkeypatch.setattr(tasks, "scope_class", lambda: found)
        monkeypatch.setattr(lease_scope, "scope_class", lambda: found)
        forget()

    def forget() -> None:
        tasks._combined.cache_clear()
        lease_scope._kind_of_scope.cache_clear()

    yield use
    forget()


ANYIOS = pytest.mark.parametrize("found", [_asyncio.CancelScope, BeforeCounting], ids=["this", "before 4.16"])


def cancel_in(seconds: float, task: asyncio.Task) -> None:
    asyncio.get_running_loop().call_later(seconds, task.cancel)


async def ends_cancelled(task: asyncio.Task) -> bool:
    async with asyncio.timeout(60):
        await asyncio.wait([task])
    return task.cancelled()


@ANYIOS
def test_a_cancellation_in_the_turn_in_which_a_limit_ends_is_not_lost(found, use):
    use(found)

    @in_virtual_time
    async def test() -> None:
        async def work() -> None:
            while True:
                with tasks.move_on_after(1):
                    await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        cancel_in(1, task)
        assert await ends_cancelled(task)

    test()


@ANYIOS
def test_a_cancellation_in_the_turn_in_which_a_leader_resigns_ends_the_loop(found, use):
    use(found)

    @in_virtual_time
    async def test() -> None:
        async with LockClient(MemoryBackend()) as locks:
            election = locks.election("scheduler")

            async def lead() -> None:
                async for term in election:
                    async with term:
                        await asyncio.Event().wait()

            task = asyncio.create_task(lead())
            await asyncio.sleep(1)
            assert election.leading
            election.resign()
            task.cancel()
            assert await ends_cancelled(task)
            assert not election.leading

    test()


@pytest.mark.parametrize("name", lease_scope._PRIVATE)
async def test_a_private_name_of_anyio_that_is_gone_costs_the_pace_alone(name, use):
    use(without(name))
    store = MemoryBackend()
    async with LockClient(store) as locks:
        assert type(lease_scope.paced_scope(1.0)).__mro__[1] is lease_scope.PlainScope
        async with locks.lock("a"):
            pass
        with pytest.raises(LeaseLostError):
            async with locks.lock("a"):
                store.take_away("a")
                await asyncio.Event().wait()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), locks.lock("a"):
                await asyncio.Event().wait()
        assert asyncio.current_task().cancelling() == 0
        outer, inner = locks.lock("b"), locks.lock("c")
        await outer.__aenter__()
        await inner.__aenter__()
        await outer.__aexit__(None, None, None)
        await inner.__aexit__(None, None, None)
        await outer.__aenter__()
        with pytest.raises(UsageError, match="left in another"):
            await asyncio.create_task(outer.__aexit__(None, None, None))
        store.take_away("b")
        await asyncio.sleep(0.05)
    assert await holder(store, "a") is None


async def test_the_anyio_that_is_here_has_the_names():
    assert lease_scope._kind_of_scope() is lease_scope.PacedScope
