"""
A store that is one server, or the network before it, falls silent or breaks: no overrun, nothing left behind.

The scenarios are written once. A store runs them by a subclass with a fixture ``bench``; the stores that they do not
fit are in `SCENARIOS` of tests/test_matrix.py, with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest
from event_log import CLOCK, ENDED_BY_TIME, Log
from inside import state_of
from patience import until
from stays import LEAVING, LONG, PATIENCE, Stay, opened, staying
from store_bench import AnsweringBench, StoreBench, nothing_left

from fencing_sdk import AcquireTimeoutError, BackendUnavailableError, LeaseLostError, LossReason
from fencing_sdk.events import Lost, NotAcquired, RenewalFailed, Renewed

SHORT = {"ttl": 5.0, "safety_buffer": 2.5, "heartbeat_interval": 0.4}
"""For a lease that is to be lost to a fault, and not before: a machine may stand still for most of its 2.45 s."""


async def renewed_or_lost(log: Log, task: asyncio.Task[object], renewals: int = 1) -> None:
    """Wait for *renewals* of the lease of *task*, or for its loss: a machine may stand still for longer than that."""
    await until(lambda: len(log.of(Renewed)) >= renewals or task.done())


class FaultsSuite:
    """What a holder sees when its store fails."""

    # The server is silent.

    @pytest.mark.slow
    @pytest.mark.every_loop
    async def test_a_server_that_stops_for_less_than_the_deadline_is_ridden_out(self, bench: StoreBench):
        async with opened(bench.url) as (locks, log), staying(locks.lock("a", **LONG)) as stay:
            await log.seen(Renewed)
            renewed = len(log.of(Renewed))
            bench.pause()
            await log.seen(RenewalFailed, 2)
            bench.resume()
            await log.seen(Renewed, renewed + 2)
            assert stay.lease.held
            assert stay.lease.token == stay.token
            await stay.end()
        assert log.of(Lost) == []
        await nothing_left(bench)

    @pytest.mark.slow
    @pytest.mark.every_loop
    async def test_a_server_that_stops_for_longer_ends_the_body_before_the_lease(self, bench: StoreBench):
        async with opened(bench.url) as (locks, log), staying(locks.lock("a", **SHORT)) as stay:
            await renewed_or_lost(log, stay.task)
            asked_at, left = CLOCK.now(), bench.seconds_left("a")
            assert left > 0 or log.of(Lost)
            bench.pause()
            await stay.over()
            bench.resume()
            assert stay.lost in ENDED_BY_TIME
            assert stay.body_ended_at < asked_at + min(left, SHORT["ttl"])
            assert stay.left_at - stay.body_ended_at < LEAVING
            async with staying(locks.lock("a", wait=PATIENCE)) as following:
                assert following.token > stay.token
                await following.end()
        await nothing_left(bench)

    @pytest.mark.slow
    @pytest.mark.parametrize("fault", ["blackhole", "half_open"])
    async def test_the_server_still_keeps_the_lease_at_the_moment_the_body_ends(self, fault: str, bench: StoreBench):
        ended: list[tuple[float, float]] = []

        async def work(locks) -> float:
            with pytest.raises(LeaseLostError):
                async with locks.lock("a", **SHORT):
                    try:
                        await asyncio.Event().wait()
                    finally:
                        ended.append((bench.seconds_left("a"), CLOCK.now()))  # blocks: this very moment counts
            return CLOCK.now()

        async with opened(bench.by_proxy) as (locks, log):
            task = asyncio.create_task(work(locks))
            await renewed_or_lost(log, task, 2)
            getattr(bench.proxy, fault)()
            async with asyncio.timeout(PATIENCE):
                left_at = await task  # while nothing is delivered
            bench.proxy.heal()
            assert log.of(Lost)[0].reason in ENDED_BY_TIME
        ((left, ended_at),) = ended
        assert left > 0
        assert left_at - ended_at < LEAVING
        await nothing_left(bench)

    @pytest.mark.slow
    async def test_a_rival_is_granted_only_after_the_body_of_a_client_that_was_cut_off(self, bench: StoreBench):
        async with opened(bench.by_proxy) as (cut_off, _), opened(bench.url) as (locks, _):
            async with staying(cut_off.lock("a", **SHORT)) as stay:
                bench.proxy.blackhole()
                async with staying(locks.lock("a", ttl=10, wait=PATIENCE)) as rival:
                    await stay.over()
                    assert stay.lost in ENDED_BY_TIME
                    assert stay.body_ended_at < rival.granted_at
                    assert rival.token > stay.token
                    await rival.end()
            bench.proxy.cut()
            bench.proxy.heal()
        await nothing_left(bench)

    async def test_a_lock_that_a_job_leaves_taken_keeps_its_time_when_connections_break(self, bench: StoreBench):
        async with opened(bench.by_proxy) as (locks, _):

            @locks.job("a", at_least_for=60, ttl=10)
            async def job() -> None:
                """End at once."""

            await job()
            left = bench.seconds_left("a")
            looked_at = CLOCK.now()
            bench.proxy.cut()
            for _ in range(3):  # the first connects again
                async with staying(locks.lock("b", wait=PATIENCE)) as stay:
                    await stay.end()
            passed = CLOCK.now() - looked_at
            assert min(left, 60.0) - passed - 10.0 < bench.seconds_left("a") <= left

    async def test_a_connection_that_died_in_silence_is_replaced_within_the_deadline(self, bench: StoreBench):
        async with opened(bench.by_proxy) as (locks, log), staying(locks.lock("a", **LONG)) as stay:
            await log.seen(Renewed)
            bench.proxy.forget()
            renewed = len(log.of(Renewed))
            await log.seen(RenewalFailed)
            await log.seen(Renewed, renewed + 2)
            assert stay.lease.held
            await stay.end()
            bench.proxy.cut_forgotten()
        assert log.of(Lost) == []
        await nothing_left(bench)

    @pytest.mark.slow
    async def test_a_connection_that_dies_in_silence_while_it_is_opened_costs_no_lease(self, bench: StoreBench):
        async with opened(bench.by_proxy) as (locks, log), staying(locks.lock("a", **LONG)) as stay:
            await log.seen(Renewed)
            accepted = bench.proxy.accepted
            bench.proxy.blackhole()
            await until(lambda: bench.proxy.accepted > accepted)
            bench.proxy.forget()
            bench.proxy.heal()
            renewed = len(log.of(Renewed))
            await log.seen(Renewed, renewed + 2)
            await stay.end()
            bench.proxy.cut_forgotten()
        assert log.of(Lost) == []
        await nothing_left(bench)

    @pytest.mark.slow
    async def test_a_client_that_closes_while_nothing_is_delivered_closes_all_the_same(self, bench: StoreBench):
        async with opened(bench.url) as (others, _):
            held = await others.lock("b", ttl=60).acquire()
            async with opened(bench.by_proxy) as (locks, log):
                lease = await locks.lock("a", **LONG | {"ttl": 4.0}).acquire()
                waiter = Stay(locks.lock("b", ttl=4))
                await bench.waiting("b", 1)
                await log.seen(Renewed)
                bench.proxy.blackhole()
                begun = CLOCK.now()
            assert CLOCK.now() - begun < PATIENCE
            assert lease.lost_reason is LossReason.CLOSED
            await waiter.over()
            bench.proxy.cut()
            bench.proxy.heal()
            async with staying(others.lock("a", wait=PATIENCE)) as following:
                assert following.token > state_of(lease).number
                await following.end()
            await lease.release()
            await held.release()
            async with others.lock("b", wait=2 * PATIENCE):  # its waiter could not say that it left
                pass
        await nothing_left(bench)

    @pytest.mark.parametrize("silent", ["server", "network"])
    async def test_a_grant_that_comes_after_it_was_given_up_is_undone(self, silent: str, bench: StoreBench):
        async with opened(bench.by_proxy if silent == "network" else bench.url) as (locks, log):
            stop, go_on = (
                (bench.proxy.blackhole, bench.proxy.heal) if silent == "network" else (bench.pause, bench.resume)
            )
            stop()
            with pytest.raises(BackendUnavailableError):
                await locks.lock("a", ttl=30, wait=0.2).acquire()
            await log.seen(NotAcquired)
            go_on()
            async with staying(locks.lock("a", ttl=30, wait=PATIENCE)) as stay:  # long before the late grant would end
                await stay.end()
        await nothing_left(bench, within=2 * PATIENCE)  # a grant that came after the client had closed ends by its ttl

    # The connection breaks.

    @pytest.mark.slow
    @pytest.mark.every_loop
    async def test_a_connection_cut_again_and_again_costs_nothing(self, bench: StoreBench):
        async with opened(bench.by_proxy) as (locks, log), staying(locks.lock("a", **LONG)) as stay:
            for _ in range(4):
                renewed = len(log.of(Renewed))
                bench.proxy.cut()
                await log.seen(Renewed, renewed + 2)
            await until(lambda: bench.proxy.connections <= bench.connections)
            await stay.end()
        assert log.of(Lost) == []
        await nothing_left(bench)

    async def test_a_server_that_refuses_connections_for_a_while_costs_nothing(self, bench: StoreBench):
        async with opened(bench.by_proxy) as (locks, log), staying(locks.lock("a", **LONG)) as stay:
            await log.seen(Renewed)
            bench.proxy.refuse()
            bench.proxy.cut()
            await log.seen(RenewalFailed, 3)
            renewed = len(log.of(Renewed))
            bench.proxy.heal()
            await log.seen(Renewed, renewed + 2)
            await until(lambda: bench.proxy.connections <= bench.connections)
            await stay.end()
        assert log.of(Lost) == []
        await nothing_left(bench)

    @pytest.mark.slow
    async def test_a_server_that_refuses_connections_for_good_ends_the_body_in_time(self, bench: StoreBench):
        async with opened(bench.by_proxy) as (locks, log), staying(locks.lock("a", **SHORT)) as stay:
            await renewed_or_lost(log, stay.task)
            bench.proxy.refuse()
            bench.proxy.cut()
            await stay.over()
            assert stay.lost in ENDED_BY_TIME
            assert stay.left_at - stay.body_ended_at < LEAVING
            with pytest.raises(BackendUnavailableError):
                await locks.lock("a", wait=0.1).acquire()
            bench.proxy.heal()
            async with staying(locks.lock("a", wait=PATIENCE)) as following:
                assert following.token > stay.token
                await following.end()
        await nothing_left(bench)

    @pytest.mark.slow
    async def test_many_tasks_share_the_connection_after_it_broke_under_all_of_them(self, bench: StoreBench):
        async with opened(bench.by_proxy) as (locks, _):

            async def use(number: int) -> None:
                for _ in range(4):
                    async with locks.lock(f"n{number}", ttl=60, wait=60):
                        await asyncio.sleep(0)

            tasks = [asyncio.create_task(use(number)) for number in range(50)]
            pause = 0.4
            while not all(task.done() for task in tasks):
                bench.proxy.cut()
                await asyncio.wait(tasks, timeout=pause)
                pause *= 1.4  # a slow machine gets somewhere, too
            await asyncio.gather(*tasks)
            await use(0)  # the last cut may have come when no task needed a connection any more
            await until(lambda: bench.proxy.connections <= bench.connections)
        await nothing_left(bench)

    # Everything at once.

    async def test_bodies_never_overlap_and_tokens_rise_whatever_the_network_does(self, bench: StoreBench):
        """Two clients behind one bad network and one beside it, with a server that stands still now and then."""
        inside: list[int] = []
        tokens: list[int] = []
        options = {"ttl": 4.0, "safety_buffer": 2.5, "heartbeat_interval": 0.3}
        over = asyncio.Event()

        async def work(locks, number) -> None:
            while not over.is_set():
                with contextlib.suppress(LeaseLostError, BackendUnavailableError, AcquireTimeoutError):
                    async with locks.lock("a", wait=5, **options) as lease:
                        assert inside == []
                        inside.append(number)
                        try:
                            tokens.append(lease.token)
                            await asyncio.sleep(random.uniform(0, 0.6))
                        finally:
                            assert inside.pop() == number

        async with contextlib.AsyncExitStack() as stack:
            urls = (bench.by_proxy, bench.by_proxy, bench.url)
            clients = [(await stack.enter_async_context(opened(url)))[0] for url in urls]
            tasks = [asyncio.create_task(work(locks, number)) for number, locks in enumerate(clients * 2)]
            for fault in ("blackhole", "cut", "half_open", "lose_replies", "refuse", "pause"):
                on = bench if fault == "pause" else bench.proxy
                getattr(on, fault)()
                await asyncio.wait(tasks, timeout=random.uniform(0.2, 1.2))
                bench.resume()
                bench.proxy.heal()
                await asyncio.wait(tasks, timeout=0.2)
            await until(lambda: len(tokens) > 3 or any(task.done() for task in tasks))
            over.set()
            async with asyncio.timeout(2 * PATIENCE):
                await asyncio.gather(*tasks)
            assert tokens == sorted(set(tokens))
            assert len(tokens) > 3
        await nothing_left(bench)


FAR = 10 * PATIENCE
"""A ttl that frees nothing in time."""
BOTH = pytest.mark.parametrize("fault", ["lose_replies", "lose_requests"])


class LostAnswersSuite:
    """The store did what was asked and the answer is lost, or the request is: to a client it looks the same."""

    def lose(self, fault: str, call: str, bench: AnsweringBench, number: int = 1) -> asyncio.Future[None]:
        """Break the connection at the next *number* of these calls."""
        return getattr(bench.proxy, fault)(number, of=bench.calls[call])

    @BOTH
    async def test_a_retry_finds_the_grant_that_was_not_answered(self, fault: str, bench: AnsweringBench):
        async with opened(bench.by_proxy) as (locks, _):
            tokens = []
            for call in ("first acquire", "acquire"):
                lost = self.lose(fault, call, bench)
                async with staying(locks.lock("a", ttl=FAR, wait=PATIENCE)) as stay:
                    assert lost.done()
                    holder = await locks.inspect("a")
                    assert holder is not None
                    assert holder.token == stay.token
                    tokens.append(stay.token)
                    await stay.end()
            assert tokens[0] < tokens[1]
            assert bench.proxy.connections <= bench.connections
        await nothing_left(bench)

    @BOTH
    async def test_lost_renewals_cost_nothing(self, fault: str, bench: AnsweringBench):
        async with opened(bench.by_proxy) as (locks, log), staying(locks.lock("a", **LONG)) as stay:
            await log.seen(Renewed)
            async with asyncio.timeout(PATIENCE):
                await self.lose(fault, "renew", bench, 2)
            renewed = len(log.of(Renewed))
            await log.seen(Renewed, renewed + 1)
            await stay.end()
        assert log.of(Lost) == []
        await nothing_left(bench)

    @BOTH
    async def test_a_release_is_repeated_and_touches_no_other_lease(self, fault: str, bench: AnsweringBench):
        async with opened(bench.by_proxy) as (locks, _), opened(bench.url) as (others, _):
            async with locks.lock("a"):  # so that the store knows the call
                pass
            async with staying(locks.lock("a", ttl=FAR)) as stay:
                waiting = Stay(others.lock("a", ttl=FAR, wait=PATIENCE))
                await bench.waiting("a", 1)
                lost = self.lose(fault, "release", bench)
                await stay.end()
                async with asyncio.timeout(PATIENCE):
                    await lost
            assert (await waiting.begun()).held
            assert waiting.token > stay.token
            assert bench.seconds_left("a") > 0
            await waiting.end()
        await nothing_left(bench)

    @BOTH
    async def test_a_waiter_that_joins_waits_a_moment_longer(self, fault: str, bench: AnsweringBench):
        async with opened(bench.by_proxy) as (locks, _), opened(bench.url) as (others, _):
            async with staying(others.lock("a", ttl=FAR)) as stay:
                lost = self.lose(fault, "join", bench)
                waiting = Stay(locks.lock("a", ttl=FAR, wait=PATIENCE))
                async with asyncio.timeout(PATIENCE):
                    await lost
                await bench.waiting("a", 1)
                await stay.end()
            await waiting.begun()
            await waiting.end()
        await nothing_left(bench)

    @BOTH
    async def test_a_waiter_that_leaves_is_gone_for_good(self, fault: str, bench: AnsweringBench):
        async with opened(bench.by_proxy) as (locks, _), opened(bench.url) as (others, _):
            async with staying(others.lock("a", ttl=FAR)) as stay:
                lost = self.lose(fault, "leave", bench)
                waiting = Stay(locks.lock("a", ttl=FAR))
                await bench.waiting("a", 1)
                await waiting.abandon()
                async with asyncio.timeout(PATIENCE):
                    await lost
                await bench.waiting("a", 0)
                await asyncio.sleep(1.5)  # longer than a waiter pauses before it stands in line again
                assert await bench.in_line("a") == 0
                await stay.end()
        await nothing_left(bench)

    async def test_a_waiter_that_could_not_say_that_it_leaves_loses_its_place(self, bench: AnsweringBench):
        """Although another waiter of its client goes on waiting: the lock would be nobody's for as long as that."""
        async with opened(bench.by_proxy) as (locks, _), opened(bench.url) as (others, _):
            async with staying(others.lock("a", ttl=FAR)) as stay, staying(others.lock("b", ttl=FAR)) as other:
                leaving, staying_on = Stay(locks.lock("a", ttl=FAR)), Stay(locks.lock("b", ttl=FAR))
                await bench.waiting("a", 1)
                await bench.waiting("b", 1)
                following = Stay(others.lock("a", ttl=FAR, wait=PATIENCE))
                await bench.waiting("a", 2)
                lost = self.lose("lose_requests", "leave", bench, bench.leaves)
                await leaving.abandon()
                async with asyncio.timeout(PATIENCE):
                    await lost
                await stay.end()
                await following.begun()
                await following.end()
                await other.end()
                await staying_on.begun()
                await staying_on.end()
        await nothing_left(bench)
