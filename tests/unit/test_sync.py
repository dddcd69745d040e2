"""Locks for threads, in one process: blocks and handles, what interrupts a wait, and who hears of a loss."""

import asyncio
import contextlib
import ctypes
import gc
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from inside import held_here
from patience import until, wait_until
from stays import PATIENCE

import fencing_sdk
from fencing_sdk import ConfigurationError, LeaseLostError, LockClient, LossReason, UsageError
from fencing_sdk._lock import Lock
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.errors import NoLeaseError
from fencing_sdk.events import Event
from fencing_sdk.recipes.election import Candidacy
from fencing_sdk.sync import LockClient as SyncLockClient
from fencing_sdk.sync import _bridge, connect, current_lease, current_token
from fencing_sdk.sync import _lock as sync_locks
from fencing_sdk.sync._bridge import LoopThread, Opening, enter, this_thread


@pytest.fixture
def store():
    return MemoryBackend(tokens="counter")


@pytest.fixture
def events():
    return []


@pytest.fixture(params=["asyncio", "uvloop"])
def locks(request, monkeypatch, store, events):
    """A client whose background thread runs a loop of asyncio, or of uvloop where that is installed."""
    if request.param == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)  # as if it were not
    else:
        pytest.importorskip("uvloop")
    client = connect(store, observers=[events.append])
    yield client
    client.close()


def revoke(locks, store, name="a"):
    """Let the store take a lock away. It lives in the loop of the client."""

    async def take_away():
        store.take_away(name)

    locks.run(take_away)


def free(locks, name="a"):
    return locks.inspect(name) is None


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "fencing-sync"]


def test_the_loop_of_the_background_thread_is_the_one_that_is_installed(request, locks):
    async def loop():
        return type(asyncio.get_running_loop()).__module__.partition(".")[0]

    assert locks.run(loop) == request.node.callspec.params["locks"]


# A block


def test_coroutines_of_one_thread_that_wait_for_each_other_are_refused(locks):
    async def work():
        with locks.lock("a"):
            await asyncio.sleep(0)

    async def main():
        return await asyncio.gather(work(), work(), return_exceptions=True)

    ended = asyncio.run(main())
    assert ended[0] is None
    assert isinstance(ended[1], UsageError)
    assert "its event loop stands still; in coroutines use the client of fencing_sdk.connect()" in str(ended[1])
    assert free(locks)


def test_a_thread_whose_event_loop_stands_still_while_it_waits_is_named_after_one_ttl(locks, caplog):
    async def wait(ttl):
        with pytest.raises(fencing_sdk.AcquireTimeoutError), locks.lock("a", ttl=ttl, wait=0.4):
            pass

    with locks.lock("a", ttl=30).acquire():
        asyncio.run(wait(30))
        with pytest.raises(fencing_sdk.AcquireTimeoutError), locks.lock("a", ttl=0.2, wait=0.4):
            pass  # no loop runs here
        assert not caplog.messages
        asyncio.run(wait(0.2))
    (message,) = caplog.messages
    assert message.startswith("thread 'MainThread' has waited 0.2 s for lock 'a' and runs an event loop, which stands")


def test_the_task_of_a_thread_that_waits_is_called_after_its_lock(locks):
    async def names():
        return {task.get_name() for task in asyncio.all_tasks()}

    with ThreadPoolExecutor(1) as pool:
        with locks.lock("a"):
            waiter = pool.submit(locks.lock("a").acquire)
            wait_until(lambda: locks.waiters("a"))
            assert locks.run(names) == {"fencing-client", "fencing-heartbeat", "fencing-thread", "fencing-wait 'a'"}
        waiter.result().release()


def test_a_block_that_another_thread_leaves_is_an_error_and_frees_the_lock(locks):
    lock = locks.lock("a")
    lock.__enter__()
    with ThreadPoolExecutor(1) as pool, pytest.raises(UsageError, match="use the plain handle"):
        pool.submit(lock.__exit__, None, None, None).result()
    assert free(locks)
    with pytest.raises(UsageError):
        lock.__exit__(None, None, None)
    fencing_sdk._lease.pop(current_lease())


