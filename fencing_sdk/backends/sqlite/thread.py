"""
The thread that alone touches SQLite, so that the event loop never waits for a disk, and what the loop asks of it.

It does one request after the other, in order of arrival, except that renewals overtake: they have a deadline. The
thread is a daemon: a disk that hangs must not keep the process from ending. A subinterpreter allows no daemon, and its
end waits for the thread, which it asks to end first.

A connection must not exist during a fork. SQLite remembers in the process's memory which file locks it holds. A child
inherits the memory but not the locks, so that its connections would rely on locks that the kernel does not know. So
every thread ends, and closes its connection, before a fork; parent and child start anew with their next call. A fork
in C runs no hook before it: a child that inherited a connection from it refuses to work.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from fencing_sdk._values.drivers import KnownDriver, daemon_threads_allowed
from fencing_sdk.backends.sqlite.file import BACKEND
from fencing_sdk.errors import BackendRefusedError

T = TypeVar("T")


class OpenedFile(Protocol):
    """A file that the thread has open between two pieces of work."""

    def moved(self) -> bool:
        """Return whether the path no longer leads to this file."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


F = TypeVar("F", bound=OpenedFile)

FORK_PATIENCE = 5.0
"""Seconds that a fork waits for a transaction to end."""
_PYTHON = KnownDriver("Python", user=BACKEND)


@dataclass(frozen=True, slots=True)
class _ThreadWork:
    do: Callable[[Any], object]
    answer: Future[Any]


class _WorkQueue:
    """Work that waits for the thread. Nothing here blocks, so it is safe in a finalizer and in the event loop."""

    def __init__(self) -> None:
        self._arrivals: SimpleQueue[bool] = SimpleQueue()
        self._urgent: deque[_ThreadWork] = deque()
        self._others: deque[_ThreadWork] = deque()

    def put(self, work: _ThreadWork, *, urgent: bool) -> None:
        (self._urgent if urgent else self._others).append(work)
        self._arrivals.put(item=True)

    def close(self) -> None:
        """Let the thread end after the work that was put before."""
        self._arrivals.put(item=False)

    def take(self) -> _ThreadWork | None:
        """Wait for work; None when there will be no more."""
        if not self._arrivals.get():
            return None
        return self._urgent.popleft() if self._urgent else self._others.popleft()


@dataclass(frozen=True, slots=True)
class _Life:
    """One life of the thread: from the first work to the closing of its connection."""

    queue: _WorkQueue
    thread: threading.Thread
    closed: Future[None]
    end: weakref.finalize[[], SqlThread[Any]]


class SqlThread(Generic[F]):
    """A thread that starts with the first work, and again with work that comes after `close`."""

    def __init__(self, opener: Callable[[], F]) -> None:
        self._opener = opener
        self._life: _Life | None = None
        _forks.add(self)

    def submit(self, do: Callable[[F], T], *, urgent: bool = False) -> Future[T]:
        """
        Run *do* with what is open in the thread.

        Cancelling the future takes back work that has not begun. Work that has begun is finished.

        Raises:
            BackendRefusedError: this process was forked while a connection could not be closed.
        """
        answer: Future[T] = Future()
        with _forks.gate:
            _forks.check()
            if self._life is None:
                self._life = self._start()
            self._life.queue.put(_ThreadWork(do, answer), urgent=urgent)
        return answer

    def close(self) -> Future[None] | None:
        """Close the connection after the work that waits; the future ends when that has happened."""
        with _forks.gate:
            life, self._life = self._life, None
        if life is None:
            return None
        life.end()
        return life.closed

    @property
    def started(self) -> bool:
        """True if it has a thread now."""
        return self._life is not None

    def forget(self) -> bool:
        """Have no thread: it does not exist in this process. Return whether there was one."""
        life, self._life = self._life, None
        return life is not None

    def start_again(self) -> None:
        """
        Have a thread again after a fork, and do not wait for work: the work may be to release locks at the exit.

        Python 3.12 starts no thread while the interpreter ends.
        """
        with suppress(RuntimeError):  # it ends
            self._life = self._life or self._start()

    def ended_before_fork(self) -> bool:
        """Close the connection and wait until the thread is gone; False when it does not end."""
        life, self._life = self._life, None
        if life is None:
            return True
        life.end()
        life.thread.join(FORK_PATIENCE)
        return not life.thread.is_alive()

    def _start(self) -> _Life:
        queue = _WorkQueue()
        closed: Future[None] = Future()
        closed.set_running_or_notify_cancel()
        if not (daemon := daemon_threads_allowed()):
            with _PYTHON.known("open"):
                threading._register_atexit(queue.close)  # type: ignore[attr-defined]  # noqa: SLF001
        work = queue, self._opener, closed
        thread = threading.Thread(target=_serve, args=work, name="fencing-sqlite", daemon=daemon)
        thread.start()
        end = weakref.finalize(self, queue.close)  # a backend that is dropped unclosed ends its thread
        return _Life(queue, thread, closed, end)


