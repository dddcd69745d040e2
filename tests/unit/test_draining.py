"""A client that drains: nothing begins, waiters leave, bodies go on, and each lock is released after its body."""

import asyncio
import contextlib
import sys
from datetime import timedelta

import anyio
import pytest
from inside import LoopClock, memory_on, on_clock
from looking import holder
from virtual_time import in_virtual_time, now, settle

from fencing_sdk import ConfigurationError, DrainingError, LeaseLostError, LockClient, LossReason, UsageError
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.events import Acquired, NotAcquired, NotAcquiredReason, Renewed
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.testing import FaultyBackend

TTL = 10.0
GRACE = 5.0
"""Seconds after the bound for which a body that was cancelled is waited for."""


class TwoClients:
    """One that drains, and one that waits for the same locks."""

    def __init__(self, *, in_line: bool = False, **options) -> None:
        self.store = memory_on(LoopClock())
        self.network = FaultyBackend(self.store)
        self.events = []
        self.ours = on_clock(
            LockClient(self.store if in_line else self.network, observers=[self.events.append], **options), LoopClock()
        )
        self.theirs = on_clock(LockClient(self.store), LoopClock())
        self.log: list[str] = []

    async def __aenter__(self):
        await self.theirs.__aenter__()
        await self.ours.__aenter__()
        return self

    async def __aexit__(self, *_):
        await self.ours.aclose()
        await self.theirs.aclose()

    async def next_holder(self, name: str = "a") -> float:
        async with self.theirs.lock(name, ttl=TTL):
            self.log.append("next holder")
            return now()

    async def body(self, seconds: float, name: str = "a") -> None:
        async with self.ours.lock(name, ttl=TTL) as lease:
            try:
                await asyncio.sleep(seconds)
                lease.check()
            finally:
                self.log.append("body ended")


@in_virtual_time
async def test_a_body_goes_on_and_is_renewed_until_it_ends():
    async with TwoClients() as clients:
        working = asyncio.create_task(clients.body(35))
        await asyncio.sleep(1)
        waiting = asyncio.create_task(clients.next_holder())
        await asyncio.sleep(0)
        assert await clients.ours.drain(within=60), "it ended by itself"
        assert now() == 35.0, "three and a half ttls"
        assert await waiting == 35.0
        assert clients.log == ["body ended", "next holder"]
        assert sum(isinstance(event, Renewed) for event in clients.events) > 10
        await working


@in_virtual_time
async def test_no_acquisition_begins():
    async with TwoClients() as clients:
        assert not clients.ours.draining
        assert await clients.ours.drain(within=5)
        assert clients.ours.draining
        assert now() == 0.0, "nothing was held"
        lock = clients.ours.lock("a")
        for acquire in (lock.acquire, lock.try_acquire, lock.__aenter__, clients.ours.locking("a")(settle)):
            with pytest.raises(DrainingError) as refused:
                await acquire()
            assert (refused.value.name, refused.value.waited) == ("a", 0.0)
        assert not clients.events
        assert await clients.ours.inspect("a") is None, "what asks for nothing goes on"


@pytest.mark.parametrize("patience", [None, 1000])
@pytest.mark.parametrize("in_line", [True, False])
@in_virtual_time
async def test_a_waiter_leaves_at_once(in_line, patience):
    async with TwoClients(in_line=in_line) as clients:
        async with clients.theirs.lock("a", ttl=TTL):
            lock = clients.ours.lock("a", wait=patience, backoff=lambda _: 100.0)
            waiting = asyncio.create_task(lock.acquire())
            await asyncio.sleep(3)
            assert await clients.ours.drain(within=60)
            assert now() == 3.0
            assert waiting.done(), "and has left when the drain is over"
            with pytest.raises(DrainingError) as refused:
                await waiting
            assert refused.value.waited == 3.0
            [ended] = [event for event in clients.events if isinstance(event, NotAcquired)]
            assert ended.reason is NotAcquiredReason.DRAINING
            other = asyncio.create_task(clients.next_holder())
            await asyncio.sleep(1)
        assert await other == 4.0, "no place of ours is in front of the others"


@in_virtual_time
async def test_a_waiter_leaves_while_the_store_gives_no_answer():
    async with TwoClients() as clients:
        clients.network.hang("acquire")
        waiting = asyncio.create_task(clients.ours.lock("a", ttl=TTL).acquire())
        await asyncio.sleep(1)
        assert await clients.ours.drain(within=60)
        assert now() == 1.0
        with pytest.raises(DrainingError):
            await waiting
        clients.network.heal()
    assert await holder(clients.store, "a") is None, "nor is anything left of the request"


