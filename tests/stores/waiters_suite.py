"""
Many wait for one lock; some give up, some are killed, some fork: all others are served, in order, one by one.

The scenarios are written once. A store with a line runs them by a subclass with a fixture ``bench``.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import math
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from campaigns import amount
from event_log import CLOCK
from inside import telling
from stays import PATIENCE, Stay, eventually, opened, staying, use_in_turn
from store_bench import WaitersBench, nothing_left
from worker_processes import WORKERS, WorkerProcess, worker_processes

from fencing_sdk import FencingError, connect

LIMIT = 300.0
"""Seconds for what several processes do on a busy machine."""


class WaitingProcess(WorkerProcess):
    """A process with waiters: what it said so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        super().__init__(process)
        self.grants: list[tuple[int, int]] = []
        """The number of the waiter and its token, in the order of the grants."""
        self.lag = math.inf
        """For how many seconds its loop stood still at most; known when it is done."""
        self.granted = asyncio.Event()
        self.listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        assert self.process.stdout is not None
        while line := (await self.process.stdout.readline()).split():
            if line[0] == b"granted":
                self.grants.append((int(line[1]), int(line[2])))
                self.granted.set()
            else:
                self.lag = float(line[1])

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self.listening


Start = Callable[[str, float, str], Awaitable[WaitingProcess]]


