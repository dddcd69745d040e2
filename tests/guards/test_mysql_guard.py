"""SqlGuard on MySQL and MariaDB: the contract, and what is true of these servers alone."""

import asyncio
import contextlib
import socket
from contextlib import asynccontextmanager

import asyncmy
import pymysql
import pytest
from local_ports import HOST
from mysql_replicas import Replicated
from mysql_stage import SEVERAL, in_transaction
from mysql_ways import WAYS, code_of, opened
from pymysql.constants import CLIENT
from sqlalchemy.ext.asyncio import AsyncSession
from stays import eventually
from through_a_way import ThroughAWay

from fencing_sdk import (
    BackendRefusedError,
    BackendUnavailableError,
    ConfigurationError,
    StaleTokenError,
    Token,
    UsageError,
    connect,
)
from fencing_sdk.errors import UnsupportedError
from fencing_sdk.guards.sql import FenceColumn, SqlGuard
from fencing_sdk.testing.suites import GuardSuite

pytest_plugins = ["postgresql_fixtures", "mysql_fixtures", "guard_database", "guard_stages"]

OLD, NEW = Token(33, "aaaaaaaa"), Token(34, "bbbbbbbb")


@pytest.fixture
def server(mysql_guard_server):
    return mysql_guard_server


async def fence(server, resource="a", table="fencing_fence"):
    return await server.value(f"SELECT token FROM {table} WHERE resource = %s", resource)


async def tables(server):
    return [name for (name,) in await server.fetch("SHOW TABLES")]


# The contract.


class MysqlSuite(ThroughAWay, GuardSuite):
    ways = WAYS

    async def write_all(self, guard, tokens, values):
        """Above READ COMMITTED new resources, which another step takes back, may make a deadlock: try again."""
        while True:
            try:
                return await super().write_all(guard, tokens, values)
            except Exception as error:
                if code_of(error) != 1213:
                    raise


class TestWithAUrlAndAsyncmy(MysqlSuite):
    way = "asyncmy"


class TestWithAUrlAndAPoolOfAiomysql(MysqlSuite):
    way = "aiomysql-pool"


class TestWithAnEngineAndSessions(MysqlSuite):
    way = "session"

    def make_guard(self, way):
        return SqlGuard(way.engine)


# Bytes, and what these servers make of texts.


async def test_names_that_the_collations_take_for_equal_are_several(server):
    names = ["a", "A", "a ", "ä", "a\u0308", "ß", "ss", "\N{LOCK}", "x" * 512, "\U0001d49c" * 127 + "    "]
    guard = SqlGuard(server.url)
    for token, name in enumerate(names):
        await guard.raise_to(name, token)
    assert [await guard.highest(name) for name in names] == [*range(len(names))]


@pytest.mark.parametrize(("number", "holder"), [(-1, None), (2**53, None), (34, b""), (34, b"AA"), (34, b"\xff")])
async def test_a_row_that_another_program_wrote_is_refused(number, holder, server):
    guard = SqlGuard(server.url)
    await guard.raise_to("a", NEW)
    server.ask("UPDATE fencing_fence SET token = %s, holder = %s", number, holder)
    with pytest.raises(BackendRefusedError, match="'a' is not a fence"):
        await guard.highest("a")


# A transaction there must be.


@asynccontextmanager
async def autocommitting(kind, server):
    """A connection in the mode in which each statement is committed by itself."""
    if kind in {"connection", "session-sync"}:
        async with opened("connection", server.url) as way:
            engine = way.make_engine(isolation_level="AUTOCOMMIT")
            async with AsyncSession(engine) as session:
                yield session
            await engine.dispose()
        return
    async with opened(kind, server.url) as way:
        connection = way.connect(autocommit=True)
        if not way.blocking:
            connection = await connection
        yield connection
        connection.close()
        await asyncio.sleep(0)


@pytest.mark.parametrize("kind", [kind for kind in WAYS if hasattr(WAYS[kind], "connect")] + ["connection"])
async def test_a_connection_that_commits_by_itself_is_refused(kind, server):
    """Before anything is sent: there is no fence afterwards."""
    server.ask(SqlGuard().ddl("mysql"))
    async with autocommitting(kind, server) as connection:
        with pytest.raises(UsageError, match="begin one first"):
            await SqlGuard().admit(connection, "a", NEW)
        with pytest.raises(UsageError, match="begin one first"):
            await SqlGuard().raise_in(connection, "a", NEW)
    assert server.ask("SELECT * FROM fencing_fence") == []


