"""What the fixtures of the plugin do: in a world, and in the event loop of somebody else's tests."""

import asyncio
import contextlib

import pytest
from inside import state_of

from fencing_sdk import (
    FencingError,
    LeaseLostError,
    LockClient,
    UsageError,
    connect,
    current_lease,
)
from fencing_sdk._engine import acquisition
from fencing_sdk.abc import Place
from fencing_sdk.testing import World

pytest_plugins = ["fencing_sdk.testing.plugin"]

NAME = "seats/42"


class Worker:
    """The code under test: it works for a while under the lock, and remembers what became of it."""

    def __init__(self, *, ttl: float = 10.0, work: float = 3.0) -> None:
        self.ttl = ttl
        self.work = work
        self.under_lock = lambda: None
        self.done: list[str] = []

    async def __call__(self, locks: LockClient, who: str) -> None:
        async with locks.lock(NAME, ttl=self.ttl) as lease:
            self.under_lock()
            await asyncio.sleep(self.work)
            self.done.append(f"{who} {lease.token:d}")


@pytest.fixture
def worker() -> Worker:
    return Worker()


# Pauses.


def test_a_paused_client_runs_nothing_and_has_lost_its_lock_when_the_block_begins(lock_world, pause, worker):
    ada = lock_world.client("Ada")
    work = ada.start(worker, ada.locks, "Ada")
    lock_world.sleep(1)
    assert lock_world.holder(NAME) == "Ada"
    with pause(ada):
        assert ada.paused
        assert lock_world.holder(NAME) is None
        lock_world.sleep(100)
        assert not worker.done
    assert not ada.paused
    with pytest.raises(LeaseLostError):
        lock_world.finish(work)
    assert not worker.done


def test_a_pause_lasts_until_the_last_of_several_locks_is_gone(lock_world, pause):
    ada = lock_world.client("Ada")
    leases = [ada.acquire(name, ttl=ttl) for name, ttl in (("a", 5), ("b", 60), ("c", 20))]
    with pause(ada):
        assert [lock_world.holder(lease.name) for lease in leases] == [None] * 3
    assert not any(lease.held for lease in leases)


def test_a_grant_that_the_client_does_not_know_of_is_outlasted_too(lock_world, pause):
    ada = lock_world.client("Ada")
    ada.acquire("a", ttl=1)
    ada.start(ada.locks.lock("b", ttl=30).acquire)
    lock_world.sleep(0.0005)  # the request has left, and travels twice as long
    with pause(ada):
        assert any("token 2" in line for line in lock_world.history)
        assert lock_world.holder("b") is None


def test_a_pause_of_a_client_that_holds_nothing_would_show_nothing(lock_world, pause, worker):
    ada = lock_world.client("Ada")
    ada.run(worker, ada.locks, "Ada")
    with pytest.raises(UsageError, match=r"'Ada' holds no lock at this moment.*pass seconds="), pause(ada):
        pytest.fail("the block ran")
    assert not ada.paused


def test_a_pause_may_be_too_short_to_lose_anything(lock_world, pause, worker):
    ada = lock_world.client("Ada")
    work = ada.start(worker, ada.locks, "Ada")
    lock_world.sleep(1)
    begin = lock_world.now
    with pause(ada, seconds=2):
        assert lock_world.now == pytest.approx(begin + 2)
    lock_world.finish(work)
    assert worker.done == ["Ada 1"]


def test_a_client_goes_on_although_the_block_failed(lock_world, pause, worker):
    ada = lock_world.client("Ada")
    work = ada.start(worker, ada.locks, "Ada")
    lock_world.sleep(1)
    with pytest.raises(ZeroDivisionError), pause(ada):
        _ = 1 / 0
    assert not ada.paused
    with pytest.raises(LeaseLostError):
        lock_world.finish(work)


def test_a_client_of_another_world_is_refused(lock_world, pause):
    with World() as other:
        stranger = other.client("Ada")
        with pytest.raises(UsageError, match="does not live in the world of this test"), pause(stranger):
            pytest.fail("the block ran")


