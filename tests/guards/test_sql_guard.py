"""SqlGuard: in the caller's own transaction, through sqlite3 and SQLAlchemy."""

import asyncio
import sqlite3
import subprocess
import sys
from contextlib import asynccontextmanager, closing, contextmanager
from types import SimpleNamespace

import aiosqlite
import anyio
import pytest
from guard_rival import DATA, GET, PUT
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from fencing_sdk import BackendRefusedError, ConfigurationError, StaleTokenError, Token, UsageError
from fencing_sdk.errors import UnsupportedError
from fencing_sdk.guards.sql import SqlGuard
from fencing_sdk.testing.suites import GuardSuite

OLD, NEW = Token(33, "aaaaaaaa"), Token(34, "bbbbbbbb")
PUT_TEXT = text("INSERT OR REPLACE INTO data VALUES (:resource, :value)")


@pytest.fixture
def path(tmp_path):
    """A database with a table that the guard knows nothing of."""
    path = tmp_path / "app.db"
    with connected(path) as connection:
        connection.execute("PRAGMA journal_mode = wal")
        connection.execute(DATA)
    return path


@contextmanager
def connected(path, **options):
    with closing(sqlite3.connect(path, **({"timeout": 30} | options))) as connection:
        yield connection


def stored(path, resource="a"):
    with connected(path) as connection:
        row = connection.execute(GET, (resource,)).fetchone()
    return None if row is None else row[0]


def fence(path, resource="a"):
    """The fence as it is in the table, or None when there is no row, or no table."""
    with connected(path) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'fencing_fence'").fetchall():
            return None
        row = connection.execute("SELECT token FROM fencing_fence WHERE resource = ?", (resource,)).fetchone()
    return None if row is None else row[0]


# The contract, through every kind of transaction.


class SqlSuite(GuardSuite):
    several = True

    @pytest.fixture(autouse=True)
    def at(self, path):
        self.path = path

    async def read(self, guard, resource):
        return stored(self.path, resource)


class StdlibSuite(SqlSuite):
    @pytest.fixture
    def guard(self):
        return SqlGuard(self.path)

    @asynccontextmanager
    async def reopen(self, guard):
        yield SqlGuard(f"sqlite:///{self.path}")


class TestSqlite3InAWorkerThread(StdlibSuite):
    async def write(self, guard, resource, token, value):
        await asyncio.to_thread(self.write_sync, guard, resource, token, value)

    def write_sync(self, guard, resource, token, value):
        with connected(self.path) as connection, connection:
            guard.admit_sync(connection, resource, token)
            connection.execute(PUT, (resource, value))

    async def write_all(self, guard, tokens, values):
        await asyncio.to_thread(self.write_all_sync, guard, tokens, values)

    def write_all_sync(self, guard, tokens, values):
        with connected(self.path) as connection, connection:
            guard.admit_all_sync(connection, tokens)
            connection.executemany(PUT, values.items())


class TestAiosqlite(StdlibSuite):
    async def write(self, guard, resource, token, value):
        async with aiosqlite.connect(self.path, timeout=30) as connection:
            connection.row_factory = aiosqlite.Row
            await guard.admit(connection, resource, token)
            await connection.execute(PUT, (resource, value))
            await connection.commit()

    async def write_all(self, guard, tokens, values):
        async with aiosqlite.connect(self.path, timeout=30) as connection:
            await guard.admit_all(connection, tokens)
            await connection.executemany(PUT, values.items())
            await connection.commit()


async def test_a_connection_of_aiosqlite_in_autocommit_is_refused_and_has_to_be_awaited(path):
    async with aiosqlite.connect(path, isolation_level=None) as connection:
        with pytest.raises(UsageError, match="BEGIN IMMEDIATE"):
            await SqlGuard().admit(connection, "a", NEW)
        await connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(UsageError, match=r"await guard\.admit"):
            SqlGuard().admit_sync(connection, "a", NEW)
        await SqlGuard().admit(connection, "a", NEW)
        await connection.commit()
    assert fence(path) == 34


@pytest.mark.parametrize("made", ["rows", "texts"])
def test_a_connection_may_make_rows_and_texts_of_its_own(made, path):
    guard = SqlGuard(path)
    with connected(path) as connection:
        if made == "rows":
            connection.row_factory = lambda _, row: dict(enumerate(row, start=1))
        else:
            connection.text_factory = bytes
        for token in (2, 3):
            with connection:
                guard.admit_all_sync(connection, {"a": token, "b": token})
        with pytest.raises(StaleTokenError, match="'a'"):
            guard.admit_sync(connection, "a", 2)
    assert fence(path, "a") == 3


