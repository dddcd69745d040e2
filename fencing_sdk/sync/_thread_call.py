"""One call: a coroutine that a thread waits for, and what that coroutine has the thread do meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar, cast

from fencing_sdk._current import held_here, pop, push
from fencing_sdk._engine.cancellation import outlast_cancellation
from fencing_sdk.errors import UsageError

R = TypeVar("R")
T = TypeVar("T")

_NAP = 0.2
"""Seconds that the main thread sleeps at most, before it looks whether a signal came."""
_UNDO_LIMIT = 5.0
"""Seconds that an interrupted caller waits until what it asked for is undone. It is undone later, too."""


class InThread(Protocol):
    """Has the thread that waits for a coroutine run a function, which that coroutine awaits."""

    def __call__(self, function: Callable[[], R], /) -> Awaitable[R]: ...


class ClosedMeanwhileError(UsageError):
    """The client was closed before the call was answered; what it held was given back."""


class ThreadCall(Generic[T]):
    """One coroutine that a thread waits for."""

    __slots__ = ("_body", "_ended", "_error", "_function", "_task", "_undo", "_undoing", "_value")

    def __init__(
        self, function: Callable[[], Awaitable[T]], undo: Callable[[T], Awaitable[object]] | None = None
    ) -> None:
        self._function = function
        self._undo = undo
        self._body: ThreadBody | None = None
        self._ended = threading.Lock()  # held until the coroutine has ended, or has a body to run: cheap to sleep on
        self._ended.acquire()
        self._value: T | None = None
        self._error: BaseException | None = None
        self._task: asyncio.Task[None] | None = None
        self._undoing: asyncio.Task[None] | None = None

    # In the loop.

    def begin(self) -> None:
        """Start the coroutine. Where tasks may be eager, it is asked at once, and not in the next turn of the loop."""
        loop, coroutine = asyncio.get_running_loop(), self._run()
        if sys.version_info >= (3, 12):
            self._task = asyncio.Task(coroutine, loop=loop, eager_start=True)
        else:
            self._task = loop.create_task(coroutine)

    async def _run(self) -> None:
        try:
            self._value = await self._function()
        except BaseException as error:  # noqa: BLE001  (it leaves in the thread that waits)
            self._error = error
        finally:
            self._ended.release()

    async def in_thread(self, function: Callable[[], R]) -> R:
        """
        Have the thread that waits run *function*, under the leases of this task, and return its value.

        Nothing stops it. A cancellation waits until it has ended, unless it failed by itself.
        """
        body = self._body = ThreadBody(function)
        self._ended.release()
        cancelled = await outlast_cancellation(body.ended.wait, body.ended.is_set)
        if body.error is not None:
            raise body.error
        if cancelled is not None:
            raise cancelled
        return cast("R", body.value)

    def _begin_to_undo(self, undone: threading.Event) -> None:
        self._undoing = asyncio.get_running_loop().create_task(self._take_back(undone))

    async def _take_back(self, undone: threading.Event) -> None:
        try:
            if self._task is not None and not self._task.done():
                self._task.cancel()
                await asyncio.wait((self._task,))
            if self._error is None and self._undo is not None:
                await self._undo(cast("T", self._value))
        finally:
            undone.set()

    # In the thread.

    def wait(self, loop: asyncio.AbstractEventLoop) -> T:
        """Sleep until the coroutine has ended; return its value, or raise its error."""
        try:
            self._sleep()
            while (body := self._body) is not None:
                self._body = None
                body.run()
                loop.call_soon_threadsafe(body.ended.set)
                self._sleep()
        except BaseException:  # raised by the handler of a signal: KeyboardInterrupt, SystemExit, a limit of Celery
            undone = threading.Event()
            with contextlib.suppress(RuntimeError):  # the loop is closed, and has given all back
                loop.call_soon_threadsafe(self._begin_to_undo, undone)
                undone.wait(_UNDO_LIMIT)
            raise
        error = self._error
        if error is None:
            return cast("T", self._value)
        try:
            if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
                msg = "this client was closed while the call was waiting"
                raise ClosedMeanwhileError(msg) from None
            raise error
        finally:
            del self, error  # a traceback that keeps its own error keeps leases from being collected

    def _sleep(self) -> None:
        """
        Sleep until there is an answer.

        A signal does not end the sleep if it came right before, or to another thread: Python runs the handler in the
        main thread when that wakes. So the main thread sleeps in naps.
        """
        if not self._ended.acquire(True, _NAP):  # noqa: FBT003  (by position: each call asks once at least)
            nap = _NAP if threading.current_thread() is threading.main_thread() else -1
            while not self._ended.acquire(True, nap):  # noqa: FBT003
                pass


class ThreadBody:
    """What a coroutine has the thread do that waits for it."""

    __slots__ = ("_function", "_leases", "ended", "error", "value")

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._leases = held_here()
        self.ended = asyncio.Event()
        self.value: object = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run in the thread; what is raised goes to the coroutine, which decides what leaves."""
        fresh = [lease for lease in self._leases if lease not in held_here()]
        for lease in fresh:
            push(lease)
        try:
            self.value = self._function()
        except BaseException as error:  # noqa: BLE001  (it leaves by way of the coroutine)
            self.error = error
        finally:
            for lease in fresh:
                pop(lease)
