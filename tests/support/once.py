"""What is made once for a whole run, although several processes run the tests."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def once_per_run(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """
    The folder *name*, filled by *make* in the first process that asks for it; the others wait for that one.

    If *make* fails, the next process that asks tries it again in a new folder.
    """
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with (shared / f"{name}.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        if not (made := lock.read()):
            folder = factory.mktemp(name)
            make(folder)
            lock.write(str(folder))
            made = str(folder)
    return Path(made)
