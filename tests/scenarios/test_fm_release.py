"""Failure modes 6, 7 and 8: releases that fail, renewals that come after the end, and whose lock it was."""

import asyncio
import time
from contextlib import suppress
from functools import partial

import anyio
import pytest
from event_log import CLOCK, ENDED_BY_TIME, Log, ticks
from failing_store import LedgerBackend, Tracks
from inside import AnyLease
from looking import holder
from patience import until

from fencing_sdk import LeaseLostError, LockClient, LossReason, current_lease, sync
from fencing_sdk.abc import Claim
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.events import Event, JobEnded, JobOutcome, Lost, Released, RenewalFailed, Renewed
from fencing_sdk.testing import FaultyBackend

KEPT = {"ttl": 10.0, "heartbeat_interval": 0.4}
"""For a lease that is to be kept, on a machine that may stand still for seconds."""


@pytest.fixture(autouse=True)
async def complaints():
    """What only the loop's exception handler would get to see is an error too."""
    unhandled = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    yield
    assert not unhandled


class Mishap(Exception):
    """The body's own error."""


FAULTS = {
    "fails": lambda link: link.fail("release"),
    "breaks": lambda link: link.fail("release", ZeroDivisionError("a driver's bug")),
    "hangs": lambda link: link.hang("release"),
    "is unanswered": lambda link: link.lose_reply("release"),
}


RELEASE_LIMIT = (6.0 * 0.99 - 4.5) / 2
"""Seconds for which a release may hold up the one that leaves, at a ttl of 6.0 s and a safety buffer of 4.5 s."""


@pytest.mark.parametrize("fault", FAULTS)
async def test_mode_06_a_release_that_fails_is_bounded_and_hides_no_error(fault):
    """6: the body's error leaves bare and soon; the release is repeated in the background until it is answered."""
    store = LedgerBackend()
    link = FaultyBackend(store)
    log = Log()
    async with LockClient(link, observers=[log]) as locks:
        FAULTS[fault](link)
        mishap = Mishap()
        began = CLOCK.now()
        with pytest.raises(Mishap) as left:
            async with locks.lock("seats/42", ttl=6.0, safety_buffer=4.5):
                raise mishap
        assert left.value is mishap
        assert not hasattr(mishap, "__notes__")
        assert mishap.__context__ is None
        assert CLOCK.now() - began < RELEASE_LIMIT + 4, "less than the ttl"
        assert [event.confirmed for event in log.of(Released)] == [False]
        link.heal()
        await until(lambda: store.tidy)
        assert store.of("release")
    assert not log.of(Lost)


async def test_mode_06_a_failing_release_is_no_error_at_all_for_a_clean_body():
    """6: the lock was held to the end of the body; that it is freed a little later concerns the waiters only."""
    store = LedgerBackend()
    link = FaultyBackend(store)
    async with LockClient(link) as locks:
        link.fail("release", times=3)
        async with locks.lock("seats/42", ttl=5):
            pass
        await until(lambda: store.tidy, within=4)


@pytest.fixture
def patient_releases(monkeypatch):
    """Let a release that is a little late be waited for, also on a machine that stands still for seconds."""
    monkeypatch.setattr("fencing_sdk._engine.releases.RELEASE_LIMIT", 15.0)


@pytest.mark.usefixtures("patient_releases")
@pytest.mark.parametrize("manner", ["cancel", "timeout", "scope", "again and again"])
async def test_mode_06_a_cancelled_release_is_finished_before_the_cancellation_goes_on(manner):
    """6: cancelled while it waits for the store, it still frees the lock, and the cancellation is not lost."""
    store = LedgerBackend()
    link = FaultyBackend(store)
    async with LockClient(link) as locks:
        lease = await locks.lock("seats/42", ttl=60).acquire()
        link.delay("release", 0.1, times=1)
        if manner == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.03):
                    await lease.release()
        elif manner == "scope":
            with anyio.move_on_after(0.03) as scope:
                await lease.release()
                await anyio.sleep(1)
            assert scope.cancelled_caught
        else:
            releasing = asyncio.create_task(lease.release())
            await asyncio.sleep(0.03)
            for _ in range(1 if manner == "cancel" else 5):
                releasing.cancel()
                await ticks(2)
            with pytest.raises(asyncio.CancelledError):
                await releasing
        assert store.tidy
        assert len(store.of("release")) == 1


