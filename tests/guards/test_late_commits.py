"""Writers of several transactions and processes: late commits, rivals, and the example of seats."""

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
from both_worlds import in_both_worlds
from guard_rival import DESKS, RESOURCE
from mysql_ways import AiomysqlPool, MysqlClient
from postgresql_ways import WAYS, opened
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import fencing_sdk.sync
from fencing_sdk import LockClient, Token, UsageError
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.guards.sql import FenceColumn, SqlGuard

pytest_plugins = ["mysql_fixtures", "postgresql_fixtures", "guard_database", "guard_stages"]


# A transaction that commits after the lock was released: refused with a column, and waited for by a guard.


TABLE = "CREATE TABLE seats (seat bigint PRIMARY KEY, who varchar(40), fence bigint NOT NULL DEFAULT 0)"
ROW = "INSERT INTO seats (seat) VALUES (42)"
SEATS = FenceColumn("seats", key="seat")
LATE = r"durable=True"


def book(who, token):
    return f"UPDATE seats SET who = '{who}', fence = {token:d} WHERE seat = 42 AND fence <= {token:d} RETURNING seat"


@pytest.fixture
async def locks():
    async with LockClient(MemoryBackend(tokens="counter")) as locks:
        yield locks


@pytest.fixture
async def seats(way):
    """The same way, on a server that has a row with a fence of its own."""
    if isinstance(way, MysqlClient):
        pytest.skip("a connection of mysqlclient does not show whether its transaction has ended")
    await way.stage.server.execute(f"{TABLE}; {ROW}")
    return way


async def write(way, transaction, token):
    """Write the row, which the statement finds: the tests take no other token."""
    await way.execute(transaction, book("Ada", token).partition(" RETURNING")[0])
    if way.blocking:
        return await asyncio.to_thread(SEATS.written_sync, transaction, 42, token, 1)
    return await SEATS.written(transaction, 42, token, 1)


async def passenger(way):
    return await way.stage.server.value("SELECT who FROM seats")


# Who is refused.


async def test_a_transaction_around_the_lock_is_refused_and_writes_nothing(seats, locks):
    with pytest.raises(UsageError, match=LATE):
        async with seats.begin() as transaction, locks.lock("seats/42") as lease:
            assert await write(seats, transaction, lease.token)
    assert await passenger(seats) is None


async def test_a_transaction_that_begins_inside_and_ends_outside_is_refused(seats, locks):
    """As that of a session which a framework commits after the handler: it is not older than the lease."""
    with pytest.raises(UsageError, match=LATE):
        async with contextlib.AsyncExitStack() as request:
            async with locks.lock("seats/42") as lease:
                transaction = await request.enter_async_context(seats.begin())
                assert await write(seats, transaction, lease.token)
    assert await passenger(seats) is None


async def test_a_transaction_inside_of_the_lock_is_committed(seats, locks):
    async with locks.lock("seats/42") as lease:
        async with seats.begin() as transaction:
            assert await write(seats, transaction, lease.token)
        async with seats.begin() as transaction:
            assert await write(seats, transaction, lease.token)
            assert await write(seats, transaction, lease.token)
    assert await passenger(seats) == "Ada"


async def test_a_transaction_that_has_admitted_the_token_may_end_later(seats, locks):
    guard = SqlGuard()
    async with seats.begin() as transaction, locks.lock("seats/42") as lease:
        await seats.admit(guard, transaction, "seats/42", lease.token)
        assert await write(seats, transaction, lease.token)
    async with seats.begin() as transaction, locks.lock("seats/42") as lease:
        await seats.admit_all(guard, transaction, {"seats/42": lease.token})
        assert await write(seats, transaction, lease.token)
    assert await passenger(seats) == "Ada"


async def test_an_admission_after_the_write_does_not_count(seats, locks):
    guard = SqlGuard()
    with pytest.raises(UsageError, match=LATE):
        async with seats.begin() as transaction, locks.lock("seats/42") as lease:
            assert await write(seats, transaction, lease.token)
            await seats.admit(guard, transaction, "seats/42", lease.token)


