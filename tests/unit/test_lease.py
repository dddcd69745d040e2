"""A lease that a task holds, on a clock that is moved by hand."""

import asyncio
import math
import os
import threading
from functools import partial
from types import SimpleNamespace

import anyio
import pytest
from inside import THIS_PROCESS, state_of

from fencing_sdk import Lease, LeaseLostError, LossReason, UsageError
from fencing_sdk._engine.heartbeat import LeaseGroup
from fencing_sdk._engine.lease_scope import paced_scope
from fencing_sdk._lease_state import LeaseState
from fencing_sdk._values.tasks import SCOPES, scope_class
from fencing_sdk._values.timing import Timing
from fencing_sdk.abc import Claim

DEADLINE = 8.0


class HandClock:
    """Stands still until it is moved."""

    def __init__(self):
        self.time = 0.0

    def now(self):
        return self.time


class Ledger:
    """A keeper that writes down what it is told."""

    def __init__(self):
        self.entries = []

    async def renew(self, lease):
        self.entries.append("renew")

    async def release(self, lease):
        self.entries.append("release")
        lease.mark_released()

    def lost(self, lease, reason):
        self.entries.append(reason)
        if lease.group is not None:
            lease.group.remove(lease)

    def stale(self, lease, error):
        self.entries.append(error)

    def abandon(self, lease):
        self.entries.append("dropped")


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def ledger():
    return Ledger()


@pytest.fixture
async def make(clock, ledger):
    """A function that makes leases, all of which end with the test."""
    leases = []

    def make(*, name="seats/42", deadline=DEADLINE, **timing):
        leases.append(
            Lease(
                LeaseState(
                    name=name,
                    claim=Claim(name, 10.0),
                    token=34,
                    deadline=deadline,
                    timing=Timing.build(ttl=10, **timing),
                    clock=clock,
                    keeper=ledger,
                )
            )
        )
        return leases[-1]

    yield make
    for lease in leases:
        state_of(lease).mark_released()


def open_scope(lease):
    """Enter a cancel scope in this task that ends when the lease does."""
    scope = paced_scope(1.0)
    scope.__enter__()
    state = state_of(lease)
    state.watch(scope)
    if state.lost is None:
        LeaseGroup(state.clock, state.timing.heartbeat_interval, state.acquired_at).add(state)
    return scope


USES = {
    "token": lambda lease: lease.token,
    "check": lambda lease: lease.check(),
    "headers": lambda lease: lease.headers(),
}


# The clock, at every use


@pytest.mark.parametrize("use", USES.values(), ids=USES)
async def test_every_use_looks_at_the_clock_and_is_refused_from_the_deadline_on(make, clock, use):
    lease = make()
    clock.time = math.nextafter(DEADLINE, 0)
    use(lease)
    clock.time = DEADLINE
    with pytest.raises(LeaseLostError) as refusal:
        use(lease)
    assert (refusal.value.name, refusal.value.token, refusal.value.reason) == ("seats/42", 34, LossReason.EXPIRED)


async def test_a_lease_that_is_over_has_nothing_left(make, clock):
    lease = make()
    clock.time = DEADLINE + 100
    assert lease.remaining == 0.0
    assert not lease.held
    assert state_of(lease).number == 34  # for logs and errors, where an old number does no harm


async def test_its_text_shows_name_token_and_time_left(make, clock):
    lease = make()
    clock.time = 1.5
    assert repr(lease) == "<Lease 'seats/42' token=34, 6.5 s left>"


async def test_its_text_shows_how_it_ended(make, clock):
    lost, released = make(), make()
    state_of(lost).lose(LossReason.TAKEN_OVER)
    state_of(released).mark_released()
    assert repr(lost) == "<Lease 'seats/42' token=34, lost: taken_over>"
    assert repr(released) == "<Lease 'seats/42' token=34, released>"


async def test_its_text_escapes_and_cuts_the_name(make):
    text = repr(make(name="ü\u2028" + "x" * 200))
    assert text.isascii()
    assert len(text) < 150


# Renewals


async def test_a_renewal_confirmed_after_the_old_deadline_does_not_revive_the_lease(make, clock):
    lease = make()
    clock.time = DEADLINE
    assert not state_of(lease).extend(12.0)
    assert state_of(lease).deadline == DEADLINE
    assert lease.lost_reason is LossReason.EXPIRED
    with pytest.raises(LeaseLostError):
        lease.check()


