"""The heartbeat, on virtual time: what it sends and when, and what an answer or its absence does to a lease."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Self

import pytest
from inside import LoopClock
from virtual_time import block, in_virtual_time, now, settle

from fencing_sdk import BackendRefusedError, BackendUnavailableError, LeaseLostError, LossReason
from fencing_sdk._engine.heartbeat import BATCH, Heartbeat, LeaseGroup
from fencing_sdk._engine.store_calls import StoreCalls
from fencing_sdk._engine.ticket import Ticket
from fencing_sdk._lease_state import LeaseState
from fencing_sdk._values.observers import Observers
from fencing_sdk._values.timing import Timing
from fencing_sdk.abc import HELD, Claim, Gone, Place
from fencing_sdk.events import Event, Lost, RenewalFailed, RenewalLate, Renewed

# A lease of ttl 10 may be used for 7.9 s after it was asked for, and is renewed every 2 s.
TTL, VALID, INTERVAL = 10.0, 7.9, 2.0


class ScriptedStore:
    """Renews after `delay` seconds, as `outcomes` or `failure` say; everybody holds for ever by default."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, tuple[str, ...]]] = []
        self.delay = 0.0
        self.outcomes: dict[str, Place | Gone | None] = {}
        self.failure: Exception | None = None

    async def keep(self, tickets):
        self.calls.append((round(now(), 6), tuple(claim.name for claim, _ in tickets)))
        outcomes = [self.outcomes.get(claim.name, HELD) for claim, _ in tickets]
        await asyncio.sleep(self.delay)
        if self.failure is not None:
            raise self.failure
        return outcomes

    @property
    def times(self) -> list[float]:
        return [at for at, _ in self.calls]


class Bench:
    """A heartbeat that runs, and the keeper of its leases."""

    def __init__(self) -> None:
        self.store = ScriptedStore()
        self.events: list[Event] = []
        clock = LoopClock()
        self.store_calls = StoreCalls(self.store, clock)
        observers = Observers([self.events.append])
        self.heartbeat = Heartbeat(self.store, clock, self.store_calls, observers, watch_stalls=False)
        self.task = asyncio.create_task(self.heartbeat.run())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError, ZeroDivisionError):
            await self.task
        await self.store_calls.aclose(1.0)

    def lease(self, name: str = "a", *, sent_ago: float = 0.0, **options) -> LeaseState:
        """A lease that was asked for *sent_ago* seconds ago."""
        timing = Timing.build(**({"ttl": TTL} | options))
        sent_at = LoopClock().now() - sent_ago
        claim = Claim(name, timing.ttl)
        deadline = timing.deadline(sent_at)
        lease = LeaseState(
            name=name, claim=claim, token=7, deadline=deadline, timing=timing, clock=LoopClock(), keeper=self
        )
        lease.ticket = Ticket(claim, self.heartbeat.on_bell)
        self.heartbeat.add(lease, sent_at + timing.heartbeat_interval)
        return lease

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]

    async def renew(self, lease: LeaseState) -> None:
        await self.heartbeat.renew_now(lease)

    async def release(self, lease: LeaseState) -> None:
        lease.mark_released()
        self.heartbeat.forget(lease.owner)

    def lost(self, lease: LeaseState, reason: LossReason) -> None:
        self.heartbeat.report_lost(lease, reason)

    def stale(self, lease: LeaseState, error: Exception) -> None: ...

    def abandon(self, lease: LeaseState) -> None:
        self.heartbeat.forget(lease.owner)


def left(lease: LeaseState) -> float:
    return round(lease.remaining, 6)


@in_virtual_time
async def test_a_lease_is_renewed_every_interval_from_the_moment_it_was_asked_for():
    async with Bench() as bench:
        lease = bench.lease(sent_ago=0.5)
        await asyncio.sleep(7)
        assert bench.store.times == [1.5, 3.5, 5.5]
        await bench.release(lease)


@in_virtual_time
async def test_beats_that_lie_close_together_share_a_call_from_then_on():
    async with Bench() as bench:
        leases = []
        for name in "abc":
            leases.append(bench.lease(name))
            await asyncio.sleep(0.1)
        await asyncio.sleep(2 * INTERVAL)
        assert bench.store.calls == [(2.0, ("a", "b", "c")), (4.0, ("a", "b", "c"))]
        for lease in leases:
            await bench.release(lease)


