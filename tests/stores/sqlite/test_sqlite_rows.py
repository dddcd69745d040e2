"""Lines in a file: its clock, its boots and its tokens, with a clock that is set by hand."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fencing_sdk.abc import Claim, Gone, Place, Seen
from fencing_sdk.abc.line import Line
from fencing_sdk.backends._shared.tokens import token_source
from fencing_sdk.backends.sqlite.file import LockFile
from fencing_sdk.backends.sqlite.lines import LineFile


class ManualClock:
    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time


class Machine:
    """A clock, a boot, a wall clock, and a folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "locks.db"
        self.clock = ManualClock()
        self.wall = 0
        self.opened: list[LineFile] = []

    def open(self, boot: str = "boot") -> LineFile:
        file = LockFile(self.path, synchronous="normal", clock=self.clock)
        self.opened.append(LineFile(file, token_source("hybrid", lambda: self.wall), boot))
        return self.opened[-1]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    for opened in made.opened:
        opened.close()


def drawn(opened: LineFile, claim: Claim) -> Place:
    ((place,), _) = opened.run([(claim.name, lambda line, now: line.draw(claim, now))], draws=True)
    assert isinstance(place, Place)
    return place


def seen(opened: LineFile) -> list[Seen]:
    ((tickets,), _) = opened.run([("a", Line.seen)])
    return tickets


def test_the_clock_is_read_when_the_write_lock_is_held(machine: Machine):
    opened = machine.open()
    hog = sqlite3.connect(machine.path, isolation_level=None, check_same_thread=False)
    hog.execute("BEGIN IMMEDIATE")
    waiting = threading.Event()
    machine.clock.now = lambda: (waiting.set(), machine.clock.time)[1]  # type: ignore[method-assign]

    def give_way() -> None:
        waiting.wait()
        machine.clock.time += 2.0
        hog.execute("COMMIT")

    helper = threading.Thread(target=give_way)
    helper.start()
    drawn(opened, Claim("a", 10.0))
    helper.join()
    hog.close()
    (ticket,) = seen(opened)
    assert ticket.remaining == 10.0, "the seconds spent waiting for the write lock were taken off the ttl"


def test_the_tickets_of_an_earlier_boot_are_dead(machine: Machine):
    before = Claim("a", 1e6)
    first = machine.open("first")
    token = drawn(first, before).token
    drawn(first, Claim("a", 1e6))
    second = machine.open("second")
    assert seen(second) == []
    ((answer,), _) = second.run([("a", lambda line, now: line.keep(before, now))])
    assert isinstance(answer, Gone)
    assert drawn(second, Claim("a", 10.0)).token > token


def test_a_clock_that_starts_again_ends_the_tickets_where_boots_have_no_name(machine: Machine):
    opened = machine.open("unknown")
    drawn(opened, Claim("a", 1e6))
    machine.clock.time = 5.0
    assert len(seen(opened)) == 1
    machine.clock.time += 1e6
    assert drawn(opened, Claim("a", 10.0)).token is not None


def test_the_clean_up_lowers_no_token_even_if_the_wall_clock_was_stepped_back(machine: Machine):
    machine.wall = 5_000_000
    opened = machine.open()
    dead = drawn(opened, Claim("a", 1.0)).token
    machine.clock.time += 2.0
    opened.sweep()
    with closing(sqlite3.connect(machine.path)) as connection:
        assert connection.execute("SELECT count(*) FROM fencing_line").fetchone() == (0,)
    machine.wall = 0
    assert drawn(opened, Claim("a", 10.0)).token > dead == 5_000_000