def test_a_thread_does_not_see_the_lease_of_the_one_that_started_it(locks):
    with locks.lock("a"), ThreadPoolExecutor(1) as pool, pytest.raises(NoLeaseError):
        pool.submit(current_token).result()


# A handle


def test_a_handle_is_released_in_any_thread(locks):
    lease = locks.lock("a").acquire()
    with pytest.raises(NoLeaseError):
        current_lease()
    lease.renew()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lease.release).result()
    assert free(locks)
    with pytest.raises(LeaseLostError):
        lease.renew()
    with locks.lock("a").acquire() as lease:
        assert lease.held
    assert free(locks)
    with pytest.raises(LeaseLostError), lease:
        pass


def test_a_handle_that_is_dropped_warns_and_is_released(locks, caplog):
    lease = locks.lock("a").acquire()
    locks.run(asyncio.sleep, 0)  # the loop wakes the caller a moment before it lets go of the handle itself
    handles = [lease]
    del lease
    with pytest.warns(ResourceWarning, match="dropped without release"):
        handles.clear()
    with locks.lock("a", wait=PATIENCE):
        pass
    assert "was dropped without release, so others may get the lock now; keep the handle" in caplog.text


# The other recipes


def test_what_cannot_be_decorated_is_told_at_once(locks):
    async def task(): ...

    def generator():
        yield

    for wrong in (task, generator, int, 7):
        with pytest.raises(ConfigurationError, match="plain functions"):
            locks.locking("a")(wrong)
    with pytest.raises(ConfigurationError, match="placeholder"):
        locks.locking("{b}")(lambda a: a)
    with pytest.raises(ConfigurationError):
        locks.locking("a", ttl=-1)


def test_a_job_runs_once_in_the_thread_that_calls_it(locks):
    @locks.job("report/{number}", at_least_for=60)
    def build(number: int) -> tuple[int, str]:
        return threading.get_ident(), current_lease().name

    ran = build(7)
    assert (ran.value, ran.token) == ((threading.get_ident(), "report/7"), 1)
    assert isinstance(build(7), fencing_sdk.recipes.Skipped)
    assert isinstance(build(8), fencing_sdk.recipes.Ran)
    with pytest.raises(NoLeaseError):
        current_lease()


def in_a_block(locks, body):
    with locks.lock("a"):
        body()


def in_a_term(locks, body):
    for term in locks.election("a"):
        with term:
            body()


BODIES = {
    "block": in_a_block,
    "locking": lambda locks, body: locks.locking("a")(body)(),
    "job": lambda locks, body: locks.job("a", at_least_for=0.01)(body)(),
    "term": in_a_term,
    "elected": lambda locks, body: locks.elected("a")(body)(),
    "run": lambda locks, body: locks.run(body),
}


@pytest.mark.parametrize("error", [StopIteration, asyncio.CancelledError, GeneratorExit, SystemExit, ValueError])
@pytest.mark.parametrize("body", BODIES)
def test_every_error_of_a_body_leaves_as_it_is(locks, body, error):
    """Also those that mean something else to a coroutine."""

    def fail():
        raise error("mine")

    with pytest.raises(error) as raised:
        BODIES[body](locks, fail)
    assert type(raised.value) is error
    assert raised.value.args == ("mine",)
    with locks.lock("a", wait=PATIENCE):
        pass


@pytest.mark.parametrize("error", [asyncio.CancelledError, GeneratorExit])
def test_what_an_async_function_raises_by_itself_leaves_as_it_is(locks, error):
    async def fail():
        await asyncio.sleep(0)
        raise error("mine")

    with pytest.raises(error, match="mine"):
        locks.run(fail)


def test_a_job_that_has_lost_its_lease_goes_on_and_raises_at_its_end(locks, store):
    done = []

    @locks.job("a", at_least_for=60)
    def work():
        revoke(locks, store)
        time.sleep(0.1)
        with pytest.raises(LeaseLostError):
            current_token()
        done.append(True)

    with pytest.raises(LeaseLostError):
        work()
    assert done == [True]


# An election


def test_a_term_is_over_when_the_lead_is_lost_or_resigned_and_when_the_client_drains(locks, store):
    election = locks.election("a", ttl=PATIENCE)
    ends = [lambda: revoke(locks, store), election.resign, lambda: locks.drain(within=PATIENCE)]
    for term, end in zip(election, ends, strict=False):
        with term as lease:
            assert not term.over
            end()
            wait_until(lambda term=term: term.over, within=PATIENCE)
            assert lease.held or end is ends[0], "nothing takes the lock from a body that goes on"
    assert locks.draining
    assert free(locks)


