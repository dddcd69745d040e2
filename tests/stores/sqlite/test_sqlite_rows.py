"""The rules on a file: its clock, its boots, its tokens and its line, with a clock that is set by hand."""

from __future__ import annotations

import random
import socket
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from inside import LINE_POLL, LINE_TTL
from open_file import RulesOnFile

from fencing_sdk.abc import Busy, Claim, Grant, Renewal
from fencing_sdk.backends._shared.row_backend import WaiterAddress
from fencing_sdk.backends._shared.rules import TokenSource, token_source
from fencing_sdk.backends.sqlite import file as _file
from fencing_sdk.backends.sqlite import rows as _rows
from fencing_sdk.backends.sqlite.rows import SqliteRows


class ManualClock:
    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time


class World:
    """A machine: a clock, a boot, a network namespace, a wall clock, and a folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "locks.db"
        self.clock = ManualClock()
        self.wall = 0
        self._opened: list[RulesOnFile] = []

    def open(
        self, *, boot: str = "boot", network: str = "network", next_token: TokenSource | None = None
    ) -> RulesOnFile:
        source = token_source("hybrid", lambda: self.wall) if next_token is None else next_token
        rows = RulesOnFile(self.path, self.clock, source, boot=boot, network=network)
        self._opened.append(rows)
        return rows

    def close(self) -> None:
        for rows in self._opened:
            rows.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


NOWHERE = WaiterAddress("")


def claim(name: str = "a", ttl: float = 10.0, **kwargs: str) -> Claim:
    return Claim(name, ttl, **kwargs)


def granted(rows: RulesOnFile, asked: Claim, *, waiting: bool = False) -> int:
    outcome = rows.acquire(asked, waiting=waiting)
    assert isinstance(outcome, Grant), outcome
    return outcome.token


def refused(rows: RulesOnFile, asked: Claim, *, waiting: bool = False) -> float:
    outcome = rows.acquire(asked, waiting=waiting)
    assert isinstance(outcome, Busy), outcome
    assert outcome.retry_after is not None
    return outcome.retry_after


class Waiter:
    """One in a process of its own, with a claim of its own."""

    def __init__(self, rows: RulesOnFile, asked: Claim | None = None) -> None:
        self.rows = rows
        self.claim = asked or claim()
        self.address = WaiterAddress("")
        rows.join(self.claim, self.address)

    def due(self) -> bool:
        """Show a sign of life; tell whether it should try."""
        return bool(self.rows.attend(self.address.group, [(self.claim, self.address)]))

    def granted(self) -> int:
        return granted(self.rows, self.claim, waiting=True)

    def refused(self) -> float:
        return refused(self.rows, self.claim, waiting=True)


# Clock and boot.


def test_the_clock_is_read_when_the_write_lock_is_held(world: World):
    rows = world.open()
    hog = sqlite3.connect(world.path, isolation_level=None, check_same_thread=False)
    hog.execute("BEGIN IMMEDIATE")
    waiting = threading.Event()
    world.clock.now = lambda: (waiting.set(), world.clock.time)[1]  # type: ignore[method-assign]

    def give_way() -> None:
        waiting.wait()
        world.clock.time += 2.0
        hog.execute("COMMIT")

    helper = threading.Thread(target=give_way)
    helper.start()
    granted(rows, claim(ttl=10.0))
    helper.join()
    hog.close()
    holder = rows.inspect("a")
    assert holder is not None
    assert holder.remaining == 10.0, "the seconds spent waiting for the write lock were taken off the ttl"


def test_a_grant_of_an_earlier_boot_has_expired(world: World):
    before = claim(ttl=1e6)
    token = granted(world.open(boot="first"), before)
    rows = world.open(boot="second")
    assert rows.inspect("a") is None
    assert rows.renew([before]) == [Renewal.REFUSED]
    assert granted(rows, claim()) > token


def test_a_waiter_of_an_earlier_boot_is_not_in_the_line(world: World):
    world.open(boot="first").join(claim(), NOWHERE)
    granted(world.open(boot="second"), claim())


def test_a_clock_that_starts_again_ends_the_grants_where_boots_have_no_name(world: World):
    rows = world.open(boot="unknown")
    granted(rows, claim(ttl=1e6))
    world.clock.time = 5.0
    assert rows.inspect("a") is None
    granted(rows, claim())


@pytest.mark.parametrize("ttl", [0.05, 0.1 + 0.2, 1 / 3, 15.0000001])
def test_the_file_never_frees_a_lock_before_its_ttl(world: World, ttl: float):
    rows = world.open()
    world.clock.time = 12345.6789012
    granted(rows, claim(ttl=ttl))
    holder = rows.inspect("a")
    assert holder is not None
    assert holder.remaining >= ttl


# Tokens.


def test_the_clean_up_lowers_no_token_even_if_the_wall_clock_was_stepped_back(world: World):
    world.wall = 5_000_000
    rows = world.open()
    expired = granted(rows, claim(ttl=1.0))
    world.clock.time += 2.0
    rows.sweep()
    assert _count(world, "fencing_lock") == 0
    world.wall = 0
    assert granted(rows, claim()) > expired == 5_000_000


# The line.


class Listener:
    """A socket like the one of a backend in another process."""

    def __init__(self) -> None:
        self.address = WaiterAddress(f"listener-{random.getrandbits(64):x}")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(b"\0fencing-sdk/" + self.address.box.encode())
        self.socket.setblocking(False)

    def heard(self) -> list[bytes]:
        words = []
        while True:
            try:
                words.append(self.socket.recv(100))
            except BlockingIOError:
                return words


@pytest.fixture
def listeners() -> Iterator[list[Listener]]:
    made = [Listener() for _ in range(3)]
    yield made
    for listener in made:
        listener.socket.close()


def test_all_waiters_of_a_backend_live_by_one_sign(world: World):
    rows = world.open()
    holders = [claim(name, ttl=100.0) for name in "ab"]
    for holder in holders:
        granted(rows, holder)
    first, second = Waiter(rows, claim("a")), claim("b")
    rows.join(second, first.address)
    for _ in range(4):
        world.clock.time += LINE_POLL
        rows.attend(first.address.group, [(first.claim, first.address), (second, first.address)])
    for holder in holders:
        rows.release(holder)
        refused(rows, claim(holder.name))


def test_a_waiter_that_could_not_leave_loses_its_place_although_another_of_its_backend_waits(world: World):
    rows, holder, staying = world.open(), claim("a", ttl=100.0), claim("b")
    granted(rows, holder)
    granted(rows, claim("b", ttl=100.0))
    leaving, following = Waiter(rows), Waiter(rows)
    rows.join(staying, leaving.address)
    assert rows.attend(leaving.address.group, [(staying, leaving.address)]) == []
    rows.release(holder)
    following.granted()


def test_a_slot_of_one_who_has_left_may_be_taken_and_a_stopped_owner_keeps_no_stranger_alive(world: World):
    """Slots stay few, and the late sign of one that was passed over is not taken for another's."""
    rows = world.open()
    stopped = Waiter(rows)
    world.clock.time += LINE_TTL
    granted(rows, claim(ttl=1.0))  # which deletes the row of the one that was silent
    world.clock.time += 1.0
    heir = Waiter(rows)
    assert _slots(world) == [0]
    world.clock.time += LINE_TTL
    stopped.due()
    assert _slots(world) == [0, 1]
    assert stopped.due()
    stopped.granted()
    heir.due()
    assert heir.refused() > 0


