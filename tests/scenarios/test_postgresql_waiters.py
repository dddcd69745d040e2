"""Many wait for one lock; some are killed, wake-ups are lost: all others are served, in order, one by one."""

import asyncio
import math
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from patience import until
from postgresql_stage import nothing_left, sessions, terminate, waiting
from stays import PATIENCE, Stay, opened, staying, use_in_turn

from fencing_sdk import AcquireTimeoutError, BackendUnavailableError
from fencing_sdk.backends.postgresql import schema

pytest_plugins = ["postgresql_fixtures"]

WORKERS = Path(__file__).parent / "workers"
LIMIT = 50.0


class Worker:
    """A process with waiters: what it said so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.grants: list[tuple[int, int]] = []
        self.lag = math.inf
        self.ready, self.granted = asyncio.Event(), asyncio.Event()
        self.listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while line := (await self.process.stdout.readline()).split():
            if line[0] == b"granted":
                self.grants.append((int(line[1]), int(line[2])))
                self.granted.set()
            elif line[0] == b"ready":
                self.ready.set()
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

    async def start(script: str, *arguments: object) -> Worker:
        command = [sys.executable, str(WORKERS / script), *map(str, arguments)]
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        workers.append(Worker(await asyncio.create_subprocess_exec(*command, **pipes)))
        return workers[-1]

    yield start
    for worker in workers:
        await worker.kill()


# Processes.


async def test_twelve_processes_that_are_the_first_at_the_same_time_create_the_schema_once(postgresql_server, start):
    server = postgresql_server
    workers = [await start("postgresql_first.py", server.url, "a") for _ in range(12)]
    async with asyncio.timeout(LIMIT):
        for worker in workers:
            await worker.ready.wait()
        assert await server.value("SELECT to_regnamespace('fencing')") is None
        for worker in workers:
            worker.process.stdin.write(b"\n")
        assert [await worker.process.wait() for worker in workers] == [0] * 12
        await asyncio.gather(*(worker.listening for worker in workers))
    tokens = [token for worker in workers for _, token in worker.grants]
    assert len(set(tokens)) == 12
    assert await server.value("SELECT token FROM fencing.fencing_lock WHERE name = 'a'") == max(tokens)
    await nothing_left(server)


# One process.


@pytest.fixture
def no_polling(monkeypatch):
    """No waiter tries again for a minute unless it is woken, and none is removed from the line because of that."""
    monkeypatch.setattr("fencing_sdk.backends.postgresql.waiters.LINE_POLL", 240.0)
    monkeypatch.setattr("fencing_sdk.backends.postgresql.connection.listener.ECHO_PATIENCE", PATIENCE)
    monkeypatch.setattr("fencing_sdk._engine.acquisition._LONGEST_NAP", 60.0)
    text = schema._TEXT
    for found in ("v_now) + 3 FROM", "p_now - interval '3 seconds'", "p_now + interval '3 seconds'"):
        assert text.count(found) == 1
        text = text.replace(found, found.replace("3", "240"))
    monkeypatch.setattr(schema, "_TEXT", text)


@pytest.mark.every_loop
async def test_a_released_lock_reaches_the_next_in_order_and_by_a_message(postgresql_server, no_polling):
    server = postgresql_server
    async with opened(server.url) as (locks, _), opened(server.url) as (others, _):
        async with staying(locks.lock("a", ttl=60)) as stay:
            order: list[int] = []

            async def wait(place: int) -> None:
                async with others.lock("a", ttl=60):
                    order.append(place)

            tasks = []
            for place in range(30):
                tasks.append(asyncio.create_task(wait(place)))
                if place % 10 == 9:
                    await waiting(server, place + 1)
            await until(lambda: others._backend._waiters.listening)
            assert len(await sessions(server)) == 3  # two for calls, one to listen on
            await stay.end()
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(*tasks)
            assert order == list(range(30))
    await nothing_left(server)


async def test_a_waiter_that_missed_a_message_tries_when_its_client_listens_again(
    postgresql_server, postgresql_proxy, no_polling
):
    server, proxy = postgresql_server, postgresql_proxy
    async with opened(proxy.url) as (locks, _), opened(server.url) as (others, _):
        async with staying(others.lock("a", ttl=60)) as stay:
            waiter = Stay(locks.lock("a", ttl=60), work=0)
            await waiting(server, 1)
            await until(lambda: locks._backend._waiters.listening)
            await locks.inspect("other")  # now the try that was made while listening is answered
            proxy.refuse()
            proxy.cut()
            await until(lambda: not locks._backend._waiters.listening)
            await stay.end()
        proxy.heal()
        await waiter.over()
        assert waiter.error is None
    await nothing_left(server)


async def test_waiters_who_give_up_leave_no_trace_and_pass_their_turn_on(postgresql_server, no_polling):
    server = postgresql_server
    async with opened(server.url) as (locks, _), opened(server.url) as (others, _):
        async with staying(others.lock("a", ttl=60)) as stay:
            leaving = [Stay(locks.lock("a", ttl=60)) for _ in range(10)]
            await waiting(server, 10)
            patient = Stay(locks.lock("a", ttl=60), work=0)
            await waiting(server, 11)
            with pytest.raises((AcquireTimeoutError, BackendUnavailableError)):
                await locks.lock("a", wait=0.1).acquire()
            ending = asyncio.create_task(stay.end())
            for waiter in leaving:
                waiter.task.cancel()  # the head, too, at the moment it is woken
            await ending
            await patient.over()
            assert patient.error is None
            await asyncio.wait([waiter.task for waiter in leaving])
    await nothing_left(server)


async def test_a_head_that_leaves_while_it_is_its_turn_wakes_the_next(postgresql_server, postgresql_proxy, no_polling):
    server, proxy = postgresql_server, postgresql_proxy
    async with opened(proxy.url) as (locks, _), opened(server.url) as (others, _):
        async with staying(others.lock("a", ttl=60)) as stay:
            first = Stay(locks.lock("a", ttl=60))
            await waiting(server, 1)
            await first.abandon()
            await waiting(server, 0)  # now the statement to leave is prepared
            head = Stay(locks.lock("a", ttl=60))
            await waiting(server, 1)
            following = Stay(others.lock("a", ttl=60), work=0)
            await waiting(server, 2)
            await until(lambda: locks._backend._waiters.listening and others._backend._waiters.listening)
            await locks.inspect("other")  # now the tries that were made while listening are answered
            await others.inspect("other")
            proxy.half_open()  # the head is not reached by the message, but can say that it leaves
            await stay.end()
            await head.abandon()
            await following.over()
            assert following.error is None
        proxy.heal()
    await nothing_left(server)


async def test_a_head_that_is_dead_is_passed_over_and_its_place_is_removed(postgresql_server):
    server = postgresql_server
    async with opened(server.url) as (locks, _):
        async with locks.lock("a"):
            pass
        for moment in ("now() - interval '1 hour'", "now() + interval '1 hour'", "now()"):
            await server.execute(
                "INSERT INTO fencing.fencing_waiter (name, number, owner, seen, channel, word, mode) "
                f"VALUES ('a', 1, 'dead', {moment}, 'nowhere', 'x', 'lock')"
            )
            async with locks.lock("a", wait=PATIENCE):
                pass
            await waiting(server, 0)
    await nothing_left(server)


async def test_a_line_that_was_emptied_forms_again(postgresql_server):
    """As by a crash of the server, or by a standby that takes over: the line is in a table that is not logged."""
    server = postgresql_server
    async with opened(server.url) as (locks, _), opened(server.url) as (others, _):
        async with staying(others.lock("a", ttl=60)) as stay:
            stays = [Stay(locks.lock("a", ttl=60), work=0.01) for _ in range(10)]
            await waiting(server, 10)
            await server.execute("TRUNCATE fencing.fencing_waiter")
            await waiting(server, 10)
            await stay.end()
        for waiter in stays:
            await waiter.over()
            assert waiter.error is None
    await nothing_left(server)


async def test_grants_never_overlap_while_sessions_are_terminated_all_the_time(postgresql_server):
    server = postgresql_server
    async with opened(server.url) as (one, _), opened(server.url) as (two, _), opened(server.url) as (three, _):
        using = asyncio.create_task(use_in_turn([one, two, three], tasks=4, times=3))
        pause = 0.4
        while not using.done():
            await terminate(server)
            await asyncio.wait([using], timeout=pause)
            pause *= 1.1  # a slow machine gets somewhere, too
        await using
    await nothing_left(server)