def test_a_candidate_whose_client_closes_is_told_and_leaves_the_line(tmp_path):
    url = f"sqlite:///{tmp_path}/locks.db"
    with connect(url) as locks, connect(url) as other, other.lock("a"), ThreadPoolExecutor(1) as pool:
        candidate = pool.submit(lambda: next(iter(locks.election("a"))))
        wait_until(lambda: len(other.waiters("a")) == 1, within=PATIENCE)
        locks.close()
        assert isinstance(candidate.exception(PATIENCE), UsageError)
        wait_until(lambda: not other.waiters("a"), within=PATIENCE)


def test_what_an_election_of_threads_cannot_do_is_refused_at_once(locks):
    with pytest.raises(ConfigurationError, match=r"takes no finish_within: .*term\.over"):
        locks.election("a", finish_within=3)
    with pytest.raises(ConfigurationError, match="takes no wait"):
        locks.election("a", wait=3)
    with pytest.raises(ConfigurationError, match="plain functions"):

        @locks.elected("a")
        async def plan() -> None: ...


# Loss


def test_a_callback_is_called_once_for_a_loss_and_never_for_a_release(locks, store):
    heard = []
    with locks.lock("a") as lease:
        lease.on_lost(heard.append)
    with contextlib.suppress(LeaseLostError), locks.lock("a") as lease:
        revoke(locks, store)
        lease.wait_lost(PATIENCE)
        lease.on_lost(heard.append)
        while not heard:
            time.sleep(0.001)
    locks.close()
    lease.on_lost(heard.append)
    while len(heard) < 2:
        time.sleep(0.001)
    assert heard == [LossReason.REVOKED] * 2


def test_a_callback_that_blocks_or_fails_harms_no_lease(locks, store, events, caplog):
    blocked, failed = threading.Event(), threading.Event()

    def fail(_):
        failed.set()
        raise ValueError("mine")

    def renewals():
        return sum((event.kind, event.name) == ("renewed", "b") for event in tuple(events))

    other = locks.lock("b", ttl=30, heartbeat_interval=0.2)
    with other as other_lease, pytest.raises(LeaseLostError), locks.lock("a") as lease:
        lease.on_lost(lambda _: blocked.wait(3 * PATIENCE))
        lease.on_lost(fail)
        revoke(locks, store)
        assert failed.wait(PATIENCE)
        before = renewals()
        wait_until(lambda: renewals() >= before + 3, what="the other lease is renewed", within=PATIENCE)
        assert other_lease.held
    blocked.set()
    wait_until(lambda: "a callback of on_lost failed" in caplog.text, what="the failure is logged", within=PATIENCE)


@pytest.mark.parametrize("callback", [None, 7, asyncio.sleep])
def test_a_callback_that_cannot_be_called_is_told_at_once(locks, callback):
    with locks.lock("a") as lease, pytest.raises(ConfigurationError, match="on_lost"):
        lease.on_lost(callback)


# Signals


@contextlib.contextmanager
def handled_by(handle):
    """SIGUSR1 is handled by *handle*."""
    former = signal.signal(signal.SIGUSR1, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, former)


@contextlib.contextmanager
def interrupted_by(error):
    """A signal after a while, whose handler raises *error*."""

    def handle(*_):
        raise error

    with handled_by(handle):
        threading.Timer(0.1, signal.pthread_kill, [threading.main_thread().ident, signal.SIGUSR1]).start()
        yield


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, TimeoutError])
def test_an_interrupted_wait_leaves_the_line(error, locks, store):
    with locks.lock("a", ttl=30).acquire() as lease:
        with pytest.raises(error), interrupted_by(error()), locks.lock("a", ttl=30):
            raise AssertionError
        assert lease.held
    assert free(locks)
    with locks.lock("a", wait=PATIENCE):
        pass


