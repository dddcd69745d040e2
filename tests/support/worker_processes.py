"""Worker processes: what they say and what a test does to them; none outlives its test, also when it is stopped."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from child_processes import guarded

WORKERS = Path(__file__).with_name("workers")
LIMIT = 120.0
"""Seconds after which something that should happen soon has not happened."""

PIPE = asyncio.subprocess.PIPE


class WorkerProcess:
    """A process that says lines of words, and goes on when it gets a line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def says(self, word: str | None = None) -> list[str]:
        """Wait for its next line, which must begin with *word* if one is given; return the rest."""
        assert self.process.stdout is not None
        async with asyncio.timeout(LIMIT):
            said = (await self.process.stdout.readline()).decode().split()
        if word is None:
            return said
        assert said[:1] == [word], said or "the process has ended"
        return said[1:]

    async def go_on(self) -> None:
        """Send it a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        await self.process.stdin.drain()

    async def ended(self) -> str:
        """Wait for its end, which must be clean; return what it said."""
        async with asyncio.timeout(LIMIT):
            said, _ = await self.process.communicate()
        assert self.process.returncode == 0, said.decode()
        return said.decode()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def cont(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()


Worker = TypeVar("Worker", bound=WorkerProcess)


@asynccontextmanager
async def worker_processes(
    kind: Callable[[asyncio.subprocess.Process], Worker] = WorkerProcess,  # type: ignore[assignment]
) -> AsyncIterator[Callable[..., Awaitable[Worker]]]:
    """Yield a function that starts a script with arguments; kill at the end what still runs."""
    started: list[Worker] = []

    async def start(script: Path, *arguments: object) -> Worker:
        command = guarded([sys.executable, str(script), *map(str, arguments)])
        started.append(kind(await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)))
        return started[-1]

    try:
        yield start
    finally:
        for worker in started:
            await worker.kill()
