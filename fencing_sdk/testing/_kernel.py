"""
What a world is made of, and how it runs and ends.

The kernel refers to nothing that a test holds. So a world ends as soon as a test lets go of it:
not when a garbage collector finds it, in the middle of another test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from fencing_sdk._values.names import check_name
from fencing_sdk.errors import ConfigurationError, FencingError, UsageError, shown
from fencing_sdk.testing._loop import check_python
from fencing_sdk.testing._network import Network
from fencing_sdk.testing._process import Process, ProcessClock
from fencing_sdk.testing._service import SERVICE, LockService
from fencing_sdk.testing._timeline import Timeline, never

T = TypeVar("T")

_END_LIMIT = 120.0
"""Virtual seconds for all processes to end; a client that keeps to its limits needs fewer."""


class Kernel:
    """Time, the network, the lock service and the processes of one world."""

    def __init__(self, seed: int, *, latency: tuple[float, float], service_rate: float, patience: float) -> None:
        check_python()
        self.timeline = Timeline(seed)
        self.network = Network(self.timeline, latency=latency)
        self.service = LockService(ProcessClock(self.timeline, rate=service_rate))
        self.processes: list[Process] = []
        self._names = {SERVICE}
        self._patience = patience
        self._closed = False

    def new_name(self, name: str) -> str:
        """
        Take *name* for a client or a store.

        Raises:
            ConfigurationError: it is taken, or not a name.
            UsageError: the world has ended.
        """
        self.check_open()
        if check_name(name) in self._names:
            msg = f"{shown(name)} is in this world already; pass another name"
            raise ConfigurationError(msg)
        self._names.add(name)
        return name

    def new_process(self, name: str, *, clock_rate: float) -> Process:
        """Add a process."""
        process = Process(self.timeline, self.new_name(name), rate=clock_rate)
        self.processes.append(process)
        return process

    def check_open(self) -> None:
        """
        Raise if the world has ended.

        Raises:
            UsageError: it has.
        """
        if self._closed:
            msg = "this world has ended; make another one"
            raise UsageError(msg)

    def sleep(self, duration: float) -> None:
        """Let time go on."""
        self.check_open()
        until = self.timeline.now + duration
        self._run(until, never)
        self.timeline.now = max(self.timeline.now, until)

    def finish(self, task: asyncio.Task[T]) -> T:
        """
        Let time go on until *task* has ended; return or raise its outcome.

        Raises:
            UsageError: it does not end within the patience, or nothing is left that could end it.
        """
        self.check_open()
        host = next((process for process in self.processes if process.loop is task.get_loop()), None)
        if host is None:
            msg = "the task does not belong to this world; make it with client.start(...)"
            raise UsageError(msg)
        self.wait(host, task.done)
        return task.result()

    def wait(self, host: Process, done: Callable[[], bool]) -> None:
        """
        Let time go on until *done*, by what *host* does.

        Raises:
            UsageError: code of *host* is calling, or it is not done within the patience, or never will be.
        """
        self.check_open()
        if host.turning:
            msg = f"code of client {shown(host.name)} would wait for itself; await the coroutine instead"
            raise UsageError(msg)
        self._run(self.timeline.now + self._patience, done)
        if not done():
            raise UsageError(self._why_endless())

    def _why_endless(self) -> str:
        paused = ", ".join(process.name for process in self.processes if process.paused)
        hint = f"paused are {paused}: call resume()" if paused else "is a message lost that it waits for?"
        if self.timeline.over:
            return f"the call will never end, because nothing is left to happen; {hint}"
        return f"the call did not end within {self._patience:g} virtual seconds; {hint}"

    def _run(self, until: float, stop: Callable[[], bool]) -> None:
        self.timeline.run(until, stop)
        _raise(self._take_failures())

    def _take_failures(self) -> list[BaseException]:
        failures = list(self.timeline.failures)
        self.timeline.failures.clear()
        return failures

    def end(self) -> None:
        """
        Resume all processes, cancel their work, close their clients. The history ends before that. Idempotent.

        Raises:
            ExceptionGroup: tasks failed and were never awaited; the bare error where there is only one.
        """
        if any(process.turning for process in self.processes):
            msg = "a world cannot be ended by code that runs in it"
            raise UsageError(msg)
        if self._closed:
            return
        self._closed = True
        before = [*self._take_failures(), *(error for process in self.processes for error in process.unseen())]
        self.timeline.recording = False
        self.network.heal()
        meanwhile = self._end_processes()
        _raise([*before, *(error for error in meanwhile if not isinstance(error, FencingError))])

    def _end_processes(self) -> list[BaseException]:
        """Return what failed; a lease that was lost because the world ended is among it."""
        endings = [process.end() for process in self.processes]
        limit = self.timeline.now + _END_LIMIT
        failures: list[BaseException] = []
        while True:
            self.timeline.run(limit, lambda: all(ending.done() for ending in endings))
            if not self.timeline.failures:
                break
            failures += self._take_failures()
        return [*failures, *(error for process in self.processes for error in process.close())]


def _raise(errors: Sequence[BaseException]) -> None:
    if len(errors) == 1:
        raise errors[0]
    if errors:
        msg = "errors of tasks that were never awaited"
        raise BaseExceptionGroup(msg, errors)