@pytest.mark.parametrize("wait", ["block", "multilock", "permit", "election"])
def test_an_error_that_is_raised_in_another_thread_ends_its_wait(locks, wait, monkeypatch):
    """So do dramatiq, by TimeLimit and Shutdown, and rq, by TimerDeathPenalty."""
    monkeypatch.setattr(_bridge, "_PAUSE", 0)  # the first sleep, which is as short in every thread
    monkeypatch.setattr(_bridge, "_PAUSE_ELSEWHERE", 0.05)
    waits = WAITS | {"election": lambda *_: next(iter(locks.election("a")))}
    with ThreadPoolExecutor(1) as pool, locks.lock("a", ttl=60).acquire() as lease:
        worker = ctypes.c_ulong(pool.submit(threading.get_ident).result())
        waiter = pool.submit(waits[wait], locks, None)
        wait_until(lambda: locks.waiters("a"), what="it stands in line")
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc(worker, ctypes.py_object(KeyboardInterrupt)) == 1
        with pytest.raises(KeyboardInterrupt):
            waiter.result(PATIENCE)
        assert not locks.waiters("a")
        assert lease.held
    assert free(locks)


@pytest.mark.parametrize(
    ("owner", "call", "take"),
    [
        (Lock, "acquire", lambda locks: locks.lock("a", ttl=30).acquire()),
        (Lock, "acquire", lambda locks: locks.lock("a", ttl=30).__enter__()),
        (Lock, "try_acquire", lambda locks: locks.lock("a", ttl=30).try_acquire()),
        (sync_locks, "acquire_all", lambda locks: locks.multilock("a", "b", ttl=30).__enter__()),
        (Candidacy, "stand", lambda locks: next(iter(locks.election("a", ttl=30)))),
    ],
    ids=["handle", "block", "try", "multilock", "election"],
)
def test_what_was_granted_when_its_caller_was_interrupted_is_released(locks, monkeypatch, owner, call, take):
    """The thread is interrupted in its sleep at the very moment at which the loop has the lease."""
    acquire, granted = getattr(owner, call), []

    async def slowly(*arguments, **options):
        granted.append(await acquire(*arguments, **options))
        await asyncio.sleep(0.1)  # a signal that comes right before a thread sleeps does not wake it
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(PATIENCE)
        return granted[0]

    monkeypatch.setattr(owner, call, slowly)
    with pytest.raises(KeyboardInterrupt), handled_by(signal.default_int_handler):
        take(locks)
    assert len(granted) == 1
    assert (locks.inspect("a"), locks.inspect("b")) == (None, None)


def test_a_caller_that_is_interrupted_when_its_call_is_posted_leaves_nothing_behind(locks, monkeypatch):
    post = LoopThread._post

    def interrupted(bridge, *args):
        post(bridge, *args)
        raise KeyboardInterrupt

    with locks, monkeypatch.context() as patch:
        patch.setattr(LoopThread, "_post", interrupted)
        with pytest.raises(KeyboardInterrupt):
            locks.lock("a", ttl=30).acquire()
    assert free(locks)


def test_the_handler_of_a_signal_may_use_the_client(locks):
    lease = locks.lock("a").acquire()
    former = signal.signal(signal.SIGUSR1, lambda *_: lease.release())
    try:
        threading.Timer(0.1, signal.pthread_kill, [threading.main_thread().ident, signal.SIGUSR1]).start()
        with locks.lock("a", wait=PATIENCE) as next_lease:
            assert next_lease.token == 2
    finally:
        signal.signal(signal.SIGUSR1, former)


def test_the_handler_of_a_signal_may_use_the_client_while_the_thread_hands_a_call_over(locks):
    lease = locks.lock("a").acquire()
    with locks._bridge()._gate:
        lease.release()
    assert free(locks)


# Cancelling a wait


WAITS = {
    "block": lambda locks, stop: locks.lock("a", cancel=stop).__enter__(),
    "handle": lambda locks, stop: locks.lock("a", cancel=stop).acquire(),
    "locking": lambda locks, stop: locks.locking("a", cancel=stop)(print)(),
    "multilock": lambda locks, stop: locks.multilock("0", "a", cancel=stop).__enter__(),
    "reader": lambda locks, stop: locks.rwlock("a", cancel=stop).reader.acquire(),
    "permit": lambda locks, stop: locks.semaphore("a", permits=1, cancel=stop).acquire(),
}


