"""A lock of `interrupt=True`: its loss breaks what the main thread does, and nothing else."""

import contextlib
import signal
import threading
import time
from typing import Any

import pytest
from inside import held_here
from patience import wait_until

from fencing_sdk import LeaseLostError, LossReason, UsageError
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.sync import Lease, LockClient, connect
from fencing_sdk.sync._lease import LossCallback
from fencing_sdk.sync._signals import Interrupt, _Signals


@pytest.fixture
def store():
    return MemoryBackend()


@pytest.fixture
def locks(store):
    before = signal.getsignal(signal.SIGURG)
    client = connect(store)
    yield client
    client.close()
    assert signal.getsignal(signal.SIGURG) == before


def taken_away_soon(locks: LockClient, store: MemoryBackend, name: str) -> None:
    """Let the store take a lock away, while the main thread blocks."""

    async def take_away() -> None:
        store.take_away(name)

    threading.Timer(0.2, locks.run, (take_away,)).start()


def test_a_loss_breaks_a_call_that_blocks_and_the_lock_is_released(locks, store):
    began = time.monotonic()
    with pytest.raises(LeaseLostError) as lost, locks.lock("a", interrupt=True):
        taken_away_soon(locks, store, "a")
        time.sleep(60)
    assert lost.value.reason is LossReason.REVOKED
    assert time.monotonic() - began < 30
    assert locks.inspect("a") is None


def test_a_loss_that_comes_while_the_block_is_entered_keeps_its_body_from_running(locks, store, monkeypatch):
    """The signal finds the main thread on its way into the block, where it breaks nothing."""
    on_lost, handle, came = Lease.on_lost, _Signals._handle, []

    def lost_in_between(lease: Lease, callback: LossCallback) -> None:
        on_lost(lease, callback)
        locks.run(take_away)
        wait_until(lambda: came, what="the signal comes")

    async def take_away() -> None:
        store.take_away("a")

    def seen(signals: _Signals, *arguments: Any) -> None:
        came.append(1)
        handle(signals, *arguments)

    monkeypatch.setattr(Lease, "on_lost", lost_in_between)
    monkeypatch.setattr(_Signals, "_handle", seen)
    began = time.monotonic()
    with pytest.raises(LeaseLostError) as lost, locks.lock("a", interrupt=True):
        time.sleep(60)
    assert lost.value.reason is LossReason.REVOKED
    assert time.monotonic() - began < 30
    assert locks.inspect("a") is None


def test_a_decorated_function_is_broken_too(locks):
    @locks.locking("a", ttl=120, max_hold=0.1, interrupt=True)  # a loop that is late by less than 6 s is not a stall
    def work() -> None:
        time.sleep(60)

    with pytest.raises(LeaseLostError, match="max_hold"):
        work()


def test_the_loss_of_the_outer_of_two_locks_breaks_the_body(locks, store):
    reached = []
    with (
        pytest.raises(LeaseLostError) as lost,
        locks.lock("outer", interrupt=True),
        locks.lock("inner", interrupt=True),
    ):
        taken_away_soon(locks, store, "outer")
        time.sleep(60)
        reached.append("the end")
    assert (lost.value.name, reached) == ("outer", [])
    assert locks.inspect("inner") is None


def both_lost(locks: LockClient, store: MemoryBackend) -> None:
    """As by an outage of the store."""

    async def take_away() -> None:
        store.take_away("outer")
        store.take_away("inner")

    locks.run(take_away)


@pytest.mark.parametrize("caught", [False, True])
def test_the_outermost_of_two_locks_that_are_lost_at_once_is_broken(locks, store, caught):
    """An error of the inner one that is caught between the two would let the outer body go on."""
    began, reached = time.monotonic(), []
    with pytest.raises(LeaseLostError) as lost, locks.lock("outer", interrupt=True):
        with (
            contextlib.suppress(LeaseLostError) if caught else contextlib.nullcontext(),
            locks.lock("inner", interrupt=True),
        ):
            both_lost(locks, store)
            time.sleep(60)
        reached.append("the outer body")
        if not caught:
            time.sleep(60)
    assert (lost.value.name, time.monotonic() - began < 30) == ("outer", True)
    assert reached == (["the outer body"] if caught else [])
    assert locks.inspect("inner") is locks.inspect("outer") is None


