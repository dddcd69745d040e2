"""What Python does to locks behind one's back: forks, signals, generators, contexts, loops, the garbage collector."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap

import anyio
import pytest
from inside import held_here
from looking import holder

from fencing_sdk import (
    BackendUnavailableError,
    LeaseLostError,
    LockClient,
    LockHeldError,
    LossReason,
    UsageError,
    connect,
    current_token,
)
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.errors import NoLeaseError
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.testing import FaultyBackend

EVERY_LOOP = [pytest.mark.every_loop, pytest.mark.usefixtures("no_blocking_calls")]
BRIEF = 1.0
"""Seconds after which a brief lease ends: long enough that nothing here takes so long, even on a busy machine."""
PLAIN_HANDLE = r"await lock\.acquire\(\)"


def every_loop(test):
    """Run *test* on every loop, and watch for blocking calls."""
    for mark in EVERY_LOOP:
        test = mark(test)
    return test


async def forever():
    await asyncio.Event().wait()


PRELUDE = """
import asyncio, gc, logging, os, signal, sys
from fencing_sdk import *
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.testing import FaultyBackend

store = MemoryBackend(tokens="counter")
network = FaultyBackend(store)
locks = LockClient(network)
logging.getLogger("fencing_sdk").setLevel("ERROR")  # warnings about faults and a busy machine are in order

def say(*words):
    print(*words, flush=True)

async def free():
    (tickets,) = await store.tickets(["a"])
    return not tickets
"""


def start(script, *options):
    """Run *script* in an interpreter of its own; it knows `store`, `network`, `locks`, `say` and `free`."""
    program = PRELUDE + textwrap.dedent(script)
    return subprocess.Popen(
        [sys.executable, *options, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def said(script, *options):
    """What *script* says on its standard output, line by line; it must end well and say nothing about errors."""
    process = start(script, *options)
    output, errors = process.communicate(timeout=50)
    assert errors == ""
    assert process.returncode == 0
    return output.splitlines()


# Forks

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

FORKING = """
import warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded")  # the watch for stalls has a thread

def in_child(look):
    pid = os.fork()
    if pid == 0:
        try:
            look()
        except BaseException as error:
            say("child:", type(error).__name__, error)
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""


@needs_fork
def test_a_lease_is_inert_in_a_forked_child_and_goes_on_in_the_parent():
    lines = said(
        FORKING
        + """
async def main():
    async with locks, locks.lock("a") as lease:
        sent = len(network.calls)

        def look():
            say(lease.held, lease.remaining, lease.lost_reason)
            for use in (lambda: lease.token, lease.check, lease.headers, current_token):
                try:
                    say("a token in a child:", use())
                except LeaseLostError as error:
                    say(error.reason)
            asyncio.run(lease.release())
            gc.collect()
            say("sent by the child:", network.calls[sent:])

        in_child(look)
        await lease.renew()
        say("parent:", lease.held, lease.token)
    say("afterwards free:", await free())

asyncio.run(main())
"""
    )
    assert lines == [
        "False 0.0 closed",
        *["closed"] * 4,
        "sent by the child: []",
        "parent: True 1",
        "afterwards free: True",
    ]


@needs_fork
def test_a_lease_that_is_dropped_in_a_forked_child_is_not_released_there():
    lines = said(
        FORKING
        + """
async def main():
    async with locks:
        lease = await locks.lock("a").acquire()
        sent = len(network.calls)

        def look():
            nonlocal lease
            del lease
            gc.collect()
            say("sent by the child:", network.calls[sent:])

        in_child(look)
        await lease.release()

asyncio.run(main())
""",
        "-Walways",
    )
    assert lines == ["sent by the child: []"]