@pytest.mark.parametrize("wait", WAITS)
def test_an_event_ends_the_wait_of_a_thread_which_leaves_the_line(locks, wait):
    stop = threading.Event()
    with locks.lock("a", ttl=60).acquire(), ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(WAITS[wait], locks, stop)
        wait_until(lambda: locks.waiters("a"), what="it stands in line")
        stop.set()
        with pytest.raises(fencing_sdk.errors.AcquireCancelledError, match="the wait was cancelled after") as raised:
            waiter.result(PATIENCE)
        assert (raised.value.name, raised.value.waited > 0) == ("0, a" if wait == "multilock" else "a", True)
        assert not locks.waiters("a")
        assert free(locks, "0")
    with pytest.raises(fencing_sdk.errors.AcquireCancelledError):
        WAITS[wait](locks, stop)
    assert free(locks)


def test_an_event_ends_the_loop_of_a_candidate_and_no_term(locks):
    stop, led = threading.Event(), []

    def stand():
        for term in locks.election("a", cancel=stop):
            with term as lease:
                led.append(lease.token)
                if stop.is_set():
                    lease.check()

    with locks.lock("a", ttl=60).acquire(), ThreadPoolExecutor(1) as pool:
        candidate = pool.submit(stand)
        wait_until(lambda: locks.waiters("a"), what="it stands in line")
        stop.set()
        assert candidate.result(PATIENCE) is None
    assert locks.elected("a", cancel=stop)(lambda: led.append(1))() is None
    assert led == []


def test_an_event_that_is_not_set_disturbs_nothing(locks):
    stop = threading.Event()
    with locks.lock("a", cancel=stop) as lease:
        stop.set()
        lease.check()
    for wrong in (True, "stop", object(), threading.Event):
        with pytest.raises(ConfigurationError, match=r"cancel must be an event .* such as threading\.Event\(\)"):
            locks.lock("a", cancel=wrong)


# The thread


def test_nothing_starts_before_the_first_call_and_nothing_is_left_after_the_end(store):
    before = threads()
    locks = connect(store)
    locks.lock("a")
    assert threads() == before
    with locks:
        assert len(threads()) == len(before) + 1
        locks.close()
        assert threads() == before
        with locks.lock("a"):
            assert len(threads()) == len(before) + 1
    assert threads() == before
    locks.close()


def test_a_client_that_is_dropped_ends_its_thread(store):
    before = threads()
    locks = connect(store)
    with locks.lock("a"):
        pass
    (thread,) = set(threads()) - set(before)
    del locks
    gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.parametrize("kind", ["handle", "try", "block", "multilock"])
def test_what_is_held_keeps_its_client(store, kind):
    """Also where nothing else refers to it: ``connect(url).lock("a").acquire()``."""
    before = threads()
    lease = {
        "handle": lambda: connect(store).lock("a").acquire(),
        "try": lambda: connect(store).lock("a").try_acquire(),
        "block": lambda: connect(store).lock("a").__enter__(),
        "multilock": lambda: connect(store).multilock("a").__enter__()["a"],
    }[kind]()
    gc.collect()
    assert (lease.wait_lost(0.1), lease.held) == (None, True)
    lease.release()
    while held_here():
        fencing_sdk._lease.pop(held_here()[-1])
    this_thread().inside.clear()
    del lease
    gc.collect()
    wait_until(lambda: threads() == before, what="the thread has ended", within=PATIENCE)


def test_threads_that_use_a_new_client_at_once_share_one_thread(store):
    before, gate = threads(), threading.Barrier(20)

    def use(_):
        gate.wait(PATIENCE)
        with locks.lock("a", ttl=30):
            return len(threads())

    with connect(store) as locks, ThreadPoolExecutor(20) as pool:
        assert set(pool.map(use, range(20))) == {len(before) + 1}


def test_closing_wakes_those_who_wait(locks):
    holder = locks.lock("a", ttl=30).acquire()
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(locks.lock("a", ttl=30).acquire)
        watcher = threading.Thread(target=holder.wait_lost)
        watcher.start()
        wait_until(lambda: locks.waiters("a"), what="it stands in line")  # a call after the closing would open it again
        time.sleep(0.1)
        locks.close()
        with pytest.raises(UsageError, match="closed"):
            waiter.result(PATIENCE)
        watcher.join(PATIENCE)
        assert not watcher.is_alive()
    assert holder.lost_reason is LossReason.CLOSED


