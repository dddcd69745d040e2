"""The engine, on virtual time: from a grant to its release, and what is left when the client closes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator

import pytest
import tenacity
from inside import BootClock, LoopClock, memory_on, state_of
from looking import holder
from virtual_time import block, in_virtual_time, now, settle

from fencing_sdk import (
    BackendRefusedError,
    BackendUnavailableError,
    Lease,
    LeaseLostError,
    LossReason,
    UsageError,
)
from fencing_sdk._engine.acquisition import DEFAULT_BACKOFF, Terms
from fencing_sdk._engine.engine import Engine
from fencing_sdk._engine.heartbeat import HeartbeatLog
from fencing_sdk._engine.observer_reports import LeaseReport
from fencing_sdk._values.observers import Observers
from fencing_sdk._values.timing import Timing
from fencing_sdk.abc import HELD, WAITER_TTL, Gone
from fencing_sdk.events import (
    Acquired,
    Event,
    FenceRaised,
    Lost,
    Released,
)
from fencing_sdk.testing import FaultyBackend

TTL, VALID, INTERVAL = 10.0, 7.9, 2.0
RELEASE_LIMIT = 2.0


class Store(FaultyBackend):
    """A store on virtual time with a bad network in front; it can also be opened."""

    def __init__(self) -> None:
        self.table = memory_on(LoopClock())
        super().__init__(self.table)
        self.opened = 0
        self.closed = 0
        self.opening_error: Exception | None = None
        self.closing_error: Exception | None = None
        self.closing_delay = 0.0

    async def open(self) -> None:
        self.opened += 1
        if self.opening_error is not None:
            raise self.opening_error

    async def aclose(self) -> None:
        self.closed += 1
        await asyncio.sleep(self.closing_delay)
        if self.closing_error is not None:
            raise self.closing_error

    async def free(self, name: str = "a") -> bool:
        return await holder(self.table, name) is None

    def count(self, operation: str) -> int:
        return sum(called == operation for called, _ in self.calls)


class Guard:
    """Raises its fence after `delay` seconds, or raises what it was given."""

    def __init__(self, *, delay: float = 0.0, error: Exception | None = None) -> None:
        self.delay = delay
        self.error = error
        self.raised: list[tuple[str, int]] = []

    async def raise_to(self, resource, token):
        await asyncio.sleep(self.delay)
        if self.error is not None:
            raise self.error
        self.raised.append((resource, int(token)))

    async def highest(self, resource):
        return None


def terms(name: str = "a", *, wait=None, backoff=DEFAULT_BACKOFF, **timing) -> Terms:
    return Terms(name, f"spaced:{name}", Timing.build(**({"ttl": TTL} | timing)), wait, backoff)


class House:
    def __init__(self, store: Store | None = None) -> None:
        self.store = store or Store()
        self.events: list[Event] = []
        self.engine = Engine(self.store, LoopClock(), Observers([self.events.append]), watch_stalls=False)

    async def hold(self, name: str = "a", *, fences=(), **options) -> Lease:
        return await self.engine.hold(terms(name, **options), fences)

    async def free(self, name: str = "a") -> bool:
        return await self.store.free(f"spaced:{name}")

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


@contextlib.asynccontextmanager
async def house(store: Store | None = None) -> AsyncIterator[House]:
    house = House(store)
    await house.engine.start()
    yield house
    house.store.heal()
    await house.engine.aclose()


@in_virtual_time
async def test_a_lease_is_acquired_renewed_and_released():
    async with house() as h:
        lease = await h.hold()
        await asyncio.sleep(3 * VALID)
        assert lease.held
        assert len(h.engine) == 1
        await lease.release()
        assert await h.free()
        assert len(h.engine) == 0
        assert h.store.opened == 1
        acquired, released = h.of(Acquired)[0], h.of(Released)[0]
        assert (acquired.name, acquired.token, acquired.holder, acquired.ttl) == (
            "a",
            state_of(lease).number,
            lease.holder,
            TTL,
        )
        assert acquired.deadline == pytest.approx(1000 + VALID)
        assert released.confirmed
        assert released.held_for == pytest.approx(3 * VALID)
    assert h.store.closed == 1


@in_virtual_time
async def test_a_backend_that_cannot_be_opened_says_so_at_once():
    h = House()
    h.store.opening_error = BackendRefusedError("Store", "open")
    with pytest.raises(BackendRefusedError):
        await h.engine.start()
    await h.engine.aclose()
    assert h.store.closed == 1


@in_virtual_time
async def test_a_backend_that_hangs_while_it_opens_is_not_waited_for_for_ever():
    h = House()
    h.store.open = asyncio.Event().wait
    with pytest.raises(BackendUnavailableError):
        await h.engine.start()
    assert now() < 6
    await h.engine.aclose()


@in_virtual_time
async def test_the_bell_of_an_operator_ends_the_lease_at_once():
    async with house() as h:
        lease, other = await h.hold("a"), await h.hold("b")
        assert await h.store.end("spaced:a", lease.token, "deploy")
        await settle()
        assert lease.lost_reason is LossReason.REVOKED
        assert now() == 0.0
        assert other.held
        await lease.release()
        await other.release()


@pytest.mark.parametrize("news", [None, Gone()], ids=repr)
@in_virtual_time
async def test_any_other_bell_of_a_lease_renews_it_now_and_proves_no_loss(news):
    async with house() as h:
        lease = await h.hold()
        await asyncio.sleep(0.5)
        h.store.table._ring(state_of(lease).claim.owner, news)
        await settle()
        assert lease.held
        assert h.store.count("renew") == 1
        await h.store.table.give_back(state_of(lease).claim)
        h.store.table._ring(state_of(lease).claim.owner, news)
        await settle()
        assert lease.lost_reason is LossReason.REFUSED


@in_virtual_time
async def test_no_bell_is_left_when_a_lease_is_over():
    async with house() as h:
        lease = await h.hold()
        assert len(h.store.table._bells) == 1
        await lease.release()
        assert not h.store.table._bells
        left = await h.hold()
        assert left.held
    assert not h.store.table._bells


@in_virtual_time
async def test_what_came_of_a_ticket_that_waited_is_renewed_for_its_full_ttl_at_its_next_sign_of_life():
    """A ticket that waits lives for five seconds only, and a turn that ends before costs no request."""
    async with house() as h:
        first = await h.hold()
        waiting = asyncio.create_task(h.hold())
        await asyncio.sleep(1.5)
        before = h.store.count("renew")
        await first.release()
        lease = await waiting
        assert now() == 1.5
        await settle()
        assert (h.store.count("renew"), lease.remaining) == (before, pytest.approx(WAITER_TTL * 0.99 - 1.0 - 0.5))
        await asyncio.sleep(0.51)
        assert (h.store.count("renew"), lease.remaining) == (before + 1, pytest.approx(VALID - 0.01))
        await lease.release()


@in_virtual_time
async def test_waiters_and_leases_are_kept_by_one_call():
    async with house() as h:
        first = await h.hold(heartbeat_interval=1.0)
        waiting = [asyncio.create_task(h.hold()) for _ in range(3)]
        await asyncio.sleep(1.1)
        assert [len(names) for operation, names in h.store.calls if operation == "renew"] == [4]
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        await first.release()


@in_virtual_time
async def test_a_fence_that_hangs_is_waited_for_as_long_as_the_lease_was_granted():
    async with house() as h:
        with pytest.raises(BackendUnavailableError, match=r"Guard: raise_to failed: no answer within 7\.9 s"):
            await h.hold(fences=[(Guard(delay=3600), None)])
        assert abs(now() - VALID) < 1e-6
        assert await h.free()


@in_virtual_time
async def test_a_fence_that_hangs_while_the_store_is_silent_too_is_a_lost_lease():
    async with house() as h:
        h.store.fail("renew")
        with pytest.raises(LeaseLostError):
            await h.hold(fences=[(Guard(delay=3600), None)])
        assert abs(now() - VALID) < 1e-6


@in_virtual_time
async def test_a_fence_whose_answer_is_lost_is_raised_again():
    class Forgetful(Guard):
        async def raise_to(self, resource, token):
            await super().raise_to(resource, token)
            if len(self.raised) == 1:
                await asyncio.sleep(3600)

    async with house() as h:
        guard = Forgetful()
        lease = await h.hold(fences=[(guard, None)])
        assert guard.raised == [("a", lease.token)] * 2
        assert round(now(), 6) == VALID / 2
        assert len(h.of(FenceRaised)) == 1
        await lease.release()


@in_virtual_time
async def test_a_fence_raised_too_late_is_no_fence():
    """The process stood still meanwhile; whoever comes now raises the fence higher."""

    class Blocking(Guard):
        async def raise_to(self, resource, token):
            await super().raise_to(resource, token)
            block(VALID)

    async with house() as h:
        first, second = Blocking(), Guard()
        with pytest.raises(LeaseLostError):
            await h.hold(fences=[(first, None), (second, None)])
        assert len(first.raised) == 1
        assert second.raised == []
        assert not h.of(FenceRaised)
        assert await h.free()


@in_virtual_time
async def test_cancelled_while_a_fence_is_raised_it_gives_the_lock_back():
    async with house() as h:
        task = asyncio.create_task(h.hold(fences=[(Guard(delay=60), None)]))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await h.free()


@in_virtual_time
async def test_whoever_lost_a_lease_to_a_silent_store_does_not_wait_for_it_again():
    async with house() as h:
        lease = await h.hold()
        h.store.hang("renew")
        h.store.hang("release")
        await lease.wait_lost()
        lost_at = now()
        await lease.release()
        assert now() == lost_at
        h.store.heal()
        await asyncio.sleep(RELEASE_LIMIT + 1)
        assert await h.free(), "the release goes on in the background"
        assert [event.confirmed for event in h.of(Released)] == [True]


@in_virtual_time
async def test_a_lost_lease_says_what_became_of_its_last_renewal(caplog):
    async with house() as h:
        h.store.fail("renew", BackendRefusedError("Store", "renew", "NOPERM"))
        lease = await h.hold()
        await lease.wait_lost()
        reason = "no renewal was confirmed in time, the last: BackendRefusedError: Store: renew failed: NOPERM"
        with pytest.raises(LeaseLostError, match=reason):
            lease.check()
        await settle()
        heard = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        error = "BackendRefusedError: Store: renew failed: NOPERM"
        assert heard == [
            f"the store did not renew a lease; the client tries again: {error}",
            f"lease on 'a' (token {state_of(lease).number:d}) is over: its deadline passed: {reason}",
        ]
        await lease.release()


def test_the_log_counts_the_leases_that_were_not_renewed(caplog):
    log = HeartbeatLog(BootClock(), LeaseReport(Observers(()), BootClock()), watch_stalls=False)
    log.renewed([*[HELD] * 9, None], "it is slow")
    assert caplog.messages == ["the store did not renew a lease; the client tries again: it is slow"]


@in_virtual_time
async def test_leases_that_are_lost_together_are_one_line_of_the_log(caplog):
    """A line each would keep the loop busy while others wait for their cancellation."""
    async with house() as h:
        leases = [await h.hold(f"seats/{number}") for number in range(50)]
        h.store.hang("renew")
        await leases[-1].wait_lost()
        await settle()
        lost = [record.getMessage() for record in caplog.records if "is over" in record.getMessage()]
        assert len(h.of(Lost)) == 50
        assert len(lost) == 1
        assert lost[0].startswith("lease on 'seats/0' (token ")
        assert lost[0].endswith("; and so are 49 others")
        for lease in leases:
            await lease.release()


@in_virtual_time
async def test_trouble_that_passes_is_told_once_and_leaves_no_trace(caplog):
    caplog.set_level("INFO", "fencing_sdk")
    async with house() as h:
        lease = await h.hold(max_hold=3 * VALID)
        for _ in range(2):
            h.store.fail("renew")
            await asyncio.sleep(1.5 * INTERVAL)
            h.store.heal()
            await asyncio.sleep(2 * INTERVAL)
        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"] * 2
        assert await lease.wait_lost() is LossReason.EXPIRED
        with pytest.raises(LeaseLostError, match=r"its deadline passed: max_hold=23\.7 is over"):
            lease.check()
        await lease.release()


@in_virtual_time
async def test_an_attempt_that_straggles_past_the_release_is_released_as_well():
    """Two attempts, the second one granted; the first one reaches the store after the lease was released."""
    async with house() as h:
        h.store.straggle("acquire", 5.0, times=1)
        lease = await h.hold(backoff=tenacity.wait_fixed(0.1))
        await lease.release()
        assert await h.free()
        await h.store.delivered()
        assert not await h.free(), "granted to nobody"
        await asyncio.sleep(0.1 + TTL - now())
        assert await h.free(), f"freed {now()} s after the start, and not only by its ttl, 15 s after it"


@in_virtual_time
async def test_an_attempt_that_can_no_longer_arrive_is_not_released_again():
    async with house() as h:
        h.store.fail("acquire", times=1)
        lease = await h.hold()
        await asyncio.sleep(TTL + 1)
        await lease.release()
        await asyncio.sleep(3 * TTL)
        assert h.store.count("release") == 1


@in_virtual_time
async def test_a_grant_that_arrives_while_the_client_closes_is_released():
    h = House()
    await h.engine.start()
    h.store.delay("acquire", 1.0)
    task = asyncio.create_task(h.hold())
    await asyncio.sleep(0.5)
    await h.engine.aclose()
    with pytest.raises(UsageError, match="closed"):
        await task
    assert await h.free()
    assert now() == 1.0


@in_virtual_time
async def test_closing_is_bounded_however_silent_the_store():
    async with house() as h:
        held = await h.hold()
        for operation in ("acquire", "renew", "release"):
            h.store.hang(operation)
        h.store.closing_delay = 3600
        task = asyncio.create_task(h.hold("b"))
        await asyncio.sleep(1)
        began = now()
        await h.engine.aclose()
        assert now() - began < 11
        assert held.lost_reason is LossReason.CLOSED
        with pytest.raises((UsageError, BackendUnavailableError)):
            await task


@in_virtual_time
async def test_an_error_of_a_closing_backend_is_logged_and_replaces_nothing(caplog):
    async with house() as h:
        h.store.closing_error = ZeroDivisionError()
    assert "closing the backend failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


@in_virtual_time
async def test_the_text_of_a_drivers_error_behind_a_closing_that_failed_is_not_logged(caplog):
    async with house() as h:
        h.store.closing_error = BackendUnavailableError("Store", "close", "no connection")
        h.store.closing_error.__cause__ = OSError("cannot reach vault://admin:hunter2@host")
    assert "closing the backend failed: Store: close failed: no connection" in caplog.text
    assert "hunter2" not in caplog.text


@in_virtual_time
async def test_an_engine_whose_heartbeat_failed_gives_no_lease():
    async with house() as h:
        await settle()
        h.engine._beating.cancel()
        await settle()
        with pytest.raises(UsageError, match="heartbeat of this client failed") as refused:
            await h.hold()
        assert isinstance(refused.value.__cause__, asyncio.CancelledError)


@in_virtual_time
async def test_a_grant_that_arrives_after_the_heartbeat_failed_is_released():
    async with house() as h:
        h.store.delay("acquire", 1.0)
        task = asyncio.create_task(h.hold())
        await asyncio.sleep(0.5)
        h.engine._beating.cancel()
        with pytest.raises(UsageError):
            await task
        await settle()
        assert await h.free()


@in_virtual_time
async def test_a_lease_that_was_dropped_is_released():
    async with house() as h:
        lease = await h.hold()
        with pytest.warns(ResourceWarning, match="dropped without release"):
            del lease
        await settle()
        assert await h.free()
        assert len(h.engine) == 0


@in_virtual_time
async def test_a_lease_that_was_dropped_is_not_lost_when_a_renewal_on_its_way_is_refused():
    async with house() as h:
        h.store.delay("renew", 1.0)
        lease = await h.hold()
        await asyncio.sleep(INTERVAL + 0.5)
        with pytest.warns(ResourceWarning, match="dropped without release"):
            del lease
        await asyncio.sleep(INTERVAL)
        assert h.store.count("renew") == 1
        assert h.of(Lost) == []


class DriverError(Exception):
    """Error of a driver."""


class Unanswered(Store):
    """Fails as backends do: with an error of their own, caused by the driver's."""

    async def draw(self, claim, **options):
        try:
            return await super().draw(claim, **options)
        except DriverError as error:
            raise BackendUnavailableError("Store", "acquire") from error


UNANSWERED = {
    "refused at once": lambda store: store.fail("acquire", BackendUnavailableError("Store", "acquire"), times=2),
    "a driver's error": lambda store: store.fail("acquire", DriverError("gone"), times=2),
    "never answered": lambda store: store.hang("acquire", times=2),
    "a lost reply": lambda store: store.lose_reply("acquire", times=2),
}


@pytest.mark.parametrize("how", UNANSWERED)
@in_virtual_time
async def test_a_dropped_lease_is_noticed_without_the_cyclic_collector(how):
    """From Python 3.12 on, the traceback of a failed attempt keeps the frames of its callers, and what they hold."""

    async def take(h: House) -> Lease:
        lease = await h.hold(backoff=tenacity.wait_fixed(0.1))
        assert lease.held
        return lease

    async with house(Unanswered()) as h, without_collector():
        UNANSWERED[how](h.store)
        lease = await take(h)
        await asyncio.sleep(0)  # until then the loop itself holds the error that ended the last pause
        with pytest.warns(ResourceWarning, match="dropped without release"):
            del lease
        await settle()
        assert len(h.engine) == 0
        assert await h.free()


@contextlib.asynccontextmanager
async def without_collector() -> AsyncIterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
