"""
A process among others that share a lock file.

    sqlite_worker.py fight PATH JOURNAL   acquire and sometimes release, until killed; writes what it was granted
    sqlite_worker.py race PATH ROUNDS     acquire and release as fast as possible; prints the faults
    sqlite_worker.py half PATH            stop in the middle of a transaction, for ever
"""

import asyncio
import json
import random
import sys
import threading
from pathlib import Path

from fencing_sdk._values.clock import BootClock
from fencing_sdk.abc import Claim, Place
from fencing_sdk.abc.line import Line
from fencing_sdk.backends.sqlite import SqliteBackend, file
from fencing_sdk.errors import BackendUnavailableError

CLOCK = BootClock()


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def fight(backend: SqliteBackend, journal: str) -> None:
    with Path(journal).open("w", buffering=1) as file:  # noqa: ASYNC230  (nothing else runs in this loop)

        def note(**facts: object) -> None:
            file.write(json.dumps(facts) + "\n")

        while True:
            claim = Claim(random.choice("abcdef"), 0.3)
            sent = CLOCK.now()
            place = await backend.draw(claim, only_if_it_holds=True)
            if not isinstance(place, Place):
                await asyncio.sleep(random.uniform(0, 0.005))
                continue
            note(name=claim.name, token=place.token, granted_by=CLOCK.now(), ends=sent + claim.ttl)
            await asyncio.sleep(random.uniform(0, 0.003))
            if random.random() < 0.8:
                note(token=place.token, held_until=CLOCK.now())
                await backend.give_back(claim)


async def race(backend: SqliteBackend, rounds: str) -> None:
    file.PATIENCE = 30.0  # a machine that does much else gives a process that has waited no turn for seconds
    faults = 0
    grants = 0
    while grants < int(rounds):
        claim = Claim("prize", 60.0)
        try:
            if isinstance(await backend.draw(claim, only_if_it_holds=True), Place):
                grants += 1
                await backend.give_back(claim)
        except BackendUnavailableError:
            faults += 1
    say(faults)


async def half(backend: SqliteBackend) -> None:
    def step(line: Line, now: float) -> None:
        line.draw(Claim("half", 60.0), now)
        say("half")
        threading.Event().wait()

    await asyncio.wrap_future(backend._sql.submit(lambda opened: opened.run([("half", step)], draws=True)))


async def main(command: str, path: str, *arguments: str) -> None:
    backend = SqliteBackend(path, tokens="counter" if command == "fight" else "hybrid")
    commands = {"fight": fight, "race": race, "half": half}
    try:
        await commands[command](backend, *arguments)
    finally:
        await backend.aclose()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