@pytest.mark.parametrize("raises", [False, True])
def test_the_loss_of_the_outer_lock_that_comes_at_the_end_of_the_inner_block_breaks_the_outer_body(
    locks, store, monkeypatch, raises
):
    """The signal breaks no end of a block. It is sent again, also where an error of the body leaves the inner one."""
    came, handle, end = [], _Signals._handle, Interrupt.end

    def seen(signals: _Signals, *arguments: Any) -> None:
        came.append(1)
        handle(signals, *arguments)

    def lost_meanwhile(interrupt: Interrupt) -> None:
        end(interrupt)
        if not came:
            locks.run(take_away)
            wait_until(lambda: came, what="the signal comes")

    async def take_away() -> None:
        store.take_away("outer")

    monkeypatch.setattr(_Signals, "_handle", seen)
    began = time.monotonic()
    with pytest.raises(LeaseLostError) as lost, locks.lock("outer", interrupt=True):
        monkeypatch.setattr(Interrupt, "end", lost_meanwhile)
        with contextlib.suppress(ValueError), locks.lock("inner", interrupt=True):
            if raises:
                raise ValueError
        time.sleep(60)
    assert (lost.value.name, time.monotonic() - began < 30) == ("outer", True)


def test_the_loss_of_the_outer_lock_breaks_the_wait_for_the_inner_one(locks, store):
    with (
        locks.lock("inner").acquire(),
        pytest.raises(LeaseLostError) as lost,
        locks.lock("outer", interrupt=True),
    ):
        taken_away_soon(locks, store, "outer")
        with locks.lock("inner", interrupt=True, wait=60):
            pytest.fail("it is held")
    assert lost.value.name == "outer"
    assert locks.inspect("inner") is None


def test_what_cleans_up_after_a_loss_is_not_broken_again(locks, store):
    cleaned = []
    with pytest.raises(LeaseLostError), locks.lock("outer", interrupt=True), locks.lock("inner", interrupt=True):
        try:
            both_lost(locks, store)
            time.sleep(60)
        finally:
            time.sleep(0.3)
            cleaned.append("up")
    assert cleaned == ["up"]


def test_a_block_that_swallows_the_error_raises_it_at_its_end(locks, store):
    with pytest.raises(LeaseLostError), locks.lock("a", interrupt=True):
        taken_away_soon(locks, store, "a")
        with contextlib.suppress(LeaseLostError):
            time.sleep(60)


def test_without_a_loss_nothing_happens_and_the_programs_own_handler_is_called(locks):
    seen = []
    before = signal.signal(signal.SIGURG, lambda *_: seen.append(1))
    try:
        with locks.lock("a", interrupt=True) as lease:
            signal.raise_signal(signal.SIGURG)
            assert lease.held
        assert seen == [1]
        signal.raise_signal(signal.SIGURG)
        assert seen == [1, 1]
    finally:
        signal.signal(signal.SIGURG, before)


def test_the_end_of_a_block_is_not_broken_itself(locks, store, monkeypatch):
    """The signal may come when the block is being left: the lease is released all the same."""
    end = Interrupt.end

    def late(interrupt: Interrupt) -> None:
        signal.raise_signal(signal.SIGURG)
        end(interrupt)

    monkeypatch.setattr(Interrupt, "end", late)
    lock = locks.lock("a", interrupt=True)
    lease = lock.__enter__()
    with contextlib.suppress(LeaseLostError):  # raised in the body
        taken_away_soon(locks, store, "a")
        time.sleep(60)
    assert lease.lost_reason is LossReason.REVOKED
    with pytest.raises(LeaseLostError):
        lock.__exit__(None, None, None)
    assert held_here() == ()


def test_a_client_that_is_closed_in_the_block_is_closed_to_the_end(locks):
    with pytest.raises(LeaseLostError) as lost, locks.lock("a", interrupt=True):
        locks.close()
        time.sleep(0.2)
    assert lost.value.reason is LossReason.CLOSED


def test_another_thread_is_refused_before_it_asks_for_the_lock(locks):
    errors = []

    def work() -> None:
        try:
            with locks.lock("a", interrupt=True):
                pass
        except UsageError as error:
            errors.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == ["lock 'a' has interrupt=True, which works in the main thread alone; ask lease.check() here"]
    assert locks.inspect("a") is None
