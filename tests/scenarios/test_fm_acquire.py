"""Failure modes 5, 12 and 13: acquisitions that are given up, answers that are lost, and long lines of waiters."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import pytest
from event_log import CLOCK, ENDED_BY_TIME, Log, ticks
from failing_store import LedgerBackend
from inside import state_of
from looking import holder
from patience import until

from fencing_sdk import (
    AcquireTimeoutError,
    BackendUnavailableError,
    LeaseLostError,
    LockClient,
    LossReason,
    current_lease,
)
from fencing_sdk.abc import Claim
from fencing_sdk.events import Acquired, Lost, NotAcquired, Released, RenewalFailed, Renewed
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.testing import FaultyBackend


class SlowAnswers(LedgerBackend):
    """Applies at once and answers later; every call has awaits before, and after, the moment it is applied."""

    def __init__(self, before: int = 0, after: int = 0, delay: float = 0.0) -> None:
        super().__init__()
        self.before, self.after, self.delay = before, after, delay

    async def draw(self, claim, *, only_if_it_holds=False):
        await ticks(self.before)
        answer = await super().draw(claim, only_if_it_holds=only_if_it_holds)
        await ticks(self.after)
        await asyncio.sleep(self.delay)
        return answer

    async def give_back(self, claim, *, after=0.0):
        await ticks(self.before)
        gone = await super().give_back(claim, after=after)
        await ticks(self.after)
        return gone


@asynccontextmanager
async def given_up(task: asyncio.Task) -> AsyncIterator[None]:
    """Cancel *task* after the body, and see it end as cancelled."""
    yield
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


ARRIVED = 1.2
"""
Seconds after which every request that is under way has reached the store. It is given up after less: a ttl of 8.0 s
with a safety buffer of 6.3 s gives a call 0.8 s.
"""


def not_sent(link: FaultyBackend) -> None:
    """The request is held up on our side of the network, and arrives although nobody waits for it."""
    link.delay("acquire", 0.15, times=1)


def unanswered(link: FaultyBackend) -> None:
    """The store has applied it, the answer is lost, and the waiter is about to try again."""
    link.lose_reply("acquire")


def straggling(link: FaultyBackend) -> None:
    """Every sign says that it was lost, and it arrives after the release that undoes it."""
    link.straggle("acquire", ARRIVED - 0.1)


def hanging(link: FaultyBackend) -> None:
    """It reaches the store when the call is ended, or never."""
    link.hang("acquire")


CASES = [(not_sent, "cancel"), (unanswered, "cancel"), (straggling, "cancel"), (hanging, "cancel")]
CASES += [(not_sent, "timeout"), (not_sent, "scope")]


@pytest.mark.parametrize(("state", "manner"), CASES, ids=lambda case: getattr(case, "__name__", case))
async def test_mode_05_a_cancelled_acquisition_leaves_nothing(state, manner):
    """5: wherever the request is when its caller gives up, the lock is free within one ttl, and stays free."""
    ttl = 8.0
    store = LedgerBackend()
    link = FaultyBackend(store)
    log = Log()
    async with LockClient(link, observers=[log]) as locks:
        state(link)
        began = CLOCK.now()
        waiting = locks.lock("seats/42", ttl=ttl, safety_buffer=6.3).acquire()
        if manner == "cancel":
            async with given_up(asyncio.create_task(waiting)):
                await asyncio.sleep(0.08)
        elif manner == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.08):
                    await waiting
        else:
            with anyio.move_on_after(0.08) as scope:
                await waiting
            assert scope.cancelled_caught
        gave_up = CLOCK.now()
        assert gave_up - began < 0.08 + ttl / 2, "giving up waits for nobody"
        await log.seen(NotAcquired)
        await asyncio.sleep(max(0.0, gave_up + ARRIVED - CLOCK.now()))
        await until(lambda: store.tidy)
        assert CLOCK.now() - gave_up < ttl + 1
        link.heal()
        async with locks.lock("seats/42", ttl=ttl, wait=0):
            pass
    assert not log.of(Lost)


async def test_mode_05_a_straggling_request_is_undone_long_before_its_ttl():
    """5: the lock of a given-up acquisition is not blocked for a ttl because the request was 0.2 s late."""
    store = LedgerBackend()
    link = FaultyBackend(store)
    async with LockClient(link) as locks:
        link.straggle("acquire", 0.2)
        async with given_up(asyncio.create_task(locks.lock("seats/42", ttl=20).acquire())):
            await until(lambda: link.calls)
        await link.delivered()
        await until(lambda: store.tidy, within=10)


async def test_mode_05_a_request_that_overtakes_its_own_release_is_released_again():
    """5: sent earlier and executed later; the second release frees at once what the first could not see."""
    store = LedgerBackend()
    link = FaultyBackend(store)
    async with LockClient(link) as locks:
        link.delay("acquire", 0.8, times=1)
        async with given_up(asyncio.create_task(locks.lock("seats/42", ttl=30).acquire())):
            await asyncio.sleep(0.05)
        await until(lambda: store.of("acquire"))
        await until(lambda: store.of("release"))
        began = CLOCK.now()
        async with locks.lock("seats/42", ttl=30):
            assert CLOCK.now() - began < 5
    assert store.tidy


async def test_mode_05_closing_the_client_frees_what_was_given_up():
    """5: a cancelled acquisition right before the end of the program does not leak the lock for a ttl."""
    store = SlowAnswers(delay=0.2)
    async with LockClient(store) as locks:
        async with given_up(asyncio.create_task(locks.lock("seats/42", ttl=60).acquire())):
            await until(lambda: store.of("acquire"))
    assert store.tidy


@pytest.mark.parametrize("fenced", [False, True], ids=["plain", "fenced"])
@pytest.mark.parametrize("contended", [False, True], ids=["free", "held"])
async def test_mode_05_no_moment_of_an_acquisition_is_unsafe_to_cancel(contended, fenced):
    """5: cancelled after every possible number of turns of the loop, in the line and out of it."""
    outcomes = set()
    for turn in range(40):
        store = SlowAnswers(before=2, after=2)
        async with LockClient(store) as locks:
            lock = locks.lock("seats/42", ttl=30, fences=[MemoryGuard()] if fenced else [])
            holder = await lock.acquire() if contended else None

            async def enter(lock=lock):
                async with lock:
                    return current_lease().token

            task = asyncio.create_task(enter())
            if holder is not None:
                await ticks(turn // 2)
                await holder.release()
                await ticks(turn // 2)
            else:
                await ticks(turn)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            outcomes.add(task.cancelled())
            await until(lambda store=store: store.tidy)
    assert outcomes == {True, False}


async def test_mode_12_an_acquisition_whose_answer_was_lost_is_found_again():
    """12: the retry is the same claimant: one grant, one token, and no wait for a ttl of its own."""
    store = LedgerBackend()
    link = FaultyBackend(store)
    link.lose_reply("acquire", times=2)
    began = CLOCK.now()
    async with LockClient(link) as locks, locks.lock("seats/42", ttl=30) as lease:
        assert CLOCK.now() - began < 5
        assert {entry.token for entry in store.of("acquire")} == {lease.token}
        assert {entry.holder for entry in store.of("acquire")} == {lease.holder}
    assert store.tidy


async def test_mode_12_a_lost_answer_does_not_prolong_what_the_holder_believes():
    """12: the store has renewed and the holder cannot know; its deadline stays, although the lock lives on."""
    store = LedgerBackend()
    link = FaultyBackend(store)
    log = Log()
    async with LockClient(link, observers=[log]) as locks:
        lease = await locks.lock("seats/42", ttl=4.0, safety_buffer=2.0, heartbeat_interval=0.1).acquire()
        deadline = state_of(lease).deadline
        link.lose_reply("renew")
        await log.seen(RenewalFailed)
        assert state_of(lease).deadline == deadline
        assert await asyncio.wait_for(lease.wait_lost(), 20) in ENDED_BY_TIME
        assert CLOCK.now() >= deadline
        found = await holder(store, "seats/42")
        assert found is not None
        assert found.id == lease.holder
        await lease.release()
    assert not log.of(Renewed)


async def test_mode_12_one_lost_renewal_is_no_loss():
    """12: applied and unanswered, then refused or confirmed: only a definite answer counts."""
    store = LedgerBackend()
    link = FaultyBackend(store)
    log = Log()
    async with (
        LockClient(link, observers=[log]) as locks,
        locks.lock("seats/42", ttl=5, heartbeat_interval=0.2) as lease,
    ):
        link.lose_reply("renew", times=2)
        await log.seen(Renewed)
        assert lease.held
        assert len(log.of(RenewalFailed)) == 2
    assert not log.of(Lost)


async def test_mode_12_a_renewal_never_creates():
    """12: a grant that the store has forgotten is lost, not made again behind the next holder's back."""
    store = LedgerBackend()
    async with LockClient(store) as locks:
        with pytest.raises(LeaseLostError) as lost:
            async with locks.lock("seats/42", ttl=5, heartbeat_interval=0.2) as lease, asyncio.timeout(20):
                await store.give_back(state_of(lease).claim)
                await asyncio.Event().wait()
        assert lost.value.reason is LossReason.REFUSED
    assert len(store.of("acquire")) == 1
    assert store.tidy


