"""A transaction that commits after the lock was given back: refused with a column, and waited for by a guard."""

import asyncio
import contextlib
import sqlite3
import threading
from contextlib import closing

import asyncpg
import pytest
from both_worlds import in_both_worlds
from postgresql_ways import WAYS, opened
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import fencing_sdk.sync
from fencing_sdk import LockClient, Token, UsageError
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.guards.sql import FenceColumn, SqlGuard

pytest_plugins = ["postgresql_fixtures", "guard_database"]

TABLE = "CREATE TABLE seats (seat bigint PRIMARY KEY, who text, fence bigint NOT NULL DEFAULT 0)"
ROW = "INSERT INTO seats (seat) VALUES (42)"
SEATS = FenceColumn("seats", key="seat")
LATE = r"durable=True"


def book(who, token):
    return f"UPDATE seats SET who = '{who}', fence = {token:d} WHERE seat = 42 AND fence <= {token:d} RETURNING seat"


@pytest.fixture
async def locks():
    async with LockClient(MemoryBackend(tokens="counter")) as locks:
        yield locks


@pytest.fixture(params=WAYS)
async def way(request, server):
    await server.execute(f"{TABLE}; {ROW}")
    async with opened(request.param, server.url) as way:
        yield way


async def write(way, transaction, token):
    rows = await way.execute(transaction, book("Ada", token))
    if way.blocking:
        return await asyncio.to_thread(SEATS.written_sync, transaction, 42, token, rows)
    return await SEATS.written(transaction, 42, token, rows)


# Who is refused.


async def test_a_transaction_around_the_lock_is_refused_and_writes_nothing(way, locks, server):
    with pytest.raises(UsageError, match=LATE):
        async with way.begin() as transaction, locks.lock("seats/42") as lease:
            assert await write(way, transaction, lease.token)
    assert await server.value("SELECT who FROM seats") is None


async def test_a_transaction_that_begins_inside_and_ends_outside_is_refused(way, locks, server):
    """As that of a session which a framework commits after the handler: it is not older than the lease."""
    with pytest.raises(UsageError, match=LATE):
        async with contextlib.AsyncExitStack() as request:
            async with locks.lock("seats/42") as lease:
                transaction = await request.enter_async_context(way.begin())
                assert await write(way, transaction, lease.token)
    assert await server.value("SELECT who FROM seats") is None


async def test_a_transaction_inside_of_the_lock_is_committed(way, locks, server):
    async with locks.lock("seats/42") as lease:
        async with way.begin() as transaction:
            assert await write(way, transaction, lease.token)
        async with way.begin() as transaction:
            assert await write(way, transaction, lease.token)
            assert await write(way, transaction, lease.token)
    assert await server.value("SELECT who FROM seats") == "Ada"


async def test_a_transaction_that_has_admitted_the_token_may_end_later(way, locks, server):
    guard = SqlGuard()
    async with way.begin() as transaction, locks.lock("seats/42") as lease:
        await way.admit(guard, transaction, "seats/42", lease.token)
        assert await write(way, transaction, lease.token)
    async with way.begin() as transaction, locks.lock("seats/42") as lease:
        await way.admit_all(guard, transaction, {"seats/42": lease.token})
        assert await write(way, transaction, lease.token)
    assert await server.value("SELECT who FROM seats") == "Ada"


async def test_an_admission_after_the_write_does_not_count(way, locks):
    guard = SqlGuard()
    with pytest.raises(UsageError, match=LATE):
        async with way.begin() as transaction, locks.lock("seats/42") as lease:
            assert await write(way, transaction, lease.token)
            await way.admit(guard, transaction, "seats/42", lease.token)


async def test_an_admission_in_an_earlier_transaction_does_not_count(way, locks):
    """A bare connection of psycopg that is used again does not show that it is in another transaction."""
    if isinstance(way, WAYS["psycopg"]):
        way.idle = _Unused()
    with pytest.raises(UsageError, match=LATE):
        async with contextlib.AsyncExitStack() as request:
            async with locks.lock("seats/42") as lease:
                async with way.begin() as transaction:
                    await way.admit(SqlGuard(), transaction, "seats/42", lease.token)
                transaction = await request.enter_async_context(way.begin())
                assert await write(way, transaction, lease.token)


class _Unused(list):
    """Idle connections, of which none is used again."""

    def __bool__(self):
        return False


async def test_a_transaction_that_is_rolled_back_by_the_body_leaves_its_own_error(way, locks, server):
    with pytest.raises(LookupError):
        async with way.begin() as transaction, locks.lock("seats/42") as lease:
            assert await write(way, transaction, lease.token)
            raise LookupError
    assert await server.value("SELECT who FROM seats") is None


async def test_a_token_of_a_lease_elsewhere_is_taken_as_it_is(way, locks, server):
    """As that of a request: its caller holds the lock until it has the answer."""
    async with way.begin() as transaction, locks.lock("seats/42") as lease:
        assert await write(way, transaction, Token(int(lease.token), lease.holder))
    assert await server.value("SELECT who FROM seats") == "Ada"


async def test_a_handle_that_is_given_back_before_the_commit_is_refused(way, locks, server):
    with pytest.raises(UsageError, match=LATE):
        async with way.begin() as transaction:
            lease = await locks.lock("seats/42").acquire()
            try:
                assert await write(way, transaction, lease.token)
            finally:
                await lease.release()
    assert await locks.inspect("seats/42") is None
    assert await server.value("SELECT who FROM seats") is None


async def test_a_connection_of_psycopgs_pool_is_not_judged(locks, server):
    """Somebody else may use it when the lock is given back."""
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