@pytest.mark.parametrize("turns", range(8))
@in_virtual_time
async def test_a_grant_that_comes_when_the_drain_has_begun_is_released(turns):
    """In whichever turn of the loop between the answer and its caller the drain begins."""
    async with TwoClients() as clients:
        clients.network.delay("acquire", 1)
        acquiring = asyncio.create_task(clients.ours.lock("a", ttl=TTL).acquire())
        await asyncio.sleep(1)
        for _ in range(turns):
            await asyncio.sleep(0)
        granted = [event for event in clients.events if isinstance(event, Acquired)]
        clients.ours._opened().draining.begin(60)
        await settle()
        if granted:
            await (await acquiring).release()
        else:
            with pytest.raises(DrainingError):
                await acquiring
        assert [event for event in clients.events if isinstance(event, Acquired)] == granted
        await settle()
        assert await holder(clients.store, "a") is None


@in_virtual_time
async def test_a_lease_whose_fences_are_being_raised_begins_no_body():
    class SlowGuard(MemoryGuard):
        async def raise_to(self, resource, token):
            await asyncio.sleep(2)
            await super().raise_to(resource, token)

    async with TwoClients() as clients:
        acquiring = asyncio.create_task(clients.ours.lock("a", fences=[SlowGuard()]).acquire())
        await asyncio.sleep(1)
        await clients.ours.drain(within=60)
        assert now() == 2.0
        with pytest.raises(DrainingError):
            await acquiring
        assert await holder(clients.store, "a") is None


@in_virtual_time
async def test_an_outer_cancellation_wins_over_the_drain():
    async with TwoClients() as clients, clients.theirs.lock("a"):
        waiting = asyncio.create_task(clients.ours.lock("a").acquire())
        await asyncio.sleep(1)
        draining = asyncio.create_task(clients.ours.drain(within=60))
        await asyncio.sleep(0)
        waiting.cancel()
        await draining
        with pytest.raises(asyncio.CancelledError):
            await waiting


@in_virtual_time
async def test_the_task_that_waited_is_not_left_cancelled():
    async with TwoClients() as clients, clients.theirs.lock("a"):

        async def waits() -> int:
            task = asyncio.current_task()
            assert task is not None
            with pytest.raises(DrainingError):
                await clients.ours.lock("a").acquire()
            await asyncio.sleep(1)
            return task.cancelling()

        waiting = asyncio.create_task(waits())
        await asyncio.sleep(1)
        await clients.ours.drain(within=60)
        assert await waiting == 0


@in_virtual_time
async def test_a_timeout_around_the_wait_and_the_drain_do_not_mix():
    async with TwoClients() as clients, clients.theirs.lock("a"):

        async def waits() -> str:
            try:
                with anyio.move_on_after(100):
                    async with asyncio.timeout(100):
                        await clients.ours.lock("a").acquire()
            except DrainingError:
                return "draining"
            return "timed out"

        waiting = asyncio.create_task(waits())
        await asyncio.sleep(1)
        await clients.ours.drain(within=60)
        assert await waiting == "draining"


@in_virtual_time
async def test_at_the_bound_bodies_are_cancelled_and_locks_released_after_them():
    async with TwoClients() as clients:

        async def body():
            async with clients.ours.lock("a", ttl=TTL):
                try:
                    await asyncio.sleep(3600)
                finally:
                    with anyio.CancelScope(shield=True):
                        await asyncio.sleep(1)
                    clients.log.append("cleaned up")

        working = asyncio.create_task(body())
        await asyncio.sleep(1)
        waiting = asyncio.create_task(clients.next_holder())
        assert not await clients.ours.drain(within=25), "it was cut short"
        assert now() == pytest.approx(27, abs=0.01)
        assert await waiting == pytest.approx(27, abs=0.01), "as soon as the body has ended, and not by the ttl"
        assert clients.log == ["cleaned up", "next holder"]
        with pytest.raises(LeaseLostError, match="drained") as left:
            await working
        assert left.value.reason is LossReason.DRAINED