class AlchemySuite(SqlSuite):
    @asynccontextmanager
    async def engine(self):
        engine = create_async_engine(f"sqlite+aiosqlite:///{self.path}", connect_args={"timeout": 30})
        yield engine
        await engine.dispose()

    @pytest.fixture
    async def guard(self):
        async with self.engine() as engine:
            guard = SqlGuard(engine)
            guard.engine = engine  # what the adapters write through
            yield guard

    @asynccontextmanager
    async def reopen(self, guard):
        async with self.engine() as engine:
            other = SqlGuard(engine)
            other.engine = engine
            yield other


class TestAsyncSession(AlchemySuite):
    async def write(self, guard, resource, token, value):
        async with AsyncSession(guard.engine) as session, session.begin():
            await guard.admit(session, resource, token)
            await session.execute(PUT_TEXT, {"resource": resource, "value": value})

    async def write_all(self, guard, tokens, values):
        async with AsyncSession(guard.engine) as session, session.begin():
            await guard.admit_all(session, tokens)
            await session.execute(PUT_TEXT, [{"resource": name, "value": value} for name, value in values.items()])


@pytest.mark.parametrize("kind", [Session, Connection])
def test_sync_sessions_and_connections_of_sqlalchemy_are_guarded_too(path, kind):
    engine, guard = create_engine(f"sqlite:///{path}"), SqlGuard()
    with kind(engine) as transaction:
        guard.admit_sync(transaction, "a", NEW)
        transaction.execute(PUT_TEXT, {"resource": "a", "value": "new"})
        assert (fence(path), stored(path)) == (None, None)
        transaction.commit()
        assert (fence(path), stored(path)) == (34, "new")
        with pytest.raises(StaleTokenError):
            guard.admit_sync(transaction, "a", OLD)
        transaction.rollback()
    engine.dispose()


@pytest.mark.parametrize(
    ("number", "holder"),
    [
        *[(number, None) for number in (-1, 2**53, 34.5, "x", b"34")],
        *[(34, holder) for holder in ("", "AA", "a" * 65, b"aa")],
    ],
)
async def test_a_row_that_another_program_wrote_is_refused_by_the_grammar_of_all_fences(path, number, holder):
    guard = SqlGuard(path)
    await guard.raise_to("a", NEW)
    with connected(path) as connection:
        connection.execute("UPDATE fencing_fence SET token = ?, holder = ?", (number, holder))
        connection.commit()
    with pytest.raises(BackendRefusedError, match="'a' is not a fence"):
        await guard.highest("a")


# The fence is part of the caller's transaction.


def test_rolling_back_takes_the_fence_back(path):
    guard = SqlGuard()
    with connected(path) as connection:
        guard.admit_sync(connection, "a", NEW)
        connection.execute(PUT, ("a", "never committed"))
        connection.rollback()
        assert (fence(path), stored(path)) == (None, None)
        guard.admit_sync(connection, "a", OLD)
        connection.commit()
    assert fence(path) == 33


def test_the_guard_commits_nothing(path):
    """Neither what was written before it, nor its own row, whether it admits or refuses."""
    guard = SqlGuard()
    with connected(path) as connection, connection:
        guard.admit_sync(connection, "a", NEW)
    for token in (35, OLD):
        with connected(path) as connection:
            connection.execute(PUT, ("a", "not committed"))
            try:
                guard.admit_sync(connection, "a", token)
            except StaleTokenError:
                assert token is OLD
            assert connection.in_transaction
            assert (fence(path), stored(path)) == (34, None)
            connection.rollback()
    assert (fence(path), stored(path)) == (34, None)


def test_no_other_writer_comes_between_the_check_and_the_commit(path):
    guard = SqlGuard()
    with connected(path) as holder, connected(path, timeout=0) as other:
        guard.admit_sync(holder, "a", OLD)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            guard.admit_sync(other, "a", NEW)
        holder.execute(PUT, ("a", "old"))
        holder.commit()
        guard.admit_sync(other, "a", NEW)
        other.commit()
        with pytest.raises(StaleTokenError):
            guard.admit_sync(holder, "a", OLD)


