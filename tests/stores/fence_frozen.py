"""
A process that stops itself before it sends its Nth message, as a machine may that is suspended.

    fence_frozen.py URL raise_to|schema N

It says "ready", waits for a line, and raises the fence of seats/42 or creates the schema of the store. If it needs
fewer messages, it says "done".
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.selector_events import _SelectorSocketTransport as SocketTransport  # type: ignore[attr-defined]
from typing import Any

from fencing_sdk.abc._powers import SupportsSchema
from fencing_sdk.backends import from_url
from fencing_sdk.guards.sql import SqlGuard


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def stop_before(number: int) -> None:
    send, sent = SocketTransport.write, 0

    def write(transport: Any, data: bytes) -> None:
        nonlocal sent
        sent += 1
        if sent == number:
            os.kill(os.getpid(), signal.SIGSTOP)
        send(transport, data)

    SocketTransport.write = write


async def main(url: str, action: str, number: str) -> None:
    guard, backend = SqlGuard(url), from_url(url)
    if action != "schema":
        await backend.open()
    say("ready")
    sys.stdin.readline()
    stop_before(int(number))
    if action == "raise_to":
        await guard.raise_to("seats/42", int(number))
    else:
        assert isinstance(backend, SupportsSchema)
        await backend.create_schema()
    say("done")
    await backend.aclose()


asyncio.run(main(*sys.argv[1:]))