@in_virtual_time
async def test_a_call_renews_a_thousand_claims_at_most():
    async with Bench() as bench:
        leases = [bench.lease(f"seats/{number}") for number in range(2 * BATCH + 500)]
        assert len(bench.heartbeat._schedule) == 3, "no turn of the loop looks at more than a batch"
        await asyncio.sleep(INTERVAL + 0.1)
        assert [len(names) for _, names in bench.store.calls] == [BATCH, BATCH, 500]
        for lease in leases:
            await bench.release(lease)


@in_virtual_time
async def test_retries_quicken_towards_the_deadline_and_not_before():
    async with Bench() as bench:
        bench.store.failure = BackendUnavailableError("Store", "renew")
        await bench.lease().wait_lost()
        pauses = [(VALID - earlier, later - earlier) for earlier, later in itertools.pairwise(bench.store.times)]
        assert all(pause >= INTERVAL / 8 - 1e-6 for left, pause in pauses if left >= INTERVAL)
        assert all(pause <= max(left / 4, INTERVAL / 32) + 1e-6 for left, pause in pauses)
        assert len(pauses) < 60, "a store in trouble is not flooded"


@pytest.mark.parametrize("trouble", ["refused", "swallowed"])
@in_virtual_time
async def test_a_lease_is_saved_although_the_store_comes_back_just_before_the_deadline(trouble):
    """The jitter of the pauses is drawn anew each time: none of its turns may miss the last moment."""
    short_of = {"refused": 0.05, "swallowed": 0.3}[trouble] * INTERVAL
    for turn in range(40):
        async with Bench() as bench:
            if trouble == "refused":
                bench.store.failure = BackendUnavailableError("Store", "renew")
            else:
                bench.store.delay = 3600
            lease = bench.lease()
            await asyncio.sleep(VALID - short_of)
            bench.store.failure, bench.store.delay = None, 0.0
            await asyncio.sleep(short_of + 0.01)
            assert lease.held, f"turn {turn}"
            assert lease.remaining > VALID / 2
            await bench.release(lease)


@in_virtual_time
async def test_a_lease_that_ends_while_its_call_waits_for_another_is_not_renewed():
    async with Bench() as bench:
        pressed = bench.lease("pressed", sent_ago=VALID - INTERVAL * 0.6)
        calm, gone = bench.lease("calm", sent_ago=INTERVAL), bench.lease("gone", sent_ago=INTERVAL)
        send = bench.heartbeat._send

        def send_and_release(leases, *rest):
            send(leases, *rest)
            gone.mark_released()
            bench.heartbeat.forget(gone.owner)

        bench.heartbeat._send = send_and_release
        await asyncio.sleep(INTERVAL / 2)
        assert [names for _, names in bench.store.calls] == [("pressed",), ("calm",)]
        await bench.release(pressed)
        await bench.release(calm)


@in_virtual_time
async def test_a_lease_that_is_about_to_end_does_not_hurry_the_renewal_of_others():
    """The store takes its time: a lease that has enough of it gets its answer by one call."""
    async with Bench() as bench:
        bench.store.delay = INTERVAL * 0.7
        pressed = bench.lease("pressed", sent_ago=VALID - INTERVAL * 0.6)
        calm = [bench.lease(f"calm/{number}", sent_ago=INTERVAL) for number in range(3)]
        assert await pressed.wait_lost() is LossReason.EXPIRED
        await asyncio.sleep(INTERVAL * 0.2)
        assert [event.name for event in bench.of(Renewed)] == [lease.name for lease in calm]
        assert {event.name for event in bench.of(RenewalFailed)} == {"pressed"}
        for lease in calm:
            await bench.release(lease)


@in_virtual_time
async def test_a_call_that_hangs_is_ended_in_time_for_a_second_attempt():
    async with Bench() as bench:
        bench.store.delay = 3600
        lease = bench.lease()
        await lease.wait_lost()
        assert abs(now() - VALID) < 1e-6
        assert len(bench.store.calls) >= 2
        assert bench.store.times[1] <= 2 * INTERVAL + INTERVAL / 4 + 0.1


@in_virtual_time
async def test_a_slow_answer_comes_too_late_for_one_lease_and_in_time_for_another():
    async with Bench() as bench:
        bench.store.delay = 1.5
        late = bench.lease("late", sent_ago=VALID - 1.0)
        fresh = bench.lease("fresh", sent_ago=INTERVAL)
        await asyncio.sleep(1.6)
        assert [at for at, names in bench.store.calls if "fresh" in names] == [0.0]
        assert late.lost_reason is LossReason.EXPIRED
        assert round(bench.of(Lost)[0].at - 1000, 6) == 1.0
        assert round(fresh.deadline - 1000, 6) == VALID
        assert [event.name for event in bench.of(Renewed)] == ["fresh"]
        await bench.release(fresh)