@needs_fork
def test_closing_an_inherited_client_in_a_forked_child_leaves_the_parents_locks_alone():
    lines = said(
        FORKING
        + """
async def main():
    async with locks, locks.lock("a") as lease:
        sent = len(network.calls)

        async def close_and_open_again():
            await locks.aclose()
            say("sent by the child:", network.calls[sent:])
            async with locks, locks.lock("b") as own:
                say("its own lease:", own.held)

        in_child(lambda: asyncio.run(close_and_open_again()))
        await lease.renew()
        say("parent:", lease.held)

asyncio.run(main())
"""
    )
    assert lines == ["sent by the child: []", "its own lease: True", "parent: True"]


@needs_fork
def test_a_client_made_before_the_fork_is_opened_by_each_child_with_owners_of_its_own():
    lines = said(
        FORKING
        + """
async def hold():
    async with locks, locks.lock("a") as lease:
        say(lease.owner)

def look():
    asyncio.run(hold())

in_child(look)
in_child(look)
look()
"""
    )
    assert len(set(lines)) == 3
    assert all(len(owner) == 32 for owner in lines)


# Signals and the end of the process

BODY = """
    async with locks, locks.lock("a"):
        say("in")
        await asyncio.sleep(60)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it, and so would we
try:
    asyncio.run(main())
finally:
    say("free" if asyncio.run(free()) else "held")
"""


def test_sigint_releases_under_asyncio_run():
    process = start("async def main():" + BODY)
    assert process.stdout.readline() == "in\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=50)
    assert output == "free\n"
    assert errors.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.skipif(sys.platform == "win32", reason="asyncio handles no signals on Windows")
def test_sigterm_releases_when_a_handler_cancels_the_main_task():
    handler = "asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)"
    process = start(f"async def main():\n    {handler}" + BODY)
    assert process.stdout.readline() == "in\n"
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=50)
    assert output == "free\n"
    assert errors.rstrip().endswith("CancelledError")


@pytest.mark.parametrize("ends", ["asyncio.run(main())", "asyncio.new_event_loop().run_until_complete(main())"])
def test_an_interpreter_that_ends_with_an_open_client_prints_nothing(ends):
    script = """
async def main():
    await locks.__aenter__()
    leases.append(await locks.lock("a").acquire())
    waiting.append(asyncio.ensure_future(locks.lock("a").acquire()))
    await asyncio.sleep(0.01)

leases, waiting = [], []
"""
    assert said(script + ends + "\nsay('end')") == ["end"]


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["lease", "loop of an election", "client for threads"])
def test_what_outlives_the_modules_of_the_package_ends_in_silence(kept):
    """A framework may keep it: Python empties the modules of the package before `os`, which was loaded earlier."""
    script = f"""
from fencing_sdk.sync import connect

async def main():
    await locks.__aenter__()
    os.lease = await locks.lock("a").acquire()
    os.lease = os.lease if {kept!r} == "lease" else await os.lease.release()

async def stand():
    await locks.__aenter__()
    os.terms = aiter(locks.election("a"))
    await anext(os.terms)

asyncio.run(stand() if {kept!r} == "loop of an election" else main())
if {kept!r} == "client for threads":
    os.client = connect("memory://")
    os.client.lock("a").acquire().release()
sys.kept = list(sys.modules.values())
say("end")
"""
    assert said(script) == ["end"]


def test_what_is_loaded_late_is_loaded_when_the_client_opens_and_not_under_the_first_lease():
    script = """
async def main():
    async with locks:
        say("anyio._backends._asyncio" in sys.modules)

asyncio.run(main())
"""
    assert said(script) == ["True"]


def test_faults_of_the_store_leave_no_noise_about_tasks_that_nobody_looked_at():
    script = """
from fencing_sdk._engine import releases

releases.RELEASE_LIMIT = 0.5

async def main():
    for operation in ("acquire", "renew", "release", "inspect"):
        network.fail(operation, OSError("no route"))
    async with locks:
        for attempt in (locks.lock("a", wait=0).acquire(), locks.inspect("a")):
            try:
                await attempt
            except OSError:
                say("failed")
        network.heal("acquire")
        async with locks.lock("a", ttl=10, heartbeat_interval=0.04):
            await asyncio.sleep(0.05)

asyncio.run(main())
gc.collect()
"""
    assert said(script) == ["failed", "failed"]