# The same story with the pause one step later each time.


def tell(rounds, worker_of) -> list[str]:
    """Have Ada stopped in every round, and Bob work meanwhile; return what became of Ada's work."""
    seen = []
    for world, pause in rounds:
        worker, ada, bob = worker_of(), world.client("Ada"), world.client("Bob")
        work = ada.start(worker, ada.locks, "Ada")
        with pause(ada):
            world.sleep(0.01)  # nothing that she had sent is on its way any more
            assert world.holder(NAME) is None
            bob.run(worker, bob.locks, "Bob")
        try:
            world.finish(work)
            seen.append("done")
        except FencingError as error:
            seen.append(type(error).__name__)
        tokens = [int(entry.split()[1]) for entry in worker.done]
        assert tokens == sorted(tokens)
    return seen


def test_a_story_is_told_with_a_pause_at_every_step(pause_anywhere):
    seen = tell(pause_anywhere(), Worker)
    assert seen[0] == "done", "stopped before it began, it works after Bob"
    assert seen[-1] == "done", "the last round has no pause any more"
    assert seen.count("LeaseLostError") >= 5
    assert seen == tell(pause_anywhere(), Worker), "a world repeats itself"


def test_a_client_that_was_not_stopped_in_the_last_round_is_not_stopped_later(pause_anywhere):
    rounds = 0
    for world, pause in pause_anywhere():
        ada = world.client("Ada")
        work = ada.start(asyncio.sleep, 1)
        with pause(ada):
            pass
        world.finish(work)
        for _ in range(10):
            ada.run(asyncio.sleep, 1)
        rounds += 1
    assert rounds > 1


def test_code_that_writes_one_step_after_its_lease_is_caught(pause_anywhere):
    class Careless(Worker):
        async def __call__(self, locks, who):
            async with locks.lock(NAME, ttl=self.ttl) as lease:
                kept = lease.token
                await asyncio.sleep(self.work)
                self.done.append(f"{who} {kept:d}")

    with pytest.raises(AssertionError):
        tell(pause_anywhere(), Careless)


def test_a_round_without_a_pause_would_go_on_for_ever(pause_anywhere):
    with pytest.raises(UsageError, match=r"round 0 of pause_anywhere.. was without"):
        for world, _ in pause_anywhere():
            world.client("Ada")


def test_work_that_has_no_end_is_an_error_and_no_endless_test(pause_anywhere):
    with pytest.raises(UsageError, match=r"more than 5 steps.*at_most="):
        tell(pause_anywhere(at_most=5), Worker)


def test_a_round_ends_its_world_and_raises_what_nobody_waited_for(pause_anywhere):
    async def fail():
        await asyncio.sleep(1)
        raise RuntimeError("nobody waits for this")

    kept = []
    with pytest.raises(RuntimeError, match="nobody waits"):
        for world, pause in pause_anywhere():
            ada = world.client("Ada")
            kept.append(ada.start(fail))
            with pause(ada):
                pass


# Leases that end.


def test_a_lease_of_a_world_is_found_by_its_name_and_ends_now(lock_world, end, reason, worker):
    ada, bob = lock_world.client("Ada"), lock_world.client("Bob")
    work = ada.start(worker, ada.locks, "Ada")
    lock_world.sleep(1)
    begin = lock_world.now
    end(NAME)
    assert lock_world.now - begin < 1
    assert lock_world.holder(NAME) is None
    with pytest.raises(LeaseLostError) as raised:
        lock_world.finish(work)
    assert raised.value.reason is reason
    assert not worker.done
    assert bob.acquire(NAME, wait=0).token == 2


def test_only_the_lease_that_was_meant_ends(lock_world, end, reason):
    ada = lock_world.client("Ada")
    one, other = ada.acquire("a"), ada.acquire("b")
    end(one)
    assert one.lost_reason is reason
    assert lock_world.holder("a") is None
    lock_world.sleep(100)
    assert other.held, "its heartbeat goes on"