@pytest.mark.parametrize("guarded", [False, True])
async def test_a_statement_that_is_cancelled_under_way_is_committed_later_unless_a_guard_is_with_it(guarded, server):
    """The drivers close their socket, and the server goes on. Here the statement waits for a row meanwhile."""
    server.ask("CREATE TABLE seat (guest VARCHAR(9)) ENGINE=InnoDB")
    server.ask("INSERT INTO seat VALUES ('nobody')")
    server.ask(SqlGuard().ddl("mysql"))

    async def write(guest, token):
        async with server.connected(autocommit=not guarded) as connection, connection.cursor() as cursor:
            if guarded:
                await SqlGuard().admit(connection, "seat", token)
            await cursor.execute(f"UPDATE seat SET guest = '{guest}'")
            await connection.commit()

    async def ends():
        return not await server.fetch("SELECT 1 FROM information_schema.processlist WHERE info LIKE 'UPDATE seat%'")

    async with in_transaction(server, "SELECT * FROM seat FOR UPDATE") as other:
        writing = asyncio.create_task(write("old", OLD))
        await server.has_a_waiter()
        writing.cancel()
        await asyncio.wait([writing])
        assert writing.cancelled()
        await other.execute("UPDATE seat SET guest = 'other'")
        await other.execute("COMMIT")
    await eventually(ends, what="the statement of the cancelled task ends")
    if guarded:
        assert await server.value("SELECT guest FROM seat") == "other"
        await write("new", NEW)
    assert await server.value("SELECT guest FROM seat") == ("new" if guarded else "old")


async def test_a_transaction_that_has_ended_unseen_is_found_out(server):
    """As after a deadlock, whose error tells the driver nothing: the statement was committed by itself."""
    guard = SqlGuard(server.url)
    await guard.raise_to("a", 1)
    connection = pymysql.connect(host="127.0.0.1", port=server.port, user="app", database=server.database)
    connection.autocommit(True)
    connection.server_status |= 1
    with contextlib.closing(connection), pytest.raises(UsageError, match="begin one first"):
        await asyncio.to_thread(guard.admit_sync, connection, "a", NEW)


# The table.


async def test_the_first_use_creates_the_table_and_commits_nothing_of_the_caller(server):
    guard = SqlGuard(server.url)
    assert await guard.highest("a") is None
    assert await tables(server) == ["data"]
    async with server.connected() as connection:
        await connection.query("INSERT INTO data VALUES ('b', 'not committed')")
        await guard.admit(connection, "a", NEW)
        await connection.rollback()
    assert await server.fetch("SELECT * FROM data") == []
    assert await guard.highest("a") is None
    assert sorted(await tables(server)) == ["data", "fencing_fence"]


@pytest.mark.parametrize("own", [False, True])
async def test_without_the_table_the_error_tells_what_to_run(own, server):
    guard = SqlGuard(server.url, create=False) if own else SqlGuard()
    async with server.connected() as connection:
        with pytest.raises(asyncmy.errors.ProgrammingError) as refusal:
            await guard.admit(connection, "a", NEW)
    assert code_of(refusal.value) == 1146
    assert "ddl('mysql')" in refusal.value.__notes__[0]


async def test_who_may_not_create_the_table_is_told_how(server):
    server.ask("CREATE USER clerk@'127.0.0.1'")
    server.ask("GRANT SELECT, INSERT, UPDATE ON test_guards.* TO clerk@'127.0.0.1'")
    try:
        guard = SqlGuard(server.url_as("clerk"))
        with pytest.raises(asyncmy.errors.OperationalError) as denied:
            await guard.raise_to("a", NEW)
        assert "run the statement of ddl()" in denied.value.__notes__[0]
        server.ask(guard.ddl())
        await guard.raise_to("a", NEW)
        assert await guard.highest("a") == 34
    finally:
        server.ask("DROP USER clerk@'127.0.0.1'")


async def test_a_transaction_in_another_database_than_the_raised_fences_is_found_out(server):
    server.ask("CREATE DATABASE IF NOT EXISTS test_others")
    try:
        server.ask(f"CREATE TABLE test_others.{SqlGuard().ddl('mysql').partition('EXISTS ')[2]}")
        guard = SqlGuard(server.url)
        await guard.raise_to("a", NEW)
        async with server.connected(database="test_others") as connection:
            with pytest.raises(
                UsageError, match="in database 'test_others', and SqlGuard raises them in 'test_guards'"
            ):
                await guard.admit(connection, "a", 35)
            await connection.rollback()
            await SqlGuard().admit(connection, "a", 1)  # a guard without a database has none of its own
    finally:
        server.ask("DROP DATABASE test_others")


# Transactions of its own, and in those of a store.