@in_virtual_time
async def test_a_body_that_goes_on_after_the_bound_keeps_its_lock(caplog):
    async with TwoClients() as clients:

        async def body():
            async with clients.ours.lock("a", ttl=100):
                with anyio.CancelScope(shield=True):
                    await asyncio.sleep(30)
                clients.log.append("body ended")

        working = asyncio.create_task(body())
        await asyncio.sleep(1)
        waiting = asyncio.create_task(clients.next_holder())
        assert not await clients.ours.drain(within=2)
        assert now() == pytest.approx(3 + GRACE), "and the drain is bounded"
        assert "go on" in caplog.text
        await waiting
        assert clients.log == ["body ended", "next holder"]
        with contextlib.suppress(LeaseLostError):
            await working


@in_virtual_time
async def test_calls_after_the_bound_do_not_lengthen_the_wait_for_a_body_that_goes_on():
    async with TwoClients() as clients:

        async def body():
            async with clients.ours.lock("a", ttl=100):
                with anyio.CancelScope(shield=True):
                    await asyncio.sleep(30)

        working = asyncio.create_task(body())
        await asyncio.sleep(1)
        first = asyncio.create_task(clients.ours.drain(within=0))
        await asyncio.sleep(GRACE / 2)
        assert not await clients.ours.drain(within=0)
        assert not await first
        assert now() == pytest.approx(1 + GRACE)
        with contextlib.suppress(LeaseLostError):
            await working


@in_virtual_time
async def test_a_second_call_brings_the_bound_forward_and_never_puts_it_off():
    async with TwoClients() as clients:
        working = asyncio.create_task(clients.body(3600))
        await asyncio.sleep(1)
        calls = [asyncio.create_task(clients.ours.drain(within=within)) for within in (50, timedelta(seconds=5), 500)]
        await asyncio.sleep(2)
        assert not working.done()
        assert await asyncio.gather(*calls) == [False, False, False]
        assert now() == 6.0
        with pytest.raises(LeaseLostError):
            await working


@in_virtual_time
async def test_a_second_call_without_patience_cancels_now():
    async with TwoClients() as clients:
        working = asyncio.create_task(clients.body(3600))
        await asyncio.sleep(1)
        draining = asyncio.create_task(clients.ours.drain(within=50))
        await asyncio.sleep(1)
        assert not await clients.ours.drain(within=0)
        assert not await draining
        assert now() == 2.0
        with pytest.raises(LeaseLostError):
            await working


@pytest.mark.every_loop
async def test_two_calls_without_patience_end_together():
    async with LockClient(MemoryBackend()) as locks:
        assert await asyncio.gather(locks.drain(within=0), locks.drain(within=0)) == [True, True]


@in_virtual_time
async def test_a_plain_handle_is_waited_for_until_the_bound():
    async with TwoClients() as clients:
        handles = [await clients.ours.lock(name, ttl=TTL).acquire() for name in "ab"]
        asyncio.get_running_loop().call_later(2, lambda: clients.log.append("released"))
        draining = asyncio.create_task(clients.ours.drain(within=5))
        await asyncio.sleep(2)
        await handles[0].release()
        assert not await draining
        assert now() == 5.0
        assert [handle.lost_reason for handle in handles] == [None, LossReason.DRAINED]
        await handles[1].release()


@in_virtual_time
async def test_cancelling_the_caller_stops_the_waiting_and_not_the_drain():
    async with TwoClients() as clients:
        working = asyncio.create_task(clients.body(3600))
        await asyncio.sleep(1)
        with anyio.move_on_after(1):
            await clients.ours.drain(within=5)
        assert now() == 2.0
        assert clients.ours.draining
        with pytest.raises(LeaseLostError):
            await working
        assert now() == 6.0


@in_virtual_time
async def test_the_store_has_confirmed_every_release_when_the_drain_is_over():
    async with TwoClients() as clients:
        working = [asyncio.create_task(clients.body(1)), asyncio.create_task(clients.body(2, "b"))]
        await asyncio.sleep(0.5)
        clients.network.delay("release", 1.5, times=1)
        await clients.ours.drain(within=60)
        assert now() == 2.5
        assert await holder(clients.store, "a") is None
        await asyncio.gather(*working)


# Workers, and what a body acquires


async def in_a_task_group(workers):
    async with asyncio.TaskGroup() as group:
        for worker in workers:
            group.create_task(worker)


async def in_a_group_of_anyio(workers):
    async def run(worker):
        await worker

    async with anyio.create_task_group() as group:
        for worker in workers:
            group.start_soon(run, worker)


async def gathered(workers):
    await asyncio.gather(*workers)