def test_a_loop_that_ends_right_after_a_cancelled_acquisition_leaves_no_lock_behind():
    store = MemoryBackend()
    network = FaultyBackend(store)
    network.delay("acquire", 0.05)

    async def main():
        async with LockClient(network) as locks:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01), locks.lock("a", ttl=60):
                    await forever()

    asyncio.run(main())
    assert asyncio.run(holder(store, "a")) is None


# Several loops, several threads


def test_a_client_that_a_dead_loop_left_open_says_how_to_close_it():
    locks = LockClient(MemoryBackend())
    asyncio.run(locks.__aenter__())
    with pytest.raises(UsageError, match=r"event loop that is gone.*await client\.aclose\(\)"):
        asyncio.run(locks.__aenter__())
    asyncio.run(locks.aclose())
    asyncio.run(locks.__aenter__())
    asyncio.run(locks.aclose())


async def in_another_loop(work):
    """Await `work()` in a thread with an event loop of its own."""

    async def main():
        return await work()

    return await asyncio.to_thread(lambda: asyncio.run(main()))


@every_loop
async def test_a_client_belongs_to_the_loop_that_opened_it(stage):
    for use in (stage.lock().acquire, stage.lock().try_acquire, lambda: stage.client.inspect("a")):
        with pytest.raises(UsageError, match="another event loop"):
            await in_another_loop(use)
    assert await stage.free()


@every_loop
async def test_a_lease_belongs_to_the_loop_that_acquired_it_but_is_read_anywhere(stage):
    lease = await stage.lock().acquire()
    for use in (lease.renew, lease.release, lease.wait_lost):
        with pytest.raises(UsageError, match="run_coroutine_threadsafe"):
            await in_another_loop(use)
    assert await asyncio.to_thread(lambda: (lease.token, lease.held)) == (1, True)
    await lease.release()


@every_loop
async def test_a_thread_gives_a_lease_back_through_the_loop_it_belongs_to(stage):
    loop = asyncio.get_running_loop()
    first = await stage.lock("a").acquire()
    await asyncio.to_thread(lambda: asyncio.run_coroutine_threadsafe(first.release(), loop).result(30))
    second = await stage.lock("b").acquire()
    await anyio.to_thread.run_sync(lambda: anyio.from_thread.run(second.release))
    assert await stage.free("a")
    assert await stage.free("b")


# Entered in one task, left in another


@every_loop
async def test_leaving_in_another_task_releases_and_names_the_plain_handle(stage):
    lock = stage.lock(max_hold=BRIEF)
    entered, left = asyncio.Event(), asyncio.Event()

    async def caller():
        await lock.__aenter__()
        entered.set()
        await left.wait()
        await asyncio.sleep(BRIEF)  # past the deadline: a scope that was not disarmed would strike here
        return "unharmed"

    entering = asyncio.ensure_future(stage.watch(caller))
    await entered.wait()
    with pytest.raises(UsageError, match=PLAIN_HANDLE):
        await lock.__aexit__(None, None, None)
    assert await stage.free()
    left.set()
    seen = await entering
    assert seen.value == "unharmed"
    assert seen.cancelling == 0


@every_loop
@pytest.mark.parametrize("lost_before", [False, True])
async def test_leaving_after_the_task_that_entered_has_ended_is_the_same_error(stage, lost_before):
    lock = stage.lock()
    lease = await asyncio.create_task(lock.__aenter__())
    if lost_before:
        stage.revoke()
        assert await lease.wait_lost() is LossReason.REVOKED
    with pytest.raises(UsageError, match=PLAIN_HANDLE):
        await lock.__aexit__(None, None, None)
    assert not lease.held
    assert await stage.free()
    await asyncio.sleep(0.01)


