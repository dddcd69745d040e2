"""Time passes a lease: deadlines, clocks that jump, and pauses."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable

import anyio
import pytest
from event_log import CLOCK, ENDED_BY_TIME, Log, ticks
from failing_store import OPERATIONS, LedgerBackend, Tracks
from hypothesis import given
from hypothesis import strategies as st
from inside import CALL_LIMIT, memory_on, on_clock, state_of
from patience import until, wait_until

from fencing_sdk import (
    BackendRefusedError,
    BackendUnavailableError,
    ConfigurationError,
    LeaseLostError,
    LockClient,
    LossReason,
    StaleTokenError,
    UsageError,
)
from fencing_sdk._engine.heartbeat import Heartbeat, Schedule
from fencing_sdk._values.timing import DRIFT, MAX_TTL, MIN_TTL, Timing
from fencing_sdk.abc import HELD
from fencing_sdk.events import Lost, RenewalFailed, RenewalLate, Renewed
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.testing import FaultyBackend

# Failure modes 1 to 4: the end of a lease depends on no answer, no healthy call, and no turning loop.


TTL = 2.5
BUFFER = TTL / 5
KEPT = {"ttl": 10.0, "heartbeat_interval": 0.2}
"""For a lease that is to be kept, on a machine that may stand still for seconds."""
SLACK = 0.005
"""The timers of an event loop fire within this of their moment when nothing delays the loop."""


def cut(store: FaultyBackend, fault: str) -> None:
    for operation in OPERATIONS:
        getattr(store, fault)(operation)


@pytest.mark.parametrize("fault", ["fail", "hang", "lose_reply"])
async def test_mode_01_work_ends_before_the_store_hands_the_lock_on(fault):
    """1: whatever the silence looks like, the last instruction lies before ``last_send + ttl - buffer``."""
    store = LedgerBackend()
    link = FaultyBackend(store)
    tracks = Tracks()
    async with LockClient(link) as holder, LockClient(store) as heir:

        async def work():
            async with holder.lock("seats/42", ttl=TTL) as lease:
                await lease.renew()
                await tracks.walk(lease)

        working = asyncio.create_task(work())
        await tracks.begun.wait()
        await until(lambda: store.of("renew"))
        answered = [*store.of("acquire"), *store.of("renew")][-1]
        cut(link, fault)
        later = await heir.lock("seats/42", ttl=TTL, wait=10).acquire()
        with pytest.raises(LeaseLostError) as lost:
            await asyncio.wait_for(working, 20)
        assert lost.value.reason in ENDED_BY_TIME
        assert later.token > lost.value.token
        await later.release()
    handed_on = store.of("acquire", later.holder)[0].at
    assert tracks.last <= answered.at + TTL - BUFFER + tracks.lag + SLACK
    assert tracks.last_token < answered.at + TTL - BUFFER
    assert tracks.last_token < handed_on


async def test_mode_01_a_plain_handle_learns_of_its_end_without_the_store():
    """1: a handle that cancels nobody still stops giving its token away, and says so to whoever waits."""
    link = FaultyBackend(LedgerBackend())
    async with LockClient(link) as locks:
        lease = await locks.lock("seats/42", ttl=TTL).acquire()
        cut(link, "hang")
        assert await asyncio.wait_for(lease.wait_lost(), 20) in ENDED_BY_TIME
        with pytest.raises(LeaseLostError):
            _ = lease.token
        link.heal()
        await lease.release()


async def test_mode_01_work_ends_on_time_though_the_heartbeat_never_wakes_up(monkeypatch):
    """1: the deadline lies in the task that works, and needs neither the heartbeat nor the store."""

    async def oversleep(self, until):
        await asyncio.Event().wait()

    monkeypatch.setattr(Heartbeat, "_sleep", oversleep)
    store = LedgerBackend()
    steps = [CLOCK.now()]
    async with LockClient(store) as locks:
        with pytest.raises(LeaseLostError):
            async with locks.lock("seats/42", ttl=0.3), asyncio.timeout(20):
                while True:  # without a look at the lease, which would notice its end by itself
                    steps.append(CLOCK.now())
                    await asyncio.sleep(0.002)
    assert not store.of("renew")
    lag = max(later - earlier for earlier, later in itertools.pairwise(steps))
    assert steps[-1] <= store.of("acquire")[-1].at + 0.3 - 0.3 / 5 + lag + SLACK


class DeafBackend(LedgerBackend):
    """Its renewals react to nothing, their own cancellation included, until `hears` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.deaf = False
        self.hears = asyncio.Event()
        self.unanswered = 0
        self.cancelled = 0

    async def keep(self, tickets):
        if self.deaf:
            self.unanswered += 1
            while not self.hears.is_set():
                try:
                    await self.hears.wait()
                except asyncio.CancelledError:
                    self.cancelled += 1
        return await super().keep(tickets)


