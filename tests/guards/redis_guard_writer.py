"""
A process that writes to one resource with tokens around a rising middle, and records each write in the same step.

    python redis_guard_writer.py URL SEED TURNS

Starts at a line on stdin; prints how many writes were accepted and how many refused.
"""

import asyncio
import random
import sys

from fencing_sdk import StaleTokenError, Token
from fencing_sdk.guards.redis import RedisGuard

RESOURCE = "ledger/{1}"


async def write(url: str, seed: int, turns: int) -> tuple[int, int]:
    chance, outcomes = random.Random(seed), [0, 0]
    async with RedisGuard(url) as guard:
        record = guard.key(RESOURCE, "accepted")

        async def once(token: Token) -> None:
            try:
                await guard.execute(RESOURCE, token, ("RPUSH", record, f"{token} {token.holder}"))
            except StaleTokenError:
                outcomes[1] += 1
            else:
                outcomes[0] += 1

        for middle in range(turns):  # several at once, in an order that nobody knows
            tokens = [Token(middle + chance.randrange(6), f"{seed:08x}") for _ in range(4)]
            await asyncio.gather(*map(once, tokens))
    return outcomes[0], outcomes[1]


def main(url: str, seed: str, turns: str) -> None:
    print("ready", flush=True)  # noqa: T201  (how a process talks to its test)
    sys.stdin.readline()
    print(*asyncio.run(write(url, int(seed), int(turns))), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