async def test_an_engine_at_serializable_raises_a_fence_that_was_raised_meanwhile(server):
    """No caller would try again, as MariaDB with snapshots wants it."""
    mariadb = server.flavour == "mariadb"
    if mariadb:
        server.ask("SET GLOBAL innodb_snapshot_isolation = ON")
    try:
        async with opened("connection", server.url) as way, server.connected() as connection:
            engine = way.make_engine(isolation_level="SERIALIZABLE")
            guard = SqlGuard(engine)
            await guard.raise_to("a", 10)
            await guard.admit(connection, "a", 11)
            raising = asyncio.create_task(guard.raise_to("a", 12))
            await server.has_a_waiter()
            await connection.commit()
            await raising
            assert await guard.highest("a") == 12
            async with engine.connect() as pooled:  # the limit for silence of the guard's transaction has ended with it
                limits = await pooled.exec_driver_sql("SELECT @@SESSION.wait_timeout, @@GLOBAL.wait_timeout")
                assert len(set(limits.one())) == 1
            await engine.dispose()
    finally:
        if mariadb:
            server.ask("SET GLOBAL innodb_snapshot_isolation = DEFAULT")


async def test_a_session_that_reads_before_it_takes_the_lock_is_outdated_at_each_try(server):
    """MariaDB has the setting on since 11.6; MySQL has none."""
    if server.flavour != "mariadb":
        return
    guard = SqlGuard(server.url)
    async with server.connected() as connection, connection.cursor() as cursor, connect(server.url) as locks:
        await guard.raise_to("a", 1)
        await cursor.execute("SET SESSION innodb_snapshot_isolation = ON")
        for _ in range(2):
            await cursor.execute("SELECT * FROM fencing_fence")
            async with locks.lock("a", fences=[guard]) as lease:
                with pytest.raises(asyncmy.errors.MySQLError, match="1020") as refused:
                    await guard.admit(connection, "a", lease.token)
            assert "end the transaction before you take the lock" in refused.value.__notes__[0]
            await connection.rollback()
        async with locks.lock("a", fences=[guard]) as lease:
            await guard.admit(connection, "a", lease.token)
            await connection.commit()


async def test_a_fence_is_raised_in_a_given_transaction_and_the_session_waits_as_before(server):
    guard = SqlGuard(server.url)
    await guard.raise_to("a", OLD)
    wait = "SELECT @@innodb_lock_wait_timeout"
    async with server.connected(autocommit=True) as connection, connection.cursor() as cursor:
        await cursor.execute("SET innodb_lock_wait_timeout = 4")
        await connection.begin()
        await guard.raise_in(connection, "a", NEW, wait=1.0)
        assert await fence(server) == 33
        await connection.commit()
        assert await fence(server) == 34
        await connection.begin()
        with pytest.raises(StaleTokenError):
            await guard.raise_in(connection, "a", OLD, wait=1.0)
        await connection.rollback()
        await cursor.execute(wait)
        assert await cursor.fetchall() == ((4,),), "the session waits as before"


async def test_waiting_in_a_given_transaction_sets_the_session_back(server):
    guard = SqlGuard(server.url)
    await guard.raise_to("a", OLD)
    async with server.connected() as holder, server.connected() as connection, connection.cursor() as cursor:
        await guard.admit(holder, "a", OLD)
        await connection.query("INSERT INTO data VALUES ('b', 'before')")
        with pytest.raises(asyncmy.errors.OperationalError) as refusal:
            await guard.raise_in(connection, "a", NEW, wait=0.05)
        assert code_of(refusal.value) == 1205
        await cursor.execute("SELECT @@innodb_lock_wait_timeout, (SELECT COUNT(*) FROM data)")
        assert await cursor.fetchall() == ((50, 1),), "the server has rolled the statement back, and nothing else"


@pytest.mark.parametrize("url", ["mysql://me:secret@host", "mysql://me:secret@host/app?nonsense=1", "mysql://@:x/a"])
def test_a_url_that_cannot_be_read_is_refused_without_showing_it(url):
    with pytest.raises(ConfigurationError) as refusal:
        SqlGuard(url)
    assert "secret" not in str(refusal.value)


async def test_the_second_host_is_asked_when_the_first_is_not_there(server, unused_tcp_port):
    address = f"127.0.0.1:{server.port}"
    guard = SqlGuard(server.url.replace(address, f"127.0.0.1:{unused_tcp_port},{address}"))
    await guard.raise_to("a", NEW)
    assert await fence(server) == 34


async def test_no_fence_is_raised_on_one_of_several_servers_that_take_writes(mysql_flavour, start_mysql):
    """The guard's connection may lead to another node than those of the writers."""
    settings, said = SEVERAL[mysql_flavour]
    server = await asyncio.to_thread(start_mysql, **settings)
    server.ask(SqlGuard().ddl("mysql"))
    guard = SqlGuard(server.url)
    with pytest.raises(UnsupportedError, match=f"raises no fence that other nodes may miss: {said}"):
        await guard.raise_to("a", NEW)
    assert await fence(server) is None


# Races.