@pytest.mark.parametrize("by", ["heartbeat", "hand"])
@in_virtual_time
async def test_an_answer_that_waited_while_the_loop_was_blocked_revives_nothing(by):
    """The answer was given in time and is read too late: the old deadline is compared before it is moved."""
    async with Bench() as bench:
        bench.store.delay = 0.5
        lease = bench.lease()
        if by == "hand":
            renewing = asyncio.create_task(bench.renew(lease))
            await asyncio.sleep(0.1)
        else:
            await asyncio.sleep(INTERVAL + 0.1)
        assert len(bench.store.calls) == 1
        block(VALID)
        await settle()
        assert not lease.held
        assert not bench.of(Renewed)
        assert len(bench.of(Lost)) == 1
        if by == "hand":
            with pytest.raises((LeaseLostError, BackendUnavailableError)):
                await renewing


@in_virtual_time
async def test_the_end_of_a_lease_is_told_although_its_renewal_is_still_away():
    async with Bench() as bench:
        bench.store.delay = 3600
        lease = bench.lease(sent_ago=VALID - 0.5)
        assert await lease.wait_lost() is LossReason.EXPIRED
        assert round(now(), 6) == 0.5
        assert [event.reason for event in bench.of(Lost)] == [LossReason.EXPIRED]


@in_virtual_time
async def test_a_lease_that_a_renewal_by_hand_took_to_its_max_hold_is_not_renewed_any_more():
    async with Bench() as bench:
        lease = bench.lease(max_hold=9.0)
        await asyncio.sleep(1.5)
        await bench.renew(lease)
        assert await lease.wait_lost() is LossReason.EXPIRED
        assert round(now(), 6) == 9.0
        assert bench.store.times == [1.5]


@in_virtual_time
async def test_a_handle_that_may_be_held_for_less_than_an_interval_ends_in_time():
    async with Bench() as bench:
        lease = bench.lease(max_hold=0.5)
        await lease.wait_lost()
        assert now() == pytest.approx(0.5, abs=0.01)
        assert not bench.store.calls


@in_virtual_time
async def test_a_failure_of_the_heartbeat_loses_every_lease_and_is_remembered(monkeypatch):
    async with Bench() as bench:
        leases = [bench.lease(name) for name in "abc"]

        def crash(*_):
            raise ZeroDivisionError

        monkeypatch.setattr(type(bench.heartbeat._schedule), "due", crash)
        await asyncio.wait((bench.task,))
        assert [lease.lost_reason for lease in leases] == [LossReason.CLOSED] * 3
        assert [event.reason for event in bench.of(Lost)] == [LossReason.CLOSED] * 3
        assert isinstance(bench.heartbeat.failure, ZeroDivisionError)


@in_virtual_time
async def test_a_store_that_is_slow_to_grant_is_not_taken_for_a_blocked_loop():
    async with Bench() as bench:
        lease = bench.lease(sent_ago=INTERVAL * 1.5)
        await settle()
        assert bench.store.calls
        assert not bench.of(RenewalLate)
        await bench.release(lease)


@in_virtual_time
async def test_a_silent_store_is_not_taken_for_a_stall_when_the_last_retry_lies_close_to_the_deadline():
    async with Bench() as bench:
        lease = bench.lease()
        lease.expect_beat(lease.deadline - 0.001)  # a retry, after an answer that did not come
        block(VALID + 0.0005)  # the timers of a loop are this inexact
        assert lease.lost_reason is LossReason.EXPIRED
        await settle()


@in_virtual_time
async def test_renewing_now_raises_what_the_store_said():
    async with Bench() as bench:
        lease, other, third = bench.lease("a"), bench.lease("b"), bench.lease("c")
        bench.store.outcomes = {"a": Gone(), "b": None}
        with pytest.raises(LeaseLostError) as lost:
            await bench.renew(lease)
        assert lost.value.reason is LossReason.REFUSED
        with pytest.raises(BackendUnavailableError):
            await bench.renew(other)
        assert other.held
        bench.store.failure = BackendRefusedError("Store", "renew")
        with pytest.raises(BackendRefusedError):
            await bench.renew(third)
        assert third.held
        await bench.release(other)
        await bench.release(third)


