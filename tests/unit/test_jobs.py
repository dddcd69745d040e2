"""``@locks.job``: of the calls that come together one runs, and the lock stays taken for a while afterwards."""

import asyncio
import contextlib
import inspect
from dataclasses import replace
from functools import partial

import anyio
import pytest
from inside import LoopClock, memory_on, on_clock
from looking import holder
from virtual_time import block, in_virtual_time, now, settle

from fencing_sdk import (
    BackendUnavailableError,
    ConfigurationError,
    LeaseLostError,
    LockClient,
    LockHeldError,
    LossReason,
    UsageError,
    current_lease,
)
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.events import JobEnded, JobOutcome, Released
from fencing_sdk.recipes import Ran, Skipped
from fencing_sdk.testing import FaultyBackend

OVER = pytest.approx


class Clients:
    """A store on virtual time, and clients that stand for processes."""

    def __init__(self):
        self.clock = LoopClock()
        self.memory = memory_on(self.clock, tokens="counter")
        self.store = FaultyBackend(self.memory)
        self.events = []

    def client(self, **options):
        return on_clock(LockClient(self.store, observers=[self.events.append], **options), self.clock)

    @contextlib.contextmanager
    def down(self):
        """The store answers nothing meanwhile."""
        for operation in ("acquire", "renew", "release"):
            self.store.fail(operation)
        try:
            yield
        finally:
            self.store.heal()

    def outcomes(self):
        return [event.outcome.value for event in self.events if isinstance(event, JobEnded)]

    def heard(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    async def freed(self, name="nightly"):
        """Wait until the lock is free; return when."""
        for _ in range(100):
            found = await holder(self.memory, name)
            if found is None:
                return now()
            await asyncio.sleep(max(found.remaining, 0.001))
        return pytest.fail(f"{name} stays taken")


@pytest.fixture
def clients():
    return Clients()


def nightly(locks, seconds=1.0, *, at_least_for=60, **options):
    @locks.job("nightly", at_least_for=at_least_for, **options)
    async def run(value=7):
        await asyncio.sleep(seconds)
        return value

    return run


# What a call returns.


@in_virtual_time
async def test_of_two_calls_one_runs_and_the_other_is_told_when_to_ask_again(clients):
    async with clients.client() as a, clients.client() as b:
        ran, skipped = await asyncio.gather(nightly(a)(), nightly(b)())
        assert ran == Ran(7, 1, OVER(1.0))
        assert skipped == Skipped("nightly", OVER(15.0))
        later = await nightly(b)()
        assert later == Skipped("nightly", OVER(59.0, abs=1.0))
    assert clients.outcomes() == ["skipped", "ran", "skipped"]


@in_virtual_time
async def test_the_lock_stays_taken_until_at_least_for_after_the_grant(clients):
    async with clients.client() as locks:
        await nightly(locks)()
        assert 60 <= await clients.freed() <= 62
        assert isinstance(await nightly(locks)(), Ran)


@in_virtual_time
async def test_it_outlives_the_client_and_is_not_renewed(clients):
    async with clients.client() as locks:
        await nightly(locks)()
        calls = len(clients.store.calls)
        await asyncio.sleep(30)
        assert len(clients.store.calls) == calls
    assert 60 <= await clients.freed() <= 62


@in_virtual_time
async def test_a_run_that_takes_longer_gives_its_lock_back_at_once(clients):
    async with clients.client() as locks:
        assert await nightly(locks, 61)() == Ran(7, 1, OVER(61))
        assert await clients.freed() == OVER(61)


@in_virtual_time
async def test_the_time_left_may_be_shorter_than_the_ttl(clients):
    async with clients.client() as locks:
        await nightly(locks, 58)()
        assert 60 <= await clients.freed() <= 60.1


@in_virtual_time
async def test_a_store_whose_clock_is_quick_keeps_the_lock_long_enough(clients):
    """The store is asked for longer, by the drift that the client allows for."""

    class Quick(LoopClock):
        def now(self):
            return super().now() * 1.01

    clients.memory = memory_on(Quick(), tokens="counter")
    clients.store = FaultyBackend(clients.memory)
    async with clients.client() as locks:
        await nightly(locks)()
        while isinstance(await nightly(locks)(), Skipped):
            await asyncio.sleep(0.1)
            assert now() < 70
        assert now() >= 60


@in_virtual_time
async def test_the_end_of_the_lease_is_told_once_and_with_the_time_that_is_left(clients):
    async with clients.client() as locks:
        await nightly(locks)()
        await nightly(locks, 61, at_least_for=60)() if await clients.freed() else None
    parked, released = clients.heard(Released)
    assert (parked.confirmed, parked.kept_for, parked.held_for) == (True, OVER(59), OVER(1))
    assert (released.confirmed, released.kept_for) == (True, 0.0)
    assert [event.kind for event in clients.events].count("acquired") == 2


@in_virtual_time
async def test_every_call_is_told_with_the_numbers_of_its_lease(clients):
    async with clients.client() as locks:
        await nightly(locks, 2)()
        await nightly(locks)()
    ran, skipped = clients.heard(JobEnded)
    assert (ran.name, ran.outcome, ran.token, ran.held_for) == ("nightly", JobOutcome.RAN, 1, OVER(2))
    assert ran.holder == clients.heard(Released)[0].holder
    assert (skipped.outcome, skipped.token, skipped.holder) == (JobOutcome.SKIPPED, None, None)


# Errors.


@in_virtual_time
async def test_a_run_that_fails_may_keep_the_lock_too_and_its_error_leaves_as_it_is(clients):
    mine = ValueError("mine")
    async with clients.client() as locks:

        @locks.job("nightly", at_least_for=60, at_least_on="any")
        async def fail():
            raise mine

        with pytest.raises(ValueError) as left:
            await fail()
        assert left.value is mine
        assert not hasattr(mine, "__notes__")
        assert isinstance(await fail(), Skipped)
    assert clients.outcomes() == ["failed", "skipped"]
    assert await clients.freed() >= 60


@in_virtual_time
async def test_a_run_that_is_cancelled_may_keep_the_lock_too(clients):
    async with clients.client() as locks:
        task = asyncio.create_task(nightly(locks, 30, at_least_on="any")())
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert now() == OVER(1)
    assert clients.outcomes() == ["failed"]
    assert await clients.freed() >= 60


@pytest.mark.parametrize("mine", [SystemExit(143), KeyboardInterrupt()], ids=repr)
@in_virtual_time
async def test_a_run_that_ends_the_process_may_keep_the_lock_too(clients, mine):
    async with clients.client() as locks:

        @locks.job("nightly", at_least_for=60, at_least_on="any")
        async def end(error=None):
            if error is not None:
                raise error

        with pytest.raises(type(mine)) as left:
            await end(mine)
        assert left.value is mine
        assert not hasattr(mine, "__notes__")
        assert isinstance(await end(), Skipped)
    assert clients.outcomes() == ["failed", "skipped"]
    assert await clients.freed() >= 60


@in_virtual_time
async def test_a_run_that_ends_the_process_while_the_store_is_down_holds_it_up_for_three_seconds(clients):
    async with clients.client() as locks:

        @locks.job("nightly", at_least_for=60, at_least_on="any", ttl=300)
        async def end():
            clients.store.fail("release")
            raise SystemExit(143)

        with pytest.raises(SystemExit) as left:
            await end()
        assert now() == pytest.approx(3.0)
        assert "did not confirm" in left.value.__notes__[0]
        asked = len(clients.store.calls)
    assert clients.outcomes() == ["lost"]
    assert len(clients.store.calls) <= asked + 3, "a client that closes tries once more, and does not spin"


@in_virtual_time
async def test_a_run_that_ends_the_process_while_the_store_is_away_for_a_moment_keeps_the_lock(clients):
    async with clients.client() as locks:

        @locks.job("nightly", at_least_for=60, at_least_on="any", ttl=30)
        async def end():
            clients.store.fail("release")
            asyncio.get_running_loop().call_later(1.2, clients.store.heal)
            raise SystemExit(143)

        with pytest.raises(SystemExit) as left:
            await end()
        assert not hasattr(left.value, "__notes__")
    assert clients.outcomes() == ["failed"]
    assert await clients.freed() >= 60


@pytest.mark.parametrize("how", ["by a scope", "twice"])
@in_virtual_time
async def test_a_run_that_is_cancelled_again_while_its_lock_is_parked_is_told_as_lost(clients, how):
    """A scope of anyio repeats its cancellation until the task ends."""
    async with clients.client() as locks:

        @locks.job("nightly", at_least_for=60, at_least_on="any", ttl=10)
        async def wait():
            clients.store.fail("release")
            await asyncio.sleep(1e6)

        if how == "by a scope":
            with anyio.move_on_after(1):
                await wait()
        else:
            task = asyncio.create_task(wait())
            await asyncio.sleep(1)
            task.cancel()
            await asyncio.sleep(2.9)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert now() <= 4.0
    assert clients.outcomes() == ["lost"]


@pytest.mark.parametrize("how", ["returns", "is cancelled", "ends the process"])
@in_virtual_time
async def test_a_run_whose_time_is_over_before_the_store_answers_has_nothing_to_keep(clients, how):
    async with clients.client() as locks:

        @locks.job("nightly", at_least_for=60, at_least_on="any", ttl=30)
        async def work():
            await asyncio.sleep(58)
            clients.store.fail("release")
            if how == "ends the process":
                raise SystemExit(143)
            await asyncio.sleep(0 if how == "returns" else 1e6)

        if how == "is cancelled":
            asyncio.get_running_loop().call_later(58.5, asyncio.current_task().cancel)
        with contextlib.suppress(asyncio.CancelledError, SystemExit):
            await work()
        assert now() < 63
        clients.store.heal()
    assert clients.outcomes() == (["ran"] if how == "returns" else ["failed"])


@pytest.mark.parametrize("how", ["raises it itself", "is closed"])
@in_virtual_time
async def test_a_run_that_ends_by_generator_exit_has_failed_and_may_keep_the_lock(clients, how):
    """As a coroutine that the garbage collector closes: nothing in it can be awaited any more."""
    async with clients.client() as locks:
        never = asyncio.get_running_loop().create_future()

        @locks.job("nightly", at_least_for=60, at_least_on="any")
        async def work():
            if how == "raises it itself":
                raise GeneratorExit
            await never

        running = asyncio.create_task(work())
        await asyncio.sleep(1)
        if how == "is closed":
            with pytest.raises(UsageError, match="left in another"):  # by no task at all
                running.get_coro().close()
            never.set_result(None)
        await asyncio.wait([running])
        assert running.exception() is not None
        assert clients.outcomes() == ["failed"]
        assert isinstance(await nightly(locks)(), Skipped)
    assert 60 <= await clients.freed() <= 62


@pytest.mark.parametrize("keeps", ["its lease", "another handle of it"])
@in_virtual_time
async def test_a_function_that_releases_its_own_lease_leaves_the_lock_taken(clients, keeps):
    async with clients.client() as locks:

        @locks.job("nightly", at_least_for=60)
        async def work():
            lease = current_lease() if keeps == "its lease" else current_lease("nightly")
            await lease.release()
            await lease.release()
            with pytest.raises(LeaseLostError):
                lease.check()
            assert await locks.lock("nightly").try_acquire() is None
            return "done"

        assert await work() == Ran("done", 1, OVER(0.0))
        assert await nightly(locks)() == Skipped("nightly", OVER(60.0, abs=1.0))
    assert clients.outcomes() == ["ran", "skipped"]
    assert 60 <= await clients.freed() <= 62


@in_virtual_time
async def test_a_function_that_releases_its_own_lease_is_told_that_the_store_did_not_confirm(clients):
    async with clients.client() as locks:

        @locks.job("nightly", at_least_for=60)
        async def work():
            clients.store.fail("release")
            await current_lease().release()

        with pytest.raises(LeaseLostError, match="did not confirm"):
            await work()
        clients.store.heal()
    assert clients.outcomes() == ["lost"]


@in_virtual_time
async def test_a_cancellation_while_the_lock_is_parked_does_not_break_it_off(clients):
    async with clients.client() as locks:
        clients.store.delay("release", 0.5)
        task = asyncio.create_task(nightly(locks, 1)())
        await asyncio.sleep(1.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert now() == OVER(1.5)
    assert await clients.freed() >= 60


@in_virtual_time
async def test_an_error_of_the_function_about_another_lock_is_no_skip(clients):
    async with clients.client() as locks, locks.lock("other"):

        @locks.job("nightly", at_least_for=60)
        async def run():
            async with locks.lock("other", wait=0):
                pass

        with pytest.raises(LockHeldError):
            await run()
    assert clients.outcomes() == ["failed"]


@in_virtual_time
async def test_a_lost_lease_is_an_error_and_the_lock_is_not_kept(clients):
    async with clients.client() as locks:
        task = asyncio.create_task(nightly(locks, 30)())
        await asyncio.sleep(1)
        clients.memory.take_away("nightly")
        with pytest.raises(LeaseLostError):
            await task
        assert await holder(clients.memory, "nightly") is None
        assert isinstance(await nightly(locks)(), Ran)
    assert clients.outcomes() == ["lost", "ran"]


@in_virtual_time
async def test_the_loss_of_another_lock_is_a_failure(clients):
    clients.store = clients.memory  # which tells at once
    async with clients.client() as locks:

        @locks.job("nightly", at_least_for=60, at_least_on="any")
        async def run():
            async with locks.lock("other"):
                clients.memory.take_away("other")
                await asyncio.sleep(1)

        with pytest.raises(LeaseLostError, match="other"):
            await run()
    assert clients.outcomes() == ["failed"]
    assert await clients.freed() >= 60


@in_virtual_time
async def test_a_run_that_hangs_is_lost_at_max_hold(clients):
    async with clients.client() as locks:
        with pytest.raises(LeaseLostError, match="max_hold"):
            await nightly(locks, 9999, max_hold=120)()
        assert now() == OVER(120)
    assert clients.outcomes() == ["lost"]


@in_virtual_time
async def test_a_run_that_was_frozen_past_its_deadline_is_lost_even_if_it_has_returned(clients):
    async with clients.client() as locks:

        @locks.job("nightly", at_least_for=60)
        async def run():
            block(20)
            return 7

        with pytest.raises(LeaseLostError):
            await run()
    assert clients.outcomes() == ["lost"]


@in_virtual_time
async def test_a_store_that_is_down_is_told_to_the_caller(clients):
    async with clients.client() as locks:
        with clients.down():
            with pytest.raises(BackendUnavailableError):
                await nightly(locks)()
    assert clients.outcomes() == ["failed"]


@in_virtual_time
async def test_a_call_within_a_call_is_skipped(clients):
    async with clients.client() as locks:

        @locks.job("nightly", at_least_for=60)
        async def run(depth):
            return await run(depth + 1) if depth == 0 else depth

        assert (await run(0)).value == Skipped("nightly", OVER(15))


# Parking, when the store does not answer.


@in_virtual_time
async def test_a_short_outage_at_the_end_is_ridden_out(clients):
    async with clients.client() as locks:
        task = asyncio.create_task(nightly(locks, 1)())
        await asyncio.sleep(0.9)
        with clients.down():
            await asyncio.sleep(5)
        assert await task == Ran(7, 1, OVER(1.0))
    assert clients.outcomes() == ["ran"]
    assert await clients.freed() >= 60


@in_virtual_time
async def test_a_store_that_does_not_confirm_in_time_makes_the_run_a_loss(clients):
    """Nothing is known then about how long the lock stays taken."""
    async with clients.client() as locks:
        task = asyncio.create_task(nightly(locks, 1)())
        await asyncio.sleep(0.9)
        with clients.down():
            with pytest.raises(LeaseLostError, match="did not confirm") as loss:
                await task
            assert now() <= 15
        assert loss.value.reason is LossReason.EXPIRED
    assert clients.outcomes() == ["lost"]
    (released,) = clients.heard(Released)
    assert (released.confirmed, released.kept_for) == (False, 0.0)


@in_virtual_time
async def test_a_loss_that_shows_while_the_lock_is_parked_is_a_loss(clients):
    async with clients.client() as locks:
        task = asyncio.create_task(nightly(locks, 1)())
        await asyncio.sleep(0.9)
        clients.memory.take_away("nightly")
        with pytest.raises(LeaseLostError) as loss:
            await task
        assert loss.value.reason is LossReason.REVOKED
    assert clients.outcomes() == ["lost"]


@in_virtual_time
async def test_an_error_of_the_function_is_told_of_a_lock_that_is_not_kept(clients):
    mine = ValueError("mine")
    async with clients.client() as locks:

        @locks.job("nightly", at_least_for=60)
        async def fail():
            clients.memory.take_away("nightly")
            raise mine

        with pytest.raises(ValueError) as left:
            await fail()
    assert left.value is mine
    assert mine.__notes__ == ["fencing_sdk: the lease on 'nightly' (token 1) was lost too: revoked"]
    assert clients.outcomes() == ["lost"], "the lock is not kept"


@in_virtual_time
async def test_no_token_can_be_read_once_the_lock_is_being_parked(clients):
    """The time left may be shorter than what the deadline was made of."""
    seen = []
    async with clients.client() as locks:

        @locks.job("nightly", at_least_for=60)
        async def run():
            lease = current_lease()

            async def child():
                await asyncio.sleep(0.5)
                seen.append(lease.held)
                with pytest.raises(LeaseLostError):
                    _ = lease.token

            task = asyncio.create_task(child())
            clients.store.delay("release", 1.0)
            return task

        await (await run()).value
    assert seen == [False]


class Overtaking(MemoryBackend):
    """Executes the first renewal that it is sent *delay* seconds later, and answers it then."""

    def __init__(self, delay):
        super().__init__(tokens="counter")
        self.delay, self.renewals = delay, 0

    async def keep(self, tickets):
        self.renewals += 1
        if self.renewals == 1:
            await asyncio.shield(asyncio.ensure_future(self.late(tickets)))
        return await super().keep(tickets)

    async def late(self, tickets):
        await asyncio.sleep(self.delay)
        await super().keep(tickets)


@pytest.mark.parametrize("delay", [0.5, 2.9, 8.0])
@in_virtual_time
async def test_a_renewal_that_arrives_after_the_parking_does_not_shorten_it(clients, delay):
    """The renewal would set the ttl of the lease again, and free the lock after 15 s."""
    clients.store = clients.memory = memory_on(clients.clock, partial(Overtaking, delay))
    async with clients.client() as locks:
        await nightly(locks, 3.2)()  # the heartbeat's first renewal leaves at 3.0
        await asyncio.sleep(15)
    assert await clients.freed() >= 60


@in_virtual_time
async def test_a_renewal_that_arrives_long_after_the_process_has_ended_does_not_free_the_lock(clients):
    """The ticket that stands there has an owner that no process has, so no client has to be there."""
    clients.store = clients.memory = memory_on(clients.clock, partial(Overtaking, 20.0))
    async with clients.client() as locks:
        await nightly(locks, 3.2)()
    assert now() < 9
    await asyncio.sleep(20)
    assert await clients.freed() >= 59


@in_virtual_time
async def test_answers_that_are_lost_until_the_time_is_over_are_no_loss(clients):
    """The ticket stands there under another owner, and the release of the former one is refused."""
    async with clients.client() as locks:
        clients.store.lose_reply("release")
        outcome = await nightly(locks, 1.0, at_least_for=2.0)()
    assert isinstance(outcome, Ran)
    assert now() < 5, "a release holds its caller up for two seconds"
    assert await holder(clients.memory, "nightly") is None


@in_virtual_time
async def test_a_release_that_was_not_answered_before_the_time_was_over_is_not_confirmed(clients):
    async with clients.client() as locks:
        asyncio.get_running_loop().call_later(0.9, clients.store.fail, "release")
        await nightly(locks, 1.0, at_least_for=2.0)()
        assert now() >= 4, "a release holds its caller up for two seconds"
        clients.store.heal()
    (released,) = clients.heard(Released)
    assert (released.confirmed, released.kept_for) == (False, 0)


# What a job is made of.


@pytest.mark.every_loop
async def test_a_job_runs_on_every_loop():
    async with LockClient(MemoryBackend()) as locks:
        calls = [nightly(locks, 0.01)() for _ in range(3)]
        outcomes = await asyncio.gather(*calls)
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Ran", "Skipped", "Skipped"]


def test_the_function_of_a_job_stays_what_it_was():
    locks = Clients().client()

    async def report(tenant: int, *, scale: float = 1.0) -> str:
        """Build a report."""

    job = locks.job("report/{tenant}", at_least_for=1)(report)
    assert job.__wrapped__ is report
    assert (job.__name__, job.__doc__, job.__module__) == ("report", "Build a report.", __name__)
    assert inspect.iscoroutinefunction(job)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nightly", {"at_least_for": 0}, "at_least_for must be more than 0"),
        ("nightly", {"at_least_for": -1}, "at_least_for"),
        ("nightly", {"at_least_for": 86_401}, "at_least_for must be at most"),
        ("nightly", {"at_least_for": True}, "at_least_for must be seconds"),
        ("nightly", {"at_least_for": None}, "at_least_for must be seconds"),
        ("nightly", {"at_least_for": 60, "wait": 5}, "takes no wait"),
        ("nightly", {"at_least_for": 60, "wait": 0}, "takes no wait"),
        ("nightly", {"at_least_for": 60, "ttl": 0}, "ttl"),
        ("", {"at_least_for": 60}, "name"),
    ],
)
def test_bad_input_is_refused_when_decorated(name, options, message):
    with pytest.raises(ConfigurationError, match=message):
        Clients().client().job(name, **options)


@pytest.mark.parametrize("function", [lambda: None, print, Clients])
def test_what_is_no_coroutine_function_is_refused(function):
    with pytest.raises(ConfigurationError, match="async def"):
        Clients().client().job("nightly", at_least_for=60)(function)


def test_outcomes_are_plain_values():
    ran = Ran(7, 1, 0.5)
    assert replace(ran, value=8).value == 8
    assert repr(Skipped("a", None)) == "Skipped(name='a', retry_after=None)"
    with contextlib.suppress(AttributeError):
        ran.value = 9
    assert ran.value == 7


@in_virtual_time
async def test_a_drain_waits_for_a_run_and_keeps_its_lock(clients):
    async with clients.client() as locks:
        task = asyncio.create_task(nightly(locks, 5)())
        await settle()
        assert await locks.drain(within=25)
        assert now() == OVER(5)
        assert isinstance(await task, Ran)
    assert await clients.freed() >= 60