async def test_steps_over_other_resources_do_not_wait(server):
    """In a small table a server may look up a list of keys by reading, and locking, all of it."""
    guard = SqlGuard(server.url)
    await guard.raise_to("a", 0)
    async with server.connected() as one, server.connected() as other:
        await guard.admit_all(one, {"a": 1, "c": 1, "e": 1})
        await other.query("SET innodb_lock_wait_timeout = 1")
        await guard.admit_all(other, {"b": 1, "d": 1, "f": 1})
        await other.commit()
        await one.commit()


# FenceColumn.


TABLE = "CREATE TABLE seats (seat bigint PRIMARY KEY, who varchar(40), fence {kind} NOT NULL DEFAULT 0) ENGINE=InnoDB"
BOOK = "UPDATE seats SET who = %s, fence = %s WHERE seat = %s AND fence <= %s"
SEATS = FenceColumn("seats", key="seat")


@pytest.fixture
async def seats(server):
    await server.execute(TABLE.format(kind="bigint") + "; INSERT INTO seats (seat) VALUES (42)")
    return server


async def book(server, token, who, *, also="", flags=CLIENT.FOUND_ROWS, seat=42):
    async with server.connected(client_flag=flags) as connection, connection.cursor() as cursor:
        await cursor.execute(BOOK + also, (who, token, seat, token))
        written = await SEATS.written(connection, seat, token, cursor)
        await connection.commit()
    return written


async def test_a_stale_write_is_told_from_a_row_that_is_not_there(seats):
    assert await book(seats, 33, "Ada") is True
    assert await book(seats, 34, "Bob") is True
    assert await book(seats, 34, "Bob") is True, "the row is found, and nothing in it changes"
    with pytest.raises(StaleTokenError) as refusal:
        await book(seats, 33, "Ada")
    assert (refusal.value.resource, refusal.value.token, refusal.value.fence) == ("seats/42", 33, 34)
    assert await book(seats, 35, "Eve", seat=43) is False
    assert await book(seats, 34, "Eve", also=" AND who IS NULL") is False


async def test_a_connection_that_counts_changes_alone_is_asked_for_the_other_count(seats):
    """A row that is written already, and one that another condition excludes, have the same count."""
    assert await book(seats, 34, "Bob", flags=0) is True
    for also in ("", " AND who IS NULL"):
        with pytest.raises(UsageError, match=r"CLIENT\.FOUND_ROWS"):
            await book(seats, 34, "Bob", also=also, flags=0)
    with pytest.raises(StaleTokenError):
        await book(seats, 33, "Ada", flags=0)


async def test_a_snapshot_does_not_hide_the_fence_that_has_refused_a_write(seats):
    async with seats.connected(client_flag=CLIENT.FOUND_ROWS) as connection, connection.cursor() as cursor:
        await cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        if seats.flavour == "mariadb":  # it would refuse the write itself, with 1020
            await cursor.execute("SET SESSION innodb_snapshot_isolation = OFF")
        await cursor.execute("SELECT * FROM seats")
        assert await book(seats, 34, "Bob") is True
        await cursor.execute(BOOK, ("Ada", 33, 42, 33))
        with pytest.raises(StaleTokenError):
            await SEATS.written(connection, 42, 33, cursor)


@pytest.mark.parametrize("kind", ["int", "smallint", "int unsigned", "float"])
async def test_a_fence_column_that_is_too_narrow_is_refused_by_name(kind, server):
    await server.execute(TABLE.format(kind=kind))
    async with server.connected() as connection:
        with pytest.raises(UsageError) as refusal:
            await FenceColumn("seats", key="seat").written(connection, 42, 34, 0)
    assert f"column fence of table seats is {kind.partition(' ')[0].upper()}" in str(refusal.value)
    server.ask(str(refusal.value).partition("run: ")[2])
    async with server.connected() as connection:
        await FenceColumn("seats", key="seat").written(connection, 42, 34, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("server")
async def test_a_guard_with_several_hosts_uses_the_one_that_takes_writes():
    """Neither a replica that answers first, which lacks the fence, nor a host that never answers."""
    async with Replicated("mariadb") as group:
        await group.synced()
        group.cut_replication()
        login, database = group.url.partition("@")[0], group.url.rpartition("/")[2]
        with socket.create_server((HOST, 0)) as silent:
            hosts = [silent.getsockname()[1], group.replica.port, group.primary.port]
            guard = SqlGuard(f"{login}@{','.join(f'{HOST}:{port}' for port in hosts)}/{database}")
            await guard.raise_to("a", NEW)
            assert await guard.highest("a") == NEW
        readers = SqlGuard(f"{login}@{HOST}:{group.replica.port},{HOST}:{group.replica.port}/{database}")
        with pytest.raises(BackendUnavailableError, match="takes no writes"):
            await readers.highest("a")
