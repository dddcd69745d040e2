"""Failure modes 14 and 15: clocks that step, drift and sleep, and settings that do not fit together."""

import asyncio
import contextlib
import time

import pytest
from event_log import CLOCK, ENDED_BY_TIME, Log
from failing_store import OPERATIONS, LedgerBackend, Tracks
from hypothesis import given
from hypothesis import strategies as st
from patience import until

from fencing_sdk import (
    ConfigurationError,
    LeaseLostError,
    LockClient,
    LossReason,
    Lost,
)
from fencing_sdk._lease import state_of
from fencing_sdk._values.timing import MAX_DRIFT, MAX_TTL, MIN_TTL, Timing
from fencing_sdk.testing import FaultyBackend

DAY = 86_400.0


@pytest.mark.parametrize("days", [-1, 365 * 20])
async def test_mode_14_a_step_of_the_wall_clock_ends_no_lease_and_prolongs_none(monkeypatch, days):
    """14: deadlines and grants live on a clock that nobody sets."""
    store = LedgerBackend()
    link = FaultyBackend(store)
    shifted, shifted_ns = time.time() + days * DAY, time.time_ns() + int(days * DAY * 10**9)
    async with LockClient(link) as locks, LockClient(store) as others:
        lease = await locks.lock("seats/42", ttl=10.0, heartbeat_interval=0.2).acquire()
        brief = await locks.lock("seats/43", ttl=1.0).acquire()
        deadline = state_of(lease).deadline
        monkeypatch.setattr("time.time", lambda: shifted)
        monkeypatch.setattr("time.time_ns", lambda: shifted_ns)
        await until(lambda: state_of(lease).deadline != deadline, within=20)
        assert lease.held
        assert 0 < state_of(lease).deadline - deadline < 10.0
        assert await others.lock("seats/42").try_acquire() is None
        link.fail("renew")
        deadline = state_of(brief).deadline
        assert await asyncio.wait_for(brief.wait_lost(), 20) in ENDED_BY_TIME
        assert deadline <= CLOCK.now() < deadline + 10
        await brief.release()
        await lease.release()


class FastClock:
    """Time as a machine sees it whose clock runs at *rate*."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.began = CLOCK.now()

    def now(self) -> float:
        return (CLOCK.now() - self.began) * self.rate


@pytest.mark.parametrize(
    ("rate", "drift", "buffer"), [(1.01, 0.01, 0.02), (1.3, 0.3, 0.05)], ids=["one per cent", "thirty per cent"]
)
async def test_mode_14_a_store_whose_clock_runs_faster_never_overlaps(rate, drift, buffer):
    """14: the store expires early by our clock; the drift allowance has ended the holder's lease before."""
    store = LedgerBackend(clock=FastClock(rate))
    link = FaultyBackend(store)
    tracks = Tracks()
    async with LockClient(link, drift=drift) as holder, LockClient(store, drift=drift) as heir:

        async def work():
            async with holder.lock("seats/42", ttl=2.0, safety_buffer=buffer, heartbeat_interval=0.1) as lease:
                await tracks.walk(lease)

        working = asyncio.create_task(work())
        await tracks.begun.wait()
        await until(lambda: store.of("renew"))
        for operation in OPERATIONS:
            link.fail(operation)
        later = await heir.lock("seats/42", ttl=10, wait=20).acquire()
        with pytest.raises(LeaseLostError):
            await asyncio.wait_for(working, 20)
        await later.release()
    handed_on = store.of("acquire", later.holder)[0].at
    assert tracks.last_token < handed_on
    assert tracks.last <= handed_on + tracks.lag


@given(
    ttl=st.floats(MIN_TTL, MAX_TTL),
    drift=st.floats(0, MAX_DRIFT),
    share=st.floats(0, 1),
    error=st.floats(-1, 1),
)
def test_mode_14_within_the_allowance_the_deadline_comes_first(ttl, drift, share, error):
    """14: for every clock that errs by no more than *drift*, in both directions."""
    with contextlib.suppress(ConfigurationError):
        timing = Timing.build(ttl=ttl, safety_buffer=ttl * share, drift=drift)
        rate = 1 + drift * error
        expires = ttl / rate
        assert timing.deadline(0.0) <= expires * (1 + 1e-12)


class SuspendedClock:
    """A clock that goes on while the machine sleeps, when the event loop's own does not."""

    def __init__(self) -> None:
        self.slept = 0.0

    def now(self) -> float:
        return CLOCK.now() + self.slept


