"""When things happen: the clock, the settings that leave no time, and the schedule of the heartbeat."""

from __future__ import annotations

import asyncio
import math
import random
import re
import subprocess
import sys
import time
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from inside import BootClock, LoopClock, wall_micros

from fencing_sdk._engine.heartbeat import Schedule
from fencing_sdk._values import clock as clock_module
from fencing_sdk._values.clock import boot_identity, wall_ticks
from fencing_sdk._values.timing import (
    DRIFT,
    MAX_TTL,
    MIN_INTERVAL,
    MIN_TTL,
    RENEWALS_BEFORE_DEADLINE,
    Timing,
    _built,
    check_ttl,
    seconds,
)
from fencing_sdk.errors import ConfigurationError

# The arithmetic of a lease: every accepted mix is safe, and every refused one says what to change.


pure = settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.filter_too_much])

ttls = st.floats(MIN_TTL, MAX_TTL)
numbers = st.floats(0, 100) | st.floats(0, MAX_TTL)


@st.composite
def timings(draw: st.DrawFn) -> Timing:
    """Any mix of numbers that is accepted."""
    ttl = draw(ttls)
    buffer = draw(st.none() | st.floats(0, 1).map(lambda part: part * ttl))
    interval = draw(st.none() | st.floats(0, 0.5).map(lambda part: MIN_INTERVAL + part * ttl))
    try:
        return Timing.build(ttl=ttl, safety_buffer=buffer, heartbeat_interval=interval)
    except ConfigurationError:
        assume(False)
        raise


@pure
@given(timings(), st.floats(0, 1), st.floats(0, 1e6))
def test_the_deadline_lies_before_the_stores_expiry_whatever_the_clocks_do_within_drift(timing, part, sent_at):
    """The local clock may run slow by `DRIFT`: then more true time passes until the deadline than it shows."""
    rate = 1 - Fraction(DRIFT) * Fraction(part)  # of our clock, as seen by the store's
    shown = Fraction(timing.deadline(sent_at)) - Fraction(sent_at)
    rounding = Fraction(math.ulp(sent_at + timing.ttl)) * 2
    assert (shown - rounding) / rate <= timing.ttl
    if timing.safety_buffer > 1e-6:
        assert shown / rate < timing.ttl


@pure
@given(timings())
def test_two_renewal_attempts_fit_between_a_heartbeat_and_the_deadline(timing):
    assert 0 < timing.heartbeat_interval * RENEWALS_BEFORE_DEADLINE <= timing.validity(timing.ttl)
    assert 0 < timing.call_limit < timing.validity(timing.ttl)


@pure
@given(timings(), st.floats(0, 1))
def test_an_attempt_leaves_time_for_the_next_one_until_the_deadline_is_close(timing, part):
    interval, left = timing.heartbeat_interval, timing.validity(timing.ttl) * part
    limit, pause = timing.renewal_limit(left), timing.retry_pause(left)
    assert 0 <= limit <= min(left, interval)
    assert 0 < pause <= interval / 4
    if left >= interval / 2:
        assert limit <= left / 2
    if left >= 2 * interval:
        assert (limit, pause) == (interval, interval / 4), "far from the deadline a store may be slow"
    if left <= interval / 8:
        assert pause == interval / 32


def test_a_third_of_the_usable_time_is_the_longest_interval():
    Timing.build(ttl=4, safety_buffer=0.96, heartbeat_interval=1)
    with pytest.raises(ConfigurationError, match=r"heartbeat_interval=1.001 .* make it at most 1, or"):
        Timing.build(ttl=4, safety_buffer=0.96, heartbeat_interval=1.001)


@pytest.mark.parametrize("buffer", [3.96, 4, 5, 1e9])
def test_a_buffer_that_eats_the_ttl_is_refused(buffer):
    with pytest.raises(ConfigurationError, match=r"safety_buffer=.* leaves nothing of ttl=4 .*smaller.*larger"):
        Timing.build(ttl=4, safety_buffer=buffer)


def test_no_buffer_at_all_is_allowed_and_still_ends_before_the_ttl():
    assert Timing.build(ttl=10, safety_buffer=0).validity(10) == pytest.approx(9.9)


@pure
@given(ttls, numbers, numbers)
def test_following_the_advice_about_the_interval_is_accepted(ttl, buffer, interval):
    try:
        Timing.build(ttl=ttl, safety_buffer=buffer, heartbeat_interval=interval)
    except ConfigurationError as error:
        advice = re.search(r"make it at most ([0-9.e+-]+),", str(error))
    else:
        advice = None
    assume(advice is not None)
    followed = float(advice[1])
    assume(followed >= MIN_INTERVAL)
    Timing.build(ttl=ttl, safety_buffer=buffer, heartbeat_interval=followed)


