"""
A process of the campaign of hand-overs: it takes the lock or resumes a ticket, uses its token, and detaches the lease.

An order is a line of words: how long to hold, in seconds, for how long the store keeps the ticket, and the ticket, or
``-`` to take the lock. Each use is a line in a file: the moment, the token and the process.
"""

import asyncio
import os
import sys

from fencing_sdk import FencingError, Lock, TicketRefusedError, connect
from fencing_sdk._values.claim import Claim
from fencing_sdk._values.clock import BootClock

LOCK = "deploy"
PAUSE = 0.004


def adopt_owners() -> None:
    """Break it as clients do that take over the owner id: whoever has the ticket is its owner."""
    from fencing_sdk._engine.acquisition import Terms

    def claim(terms: Terms) -> Claim:
        owner = None if terms.resumes is None else terms.resumes.owner
        return Claim(terms.store_name, terms.timing.ttl, owner, terms.label, terms.mode)

    Terms.claim = claim  # type: ignore[method-assign]


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def use(lock: Lock, uses: int, hold: float, keep: float) -> None:
    lease = await lock.acquire()
    end = BootClock.now() + hold
    while True:
        now = BootClock.now()
        os.write(uses, f"{now:.6f} {lease.token:d} {os.getpid()}\n".encode())
        if now >= end:
            break
        await asyncio.sleep(PAUSE)
    say("detached", (await lease.detach(keep)).dump())


async def main(url: str, path: str, ttl: float) -> None:
    uses = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with connect(url) as locks:
        say("ready", os.getpid())
        async for line in reader:
            hold, keep, ticket = line.decode().split()
            lock = locks.lock(LOCK, ttl=ttl, wait=30) if ticket == "-" else locks.resume(ticket, ttl=ttl)
            try:
                await use(lock, uses, float(hold), float(keep))
            except TicketRefusedError as error:
                say("refused", error.reason)
            except FencingError as error:
                say("failed", type(error).__name__)


if __name__ == "__main__":
    if sys.argv[4] == "adopt":
        adopt_owners()
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
