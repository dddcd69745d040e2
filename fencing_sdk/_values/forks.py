"""
Which process this is, seen from the one that made a thing.

A child inherits the objects of its parent but not its threads: the loop, the connection and the leases belong to the
parent. What a child must not use notes `here` when it is made, and compares it at each use.

`os.fork` runs the hooks of Python in the child. A fork in C does not (uWSGI loads the application and then calls
``fork``), so the kernel marks the child: it empties a page of memory there (``MADV_WIPEONFORK``), which is read at a
fraction of the cost of asking for the process id. Systems without such a page have to ask.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Callable

_MADV_WIPEONFORK = 18  # of Linux; `mmap` has no name for it
_UNKNOWN_ADVICE = -1

_number = 1
_calls: list[Callable[[], object]] = []
_noticing = threading.RLock()


class _ByProcessId:
    """A mark that is empty in another process, on systems that cannot wipe a page."""

    def __init__(self) -> None:
        self._mark = (os.getpid(), _number)

    def __getitem__(self, _: int) -> int:
        process, number = self._mark
        return number if process == os.getpid() else 0

    def __setitem__(self, _: int, number: int) -> None:
        self._mark = (os.getpid(), number)


def _wiped_by_fork() -> memoryview | None:
    """Return a page that the kernel empties in a child; None where it cannot."""
    if sys.platform != "linux":
        return None
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        page.madvise(_MADV_WIPEONFORK)
    except OSError:  # before Linux 4.14
        return None
    try:
        page.madvise(_UNKNOWN_ADVICE)
    except OSError:
        return memoryview(page).cast("Q")
    return None  # an emulator that accepts all advice, and follows none


_mark = _ByProcessId() if (_page := _wiped_by_fork()) is None else _page
_mark[0] = _number


def here() -> int:
    """
    Return the number of this process: no ancestor has the same.

    Call it as ``forks.here()``: the first call in a child runs the functions that `in_child` has taken.
    """
    return _mark[0] or _notice()


def in_child(call: Callable[[], object]) -> None:
    """
    Have *call* run in every child: at once after `os.fork`, and at the first `here` after a fork in C.

    Locks that *call* takes may be those of threads that do not exist in the child.
    """
    _calls.append(call)


def _notice() -> int:
    global _number  # noqa: PLW0603  (a property of the process, like its pid)
    with _noticing:
        if not _mark[0]:
            for call in _calls:
                call()
            _number += 1
            _mark[0] = _number
        return _mark[0]


def _after_fork() -> None:
    global _noticing  # noqa: PLW0603  (a thread that does not exist in the child may hold it)
    _noticing = threading.RLock()
    _mark[0] = 0
    _notice()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