@pytest.mark.parametrize("journal", ["wal", "delete"])
def test_a_transaction_that_has_read_before_is_never_admitted_on_outdated_data(path, journal):
    """SQLite says "locked" at once; the next try, with the admit as first statement, is judged on the new fence."""
    guard = SqlGuard()
    with connected(path) as setup:
        setup.execute(f"PRAGMA journal_mode = {journal}")
        guard.admit_sync(setup, "a", OLD)
        setup.commit()
    options = {"isolation_level": None, "timeout": 0.1}
    with connected(path, **options) as late, connected(path, **options) as early:
        late.execute("BEGIN")
        late.execute(GET, ("a",)).fetchall()
        early.execute("BEGIN")
        guard.admit_sync(early, "a", NEW)
        if journal == "wal":
            early.execute("COMMIT")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            guard.admit_sync(late, "a", OLD)
        late.execute("ROLLBACK")
        if journal == "delete":
            early.execute("COMMIT")
        late.execute("BEGIN")
        with pytest.raises(StaleTokenError):
            guard.admit_sync(late, "a", OLD)
        late.execute("ROLLBACK")


# A transaction there must be.


def refuses_autocommit(guard, connection, path):
    with pytest.raises(UsageError, match="BEGIN IMMEDIATE"):
        guard.admit_sync(connection, "a", NEW)
    assert fence(path) is None


def test_a_connection_in_autocommit_is_refused(path):
    guard = SqlGuard()
    with connected(path, isolation_level=None) as connection:
        refuses_autocommit(guard, connection, path)
        connection.execute("BEGIN IMMEDIATE")
        guard.admit_sync(connection, "a", NEW)
        connection.execute("COMMIT")
    assert fence(path) == 34


if sys.version_info >= (3, 12):

    def test_the_autocommit_attribute_is_understood(path):
        guard = SqlGuard()
        with connected(path, autocommit=True) as connection:
            refuses_autocommit(guard, connection, path)
        with connected(path, autocommit=False) as connection:
            guard.admit_sync(connection, "a", NEW)
            connection.execute(PUT, ("a", "new"))
            connection.rollback()
            assert fence(path) is None
            guard.admit_sync(connection, "a", NEW)
            connection.commit()
        assert fence(path) == 34

    async def test_a_driver_that_hides_its_autocommit_attribute_is_found_out(path):
        engine = create_async_engine(f"sqlite+aiosqlite:///{path}", connect_args={"autocommit": True})
        async with engine.connect() as connection:
            with pytest.raises(UsageError, match="BEGIN IMMEDIATE"):
                await SqlGuard().admit(connection, "a", NEW)
        await engine.dispose()


async def test_an_engine_in_autocommit_is_refused(path):
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}", isolation_level="AUTOCOMMIT")
    async with AsyncSession(engine) as session:
        with pytest.raises(UsageError, match="BEGIN IMMEDIATE"):
            await SqlGuard().admit(session, "a", NEW)
    with pytest.raises(UsageError, match="BEGIN IMMEDIATE"):
        await SqlGuard(engine).raise_to("a", NEW)
    await engine.dispose()
    assert fence(path) is None


def test_a_driver_that_hides_that_it_commits_is_found_out(path):
    """By the transaction that is not open after the statement."""

    class Hidden:
        in_transaction = False
        isolation_level = ""
        cursor = None

    with connected(path, isolation_level=None) as connection:
        disguised = SimpleNamespace(
            dialect=SimpleNamespace(name="sqlite"),
            connection=SimpleNamespace(driver_connection=Hidden()),
            exec_driver_sql=lambda *words: SimpleNamespace(
                returns_rows=True, fetchall=connection.execute(*words).fetchall
            ),
        )
        with pytest.raises(UsageError, match="BEGIN IMMEDIATE"):
            SqlGuard().admit_sync(disguised, "a", NEW)


async def test_what_is_no_transaction_is_refused(path):
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
    with connected(path) as connection:
        for wrong in (None, str(path), connection.cursor(), engine, engine.sync_engine):
            with pytest.raises(UsageError, match="transaction must be"):
                await SqlGuard().admit(wrong, "a", NEW)
    async with AsyncSession(engine) as session:
        with pytest.raises(UsageError, match=r"await guard\.admit"):
            SqlGuard().admit_sync(session, "a", NEW)
    await engine.dispose()