def test_timedeltas_are_seconds():
    given_as_timedelta = Timing.build(
        ttl=timedelta(minutes=1),
        safety_buffer=timedelta(seconds=5),
        heartbeat_interval=timedelta(milliseconds=2500),
        max_hold=timedelta(hours=1),
    )
    assert given_as_timedelta == Timing.build(ttl=60, safety_buffer=5.0, heartbeat_interval=2.5, max_hold=3600)


@pytest.mark.parametrize(("low", "high"), [(MIN_TTL, MAX_TTL)])
def test_the_bounds_of_a_ttl_are_inclusive(low, high):
    assert (check_ttl(low), check_ttl(high)) == (low, high)
    for beyond in (math.nextafter(low, 0), math.nextafter(high, math.inf)):
        with pytest.raises(ConfigurationError, match=r"^ttl must be at"):
            check_ttl(beyond)


def test_an_exclusive_bound_is_refused_and_the_next_number_taken():
    assert seconds(5e-324, "max_hold", above=True) == 5e-324
    with pytest.raises(ConfigurationError, match=r"^max_hold must be more than 0 s, got 0$"):
        seconds(0, "max_hold", above=True)


@pure
@given(ttls, st.floats(allow_nan=True, allow_infinity=True))
@example(ttl=15.0, granted=math.nan)
@example(ttl=15.0, granted=-math.inf)
def test_a_store_cannot_prolong_a_lease_by_what_it_grants(ttl, granted):
    """NaN would make a deadline that never comes: every comparison with it is false."""
    timing = Timing.build(ttl=ttl)
    try:
        shorter = timing.granted(granted)
    except ConfigurationError:
        return
    assert 0 < shorter.deadline(0) <= timing.deadline(0)
    assert shorter.deadline(0) <= granted
    assert shorter.heartbeat_interval * RENEWALS_BEFORE_DEADLINE <= shorter.validity(shorter.ttl)


def test_a_store_that_grants_as_much_as_was_asked_changes_nothing():
    timing = Timing.build(ttl=15)
    assert timing.granted(None) is timing
    assert timing.granted(15) is timing
    assert timing.granted(20) is timing
    assert timing.granted(14).ttl == 14


@pure
@given(ttls, st.floats(MIN_TTL, MAX_TTL))
@example(ttl=30.0, granted=20 * 2 / 3)
@example(ttl=MAX_TTL, granted=MIN_TTL)
def test_what_was_not_given_follows_what_the_store_grants(ttl, granted):
    shorter = Timing.build(ttl=ttl).granted(granted)
    assert shorter == Timing.build(ttl=min(ttl, granted))


def test_a_second_shorter_grant_still_knows_what_was_given_by_hand():
    timing = Timing.build(ttl=30, safety_buffer=1).granted(20).granted(10)
    assert timing == Timing.build(ttl=10, safety_buffer=1)


@pytest.mark.parametrize(
    ("by_hand", "granted", "text"),
    [
        (
            {"heartbeat_interval": 6},
            40 / 3,
            (
                "heartbeat_interval=6 was set for ttl=30, and in the 13.3333 s that the store grants it leaves no room "
                "for two renewal attempts; make it at most 3.5111, or leave it out"
            ),
        ),
        (
            {"safety_buffer": 14},
            40 / 3,
            (
                "safety_buffer=14 was set for ttl=30, and leaves nothing of the 13.3333 s that the store grants; "
                "make it smaller, or leave it out"
            ),
        ),
        (
            {"safety_buffer": 3, "heartbeat_interval": 4},
            40 / 3,
            (
                "heartbeat_interval=4 was set for ttl=30, and in the 13.3333 s that the store grants it leaves no room "
                "for two renewal attempts; make it at most 3.4, or leave it out"
            ),
        ),
        ({}, 0.001, "the store grants 0.001 s, which is too short for any heartbeat"),
        ({"heartbeat_interval": 1}, 0.001, "the store grants 0.001 s, which is too short for any heartbeat"),
        ({}, math.nan, "the store grants nan s, which is too short for any heartbeat"),
    ],
)
def test_a_grant_that_is_too_short_is_refused_with_the_parameter_that_was_set_too_large(by_hand, granted, text):
    with pytest.raises(ConfigurationError) as refused:
        Timing.build(ttl=30, **by_hand).granted(granted)
    assert str(refused.value) == text


def test_a_slip_from_seconds_to_microseconds_does_not_flood_the_store():
    with pytest.raises(ConfigurationError, match=r"^heartbeat_interval must be at least 0.001 s"):
        Timing.build(heartbeat_interval=5e-6)


def test_a_program_that_computes_every_ttl_does_not_fill_its_memory_with_them():
    for number in range(1000):
        Timing.build(ttl=10 + number / 1000)
    assert _built.cache_info().currsize < 1000


# The clocks: one that goes on during a suspend where there is one, and one that follows the loop.