async def test_mode_12_a_release_whose_answer_was_lost_is_repeated_without_harm(monkeypatch):
    """12: the repetition finds the next holder in place, and leaves it alone."""
    monkeypatch.setattr("fencing_sdk._engine.releases.RELEASE_LIMIT", 15.0)  # a machine may stand still
    store = LedgerBackend()
    link = FaultyBackend(store)
    log = Log()
    async with LockClient(link, observers=[log]) as locks, LockClient(store) as others:
        lease = await locks.lock("seats/42", ttl=60).acquire()
        link.lose_reply("release", times=3)
        waiting = asyncio.create_task(others.lock("seats/42", ttl=5).acquire())
        await lease.release()
        heir = await asyncio.wait_for(waiting, 20)
        assert log.of(Released)[0].confirmed
        assert link.calls.count(("release", ("seats/42",))) == 4
        assert heir.token == (await holder(store, "seats/42")).token
        await heir.release()
    assert store.tidy


async def test_mode_12_silence_is_not_taken_for_a_free_lock_or_for_a_held_one():
    """12: a store that never answers makes an acquisition fail as unanswered, after one ttl at most."""
    link = FaultyBackend(LedgerBackend())
    link.fail("acquire")
    async with LockClient(link) as locks:
        began = CLOCK.now()
        with pytest.raises(BackendUnavailableError):
            await locks.lock("seats/42", ttl=0.3).acquire()
        assert 0.3 <= CLOCK.now() - began < 5


