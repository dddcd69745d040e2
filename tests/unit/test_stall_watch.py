"""The stall watch, in real time: it names the code that keeps the event loop, and is silent otherwise."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from patience import until

from fencing_sdk._engine.stall_watch import StallWatch
from fencing_sdk._values.clock import BootClock

CLOCK = BootClock()
TRIES = range(5)
"""A machine that stands still between `arm` and the next line shows the watch something else, and rightly so."""


@pytest.fixture
def watch() -> Iterator[StallWatch]:
    watch = StallWatch(CLOCK)
    yield watch
    watch.stop()
    if watch._thread is not None:
        watch._thread.join(5)
        assert not watch._thread.is_alive()


def compress_the_archive(until: Callable[[], object], within: float = 5.0) -> None:
    """Keep this thread busy until something happened elsewhere, or for too long."""
    end = CLOCK.now() + within
    while not until() and CLOCK.now() < end:
        sum(range(1000))


def test_code_that_overruns_is_named(watch: StallWatch):
    began = CLOCK.now()
    stack = ""

    def is_named() -> bool:
        """Whether the watch has seen it; the machine may stand still before, so that the test itself is seen late."""
        nonlocal stack
        stack = watch.stack_since(began) or ""
        if stack and "compress_the_archive" not in stack:
            watch.arm(CLOCK.now() + 0.05)
        return "compress_the_archive" in stack

    watch.arm(began + 0.05)
    compress_the_archive(is_named)
    assert "compress_the_archive" in stack
    assert "test_code_that_overruns_is_named" in stack


def test_a_blocking_call_without_the_interpreter_lock_is_named_too(watch: StallWatch):
    for _ in TRIES:
        began = CLOCK.now()
        watch.arm(began + 0.05)
        time.sleep(0.5)
        if "time.sleep(0.5)" in str(watch.stack_since(began)):
            break
    assert "time.sleep(0.5)" in str(watch.stack_since(began))


def test_who_keeps_its_word_is_not_looked_at(watch: StallWatch):
    began = CLOCK.now()
    for _ in range(20):
        watch.arm(CLOCK.now() + 30)
        time.sleep(0.005)
    assert watch.stack_since(began) is None


def test_what_was_seen_before_is_not_to_blame(watch: StallWatch):
    began = CLOCK.now()
    watch.arm(began + 0.05)
    compress_the_archive(lambda: watch.stack_since(began))
    assert watch.stack_since(began) is not None
    assert watch.stack_since(CLOCK.now()) is None


def test_each_missed_moment_is_looked_at_once(watch: StallWatch):
    began = CLOCK.now()
    watch.arm(began + 0.05)
    compress_the_archive(lambda: watch.stack_since(began))
    seen = watch._seen
    time.sleep(0.3)
    assert watch._seen is seen


def test_an_idle_watch_costs_no_thread_and_an_idle_client_no_wake_up(watch: StallWatch):
    before = set(threading.enumerate())
    watch.arm(None)
    assert not set(threading.enumerate()) - before
    watch.arm(CLOCK.now() + 30)
    assert len(set(threading.enumerate()) - before) == 1
    watch.arm(None)
    began = CLOCK.now()
    time.sleep(0.1)
    assert watch.stack_since(began) is None


def test_it_expects_something_again_after_it_expected_nothing(watch: StallWatch):
    began = CLOCK.now()
    watch.arm(began + 0.02)
    compress_the_archive(lambda: watch.stack_since(began))
    watch.arm(None)
    time.sleep(0.05)
    again = CLOCK.now()
    watch.arm(again + 0.05)
    compress_the_archive(lambda: watch.stack_since(again))
    assert watch.stack_since(again) is not None


async def test_a_loop_that_waits_for_input_is_not_blocked():
    """A process that was stopped finds its loop waiting: there is no code to blame."""
    watch = StallWatch(CLOCK)
    try:
        for _ in TRIES:
            began = CLOCK.now()
            watch.arm(began + 0.1)
            await asyncio.sleep(0.6)
            await until(lambda began=began: watch._seen is not None and watch._seen[0] >= began, what="it has looked")
            if watch.stack_since(began) is None:
                break
        assert watch.stack_since(began) is None
    finally:
        watch.stop()


def test_an_earlier_moment_than_the_last_one_is_not_overslept(watch: StallWatch):
    """A lease of an hour came first, then one of a second: its beats are watched as well."""
    began = CLOCK.now()
    watch.arm(began + 900)
    time.sleep(0.1)
    watch.arm(CLOCK.now() + 0.05)
    compress_the_archive(lambda: watch.stack_since(began))
    assert watch.stack_since(began) is not None


def test_a_second_stall_right_after_the_first_one_is_named_too(watch: StallWatch):
    for _ in range(2):
        began = CLOCK.now()
        watch.arm(began + 0.05)
        compress_the_archive(lambda began=began: watch.stack_since(began))
        assert watch.stack_since(began) is not None


def test_a_stop_that_comes_while_the_thread_looks_around_is_not_missed():
    watch = StallWatch(CLOCK)

    class Inopportune(threading.Event):
        def clear(self) -> None:
            watch.stop()
            super().clear()

    watch._rearmed = Inopportune()
    watch.arm(CLOCK.now() + 30)
    try:
        watch._thread.join(5)
        assert not watch._thread.is_alive()
    finally:
        watch._rearmed.set()
