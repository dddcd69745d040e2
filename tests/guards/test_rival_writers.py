"""Writers of several transactions and processes: transactions around the lock, rivals, and the example of seats."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import asyncpg
import pytest
from guard_rival import DESKS, RESOURCE

import fencing_sdk.sync
from fencing_sdk import LockClient
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.guards.sql import SqlGuard

pytestmark = pytest.mark.slow

pytest_plugins = ["postgresql_fixtures", "guard_database"]


# A transaction that is committed after the lock was released: the next holder's `admit` waits for it.


TABLE = "CREATE TABLE seats (seat bigint PRIMARY KEY, who varchar(40))"
ROW = "INSERT INTO seats (seat) VALUES (42)"


async def test_two_passengers_do_not_get_one_seat_of_postgresql(server):
    await server.execute(f"{TABLE}; {ROW}")
    guard, answers = SqlGuard(), {}

    async def request(who, then):
        connection = await asyncpg.connect(server.url)
        try:
            async with connection.transaction():
                async with locks.lock("seats/42") as lease:
                    await guard.admit(connection, "seats/42", lease.token)
                    free = await connection.fetchval("SELECT who FROM seats WHERE seat = 42") is None
                    if free:
                        await connection.execute("UPDATE seats SET who = $1 WHERE seat = 42", who)
                await then()
            answers[who] = "booked" if free else "taken"
        finally:
            await connection.close()

    second = []

    async def let_the_second_in():
        second.append(asyncio.create_task(request("Bob", lambda: asyncio.sleep(0))))
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        while not second[0].done() and not await server.value(query):  # noqa: ASYNC110  (the server has no event)
            await asyncio.sleep(0.01)

    async with LockClient(MemoryBackend(tokens="counter")) as locks:
        await request("Ada", let_the_second_in)
        await asyncio.gather(*second)
    assert answers == {"Ada": "booked", "Bob": "taken"}
    assert await server.value("SELECT who FROM seats") == "Ada"


def test_two_passengers_do_not_get_one_seat_of_sqlite(tmp_path):
    path, guard, answers = tmp_path / "app.db", SqlGuard(), {}
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(TABLE)
        connection.execute(ROW)
    bob_holds = threading.Event()

    def book(who, holds, then):
        with closing(sqlite3.connect(path, timeout=30)) as database, database:
            with locks.lock("seats/42") as lease:
                holds.set()
                guard.admit_sync(database, "seats/42", lease.token)
                free = database.execute("SELECT who FROM seats").fetchone() == (None,)
                if free:
                    database.execute("UPDATE seats SET who = ?", (who,))
            then()
        answers[who] = "booked" if free else "taken"

    def let_bob_in():
        bob.start()
        bob_holds.wait(60)

    with fencing_sdk.sync.connect(MemoryBackend(tokens="counter")) as locks:
        bob = threading.Thread(target=book, args=("Bob", bob_holds, lambda: None))
        book("Ada", threading.Event(), let_bob_in)
        bob.join(60)
        assert answers == {"Ada": "booked", "Bob": "taken"}
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT who FROM seats").fetchone() == ("Ada",)


# Real processes that compete for one resource, some of them killed.


RIVAL = Path(__file__).with_name("guard_rival.py")


@contextlib.contextmanager
def rivals(kind: str, place: Path | str, *, number: int, turns: int):
    """Processes that are ready and wait for the word to start. None is left behind."""
    DESKS[kind](place)
    processes = [
        subprocess.Popen(
            [sys.executable, str(RIVAL), kind, str(place), str(seed), str(turns)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(number)
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def start(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()


@pytest.fixture(params=["sql", "files", "postgresql"])
def kind(request):
    return request.param


@pytest.fixture
def place(kind, request, tmp_path):
    """Where the counter is: a path, or a server."""
    if kind != "postgresql":
        return tmp_path / "data"
    url = request.getfixturevalue("postgresql_server").url
    DESKS[kind](url).prepare()
    return url


def test_no_update_is_lost_and_no_number_is_shared_among_processes(kind, place):
    turns = 10 if kind == "postgresql" else 40  # it connects anew for everything
    with rivals(kind, place, number=4, turns=turns) as processes:
        start(processes)
        outputs = [process.communicate(timeout=300)[0].split() for process in processes]
    assert [output[-1] for output in outputs] == ["end"] * 4
    accepted = [int(token) for output in outputs for token in output[:-1]]
    assert accepted, "nobody got in"
    assert len(accepted) < 4 * turns, "nobody was refused: there was no race"
    assert len(set(accepted)) == len(accepted), "two processes wrote with one number"
    assert DESKS[kind](place).read(RESOURCE) == str(len(accepted)), "updates were lost"


async def test_killed_processes_leave_a_state_that_others_go_on_with(kind, place):
    """A kill between a write and its report makes it one more than was reported, and that is all it does."""
    chance, kills, reported = random.Random(1), 0, 0
    for _ in range(2):
        with rivals(kind, place, number=3, turns=100_000) as processes:
            start(processes)
            for process in processes:
                lines = [process.stdout.readline() for _ in range(chance.randrange(3, 10))]
                process.kill()
                lines += process.stdout.readlines()
                reported += sum(line.endswith("\n") for line in lines)
                kills += 1
    desk = DESKS[kind](place)
    value = int(desk.read(RESOURCE))
    assert reported <= value <= reported + kills
    desk.write(RESOURCE, await desk.guard.highest(RESOURCE) + 1, str(value + 1))
    assert desk.read(RESOURCE) == str(value + 1)
    if kind == "files":
        names = [path.name for path in (place / RESOURCE).iterdir()]
        assert len(names) == 3, f"drafts of killed writers are left: {names}"


# The example that needs a server: two processes sell one seat, and the database refuses the one that was frozen.


EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "seat_booking_postgresql.py"


def run(script, folder, *arguments, **environment):
    inherited = {name: value for name, value in os.environ.items() if name != "FENCING_URL"}
    return subprocess.run(
        [sys.executable, "-W", "error", str(script), *arguments],
        cwd=folder,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_late_write_is_refused_by_the_database_and_compensated(postgresql_server, tmp_path):
    done = run(EXAMPLE, tmp_path, postgresql_server.url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ada is too late and gets the money back: token" in done.stdout
    assert done.stdout.endswith("the seat is Bob's, and Bob alone has paid\n")
    assert postgresql_server.ask("SELECT to_regclass('example_seats')") == [(None,)]


def test_without_the_guard_the_late_write_gets_through(postgresql_server, tmp_path):
    """So it is the guard that the example shows."""
    line, script = "            guard.admit_sync(", tmp_path / "unguarded.py"
    code = EXAMPLE.read_text()
    assert line in code
    script.write_text(code.replace(line, line.replace("guard.admit_sync(", "(lambda *_: None)(")))
    done = run(script, tmp_path, FENCING_URL=postgresql_server.url)
    assert done.returncode == 1
    assert "AssertionError: the late write got through" in done.stderr