@pytest.fixture
async def deaf():
    """A store whose hung calls end with the test: the event loop would wait for them."""
    store = DeafBackend()
    yield store
    store.hears.set()
    await ticks(10)


async def test_mode_02_a_renewal_that_ignores_its_cancellation_does_not_hide_the_expiry(deaf, monkeypatch):
    """2: work ends on time, other locks of the client work, and closing is bounded, all while the call hangs."""
    monkeypatch.setattr(CALL_LIMIT, 0.3)
    tracks = Tracks()
    locks = LockClient(deaf)
    async with locks:
        with pytest.raises(LeaseLostError) as lost:
            async with locks.lock("seats/42", ttl=TTL, heartbeat_interval=0.1) as lease:
                deaf.deaf = True
                sent_at = deaf.of("acquire")[-1].at
                await asyncio.wait_for(tracks.walk(lease), 20)
        assert lost.value.reason in ENDED_BY_TIME
        assert deaf.unanswered
        assert tracks.last <= sent_at + TTL - BUFFER + tracks.lag + SLACK
        async with locks.lock("seats/43", ttl=TTL) as other:
            assert other.held
        began = CLOCK.now()
    assert CLOCK.now() - began < 10
    assert not deaf.hears.is_set()
    assert deaf.tidy


async def test_mode_02_a_call_that_ignores_its_cancellation_does_not_occupy_the_processor(deaf, monkeypatch):
    """2: it is cancelled more than once, and not in every turn of the loop: that would cost a core while it hangs."""
    monkeypatch.setattr(CALL_LIMIT, 0.1)
    async with LockClient(deaf) as locks:
        lease = await locks.lock("seats/42", ttl=4.0, heartbeat_interval=0.1).acquire()
        deaf.deaf = True
        await until(lambda: deaf.unanswered)
        await lease.release()  # so that no other call begins
        await asyncio.sleep(0.3)
        await until(lambda: deaf.unanswered < deaf.cancelled)
        assert deaf.cancelled < 50 * deaf.unanswered


FAILURES = [
    BackendUnavailableError("Store", "renew"),
    BackendRefusedError("Store", "renew"),
    ConnectionResetError("peer"),
    TimeoutError(),
    ValueError("a driver's bug"),
    ExceptionGroup("a driver's group", [OSError()]),
]


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
async def test_mode_03_a_failing_renewal_is_tried_again(failure, times):
    """3: no exception of a renewal, of whatever class, ends the heartbeat or the lease."""
    link = FaultyBackend(LedgerBackend())
    log = Log()
    async with LockClient(link, observers=[log]) as locks, locks.lock("seats/42", **KEPT) as lease:
        link.fail("renew", failure, times=times)
        await log.seen(Renewed)
        assert len(log.of(RenewalFailed)) == times
        assert type(failure).__name__ in log.of(RenewalFailed)[0].error
        assert lease.held
    assert not log.of(Lost)


async def test_mode_03_a_cancellation_that_leaks_out_of_a_driver_is_no_answer_either():
    """3: a driver that raises CancelledError of its own (a pool that closes) ends nothing."""

    class Leaking(LedgerBackend):
        leaks = 2

        async def keep(self, tickets):
            if self.leaks:
                self.leaks -= 1
                raise asyncio.CancelledError
            return await super().keep(tickets)

    log = Log()
    async with LockClient(Leaking(), observers=[log]) as locks, locks.lock("seats/42", **KEPT) as lease:
        await log.seen(Renewed)
        assert lease.held
    assert len(log.of(RenewalFailed)) == 2


@pytest.mark.parametrize("answer", [[], [HELD, HELD], None, 7], ids=repr)
async def test_mode_03_an_answer_of_the_wrong_shape_is_no_answer(answer):
    """3: not one outcome per claim proves nothing; it is tried again until the deadline."""

    class Garbled(LedgerBackend):
        garbled = 2

        async def keep(self, tickets):
            if self.garbled:
                self.garbled -= 1
                return answer
            return await super().keep(tickets)

    log = Log()
    async with LockClient(Garbled(), observers=[log]) as locks, locks.lock("seats/42", **KEPT) as lease:
        await log.seen(Renewed)
        assert lease.held
    assert len(log.of(RenewalFailed)) == 2