async def test_an_admission_in_an_earlier_transaction_does_not_count(seats, locks):
    """A bare connection that is used again does not show that it is in another transaction."""
    if isinstance(seats, WAYS["psycopg"]):
        seats.idle = _Unused()
    if isinstance(seats, AiomysqlPool):
        return
    with pytest.raises(UsageError, match=LATE):
        async with contextlib.AsyncExitStack() as request:
            async with locks.lock("seats/42") as lease:
                async with seats.begin() as transaction:
                    await seats.admit(SqlGuard(), transaction, "seats/42", lease.token)
                transaction = await request.enter_async_context(seats.begin())
                assert await write(seats, transaction, lease.token)


class _Unused(list):
    """Idle connections, of which none is used again."""

    def __bool__(self):
        return False


async def test_a_transaction_that_is_rolled_back_by_the_body_leaves_its_own_error(seats, locks):
    with pytest.raises(LookupError):
        async with seats.begin() as transaction, locks.lock("seats/42") as lease:
            assert await write(seats, transaction, lease.token)
            raise LookupError
    assert await passenger(seats) is None


async def test_a_token_of_a_lease_elsewhere_is_taken_as_it_is(seats, locks):
    """As that of a request: its caller holds the lock until it has the answer."""
    async with seats.begin() as transaction, locks.lock("seats/42") as lease:
        assert await write(seats, transaction, Token(int(lease.token), lease.holder))
    assert await passenger(seats) == "Ada"


async def test_a_handle_that_is_released_before_the_commit_is_refused(seats, locks):
    with pytest.raises(UsageError, match=LATE):
        async with seats.begin() as transaction:
            lease = await locks.lock("seats/42").acquire()
            try:
                assert await write(seats, transaction, lease.token)
            finally:
                await lease.release()
    assert await locks.inspect("seats/42") is None
    assert await passenger(seats) is None


async def test_a_connection_of_psycopgs_pool_is_not_judged(locks, server):
    """Somebody else may use it when the lock is released."""
    await server.execute(f"{TABLE}; {ROW}")
    async with opened("psycopg", server.url) as way, way.begin() as connection:
        connection._pool = object()  # as psycopg_pool marks what it has handed out
        async with locks.lock("seats/42") as lease:
            assert await write(way, connection, lease.token)


# SQLite, in both worlds.


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "app.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(TABLE)
        connection.execute(ROW)
    return path


def who_in(path):
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT who FROM seats").fetchone()[0]


@contextlib.contextmanager
def bare(path):
    with closing(sqlite3.connect(path, timeout=30)) as connection, connection:
        yield connection


@contextlib.contextmanager
def engine(path, **options):
    engine = create_engine(f"sqlite:///{path}", **options)
    try:
        yield engine
    finally:
        engine.dispose()


@contextlib.contextmanager
def core(path):
    with engine(path) as made, made.begin() as connection:
        yield connection


@contextlib.contextmanager
def session(path):
    with engine(path) as made, Session(made) as session, session.begin():
        yield session


@contextlib.contextmanager
def scoped(path):
    with engine(path) as made:
        sessions = scoped_session(sessionmaker(made))
        with sessions() as session, session.begin():
            yield sessions


def write_in_sqlite(transaction, token, who="Ada"):
    statement = book(who, token)
    done = transaction.execute(statement if isinstance(transaction, sqlite3.Connection) else text(statement))
    return SEATS.written_sync(transaction, 42, token, done.fetchall())


@pytest.mark.parametrize("begin", [bare, core, session, scoped])
@pytest.mark.parametrize("world", ["tasks", "threads"])
def test_transactions_of_sqlite_are_refused_and_admitted_alike(world, begin, path):
    async def scenario(locks):
        with pytest.raises(UsageError, match=LATE):
            with begin(path) as transaction:
                async with locks.lock("seats/42") as lease:
                    assert write_in_sqlite(transaction, lease.token)
        with pytest.raises(UsageError, match=LATE):
            with begin(path) as transaction:
                lease = await locks.lock("seats/42").acquire()
                try:
                    assert write_in_sqlite(transaction, lease.token)
                finally:
                    await lease.release()
        with pytest.raises(UsageError, match=LATE):
            with begin(path) as transaction:
                async with locks.multilock("seats/42", "seats/43") as held:
                    assert write_in_sqlite(transaction, held.tokens["seats/42"])
        assert who_in(path) is None
        async with locks.lock("seats/42") as lease:
            with begin(path) as transaction:
                assert write_in_sqlite(transaction, lease.token)
        with begin(path) as transaction:
            async with locks.lock("seats/42") as lease:
                SqlGuard().admit_sync(transaction, "seats/42", lease.token)
                assert write_in_sqlite(transaction, lease.token, "Bob")
        assert who_in(path) == "Bob"

    in_both_worlds(scenario)(world)


