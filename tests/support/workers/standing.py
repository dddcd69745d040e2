"""
A process that stands in an election, and says what becomes of it.

    standing.py URL NAME TTL CLEANUP

It says "leads MOMENT TOKEN" and "ended MOMENT TOKEN" for each term, and "left" when its loop has ended.
A body that is cancelled takes CLEANUP seconds to end. MOMENT is in seconds, on a clock that all processes share.
"""

import asyncio
import signal
import sys
import time

import anyio

from fencing_sdk import connect


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def main(url: str, name: str, ttl: str, cleanup: str) -> None:
    async with connect(url) as locks, locks.draining_on(signal.SIGTERM, signal.SIGINT, within=20):
        async for term in locks.election(name, ttl=float(ttl)):
            async with term as lease:
                token = int(lease.token)
                say("leads", time.monotonic(), token)
                try:
                    await asyncio.Event().wait()
                finally:
                    with anyio.CancelScope(shield=True):
                        await asyncio.sleep(float(cleanup))
                    say("ended", time.monotonic(), token)
        say("left")


asyncio.run(main(*sys.argv[1:]))