has_boottime = hasattr(time, "CLOCK_BOOTTIME")


@pytest.mark.skipif(not has_boottime, reason="this system has no boot clock")
def test_deadlines_are_read_from_a_clock_that_goes_on_during_a_suspend():
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= BootClock().now() <= time.clock_gettime(time.CLOCK_BOOTTIME)


@pytest.mark.parametrize(
    ("system", "chosen"),
    [
        pytest.param({"CLOCK_BOOTTIME": 7, "CLOCK_MONOTONIC": 1}, 7, id="linux"),
        pytest.param({"CLOCK_MONOTONIC": 6, "CLOCK_UPTIME_RAW": 8}, 6, id="macos"),
        pytest.param({}, None, id="windows"),
    ],
)
def test_every_system_is_asked_for_the_clock_that_goes_on_during_a_suspend(system, chosen):
    assert clock_module._boot_clock_id(SimpleNamespace(**system)) == chosen


async def test_the_loop_clock_is_the_time_of_the_running_loop():
    loop = asyncio.get_running_loop()
    before = loop.time()
    assert before <= LoopClock().now() <= loop.time()
    loop.time = lambda: 1234.5
    assert LoopClock().now() == 1234.5


def test_a_token_from_the_wall_clock_is_an_integer_of_structured_headers_for_two_hundred_years():
    """RFC 9651, 3.3.1: at most 15 digits."""
    assert wall_ticks() + 200 * 365 * 86_400 * 10**5 <= 999_999_999_999_999
    assert abs(wall_ticks() * 10 - wall_micros()) < 60e6


def test_the_boot_identity_is_stable_in_a_process_and_shared_by_the_processes_of_a_machine():
    mine = boot_identity()
    assert mine == boot_identity()
    assert mine.isprintable()
    command = "from fencing_sdk._values.clock import boot_identity; print(boot_identity())"
    child = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == mine


def test_a_system_without_a_boot_identity_says_so(monkeypatch):
    nowhere = Path("/nonexistent")
    monkeypatch.setattr("pathlib.Path", lambda _: nowhere)
    assert boot_identity() == "unknown"


# A heap of moments against the plainest model there is: a dict that is sorted when asked.


keys = st.integers(0, 40).map("owner-{}".format)
moments = st.floats(0, 100).map(lambda moment: round(moment, 1))


class ScheduleAgainstADict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.schedule: Schedule[str] = Schedule()
        self.model: dict[str, tuple[float, int]] = {}
        self.order = 0

    @rule(key=keys, when=moments)
    def put(self, key: str, when: float) -> None:
        self.order += 1
        self.schedule.put(key, when)
        self.model[key] = (when, self.order)

    @rule(key=keys, moments=st.lists(moments, min_size=50, max_size=150))
    def move_often(self, key: str, moments: list[float]) -> None:
        for when in moments:
            self.put(key, when)

    @rule(key=keys)
    def drop(self, key: str) -> None:
        self.schedule.drop(key)
        self.model.pop(key, None)

    @rule(now=moments)
    def take_what_is_due(self, now: float) -> None:
        in_order = sorted(self.model.items(), key=lambda item: item[1])
        expected = [(key, when) for key, (when, _) in in_order if when <= now]
        assert self.schedule.due(now) == expected
        for key, _ in expected:
            del self.model[key]

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert len(self.schedule) == len(self.model)
        assert all(key in self.schedule for key in self.model)
        assert self.schedule.next() == min((when for when, _ in self.model.values()), default=None)


TestScheduleAgainstADict = ScheduleAgainstADict.TestCase
TestScheduleAgainstADict.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)


def heap_size(schedule: Schedule[int]) -> int:
    return len(schedule._heap)


def test_leases_that_come_and_go_leave_no_heap_behind():
    schedule: Schedule[int] = Schedule()
    schedule.put(-1, 0.0)  # the earliest is alive, so that no dead entry surfaces
    for key in range(10_000):
        schedule.put(key, 1000.0 + key)
    for key in range(10_000):
        schedule.drop(key)
        assert heap_size(schedule) <= 64 + 2 * len(schedule)
    assert schedule.next() == 0.0


def test_sweeping_keeps_moments_and_their_order():
    schedule: Schedule[int] = Schedule()
    order = list(range(300))
    random.Random(1).shuffle(order)
    for key in order:
        schedule.put(key, float(key % 7))
    for _ in range(3):
        for key in order:
            schedule.put(key, float(key % 7))
    expected = sorted(order, key=lambda key: (key % 7, order.index(key)))
    assert [key for key, _ in schedule.due(10.0)] == expected


def test_keys_need_no_order_among_themselves():
    schedule: Schedule[object] = Schedule()
    keys = [object(), (1, "a"), "text"]
    for key in keys:
        schedule.put(key, 1.0)
    assert [key for key, _ in schedule.due(1.0)] == keys