def test_waiting_takes_no_write_lock(world: World, monkeypatch: pytest.MonkeyPatch):
    """Renewals of others need it."""
    monkeypatch.setattr(_file, "PATIENCE", 0.0)
    rows = world.open()
    granted(rows, claim(ttl=100.0))
    head, second = Waiter(rows), Waiter(rows)
    hog = sqlite3.connect(world.path, isolation_level=None)
    hog.execute("BEGIN IMMEDIATE")
    for _ in range(4):
        world.clock.time += LINE_POLL
        for waiter in (head, second):
            assert not waiter.due()
            waiter.refused()
    hog.close()


def test_a_release_passes_over_those_who_are_gone(world: World, listeners: list[Listener]):
    rows = world.open()
    holder = claim()
    granted(rows, holder)
    for listener in listeners:
        rows.join(claim(), listener.address)
    listeners[0].socket.close()
    listeners[1].socket.close()
    rows.release(holder)
    assert len(listeners[2].heard()) == 1
    assert _count(world, "fencing_waiter") == 1


def test_a_waiter_that_is_gone_and_deleted_meanwhile_passes_the_turn_on_all_the_same(
    world: World, listeners: list[Listener], monkeypatch: pytest.MonkeyPatch
):
    """By another process, which found it silent and woke nobody because it was refused itself."""
    rows, others = world.open(), world.open()
    holder, gone = claim(), claim()
    granted(rows, holder)
    rows.join(gone, listeners[0].address)
    rows.join(claim(), listeners[1].address)
    listeners[0].socket.close()
    send = _rows.send_wakeup

    def deleted_meanwhile(address: WaiterAddress) -> bool:
        if address == listeners[0].address:
            with others.file.transaction() as now:
                SqliteRows(others, "a", now).leave(gone.owner)
        return send(address)

    monkeypatch.setattr(_rows, "send_wakeup", deleted_meanwhile)
    rows.release(holder)
    assert len(listeners[1].heard()) == 1


def test_a_waiter_in_another_network_namespace_keeps_its_place(world: World, listeners: list[Listener]):
    here, there = world.open(network="here"), world.open(network="there")
    holder, waiter = claim(), claim()
    granted(here, holder)
    there.join(waiter, WaiterAddress("not-to-be-reached-from-here"))
    here.join(claim(), listeners[0].address)
    here.release(holder)
    assert listeners[0].heard() == [], "it is not the turn of the second"
    refused(here, claim())
    granted(there, waiter, waiting=True)


# Texts that look like SQL.

HOSTILE = ["' OR '1'='1", "'; DROP TABLE fencing_lock; --", '"', "%", "_", "x' UNION SELECT owner FROM fencing_lock --"]


@pytest.mark.parametrize("text", HOSTILE)
def test_names_owners_and_labels_are_never_read_as_sql(world: World, text: str):
    rows = world.open()
    victim = claim("victim")
    granted(rows, victim)
    hostile = claim(text, owner=text, label=text)
    rows.join(hostile, NOWHERE)
    granted(rows, hostile, waiting=True)
    assert rows.renew([claim("victim", owner=text)]) == [Renewal.TAKEN_OVER]
    rows.release(claim("victim", owner=text))
    rows.leave(claim("victim", owner=text))
    holder = rows.inspect(text)
    assert holder is not None
    assert holder.label == text
    rows.release(hostile)
    assert rows.inspect(text) is None
    assert rows.renew([victim]) == [Renewal.RENEWED]


def _count(world: World, table: str) -> int:
    connection = sqlite3.connect(world.path)
    try:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
    finally:
        connection.close()


def _slots(world: World) -> list[int]:
    connection = sqlite3.connect(world.path)
    try:
        return [slot for (slot,) in connection.execute("SELECT DISTINCT slot FROM fencing_waiter ORDER BY slot")]
    finally:
        connection.close()
