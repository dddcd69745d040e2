"""The arithmetic of a lease: every accepted mix is safe, and every refused one says what to change."""

import math
import re
from datetime import timedelta
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from fencing_sdk._values.timing import (
    DEFAULT_DRIFT,
    MAX_DRIFT,
    MAX_TTL,
    MIN_INTERVAL,
    MIN_TTL,
    RENEWALS_BEFORE_DEADLINE,
    Timing,
    _built,
    check_drift,
    check_ttl,
    seconds,
)
from fencing_sdk.errors import ConfigurationError

pure = settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.filter_too_much])

ttls = st.floats(MIN_TTL, MAX_TTL)
drifts = st.floats(0, MAX_DRIFT)
numbers = st.floats(0, 100) | st.floats(0, MAX_TTL)


@st.composite
def timings(draw: st.DrawFn) -> Timing:
    """Any mix of numbers that is accepted."""
    ttl = draw(ttls)
    buffer = draw(st.none() | st.floats(0, 1).map(lambda part: part * ttl))
    interval = draw(st.none() | st.floats(0, 0.5).map(lambda part: MIN_INTERVAL + part * ttl))
    try:
        return Timing.build(ttl=ttl, safety_buffer=buffer, heartbeat_interval=interval, drift=draw(drifts))
    except ConfigurationError:
        assume(False)
        raise


@pure
@given(timings(), st.floats(0, 1), st.floats(0, 1e6))
def test_the_deadline_lies_before_the_stores_expiry_whatever_the_clocks_do_within_drift(timing, part, sent_at):
    """The local clock may run slow by *drift*: then more true time passes until the deadline than it shows."""
    rate = 1 - Fraction(timing.drift) * Fraction(part)  # of our clock, as seen by the store's
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


@pure
@given(ttls, drifts)
@example(ttl=1.0, drift=0.3125)
@example(ttl=15.0, drift=MAX_DRIFT)
def test_a_ttl_alone_is_always_enough_whatever_drift_is_tolerated(ttl, drift):
    timing = Timing.build(ttl=ttl, drift=drift)
    assert timing.safety_buffer == ttl / 5
    assert timing.heartbeat_interval * RENEWALS_BEFORE_DEADLINE <= timing.validity(ttl) < ttl


@pytest.mark.parametrize("ttl", [MIN_TTL, 0.5, 1, 5, 15, 60, 3600, MAX_TTL])
def test_the_documented_defaults(ttl):
    timing = Timing.build(ttl=ttl)
    assert timing.drift == DEFAULT_DRIFT == 0.01
    assert timing.safety_buffer == pytest.approx(ttl / 5)
    assert timing.heartbeat_interval == pytest.approx((ttl - ttl / 5) / 4)
    assert timing.deadline(100) == pytest.approx(100 + ttl * 0.99 - ttl / 5)
    assert timing.max_hold is None


def test_the_numbers_of_the_documentation():
    timing = Timing.build(ttl=15)
    assert timing.validity(15) == pytest.approx(11.85)
    assert timing.heartbeat_interval == pytest.approx(3.0)


def test_a_third_of_the_usable_time_is_the_longest_interval():
    Timing.build(ttl=4, safety_buffer=1, drift=0, heartbeat_interval=1)
    with pytest.raises(ConfigurationError, match=r"heartbeat_interval=1.001 .* make it at most 1, or"):
        Timing.build(ttl=4, safety_buffer=1, drift=0, heartbeat_interval=1.001)


@pytest.mark.parametrize("buffer", [3.96, 4, 5, 1e9])
def test_a_buffer_that_eats_the_ttl_is_refused(buffer):
    with pytest.raises(ConfigurationError, match=r"safety_buffer=.* leaves nothing of ttl=4 .*smaller.*larger"):
        Timing.build(ttl=4, safety_buffer=buffer)


def test_no_buffer_at_all_is_allowed_and_still_ends_before_the_ttl():
    assert Timing.build(ttl=10, safety_buffer=0).validity(10) == pytest.approx(9.9)


@pure
@given(ttls, numbers, numbers, drifts)
@example(ttl=10.0, buffer=2.0, interval=2.0, drift=0.3)
def test_following_the_advice_about_the_interval_is_accepted(ttl, buffer, interval, drift):
    try:
        Timing.build(ttl=ttl, safety_buffer=buffer, heartbeat_interval=interval, drift=drift)
    except ConfigurationError as error:
        advice = re.search(r"make it at most ([0-9.e+-]+),", str(error))
    else:
        advice = None
    assume(advice is not None)
    followed = float(advice[1])
    assume(followed >= MIN_INTERVAL)
    Timing.build(ttl=ttl, safety_buffer=buffer, heartbeat_interval=followed, drift=drift)


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


def test_the_bounds_of_drift_are_inclusive():
    assert (check_drift(0), check_drift(0.5)) == (0.0, 0.5)
    for beyond in (-1e-9, math.nextafter(0.5, 1), math.nan, 10**5000, True, False):
        with pytest.raises(ConfigurationError, match=r"^drift must be a fraction from 0 to 0.5"):
            check_drift(beyond)


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
@given(ttls, drifts, st.floats(MIN_TTL, MAX_TTL))
@example(ttl=30.0, drift=DEFAULT_DRIFT, granted=20 * 2 / 3)
@example(ttl=MAX_TTL, drift=MAX_DRIFT, granted=MIN_TTL)
def test_what_was_not_given_follows_what_the_store_grants(ttl, drift, granted):
    shorter = Timing.build(ttl=ttl, drift=drift).granted(granted)
    assert shorter == Timing.build(ttl=min(ttl, granted), drift=drift)


def test_what_was_given_by_hand_stays_and_only_the_rest_follows():
    buffered = Timing.build(ttl=30, safety_buffer=4).granted(10)
    assert buffered == Timing.build(ttl=10, safety_buffer=4)
    beating = Timing.build(ttl=30, heartbeat_interval=2).granted(10)
    assert beating == Timing.build(ttl=10, heartbeat_interval=2)
    limited = Timing.build(ttl=30, max_hold=600, drift=0.1).granted(10)
    assert limited == Timing.build(ttl=10, max_hold=600, drift=0.1)


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