@pytest.mark.parametrize("run", [in_a_task_group, in_a_group_of_anyio, gathered])
@pytest.mark.parametrize("waits", [True, False])
@in_virtual_time
async def test_a_worker_that_is_refused_cuts_no_body_of_the_others(run, waits):
    """Its error would have the group cancel them."""
    async with TwoClients() as clients:

        async def works(name: str, seconds: float):
            while True:
                await clients.body(seconds, name)
                clients.log.append(f"{name} at {now():g}")

        workers = [works("a", 2), works("b", 20), works("c", 7), *([works("b", 1)] if waits else [])]
        working = asyncio.create_task(run(workers))
        await asyncio.sleep(1)
        assert await clients.ours.drain(within=25), "every body ended by itself"
        assert now() == 20.0
        with pytest.raises((DrainingError, ExceptionGroup)):
            await working
        assert now() == 20.0
        assert clients.log == ["body ended", "a at 2", "body ended", "c at 7", "body ended", "b at 20"]


@in_virtual_time
async def test_the_block_of_a_plain_handle_is_a_body_to_others_and_not_to_itself():
    async with TwoClients() as clients:

        async def works(name: str, seconds: float):
            async with await clients.ours.lock(name, ttl=TTL).acquire() as lease:
                await asyncio.sleep(seconds)
                lease.check()
                clients.log.append(f"{name} at {now():g}")
                await clients.ours.lock("c").acquire()

        working = asyncio.create_task(in_a_task_group([works("a", 2), works("b", 20)]))
        await asyncio.sleep(1)
        assert await clients.ours.drain(within=25)
        with pytest.raises(ExceptionGroup):
            await working
        assert clients.log == ["a at 2", "b at 20"]
        assert now() == 20.0


@in_virtual_time
async def test_a_refusal_comes_at_the_bound_if_bodies_go_on_until_then():
    async with TwoClients() as clients:
        working = asyncio.create_task(clients.body(3600))
        await asyncio.sleep(1)
        draining = asyncio.create_task(clients.ours.drain(within=25))
        await asyncio.sleep(0)
        with pytest.raises(DrainingError):
            await clients.ours.lock("b").acquire()
        assert now() == 26.0
        assert not await draining
        with pytest.raises(LeaseLostError):
            await working


@in_virtual_time
async def test_bodies_that_are_refused_do_not_wait_for_each_other():
    """They swallow their cancellation at the bound, and ask for another lock."""
    async with TwoClients() as clients:

        async def body(name: str):
            with contextlib.suppress(LeaseLostError):
                async with clients.ours.lock(name, ttl=100):
                    with anyio.CancelScope(shield=True):
                        await asyncio.sleep(11)
                        with pytest.raises(DrainingError):
                            await clients.ours.lock("c").acquire()
                    clients.log.append(f"{name} at {now():g}")

        bodies = [asyncio.create_task(body(name)) for name in "ab"]
        await asyncio.sleep(1)
        assert not await clients.ours.drain(within=10)
        await asyncio.gather(*bodies)
        assert clients.log == ["a at 11", "b at 11"]


@in_virtual_time
async def test_a_loop_that_asks_again_at_once_lets_others_run():
    async with TwoClients() as clients:
        assert await clients.ours.drain(within=5)

        async def asks():
            while True:
                with contextlib.suppress(DrainingError):
                    await clients.ours.lock("a").acquire()

        asking = asyncio.create_task(asks())
        await settle()
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()


@in_virtual_time
async def test_a_closing_ends_the_wait_of_those_who_are_refused():
    async with TwoClients() as clients:

        async def body():
            async with clients.ours.lock("a", ttl=TTL):
                with anyio.CancelScope(shield=True):
                    await asyncio.sleep(3600)

        working = asyncio.create_task(body())
        await asyncio.sleep(1)
        draining = asyncio.create_task(clients.ours.drain(within=600))
        await asyncio.sleep(0)
        asking = asyncio.create_task(clients.ours.lock("b").acquire())
        await asyncio.sleep(1)
        closing = asyncio.create_task(clients.ours.aclose())
        with pytest.raises(DrainingError):
            await asking
        assert now() == 2.0
        await closing
        working.cancel()
        await asyncio.wait([working, draining])


