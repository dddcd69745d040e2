"""
The thread that alone touches SQLite, so that the event loop never waits for a disk.

Work is done one piece after the other, in order of arrival, except that renewals overtake: they
have a deadline. The thread is a daemon: a disk that hangs must not keep the process from ending.

A connection must not see a fork. SQLite remembers in the process's memory which file locks it
holds, a child inherits the memory but not the locks, and every connection it opens then believes
itself protected when the kernel knows of nothing. So every thread is ended, and its connection
closed, before a fork; parent and child start anew with their next call.
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
from typing import Any, TypeVar

from fencing_sdk.backends.sqlite._rows import LockRows
from fencing_sdk.backends.sqlite._translation import BACKEND
from fencing_sdk.errors import BackendRefusedError

T = TypeVar("T")

Opening = Callable[[], LockRows]

FORK_PATIENCE = 5.0
"""Seconds that a fork waits for a transaction to end."""


@dataclass(frozen=True, slots=True)
class _Work:
    do: Callable[[LockRows], object]
    answer: Future[Any]


class _Desk:
    """Work that waits for the thread. Nothing here blocks, so it is safe in a finalizer and in the event loop."""

    def __init__(self) -> None:
        self._arrivals: SimpleQueue[bool] = SimpleQueue()
        self._urgent: deque[_Work] = deque()
        self._others: deque[_Work] = deque()

    def put(self, work: _Work, *, urgent: bool) -> None:
        (self._urgent if urgent else self._others).append(work)
        self._arrivals.put(item=True)

    def close(self) -> None:
        """Let the thread end after what has been put before."""
        self._arrivals.put(item=False)

    def take(self) -> _Work | None:
        """Wait for work; None when there will be no more."""
        if not self._arrivals.get():
            return None
        return self._urgent.popleft() if self._urgent else self._others.popleft()


@dataclass(frozen=True, slots=True)
class _Shift:
    """One life of the thread: from the first work to the closing of its connection."""

    desk: _Desk
    thread: threading.Thread
    closed: Future[None]
    end: weakref.finalize[[], SqlThread]


class SqlThread:
    """A thread that starts with the first work, and again with work that comes after `close`."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._shift: _Shift | None = None
        _forks.add(self)

    def submit(self, do: Callable[[LockRows], T], *, urgent: bool = False, surely: bool = False) -> Future[T]:
        """
        Do something with the rows in the thread.

        Cancelling the future takes back what was not begun, except what is to be done *surely*.
        What was begun is finished.

        Raises:
            BackendRefusedError: this process was forked while a connection could not be closed.
        """
        answer: Future[T] = Future()
        if surely:
            answer.set_running_or_notify_cancel()
        with _forks.gate:
            _forks.check()
            if self._shift is None:
                self._shift = self._start()
            self._shift.desk.put(_Work(do, answer), urgent=urgent)
        return answer

    def close(self) -> Future[None] | None:
        """Close the connection after the work that waits; the future ends when that has happened."""
        with _forks.gate:
            shift, self._shift = self._shift, None
        if shift is None:
            return None
        shift.end()
        return shift.closed

    def ended_before_fork(self) -> bool:
        """Close the connection and wait until the thread is gone; False when it does not end."""
        shift, self._shift = self._shift, None
        if shift is None:
            return True
        shift.end()
        shift.thread.join(FORK_PATIENCE)
        return not shift.thread.is_alive()

    def _start(self) -> _Shift:
        desk = _Desk()
        closed: Future[None] = Future()
        closed.set_running_or_notify_cancel()
        thread = threading.Thread(target=_serve, args=(desk, self._opening, closed), name="fencing-sqlite", daemon=True)
        thread.start()
        end = weakref.finalize(self, desk.close)  # a backend that is dropped unclosed ends its thread
        return _Shift(desk, thread, closed, end)


def _serve(desk: _Desk, opening: Opening, closed: Future[None]) -> None:
    """The thread. Nobody outside this frame knows the connection."""
    rows: LockRows | None = None
    for work in iter(desk.take, None):
        if work.answer.running() or work.answer.set_running_or_notify_cancel():
            rows = _do(work, rows, opening)
        del work
    _close(rows)
    closed.set_result(None)


def _do(work: _Work, rows: LockRows | None, opening: Opening) -> LockRows | None:
    """Do one piece of work; return the rows for the next one, or None if they are not to be trusted any more."""
    try:
        if rows is not None and rows.outdated():
            _close(rows)
            rows = None
        rows = opening() if rows is None else rows
        done = work.do(rows)
    except BaseException as error:  # noqa: BLE001  (it is raised where it is waited for)
        _close(rows)
        work.answer.set_exception(error)
        return None
    work.answer.set_result(done)
    return rows


def _close(rows: LockRows | None) -> None:
    if rows is not None:
        with suppress(sqlite3.Error):
            rows.close()


class _Forks:
    """Ends every thread before this process forks, and refuses to work in a child where that failed."""

    def __init__(self) -> None:
        self.gate = threading.RLock()
        """Held during a fork, so that no thread starts meanwhile, and for a moment by every call."""
        self._threads: weakref.WeakSet[SqlThread] = weakref.WeakSet()
        self._stuck = False
        self._unsafe = False

    def add(self, thread: SqlThread) -> None:
        with self.gate:
            self._threads.add(thread)

    def check(self) -> None:
        if self._unsafe:
            detail = "this process was forked while a connection was stuck; start it by spawn instead of fork"
            raise BackendRefusedError(BACKEND, "open", detail)

    def before(self) -> None:
        self.gate.acquire()
        stuck = [thread for thread in tuple(self._threads) if not thread.ended_before_fork()]
        self._stuck = bool(stuck)

    def after_in_parent(self) -> None:
        self.gate.release()

    def after_in_child(self) -> None:
        self._unsafe = self._unsafe or self._stuck
        self.gate.release()


_forks = _Forks()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_forks.before, after_in_parent=_forks.after_in_parent, after_in_child=_forks.after_in_child
    )