@pytest.mark.usefixtures("patient_releases")
async def test_mode_06_leaving_cancelled_frees_the_lock_and_stays_cancelled():
    """6: a task that is cancelled in its body, and once more on its way out, has released the lock."""
    store = LedgerBackend()
    link = FaultyBackend(store)
    async with LockClient(link) as locks:
        inside = asyncio.Event()

        async def work():
            async with locks.lock("seats/42", ttl=60):
                inside.set()
                await asyncio.Event().wait()

        link.delay("release", 0.1, times=1)
        working = asyncio.create_task(work())
        await inside.wait()
        working.cancel()
        await asyncio.sleep(0.03)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        assert store.tidy


async def test_mode_06_release_is_idempotent():
    """6: twice, at the same time, and after a loss: one request, no error."""
    store = LedgerBackend()
    link = FaultyBackend(store)
    async with LockClient(link) as locks:
        lease = await locks.lock("seats/42", ttl=5).acquire()
        await asyncio.gather(lease.release(), lease.release(), lease.release())
        await lease.release()
        assert link.calls.count(("release", ("seats/42",))) == 1
        assert not lease.held
        assert lease.lost_reason is None
    await lease.release()
    assert store.tidy


class SlowRenewals(LedgerBackend):
    """Renews at once or late, and answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = asyncio.Event()
        self.apply = asyncio.Event()
        self.answer = asyncio.Event()
        self.failure: Exception | None = None

    async def keep(self, tickets):
        self.arrived.set()
        await self.apply.wait()
        answers = await super().keep(tickets)
        await self.answer.wait()
        if self.failure is not None:
            raise self.failure
        return answers


def kinds(events: list[Event]) -> list[str]:
    """What was told, apart from a loop that was late, which is the machine's affair."""
    return [event.kind for event in events if event.kind != "renewal_late"]


@pytest.mark.parametrize("applied", ["before the release", "after the release"])
async def test_mode_07_a_renewal_under_way_at_the_release_changes_nothing(applied):
    """7: its answer finds nobody: no event, no error, no lock; success does not turn into a loss."""
    store = SlowRenewals()
    log = Log()
    async with LockClient(store, observers=[log]) as locks:
        async with locks.lock("seats/42", **KEPT):
            await store.arrived.wait()
            if applied == "before the release":
                store.apply.set()
        assert await holder(store, "seats/42") is None
        heard = len(log.events)
        store.apply.set()
        store.answer.set()
        await asyncio.sleep(0.1)
        assert len(store.entries) == 3, "acquired, renewed, released"
        assert kinds(log.events[heard:]) == []
        assert store.tidy
    assert not log.of(Lost)
    assert not log.of(RenewalFailed)


async def test_mode_07_a_renewal_that_fails_after_the_release_is_not_told():
    """7: "renewal failed" about a lock that was released in time would be a false alarm."""
    store = SlowRenewals()
    store.failure = ConnectionResetError()
    log = Log()
    async with LockClient(store, observers=[log]) as locks:
        async with locks.lock("seats/42", **KEPT):
            await store.arrived.wait()
        store.apply.set()
        store.answer.set()
        await asyncio.sleep(0.05)
    assert kinds(log.events) == ["acquiring", "acquired", "released"]


async def test_mode_07_a_renewal_that_straggles_past_the_release_revives_nothing():
    """7: it reaches the store when the lock is free, and when somebody else has it; neither is touched."""
    store = LedgerBackend()
    link = FaultyBackend(store)
    log = Log()
    async with LockClient(link, observers=[log]) as locks, LockClient(store) as others:
        lease = await locks.lock("seats/42", **KEPT).acquire()
        link.straggle("renew", 0.15, times=1)
        await log.seen(RenewalFailed)
        await lease.release()
        heir = await others.lock("seats/42", ttl=30).acquire()
        before = (await holder(store, "seats/42")).remaining
        await link.delivered()
        found = await holder(store, "seats/42")
        assert found.token == heir.token
        assert found.remaining <= before
        await heir.release()
    assert kinds(log.events)[-1] == "released"
    assert store.tidy