@pytest.mark.parametrize("world", ["tasks", "threads"])
def test_a_session_that_joins_the_transaction_of_a_test_is_not_refused(world, path):
    """Its own transaction ends inside, as it will where no test is around it."""

    async def scenario(locks):
        with engine(path) as made, made.connect() as connection, connection.begin() as outer:
            async with locks.lock("seats/42") as lease:
                with Session(connection, join_transaction_mode="create_savepoint") as joined, joined.begin():
                    assert write_in_sqlite(joined, lease.token)
            outer.rollback()

    in_both_worlds(scenario)(world)


@pytest.mark.parametrize("world", ["tasks", "threads"])
def test_statements_that_sqlite_commits_at_once_are_not_late(world, path):
    async def scenario(locks):
        alone = sqlite3.connect(path, isolation_level=None)
        with engine(path, isolation_level="AUTOCOMMIT") as made, made.connect() as connection, closing(alone):
            for transaction in (connection, alone):
                async with locks.lock("seats/42") as lease:
                    assert write_in_sqlite(transaction, lease.token)

    in_both_worlds(scenario)(world)


# The race itself.


@pytest.mark.parametrize("admits", [False, True], ids=["the column alone", "admitted first"])
async def test_two_passengers_do_not_get_one_seat_of_postgresql(admits, locks, server):
    """The first one's commit comes after the second one has got the lock."""
    await server.execute(f"{TABLE}; {ROW}")
    guard, answers = SqlGuard(), {}

    async def request(who, then):
        connection = await asyncpg.connect(server.url)
        try:
            async with connection.transaction():
                async with locks.lock("seats/42") as lease:
                    if admits:
                        await guard.admit(connection, "seats/42", lease.token)
                    free = await connection.fetchval("SELECT who FROM seats WHERE seat = 42") is None
                    if free:
                        done = await connection.fetch(book(who, lease.token))
                        assert await SEATS.written(connection, 42, lease.token, done)
                await then()
            answers[who] = "booked" if free else "taken"
        except UsageError:
            answers[who] = "refused"
        finally:
            await connection.close()

    second = []

    async def let_the_second_in():
        second.append(asyncio.create_task(request("Bob", lambda: asyncio.sleep(0))))
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        while not await server.value(query):  # noqa: ASYNC110  (the server tells no event)
            await asyncio.sleep(0.01)

    await request("Ada", let_the_second_in)
    await asyncio.gather(*(second or [request("Bob", lambda: asyncio.sleep(0))]))
    assert answers == ({"Ada": "booked", "Bob": "taken"} if admits else {"Ada": "refused", "Bob": "refused"})
    assert await server.value("SELECT who FROM seats") == ("Ada" if admits else None)


def test_two_passengers_do_not_get_one_seat_of_sqlite(path):
    """The second one reads while the first one has not committed, and its write waits until it has."""
    answers, has_read = {}, threading.Event()

    def first():
        with bare(path) as database:
            with locks.lock("seats/42") as lease:
                assert database.execute("SELECT who FROM seats").fetchone() == (None,)
                assert write_in_sqlite(database, lease.token)
            bob.start()
            has_read.wait(60)
        answers["Ada"] = "booked"

    def second():
        with locks.lock("seats/42") as lease, closing(sqlite3.connect(path, timeout=30)) as database:
            free = database.execute("SELECT who FROM seats").fetchone() == (None,)
            has_read.set()
            if free:
                with database:
                    assert write_in_sqlite(database, lease.token, "Bob")
        answers["Bob"] = "booked" if free else "taken"

    with fencing_sdk.sync.connect(MemoryBackend(tokens="counter")) as locks:
        bob = threading.Thread(target=second)
        with contextlib.suppress(UsageError):
            first()
        if not bob.ident:
            bob.start()
        bob.join(60)
    assert answers == {"Bob": "booked"}
    assert who_in(path) == "Bob"


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


def test_without_a_database_it_says_what_it_needs(tmp_path):
    done = run(EXAMPLE, tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("name a database: ")