WAITERS = 200


async def test_mode_13_a_long_line_is_served_in_order_though_a_third_of_it_leaves():
    """13: nobody is skipped, nobody is woken for nothing, and the line is empty afterwards."""
    store = LedgerBackend()
    served = []
    async with LockClient(store) as locks:
        lock = locks.lock("seats/42", ttl=20)
        holder = await lock.acquire()

        async def stand(number: int) -> None:
            async with lock:
                served.append(number)

        line = []
        for number in range(WAITERS):
            line.append(asyncio.create_task(stand(number)))
            await ticks(1)
        await until(lambda: store.waiting("seats/42") == WAITERS)
        for waiter in line[::3]:
            waiter.cancel()
        await until(lambda: store.waiting("seats/42") == WAITERS - len(line[::3]))
        asked, began = len(store.entries), CLOCK.now()
        await holder.release()
        async with asyncio.timeout(20):
            await asyncio.gather(*line, return_exceptions=True)
        seconds = CLOCK.now() - began
        assert served == [number for number in range(WAITERS) if number % 3]
        calls = [entry for entry in store.entries[asked:] if entry.operation == "acquire"]
        polls = WAITERS * seconds  # everybody in line also asks by itself, about once a second
        assert len(calls) <= 2 * len(served) + polls
    assert store.tidy


