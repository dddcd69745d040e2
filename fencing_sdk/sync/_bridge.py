"""
The bridge from threads to the client: one daemon thread, whose event loop runs the client as it is.

    thread      asks the loop to run a coroutine, and sleeps on a lock until it has ended
    a signal    interrupts the sleep: the coroutine is cancelled, what it has got is released, and the error goes on
    a fork      the child's first call finds that the thread belongs to its parent, and starts one of its own
    the exit    of the interpreter closes every client that is open, which releases what it holds

A lease is renewed by this thread, so its heartbeat goes on while the holder computes or blocks.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Generic, TypeVar, cast

from fencing_sdk._arguments import check_threads_are_real
from fencing_sdk._client import LockClient as TaskLockClient
from fencing_sdk._client import drain_of, enter, reach
from fencing_sdk._lease import WaitingThread, run_for
from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.loop_owner import loop_here
from fencing_sdk._values.observers import logger
from fencing_sdk._values.token import transaction_looks
from fencing_sdk.errors import AcquireCancelledError, ConfigurationError, UsageError, shown

T = TypeVar("T")

_PAUSE = 0.2
"""Seconds that the main thread sleeps at most: a signal that came right before the sleep does not end it."""
_PAUSE_ELSEWHERE = 1.0
"""Seconds that another thread sleeps at most: an exception that Python is to raise in it does not end the sleep."""
_LOOK = 0.05
"""Seconds after which a thread looks whether its wait is cancelled."""
_UNDO_LIMIT = 5.0
"""Seconds that an interrupted caller waits until its call is undone, which goes on after that."""
_EXIT_LIMIT = 5.0
"""Seconds that the end of the interpreter waits until the locks are released."""


class _Here(threading.local):
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


class ClosedMeanwhileError(UsageError):
    """The client was closed before the call was answered; what it held was released."""


class ThreadCall(Generic[T]):
    """One coroutine that a thread waits for."""

    __slots__ = (
        "_cancel",
        "_cut_off",
        "_error",
        "_function",
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
        self._cut_off = False  # the client was closed while the coroutine ran
        self._woken = threading.Lock()  # held until the coroutine has ended: cheap to sleep on
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
            self._task = asyncio.Task(coroutine, loop=loop, eager_start=True, name="fencing-thread")
        else:
            self._task = loop.create_task(coroutine, name="fencing-thread")

    async def _run(self) -> None:
        try:
            self._value = await self._function()
        except BaseException as error:  # noqa: BLE001  (it leaves in the thread that waits)
            self._error = error
            if isinstance(error, (asyncio.CancelledError, GeneratorExit)):  # perhaps of the function's own making
                task = asyncio.current_task() if loop_here() is not None else None
                self._cut_off = task is None or task.cancelling() > 0
        finally:
            self._woken.release()

    async def _take_back(self, undone: threading.Event) -> None:
        try:
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
            raise error
        finally:
            del self, error  # a traceback that keeps its own error keeps leases from being collected

    def _undo_in_loop(self) -> None:
        loop = self.loop
        if loop is None:  # nothing was posted
            return
        undone = threading.Event()

        def begin() -> None:
            self._undoing = loop.create_task(self._take_back(undone), name="fencing-undo")

        with contextlib.suppress(RuntimeError):  # the loop is closed, and has released all
            loop.call_soon_threadsafe(begin)
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
        main thread when that wakes. `PyThreadState_SetAsyncExc`, by which job workers set time limits, raises in a
        thread when that wakes. So every thread sleeps in pauses.
        """
        if not self._woken.acquire(True, _PAUSE):  # noqa: FBT003  (by position: each call asks once at least)
            pause = _PAUSE if threading.current_thread() is threading.main_thread() else _PAUSE_ELSEWHERE
            while not self._woken.acquire(True, pause):  # noqa: FBT003
                pass