class BlockedLoop(threading.Thread):
    """A client in a thread, which takes or awaits the lock ``a``, and then blocks its event loop."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.asks, self.go_on, self.blocks, self.end = (threading.Event() for _ in range(4))

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        async with connect(self.url) as locks:
            heard = asyncio.Event()
            taking = asyncio.create_task(telling(locks.lock("a", ttl=2), heard.set).acquire())
            waiting = asyncio.create_task(heard.wait())
            await asyncio.wait((taking, waiting), return_when=asyncio.FIRST_COMPLETED)
            self.asks.set()
            await asyncio.to_thread(self.go_on.wait, LIMIT)
            self.blocks.set()
            self.end.wait(LIMIT)
            taking.cancel()
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError, FencingError):
                await (await taking).release()


class WaitersSuite:
    """What waiters see of each other."""

    @pytest.fixture
    async def start(self) -> AsyncIterator[Start]:
        """Start a process with ten waiters for the lock ``a``, which does not outlive the test."""
        async with worker_processes(WaitingProcess) as start:
            yield lambda url, ttl, kind: start(WORKERS / "waiters.py", url, "a", 10, ttl, kind)

    @pytest.mark.slow
    async def test_forty_waiters_are_served_in_order_although_half_of_them_are_killed(
        self, bench: WaitersBench, start: Start
    ):
        async with opened(bench.url) as (locks, _), staying(locks.lock("a", ttl=60)) as stay:
            stuck = await start(bench.url, 2.0, "stuck")
            await bench.waiting("a", 10)
            others = []
            for number in range(1, 4):
                others.append(await start(bench.url, 6.0 if number == 2 else 30.0, "quick"))
                await bench.waiting("a", 10 + 10 * number)
            await others[1].kill()  # while all of it waits
            survivors = [others[0], *others[2:]]
            await stay.end()
            async with asyncio.timeout(LIMIT):
                await stuck.granted.wait()
                await stuck.kill()  # while one of it holds the lock, and the others wait at the head of the line
                await asyncio.gather(*(worker.listening for worker in survivors))
        for worker in survivors:
            assert sorted(number for number, _ in worker.grants) == list(range(10))
        if all(worker.lag < 1 for worker in survivors):  # one whose loop stood still may have been passed over
            lasts = [(worker.grants[0][1], worker.grants[-1][1]) for worker in survivors]
            assert all(last < first for (_, last), (first, _) in itertools.pairwise(lasts))
        granted = [token for worker in [stuck, *survivors] for _, token in worker.grants]
        assert len(set(granted)) == len(granted) == 1 + 2 * 10
        assert min(granted) > stay.token
        await nothing_left(bench)

    async def test_a_waiter_leaves_neither_its_task_nor_its_lease_behind(self, bench: WaitersBench):
        """What has a message, a timer or a list for it must not keep what it has got, or a dropped lease is renewed."""
        async with opened(bench.url) as (locks, _):
            async with staying(locks.lock("a", ttl=60)) as stay:
                waiting = asyncio.create_task(locks.lock("a", ttl=60).acquire())
                await bench.waiting("a", 1)
                await stay.end()
                async with asyncio.timeout(PATIENCE):
                    await waiting
            task = weakref.ref(waiting)
            with pytest.warns(ResourceWarning, match="dropped without release"):  # noqa: PT031  (while it is let go)
                del waiting
                async with asyncio.timeout(PATIENCE):
                    while task() is not None:  # until its place in the line was left
                        gc.collect()
                        await asyncio.sleep(0.01)
            async with locks.lock("a", ttl=60, wait=PATIENCE):  # far less than the ttl
                pass

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["idle", "close", "use"])
    async def test_a_forked_child_does_not_disturb_its_parent(self, kind: str, bench: WaitersBench):
        async with worker_processes() as start:
            holder = await start(WORKERS / "forking_holder.py", bench.url, kind)
            assert await holder.says() == ["held"]
            assert await holder.says() == ["forked"]
            await holder.go_on()
            assert await holder.ended() == "ended\n"
        await nothing_left(bench)

    async def test_a_crowd_in_one_client_is_served_in_order_and_delays_no_release(self, bench: WaitersBench):
        crowd = amount(2000, short=200)
        async with opened(bench.url) as (locks, _), opened(bench.url) as (others, _):
            served: list[str] = []

            async def wait() -> None:
                async with others.lock("a", ttl=30) as lease:
                    served.append(lease.holder)

            async with staying(locks.lock("a", ttl=30)) as stay:
                tasks = [asyncio.create_task(wait()) for _ in range(crowd)]
                await bench.waiting("a", crowd)
                line = [waiter.id for waiter in await others.waiters("a")]
                await stay.end()
            async with asyncio.timeout(LIMIT):
                await asyncio.gather(*tasks)
            assert len(served) == len(set(served)) == crowd
            # On a busy machine they join in another order than they came: what counts is the line of the store.
            places = {holder: place for place, holder in enumerate(served)}
            passed = max(abs(places[holder] - place) for place, holder in enumerate(line))
            assert passed < 64, (line, served)  # as many as may ask at once, each of which may be answered first
        await nothing_left(bench)

    async def test_many_names_at_once_are_served_and_delay_no_release(self, bench: WaitersBench):
        crowd, releases = amount(3000, short=300), []
        async with opened(bench.url) as (locks, _):

            async def use(number: int) -> None:
                lease = await locks.lock(f"b{number}", ttl=30).acquire()
                began = CLOCK.now()
                await lease.release()
                releases.append(CLOCK.now() - began)

            async with asyncio.timeout(LIMIT):
                await asyncio.gather(*(use(number) for number in range(crowd)))
        assert len(releases) == crowd
        assert max(releases) < PATIENCE / 2, max(releases)  # each behind a few tries, and not behind all of them
        await nothing_left(bench)

    @pytest.mark.slow
    @pytest.mark.parametrize("role", ["holder", "waiter"])
    async def test_a_loop_that_is_blocked_keeps_neither_a_lock_nor_a_turn(self, role: str, bench: WaitersBench):
        blocked = BlockedLoop(bench.url)
        async with opened(bench.url) as (locks, _), AsyncExitStack() as holding:
            try:
                stay = await holding.enter_async_context(staying(locks.lock("a", ttl=30))) if role == "waiter" else None
                blocked.start()
                await asyncio.to_thread(blocked.asks.wait, LIMIT)
                if stay is not None:
                    await bench.waiting("a", 1)
                blocked.go_on.set()
                assert await asyncio.to_thread(blocked.blocks.wait, LIMIT)
                async with opened(bench.url) as (others, _):
                    next_one = Stay(others.lock("a", ttl=30), work=0)
                    if stay is not None:
                        await bench.waiting("a", 2)
                        await stay.end()
                    await next_one.over(within=2 * PATIENCE)
                    assert next_one.error is None
                assert blocked.is_alive()
            finally:
                blocked.end.set()
                await asyncio.to_thread(blocked.join, LIMIT)
        await nothing_left(bench)

    async def test_waiters_that_are_cancelled_leave_the_line_to_the_others(self, bench: WaitersBench):
        async with opened(bench.url) as (one, _), opened(bench.url) as (two, _):
            served: list[int] = []

            async def wait(number: int) -> None:
                async with (two, one)[number % 2].lock("a", ttl=60):
                    served.append(number)

            async with staying(one.lock("a", ttl=60)) as stay:
                tasks = []
                for number in range(15):
                    tasks.append(asyncio.create_task(wait(number)))
                    await bench.waiting("a", number + 1)
                for task in tasks[::3]:
                    task.cancel()
                await bench.waiting("a", 10)
                await stay.end()
            async with asyncio.timeout(PATIENCE):
                await asyncio.wait(tasks)
            assert served == [number for number in range(15) if number % 3], served
        await nothing_left(bench)

    async def test_waiters_that_give_up_when_the_lock_is_released_pass_it_on(self, bench: WaitersBench):
        async with opened(bench.url) as (locks, _), opened(bench.url) as (others, _):
            async with staying(others.lock("a", ttl=60)) as stay:
                leaving = [Stay(locks.lock("a", ttl=60)) for _ in range(10)]
                await bench.waiting("a", 10)
                patient = Stay(locks.lock("a", ttl=60), work=0)
                await bench.waiting("a", 11)
                ending = asyncio.create_task(stay.end())
                for waiter in leaving:
                    waiter.task.cancel()  # the head, too, at the moment it is woken
                await ending
                await patient.over()
                assert patient.error is None
                await asyncio.wait([waiter.task for waiter in leaving])
        await nothing_left(bench)

    async def test_a_client_that_closes_leaves_the_line_at_once(self, bench: WaitersBench):
        async def empty() -> bool:
            return await bench.in_line("a") == 0  # a node of several may be late

        async with opened(bench.url) as (others, _), staying(others.lock("a", ttl=60)) as stay:
            async with opened(bench.url) as (locks, _):
                stays = [Stay(locks.lock("a", ttl=60)) for _ in range(5)]
                await bench.waiting("a", 5)
            for waiter in stays:
                await waiter.over()
            await eventually(empty, what="nobody waits until a silent place is lost", within=10.0)
            await stay.end()
        await nothing_left(bench)

    async def test_many_clients_that_fight_for_one_lock_enter_one_by_one(self, bench: WaitersBench):
        async with opened(bench.url) as (one, _), opened(bench.url) as (two, _), opened(bench.url) as (three, _):
            await use_in_turn([one, two, three], tasks=4, times=4)
        await nothing_left(bench)
