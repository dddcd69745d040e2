"""
The bridge from plain code to a simulated client: the thread of the test lets time go on until each call is done.

No thread is started. Plain code runs where the test calls it, between two turns of all event loops, so that it may use
what refuses to run in one, such as Django's ORM, and the database connection of the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fencing_sdk._client import LockClient
from fencing_sdk._current_lease import run_for
from fencing_sdk._values import forks
from fencing_sdk._values.clock import BootClock
from fencing_sdk.errors import UsageError, shown
from fencing_sdk.sync._client import SyncLockClient
from fencing_sdk.sync._lease import LEAVING
from fencing_sdk.sync._loop_thread import LoopThread
from fencing_sdk.sync._thread_call import Cancel, ThreadCall
from fencing_sdk.testing._kernel import Kernel
from fencing_sdk.testing._process import Process
from fencing_sdk.testing._timeline import Timeline

# ruff: noqa: SLF001  (the client for threads meets a bridge that it did not make)

T = TypeVar("T")

LEAVING.add(Timeline.run.__code__)


def client_for_threads(client: LockClient, kernel: Kernel, process: Process) -> SyncLockClient:
    """Return a client for plain code, which has *process* do the work of its background thread."""
    locks = SyncLockClient(client)
    locks._bridges[forks.here()] = WorldThread(client, kernel, process)
    return locks


class WorldThread(LoopThread):
    """The part of the background thread is played by a simulated process."""

    def __init__(self, client: LockClient, kernel: Kernel, process: Process) -> None:
        super().__init__(client)
        self._kernel = kernel
        self._process = process
        self._loop = process.loop

    def _prepare(
        self,
        function: Callable[[], Awaitable[T]],
        undo: Callable[[T], Awaitable[object]] | None = None,
        cancel: Cancel | None = None,
        *,
        opens: bool = True,
    ) -> ThreadCall[T]:
        if opens:
            self.open()
        return _WorldCall(self._wait, function, undo, cancel, acquires=opens)

    def call_aside(self, function: Callable[[], None]) -> None:
        """Call *function* now: a thread of its own would run on real time."""
        function()

    def open(self) -> asyncio.AbstractEventLoop:
        """Return the loop of the process, in which the client is open unless it was closed."""
        if self._closed:
            self._closed = False
            self.call(self._client.__aenter__)
        return self._process.loop

    def close(self) -> None:
        """See `LoopThread.close`."""
        if not self._closed:
            self.call(self._client.aclose)
            self._closed = True

    def close_soon(self) -> None:
        """Nothing: the world closes its clients."""

    def _post(
        self,
        begin: Callable[[], None],
        only: asyncio.AbstractEventLoop | None,  # noqa: ARG002  (a process has one)
        call: ThreadCall[Any] | None = None,
    ) -> None:
        self._kernel.check_open()
        if self._process.paused:
            msg = f"client {shown(self._process.name)} is paused, so none of its code runs: call resume() first"
            raise UsageError(msg)
        if call is not None:
            call.loop = self._process.loop
        self._process.loop.arrive(begin)

    def _wait(self, done: Callable[[], bool]) -> None:
        self._kernel.wait(self._process, done)


class _WorldCall(ThreadCall[T]):
    """One coroutine for which the world goes on."""

    __slots__ = ("_wait_until",)

    def __init__(
        self,
        wait_until: Callable[[Callable[[], bool]], None],
        function: Callable[[], Awaitable[T]],
        undo: Callable[[T], Awaitable[object]] | None = None,
        cancel: Cancel | None = None,
        *,
        acquires: bool,
    ) -> None:
        super().__init__(function, undo, cancel, acquires=acquires)
        self._wait_until = wait_until

    def begin(self) -> None:
        """See `ThreadCall.begin`. The loop numbers its tasks, so it makes them."""
        run_for(self._thread)
        self._task = asyncio.get_running_loop().create_task(self._run())

    def _sleep(self) -> None:
        self._wait_until(lambda: not self._woken.locked())
        self._woken.acquire()

    def _sleep_unless(self, cancel: Cancel, post: Callable[[], object]) -> None:
        began = BootClock.now()

        def woken() -> bool:
            cancel.check(began)
            return not self._woken.locked()

        woken()
        post()
        self._wait_until(woken)
        self._woken.acquire()

    def _outwait(self, undone: threading.Event) -> None:
        with contextlib.suppress(UsageError):  # the client is paused
            self._wait_until(undone.is_set)