def _serve(queue: _WorkQueue, opener: Callable[[], OpenedFile], closed: Future[None]) -> None:
    """Run the thread. The connection is known inside this frame alone."""
    opened: OpenedFile | None = None
    for work in iter(queue.take, None):
        if work.answer.set_running_or_notify_cancel():
            opened = _do(work, opened, opener)
        del work
    _close(opened)
    closed.set_result(None)


def _do(work: _ThreadWork, opened: OpenedFile | None, opener: Callable[[], OpenedFile]) -> OpenedFile | None:
    """Do one piece of work; return what is open for the next one, or None if it must be opened anew."""
    try:
        if opened is not None and opened.moved():
            _close(opened)
            opened = None
        opened = opener() if opened is None else opened
        done = work.do(opened)
    except BaseException as error:  # noqa: BLE001  (it is raised where the answer is awaited)
        _close(opened)
        work.answer.set_exception(error)
        return None
    work.answer.set_result(done)
    return opened


def _close(opened: OpenedFile | None) -> None:
    if opened is not None:
        with suppress(sqlite3.Error):
            opened.close()


class _Forks:
    """Ends every thread before this process forks, and refuses to work in a child where that failed."""

    def __init__(self) -> None:
        self.gate = threading.RLock()
        """Held during a fork, so that no thread starts meanwhile, and for a moment by every call."""
        self._pid = os.getpid()
        self._threads: weakref.WeakSet[SqlThread[Any]] = weakref.WeakSet()
        self._ended: list[SqlThread[Any]] = []
        self._stuck = False
        self._unsafe = False

    def add(self, thread: SqlThread[Any]) -> None:
        with self.gate:
            self._threads.add(thread)

    def check(self) -> None:
        if self._pid != os.getpid():  # C code has forked this process, so no hook has run
            self.in_child()
        if self._unsafe:
            detail = (
                "this process was forked while the file was open, and SQLite does not survive that; open it after the "
                "fork (uWSGI: lazy-apps = true), or start the process by spawn"
            )
            raise BackendRefusedError(BACKEND, "open", detail)

    def before(self) -> None:
        self.gate.acquire()
        self._ended = [thread for thread in tuple(self._threads) if thread.started]
        stuck = [thread for thread in self._ended if not thread.ended_before_fork()]
        self._stuck = bool(stuck)

    def after_in_parent(self) -> None:
        for thread in self._ended:
            thread.start_again()
        self._ended = []
        self.gate.release()

    def in_child(self) -> None:
        """Begin anew. After a fork in C the threads are those of the parent, and so are their connections."""
        self.gate = threading.RLock()
        self._pid = os.getpid()
        self._ended = []
        inherited = [thread for thread in tuple(self._threads) if thread.forget()]
        self._unsafe = self._unsafe or self._stuck or bool(inherited)


_forks = _Forks()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_forks.before, after_in_parent=_forks.after_in_parent, after_in_child=_forks.in_child)