async def test_a_renewal_confirmed_late_does_not_spare_the_body_that_was_not_cancelled_yet(make, clock):
    """A scope that is moved after its deadline passed, and before it struck, would revive silently."""
    lease = make()
    scope = open_scope(lease)
    clock.time = DEADLINE
    state_of(lease).extend(12.0)
    with pytest.raises(asyncio.CancelledError) as struck:
        await asyncio.sleep(30)
    assert scope.__exit__(asyncio.CancelledError, struck.value, None)


async def test_a_renewal_moves_the_end_of_the_work_too(make):
    lease = make(deadline=0.05)
    scope = open_scope(lease)
    state_of(lease).extend(3600)
    await asyncio.sleep(0.1)
    scope.__exit__(None, None, None)
    assert not scope.cancel_called


async def test_a_lost_lease_stays_lost_and_a_released_one_released(make):
    lost, released = make(), make()
    state_of(lost).lose(LossReason.REVOKED)
    state_of(released).mark_released()
    for lease in (lost, released):
        assert not state_of(lease).extend(100.0)
        state_of(lease).lose(LossReason.REFUSED)
    assert lost.lost_reason is LossReason.REVOKED
    assert released.lost_reason is None


async def test_max_hold_ends_a_lease_that_would_be_renewed_for_ever(make, clock):
    lease = make(max_hold=20)
    for moment in (5.0, 10.0, 15.0):
        clock.time = moment
        assert state_of(lease).renewable
        assert state_of(lease).extend(moment + DEADLINE)
    assert state_of(lease).deadline == 20.0
    assert not state_of(lease).renewable
    clock.time = 20.0
    assert lease.lost_reason is LossReason.EXPIRED


# Losing and releasing


async def test_the_first_reason_is_the_reason(make, ledger):
    lease = make()
    state_of(lease).lose(LossReason.TAKEN_OVER)
    state_of(lease).lose(LossReason.CLOSED)
    assert lease.lost_reason is LossReason.TAKEN_OVER
    assert ledger.entries == [LossReason.TAKEN_OVER]


async def test_a_beat_that_was_far_overdue_makes_the_loss_a_stall(make, clock):
    lease = make()
    state_of(lease).expect_beat(2.0)
    clock.time = DEADLINE
    assert lease.lost_reason is LossReason.STALLED


async def test_looking_long_after_the_deadline_makes_the_loss_a_stall(make, clock):
    lease = make()
    state_of(lease).expect_beat(math.inf)
    clock.time = DEADLINE + 3600  # a suspended machine: nobody could look earlier
    assert lease.lost_reason is LossReason.STALLED


async def test_a_lease_that_ran_out_before_its_release_counts_as_lost(make, clock):
    lease = make()
    clock.time = DEADLINE
    state_of(lease).mark_released()
    assert lease.lost_reason is LossReason.EXPIRED


async def test_the_time_after_a_release_is_no_loss(make, clock):
    lease = make()
    state_of(lease).mark_released()
    clock.time = DEADLINE + 1
    assert lease.lost_reason is None


# Waiting for the end


async def test_waiting_for_the_loss_returns_none_when_the_lease_is_released(make):
    lease = make()
    waiting = asyncio.ensure_future(lease.wait_lost())
    await asyncio.sleep(0)
    state_of(lease).mark_released()
    assert await waiting is None


async def test_a_loss_noticed_in_a_thread_wakes_those_who_wait_and_cancels_the_body(make, clock, ledger):
    lease = make()
    scope = open_scope(lease)
    waiting = asyncio.ensure_future(lease.wait_lost())
    await asyncio.sleep(0)
    clock.time = DEADLINE
    thread = threading.Thread(target=lambda: lease.held)
    thread.start()
    with pytest.raises(asyncio.CancelledError, match="lease on 'seats/42' lost") as struck:
        await asyncio.sleep(30)
    assert scope.__exit__(asyncio.CancelledError, struck.value, None)
    thread.join()
    assert await waiting is LossReason.EXPIRED
    assert ledger.entries == [LossReason.EXPIRED]


def test_a_lease_of_a_loop_that_is_gone_is_still_refused_in_time(clock, ledger):
    async def make_lease():
        return Lease(
            LeaseState(
                name="a",
                claim=Claim("a", 10.0),
                token=0,
                deadline=DEADLINE,
                timing=Timing.build(ttl=10),
                clock=clock,
                keeper=ledger,
            )
        )

    lease = asyncio.run(make_lease())
    assert lease.token == 0
    clock.time = DEADLINE
    with pytest.raises(LeaseLostError):
        _ = lease.token


