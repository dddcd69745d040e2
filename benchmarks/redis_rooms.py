"""Which modules one warm ``async with lock`` on Redis enters, and how many calls it makes: the length of the path."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

from redis_own_server import OwnServer

import fencing_sdk
from fencing_sdk import connect

_HOME = f"{Path(fencing_sdk.__file__).parent}/"


class Trace:
    """Counts calls while it is the profile function of this thread."""

    def __init__(self) -> None:
        self.python: Counter[str] = Counter()
        self.elsewhere = 0
        self.c = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "c_call":
            self.c += 1
        elif event == "call":
            code = frame.f_code
            if code.co_filename.startswith(_HOME):
                self.python[f"{code.co_filename.removeprefix(_HOME)}:{code.co_qualname}"] += 1
            else:
                self.elsewhere += 1


async def main() -> None:
    with OwnServer() as server:
        async with connect(server.url) as locks:
            for _ in range(50):
                async with locks.lock("rooms"):
                    pass
            gc.disable()
            trace = Trace()
            sys.setprofile(trace)
            async with locks.lock("rooms"):
                pass
            sys.setprofile(None)
    modules = Counter(dict.fromkeys((), 0))
    for call, count in trace.python.items():
        modules[call.partition(":")[0]] += count
    for module, count in modules.most_common():
        print(f"{count:5}  {module}")
        for call, times in trace.python.most_common():
            if "-v" in sys.argv and call.startswith(f"{module}:"):
                print(f"         {times:3} {call.partition(':')[2]}")
    own = sum(modules.values())
    print(
        f"{len(modules)} modules, {own} calls in them, {trace.elsewhere} Python calls elsewhere, {trace.c} calls of C"
    )


if __name__ == "__main__":
    asyncio.run(main())