@pytest.mark.parametrize("asks", ["at once", "in a child", "waits"])
@in_virtual_time
async def test_what_a_body_acquires_is_a_part_of_what_runs(asks):
    async with TwoClients() as clients:
        theirs = await clients.theirs.lock("b", ttl=60).acquire()

        async def acquires():
            async with clients.ours.lock("b", ttl=TTL):
                clients.log.append(f"both at {now():g}")

        async def body():
            async with clients.ours.lock("a", ttl=TTL) as lease:
                if asks != "waits":
                    await asyncio.sleep(2)
                await (asyncio.create_task(acquires()) if asks == "in a child" else acquires())
                lease.check()

        working = asyncio.create_task(body())
        await asyncio.sleep(1)
        draining = asyncio.create_task(clients.ours.drain(within=25))
        await asyncio.sleep(4)
        await theirs.release()
        assert await draining
        await working
        assert clients.log == [f"both at {now():g}"]
        assert 5.0 <= now() < 11.0


@in_virtual_time
async def test_what_a_body_acquires_ends_with_it_at_the_bound():
    async with TwoClients(in_line=True) as clients, clients.theirs.lock("b", ttl=TTL):

        async def body():
            async with clients.ours.lock("a", ttl=TTL):
                with contextlib.suppress(DrainingError), anyio.CancelScope(shield=True):
                    async with clients.ours.lock("b"):
                        pass
                clients.log.append(f"refused at {now():g}")

        working = asyncio.create_task(body())
        await asyncio.sleep(1)
        assert not await clients.ours.drain(within=5)
        assert clients.log == ["refused at 6"], "shielded from the cancellation, and interrupted all the same"
        with pytest.raises(LeaseLostError):
            await working


@in_virtual_time
async def test_a_multilock_that_waits_is_no_body_under_its_first_lock():
    async with TwoClients() as clients, clients.theirs.lock("b", ttl=TTL):
        waiting = asyncio.create_task(clients.ours.multilock("a", "b").__aenter__())
        await asyncio.sleep(1)
        assert await clients.ours.drain(within=25)
        assert now() == 1.0
        with pytest.raises(DrainingError):
            await waiting
        assert await holder(clients.store, "a") is None


# At the end of the client


@in_virtual_time
async def test_a_client_with_drain_lets_bodies_end_before_it_is_closed():
    async with TwoClients(drain=25) as clients:
        working = asyncio.create_task(clients.body(20))
        await asyncio.sleep(1)
        await clients.ours.aclose()
        assert now() == 20.0
        await working


@in_virtual_time
async def test_a_client_with_drain_is_bounded_by_it():
    async with TwoClients(drain=25) as clients:
        working = asyncio.create_task(clients.body(3600))
        await asyncio.sleep(1)
        await clients.ours.aclose()
        assert now() == 26.0
        with pytest.raises(LeaseLostError) as lost:
            await working
        assert lost.value.reason is LossReason.DRAINED


@in_virtual_time
async def test_a_cancellation_while_it_drains_closes_the_client_now():
    async with TwoClients(drain=25) as clients:
        working = asyncio.create_task(clients.body(3600))
        await asyncio.sleep(1)
        closing = asyncio.create_task(clients.ours.aclose())
        await asyncio.sleep(2)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert now() == 3.0
        with pytest.raises(LeaseLostError) as lost:
            await working
        assert lost.value.reason is LossReason.CLOSED


@in_virtual_time
async def test_a_client_that_is_entered_again_drains_no_more():
    async with TwoClients() as clients:
        await clients.ours.drain(within=1)
        await clients.ours.aclose()
        assert not clients.ours.draining
        async with clients.ours, clients.ours.lock("a"):
            pass


async def test_a_closed_client_cannot_be_drained():
    locks = LockClient(MemoryBackend())
    with pytest.raises(UsageError, match=r"not open; enter it first.* lifespan: daphne does not"):
        await locks.drain(within=1)


@pytest.mark.parametrize("bound", [-1, "1", float("nan"), None, True])
async def test_a_bound_that_is_no_time_is_refused(bound):
    async with LockClient(MemoryBackend()) as locks:
        with pytest.raises(ConfigurationError, match="within"):
            await locks.drain(within=bound)
        assert not locks.draining
    if bound is not None:
        with pytest.raises(ConfigurationError, match="drain"):
            LockClient(MemoryBackend(), drain=bound)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
@in_virtual_time
async def test_an_observer_whose_eager_task_drains_the_client_leaves_no_stray_cancellation():
    asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
    drains = []

    def drain(_: object) -> None:
        if not drains:
            drains.append(asyncio.get_running_loop().create_task(locks.drain(within=5)))

    async with on_clock(LockClient(MemoryBackend(), observers=[drain]), LoopClock()) as locks:
        with pytest.raises(DrainingError):
            await locks.lock("a").acquire()
        await asyncio.sleep(1)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await drains[0]