async def test_mode_13_the_head_of_the_line_that_is_cancelled_at_its_turn_passes_it_on():
    """13: woken and cancelled in the same turn of the loop; the next one does not wait for a poll."""
    store = LedgerBackend()
    async with LockClient(store) as locks:
        lock = locks.lock("seats/42", ttl=240)
        for turn in range(15):
            holder = await lock.acquire()
            first, second = asyncio.create_task(lock.acquire()), None
            await until(lambda: store.waiting("seats/42") == 1)
            second = asyncio.create_task(lock.acquire())
            await until(lambda: store.waiting("seats/42") == 2)
            releasing = asyncio.create_task(holder.release())
            await ticks(turn)
            first.cancel()
            await releasing
            with suppress(asyncio.CancelledError):
                await (await first).release()
            lease = await asyncio.wait_for(second, 10)
            await lease.release()
    assert store.tidy


async def test_mode_13_a_waiter_that_died_in_line_holds_up_nobody_for_long(monkeypatch):
    """13: an entry without a process behind it ends by itself."""
    monkeypatch.setattr("fencing_sdk.abc.line.WAITER_TTL", 0.3)
    store = LedgerBackend()
    async with LockClient(store) as locks:
        lock = locks.lock("seats/42", ttl=20)
        holder = await lock.acquire()
        for number in range(5):
            await store.draw(Claim("seats/42", 20, owner=f"dead-{number}"))
        alive = asyncio.create_task(lock.acquire())
        await until(lambda: store.waiting("seats/42"))
        await holder.release()
        began = CLOCK.now()
        lease = await asyncio.wait_for(alive, 10)
        assert CLOCK.now() - began < 5
        await lease.release()
    assert store.tidy


async def test_mode_13_waiters_that_cannot_be_woken_neither_herd_nor_spin():
    """13: without notifications they poll with growing random pauses, and all of them are served."""
    link = FaultyBackend(LedgerBackend(), bells=False)
    served = []
    async with LockClient(link) as locks:
        lock = locks.lock("seats/42", ttl=30)
        holder = await lock.acquire()

        async def stand(number: int) -> None:
            async with lock:
                served.append(number)

        line = [asyncio.create_task(stand(number)) for number in range(40)]
        began = CLOCK.now()
        await asyncio.sleep(0.5)
        asked = len([call for call in link.calls if call[0] == "acquire"])
        assert asked <= 40 * (4 + 10 * (CLOCK.now() - began))
        for waiter in line[::2]:
            waiter.cancel()
        await holder.release()
        async with asyncio.timeout(20):
            await asyncio.gather(*line, return_exceptions=True)
        assert sorted(served) == list(range(1, 40, 2))


async def test_mode_13_patience_ends_in_an_error_and_in_no_entry():
    """13: whoever gives up by itself leaves the line."""
    store = LedgerBackend()
    log = Log()
    async with LockClient(store, observers=[log]) as locks:
        async with locks.lock("seats/42", ttl=20):
            impatient = locks.lock("seats/42", ttl=20, wait=0.2)

            async def wait() -> AcquireTimeoutError:
                with pytest.raises(AcquireTimeoutError) as gave_up:
                    await impatient.acquire()
                return gave_up.value

            errors = await asyncio.gather(*(wait() for _ in range(20)))
            assert all(0.2 <= error.waited < 5 for error in errors)
            await until(lambda: not store.waiting("seats/42"))
        assert len(log.of(Acquired)) == 1
    assert store.tidy