class SlowlyClosed(MemoryBackend):
    """A store whose closing goes on until the test lets it end."""

    def __init__(self):
        super().__init__(tokens="counter")
        self.closing, self.may_end = threading.Event(), threading.Event()

    async def aclose(self):
        self.closing.set()
        while not self.may_end.is_set():  # noqa: ASYNC110  (another thread sets it)
            await asyncio.sleep(0.001)
        await super().aclose()


class Gate:
    """The gate of a client's thread, which counts the threads that have come to it."""

    def __init__(self, locks):
        bridge = locks._bridge()
        self._gate, self._came = bridge._gate, threading.Semaphore(0)
        bridge._gate = self

    def came(self):
        """Wait for one more thread."""
        assert self._came.acquire(timeout=PATIENCE)

    def __enter__(self):
        self._came.release()
        return self._gate.__enter__()

    def __exit__(self, *error):
        return self._gate.__exit__(*error)


@pytest.mark.parametrize("kind", ["lock", "job"])
def test_a_call_beside_the_closing_of_another_thread_waits_and_opens_the_client_again(kind):
    store = SlowlyClosed()
    locks = connect(store)

    @locks.job("a", at_least_for=0.01)
    def job():
        return current_lease().held

    def use():
        if kind == "job":
            return job().value
        with locks.lock("a", wait=PATIENCE) as lease:
            return lease.held

    with locks, ThreadPoolExecutor(2) as pool:
        gate = Gate(locks)
        closed = pool.submit(locks.close)
        assert store.closing.wait(PATIENCE)
        gate.came()
        used = pool.submit(use)
        gate.came()
        store.may_end.set()
        closed.result(PATIENCE)
        assert used.result(PATIENCE)


def test_a_client_that_another_thread_opens_meanwhile_is_closed_too():
    opening, may_open = threading.Event(), threading.Event()

    class SlowlyOpened(MemoryBackend):
        async def open(self):
            opening.set()
            while not may_open.is_set():  # noqa: ASYNC110  (another thread sets it)
                await asyncio.sleep(0.001)

    locks = connect(SlowlyOpened())
    gate = Gate(locks)
    before = threads()
    with ThreadPoolExecutor(2) as pool:
        acquired = pool.submit(locks.lock("a").acquire)
        assert opening.wait(PATIENCE)
        gate.came()
        closed = pool.submit(locks.close)
        gate.came()
        may_open.set()
        closed.result(PATIENCE)
        with contextlib.suppress(UsageError):  # closed before it was granted
            assert acquired.result(PATIENCE).lost_reason is LossReason.CLOSED
    assert threads() == before


def test_two_threads_that_close_at_once_close_what_was_open_then():
    """The second one does not close what a call of a third thread has opened meanwhile."""
    store = SlowlyClosed()
    locks = connect(store)
    with locks, ThreadPoolExecutor(3) as pool:
        gate = Gate(locks)
        first = pool.submit(locks.close)
        assert store.closing.wait(PATIENCE)
        gate.came()
        lease = pool.submit(locks.lock("a").acquire)
        gate.came()  # first, so that the second one finds a client that is open
        second = pool.submit(locks.close)
        gate.came()
        store.may_end.set()
        first.result(PATIENCE)
        second.result(PATIENCE)
        assert lease.result(PATIENCE).held
        lease.result().release()


def test_a_store_that_cannot_be_opened_is_told_and_tried_again(store, monkeypatch):
    async def refuse():
        raise fencing_sdk.BackendRefusedError("memory", "open", "not now")

    before = threads()
    store.open = refuse
    locks = connect(store)
    with pytest.raises(fencing_sdk.BackendRefusedError), locks:
        pass
    assert threads() == before
    with pytest.raises(fencing_sdk.BackendRefusedError):
        locks.inspect("a")
    del store.open
    with locks, locks.lock("a"):
        pass


