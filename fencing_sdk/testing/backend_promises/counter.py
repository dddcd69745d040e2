"""A counter that only the lock protects, incremented by many tasks and by real processes."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from fencing_sdk._client import LockClient
from fencing_sdk._values.token_wire import ENV_URL
from fencing_sdk.abc import Backend
from fencing_sdk.testing import counting
from fencing_sdk.testing._powers import needs
from fencing_sdk.testing.backend_promises.backend_under_test import BackendUnderTest, Reopen
from fencing_sdk.testing.counting import Counter

_ROUNDS = 8
_PROCESSES = 4
_TASKS = 8
_FICKLE = 30


class CounterPromises(BackendUnderTest):
    """Exclusion and rising tokens, under load."""

    async def test_many_tasks_count_exactly(self, backend: Backend, reopen: Reopen, tmp_path: Path) -> None:
        """The sum is exact and the tokens rise in the order of the writes."""
        counter = Counter(tmp_path)
        async with (
            LockClient(backend) as here,
            LockClient(reopen()) as there,
            self.soon(),
            asyncio.TaskGroup() as tasks,
        ):
            for locks in (here, there) * (_TASKS // 2):
                tasks.create_task(counter.increment(locks, _ROUNDS))
        self._check(counter, _TASKS * _ROUNDS)

    async def test_tasks_that_are_cancelled_at_random_harm_nobody(self, backend: Backend, tmp_path: Path) -> None:
        """Waiting, acquiring, holding or releasing: the others count on, and exactly."""
        counter = Counter(tmp_path)

        async def harass() -> None:
            for _ in range(_FICKLE):
                fickle = asyncio.create_task(self._hold(locks))
                await asyncio.sleep(random.uniform(0, 0.01))
                fickle.cancel()
                await asyncio.wait((fickle,))

        async with LockClient(backend) as locks, self.soon(), asyncio.TaskGroup() as tasks:
            tasks.create_task(harass())
            for _ in range(2):
                tasks.create_task(counter.increment(locks, _ROUNDS))
        self._check(counter, 2 * _ROUNDS)

    @needs("processes")
    async def test_processes_count_exactly(self, backend: Backend, url: str, tmp_path: Path) -> None:
        """Each with a client of its own on the store's URL; one more task counts in this process."""
        counter = Counter(tmp_path)
        async with AsyncExitStack() as running:
            processes = [await self._start(running, url, tmp_path) for _ in range(_PROCESSES)]
            locks = await running.enter_async_context(LockClient(backend))
            await _set_off_together(processes)
            await counter.increment(locks, _ROUNDS)
            for process in processes:
                output, _ = await process.communicate()
                assert process.returncode == 0, output.decode(errors="replace")
        self._check(counter, (_PROCESSES * counting.TASKS + 1) * _ROUNDS)

    async def _start(self, running: AsyncExitStack, url: str, folder: Path) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            counting.__name__,
            str(folder),
            str(_ROUNDS),
            env={**os.environ, ENV_URL: url},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        running.push_async_callback(_stop, process)
        return process

    def _check(self, counter: Counter, expected: int) -> None:
        assert counter.read() == expected, "increments were lost: two held the lock at once"
        assert len(counter.tokens()) == expected
        self.assert_rising(counter.tokens())

    async def _hold(self, locks: LockClient) -> None:
        async with locks.lock(counting.LOCK, ttl=30):
            await asyncio.sleep(random.uniform(0, 0.005))


async def _set_off_together(processes: list[asyncio.subprocess.Process]) -> None:
    """Let all processes begin at once: a process that ends before the next one starts would meet no rival."""
    for process in processes:
        assert process.stdout is not None
        first = await process.stdout.readline()
        assert first == b"ready\n", first.decode(errors="replace")
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()
