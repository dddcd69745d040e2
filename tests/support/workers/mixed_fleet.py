"""
One process of a fleet in which clients of two kinds of locks meet.

    mixed_fleet.py KIND ADDRESS LOCKS FOLDER ROLE SECONDS

The roles: ``old`` holds the old lock, ``tasks`` and ``threads`` hold both, ``ours`` holds ours. Each holder puts its
mark into the folder. If it finds the mark of another process that lives, two were inside together: an overlap.
"""

import asyncio
import contextlib
import os
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from campaigns import amount
from old_locks_stage import STAGES

import fencing_sdk.sync
from fencing_sdk import LeaseLostError, connect
from fencing_sdk.recipes import beside

KIND, ADDRESS, LOCKS, FOLDER, ROLE, SECONDS = sys.argv[1:]
INSIDE, ME = Path(FOLDER, "inside"), Path(FOLDER, str(os.getpid()))
OPTIONS = {"ttl": 2.0, "safety_buffer": 0.6}
LASTING = amount(3.0, short=0.03)
"""Seconds of a body that outlasts its ttl, in a campaign."""
stage = STAGES[KIND](ADDRESS)
ME.write_text(str(os.getpid()))


def say(word):
    sys.stdout.write(f"{word} {os.getpid()}\n")
    sys.stdout.flush()


def come_in():
    try:
        os.link(ME, INSIDE)
    except FileExistsError:
        other = INSIDE.read_text()
        say("follows" if Path(FOLDER, f"dead.{other}").exists() else "overlap")
        ME.replace(INSIDE)
        ME.write_text(str(os.getpid()))
    say("inside")


def go_out():
    if INSIDE.read_text() == str(os.getpid()):
        INSIDE.unlink()
    say("outside")


@contextlib.contextmanager
def inside():
    come_in()
    try:
        yield
    finally:
        go_out()


def stay(number):
    return LASTING if number % 20 == 2 else random.uniform(0.002, 0.03)


async def in_tasks(end):
    async with connect(LOCKS) as locks:
        both = locks.lock("report", **OPTIONS)
        if ROLE == "tasks":
            both = beside(both, stage.for_tasks("report"))
        number = 0
        while time.monotonic() < end:
            number += 1
            with contextlib.suppress(LeaseLostError):
                async with both:
                    with inside():
                        await asyncio.sleep(stay(number))
            await asyncio.sleep(random.uniform(0, 0.02))
    await stage.aclose()


def in_threads(end):
    with fencing_sdk.sync.connect(LOCKS) as locks:
        both = fencing_sdk.sync.beside(locks.lock("report", **OPTIONS), stage.for_threads("report"))
        number = 0
        while time.monotonic() < end:
            number += 1
            with contextlib.suppress(LeaseLostError), both, inside():
                time.sleep(stay(number))
            time.sleep(random.uniform(0, 0.02))


def in_the_old_way(end):
    while time.monotonic() < end:
        with stage.old("report") as held:
            assert held
            with inside():
                time.sleep(random.uniform(0.002, 0.03))
        time.sleep(random.uniform(0, 0.02))


say("ready")
until = time.monotonic() + float(SECONDS)
if ROLE == "old":
    in_the_old_way(until)
elif ROLE == "threads":
    in_threads(until)
else:
    asyncio.run(in_tasks(until))
stage.close()
