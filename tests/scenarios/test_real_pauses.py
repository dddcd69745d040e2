"""
Processes that are really stopped, really blocked and really killed, and a witness who counts what they send.

A message carries the worker's clock, read first, and its token, read last. So a message whose time
lies after the deadline is the proof that the token was read after the deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from child_processes import guarded
from event_log import CLOCK
from patience import until

from fencing_sdk import LockClient, StaleTokenError, connect
from fencing_sdk.guards.memory import MemoryGuard

pytestmark = pytest.mark.slow

WORKER = Path(__file__).parents[1] / "support" / "workers" / "pause_worker.py"
FILE = "locks.db"
NAME = "seats/42"
TTL = 0.6
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Message:
    sent: float
    token: int
    accepted: bool


class Sink:
    """A resource on a socket. It answers a little late, so that a stopped worker finds answers when it goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.guard = MemoryGuard()
        self.messages: list[Message] = []

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Sink]:
        server = await asyncio.start_unix_server(self._serve, self.path)
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            while line := await reader.readline():
                sent, token = line.split()
                self.messages.append(Message(float(sent), int(token), self._accepts(int(token))))
                await asyncio.sleep(0.003)
                writer.write(b"ok\n")
        writer.close()

    def _accepts(self, token: int) -> bool:
        with contextlib.suppress(StaleTokenError):
            self.guard.admit(NAME, token)
            return True
        return False

    def of(self, token: int) -> list[Message]:
        return [message for message in self.messages if message.token == token]


class Worker:
    """A worker process and everything that it reported."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.reports: list[dict] = []
        self._listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while line := await self.process.stdout.readline():
            self.reports.append(json.loads(line))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def stop(self) -> None:
        self.signal(signal.SIGSTOP)
        flags = os.WSTOPPED | os.WNOWAIT | os.WNOHANG
        await until(lambda: os.waitid(os.P_PID, self.process.pid, flags) is not None)

    def held(self) -> int | None:
        """The token of the lease it has now, as far as it told."""
        last = next((report for report in reversed(self.reports) if report["kind"] in {"acquired", "lost"}), None)
        return last["token"] if last is not None and last["kind"] == "acquired" else None

    async def acquired(self) -> int:
        await until(self.held, within=20)
        return self.held()

    async def renewed(self) -> None:
        """Wait for a renewal from now on. The next one is an interval away, so the worker is not inside the store."""
        begin = len(self.reports)
        await until(lambda: any(report["kind"] == "renewed" for report in self.reports[begin:]), within=20)

    async def left(self, token: int) -> str:
        """Wait until it has left the lock that it held with *token*; return why."""
        await until(lambda: self._left(token), within=20)
        return self._left(token)["reason"]

    def _left(self, token: int) -> dict | None:
        lefts = (report for report in self.reports if report["kind"] == "left" and token in report["tokens"])
        return next(lefts, None)

    def deadline(self, token: int) -> float:
        heard = (report["deadline"] for report in self.reports if "deadline" in report and report["token"] == token)
        return max(heard, default=math.inf)

    def stale(self, sink: Sink) -> list[Message]:
        """Messages whose token was read after the deadline of its lease."""
        return [message for message in sink.messages if message.sent >= self.deadline(message.token)]

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        await self._listening


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/{FILE}?synchronous=normal"


@pytest.fixture
async def sink(tmp_path: Path) -> AsyncIterator[Sink]:
    async with Sink(tmp_path / "sink").open() as sink:
        yield sink


@pytest.fixture
async def others(url: str) -> AsyncIterator[LockClient]:
    """The client of a process that keeps running: this one."""
    async with connect(url) as client:
        yield client


@pytest.fixture
async def start(url: str, sink: Sink):
    """Start workers, and end them with the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(shape: str, *, tasks: int = 20, ttl: float = TTL) -> Worker:
            arguments = (url, str(sink.path), NAME, str(ttl), str(tasks), shape)
            command = guarded([sys.executable, str(WORKER), *arguments])
            process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            worker = Worker(process)
            stack.push_async_callback(worker.end)
            return worker

        yield start


