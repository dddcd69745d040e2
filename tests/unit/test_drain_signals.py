"""
A signal begins the drain, a second one ends it, and what handled the signal before is left as it was.

The signal is one that does nothing by default, so that a handler which is missing fails a test and not the tests.
`tests/stores/test_elections.py` and `examples/drain_on_deploy.py` send the real ones to real processes.
"""

import asyncio
import os
import signal
import threading

import anyio
import pytest

from fencing_sdk import DrainingError, LeaseLostError, LockClient, UsageError
from fencing_sdk.backends.memory import MemoryBackend

SIGNAL = signal.SIGWINCH

pytestmark = pytest.mark.every_loop


@pytest.fixture
async def locks():
    before = signal.getsignal(SIGNAL)
    async with LockClient(MemoryBackend()) as client:
        yield client
    assert signal.getsignal(SIGNAL) == before


def send(number: int = SIGNAL) -> None:
    os.kill(os.getpid(), number)


async def drained(locks: LockClient) -> None:
    with anyio.fail_after(10):
        while not locks.draining:  # noqa: ASYNC110  (no event tells it)
            await asyncio.sleep(0.001)


async def test_workers_of_a_task_group_end_in_order(locks):
    async def works(name: str) -> None:
        while True:
            async with locks.lock(name):
                await asyncio.sleep(0.001)

    async with locks.draining_on(SIGNAL, within=25):
        async with asyncio.TaskGroup() as group:
            for name in "aab":
                group.create_task(works(name))
            send()


async def test_the_bodies_of_other_tasks_end_before_the_block_does(locks):
    ended, began = [], asyncio.Event()

    async def works() -> None:
        async with locks.lock("a") as lease:
            began.set()
            await asyncio.sleep(0.3)
            lease.check()
            ended.append("body")

    working = asyncio.create_task(works())
    async with locks.draining_on(SIGNAL, within=25):
        await began.wait()
        send()
        await drained(locks)
    assert ended == ["body"]
    await working


async def test_a_block_that_only_waits_is_cancelled_when_all_is_released(locks):
    with anyio.fail_after(20):
        async with locks.draining_on(SIGNAL, within=600):
            asyncio.get_running_loop().call_later(0.01, send)
            await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_two_signals_at_once_are_two(locks):
    before = signal.getsignal(SIGNAL)
    async with locks.draining_on(SIGNAL, within=0):
        send()
        send()
        await drained(locks)
        assert signal.getsignal(SIGNAL) == before, "the third does what it did before"


async def test_a_third_signal_does_what_it_did_before(locks):
    received = []
    before = signal.getsignal(SIGNAL)
    signal.signal(SIGNAL, server := lambda number, _: received.append(number))
    try:
        with pytest.raises(LeaseLostError):
            async with locks.draining_on(SIGNAL, within=25), locks.lock("a"):
                send()
                await drained(locks)
                assert len(received) == 1, "a handler of a server is called too"
                with anyio.CancelScope(shield=True), anyio.fail_after(10):
                    send()
                    while signal.getsignal(SIGNAL) is not server:  # noqa: ASYNC110  (no event tells it)
                        await asyncio.sleep(0.001)
                send()
                await asyncio.sleep(0.01)
        assert len(received) == 3
    finally:
        signal.signal(SIGNAL, before)


async def test_a_block_of_two_clients_ends_when_both_have_released_everything(locks):
    """That around the other one has nothing to wait for."""
    ended = []

    async def body(client: LockClient, others: LockClient) -> None:
        async with client.lock("a") as lease:
            send()
            await drained(locks)
            async with others.lock("b"):
                await asyncio.sleep(1.5)  # longer than an idle block may go on
            lease.check()
            ended.append("body")

    async with LockClient(MemoryBackend()) as inner:
        with anyio.fail_after(20):
            async with locks.draining_on(SIGNAL, within=15), inner.draining_on(SIGNAL, within=15):
                await body(inner, locks)
                await asyncio.Event().wait()
    assert ended == ["body"]


async def test_workers_of_two_clients_cut_no_body_of_each_other(locks):
    ended, both_in = [], asyncio.Barrier(2)

    async def works(client: LockClient, seconds: float) -> None:
        while True:
            async with client.lock("a") as lease:
                if await both_in.wait() == 0:
                    send()
                await drained(client)
                await asyncio.sleep(seconds)
                lease.check()
                ended.append(seconds)

    async with LockClient(MemoryBackend()) as inner:
        with anyio.fail_after(20):
            async with locks.draining_on(SIGNAL, within=15), inner.draining_on(SIGNAL, within=15):
                async with asyncio.TaskGroup() as group:
                    group.create_task(works(locks, 0.2))
                    group.create_task(works(inner, 1.0))
    assert sorted(ended) == [0.2, 1.0]


