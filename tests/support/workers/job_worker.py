"""
A process with a scheduler of its own: calls a job at every tick of a clock that is ahead or behind.

    job_worker.py URL LOG SKEW INTERVAL AT_LEAST TTL

Each line of LOG is written by one call, so that processes may share it: what happened, and when by the machine's clock.
"""

import asyncio
import json
import math
import os
import sys
import time

from fencing_sdk import FencingError, connect, current_lease
from fencing_sdk._lease import state_of

URL, LOG = sys.argv[1:3]
SKEW, INTERVAL, AT_LEAST, TTL = map(float, sys.argv[3:7])
log = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
locks = connect(URL)


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def tell(**fields: object) -> None:
    os.write(log, json.dumps({"pid": os.getpid(), "at": now(), **fields}).encode() + b"\n")


@locks.job("nightly", at_least_for=AT_LEAST, ttl=TTL, max_hold=4 * INTERVAL)
async def nightly(tick: int) -> None:
    tell(what="began", began=now(), tick=tick, granted=state_of(current_lease()).acquired_at)
    await asyncio.sleep((tick % 5) * INTERVAL / 4)


async def main() -> None:
    async with locks:
        while True:
            tick = math.floor((now() + SKEW) / INTERVAL) + 1
            await asyncio.sleep(tick * INTERVAL - SKEW - now())
            tell(what="asked", tick=tick)
            try:
                outcome = type(await nightly(tick)).__name__
            except FencingError as error:
                outcome = type(error).__name__
            tell(what="told", tick=tick, outcome=outcome)


asyncio.run(main())
