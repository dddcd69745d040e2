"""The path of one ``async with lock``: the modules of the package that it enters, and the calls in them."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import fencing_sdk
from benchmarks.table import Row
from fencing_sdk import LockClient

_PACKAGE = f"{Path(fencing_sdk.__file__).parent}/"


class Trace:
    """Counts calls while it is the profile function of this thread."""

    def __init__(self) -> None:
        self.ours: Counter[str] = Counter()
        self.elsewhere = 0
        self.c = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "c_call":
            self.c += 1
        elif event == "call" and frame.f_code.co_filename.startswith(_PACKAGE):
            self.ours[frame.f_code.co_filename.removeprefix(_PACKAGE)] += 1
        elif event == "call":
            self.elsewhere += 1


async def path(locks: LockClient) -> list[Row]:
    """Trace one ``async with`` on a free lock, by a client that is warm."""
    for _ in range(50):
        async with locks.lock("path"):
            pass
    gc.disable()
    trace = Trace()
    sys.setprofile(trace)
    async with locks.lock("path"):
        pass
    sys.setprofile(None)
    gc.enable()
    calls, modules = sum(trace.ours.values()), len(trace.ours)
    print("\nmodules that one async with enters, with the calls in each")
    print("  " + ", ".join(f"{module} {count}" for module, count in trace.ours.most_common()))
    others = f"{trace.elsewhere} of other Python code, {trace.c} of C"
    return [
        Row("async with: modules of the package", str(modules), reach="15", reached=modules <= 15),
        Row("async with: calls in them", str(calls), others, reach="280", reached=calls <= 280),
    ]