async def test_mode_07_nothing_is_renewed_after_the_release():
    """7: a lease that is released between two beats, and one that is dropped, are forgotten by the heartbeat."""
    quick = {"ttl": 4.0, "heartbeat_interval": 0.05}
    store = LedgerBackend()
    log = Log()
    async with LockClient(store, observers=[log]) as locks:
        async with locks.lock("seats/41", **quick) as lease:
            await log.seen(Renewed)
        plain = await locks.lock("seats/42", **quick).acquire()
        owner = plain.holder
        with pytest.warns(ResourceWarning, match="dropped without release"):
            del plain
        await until(lambda: store.tidy)
        renewed = len(store.entries)
        await asyncio.sleep(0.3)
        assert len(store.entries) == renewed
        assert not store.of("renew", owner)
        assert lease.lost_reason is None


async def test_mode_07_a_refusal_that_comes_after_the_release_is_no_loss():
    """7: the store's "not yours" about a lease that has ended well is nobody's business."""
    store = SlowRenewals()
    log = Log()
    async with LockClient(store, observers=[log]) as locks:
        lease = await locks.lock("seats/42", ttl=10.0).acquire()
        renewing = asyncio.create_task(lease.renew())
        await store.arrived.wait()
        await lease.release()
        store.apply.set()
        store.answer.set()
        with pytest.raises(LeaseLostError, match="was released"):
            await asyncio.wait_for(renewing, 20)
        assert lease.lost_reason is None
    assert kinds(log.events) == ["acquiring", "acquired", "released"]


def foreign_deletes(store: LedgerBackend) -> list[int]:
    """Tokens whose grant was ended by somebody other than the one it was given to."""
    granted = {entry.token: entry.holder for entry in store.of("acquire")}
    return [entry.token for entry in store.of("release") if granted[entry.token] != entry.holder]


async def test_mode_08_two_tasks_that_share_a_lock_object_never_release_each_other():
    """8: the first one overstays its lease while the second one enters by the same object."""
    store = LedgerBackend()
    link = FaultyBackend(store)
    tracks = Tracks()
    async with LockClient(link) as locks:
        shared = locks.lock("seats/42", ttl=3.5, safety_buffer=0.1, heartbeat_interval=0.2)
        second_is_in = asyncio.Event()
        first_is_out = asyncio.Event()

        async def overstay() -> LossReason:
            try:
                async with shared as lease:
                    link.fail("renew")
                    with anyio.CancelScope(shield=True):
                        await second_is_in.wait()
                        assert lease.lost_reason in ENDED_BY_TIME
            except LeaseLostError as lost:
                return lost.reason
            finally:
                first_is_out.set()

        first = asyncio.create_task(overstay())
        await until(lambda: ("renew", ("seats/42",)) in link.calls)
        await until(lambda: not store._lines.tickets("seats/42"))
        link.heal()
        async with shared as lease:
            second_is_in.set()
            await first_is_out.wait()
            assert await first in ENDED_BY_TIME
            assert (await holder(store, "seats/42")).id == lease.holder
            with suppress(TimeoutError):
                async with asyncio.timeout(2):
                    await tracks.walk(lease)
            assert lease.held
    assert foreign_deletes(store) == []
    assert len(store.of("release")) == 1
    assert store.tidy


async def test_mode_08_a_failing_entry_by_the_same_object_does_not_harm_the_holder():
    """8: tries that fail have an owner of their own, so the holder can still renew and release."""
    store = LedgerBackend()
    log = Log()
    async with LockClient(store, observers=[log]) as locks:
        shared = locks.lock("seats/42", **KEPT)
        async with shared as lease:
            assert [await shared.try_acquire() for _ in range(5)] == [None] * 5
            await log.seen(Renewed)
            assert lease.held
        assert store.tidy
    assert len({entry.holder for entry in store.entries if entry.operation == "acquire"}) == 6
    assert foreign_deletes(store) == []