async def test_mode_03_one_bad_claim_does_not_stop_the_others():
    """3: a claim whose shard is down ends alone, at its deadline; the rest of its batch goes on."""

    class Sharded(LedgerBackend):
        async def keep(self, tickets):
            answers = await super().keep(tickets)
            return [
                None if claim.name == "shard-down" else answer
                for (claim, _), answer in zip(tickets, answers, strict=True)
            ]

    async with LockClient(Sharded()) as locks:
        names = ["a", "shard-down", "b", "c"]
        terms = [KEPT | {"ttl": TTL} if name == "shard-down" else KEPT for name in names]
        leases = await asyncio.gather(
            *(locks.lock(name, **each).acquire() for name, each in zip(names, terms, strict=True))
        )
        assert await asyncio.wait_for(leases[1].wait_lost(), 20) in ENDED_BY_TIME
        assert [lease.held for lease in leases] == [True, False, True, True]
        for lease in leases:
            await lease.release()


async def test_mode_03_a_failing_chunk_does_not_stop_the_next_one(monkeypatch):
    """3: batches of one round fail and succeed on their own."""
    monkeypatch.setattr("fencing_sdk._engine.heartbeat.BATCH", 2)

    class HalfDead(LedgerBackend):
        async def keep(self, tickets):
            if any(claim.name == "dead" for claim, _ in tickets):
                raise ConnectionResetError
            return await super().keep(tickets)

    async with LockClient(HalfDead()) as locks:
        terms = {name: KEPT | {"ttl": TTL} for name in ("dead", "x")} | dict.fromkeys("cde", KEPT)
        leases = await asyncio.gather(*(locks.lock(name, **each).acquire() for name, each in terms.items()))
        await asyncio.wait_for(leases[0].wait_lost(), 20)
        assert [lease.held for lease in leases[2:]] == [True, True, True]
        for lease in leases:
            await lease.release()


async def test_mode_03_a_crash_of_the_engine_loses_every_lease_loudly(monkeypatch, caplog):
    """3: when the heartbeat itself fails, nobody pretends: all work is cancelled, and no lock is given out."""

    def crash(*_):
        raise ZeroDivisionError("a bug of the engine")

    async with LockClient(LedgerBackend()) as locks:
        plain = await locks.lock("plain", ttl=30).acquire()
        with pytest.raises(LeaseLostError) as lost:
            async with locks.lock("short", **KEPT), asyncio.timeout(20):
                monkeypatch.setattr(Schedule, "due", crash)
                await asyncio.Event().wait()
        assert lost.value.reason is LossReason.CLOSED
        assert plain.lost_reason is LossReason.CLOSED
        assert any(record.levelname == "CRITICAL" for record in caplog.records)
        with pytest.raises(UsageError, match="heartbeat of this client failed") as refused:
            await locks.lock("another").acquire()
        assert isinstance(refused.value.__cause__, ZeroDivisionError)
        await plain.release()


def hash_everything(seconds: float, seen: Callable[[], object] = lambda: True) -> None:
    """Code that keeps the event loop to itself, and on a busy machine until it is *seen*."""
    time.sleep(seconds)
    wait_until(seen)


async def test_mode_04_a_blocked_loop_loses_its_lease_and_is_told_what_blocked_it():
    """4: the next await raises, the reason says stalled, and the event names the code to blame."""
    log = Log()
    async with LockClient(LedgerBackend(), observers=[log]) as locks:
        watch = locks._engine._heartbeat.log._stalls
        steps_after = 0
        with pytest.raises(LeaseLostError) as lost:
            async with locks.lock("seats/42", ttl=1.5) as lease:
                hash_everything(1.6, seen=lambda: watch._seen)
                with pytest.raises(LeaseLostError):
                    lease.check()
                while True:
                    await asyncio.sleep(0.001)
                    steps_after += 1
        assert steps_after <= 1
        assert lost.value.reason is LossReason.STALLED
        late = max(log.of(RenewalLate), key=lambda event: event.late)
        assert 1.6 - 0.3 - 0.05 < late.late < 10
        assert "hash_everything" in late.stack


async def test_mode_04_a_body_that_never_awaits_learns_of_the_loss_when_it_leaves():
    """4: nothing can cancel code that does not await; the ``async with`` raises at the latest."""
    async with LockClient(LedgerBackend()) as locks:
        with pytest.raises(LeaseLostError) as lost:
            async with locks.lock("seats/42", ttl=0.3):
                hash_everything(0.4)
        assert lost.value.reason is LossReason.STALLED


