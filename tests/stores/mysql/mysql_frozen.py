"""
A process that stops itself in the middle of a transaction, as a machine may that is suspended.

    mysql_frozen.py URL NAME

It says "ready", waits for a line, and stops itself between the two texts of an acquisition. When it goes on, it says
"answered" and what the acquisition returned, and ends.
"""

import asyncio
import os
import signal
import sys
from typing import Any

from fencing_sdk import BackendUnavailableError
from fencing_sdk.abc import Claim
from fencing_sdk.backends.mysql import from_url
from fencing_sdk.backends.mysql.rows import NameRows


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def main(url: str, name: str) -> None:
    backend = from_url(url)
    await backend.inspect(name)
    say("ready")
    sys.stdin.readline()
    read, stopped = NameRows.of_answers, []

    def stop_once(*answers: Any) -> Any:
        if not stopped:
            stopped.append(True)
            os.kill(os.getpid(), signal.SIGSTOP)
        return read(*answers)

    NameRows.of_answers = stop_once  # type: ignore[assignment]
    outcome: object
    try:
        outcome = await backend.acquire(Claim(name, 60.0))
    except BackendUnavailableError as error:
        outcome = error
    say("answered", type(outcome).__name__)
    await backend.aclose()


asyncio.run(main(*sys.argv[1:]))