@in_virtual_time
async def test_a_lease_that_was_renewed_by_hand_at_the_last_moment_goes_on_being_renewed():
    """The next attempt of the heartbeat would have come too late, so it had settled for the end."""
    async with Bench() as bench:
        bench.store.outcomes = {"a": None}
        lease = bench.lease(sent_ago=VALID - 0.2)
        await settle()
        bench.store.outcomes = {}
        await bench.renew(lease)
        assert left(lease) == VALID
        await asyncio.sleep(5 * VALID)
        assert lease.held
        await bench.release(lease)


@in_virtual_time
async def test_no_turn_of_the_loop_sends_more_than_one_call(monkeypatch):
    monkeypatch.setattr("fencing_sdk._engine.heartbeat.BATCH", 5)
    sent, most = [], []

    async def keep(tickets):
        if not sent:
            asyncio.get_running_loop().call_soon(sent.clear)
        sent.append(tickets)
        most.append(len(sent))
        return [HELD] * len(tickets)

    async with Bench() as bench:
        bench.store.keep = keep
        leases = [bench.lease(f"seats/{number}") for number in range(20)]
        await asyncio.sleep(INTERVAL + 0.1)
        assert most == [1, 1, 1, 1]
        for lease in leases:
            await bench.release(lease)


@in_virtual_time
async def test_no_turn_of_the_loop_settles_more_than_one_call(monkeypatch):
    """Ten calls whose answers come at once would keep everybody else waiting for ten thousand leases."""
    monkeypatch.setattr("fencing_sdk._engine.heartbeat.BATCH", 5)
    answered = asyncio.Event()

    async def keep(tickets):
        await answered.wait()
        return [HELD] * len(tickets)

    async with Bench() as bench:
        bench.store.keep = keep
        leases = [bench.lease(f"seats/{number}") for number in range(50)]
        await asyncio.sleep(INTERVAL + 0.5)
        answered.set()
        renewed = [0]
        while renewed[-1] < 50:
            await asyncio.sleep(0)
            renewed.append(len(bench.of(Renewed)))
        assert max(later - earlier for earlier, later in itertools.pairwise(renewed)) == 5
        for lease in leases:
            await bench.release(lease)


@in_virtual_time
async def test_a_lease_that_is_gone_leaves_no_entry_although_no_renewal_could_have_helped_it():
    """An entry would stay until the deadline: with a ttl of hours, a million of them."""
    async with Bench() as bench:
        for number in range(100):
            await bench.release(bench.lease(f"seats/{number}", max_hold=0.5))
        assert len(bench.heartbeat._schedule) <= 1
        lease = bench.lease(max_hold=9.0)
        await asyncio.sleep(INTERVAL + 0.1)
        assert len(bench.heartbeat._schedule) == 1
        await bench.release(lease)
        assert len(bench.heartbeat._schedule) == 0
        assert not bench.heartbeat.leases


@in_virtual_time
async def test_leases_that_are_gone_leave_few_entries_although_each_has_an_interval_of_its_own():
    async with Bench() as bench:
        stays = [bench.lease(f"stays/{number}", ttl=TTL + number / 100) for number in range(5)]
        for number in range(1000):
            await bench.release(bench.lease(f"seats/{number}", ttl=TTL + 1 + number / 100))
        assert len(bench.heartbeat._schedule) < 100
        assert len(bench.heartbeat._open) < 100
        await asyncio.sleep(INTERVAL + 0.1)
        assert sorted(name for _, names in bench.store.calls for name in names) == [lease.name for lease in stays]
        for lease in stays:
            await bench.release(lease)


def deadline_timers() -> int:
    """Timers of the loop that watch deadlines."""
    timers = (timer for timer in asyncio.get_running_loop()._scheduled if not timer.cancelled())
    return sum(isinstance(getattr(timer._callback, "__self__", None), LeaseGroup) for timer in timers)


@pytest.mark.parametrize("end", ["released", "lost"])
@in_virtual_time
async def test_leases_that_begin_together_share_a_timer_and_leave_none_behind(end):
    async with Bench() as bench:
        leases = [bench.lease(f"seats/{number}") for number in range(10)]
        assert deadline_timers() == 1
        await asyncio.sleep(INTERVAL + 0.01)  # renewed: no other lease joins them
        assert deadline_timers() == 1
        for lease in leases:
            if end == "released":
                await bench.release(lease)
            else:
                lease.lose(LossReason.REVOKED)
        assert deadline_timers() == 0
