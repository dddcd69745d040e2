"""
A process among others that share a lock file.

    sqlite_worker.py fight PATH JOURNAL   acquire and sometimes release, until killed; writes what it was granted
    sqlite_worker.py race PATH ROUNDS     acquire and release as fast as possible; prints the faults
    sqlite_worker.py stand PATH NAME      stand in line, woken by nothing but the bell; hold until a line comes in
    sqlite_worker.py poll PATH NAME       the same, with a timer of its own besides
    sqlite_worker.py hold PATH NAME TTL   hold until a line comes in, or until killed
    sqlite_worker.py half PATH            stop in the middle of a transaction, for ever
"""

import asyncio
import json
import random
import sys
import threading
from pathlib import Path

from fencing_sdk._values.clock import BootClock
from fencing_sdk.abc import Claim, Grant
from fencing_sdk.backends._shared import rules
from fencing_sdk.backends.sqlite import SqliteBackend, file
from fencing_sdk.backends.sqlite.rows import OpenFile, SqliteRows
from fencing_sdk.errors import BackendUnavailableError
from fencing_sdk.testing.promises.under_test import in_line

CLOCK = BootClock()


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def asked_to_go() -> None:
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


async def fight(backend: SqliteBackend, journal: str) -> None:
    with Path(journal).open("w", buffering=1) as file:  # noqa: ASYNC230  (nothing else runs in this loop)

        def note(**facts: object) -> None:
            file.write(json.dumps(facts) + "\n")

        while True:
            claim = Claim(random.choice("abcdef"), 0.3)
            sent = CLOCK.now()
            outcome = await backend.acquire(claim)
            if not isinstance(outcome, Grant):
                await asyncio.sleep(random.uniform(0, 0.005))
                continue
            note(name=claim.name, token=outcome.token, granted_by=CLOCK.now(), ends=sent + claim.ttl)
            await asyncio.sleep(random.uniform(0, 0.003))
            if random.random() < 0.8:
                note(token=outcome.token, held_until=CLOCK.now())
                await backend.release(claim)


async def race(backend: SqliteBackend, rounds: str) -> None:
    file.PATIENCE = 30.0  # a machine that does much else gives a process that has waited no turn for seconds
    faults = 0
    grants = 0
    while grants < int(rounds):
        claim = Claim("prize", 60.0)
        try:
            if isinstance(await backend.acquire(claim), Grant):
                grants += 1
                await backend.release(claim)
        except BackendUnavailableError:
            faults += 1
    say(faults)


async def stand(backend: SqliteBackend, name: str) -> None:
    claim = Claim(name, 60.0)
    tries = 0
    async with in_line(backend, claim) as turn:
        say("standing")
        while True:
            tries += 1
            outcome = await backend.acquire(claim)
            if isinstance(outcome, Grant):
                break
            await turn.wait()
    say("granted", tries)
    await asked_to_go()
    await backend.release(claim)


async def poll(backend: SqliteBackend, name: str) -> None:
    claim = Claim(name, 60.0)
    async with in_line(backend, claim) as turn:
        say("standing")
        while not isinstance(outcome := await backend.acquire(claim), Grant):
            try:
                async with asyncio.timeout(outcome.retry_after):
                    await turn.wait()
            except TimeoutError:
                continue
    say("granted")
    await asked_to_go()
    await backend.release(claim)


async def half(backend: SqliteBackend) -> None:
    def work(opened: OpenFile) -> None:
        with opened.file.transaction() as now:
            rules.grant(SqliteRows(opened, "half", now), Claim("half", 60.0))
            say("half")
            threading.Event().wait()

    await asyncio.wrap_future(backend._store.sql.submit(work))


async def main(command: str, path: str, *arguments: str) -> None:
    backend = SqliteBackend(path, tokens="counter" if command == "fight" else "hybrid")
    commands = {"fight": fight, "race": race, "stand": stand, "poll": poll, "half": half}
    try:
        await commands[command](backend, *arguments)
    finally:
        await backend.aclose()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
