"""How a world is driven: plain calls from anywhere, no hang, no vanished error, nothing left behind."""

import asyncio
import contextlib
import gc
import random
import sys
import time
import weakref

import pytest

from fencing_sdk import (
    BackendUnavailableError,
    FencingError,
    LeaseLostError,
    LockHeldError,
    StaleTokenError,
    UsageError,
    connect,
    current_lease,
)
from fencing_sdk.errors import ConfigurationError
from fencing_sdk.testing.world import World


async def forever():
    await asyncio.Event().wait()


async def fail(message="boom"):
    raise ArithmeticError(message)


# The caller's own event loop.


async def test_a_world_runs_inside_a_running_event_loop_and_leaves_it_alone():
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    other = asyncio.create_task(asyncio.sleep(0))
    with World() as world:
        a, b = world.client("A"), world.client("B")
        a.acquire("seats/42", ttl=10)
        a.pause()
        assert b.acquire("seats/42").token == 2
        assert asyncio.get_running_loop() is loop
        assert asyncio.current_task() is task
        assert not other.done(), "the caller's loop did not turn meanwhile"
    await other


async def test_a_lease_of_the_caller_is_not_seen_by_the_clients():
    async with connect("memory://") as locks, locks.lock("mine"):
        with World() as world:
            assert current_lease("mine")

            async def look():
                return current_lease("mine")

            with pytest.raises(LookupError):
                world.client("A").run(look)


def test_the_callers_random_numbers_are_not_touched():
    random.seed(42)
    expected = [random.random() for _ in range(3)]
    random.seed(42)
    seen = [random.random()]
    with World(seed=1) as world:
        world.client("A").acquire("seats/42")
        seen.append(random.random())
        world.sleep(100)
    seen.append(random.random())
    assert seen == expected


