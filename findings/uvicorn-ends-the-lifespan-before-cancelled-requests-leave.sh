#!/usr/bin/env bash
# uvicorn 0.54.0; Python 3.11.7.
#
# SIGTERM reaches uvicorn while a request runs that is longer than `timeout_graceful_shutdown`. uvicorn cancels its task and
# begins the shutdown of the lifespan at once, without waiting until the task has left its `finally`. So a pool or client that the
# lifespan closes is closed while a handler still needs it to roll back or to release a lock. What holds the handler's
# cleanup has to outlive the lifespan, or the lifespan has to wait for the handlers itself.
#
# Seen:
#   handler cancelled, lifespan shutdown, handler cleaned up
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet "$folder/venv"
uv pip install --quiet --python "$folder/venv" uvicorn==0.54.0
"$folder/venv/bin/python" - <<'PYTHON'
import asyncio
import os
import signal
import socket

import uvicorn

seen = []


async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        seen.append("lifespan shutdown")
        await asyncio.sleep(1)  # it has time for the handler to end
        await send({"type": "lifespan.shutdown.complete"})
        return
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        seen.append("handler cancelled")
        await asyncio.sleep(0.5)  # such as a rollback
        seen.append("handler cleaned up")
        raise


async def main(server, listening):
    serving = asyncio.create_task(server.serve([listening]))
    while not server.started:
        await asyncio.sleep(0.05)
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    await reader.read()
    writer.close()
    await serving


signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again when it has ended
config = uvicorn.Config(app, timeout_graceful_shutdown=1, log_level="critical")
asyncio.run(main(uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))))
print(", ".join(seen))
assert seen == ["handler cancelled", "lifespan shutdown", "handler cleaned up"]
PYTHON