def may_write(file: Path) -> bool:
    """Whether no process is inside a transaction: one that is stopped there keeps the file from all others."""
    with contextlib.closing(sqlite3.connect(file, timeout=0.0, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            return False
        connection.execute("ROLLBACK")
        return True


async def stop_at_work(worker: Worker, sink: Sink) -> int:
    """Stop *worker* while it holds the lock and its messages are under way; return its token."""
    while True:
        token = await worker.acquired()
        await until(lambda token=token: len(sink.of(token)) > 20 or worker.held() != token)
        await worker.renewed()
        await asyncio.sleep(random.uniform(0, TTL / 20))
        await worker.stop()
        await asyncio.sleep(0.02)  # what it has reported is read by now
        if worker.held() == token and may_write(sink.path.with_name(FILE)):
            return token
        # This machine was so busy that the lease was lost without our help, or that a renewal was under way.
        worker.signal(signal.SIGCONT)


async def sleep_past_the_lease(worker: Worker, sink: Sink, others: LockClient) -> tuple[int, int]:
    """Stop *worker* at work, let somebody else hold the lock meanwhile, and let it go on; return both tokens."""
    token = await stop_at_work(worker, sink)
    async with asyncio.timeout(15):
        heir = await others.lock(NAME, ttl=5, fences=[sink.guard]).acquire()
    assert CLOCK.now() > worker.deadline(token), "handed on after the worker's own deadline"
    heirs = heir.token
    await heir.release()
    worker.signal(signal.SIGCONT)
    return token, heirs


@pytest.mark.parametrize(("shape", "tasks"), [("calls", 1), ("calls", 20), ("bursts", 20), ("threads", 4)])
async def test_a_process_that_was_stopped_past_its_lease_reads_no_token(start, sink, others, shape, tasks):
    """Stopped at random with answers under way, resumed when somebody else has had the lock, round after round."""
    worker = await start(shape, tasks=tasks)
    last, stopped = 0, set()
    for _ in range(ROUNDS):
        token, heirs = await sleep_past_the_lease(worker, sink, others)
        stopped.add(token)
        assert last < token < heirs
        assert await worker.left(token) in {"stalled", "expired"}
        last = heirs
    assert await worker.acquired() > last
    assert len(sink.messages) > 20 * ROUNDS
    assert worker.stale(sink) == []
    refused = [message for message in sink.messages if not message.accepted and message.token in stopped]
    assert len(refused) <= ROUNDS * tasks, "only what was stopped between the read and the send"


async def test_a_process_that_does_not_look_at_its_token_is_refused_by_the_resource(start, sink, others):
    """The same, with a number that was kept. It is sent too late, every time; this is what fences are for."""
    worker = await start("careless", tasks=4)
    paused = set()
    for _ in range(ROUNDS):
        token, _ = await sleep_past_the_lease(worker, sink, others)
        paused.add(token)
        await worker.left(token)
    await until(lambda: paused <= {message.token for message in worker.stale(sink)}, within=20)
    stale = [message for message in worker.stale(sink) if message.token in paused]  # not lost to a busy machine
    assert not any(message.accepted for message in stale)


async def test_a_blocked_event_loop_reads_no_token_either(start, sink):
    """Not stopped but busy: something computes for longer than the ttl while twenty calls are under way."""
    worker = await start("blocked")
    for _ in range(2):
        assert await worker.left(await worker.acquired()) in {"stalled", "expired"}
    await until(lambda: len(sink.messages) > 100)
    assert worker.stale(sink) == []


async def test_a_computation_without_an_await_learns_of_the_loss_when_it_leaves(start, sink):
    """Nothing can reach it; it does not leave the ``async with`` as if all were well."""
    worker = await start("endless")
    assert await worker.left(await worker.acquired()) in {"stalled", "expired"}


async def test_a_pause_that_is_shorter_than_the_lease_costs_nothing(start, sink):
    """The same lease goes on, with the same token."""
    worker = await start("calls", ttl=8.0)
    token = await worker.acquired()
    for _ in range(3):
        await until(lambda: len(sink.messages) > 20)
        await worker.stop()
        await asyncio.sleep(0.3)
        worker.signal(signal.SIGCONT)
    seen = len(sink.messages)
    await until(lambda: len(sink.messages) > seen + 40)
    assert {message.token for message in sink.messages} == {token}
    assert not [report for report in worker.reports if report["kind"] in {"lost", "left"}]


async def test_the_lock_of_a_killed_process_is_free_after_its_ttl_and_not_before(start, sink, others):
    """kill -9: no release, no last word. Somebody else gets a higher token once the ttl is over."""
    worker = await start("calls")
    await worker.acquired()
    await worker.renewed()
    token = await worker.acquired()
    worker.signal(signal.SIGKILL)
    await worker.process.wait()
    killed_at = CLOCK.now()
    deadline = worker.deadline(token)
    heir = await asyncio.wait_for(others.lock(NAME, ttl=5, wait=15).acquire(), 20)
    assert CLOCK.now() > deadline
    assert CLOCK.now() < killed_at + TTL + 5
    assert heir.token > token
    await heir.release()