def test_random_numbers_inside_follow_the_seed():
    async def draw():
        return random.random()

    def draws(seed):
        random.seed()
        with World(seed) as world:
            return [world.client("A").run(draw), world.client("B").run(draw)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
    assert len(set(draws(1))) == 2


# Calls that cannot end.


def test_a_call_on_a_paused_client_is_an_error_that_says_so():
    with World() as world:
        a = world.client("A")
        a.pause()
        with pytest.raises(UsageError, match="'A' is paused: call resume"):
            a.acquire("seats/42")
        assert world.now == 0
        a.resume()
        a.acquire("seats/42")


def test_work_may_be_started_in_a_paused_client_and_waits_there():
    with World() as world:
        a = world.client("A")
        a.pause()
        waiting = a.start(a.locks.inspect, "seats/42")
        world.sleep(100)
        assert not waiting.done()
        a.resume()
        assert world.finish(waiting) is None


def test_a_client_that_is_paused_during_a_call_is_named():
    with World() as world:
        a = world.client("A")
        world.after(5, a.pause)
        with pytest.raises(UsageError, match="nothing is left to happen; paused are A"):
            a.run(asyncio.sleep, 10)


def test_a_client_that_is_resumed_during_a_call_finishes_it():
    with World() as world:
        a = world.client("A")
        world.after(5, a.pause)
        world.after(30, a.resume)
        a.run(asyncio.sleep, 10)
        assert 30 <= world.now < 30.1


def test_a_call_without_an_answer_ends_with_the_patience_of_the_world():
    with World(patience=60) as world:
        a, store = world.client("A"), world.unfenced_store()
        lease = a.acquire("seats/42")  # its heartbeat goes on for ever
        a.link.drop("write")
        with pytest.raises(UsageError, match="within 60 virtual seconds; is a message lost"):
            a.write(store, "A", lease.token)
        assert store.history == []


def test_a_call_that_was_given_up_does_not_go_on_behind_the_test():
    with World(patience=60) as world:
        a, b = world.client("A"), world.client("B")
        lease = a.acquire("seats/42")
        with pytest.raises(UsageError):
            b.acquire("seats/42")
        a.release(lease)
        world.sleep(10)
        assert world.holder("seats/42") is None


def test_code_of_a_client_that_waits_for_itself_is_told():
    with World() as world:
        a = world.client("A")

        async def body():
            a.acquire("seats/42")

        with pytest.raises(UsageError, match="code of client 'A' would wait for itself"):
            a.run(body)


def test_a_client_may_be_driven_from_the_code_of_another_which_stands_still_meanwhile():
    with World() as world:
        a, b = world.client("A"), world.client("B")

        async def body():
            before = world.now
            token = b.acquire("seats/42").token
            return token, world.now > before, asyncio.current_task() is not None

        assert a.run(body) == (1, True, True)


def test_a_task_of_another_loop_cannot_be_waited_for():
    with World() as world, World() as other:
        task = other.client("A").start(asyncio.sleep, 1)
        with pytest.raises(UsageError, match="does not belong to this world"):
            world.finish(task)


def test_a_lost_request_is_an_outage_for_the_engine():
    with World() as world:
        a = world.client("A")
        a.link.drop()
        with pytest.raises(BackendUnavailableError):
            a.acquire("seats/42", ttl=2, wait=5)


def test_verbs_raise_what_the_client_raises():
    with World() as world:
        a, b = world.client("A"), world.client("B")
        a.acquire("seats/42")
        with pytest.raises(LockHeldError):
            b.acquire("seats/42", wait=0)
        with pytest.raises(ConfigurationError):
            b.acquire("seats/42", ttl=-1)


# Errors do not vanish.


def test_the_error_of_started_work_is_raised_where_it_is_waited_for():
    with World() as world:
        task = world.client("A").start(fail)
        with pytest.raises(ArithmeticError):
            world.finish(task)


def test_the_error_of_work_that_nobody_can_wait_for_is_raised_by_the_call_that_met_it():
    with World() as world:
        world.client("A").start(fail)
        with pytest.raises(ArithmeticError) as raised:
            world.sleep(1)
        assert "simulated process A" in raised.value.__notes__[0]


def test_the_error_of_a_task_that_work_has_left_alone_is_raised_by_the_call_that_met_it():
    async def leave_alone():
        asyncio.ensure_future(fail())  # noqa: RUF006
        await asyncio.sleep(1)

    with World() as world, pytest.raises(ArithmeticError):
        world.client("A").run(leave_alone)


def test_an_error_that_nobody_waited_for_is_raised_at_the_end():
    with pytest.raises(ArithmeticError) as raised, World() as world:
        task = world.client("A").start(fail)
        world.sleep(1)
        assert task.done()
    assert "simulated process A" in raised.value.__notes__[0]


def test_several_lost_errors_leave_as_a_group():
    with pytest.RaisesGroup(ArithmeticError, ArithmeticError), World() as world:
        tasks = [world.client(name).start(fail) for name in "AB"]
        world.sleep(1)
        assert all(task.done() for task in tasks)


def test_the_error_of_the_test_leaves_bare_with_a_note_about_the_lost_one():
    with pytest.raises(AssertionError) as raised, World() as world:
        task = world.client("A").start(fail)
        world.sleep(1)
        assert not task.done()
    assert "ArithmeticError('boom')" in raised.value.__notes__[0]


def test_an_error_in_a_callback_is_raised_by_the_call_that_met_it():
    with World() as world:
        a = world.client("A")

        async def schedule():
            asyncio.get_running_loop().call_later(5, int, "not a number")

        a.run(schedule)
        with pytest.raises(ValueError, match="not a number"):
            world.sleep(10)
        world.sleep(10)


def test_an_error_of_something_scheduled_is_raised_by_the_call_that_met_it():
    with World() as world:
        world.after(1, lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            world.sleep(2)


def test_a_task_that_does_not_end_when_cancelled_is_reported():
    async def stubborn():
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    with pytest.raises(RuntimeError, match="does not end when it is cancelled"), World() as world:
        world.client("A").start(stubborn)
        world.sleep(1)


def test_code_that_never_gives_up_is_reported_and_does_not_spin_at_the_end():
    """With its client closed under it, this loop would turn for ever without an await."""
    with pytest.raises(RuntimeError, match="does not end when it is cancelled"), World() as world:
        a = world.client("A")

        async def work():
            while True:
                with contextlib.suppress(FencingError, asyncio.CancelledError):
                    async with a.locks.lock("seats/42"):
                        await forever()

        a.start(work)
        world.sleep(1)


def test_a_lease_that_is_lost_because_the_world_ends_is_nobodys_fault():
    with World() as world:
        a = world.client("A")

        async def body():
            async with a.locks.lock("seats/42", ttl=10):
                await asyncio.sleep(3600)

        a.start(body)
        world.sleep(1)
        a.pause()
        world.sleep(60)


def test_an_error_in_a_clean_up_at_the_end_is_raised():
    async def clumsy():
        try:
            await forever()
        finally:
            await fail()

    with pytest.raises(ArithmeticError), World() as world:
        world.client("A").start(clumsy)
        world.sleep(1)


# The end.


def test_the_end_closes_clients_and_finishes_work():
    ended = []

    async def body(client):
        try:
            async with client.locks.lock("seats/42", ttl=10):
                await forever()
        finally:
            await asyncio.sleep(1)
            ended.append("work")

    async def generate():
        try:
            yield 1
        finally:
            ended.append("generator")

    async def leave_open():
        kept.append(generate())
        await anext(kept[0])

    kept = []
    with World() as world:
        a = world.client("A")
        a.start(body, a)
        a.run(leave_open)
        world.sleep(1)
        a.pause()
        assert ended == []
        heard = world.history
    assert ended == ["work", "generator"]
    assert world.holder("seats/42") is None, "it was released"
    assert world.history == heard, "the end is not part of the story"
    world.close()
    with pytest.raises(UsageError, match="this world has ended"):
        world.sleep(1)
    for verb in (a.pause, a.resume, lambda: a.acquire("seats/42"), lambda: world.client("B")):
        with pytest.raises(UsageError, match="this world has ended"):
            verb()


def test_a_lease_is_over_when_its_world_is():
    with World() as world:
        lease = world.client("A").acquire("seats/42")
    with pytest.raises(LeaseLostError):
        lease.check()


def test_a_world_ends_as_soon_as_nobody_refers_to_it():
    ended = []

    async def body():
        try:
            await forever()
        finally:
            await asyncio.sleep(1)
            ended.append(True)

    gc.disable()
    try:
        world = World()
        a = world.client("A")
        lease = a.acquire("seats/42")
        a.start(body)
        world.sleep(1)
        gone = weakref.ref(world)
        del world
        assert gone() is not None, "a client keeps its world"
        assert a.acquire("seats/43").held
        del a
        assert gone() is None
        assert ended == [True]
        assert not lease.held
    finally:
        gc.enable()


def test_a_world_that_saw_errors_ends_too_when_nobody_refers_to_it():
    def use_it():
        world = World()
        a, store = world.client("A"), world.fenced_store()
        a.write(store, "new", 2)
        with pytest.raises(StaleTokenError):
            a.write(store, "old", 1)
        stale = a.start(store.write, "old", 1)
        world.sleep(1)
        with pytest.raises(StaleTokenError):
            stale.result()
        return weakref.ref(world)

    gone = use_it()
    gc.collect()  # an error refers to every caller's frame, the test's too
    assert gone() is None


def test_a_dropped_world_reports_a_lost_error_as_unraisable(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda details: seen.append(details.exc_value))

    def forget_to_look():
        world = World()
        task = world.client("A").start(fail)
        world.sleep(1)
        assert task.done()

    forget_to_look()
    gc.collect()
    assert [type(error) for error in seen] == [ArithmeticError]


def test_a_world_cannot_be_ended_from_inside():
    with World() as world:
        a = world.client("A")

        async def body():
            world.close()

        with pytest.raises(UsageError, match="code that runs in it"):
            a.run(body)


# What a world refuses.


def test_names_are_unique_in_a_world():
    with World() as world:
        world.client("A")
        world.fenced_store()
        for again in (world.client, world.fenced_store, world.unfenced_store):
            with pytest.raises(ConfigurationError, match="is in this world already"):
                again("A")
        for taken in ("store", "locks"):
            with pytest.raises(ConfigurationError):
                world.client(taken)


@pytest.mark.parametrize(
    "options", [{"latency": -1}, {"latency": (0.1, "x")}, {"service_rate": 0}, {"patience": 0}], ids=str
)
def test_a_world_that_cannot_work_is_refused(options):
    with pytest.raises(ConfigurationError):
        World(**options)


def test_work_is_a_coroutine_function():
    with World() as world:
        a = world.client("A")
        coroutine = forever()
        with pytest.raises(ConfigurationError, match="pass a coroutine function and its arguments, not coroutine"):
            a.start(coroutine)
        coroutine.close()
        with pytest.raises(ConfigurationError, match="coroutine function"):
            a.start(int, 3)


def test_threads_and_sockets_do_not_exist_in_a_world():
    with World() as world:
        a = world.client("A")
        with pytest.raises(UsageError, match="run_in_executor"):
            a.run(asyncio.to_thread, int)
        with pytest.raises(UsageError, match="create_connection"):
            a.run(asyncio.open_connection, "127.0.0.1", 1)


def test_a_store_is_written_by_code_of_a_client():
    with World() as world:
        store = world.unfenced_store()
        with pytest.raises(UsageError, match=r"client\.write"):
            asyncio.run(store.write("A", 1))
        with pytest.raises(ConfigurationError):
            world.client("A").write(store, "A", "34")


def test_a_thousand_virtual_seconds_cost_no_real_ones():
    began = time.monotonic()
    with World() as world:
        a, b = world.client("A"), world.client("B")
        a.acquire("seats/42"), b.acquire("seats/43")
        world.sleep(1000)
        assert 1000 < world.now < 1001
        assert len([event for event in a.events if event.kind == "renewed"]) > 300
    assert time.monotonic() - began < 20, "a hundred milliseconds, with room for a busy machine"


def test_code_that_spins_does_not_stop_time():
    with World() as world:

        async def spin():
            while world.now < 0.1:  # noqa: ASYNC110
                await asyncio.sleep(0)

        world.client("A").run(spin)
        assert world.now >= 0.1


def test_everything_says_what_it_is():
    with World() as world:
        assert repr(world) == "<World at 0.000000 s, clients: none>"
        a, store = world.client("A"), world.fenced_store("disk")
        lease = a.acquire("seats/42")
        a.write(store, "x" * 500, lease.token)
        a.pause()
        assert "clients: A" in repr(world)
        assert repr(a) == "<WorldClient 'A', paused>"
        assert repr(store).startswith("<FencedStore 'disk' value='xxx")
        assert len(repr(store)) < 150
        assert a.clock.now() > world.now, "a clock begins somewhere"
