"""
A process that may be the first to use a database.

    postgresql_first.py URL NAME

It says "ready", waits for a line, takes the lock once, says "granted 0 TOKEN", and ends.
"""

import asyncio
import sys

from fencing_sdk import connect


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def main(url: str, name: str) -> None:
    async with connect(url) as locks, locks.lock(name, ttl=20, wait=40) as lease:
        say("granted", 0, lease.token)


connect(sys.argv[1])  # loads the driver
say("ready")
sys.stdin.readline()
asyncio.run(main(*sys.argv[1:]))
