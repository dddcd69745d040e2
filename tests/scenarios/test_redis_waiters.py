"""Many wait for one lock in Redis; some are killed, wake-ups are lost: all others are served, in order, one by one."""

import asyncio
import contextlib
import hashlib
import math
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from event_log import CLOCK
from patience import until
from redis_stage import calls_of, connections, key, keys, nothing_left
from stays import PATIENCE, Stay, eventually, opened, staying

from fencing_sdk import AcquireTimeoutError, LockHeldError
from fencing_sdk.backends.redis import scripts

pytest_plugins = ["redis_fixtures"]

WORKERS = Path(__file__).parent / "workers"
LIMIT = 300.0


async def waiting(server, number, name="a") -> None:
    async def all_wait() -> bool:
        return await server.command("ZCARD", key(name, "q")) == number

    await eventually(all_wait, what=f"{number} wait", within=LIMIT)


async def settled(locks, proxy) -> None:
    """Wait until the only waiter has the answer to its sign of life, with which it stands in line."""
    await until(lambda: any(scripts.STAND.sha.encode() in request for request in proxy.requests))
    await locks.inspect("another")  # answered in order


class Worker:
    """A process with waiters: what it said so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.grants: list[tuple[int, int]] = []
        self.lag = math.inf
        self.granted = asyncio.Event()
        self.listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while line := (await self.process.stdout.readline()).split():
            if line[0] == b"granted":
                self.grants.append((int(line[1]), int(line[2])))
                self.granted.set()
            else:
                self.lag = float(line[1])

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        await self.process.wait()
        await self.listening


@pytest.fixture
async def start() -> AsyncIterator:
    workers: list[Worker] = []

    async def start(url: str, name: str, tasks: int, ttl: float, kind: str) -> Worker:
        command = [sys.executable, str(WORKERS / "waiters.py"), url, name, str(tasks), str(ttl), kind]
        workers.append(Worker(await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)))
        return workers[-1]

    yield start
    for worker in workers:
        await worker.kill()


@pytest.fixture
def nobody_polls(monkeypatch):
    """Nobody tries again for a minute, unless woken; and nobody is passed over because of that."""
    monkeypatch.setattr("fencing_sdk.backends.redis.waiters._SIGN_EVERY", 120.0)
    monkeypatch.setattr("fencing_sdk._engine.acquisition._LONGEST_NAP", 60.0)
    for script in (scripts.ACQUIRE, scripts.STAND, scripts.RELEASE):
        text = script.text.replace("LINE_TTL = 3000", "LINE_TTL = 240000").replace("SUSPECT = 1250", "SUSPECT = 240000")
        assert text != script.text
        monkeypatch.setattr(script, "text", text)
        monkeypatch.setattr(script, "sha", hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


# Processes.


@pytest.mark.campaign(only=True)  # a shorter line is in `WaitersSuite`
async def test_two_hundred_waiters_are_served_although_a_third_of_them_is_killed(redis_server, start):
    async with opened(redis_server.url) as (locks, _), staying(locks.lock("a", ttl=60)) as stay:
        stuck = await start(redis_server.url, "a", 34, 2.0, "stuck")
        await waiting(redis_server, 34)
        others = [await start(redis_server.url, "a", 34, 30.0, "quick") for _ in range(5)]
        await waiting(redis_server, 204)
        assert len(await connections(redis_server)) == 7
        await others[0].kill()  # while all of it waits
        await stay.end()
        async with asyncio.timeout(LIMIT):
            await stuck.granted.wait()
            await stuck.kill()  # while one of it holds the lock, and the others wait at the head of the line
            await asyncio.gather(*(worker.listening for worker in others[1:]))
        for worker in others[1:]:
            tokens = [token for _, token in worker.grants]
            assert tokens == sorted(tokens)
            assert sorted(number for number, _ in worker.grants) == list(range(34))
            if worker.lag < 1:  # one whose loop stood still was passed over, and stood in line again
                assert worker.grants == sorted(worker.grants)
        granted = [token for worker in [stuck, *others] for _, token in worker.grants]
        assert len(set(granted)) == len(granted) == 1 + 4 * 34
        assert min(granted) > stay.token
    await nothing_left(redis_server)


async def test_a_forked_child_leaves_its_parent_the_connection(redis_server):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(WORKERS / "forking_holder.py"),
        redis_server.url,
        "use",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(LIMIT):
            assert await process.stdout.readline() == b"held\n"
            # The child may be there already, with a connection of its own; the parent's is the older one.
            before = min(await connections(redis_server), key=lambda connection: int(connection["id"]))
            assert await process.stdout.readline() == b"forked\n"
            (after,) = await connections(redis_server)
            assert after["id"] == before["id"]
            said, _ = await process.communicate(b"\n")
        assert said == b"ended\n"
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    await nothing_left(redis_server)


@pytest.mark.parametrize("forgets", [False, True], ids=["fresh server", "flushed meanwhile"])
async def test_a_command_that_is_ended_while_it_waits_leaves_the_line(redis_server, forgets, answers_may_be_late):
    async with opened(redis_server.url) as (locks, _), staying(locks.lock("a", ttl=60)) as stay:
        command = [sys.executable, "-m", "fencing_sdk", "run", "a", "--url", redis_server.url, "--wait", "forever"]
        process = await asyncio.create_subprocess_exec(*command, "--", "true")
        try:
            await waiting(redis_server, 1)
            if forgets:
                await redis_server.command("SCRIPT", "FLUSH")
            process.terminate()
            async with asyncio.timeout(LIMIT):
                assert await process.wait() == 128 + signal.SIGTERM
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert await keys(redis_server) == {key("a")}
        await stay.end()
        next_holder = await locks.lock("a", ttl=60).try_acquire()
        assert next_holder is not None
        await next_holder.release()
    await nothing_left(redis_server)


# One process.


async def test_the_cost_of_a_hand_off_does_not_grow_with_the_line(redis_server):
    async with opened(redis_server.url) as (locks, _), opened(redis_server.url) as (others, _):
        for number in (10, 150):
            async with staying(locks.lock("a", ttl=60)) as stay:
                order = []

                async def wait(place, order=order) -> None:
                    async with others.lock("a", ttl=60):
                        order.append(place)

                tasks = [asyncio.create_task(wait(place)) for place in range(number)]
                await waiting(redis_server, number)
                assert len(await connections(redis_server)) == 2
                runs, messages = await calls_of(redis_server, "evalsha"), await calls_of(redis_server, "publish")
                begun = CLOCK.now()
                await stay.end()
                async with asyncio.timeout(PATIENCE):
                    await asyncio.gather(*tasks)
                polls = number * math.ceil(CLOCK.now() - begun)
                assert await calls_of(redis_server, "publish") - messages == number
                assert await calls_of(redis_server, "evalsha") - runs <= 2 * number + 1 + polls
                assert order == list(range(number))
    await nothing_left(redis_server)


@pytest.mark.every_loop
async def test_a_released_lock_reaches_the_next_by_a_message(redis_server, nobody_polls):
    async with opened(redis_server.url, fair=False) as (locks, _), opened(redis_server.url, fair=False) as (others, _):
        async with staying(locks.lock("a", ttl=60)) as stay:
            stays = [Stay(others.lock("a", ttl=60), work=0) for _ in range(10)]
            await waiting(redis_server, 10)
            await stay.end()
            for waiter in stays:
                await waiter.over()
        assert [waiter.error for waiter in stays] == [None] * 10
        assert all(waiter.token > stay.token for waiter in stays)
    await nothing_left(redis_server)


@pytest.mark.parametrize("fault", ["kill pubsub", "cut"])
async def test_lost_wake_ups_cost_a_moment(fault, redis_server, proxy):
    async with opened(proxy.url) as (locks, _), opened(redis_server.url) as (others, _):
        async with staying(others.lock("a", ttl=60)) as stay:
            stays = [Stay(locks.lock("a", ttl=60), work=0) for _ in range(20)]
            await waiting(redis_server, 20)
            if fault == "cut":
                proxy.cut()
            else:
                assert await redis_server.command("CLIENT", "KILL", "TYPE", "pubsub") == 1
            await stay.end()
            for waiter in stays:
                await waiter.over()
                assert waiter.error is None
        assert len(await connections(redis_server)) == 2
        assert proxy.connections == 1
    await nothing_left(redis_server)


async def test_whoever_missed_a_message_tries_when_the_connection_is_opened_anew(redis_server, proxy, nobody_polls):
    async with opened(proxy.url, fair=False) as (locks, _), opened(redis_server.url) as (others, _):
        async with staying(others.lock("a", ttl=60)) as stay:
            waiter = Stay(locks.lock("a", ttl=60), work=0)
            await waiting(redis_server, 1)
            await settled(locks, proxy)
            proxy.cut()
            await until(lambda: proxy.connections == 0)
            await stay.end()
        await locks.inspect("b")  # opens a connection
        await waiter.over()
        assert waiter.error is None
    await nothing_left(redis_server)


async def test_a_reconnected_waiter_is_woken_by_messages_again(redis_server, proxy, nobody_polls):
    async with opened(proxy.url, fair=False) as (locks, _), opened(redis_server.url) as (others, _):
        async with staying(others.lock("a", ttl=60)) as stay:
            waiter = Stay(locks.lock("a", ttl=60), work=0)
            await waiting(redis_server, 1)
            await settled(locks, proxy)
            proxy.cut()
            await until(lambda: proxy.connections == 0)
            signs = proxy.saw(scripts.STAND.sha)
            await locks.inspect("b")
            async with asyncio.timeout(PATIENCE):
                await signs  # the one because of the new connection
            await stay.end()
        await waiter.over()
        assert waiter.error is None
    await nothing_left(redis_server)


async def test_a_line_that_a_flush_has_emptied_forms_again(redis_server):
    async with opened(redis_server.url) as (locks, _), opened(redis_server.url) as (others, _):
        async with staying(others.lock("a", ttl=60)) as stay:
            stays = [Stay(locks.lock("a", ttl=60), work=0.01) for _ in range(20)]
            await waiting(redis_server, 20)
            await redis_server.command("DEL", key("a", "q"), key("a", "w"))
            await waiting(redis_server, 20)
            await stay.end()
        for waiter in stays:
            await waiter.over()
            assert waiter.error is None
    await nothing_left(redis_server)


async def test_waiters_who_give_up_leave_no_trace_and_pass_their_turn_on(
    redis_server, nobody_polls, answers_may_be_late
):
    async with opened(redis_server.url) as (locks, _), opened(redis_server.url) as (others, _):
        async with staying(others.lock("a", ttl=60)) as stay:
            leaving = [Stay(locks.lock("a", ttl=60)) for _ in range(10)]
            await waiting(redis_server, 10)
            patient = Stay(locks.lock("a", ttl=60), work=0)
            await waiting(redis_server, 11)
            with pytest.raises(AcquireTimeoutError):
                await locks.lock("a", wait=0.1).acquire()
            ending = asyncio.create_task(stay.end())
            for waiter in leaving:
                waiter.task.cancel()  # the head, too, at the moment it is woken
            await ending
            await patient.over()
            assert patient.error is None
            await asyncio.wait([waiter.task for waiter in leaving])
    await nothing_left(redis_server)


async def test_the_last_words_of_a_head_wake_the_next_on_a_fresh_server_too(redis_server, proxy, nobody_polls):
    async with opened(proxy.url) as (locks, _), opened(redis_server.url) as (others, _):
        async with staying(others.lock("a", ttl=60)) as stay:
            head = Stay(locks.lock("a", ttl=60))
            await waiting(redis_server, 1)
            await settled(locks, proxy)
            following = Stay(others.lock("a", ttl=60), work=0)
            await waiting(redis_server, 2)
            proxy.half_open()  # the head can say that it leaves, and hears nothing any more
            await stay.end()
            await head.abandon()
            await following.over()
            assert following.error is None
        proxy.heal()
    await nothing_left(redis_server)


async def test_a_client_that_closes_leaves_the_line_at_once(redis_server):
    async with opened(redis_server.url) as (others, _):
        async with staying(others.lock("a", ttl=60)) as stay:
            async with opened(redis_server.url) as (locks, _):
                stays = [Stay(locks.lock("a", ttl=60)) for _ in range(5)]
                await waiting(redis_server, 5)
            for waiter in stays:
                await waiter.over()
            assert await keys(redis_server) == {key("a")}
            await stay.end()
    await nothing_left(redis_server)


async def test_a_waiter_that_is_cancelled_just_before_its_client_closes_leaves_a_server_that_forgot_the_scripts(
    redis_server, proxy, nobody_polls
):
    async with opened(redis_server.url) as (others, _):
        async with staying(others.lock("a", ttl=60)) as stay:
            async with opened(proxy.url) as (locks, _):
                waiter = Stay(locks.lock("a", ttl=60))
                await waiting(redis_server, 1)
                await settled(locks, proxy)
                await redis_server.command("SCRIPT", "FLUSH")
                proxy.delay(replies=0.2)
                waiter.task.cancel()
                await asyncio.wait([waiter.task])
            assert await keys(redis_server) == {key("a")}
            await stay.end()
    await nothing_left(redis_server)


@pytest.mark.parametrize("fair", [True, False])
async def test_only_without_fairness_may_a_newcomer_overtake(fair, redis_server, proxy, answers_may_be_late):
    async with opened(redis_server.url, fair=fair) as (locks, _), opened(proxy.url, fair=fair) as (others, _):
        lease = await locks.lock("a", ttl=60).acquire()
        waiter = Stay(others.lock("a", ttl=60, wait=PATIENCE), work=0)
        await waiting(redis_server, 1)
        await settled(others, proxy)
        proxy.blackhole()
        await lease.release()
        overtaking = await locks.lock("a", ttl=60).try_acquire()
        proxy.heal()
        assert (overtaking is None) is fair
        if overtaking is not None:
            await overtaking.release()
        await waiter.over()
        assert waiter.error is None
    await nothing_left(redis_server)


@pytest.mark.parametrize("sign", ["1", "99999999999999"], ids=["long ago", "before the clock was set back"])
async def test_a_head_that_is_dead_is_passed_over_and_its_place_is_removed(sign, redis_server):
    redis_server.ask_all(
        ["ZADD", key("a", "q"), 1, "dead", 2, "dead too"],
        ["HSET", key("a", "w"), "dead", f"{sign} direct 1 60000 1 PUBLISH nowhere\0"],
    )
    async with opened(redis_server.url) as (locks, _), locks.lock("a", wait=PATIENCE):
        assert await keys(redis_server) == {key("a")}
    await nothing_left(redis_server)


async def test_a_head_that_just_died_costs_three_seconds_and_no_more(redis_server, answers_may_be_late):
    async with opened(redis_server.url) as (locks, _):
        seconds, micros = map(int, await redis_server.command("TIME"))
        redis_server.ask_all(
            ["ZADD", key("a", "q"), 1, "dead"],
            ["HSET", key("a", "w"), "dead", f"{seconds * 1000 + micros // 1000} direct 1 60000 1 PUBLISH nowhere\0"],
        )
        with pytest.raises(LockHeldError):
            await locks.lock("a", wait=0).acquire()
        async with staying(locks.lock("a", wait=PATIENCE)) as stay:
            assert stay.lease.held
            await stay.end()
    left = [await redis_server.command("PTTL", key("a", part)) for part in "qw"]
    assert -1 not in left, "the line ends with its last sign of life"  # -2: it has ended
    await redis_server.command("DEL", key("a", "q"), key("a", "w"))
    await nothing_left(redis_server)


async def test_grants_of_one_lock_never_overlap_and_always_rise(redis_server, proxy):
    """Four clients, two of them behind a network that breaks all the time."""
    tokens = []
    inside = []

    async def use(locks, number) -> None:
        for _ in range(8):
            async with locks.lock("a", ttl=60, wait=100) as lease:
                inside.append(number)
                assert len(inside) == 1
                tokens.append(lease.token)
                await asyncio.sleep(0.001)
                assert inside.pop() == number

    async with contextlib.AsyncExitStack() as stack:
        urls = [redis_server.url, redis_server.url, proxy.url, proxy.url]
        clients = [(await stack.enter_async_context(opened(url)))[0] for url in urls]
        tasks = [asyncio.create_task(use(locks, (n, m))) for n, locks in enumerate(clients) for m in range(5)]
        pause = 0.2
        while not all(task.done() for task in tasks):
            proxy.cut()
            await asyncio.wait(tasks, timeout=pause)
            pause *= 1.1  # a slow machine gets somewhere, too
        await asyncio.gather(*tasks)
        assert tokens == sorted(set(tokens))
        assert len(tokens) == 160
    await nothing_left(redis_server)
