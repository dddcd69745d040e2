#!/usr/bin/env bash
# uvicorn 0.54.0; Python 3.11.7.
#
# At its start `uvicorn --workers` waits for a lifespan as long as it takes. At SIGHUP, which replaces the workers one by one, a new
# worker has `--timeout-worker-healthcheck` seconds (5 by default) to end its lifespan, although it answers the health check
# meanwhile. Then uvicorn sends it SIGKILL and abandons the restart. So an application whose lifespan takes 8 s, for migrations or
# because it waits for a lock, starts and can never be restarted; and what it held when it was killed stays held until its
# lease is over.
#
# Seen:
#   start: both workers have ended their lifespans
#   SIGHUP: the lifespan of a worker begins
#   SIGHUP: not ready in time; keeping worker, aborting the restart
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet "$folder/venv"
uv pip install --quiet --python "$folder/venv" uvicorn==0.54.0
cat > "$folder/slow.py" <<'PYTHON'
import asyncio


async def app(scope, receive, send):
    await receive()  # lifespan.startup
    print("begins", flush=True)
    await asyncio.sleep(8)
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})
PYTHON
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import signal
import subprocess
import sys

command = [sys.executable, "-m", "uvicorn", "slow:app", "--app-dir", sys.argv[1], "--workers", "2", "--port", "0"]
server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def until(*words):
    for line in server.stdout:
        if any(word in line for word in words):
            return line.strip()
    raise AssertionError(f"uvicorn has ended before {words}")


try:
    for _ in range(2):
        until("startup complete")
    print("start: both workers have ended their lifespans")
    server.send_signal(signal.SIGHUP)
    until("begins")
    print("SIGHUP: the lifespan of a worker begins")
    line = until("startup complete", "not ready in time")
    assert "not ready in time" in line and "aborting the restart" in line, line
    print("SIGHUP: not ready in time; keeping worker, aborting the restart")
finally:
    server.terminate()
    server.communicate()
PYTHON