def test_other_databases_are_refused_by_name():
    other = SimpleNamespace(dialect=SimpleNamespace(name="mssql"), exec_driver_sql=None)
    with pytest.raises(UnsupportedError, match="MySQL and MariaDB, not mssql"):
        SqlGuard().admit_sync(other, "a", NEW)


# The table.


def test_the_table_is_created_on_first_use_and_again_after_a_rollback(path):
    guard = SqlGuard()
    with connected(path, isolation_level=None) as connection:
        for _ in range(2):
            connection.execute("BEGIN")
            guard.admit_sync(connection, "a", NEW)
            connection.execute("ROLLBACK")
            assert fence(path) is None
        connection.execute("BEGIN")
        guard.admit_sync(connection, "a", NEW)
        connection.execute("COMMIT")
    assert fence(path) == 34


def test_who_migrates_by_hand_is_told_how(path):
    guard = SqlGuard(create=False)
    with connected(path) as connection:
        with pytest.raises(sqlite3.OperationalError, match="no such table") as missing:
            guard.admit_sync(connection, "a", NEW)
        assert "ddl()" in missing.value.__notes__[0]
        connection.execute(guard.ddl())
        guard.admit_sync(connection, "a", NEW)
        connection.commit()
    assert fence(path) == 34


def test_tables_are_independent_and_may_be_in_an_attached_database(path, tmp_path):
    with connected(path) as connection:
        connection.execute("ATTACH ? AS fences", (str(tmp_path / "fences.db"),))
        SqlGuard(table="fences.order").admit_sync(connection, "a", NEW)  # a reserved word, quoted
        SqlGuard(table="other").admit_sync(connection, "a", OLD)
        connection.commit()
        assert connection.execute('SELECT token FROM fences."order"').fetchall() == [(34,)]
        assert connection.execute("SELECT token FROM other").fetchall() == [(33,)]


@pytest.mark.parametrize("table", ["", "a b", 'a"b', "a;b", "1a", "a.b.c", ".a", "a.", "\N{LOCK}", "a" * 64, None, 7])
def test_a_table_name_that_would_need_escaping_is_refused(table):
    with pytest.raises(ConfigurationError, match="table"):
        SqlGuard(table=table)


# Transactions of its own.


async def test_without_a_database_a_fence_cannot_be_raised():
    for call in (SqlGuard().raise_to("a", NEW), SqlGuard().highest("a")):
        with pytest.raises(UnsupportedError, match="sqlite:///"):
            await call


async def test_paths_and_urls_lead_to_the_same_file(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    ways = (path, str(path), "app.db", "sqlite:///app.db", f"sqlite:///{path}", "sqlite:///%61pp.db")
    for token, connect in enumerate(ways):
        await SqlGuard(connect).raise_to("a", token)
        assert fence(path) == token


@pytest.mark.parametrize(
    "connect",
    [
        "",
        ":memory:",
        "sqlite://",
        "sqlite:///",
        "sqlite:///:memory:",
        "sqlite://host/app.db",
        "sqlite:///app.db?timeout=3",
        "a\0b",
        b"app.db",
        7,
    ],
)
def test_what_names_no_file_is_refused_without_showing_it(connect):
    with pytest.raises(ConfigurationError) as refusal:
        SqlGuard(connect)
    assert "secret" not in str(refusal.value)


def test_a_url_with_a_driver_is_answered_with_the_extra_to_install():
    with pytest.raises(ConfigurationError, match=r"fencing-sdk\[sqlalchemy\]"):
        SqlGuard("sqlite+aiosqlite:///app.db")


async def test_who_is_cancelled_does_not_wait_for_another_writer(path):
    guard = SqlGuard(path)
    await guard.raise_to("a", OLD)
    with connected(path) as connection:
        guard.admit_sync(connection, "a", OLD)
        with pytest.raises(TimeoutError):
            with anyio.fail_after(0.1):  # as the deadline of a lease does
                await guard.raise_to("a", NEW)
        connection.rollback()


def test_sqlalchemy_is_needed_by_those_alone_who_use_it(tmp_path):
    code = """
import asyncio, sqlite3, sys
from fencing_sdk.guards.sql import SqlGuard
guard = SqlGuard("app.db")
asyncio.run(guard.raise_to("a", 34))
guard.admit_sync(sqlite3.connect("app.db"), "a", 34)
assert not {"sqlalchemy", "aiosqlite", "greenlet"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
