"""
A process that stops itself in the middle of an acquisition, as a machine may that is suspended.

    mysql_frozen.py URL NAME WHERE

It says "ready", waits for a line, and stops itself once the row of the name is locked: between the two texts of the
transaction, while it sends the second one, or before it reads the answer to the first one. When it goes on, it says
"answered" and what the acquisition returned, and ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from fencing_sdk import BackendUnavailableError
from fencing_sdk.abc import Claim
from fencing_sdk.backends.mysql import from_url


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class Transport:
    """Sends what the driver writes, and stops the process once."""

    stopped = False

    def __init__(self, transport: asyncio.Transport, where: str) -> None:
        self._transport = transport
        self._marker = (
            b"fencing_ticket WHERE name IN (x'61')\0" if where == "reading" else b"INSERT INTO fencing_ticket"
        )
        self._share = {"between": 0.0, "sending": 0.5, "reading": 1.0}[where]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._marker in data + b"\0" and not Transport.stopped:
            Transport.stopped = True
            sent = int(self._share * len(data))
            self._transport.write(data[:sent])
            os.kill(os.getpid(), signal.SIGSTOP)
            data = data[sent:]
        self._transport.write(data)


async def main(url: str, name: str, where: str) -> None:
    loop = asyncio.get_running_loop()
    dial = loop.create_connection

    async def dialed(*arguments: Any, **options: Any) -> tuple[Transport, object]:
        transport, protocol = await dial(*arguments, **options)
        return Transport(transport, where), protocol

    loop.create_connection = dialed  # type: ignore[method-assign,assignment]
    backend = from_url(url)
    await backend.open()
    say("ready")
    sys.stdin.readline()
    outcome: object
    try:
        outcome = await backend.draw(Claim(name, 60.0))
    except BackendUnavailableError as error:
        outcome = error
    say("answered", type(outcome).__name__)
    await backend.aclose()


asyncio.run(main(*sys.argv[1:]))
