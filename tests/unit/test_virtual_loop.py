"""The event loop that is turned from outside: CPython's order, no hidden clock, nothing that vanishes."""

import asyncio
import socket
import sys
import time

import pytest

from fencing_sdk import UsageError
from fencing_sdk.testing._loop import Process, Timeline, VirtualLoop


class Driver:
    """A loop with a clock to set by hand."""

    def __init__(self):
        self.now = 0.0
        self.woken = 0
        self.failures = []
        self.loop = VirtualLoop(
            lambda: self.now, self._wake, lambda error, message: self.failures.append((error, message))
        )

    def _wake(self):
        self.woken += 1

    def run(self, work, turns=50):
        """Start *work* and turn until it has ended."""
        task = self.loop.create_task(work)
        for _ in range(turns):
            self.loop.turn()
        return task.result()


@pytest.fixture
def driver():
    driver = Driver()
    yield driver
    assert not driver.failures
    driver.loop.close()


def after_a_freeze(loop, seen, arrange):
    """Leave what waits when a process goes on: a ready callback, input, a due timer; each calls one thing more."""

    def note(what):
        seen.append(what)
        loop.call_soon(seen.append, f"after {what}")

    loop.call_soon(note, "ready")
    loop.call_later(0.001, note, "timer")
    arrange(lambda: note("input"))


def test_a_turn_has_the_order_of_cpythons_selector_loop(driver):
    real, virtual = [], []
    reader, writer = socket.socketpair()
    loop = asyncio.SelectorEventLoop()

    def arrange(note):
        loop.add_reader(reader, lambda: (reader.recv(1), note()))
        writer.send(b"x")

    def freeze():
        after_a_freeze(loop, real, arrange)
        time.sleep(0.01)  # a real process, frozen

    try:
        loop.call_soon(freeze)
        loop.call_later(0.1, loop.stop)
        loop.run_forever()
    finally:
        loop.close()
        reader.close()
        writer.close()

    after_a_freeze(driver.loop, virtual, driver.loop.arrive)
    driver.now = 0.01
    driver.loop.turn()
    driver.loop.turn()
    assert virtual == real
    assert virtual[:3] == ["ready", "input", "timer"]


def test_timers_run_when_they_are_due_in_the_order_they_were_set(driver):
    seen = []
    for number in range(5):
        driver.loop.call_at(2.0, seen.append, number)
    driver.loop.call_at(1.0, seen.append, "first")
    never = driver.loop.call_at(0.5, seen.append, "never")
    never.cancel()
    assert driver.loop.next_due() == 1.0
    driver.now = 1.0 - 1e-12  # what is left of a conversion between two clocks
    driver.loop.turn()
    assert seen == ["first"]
    driver.now = 2.0
    driver.loop.turn()
    assert seen == ["first", 0, 1, 2, 3, 4]
    assert driver.loop.next_due() is None


def test_a_loop_that_is_frozen_by_a_callback_stops_behind_it_and_keeps_the_order(driver):
    seen = []

    def freeze():
        seen.append("freeze")
        driver.loop.frozen = True

    for call in (lambda: seen.append(1), freeze, lambda: seen.append(2), lambda: seen.append(3)):
        driver.loop.call_soon(call)
    driver.loop.turn()
    assert seen == [1, "freeze"]
    driver.loop.frozen = False
    driver.loop.arrive(seen.append, "input")
    driver.loop.turn()
    assert seen == [1, "freeze", 2, 3, "input"]


def test_the_driver_is_woken_by_what_is_scheduled_from_outside_only(driver):
    driver.loop.call_soon(driver.loop.call_soon, int)
    driver.loop.call_soon_threadsafe(int)
    driver.loop.call_later(1, int)
    assert driver.woken == 3
    driver.loop.turn()
    assert driver.woken == 3


def test_tasks_hash_by_number_so_that_sets_are_walked_in_one_order(driver):
    tasks = {driver.loop.create_task(asyncio.sleep(0)) for _ in range(8)}
    assert [hash(task) for task in tasks] == list(range(8))
    driver.loop.turn()
    driver.loop.turn()


def test_the_error_of_a_callback_goes_to_the_driver_and_the_turn_goes_on():
    driver, seen = Driver(), []
    driver.loop.call_soon(int, "x")
    driver.loop.call_soon(seen.append, 1)
    driver.loop.turn()
    ((error, message),) = driver.failures
    assert isinstance(error, ValueError)
    assert "callback" in message
    assert seen == [1]


def test_a_failed_task_is_found_as_long_as_nobody_looked(driver):
    async def fail():
        raise ArithmeticError

    seen, unseen = driver.loop.create_task(fail()), driver.loop.create_task(fail())
    driver.loop.turn()
    driver.loop.turn()
    with pytest.raises(ArithmeticError):
        seen.result()
    assert driver.loop.take_failed() == [unseen]
    assert not driver.loop.take_failed()
    assert isinstance(unseen.exception(), ArithmeticError)


def test_asynchronous_generators_are_closed_in_the_loop_that_began_them(driver):
    closed = []

    async def generate():
        try:
            yield 1
        finally:
            closed.append(asyncio.get_running_loop())

    kept = generate()

    async def begin():
        await anext(kept)
        await anext(generate())  # dropped at once: the garbage collector hands it to its loop

    hooks = sys.get_asyncgen_hooks()
    driver.run(begin())
    assert closed == [driver.loop]
    driver.run(driver.loop.shutdown_asyncgens())
    assert closed == [driver.loop] * 2
    assert sys.get_asyncgen_hooks() == hooks


@pytest.mark.parametrize("call", ["run_in_executor", "create_connection", "getaddrinfo", "add_reader", "sock_recv"])
def test_what_needs_the_real_world_is_refused_by_name(driver, call):
    with pytest.raises(UsageError, match=call):
        getattr(driver.loop, call)()


# A process: a loop with a clock of its own on a timeline.


def test_a_process_reads_its_own_clock_and_wakes_by_it():
    timeline = Timeline(0)
    process = Process(timeline, "A", rate=2.0)
    began, fired = process.clock.now(), []
    process.loop.call_later(10, lambda: fired.append((timeline.now, process.clock.now() - began)))
    timeline.run(100)
    assert fired == [(pytest.approx(5), pytest.approx(10))]


def test_a_paused_process_runs_nothing_and_its_clock_goes_on():
    timeline, seen = Timeline(0), []
    process = Process(timeline, "A", rate=1.0)
    began = process.clock.now()
    process.loop.call_later(1, seen.append, "timer")
    process.pause()
    process.loop.arrive(seen.append, "input")
    timeline.at(50, process.resume)
    timeline.run(49)
    assert seen == []
    timeline.run(100)
    assert seen == ["input", "timer"]
    assert process.clock.now() - began == pytest.approx(50)
    assert not process.paused


def test_a_suspended_process_has_a_loop_that_slept():
    timeline, fired = Timeline(0), []
    process = Process(timeline, "A", rate=1.0)
    process.loop.call_later(10, lambda: fired.append(timeline.now))
    timeline.at(1, lambda: process.pause(suspend=True))
    timeline.at(51, process.resume)
    timeline.run(100)
    assert fired == [pytest.approx(60)], "nine seconds of its own were left"


def test_what_is_due_at_one_moment_happens_in_the_order_it_was_asked_for():
    timeline, seen = Timeline(0), []
    for number in range(5):
        timeline.at(1, seen.append, number)
    timeline.at(2, seen.append, "later")
    timeline.run(1)
    assert seen == [0, 1, 2, 3, 4]
    assert (timeline.now, timeline.over) == (1, False)
