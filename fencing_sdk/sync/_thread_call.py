"""One call: a coroutine that a thread waits for, and what that coroutine has the thread do meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Generic, NoReturn, Protocol, TypeVar, cast

from fencing_sdk._lease import AnyLease, WaitingThread, held_here, pop, push, run_for, state_of
from fencing_sdk._lease_state import raise_loss
from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.loop_owner import loop_here
from fencing_sdk._values.tasks import outlast_cancellation
from fencing_sdk._values.token import transaction_looks
from fencing_sdk.errors import AcquireCancelledError, ConfigurationError, UsageError, shown

R = TypeVar("R")
T = TypeVar("T")

_PAUSE = 0.2
"""Seconds that the main thread sleeps at most, before it looks whether a signal came."""
_LOOK = 0.05
"""Seconds after which a thread looks whether its wait is cancelled."""
_UNDO_LIMIT = 5.0
"""Seconds that an interrupted caller waits until what it asked for is undone. It is undone later, too."""


class _Here(threading.local):
    """What the loops of clients know of this thread."""

    def __init__(self) -> None:
        self.thread = WaitingThread(threading.current_thread().name)


_here = _Here()


def this_thread() -> WaitingThread:
    """Return this thread, as the loops of its clients know it."""
    return _here.thread


class Cancel:
    """An event that ends the wait for a lock when it is set."""

    __slots__ = ("_event", "_name")

    def __init__(self, event: threading.Event, name: str) -> None:
        if isinstance(event, type) or not callable(getattr(event, "is_set", None)):
            msg = f"cancel must be an event that ends the wait, such as threading.Event(), not {shown(event)}"
            raise ConfigurationError(msg)
        self._event = event
        self._name = name

    def check(self, since: float) -> None:
        """
        Do nothing until the event is set.

        Raises:
            AcquireCancelledError: it is; the wait has gone on *since* that moment.
        """
        if self._event.is_set():
            raise AcquireCancelledError(self._name, BootClock.now() - since)


class InThread(Protocol):
    """Has the thread that waits for a coroutine run a function, which that coroutine awaits."""

    def __call__(self, function: Callable[[], R], /) -> Awaitable[R]: ...


class ClosedMeanwhileError(UsageError):
    """The client was closed before the call was answered; what it held was released."""


class CarriedError(Exception):
    """An error of the thread, on its way through a coroutine that would take it for an end of its own."""


class CarriedExit(BaseException):
    """One of those that no ``except Exception`` is to see."""


def carried(error: BaseException) -> BaseException:
    """Return what a coroutine may raise for *error*: `StopIteration` would be replaced, and a cancellation heeded."""
    if isinstance(error, StopIteration):
        return CarriedError(error)
    return CarriedExit(error) if isinstance(error, (asyncio.CancelledError, GeneratorExit)) else error


def _uncarried(error: BaseException) -> BaseException:
    if not isinstance(error, (CarriedError, CarriedExit)):
        return error
    (mine,) = error.args
    assert isinstance(mine, BaseException)
    for note in getattr(error, "__notes__", ()):
        mine.add_note(note)
    return mine


class ThreadCall(Generic[T]):
    """One coroutine that a thread waits for."""

    __slots__ = (
        "_body",
        "_cancel",
        "_cut_off",
        "_done",
        "_error",
        "_function",
        "_left",
        "_task",
        "_thread",
        "_undo",
        "_undoing",
        "_value",
        "_woken",
        "loop",
    )

    def __init__(
        self,
        function: Callable[[], Awaitable[T]],
        undo: Callable[[T], Awaitable[object]] | None = None,
        cancel: Cancel | None = None,
        *,
        acquires: bool = True,
    ) -> None:
        self._function = function
        self._undo = undo
        self._cancel = cancel
        self._body: ThreadBody | None = None  # the last one that was handed over
        self._done = False
        self._cut_off = False  # the client was closed while the coroutine ran
        self._left = False  # the thread has stopped waiting
        self._woken = threading.Lock()  # held until the coroutine has ended, or has a body to run: cheap to sleep on
        self._woken.acquire()
        self.loop: asyncio.AbstractEventLoop | None = None
        """The loop that the call is posted to."""
        self._value: T | None = None
        self._error: BaseException | None = None
        self._task: asyncio.Task[None] | None = None
        self._undoing: asyncio.Task[None] | None = None
        self._thread = this_thread()
        self._thread.runs_a_loop = loop_here() is not None
        self._thread.in_transactions = tuple(one for look in transaction_looks for one in look()) if acquires else ()

    # In the loop.

    def begin(self) -> None:
        """Start the coroutine. Where tasks may be eager, it begins at once, and not in the next turn of the loop."""
        run_for(self._thread)
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
            self._cut_off = isinstance(error, (asyncio.CancelledError, GeneratorExit)) and not _goes_on()
        finally:
            self._done = True
            self._wake()

    async def in_thread(self, function: Callable[[], R]) -> R:
        """
        Have the thread that waits run *function*, under the leases of this task, and return its value.

        Nothing stops it. A cancellation waits until it has ended, unless the function failed, the caller was
        interrupted, or the client was closed.
        """
        if self._left:
            raise asyncio.CancelledError
        body = self._body = ThreadBody(function)
        self._wake()
        cancelled = await outlast_cancellation(body.ended.wait, body.ended.is_set)
        if body.error is not None:
            raise body.error
        if cancelled is not None:
            raise cancelled
        return cast("R", body.value)

    def _wake(self) -> None:
        if self._woken.locked():  # else the thread has not seen the last time yet, or has left
            self._woken.release()

    def leave(self) -> None:
        """Expect nothing more of the thread: the coroutine takes its body, begun or not, as ended."""
        self._left = True
        if self._body is not None:
            self._body.give_up(asyncio.CancelledError())

    def _begin_to_undo(self, undone: threading.Event) -> None:
        self._undoing = asyncio.get_running_loop().create_task(self._take_back(undone))

    async def _take_back(self, undone: threading.Event) -> None:
        try:
            self.leave()
            if self._task is not None and not self._task.done():
                self._task.cancel()
                await asyncio.wait((self._task,))
            if self._task is not None and self._error is None and self._undo is not None:
                await self._undo(cast("T", self._value))
        finally:
            undone.set()

    # In the thread.

    def wait(self, post: Callable[[], object]) -> T:
        """Have *post* hand the call to its loop, sleep until it has ended, and return its value, or raise its error."""
        try:
            if self._cancel is None:
                post()
                self._sleep()
            else:
                self._sleep_unless(self._cancel, post)
            while not self._done:
                self._run_body()
                self._sleep()
            if self._error is None:
                return self._value  # type: ignore[return-value]  # no call of cast: a signal could come in it
        except BaseException:  # cancelled, or by the handler of a signal: KeyboardInterrupt, SystemExit, Celery's limit
            self._undo_in_loop()
            raise
        error = self._error
        try:
            if self._cut_off:
                msg = "this client was closed while the call was waiting"
                raise ClosedMeanwhileError(msg) from None
            raise _uncarried(error)
        finally:
            del self, error  # a traceback that keeps its own error keeps leases from being collected

    def _run_body(self) -> None:
        body, pid = self._body, os.getpid()
        if body is not None and body.claim():
            body.run()
            if self._left or os.getpid() != pid:
                self.loop = None  # it has ended, or is that of a parent: nothing is to be undone there
                body.leave_alone()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                cast("asyncio.AbstractEventLoop", self.loop).call_soon_threadsafe(body.ended.set)

    def _undo_in_loop(self) -> None:
        if self.loop is None:  # nothing was posted
            return
        if self._body is not None:
            self._body.leave()
        undone = threading.Event()
        with contextlib.suppress(RuntimeError):  # the loop is closed, and has released all
            self.loop.call_soon_threadsafe(self._begin_to_undo, undone)
            self._outwait(undone)

    def _outwait(self, undone: threading.Event) -> None:
        undone.wait(_UNDO_LIMIT)

    def _sleep_unless(self, cancel: Cancel, post: Callable[[], object]) -> None:
        began = BootClock.now()
        cancel.check(began)
        post()
        while not self._woken.acquire(timeout=_LOOK):
            cancel.check(began)

    def _sleep(self) -> None:
        """
        Sleep until there is an answer.

        A signal does not end the sleep if it came right before, or to another thread: Python runs the handler in the
        main thread when that wakes. So the main thread sleeps in short pauses.
        """
        if not self._woken.acquire(True, _PAUSE):  # noqa: FBT003  (by position: each call asks once at least)
            pause = _PAUSE if threading.current_thread() is threading.main_thread() else -1
            while not self._woken.acquire(True, pause):  # noqa: FBT003
                pass


def _goes_on() -> bool:
    """Return whether this task runs uncancelled: then an error that looks like an end is of its own making."""
    task = asyncio.current_task() if loop_here() is not None else None
    return task is not None and not task.cancelling()


class ThreadBody:
    """What a coroutine has the thread do that waits for it."""

    __slots__ = ("_claimed", "_fresh", "_function", "_leases", "_raised", "ended", "error", "value")

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._leases = held_here()
        self._fresh: list[AnyLease] = []
        self._claimed = threading.Lock()
        self.ended = asyncio.Event()
        self.value: object = None
        self.error: BaseException | None = None
        self._raised: BaseException | None = None  # by the function

    def claim(self) -> bool:
        """Return whether the caller, and no other, is to run the body, or to end it instead."""
        return self._claimed.acquire(blocking=False)

    def give_up(self, error: BaseException) -> None:
        """In the loop: end the body by *error*, unless it has failed by itself. The thread begins it no more."""
        self._claimed.acquire(blocking=False)
        if not self.ended.is_set():
            self.error = self.error or error
            self.ended.set()

    def run(self) -> None:
        """Run in the thread; what is raised goes to the coroutine, which decides what leaves."""
        self._fresh = [lease for lease in self._leases if lease not in held_here()]
        try:
            for lease in self._fresh:
                push(lease)
                this_thread().inside.append(state_of(lease))
            self.value = self._function()
        except BaseException as error:  # noqa: BLE001  (it leaves by way of the coroutine)
            self._raised = error
            self.error = carried(error)
        finally:
            self.leave()

    def leave_alone(self) -> NoReturn:
        """
        In the thread, at the end of a body that no coroutine waits for here: the client was closed, or this is a fork.

        Raises:
            LeaseLostError: the body raised nothing of its own, and its leases are over.
        """
        for lease in self._fresh:
            raise_loss(state_of(lease), self._raised)
        raise self._raised or ClosedMeanwhileError("this client was closed while the call was waiting")

    def leave(self) -> None:
        """In the thread: take the leases of the coroutine out of its context. Idempotent."""
        for lease in self._fresh:
            pop(lease)
            if (state := state_of(lease)) in (inside := this_thread().inside):
                inside.remove(state)
