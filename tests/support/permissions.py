"""Root may read and write everything; a test of permissions has to be an ordinary user for a moment."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Answer = TypeVar("_Answer")

_VERSION = 0x20080522
_OVER_PERMISSIONS = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: see capabilities(7)


def without_power_over_permissions(work: Callable[[], _Answer]) -> _Answer:
    """
    Do *work* in a thread, and in the threads that it starts, for which the permissions of files count.

    Capabilities belong to a thread, and what a thread has given up it never gets back.
    """
    with ThreadPoolExecutor(1, initializer=_drop) as thread:
        return thread.submit(work).result()


def _drop() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then their higher halves
    for call, change in ((libc.capget, False), (libc.capset, True)):
        if change:
            for number in range(3):
                sets[number] &= ~_OVER_PERMISSIONS
        if call(header, sets):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