# Generators


def counting(lock):
    async def generator():
        async with lock:
            for number in range(1000):
                yield number

    return generator()


@every_loop
async def test_a_generator_closed_in_another_task_names_the_plain_handle_and_harms_nobody(stage):
    async def caller():
        numbers = counting(stage.lock(max_hold=BRIEF))
        assert await anext(numbers) == 0
        with pytest.raises(UsageError, match=PLAIN_HANDLE):
            await asyncio.create_task(numbers.aclose())
        assert await stage.free()
        await asyncio.sleep(BRIEF)  # past the deadline
        with pytest.raises(LeaseLostError):
            current_token()
        return "unharmed"

    seen = await stage.watch(caller)
    assert seen.value == "unharmed"
    assert seen.held == ()


@every_loop
async def test_a_generator_left_to_the_garbage_collector_is_reported_and_harms_nobody(stage):
    reports = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context["exception"]))

    async def caller():
        numbers = counting(stage.lock(max_hold=BRIEF))
        assert await anext(numbers) == 0
        del numbers
        await asyncio.sleep(BRIEF)  # past the deadline
        return "unharmed"

    seen = await stage.watch(caller)
    gc.collect()
    assert seen.value == "unharmed"
    assert seen.held == ()
    assert [type(report) for report in reports] == [UsageError]
    assert "await lock.acquire()" in str(reports[0])


@every_loop
async def test_a_loss_inside_a_closing_generator_reaches_its_consumer(stage):
    felt = []

    async def caller():
        async with contextlib.aclosing(counting(stage.lock())) as numbers:
            async for _ in numbers:
                stage.revoke_soon()
                try:
                    await forever()
                except asyncio.CancelledError:
                    felt.append("cancelled")
                    raise

    async def twice():
        with pytest.raises(LeaseLostError):
            await caller()
        await asyncio.sleep(0)  # the task is as good as new
        await caller()

    seen = await stage.watch(twice)
    assert felt == ["cancelled"] * 2
    assert seen.lost == ("a", LossReason.REVOKED)
    assert seen.tidy


# Contexts


@every_loop
async def test_the_lease_follows_tasks_and_threads_that_carry_the_context(stage):
    async def read():
        return current_token()

    async with stage.lock():
        assert await asyncio.create_task(read()) == 1
        assert await asyncio.to_thread(current_token) == 1
        assert await anyio.to_thread.run_sync(current_token) == 1
        assert anyio.from_thread  # and back again:
        assert await anyio.to_thread.run_sync(lambda: anyio.from_thread.run(read)) == 1


@every_loop
async def test_an_executor_does_not_carry_the_lease_and_the_error_says_so(stage):
    async with stage.lock():
        with pytest.raises(NoLeaseError, match=r"loop\.run_in_executor do not"):
            await asyncio.get_running_loop().run_in_executor(None, current_token)


@every_loop
async def test_the_clients_own_tasks_do_not_pin_the_lease_of_whoever_started_them(stage):
    seen = {}

    def spy(operation):
        real = getattr(stage.network, operation)

        async def spied(*args, **options):
            seen.setdefault(operation, held_here())
            return await real(*args, **options)

        setattr(stage.network, operation, spied)

    async with stage.lock():
        for operation in ("draw", "keep", "give_back", "tickets"):
            spy(operation)
        async with stage.lock("b") as inner:
            await inner.renew()
            await stage.client.inspect("b")
            await stage.heard("renewed")
    assert seen == dict.fromkeys(("draw", "keep", "give_back", "tickets"), ())


# Uses that cannot work


async def test_a_lock_used_after_its_client_was_closed_says_what_to_do():
    locks = LockClient(MemoryBackend())
    async with locks:
        lock = locks.lock("a")
        lease = await lock.acquire()
    with pytest.raises(UsageError, match="async with"):
        await lock.acquire()
    assert lease.lost_reason is LossReason.CLOSED
    assert await lease.wait_lost() is LossReason.CLOSED
    with pytest.raises(LeaseLostError):
        await lease.renew()
    await lease.release()


