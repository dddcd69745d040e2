"""
A signal begins the drain of a client for threads, a second one ends the leases, and handlers are left as they were.

The signal is one that does nothing by default. `tests/scenarios/test_sync_processes.py` sends SIGTERM to a process.
"""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from patience import wait_until
from stays import PATIENCE

from fencing_sdk import DrainingError, LeaseLostError, LossReason, UsageError
from fencing_sdk.events import Lost, Released
from fencing_sdk.sync import connect

SIGNAL = signal.SIGWINCH


@pytest.fixture
def locks():
    before = signal.getsignal(SIGNAL)
    with connect("memory://") as client:
        yield client
    assert signal.getsignal(SIGNAL) == before


def send():
    os.kill(os.getpid(), SIGNAL)


def test_a_wait_is_broken_and_the_block_ends_after_the_bodies_of_other_threads(locks):
    ended, held = [], threading.Event()

    def work():
        with locks.lock("a") as lease:
            held.set()
            wait_until(lambda: locks.draining, within=PATIENCE)
            lease.check()
            ended.append("body")

    def tell():
        wait_until(lambda: locks.waiters("a"), within=PATIENCE)
        send()

    with ThreadPoolExecutor(2) as pool:
        with locks.draining_on(SIGNAL, within=PATIENCE):
            pool.submit(work)
            held.wait(PATIENCE)
            pool.submit(tell)
            with locks.lock("a"):
                ended.append("never")
        assert ended == ["body"]


def test_a_block_of_two_clients_drains_both_and_leaves_the_handlers_as_they_were(locks):
    before = signal.getsignal(SIGNAL)
    with connect("memory://") as inner, locks.draining_on(SIGNAL, within=PATIENCE):
        with inner.draining_on(SIGNAL, within=PATIENCE):
            while True:
                with inner.lock("a") as lease:
                    send()
                    wait_until(lambda: locks.draining and inner.draining, within=PATIENCE)
                    lease.check()
        assert signal.getsignal(SIGNAL) != before
    assert signal.getsignal(SIGNAL) == before


def test_a_signal_that_does_not_wake_the_main_thread_is_heeded_all_the_same(locks):
    """The signal comes right before the thread sleeps, which no test can hit, or to another thread."""

    def tell():
        wait_until(lambda: locks.waiters("a"), within=PATIENCE)
        signal.pthread_kill(threading.get_ident(), SIGNAL)

    lease = locks.lock("a").acquire()
    with ThreadPoolExecutor(1) as pool, locks.draining_on(SIGNAL, within=0.0):
        pool.submit(tell)
        with locks.lock("a", wait=PATIENCE):
            pytest.fail("the wait goes on until the lock is free")
    assert locks.draining
    assert lease.lost_reason is LossReason.DRAINED


def test_two_signals_at_the_end_of_the_block_leave_it_in_order(locks):
    with locks.draining_on(SIGNAL, within=PATIENCE):
        send()
        send()
    assert locks.draining


def test_a_client_that_was_closed_in_the_block_is_not_drained(locks):
    with locks.draining_on(SIGNAL, within=PATIENCE):
        locks.close()
        send()
    with locks.lock("a") as lease:
        assert lease.held


def test_another_thread_than_the_main_one_gets_no_signals(locks):
    with ThreadPoolExecutor(1) as pool, pytest.raises(UsageError, match="main thread"):
        pool.submit(locks.draining_on(SIGNAL, within=1).__enter__).result()


def test_closing_lets_the_body_of_another_thread_end_and_give_its_lock_back():
    heard = []
    locks = connect("memory://", drain=PATIENCE, observers=[heard.append])
    with ThreadPoolExecutor(2) as pool, locks.lock("a") as lease:
        closing = pool.submit(locks.close)
        wait_until(lambda: locks.draining, within=PATIENCE)
        with pytest.raises(DrainingError):
            pool.submit(locks.lock("b").acquire).result()
        lease.check()
    closing.result()
    assert [type(event) for event in heard if isinstance(event, Lost | Released)] == [Released]


def test_two_threads_that_close_at_once_let_the_body_of_a_third_one_end():
    heard = []
    locks = connect("memory://", drain=PATIENCE, observers=[heard.append])
    with ThreadPoolExecutor(2) as pool:
        with locks.lock("a") as lease:
            closing = [pool.submit(locks.close) for _ in range(2)]
            wait_until(lambda: locks.draining, within=PATIENCE)
            lease.check()
        for one in closing:
            one.result(PATIENCE)
    assert [type(event) for event in heard if isinstance(event, Lost | Released)] == [Released]
    assert not locks.status().open


def test_ctrl_c_ends_a_closing_that_drains():

    def interrupt():
        wait_until(lambda: locks.draining, within=PATIENCE)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    locks = connect("memory://", drain=3 * PATIENCE)
    lease = locks.lock("a").acquire()
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    began = time.monotonic()
    try:
        with ThreadPoolExecutor(1) as pool, pytest.raises(KeyboardInterrupt):
            pool.submit(interrupt)
            locks.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert time.monotonic() - began < PATIENCE
    assert lease.lost_reason is LossReason.CLOSED
    assert not locks.status().open


def test_closing_does_not_wait_for_a_lock_of_its_own_thread():
    locks = connect("memory://", drain=2 * PATIENCE)
    with pytest.raises(LeaseLostError) as loss, locks.lock("a"):
        locks.close()
    assert loss.value.reason is LossReason.CLOSED