async def test_mode_08_many_overlapping_entries_keep_their_leases_apart():
    """8: leases that end by loss, by release and by cancellation, all by one object, each for its owner only."""
    store = LedgerBackend()
    async with LockClient(store) as locks:
        shared = locks.lock("seats/42", ttl=5)

        async def work(number: int) -> None:
            async with shared as lease:
                token = lease.token
                if number % 3 == 0:
                    store.take_away("seats/42")
                await asyncio.sleep(0.002 if number % 3 == 1 else 0)
                assert lease.token == token

        tasks = [asyncio.create_task(work(number)) for number in range(30)]
        await asyncio.sleep(0.01)
        for task in tasks[::5]:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {type(None), LeaseLostError, asyncio.CancelledError}
        assert store.tidy
    assert foreign_deletes(store) == []


# A lock that was taken away in silence, shortly before the end: the first release finds that. For tasks and threads.


def vanish(store: MemoryBackend, *leases: AnyLease) -> None:
    """End the grants in the store, as a server does that loses its data."""
    for lease in leases:
        assert store._lines.give_back(Claim(lease.name, 1.0, lease.owner)) is None


BLOCKS = {
    "lock": lambda locks: locks.lock("a"),
    "permit": lambda locks: locks.semaphore("a", permits=2),
    "reader": lambda locks: locks.rwlock("a").reader,
    "writer": lambda locks: locks.rwlock("a").writer,
    "several locks": lambda locks: locks.multilock("a", "b"),
}


def in_a_block(kind: str, locks, store):
    with BLOCKS[kind](locks) as held:
        vanish(store, held["a"] if kind == "several locks" else held)


async def in_a_block_of_a_task(kind: str, locks, store):
    async with BLOCKS[kind](locks) as held:
        vanish(store, held["a"] if kind == "several locks" else held)


def in_a_plain_handle(locks, store):
    with locks.lock("a").acquire() as lease:
        vanish(store, lease)


async def in_a_plain_handle_of_a_task(locks, store):
    async with await locks.lock("a").acquire() as lease:
        vanish(store, lease)


def in_a_function(locks, store):
    locks.locking("a")(lambda: vanish(store, current_lease()))()


async def in_a_function_of_a_task(locks, store):
    @locks.locking("a")
    async def function():
        vanish(store, current_lease())

    await function()


def in_a_job(locks, store):
    @locks.job("a", at_least_for=0.001)
    def job():
        time.sleep(0.01)  # longer than at_least_for
        vanish(store, current_lease())

    job()


async def in_a_job_of_a_task(locks, store):
    @locks.job("a", at_least_for=0.001)
    async def job():
        await asyncio.sleep(0.01)  # longer than at_least_for
        vanish(store, current_lease())

    await job()


def in_a_job_that_keeps_its_lock(locks, store):
    locks.job("a", at_least_for=60)(lambda: vanish(store, current_lease()))()


async def in_a_job_of_a_task_that_keeps_its_lock(locks, store):
    @locks.job("a", at_least_for=60)
    async def job():
        vanish(store, current_lease())

    await job()


THREADS = [
    *(partial(in_a_block, kind) for kind in BLOCKS),
    in_a_plain_handle,
    in_a_function,
    in_a_job,
    in_a_job_that_keeps_its_lock,
]
TASKS = [
    *(partial(in_a_block_of_a_task, kind) for kind in BLOCKS),
    in_a_plain_handle_of_a_task,
    in_a_function_of_a_task,
    in_a_job_of_a_task,
    in_a_job_of_a_task_that_keeps_its_lock,
]


async def run_under(body, log: Log, store: MemoryBackend) -> None:
    """Run a *body* of tasks here, and one of threads in a thread."""
    if body in TASKS:
        async with LockClient(store, observers=[log]) as locks:
            await body(locks, store)
    else:
        with sync.connect(store, observers=[log]) as locks:
            await asyncio.to_thread(body, locks, store)


