"""
A process of clients that take, renew, release and abandon locks of a quorum, and write down each grant they have used.

``python quorum_worker.py CLIENT URL LOG SEED``, where CLIENT is ``fenced``, or ``published`` for the control. It works
until its standard input is closed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
import uuid
from pathlib import Path
from typing import Any, Protocol, TextIO

from redis.asyncio import Redis

from fencing_sdk.abc import Claim, Place
from fencing_sdk.backends.redis.quorum import from_url

LOCKS = [f"lock-{number}" for number in range(20)]
TASKS = 8
LIMIT = 0.4
"""Seconds for one call."""
RATE = 0.99
"""The part of a ttl that a client uses: clocks may run at other rates."""


class Client(Protocol):
    async def acquire(self, claim: Claim) -> int | None: ...
    async def renew(self, claim: Claim) -> bool: ...
    async def release(self, claim: Claim) -> None: ...
    async def aclose(self) -> None: ...


class Fenced:
    """The backend of this package."""

    def __init__(self, url: str) -> None:
        self._backend = from_url(url)

    async def acquire(self, claim: Claim) -> int | None:
        outcome = await self._backend.draw(claim, only_if_it_holds=True)
        return outcome.token if isinstance(outcome, Place) else None

    async def renew(self, claim: Claim) -> bool:
        return isinstance((await self._backend.keep([(claim, 0)]))[0], Place)

    async def release(self, claim: Claim) -> None:
        await self._backend.give_back(claim)

    async def aclose(self) -> None:
        await self._backend.aclose()


class Published:
    """Redlock as published, with the usual attempt at a token: the highest of a counter on each node."""

    TAKE = """
        if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 0 end
        return redis.call('INCR', KEYS[2])"""
    KEEP = "return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('PEXPIRE', KEYS[1], ARGV[2]) or 0"
    FREE = "return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('DEL', KEYS[1]) or 0"

    def __init__(self, url: str) -> None:
        hosts = url.partition("://")[2].split(",")
        self._nodes = [Redis.from_url(f"redis://{host}", socket_timeout=LIMIT) for host in hosts]
        self._majority = len(hosts) // 2 + 1

    async def _ask(self, script: str, claim: Claim) -> list[int]:
        keys = (f"lock:{claim.name}", f"counter:{claim.name}")
        calls = (node.eval(script, 2, *keys, claim.owner, int(claim.ttl * 1000)) for node in self._nodes)
        replies: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        return [reply for reply in replies if isinstance(reply, int) and reply > 0]

    async def acquire(self, claim: Claim) -> int | None:
        numbers = await self._ask(self.TAKE, claim)
        if len(numbers) >= self._majority:
            return max(numbers)
        await self._ask(self.FREE, claim)
        return None

    async def renew(self, claim: Claim) -> bool:
        return len(await self._ask(self.KEEP, claim)) >= self._majority

    async def release(self, claim: Claim) -> None:
        await self._ask(self.FREE, claim)

    async def aclose(self) -> None:
        for node in self._nodes:
            await node.aclose()


async def use(client: Client, chance: random.Random, told_to_end: asyncio.Task[str], log: TextIO) -> None:
    """Use one lock after the other. The lines are those that `tests.simulation.judge` understands."""
    while not told_to_end.done():
        claim = Claim(chance.choice(LOCKS), chance.choice((0.25, 0.5)), owner=uuid.uuid4().hex)
        asked = time.monotonic()
        try:
            async with asyncio.timeout(LIMIT):
                token = await client.acquire(claim)
        except Exception:
            token = None
        known = time.monotonic()
        deadline = asked + claim.ttl * RATE
        if token is not None and known < deadline:
            ended = await hold(client, claim, deadline, chance)
            about = {"actor": str(os.getpid()), "name": claim.name, "token": token, "holder": claim.owner}
            times = {"ttl": claim.ttl, "waited": known - asked, "deadline": ended}
            log.write(json.dumps({"t": known, "kind": "acquired", **about, **times}) + "\n")
            log.write(json.dumps({"t": ended, "kind": "body_ended", **about, "how": "clean"}) + "\n")
            if chance.random() < 0.02:
                continue  # abandoned: its ttl ends it
        try:
            async with asyncio.timeout(LIMIT):
                await client.release(claim)
        except Exception:
            await asyncio.sleep(0.01)
        await asyncio.sleep(chance.uniform(0, 0.01))


async def hold(client: Client, claim: Claim, deadline: float, chance: random.Random) -> float:
    """Hold a lock for a moment, or renew it for longer than its ttl; return the last moment at which it was held."""
    if chance.random() < 0.97:
        await asyncio.sleep(chance.uniform(0, 0.01))
        return min(time.monotonic(), deadline)
    until = time.monotonic() + chance.uniform(0, 2 * claim.ttl)
    while time.monotonic() < until:
        await asyncio.sleep(claim.ttl / 5)
        sent = time.monotonic()
        if sent >= deadline:
            return deadline
        try:
            async with asyncio.timeout(min(LIMIT, deadline - sent)):
                renewed = await client.renew(claim)
        except Exception:
            renewed = False
        if time.monotonic() >= deadline:
            return deadline
        if renewed:
            deadline = sent + claim.ttl * RATE
    return min(time.monotonic(), deadline)


async def main(kind: str, url: str, log: Path, seed: int) -> None:
    chance = random.Random(seed)
    client: Client = Fenced(url) if kind == "fenced" else Published(url)
    told_to_end = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    with log.open("w", buffering=1) as file:
        tasks = [use(client, random.Random(chance.random()), told_to_end, file) for _ in range(TASKS)]
        await asyncio.gather(*tasks)
    await client.aclose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])))