def test_an_interrupt_while_the_client_opens_closes_it_again(store):
    interrupted = threading.Event()

    async def hang():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        await until(interrupted.is_set, what="the call has ended", within=PATIENCE)

    before = threads()
    store.open = hang
    locks = connect(store)
    with pytest.raises(KeyboardInterrupt), handled_by(signal.default_int_handler):
        locks.inspect("a")
    interrupted.set()
    del store.open
    with locks:
        assert free(locks)
    assert threads() == before


MOMENTS = ["while its thread starts", "while it opens", "as its wait begins", "right after it has opened"]


@contextlib.contextmanager
def opening(act, *, when, may_end=lambda: True):
    """
    Have the main thread call *act* at a moment of the opening, as the handler of a signal would.

    The opening goes on until *may_end* holds.
    """
    start, wait = threading.Thread.start, Opening.wait

    async def enter_slowly(client, *, lazily):
        if when == "while it opens":
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        await asyncio.sleep(0.05)
        await until(may_end, what="the opening may end", within=PATIENCE)
        await enter(client, lazily=lazily)

    def started(thread):
        start(thread)
        if when == "while its thread starts" and thread.name == "fencing-sync":
            act()

    def waited(opening):
        if when == "as its wait begins":
            act()
        wait(opening)
        if when == "right after it has opened":
            act()

    with handled_by(lambda *_: act()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_bridge, "enter", enter_slowly)
        patch.setattr(threading.Thread, "start", started)
        patch.setattr(Opening, "wait", waited)
        yield


@pytest.mark.parametrize("when", MOMENTS)
def test_the_handler_of_a_signal_may_close_the_client_that_its_thread_opens(store, when):
    before = threads()
    locks = connect(store)
    with opening(locks.close, when=when), pytest.raises(UsageError, match="was closed while it was opened"):
        locks.inspect("a")
    assert threads() == before
    with locks:
        assert free(locks)


@pytest.mark.parametrize("when", MOMENTS)
def test_an_interrupt_while_the_client_opens_leaves_no_thread_behind(store, when):
    def interrupt():
        raise KeyboardInterrupt

    before = threads()
    locks = connect(store)
    with opening(interrupt, when=when), pytest.raises(KeyboardInterrupt):
        locks.inspect("a")
    with locks:  # waits for the end of the thread
        assert free(locks)
    assert threads() == before


def test_the_handler_of_a_signal_that_uses_the_client_which_its_thread_opens_is_told_so(store):
    heard = []

    def use():
        with pytest.raises(UsageError, match="is being opened by the call that this handler"):
            locks.drain(within=1)
        heard.append("told")

    with connect(store) as locks:
        locks.close()
        with opening(use, when="while it opens", may_end=lambda: heard):
            assert free(locks)
    assert heard == ["told"]


def test_an_observer_that_would_wait_for_its_own_thread_is_told_so(store, caplog):
    def observe(event: Event) -> None:
        if event.kind == "acquired":
            locks.inspect("a")

    with connect(store, observers=[observe]) as locks, locks.lock("a"):
        pass
    assert "cannot wait for itself" in caplog.text


def test_a_client_is_made_of_a_client():
    locks = SyncLockClient(LockClient(MemoryBackend()))
    with locks, locks.lock("a") as lease:
        assert repr(locks) == "<sync.LockClient on MemoryBackend, open, 1 lease>"
        assert repr(lease).startswith("<Lease 'a' token=")
    assert repr(locks.lock("a", ttl=3)) == "<sync.Lock 'a' ttl=3>"
    assert repr(locks.semaphore("a", permits=3)) == "<sync.Semaphore 'a' permits=3 ttl=15>"
    assert repr(locks.rwlock("a")) == "<sync.ReadWriteLock 'a'>"
    assert repr(locks.multilock("a", "b")) == "<sync.MultiLock 'a', 'b'>"
    with pytest.raises(ConfigurationError, match="client must be a LockClient"):
        SyncLockClient(MemoryBackend())


def test_a_generator_that_is_closed_in_a_term_that_was_lost_leads_no_more():
    with connect("memory://") as locks:

        def leads():
            for term in locks.election("a"):
                with term as lease:
                    yield lease

        leading = leads()
        lease = next(leading)
        assert locks.revoke("a", token=lease.token, reason="maintenance")
        assert lease.wait_lost(PATIENCE) is LossReason.REVOKED
        leading.close()
        assert locks.inspect("a") is None