async def test_mode_14_a_suspended_machine_wakes_up_without_its_lease():
    """14: the token is unreadable at once, and the body is cancelled, although no timer of the loop was due."""
    clock = SuspendedClock()
    store = LedgerBackend(clock=clock)
    log = Log()
    async with LockClient(store, clock=clock, observers=[log]) as locks:
        began = CLOCK.now()
        with pytest.raises(LeaseLostError) as lost:
            async with locks.lock("seats/42", ttl=40.0, heartbeat_interval=0.5) as lease:
                assert lease.token
                clock.slept += 3600
                with pytest.raises(LeaseLostError):
                    _ = lease.token
                await asyncio.Event().wait()
        assert CLOCK.now() - began < 20, "sooner than the timer of the deadline that was set before"
        assert lost.value.reason is LossReason.STALLED
        assert len(log.of(Lost)) == 1


async def test_mode_14_a_grant_that_slept_on_its_way_is_not_used():
    """14: the machine was suspended between request and answer; the grant is given back and asked for again."""
    clock = SuspendedClock()

    class Asleep(LedgerBackend):
        async def acquire(self, claim):
            answer = await super().acquire(claim)
            if len(self.entries) == 1:
                clock.slept += 8.5
            return answer

    store = Asleep(clock=clock)
    async with LockClient(store, clock=clock) as locks, locks.lock("seats/42", ttl=10.0, wait=120) as lease:
        assert len(store.of("acquire")) == 2
        assert store.of("acquire")[-1].token == lease.token
        assert lease.remaining > 0
    await until(lambda: store.tidy)


def share_or(*others: float | None) -> st.SearchStrategy:
    """A part of the ttl, or something that stands for itself."""
    return st.floats(0, 0.6) | st.sampled_from(others)


@given(
    ttl=st.floats(MIN_TTL, MAX_TTL) | st.integers(1, 86_400),
    buffer=share_or(None, 1.0, 2.0),
    interval=share_or(None, 1.0, 1e-9),
    drift=st.just(0.01) | st.floats(0, MAX_DRIFT),
    max_hold=share_or(None, 10.0),
)
def test_mode_15_whatever_is_accepted_leaves_room_for_two_renewals(ttl, buffer, interval, drift, max_hold):
    """15: two attempts fit between a beat and the deadline, and the deadline does not lie after the store's."""
    parts = {"safety_buffer": buffer, "heartbeat_interval": interval, "max_hold": max_hold}
    options = {name: None if part is None else part * ttl for name, part in parts.items()}
    try:
        timing = Timing.build(ttl=ttl, drift=drift, **options)
    except ConfigurationError:
        return
    deadline = timing.deadline(0.0)
    assert 0 < deadline <= timing.ttl
    assert 2 * timing.heartbeat_interval < deadline
    assert 3 * timing.heartbeat_interval <= deadline * (1 + 1e-12)
    assert 0 < timing.call_limit < deadline


@given(ttl=st.floats(MIN_TTL, MAX_TTL), drift=st.just(0.01) | st.floats(0, MAX_DRIFT))
def test_mode_15_the_defaults_fit_every_ttl(ttl, drift):
    """15: a ttl alone is always accepted, and its deadline lies strictly before the store's."""
    timing = Timing.build(ttl=ttl, drift=drift)
    assert timing.deadline(0.0) < ttl
    assert 3 * timing.heartbeat_interval <= timing.validity(ttl)


@given(ttl=st.floats(MIN_TTL, 1000), granted=st.floats(0, 2000))
def test_mode_15_a_store_that_grants_less_is_believed_or_refused(ttl, granted):
    """15: a shorter ttl than asked for shortens the deadline; one that leaves no room is no grant."""
    timing = Timing.build(ttl=ttl)
    with contextlib.suppress(ConfigurationError):
        shorter = timing.granted(granted)
        assert shorter.deadline(0.0) <= min(granted, ttl)
        assert 3 * shorter.heartbeat_interval <= shorter.validity(shorter.ttl)
        assert shorter.ttl <= ttl


async def test_mode_15_settings_are_refused_before_anything_is_sent():
    """15: a mix that cannot be safe is an error of the call that makes the lock."""
    store = LedgerBackend()
    async with LockClient(store) as locks:
        for options in ({"safety_buffer": 1.0}, {"heartbeat_interval": 0.4}, {"ttl": 0}, {"max_hold": 0}):
            with pytest.raises(ConfigurationError):
                locks.lock("seats/42", **({"ttl": 1.0} | options))
    assert store.entries == []