async def test_mode_04_a_blocked_holder_cannot_write_over_the_next_one():
    """4: what the blocked worker still sends by the number it remembers is refused at the resource."""
    store = LedgerBackend()
    seats = MemoryGuard()
    async with LockClient(store) as blocked, LockClient(store) as next_one:
        with pytest.raises(LeaseLostError):
            async with blocked.lock("seats/42", ttl=0.3, fences=[seats]) as lease:
                remembered = lease.token
                hash_everything(0.4)
                with anyio.CancelScope(shield=True):
                    async with next_one.lock("seats/42", ttl=10, fences=[seats]):
                        with pytest.raises(LeaseLostError):
                            _ = lease.token
                        with pytest.raises(StaleTokenError) as stale:
                            seats.write("seats/42", remembered, pytest.fail, "written too late")
                        assert stale.value.token == remembered
                        assert stale.value.fence > remembered


async def test_mode_04_a_short_block_is_told_and_costs_nothing():
    """4: a stall within the lease is a warning, not a loss."""
    log = Log()
    async with LockClient(LedgerBackend(), observers=[log]) as locks, locks.lock("seats/42", **KEPT) as lease:
        await log.seen(Renewed)
        hash_everything(0.4)
        late = await log.seen(RenewalLate)
        assert late.late > 0.05
        await log.seen(Renewed, 2)
        assert lease.held
    assert not log.of(Lost)


# Failure modes 14 and 15: clocks that step, drift and sleep, and settings that do not fit together.


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


async def test_mode_14_a_store_whose_clock_runs_faster_never_overlaps():
    """14: the store expires early by our clock; the drift allowance has ended the holder's lease before."""
    store = memory_on(FastClock(1 + DRIFT), LedgerBackend)
    link = FaultyBackend(store)
    tracks = Tracks()
    async with LockClient(link) as holder, LockClient(store) as heir:

        async def work():
            async with holder.lock("seats/42", ttl=2.0, safety_buffer=0.02, heartbeat_interval=0.1) as lease:
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
    share=st.floats(0, 1),
    error=st.floats(-1, 1),
)
def test_mode_14_within_the_allowance_the_deadline_comes_first(ttl, share, error):
    """14: for every clock that errs by no more than `DRIFT`, in both directions."""
    with contextlib.suppress(ConfigurationError):
        timing = Timing.build(ttl=ttl, safety_buffer=ttl * share)
        rate = 1 + DRIFT * error
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
    store = memory_on(clock, LedgerBackend)
    log = Log()
    async with on_clock(LockClient(store, observers=[log]), clock) as locks:
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
    """14: the machine was suspended between request and answer; the grant is released and asked for again."""
    clock = SuspendedClock()

    class Asleep(LedgerBackend):
        async def draw(self, claim, **options):
            answer = await super().draw(claim, **options)
            if len(self.entries) == 1:
                clock.slept += 8.5
            return answer

    store = memory_on(clock, Asleep)
    async with on_clock(LockClient(store), clock) as locks, locks.lock("seats/42", ttl=10.0, wait=120) as lease:
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
    max_hold=share_or(None, 10.0),
)
def test_mode_15_whatever_is_accepted_leaves_room_for_two_renewals(ttl, buffer, interval, max_hold):
    """15: two attempts fit between a beat and the deadline, and the deadline does not lie after the store's."""
    parts = {"safety_buffer": buffer, "heartbeat_interval": interval, "max_hold": max_hold}
    options = {name: None if part is None else part * ttl for name, part in parts.items()}
    try:
        timing = Timing.build(ttl=ttl, **options)
    except ConfigurationError:
        return
    deadline = timing.deadline(0.0)
    assert 0 < deadline <= timing.ttl
    assert 2 * timing.heartbeat_interval < deadline
    assert 3 * timing.heartbeat_interval <= deadline * (1 + 1e-12)
    assert 0 < timing.call_limit < deadline


@given(ttl=st.floats(MIN_TTL, MAX_TTL))
def test_mode_15_the_defaults_fit_every_ttl(ttl):
    """15: a ttl alone is always accepted, and its deadline lies strictly before the store's."""
    timing = Timing.build(ttl=ttl)
    assert timing.deadline(0.0) < ttl
    assert 3 * timing.heartbeat_interval <= timing.validity(ttl)


@given(ttl=st.floats(MIN_TTL, 1000), granted=st.floats(0, 2000))
def test_mode_15_a_store_that_grants_less_is_believed_or_refused(ttl, granted):
    """15: a shorter ttl than asked for shortens the deadline; one that leaves no room is not a grant."""
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