class Opening:
    """The opening of a client by its thread. Who waits for it may abandon it, also by the handler of a signal."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self.abandoned = False

    def wait(self) -> None:
        """Wait for the end, in pauses in which handlers of signals run."""
        while not self.ended.wait(_PAUSE):
            pass


_running: set[LoopThread] = set()
"""The bridges of this process and its parents whose thread runs."""


class LoopThread:
    """The thread of one client in one process. It starts with the first call, and again after it was closed."""

    def __init__(self, client: TaskLockClient) -> None:
        self._client = client
        self._pid = os.getpid()
        self._gate = threading.RLock()  # one that the handler of a signal may pass when it interrupts the holder
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: Opening | None = None  # while a thread waits for it
        self._closed = False  # since its last call
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._watching: set[asyncio.Task[None]] = set()

    @property
    def inherited(self) -> bool:
        """True if the thread is that of a parent process, and does not exist in this one."""
        return self._pid != os.getpid()

    @property
    def idle(self) -> bool:
        """True if the next call opens the client, and it was not closed before: it waits for work."""
        return self._loop is None and not self._closed

    def call(
        self,
        function: Callable[[], Awaitable[T]],
        *,
        undo: Callable[[T], Awaitable[object]] | None = None,
        only: asyncio.AbstractEventLoop | None = None,
        cancel: Cancel | None = None,
    ) -> T:
        """
        Run what *function* returns in the loop, with the context of this thread, and wait for it.

        If the wait is interrupted, the coroutine is cancelled. A value that it has returned by then goes to *undo*.
        With *only*, the loop of a lease, nothing is opened and nothing runs in another loop. *cancel* interrupts, too.

        Raises:
            AcquireCancelledError: *cancel* has ended the wait.
            ClosedMeanwhileError: the client was closed meanwhile, is not open in *only*, or is that of a parent.
            UsageError: this is the client's own thread.
        """
        call = self._prepare(function, undo, cancel, opens=only is None)
        return call.wait(partial(self._post, call.begin, only, call))

    def _prepare(
        self,
        function: Callable[[], Awaitable[T]],
        undo: Callable[[T], Awaitable[object]] | None,
        cancel: Cancel | None,
        *,
        opens: bool,
    ) -> ThreadCall[T]:
        """Describe a call before it is posted; one that *opens* the client may acquire."""
        return ThreadCall(function, undo, cancel, acquires=opens)

    def watch(self, function: Callable[[], Coroutine[Any, Any, None]], only: asyncio.AbstractEventLoop) -> None:
        """
        Run what *function* returns in the loop *only*, such as that of a lease, and do not wait for it.

        Raises:
            ClosedMeanwhileError: it has stopped.
        """

        def begin() -> None:
            task = asyncio.get_running_loop().create_task(function(), name="fencing-on-lost")
            self._watching.add(task)
            task.add_done_callback(self._watching.discard)

        self._post(begin, only)

    def call_aside(self, function: Callable[[], None]) -> None:
        """Call *function* in a thread of its own, as the heartbeat of all leases must not wait for it."""
        try:
            threading.Thread(target=function, name="fencing-on-lost", daemon=True).start()
        except RuntimeError:  # Python 3.12 starts no thread while the interpreter ends
            function()

    def open(self) -> asyncio.AbstractEventLoop:
        """
        Start the thread and open the client, unless it is open; return the loop in which it is.

        Raises:
            BackendError: the store knows already that it will not work.
            ClosedMeanwhileError: the client was closed meanwhile.
            UnsupportedError: gevent or eventlet has replaced what a thread is.
        """
        with self._gate:
            started = self._loop is None
            loop, thread = self._loop or self._start(), self._thread
        try:
            self.call(partial(reach, self._client), only=loop)
        except BaseException:
            if started:
                self._close(thread)
            raise
        return loop

    def close(self) -> None:
        """
        Close what is open now and wait for the end of its thread, which is bounded. Idempotent.

        A drain goes first, while calls are still taken: other threads release their locks. Calls that come after
        it wait for the end, and open the client again.
        """
        if self.inherited:
            return
        self._check_thread()
        thread, loop, within = self._thread, self._loop, drain_of(self._client)
        try:
            if loop is not None and within is not None:
                with contextlib.suppress(UsageError):  # another thread has closed it meanwhile
                    self.call(partial(self._client.drain, within=within), only=loop)
        finally:  # an interrupt ends the drain
            self._close(thread)

    def _close(self, thread: threading.Thread | None) -> None:
        with self._gate:
            if self._thread is thread:  # else it is closed, and open again for others
                self.close_soon()
                self.join()

    def close_soon(self) -> None:
        """Begin to close the client, and do not wait."""
        self._closed = True
        self._end_soon()

    def _end_soon(self) -> None:
        if self._opening is not None:
            self._opening.abandoned = True
        loop, stop = self._loop, self._stop  # read last: an opening that has ended has noted them
        if self.inherited or loop is None or stop is None:
            return
        self._loop = None
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            loop.call_soon_threadsafe(stop.set)

    def join(self, limit: float | None = None) -> None:
        """Wait for the end of the thread, at most *limit* seconds."""
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):  # an error of a signal's handler kept it from being started
                self._thread.join(limit)

    def _post(
        self,
        begin: Callable[[], None],
        only: asyncio.AbstractEventLoop | None,
        call: ThreadCall[Any] | None = None,
    ) -> None:
        self._check_thread()
        if self.inherited:  # before the gate, in which a thread of the parent may have been
            msg = "this was begun before a fork, and belongs to the parent; begin it anew in the child"
            raise ClosedMeanwhileError(msg)
        self._check_open(only)  # before the gate: a closing holds it for a while
        with self._gate:  # nothing is posted to a loop that ends
            self._check_open(only)
            loop = self._loop or self._start()
            if call is not None:
                call.loop = loop  # before: an interrupt may come between the two
            loop.call_soon_threadsafe(begin)

    def _check_thread(self) -> None:
        if threading.current_thread() is self._thread:
            msg = (
                "the thread that keeps the leases of this client cannot wait for itself: observers run there; "
                "hand the work to another thread"
            )
            raise UsageError(msg)

    def _check_open(self, only: asyncio.AbstractEventLoop | None) -> None:
        if only is not None and self._loop is not only:
            msg = "this client was closed, and what it held was released"
            raise ClosedMeanwhileError(msg)

    def _start(self) -> asyncio.AbstractEventLoop:
        check_threads_are_real()
        if self._opening is not None:
            msg = "this client is being opened by the call that this handler of a signal interrupted; use it later"
            raise UsageError(msg)
        self.join()
        self._closed = False
        opening = self._opening = Opening()
        try:
            self._thread = threading.Thread(target=self._run, args=(opening,), name="fencing-sync", daemon=True)
            self._thread.start()
            close_before_a_child_ends()
            opening.wait()
            if self._loop is not None:
                _running.add(self)
        except BaseException:  # an interrupt: what is opened by now is closed again
            self._end_soon()
            raise
        finally:
            self._opening = None
        loop = self._loop
        if opening.error is not None and not opening.abandoned:
            raise opening.error
        if opening.abandoned or loop is None:  # the handler of a signal has closed it
            self.join()
            msg = "this client was closed while it was opened"
            raise ClosedMeanwhileError(msg)
        return loop

    def _run(self, opening: Opening) -> None:
        try:
            with asyncio.Runner(loop_factory=_new_loop) as runner:
                runner.run(self._main(opening))
        except BaseException as error:  # noqa: BLE001  (it leaves in the thread that opens the client)
            if opening.ended.is_set() and not opening.abandoned:
                logger.critical("the thread that keeps the leases has ended", exc_info=error)
            opening.error = error
        finally:
            self._loop = None
            opening.ended.set()
            _running.discard(self)

    async def _main(self, opening: Opening) -> None:
        if (task := asyncio.current_task()) is not None:
            task.set_name("fencing-client")
        await self._client.aclose()  # in a forked child: what the parent has opened is left to the parent
        await enter(self._client, lazily=threading.main_thread().is_alive())  # else the opening fails at once, or never
        async with contextlib.aclosing(self._client):
            self._stop = asyncio.Event()
            self._loop = asyncio.get_running_loop()
            opening.ended.set()
            if not opening.abandoned:  # looked at after the loop is noted: see `_end_soon`
                await self._stop.wait()
            self._loop = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0):  # cancelled at once, it does not drain: no thread can release a lock
                    await self._client.aclose()


def _new_loop() -> asyncio.AbstractEventLoop:
    """
    Make the loop of the thread: uvloop's, where it is installed.

    It is woken by a caller that keeps the interpreter (the GIL) until it sleeps on its answer. The loop of asyncio is
    woken by a system call that lets go of it, so that the two threads take it from each other twice more.
    """
    try:
        import uvloop  # noqa: PLC0415  (only what starts a thread needs it)
    except (ImportError, RuntimeError):  # the latter when the main thread has ended: it registers what runs at the exit
        loop = asyncio.new_event_loop()
        loop.time = BootClock.now  # type: ignore[method-assign]  # freezegun stops the clock of asyncio in a test
        return loop
    return uvloop.new_event_loop()


def close_before_a_child_ends() -> None:
    """Have a child of `multiprocessing` close its clients: it ends without the functions of `atexit`."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None and sys.modules["multiprocessing.process"].parent_process() is not None:
        util.Finalize(None, close_all, exitpriority=0)


def close_all() -> None:
    """Release what the clients of this process hold, within a bounded time."""
    mine = [bridge for bridge in tuple(_running) if not bridge.inherited]
    for bridge in mine:
        bridge.close_soon()
    until = BootClock.now() + _EXIT_LIMIT
    for bridge in mine:
        bridge.join(max(0.0, until - BootClock.now()))


weakref.finalize(close_all, close_all).detach()  # has weakref register its own end first: what comes later runs earlier
atexit.register(close_all)