async def test_blocks_that_are_left_in_any_order_leave_the_handlers_as_they_were(locks):
    before = signal.getsignal(SIGNAL)
    async with LockClient(MemoryBackend()) as second, LockClient(MemoryBackend()) as third:
        left, entered = [asyncio.Event() for _ in range(3)], [asyncio.Event() for _ in range(3)]

        async def block(number: int, client: LockClient) -> None:
            async with client.draining_on(SIGNAL, within=25):
                entered[number].set()
                await left[number].wait()

        async with asyncio.TaskGroup() as group:
            for number, client in enumerate((locks, second, third)):
                group.create_task(block(number, client))
                await entered[number].wait()
            left[1].set()
            await asyncio.sleep(0.01)
            left[0].set()
            await asyncio.sleep(0.01)
            assert signal.getsignal(SIGNAL) != before
            send()
            await drained(third)
            left[2].set()
        assert (locks.draining, second.draining) == (False, False)
    assert signal.getsignal(SIGNAL) == before


@pytest.mark.parametrize("drains", [True, False])
async def test_a_block_that_is_left_in_another_task_says_so_and_names_the_other_way(locks, drains):
    """As in a fixture of pytest-asyncio, and in some lifespans."""
    before, block = signal.getsignal(SIGNAL), locks.draining_on(SIGNAL, within=25)

    async def enter() -> None:
        await block.__aenter__()
        if drains:
            send()
            await drained(locks)

    await asyncio.create_task(enter())
    with pytest.raises(UsageError, match=r"left in another .* connect\(url, drain=25\).*lifespan=lifespan\(locks\)"):
        await block.__aexit__(None, None, None)
    assert signal.getsignal(SIGNAL) == before
    with pytest.raises(UsageError, match="left before a block inside it") as left:
        async with locks.draining_on(SIGNAL, within=25):
            scope = anyio.CancelScope()
            scope.__enter__()
            raise ZeroDivisionError
    assert isinstance(left.value.__cause__, ZeroDivisionError)
    scope.__exit__(None, None, None)
    await asyncio.sleep(0)


async def test_a_forked_child_does_with_a_signal_what_it_did_before(locks):
    async with locks.draining_on(signal.SIGTERM, within=25):
        child = os.fork()
        if not child:  # as a worker of multiprocessing, whose parent terminates it
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)  # noqa: ASYNC222  (the child ends at once)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
        await asyncio.sleep(0.01)
        assert not locks.draining, "the signal was the child's"


async def test_a_block_that_a_server_ends_is_not_cancelled(locks):
    stop, reached = asyncio.Event(), []
    loop = asyncio.get_running_loop()
    before = signal.signal(SIGNAL, lambda *_: loop.call_soon_threadsafe(loop.call_later, 1.5, stop.set))
    try:
        async with locks.draining_on(SIGNAL, within=25):
            send()
            await stop.wait()
            reached.append("the end")
        assert reached
    finally:
        signal.signal(SIGNAL, before)


async def test_a_handler_of_the_event_loop_goes_on_being_called(locks):
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(SIGNAL, stop.set)
    try:
        async with locks.draining_on(SIGNAL, within=25):
            send()
            with anyio.fail_after(10):
                await stop.wait()
            await drained(locks)
    finally:
        loop.remove_signal_handler(SIGNAL)


async def test_what_is_ignored_stays_ignored(locks):
    before = signal.signal(SIGNAL, signal.SIG_IGN)
    try:
        async with locks.draining_on(SIGNAL, within=25):
            send()
            await asyncio.sleep(0.02)
            assert not locks.draining
    finally:
        signal.signal(SIGNAL, before)


async def test_without_a_signal_the_block_is_one_like_any_other(locks):
    async with locks.draining_on(SIGNAL, within=25):
        pass
    assert not locks.draining
    for error in (ZeroDivisionError, DrainingError("a", 0.0), asyncio.CancelledError):
        with pytest.raises(error if isinstance(error, type) else DrainingError):
            async with locks.draining_on(SIGNAL, within=25):
                raise error


async def test_an_election_ends_in_order(locks):
    ended = []
    async with locks.draining_on(SIGNAL, within=25):
        async for term in locks.election("scheduler"):
            async with term:
                send()
                try:
                    await asyncio.sleep(3600)
                finally:
                    ended.append("body")
    assert ended == ["body"]


async def test_other_threads_get_no_signals(locks):
    refused = []

    async def enter() -> None:
        async with LockClient(MemoryBackend()) as theirs:
            try:
                async with theirs.draining_on(SIGNAL, within=25):
                    pass
            except UsageError as error:
                refused.append(error)

    thread = threading.Thread(target=lambda: asyncio.run(enter()))
    thread.start()
    await asyncio.to_thread(thread.join)
    assert "works in the main thread alone" in str(refused[0])
    assert "connect(url, drain=25), in a web application with lifespan=lifespan(locks)" in str(refused[0])


async def test_a_group_in_which_one_error_is_no_refusal_leaves_the_block(locks):
    with pytest.raises(ExceptionGroup):
        async with locks.draining_on(SIGNAL, within=25):
            send()
            await drained(locks)
            raise ExceptionGroup("of a task group", [DrainingError("a", 0.0), ZeroDivisionError()])