async def test_entering_a_client_twice_is_refused_and_does_it_no_harm(stage):
    with pytest.raises(UsageError, match="open already"):
        async with stage.client:
            pass
    async with stage.lock() as lease:
        assert lease.held


@every_loop
async def test_a_lease_is_useless_after_its_lock_was_left(stage):
    async with stage.lock() as lease:
        pass
    assert not lease.held
    assert lease.lost_reason is None
    for use in (lambda: lease.token, lease.check, lease.headers):
        with pytest.raises(LeaseLostError, match="it was released"):
            use()
    with pytest.raises(LeaseLostError):
        await lease.renew()
    assert await lease.wait_lost() is None
    await lease.release()


@every_loop
async def test_releasing_inside_the_body_ends_the_lease_but_not_the_body(stage):
    async def caller():
        async with stage.lock(max_hold=BRIEF) as lease:
            await lease.release()
            assert await stage.free()
            await asyncio.sleep(BRIEF)  # past what was the deadline
            return "went on without the lock"

    seen = await stage.watch(caller)
    assert seen.value == "went on without the lock"
    assert seen.tidy


@every_loop
async def test_a_task_that_holds_a_lock_and_waits_for_it_is_told_instead_of_waiting_for_ever(stage):
    async with stage.lock():
        for again in (stage.lock(), stage.lock(wait=5)):
            with pytest.raises(UsageError, match="not reentrant"):
                async with again:
                    pass
            with pytest.raises(UsageError, match="not reentrant"):
                await again.acquire()
        with pytest.raises(LockHeldError):
            await stage.lock(wait=0).acquire()
        assert await stage.lock().try_acquire() is None


# Leases that nobody releases


def drop(leases):
    leases.clear()
    gc.collect()


async def released(stage):
    """Whether the lock can be had long before the ttl of whoever dropped it has passed."""
    lease = await stage.lock(wait=5, backoff=lambda _: 0.001).acquire()
    token = lease.token
    await lease.release()
    return token == 2


@every_loop
async def test_a_dropped_lease_warns_and_is_released(stage, caplog):
    leases = [await stage.lock().acquire()]
    with pytest.warns(ResourceWarning, match=r"lease on 'a' \(token 1\) was dropped without release"):
        drop(leases)
    assert await released(stage)
    assert "lease on 'a' (token 1) was dropped without release, so others may get the lock now" in caplog.text


@every_loop
async def test_a_lease_dropped_by_a_thread_is_released_by_its_loop(stage):
    leases = [await stage.lock().acquire()]
    with pytest.warns(ResourceWarning, match="dropped without release"):
        await asyncio.to_thread(drop, leases)
    assert await released(stage)


@every_loop
async def test_a_result_that_a_timeout_threw_away_is_released(stage):
    """`asyncio.wait_for` may time out in the very turn in which the lease arrives, and drop it."""
    real = stage.network.draw
    waiting = None

    async def draw(claim, **options):
        answer = await real(claim, **options)
        await asyncio.sleep(0)
        waiting.cancel()
        return answer

    stage.network.draw = draw
    waiting = asyncio.ensure_future(stage.lock().acquire())
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await released(stage)


async def test_a_client_that_cannot_be_opened_is_closed_again_and_may_be_tried_again():
    class Unreachable(MemoryBackend):
        async def open(self):
            if not reachable:
                raise BackendUnavailableError("Unreachable", "open")

    reachable = []
    locks = LockClient(Unreachable())
    with pytest.raises(BackendUnavailableError):
        async with locks:
            pass
    reachable.append(True)
    async with locks, locks.lock("a") as lease:
        assert lease.held


# The detector of blocking calls, which the tests above rely on