# The scope


async def test_a_scope_opened_over_a_lease_that_is_over_strikes_at_the_first_await(make, clock):
    lease = make()
    clock.time = DEADLINE
    scope = open_scope(lease)
    with pytest.raises(asyncio.CancelledError) as struck:
        await asyncio.sleep(30)
    assert scope.__exit__(asyncio.CancelledError, struck.value, None)
    assert scope.cancelled_caught


async def test_the_scope_counts_the_span_that_is_left_on_the_lease_and_not_the_clocks_reading(make, clock):
    """The loop's time and the lease's clock may be hours apart."""
    clock.time = 1_000_000.0
    lease = make(deadline=1_000_000.02)
    asyncio.get_running_loop().call_later(0.01, setattr, clock, "time", 1_000_000.02)
    with anyio.fail_after(30):
        scope = open_scope(lease)
        with pytest.raises(asyncio.CancelledError) as struck:
            await asyncio.sleep(20)
        assert scope.__exit__(asyncio.CancelledError, struck.value, None)


async def test_the_timer_of_a_scope_keeps_no_lease_alive_that_its_holder_has_dropped(clock, ledger):
    claim, timing = Claim("seats/42", 10.0), Timing.build(ttl=10)
    lease = Lease(
        LeaseState(name=claim.name, claim=claim, token=34, deadline=DEADLINE, timing=timing, clock=clock, keeper=ledger)
    )
    scope = open_scope(lease)
    with pytest.warns(ResourceWarning, match="dropped without release"):
        del lease
    scope.__exit__(None, None, None)


async def test_a_lease_dropped_by_a_thread_warns_although_the_loop_is_quicker_to_give_it_back(make):
    def release_at_once(call, state):
        state.lost = LossReason.REFUSED

    lease = make()
    lease._state.loop = SimpleNamespace(call_soon_threadsafe=release_at_once, is_closed=lambda: True)
    with pytest.warns(ResourceWarning, match="dropped without release"):
        lease.__del__()


async def test_the_timer_of_a_scope_tells_a_machine_that_was_suspended_from_an_expiry(make, clock, ledger):
    lease = make(deadline=0.02)
    scope = open_scope(lease)
    clock.time = 3600
    with pytest.raises(asyncio.CancelledError) as struck:
        await asyncio.sleep(30)
    assert scope.__exit__(asyncio.CancelledError, struck.value, None)
    assert ledger.entries == [LossReason.STALLED]


def test_the_class_of_scopes_is_asyncios_although_another_library_asked_first(monkeypatch):
    """Remembered from a run of trio, it would break every later lease of this process."""

    class TriosScope: ...

    async def ask():
        return scope_class()

    scope_class.cache_clear()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(anyio, "CancelScope", TriosScope)
        with pytest.raises(RuntimeError, match="no running event loop"):
            scope_class()
    assert issubclass(asyncio.run(ask()), anyio.CancelScope)


async def test_the_module_of_scopes_has_the_name_by_which_a_client_that_closes_looks_for_it():
    """Under another name, the closing would not be shielded from them."""
    assert scope_class().__module__ == SCOPES


# Forks, as seen from inside; the real thing is among the traps


async def test_a_lease_of_the_parent_is_inert_in_a_forked_child(make, ledger, monkeypatch):
    lease = make()
    monkeypatch.setattr(os, "getpid", partial(int, os.getpid() + 1))
    monkeypatch.setattr(THIS_PROCESS, os.getpid())
    with pytest.raises(LeaseLostError) as refusal:
        _ = lease.token
    assert refusal.value.reason is LossReason.CLOSED
    assert lease.remaining == 0.0
    with pytest.raises(LeaseLostError):
        await lease.renew()
    await lease.release()
    await asyncio.sleep(0)
    assert ledger.entries == []


async def test_only_its_own_loop_may_renew_release_and_wait(make, ledger):
    lease = make()

    def elsewhere(use):
        with pytest.raises(UsageError, match="belongs to another event loop"):
            asyncio.run(use())

    for use in (lease.renew, lease.release, lease.wait_lost):
        await asyncio.to_thread(elsewhere, use)
    assert ledger.entries == []