@pytest.mark.parametrize("body", [*TASKS, *THREADS])
async def test_mode_07_a_block_whose_grant_has_gone_ends_with_the_loss(body):
    """7: the body ended in time, but another client may have held the lock meanwhile: that is not a clean end."""
    log = Log()
    with pytest.raises(LeaseLostError) as lost:
        await run_under(body, log, MemoryBackend())
    assert (lost.value.name, lost.value.reason) == ("a", LossReason.REFUSED)
    assert [event.name for event in log.of(Lost)] == ["a"]
    gone = [event for event in log.of(Released) if event.holder == log.of(Lost)[0].holder]
    assert [event.confirmed for event in gone] == [False]
    assert {event.outcome for event in log.of(JobEnded)} <= {JobOutcome.LOST}


@pytest.mark.parametrize("body", [*TASKS, *THREADS])
async def test_mode_07_the_error_of_such_a_block_leaves_with_a_note(body, monkeypatch):
    """7: it is yours, and says that the lease was lost too."""
    mishap = Mishap()
    vanishes = vanish

    def vanish_and_fail(*arguments):
        vanishes(*arguments)
        raise mishap

    monkeypatch.setitem(globals(), "vanish", vanish_and_fail)
    with pytest.raises(Mishap) as left:
        await run_under(body, Log(), MemoryBackend())
    assert left.value is mishap
    assert len(mishap.__notes__) == 1
    assert "lease on 'a'" in mishap.__notes__[0]


@pytest.mark.parametrize("threads", [False, True])
async def test_mode_07_a_release_of_a_plain_handle_tells_the_loss_without_an_error(threads):
    """7: it may stand in a ``finally``, where it would hide an error of yours."""
    log, store = Log(), MemoryBackend()

    def in_a_thread(locks):
        lease = locks.lock("a").acquire()
        vanish(store, lease)
        lease.release()
        return lease.lost_reason

    if threads:
        with sync.connect(store, observers=[log]) as locks:
            reason = await asyncio.to_thread(in_a_thread, locks)
    else:
        async with LockClient(store, observers=[log]) as locks:
            lease = await locks.lock("a").acquire()
            vanish(store, lease)
            await lease.release()
            reason = lease.lost_reason
    assert reason is LossReason.REFUSED
    assert [event.reason for event in log.of(Lost)] == [reason]


@pytest.mark.parametrize("threads", [False, True])
async def test_mode_07_a_leader_whose_grant_has_gone_leads_another_term(threads):
    """7: the election goes on, as after any loss of the lead; a decorated function runs again."""
    log, store = Log(), MemoryBackend()
    terms = []

    def work():
        terms.append(lease := current_lease())
        if len(terms) == 1:
            vanish(store, lease)
        return len(terms)

    async def work_of_a_task():
        return work()

    if threads:
        with sync.connect(store, observers=[log]) as locks:
            value = await asyncio.to_thread(locks.elected("a")(work))
    else:
        async with LockClient(store, observers=[log]) as locks:
            value = await locks.elected("a")(work_of_a_task)()
    assert value == len(terms) == 2
    assert len(log.of(Lost)) == 1


@pytest.mark.usefixtures("patient_releases")
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("threads", [False, True])
async def test_mode_07_a_block_that_outlives_max_hold_ends_when_the_store_has_its_lock_back(threads, plain):
    """7: the release has begun before, or at the first look at the clock, and the end of the block waits for it."""
    log, store = Log(), FaultyBackend(MemoryBackend())
    store.delay("release", 0.2)

    def in_a_thread(locks):
        lock = locks.lock("a", max_hold=0.05)
        with pytest.raises(LeaseLostError), lock.acquire() if plain else lock:
            time.sleep(0.1)
        return log.of(Released)

    async def in_a_task(locks):
        lock = locks.lock("a", max_hold=0.05)
        with pytest.raises(LeaseLostError):
            async with await lock.acquire() if plain else lock:
                time.sleep(0.1)  # noqa: ASYNC251  (a body that does not await)
        return log.of(Released)

    if threads:
        with sync.connect(store, observers=[log]) as locks:
            released = await asyncio.to_thread(in_a_thread, locks)
    else:
        async with LockClient(store, observers=[log]) as locks:
            released = await in_a_task(locks)
    assert [event.confirmed for event in released] == [True]