async def test_the_detector_sees_a_blocking_call_that_the_package_makes(no_blocking_calls):
    import time

    felt = []

    def slow_observer(event):
        try:
            time.sleep(0.001)
        except Exception as error:
            felt.append(type(error).__name__)

    async with LockClient(MemoryBackend(), observers=[slow_observer]) as locks, locks.lock("a"):
        pass
    assert felt == ["BlockingError"] * 3  # acquiring, acquired, released


# No task: a callback drives the coroutine, or what drives it hides the task, as nest_asyncio does on Python 3.14


def drive(coroutine) -> asyncio.Future:
    """Run *coroutine* in callbacks of the loop, in which there is no current task."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def step(_=None):
        try:
            future = coroutine.send(None)
        except StopIteration as stop:
            ended.set_result(stop.value)
        except BaseException as error:
            ended.set_exception(error)
        else:
            if future is None:
                loop.call_soon(step)
            else:
                future._asyncio_future_blocking = False
                future.add_done_callback(step)

    loop.call_soon(step)
    return ended


def job_of(locks):
    async def body():
        raise AssertionError("it ran")

    return locks.job("a", at_least_for=1)(body)()


NEED_A_TASK = {
    "acquire": lambda locks: locks.lock("a").acquire(),
    "async with": lambda locks: locks.lock("a").__aenter__(),
    "try_acquire": lambda locks: locks.lock("a").try_acquire(),
    "fences": lambda locks: locks.lock("a", fences=[MemoryGuard()]).acquire(),
    "multilock": lambda locks: locks.multilock("a", "b").__aenter__(),
    "semaphore": lambda locks: locks.semaphore("a", permits=1).acquire(),
    "reader": lambda locks: locks.rwlock("a").reader.acquire(),
    "job": job_of,
    "election": lambda locks: locks.election("a").__aiter__().__anext__(),
    "draining_on": lambda locks: locks.draining_on(signal.SIGUSR1, within=1).__aenter__(),
    "another client": lambda _: connect("memory://").__aenter__(),
}


@pytest.fixture(params=["memory", "sqlite"])
def locks(request, tmp_path):
    return connect("memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/locks.db")


@pytest.mark.parametrize("begin", NEED_A_TASK.values(), ids=NEED_A_TASK)
async def test_what_needs_a_task_says_so_where_there_is_none(locks, begin):
    handler = signal.getsignal(signal.SIGUSR1)
    async with locks:
        with pytest.raises(UsageError, match=r"no asyncio task runs here, .*: let a task run the coroutine "):
            await drive(begin(locks))
        assert signal.getsignal(signal.SIGUSR1) is handler
        assert [holder async for holder in locks.all_holders()] == []


async def test_what_is_held_is_given_back_without_a_task(locks):
    async with locks:
        lease = await locks.lock("a", wait=0).acquire()
        assert await drive(locks.lock("a").locked())
        await drive(lease.release())
        assert not await locks.lock("a").locked()
        handle = await locks.lock("b").acquire()
        await drive(locks.aclose())
        assert handle.lost_reason is LossReason.CLOSED


# Names of tasks, as ``python -m asyncio ps`` shows them


async def test_the_names_of_tasks_show_whose_they_are_and_what_they_wait_for(locks):
    lock = locks.lock("a\u202eb")  # a name is untrusted: this one turns the rest of a line around
    others = asyncio.all_tasks()
    async with locks, lock:
        waiter = asyncio.create_task(locks.lock("a\u202eb").acquire())
        while not await locks.waiters("a\u202eb"):  # noqa: ASYNC110
            await asyncio.sleep(0)
        names = {task.get_name() for task in asyncio.all_tasks() - others - {waiter}}
        waiter.cancel()
        await asyncio.wait([waiter])
    assert "fencing-heartbeat" in names
    assert [name for name in names if not name.startswith("fencing-") or not name.isprintable()] == []
    assert not [name for name in names if name.startswith("fencing-wait")], "who waits needs no task of ours"
