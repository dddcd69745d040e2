"""Processes that share a ZooKeeper, and are killed, stopped or forked."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from stays import PATIENCE, eventually, opened

from fencing_sdk import LossReason
from fencing_sdk._lease import state_of

pytest_plugins = ["zookeeper_fixtures"]

WORKERS = Path(__file__).parent / "workers"
LIMIT = 3 * PATIENCE


class Worker:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def says(self) -> list[str]:
        """The words of its next line; none when it has ended."""
        assert self.process.stdout is not None
        async with asyncio.timeout(LIMIT):
            return (await self.process.stdout.readline()).decode().split()

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()


Start = Callable[..., Awaitable[Worker]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Start workers, which do not outlive the test."""
    workers: list[Worker] = []

    async def start(script: str, *arguments: str) -> Worker:
        pipe = asyncio.subprocess.PIPE
        command = [sys.executable, str(WORKERS / script), *arguments]
        workers.append(Worker(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)))
        return workers[-1]

    yield start
    for worker in workers:
        await worker.kill()


async def test_a_holder_that_was_stopped_for_longer_than_its_session_finds_its_lease_gone(
    zookeeper_url, start, tmp_path
):
    """Before it was waked, somebody else held the lock; its first look at the token tells it."""
    sink = tmp_path / "sink"
    sent: list[tuple[float, int]] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            at, token = line.split()
            sent.append((float(at), int(token)))
            writer.write(b"\n")
        writer.close()

    server = await asyncio.start_unix_server(take, sink)
    worker = await start("pause_worker.py", zookeeper_url, str(sink), "a", "1.5", "2", "calls")
    async with opened(zookeeper_url) as (locks, _):
        await eventually(lambda: _some(sent), what="the worker holds the lock")
        worker.process.send_signal(signal.SIGSTOP)
        lease = await asyncio.wait_for(locks.lock("a", ttl=20).acquire(), LIMIT)
        before = len(sent)
        worker.process.send_signal(signal.SIGCONT)
        while (b := await worker.process.stdout.readline()) and b'"left"' not in b:
            pass
        assert any(f'"reason": "{reason}"'.encode() in b for reason in LossReason)
        assert sent[before:] == [], "it worked on after it was waked"
        assert max(token for _, token in sent) < lease.token
        await lease.release()
        await eventually(lambda: _some(sent[before:]), what="the worker holds the lock again")
        assert sent[-1][1] > state_of(lease).number
    await worker.kill()
    server.close()


async def _some(sent: list[tuple[float, int]]) -> bool:
    return bool(sent)