def test_a_name_means_the_lease_on_that_lock(lock_world, end, reason):
    ada = lock_world.client("Ada")
    leases = {name: ada.acquire(name) for name in "abc"}
    end("b")
    assert [lease.lost_reason for lease in leases.values()] == [None, reason, None]


def test_code_under_the_lock_can_end_its_own_lease(lock_world, end, reason, worker):
    ada = lock_world.client("Ada")
    worker.under_lock = lambda: end(current_lease())
    with pytest.raises(LeaseLostError) as raised:
        ada.run(worker, ada.locks, "Ada")
    assert raised.value.reason is reason
    assert lock_world.holder(NAME) is None


def test_a_name_that_nobody_holds_is_refused(lock_world, end):
    lock_world.client("Ada")
    with pytest.raises(UsageError, match="no client of this test's world holds lock 'seats/42'"):
        end(NAME)


def test_a_lease_of_a_world_that_is_over_is_refused(lock_world, end):
    ada = lock_world.client("Ada")
    lease = ada.acquire(NAME)
    ada.release(lease)
    with pytest.raises(UsageError, match="is over already"):
        end(lease)


@pytest.mark.parametrize("behind", ["memory", "faulty"])
async def test_a_lease_of_any_event_loop_ends_now(faulty_backend, end, reason, behind):
    backend = faulty_backend if behind == "faulty" else faulty_backend._backend
    events = []
    async with connect(backend, namespace="shop", observers=[events.append]) as locks:
        with pytest.raises(LeaseLostError) as raised:
            async with locks.lock(NAME, ttl=3600):
                end(current_lease())
                await asyncio.sleep(3600)
        assert raised.value.reason is reason
        assert [event.reason for event in events if event.kind == "lost"] == [reason]
        assert await locks.inspect(NAME) is None


async def test_the_next_in_line_is_woken_when_a_lease_ends(faulty_backend, end, monkeypatch):
    monkeypatch.setattr(acquisition, "_LONGEST_PAUSE", 3600.0)  # else it would find out by itself
    async with connect(faulty_backend._backend) as locks:
        lease = await locks.lock(NAME, ttl=3600).acquire()
        next_one = asyncio.create_task(locks.lock(NAME, ttl=3600).acquire())
        await asyncio.sleep(0.05)
        end(lease)
        following = await asyncio.wait_for(next_one, 20)
        assert following.token > state_of(lease).number
        await following.release()


async def test_a_lease_that_is_over_is_refused(faulty_backend, end):
    async with connect(faulty_backend) as locks:
        lease = await locks.lock(NAME).acquire()
        await lease.release()
        with pytest.raises(UsageError, match="is over already"):
            end(lease)


def test_a_lease_whose_event_loop_does_not_run_now_is_refused(faulty_backend, end):
    with asyncio.Runner() as runner:
        locks = connect(faulty_backend)
        runner.run(locks.__aenter__())
        lease = runner.run(locks.lock(NAME).acquire())
        with pytest.raises(UsageError, match="an event loop that does not run now"):
            end(lease)
        assert lease.held
        runner.run(locks.aclose())


async def test_a_store_that_takes_no_orders_is_refused(end):
    class Foreign:
        modes, rings = {"lock"}, False
        end = tickets = names = None

        async def draw(self, claim, **options):
            return Place(1)

        async def keep(self, tickets):
            return []

        async def give_back(self, claim, **options): ...

        def listen(self, claim, bell):
            return lambda: None

        async def aclose(self): ...

    async with connect(Foreign()) as locks:
        lease = await locks.lock(NAME).acquire()
        with pytest.raises(UsageError, match="Foreign has no way to end a lease"):
            end(lease)
        assert lease.held
        await lease.release()


async def test_a_faulty_backend_is_a_new_one_for_every_test(faulty_backend):
    async with connect(faulty_backend) as locks:
        async with locks.lock(NAME) as lease:
            assert lease.token == 1
    with contextlib.suppress(UsageError):
        await locks.inspect(NAME)
