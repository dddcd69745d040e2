"""Leased rows on MySQL and MariaDB: their types, their locks, and each driver's transactions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import mysql_ways
import pymysql
import pytest
from asyncmy.errors import OperationalError
from mysql_server import MysqlServer
from row_benches import MysqlRowBench, add_jobs, client_of, refusal, with_jobs

from fencing_sdk import BackendUnavailableError, LockHeldError, StaleTokenError, UsageError, connect
from fencing_sdk.rows import schema_sql

_RECORD_CHANGED = 1020
pytest_plugins = ["mysql_fixtures"]
pytestmark = pytest.mark.server

ID = UUID("c0ffee00-0000-4000-8000-00000000cafe")


@pytest.fixture
def bench(mysql_server: MysqlServer) -> MysqlRowBench:
    made = with_jobs(MysqlRowBench(mysql_server), "mysql")
    assert isinstance(made, MysqlRowBench)
    return made


@pytest.fixture
def gate(bench: MysqlRowBench) -> Iterator[Callable[[], object]]:
    """Keep every claim whose ``on_claim`` is `WAITING` between its look and its end, until this is called."""
    keeper = pymysql.connect(unix_socket=bench.server.socket, user="root")
    keeper.cursor().execute("SELECT GET_LOCK('gate', 0)")
    yield lambda: keeper.open and keeper.close()
    if keeper.open:
        keeper.close()


WAITING = "attempts = attempts + 0 * GET_LOCK('gate', 60)"


class TestTables:
    @pytest.mark.parametrize("kind", ["DATETIME", "TIMESTAMP(6)"])
    async def test_a_moment_without_fractions_or_before_1970_is_refused(self, bench: MysqlRowBench, kind: str) -> None:
        bench.ask(f"ALTER TABLE jobs MODIFY leased_until {kind} NOT NULL DEFAULT '2000-01-01'")
        assert "column leased_until of table jobs must be of type datetime(6)" in await refusal(bench)

    async def test_a_token_may_be_unsigned(self, bench: MysqlRowBench) -> None:
        bench.ask("ALTER TABLE jobs MODIFY lease_token BIGINT UNSIGNED NOT NULL DEFAULT 0")
        add_jobs(bench, 1)
        async with client_of(bench) as db, db.rows("jobs").take(wait=0) as lease:
            await lease.renew()

    async def test_an_engine_without_transactions_is_refused(self, bench: MysqlRowBench) -> None:
        bench.ask("ALTER TABLE jobs ENGINE=MyISAM")
        assert "has the engine MyISAM" in await refusal(bench)

    async def test_a_part_of_a_column_is_no_key(self, bench: MysqlRowBench) -> None:
        bench.ask("ALTER TABLE jobs ADD UNIQUE INDEX (state(3))")
        assert "column state of table jobs is no key" in await refusal(bench, key="state")

    async def test_a_table_of_another_database_is_used(self, bench: MysqlRowBench) -> None:
        add_jobs(bench, 1)
        name = f"{bench.server.database}.jobs"
        async with client_of(bench) as db, db.rows(name, where="jobs.state = 'queued'").take(wait=0) as lease:
            assert lease.name == f"{name}/1"
            async with bench.transaction() as transaction:
                await lease.finish(transaction, state="done")

    async def test_a_trigger_of_each_renewal_is_warned_of(
        self, bench: MysqlRowBench, caplog: pytest.LogCaptureFixture
    ) -> None:
        bench.ask("CREATE TRIGGER audit BEFORE UPDATE ON jobs FOR EACH ROW SET NEW.result = 'touched'")
        with caplog.at_level(logging.WARNING):
            async with client_of(bench) as db:
                with pytest.raises(LockHeldError):
                    await db.rows("jobs").take(wait=0).acquire()
        assert "trigger 'audit' of table jobs runs at each renewal" in caplog.text

    async def test_a_renewal_is_no_change_of_the_row(self, bench: MysqlRowBench) -> None:
        """A column that the server sets at each UPDATE stays as it was."""
        bench.ask("ALTER TABLE jobs ADD at TIMESTAMP(6) DEFAULT CURRENT_TIMESTAMP(6) ON UPDATE CURRENT_TIMESTAMP(6)")
        add_jobs(bench, 1)
        async with client_of(bench) as db:
            async with db.rows("jobs").take() as lease:
                before = bench.ask("SELECT at, leased_until FROM jobs")[0]
                await lease.renew()
                after = bench.ask("SELECT at, leased_until FROM jobs")[0]
                assert (before[0], before[1] < after[1]) == (after[0], True)
            assert bench.ask("SELECT at, leased_until FROM jobs") == [(before[0], datetime(1970, 1, 1))]  # noqa: DTZ001

    async def test_a_text_is_not_the_key_0(self, bench: MysqlRowBench) -> None:
        add_jobs(bench, 1)
        bench.ask("UPDATE jobs SET id = 0")
        async with client_of(bench) as db, connect(f"rows+{bench.url}?table=jobs") as locks:
            async with db.rows("jobs", ttl=3600).take() as lease:
                assert await locks.holders("jobs/zero") == []
                assert not await locks.revoke("jobs/zero", token=lease.token, reason="a slip")
                assert await locks.holders("jobs/0")


class TestSqlOfTheApplication:
    @pytest.mark.parametrize(
        ("kind", "value"),
        [
            ("VARCHAR(40) CHARACTER SET utf8mb4", "it's \\' %s :x ü 🦊"),
            ("VARCHAR(40) CHARACTER SET ascii COLLATE ascii_bin", ""),
            ("INT", -5),
            ("BIGINT UNSIGNED", 2**63),
            ("BOOL", True),
            ("DOUBLE", 0.1),
            ("DOUBLE", -1e300),
            ("DECIMAL(10, 2)", Decimal("0.10")),
            ("VARBINARY(16)", ID.bytes),
            ("CHAR(36) CHARACTER SET latin1", ID),
            ("DATETIME(6)", datetime(2026, 2, 3, 4, 5, 6, 7)),  # noqa: DTZ001  (as columns have it)
            ("DATE", date(2026, 2, 3)),
        ],
    )
    async def test_a_value_is_found_as_it_was_written(self, bench: MysqlRowBench, kind: str, value: object) -> None:
        bench.ask(f"ALTER TABLE jobs ADD mark {kind}, ADD copy {kind}")
        bench.ask("INSERT INTO jobs (id, mark) VALUES (1, NULL), (2, %s)", str(value) if value is ID else value)
        async with client_of(bench) as db:
            jobs = db.rows("jobs", where="mark = :value", on_claim="copy = :value", values={"value": value})
            async with jobs.take(wait=0) as lease:
                assert (lease.row["id"], lease.row["copy"]) == (2, lease.row["mark"])

    async def test_a_moment_is_compared_in_utc(self, bench: MysqlRowBench) -> None:
        bench.ask("ALTER TABLE jobs ADD at DATETIME")
        bench.ask("INSERT INTO jobs (id, at) VALUES (1, '2026-02-03 10:00:00')")
        at = datetime(2026, 2, 3, 12, tzinfo=timezone(timedelta(hours=2)))
        async with client_of(bench) as db, db.rows("jobs", where="at = :at", values={"at": at}).take(wait=0) as lease:
            assert lease.row["id"] == 1

    async def test_nothing_is_a_value(self, bench: MysqlRowBench) -> None:
        add_jobs(bench, 1)
        async with client_of(bench) as db, db.rows("jobs", where="result <=> :no", values={"no": None}).take(wait=0):
            pass

    @pytest.mark.parametrize("value", [object(), float("nan"), [1], "\ud800"])
    async def test_what_sql_has_no_value_for_is_refused(self, bench: MysqlRowBench, value: object) -> None:
        said = await refusal(bench, where="id = :value", values={"value": value})
        assert "a value of values= cannot be written in SQL" in said

    @pytest.mark.parametrize(
        ("on_claim", "problem"),
        [
            ("attempts = nope(1)", "nope"),
            ("state = NULL", "cannot be null"),
            ("state = repeat('x', 50)", "too long"),
            ("priority = 'high'", "Incorrect integer value"),
            ("attempts = attempts +", "syntax"),
            ("unique_mark = 7", "Duplicate entry"),
        ],
    )
    async def test_a_mistake_has_the_servers_words(self, bench: MysqlRowBench, on_claim: str, problem: str) -> None:
        bench.ask("ALTER TABLE jobs ADD unique_mark INT UNIQUE")
        bench.ask("INSERT INTO jobs (id, unique_mark) VALUES (1, 1), (2, 7)")
        assert problem in await refusal(bench, on_claim=on_claim)
        assert bench.ask("SELECT id FROM jobs WHERE lease_token > 0") == []

    async def test_a_right_that_is_lacking_has_the_servers_words(self, bench: MysqlRowBench) -> None:
        add_jobs(bench, 1)
        bench.ask("CREATE USER reader@127.0.0.1")
        bench.ask(f"GRANT SELECT ON {bench.server.database}.* TO reader@127.0.0.1")
        bench.url = bench.server.url_as("reader")
        assert "denied to user" in await refusal(bench)

    async def test_a_comment_ends_with_its_line(self, bench: MysqlRowBench) -> None:
        add_jobs(bench, 1)
        async with client_of(bench) as db:
            jobs = db.rows("jobs", where="true # all", order="id # first", on_claim="attempts = 1 # once")
            async with jobs.take(wait=0), client_of(bench) as other:
                with pytest.raises(LockHeldError):
                    await other.rows("jobs").take(wait=0).acquire()

    async def test_an_assignment_sees_the_lease_as_it_was(self, bench: MysqlRowBench) -> None:
        bench.ask("INSERT INTO jobs (id, lease_token) VALUES (1, 7)")
        async with client_of(bench) as db, db.rows("jobs", on_claim="result = lease_token").take(wait=0) as lease:
            assert lease.row["result"] == "7"


class TestLocks:
    async def test_a_claim_holds_up_neither_renewals_nor_other_claims(
        self, bench: MysqlRowBench, gate: Callable[[], object]
    ) -> None:
        """Although it has read all rows that are in flight, and looked at all that are free."""
        bench.ask("ALTER TABLE jobs ADD INDEX (state, priority, id)")
        add_jobs(bench, 30)
        options: dict[str, Any] = {"where": "state = 'queued'", "order": "priority, id"}
        async with client_of(bench) as db, client_of(bench) as other:
            ahead = await db.rows("jobs", **options).batch(10).take().acquire()
            waiting = asyncio.create_task(db.rows("jobs", on_claim=WAITING, **options).take().acquire())
            await bench.server.has_a_waiter_for("gate")
            before = bench.ask("SELECT min(leased_until) FROM jobs WHERE id <= 10")
            await ahead.renew()
            assert bench.ask("SELECT min(leased_until) FROM jobs WHERE id <= 10") > before
            behind = await other.rows("jobs", **options).take(wait=0).acquire()
            assert (behind.row["id"], waiting.done()) == (12, False)
            gate()
            assert (await waiting).row["id"] == 11
            for lease in (ahead, behind, await waiting):
                await lease.release()

    async def test_a_row_that_was_claimed_after_the_look_is_passed_over(
        self, bench: MysqlRowBench, gate: Callable[[], object]
    ) -> None:
        """The look reads a snapshot, and the lock the row as it is by then."""
        add_jobs(bench, 2)
        async with client_of(bench) as db, client_of(bench) as other:
            late = other.rows("jobs", where="GET_LOCK('gate', 60) = 1")
            waiting = asyncio.create_task(late.take().acquire())
            await bench.server.has_a_waiter_for("gate")
            async with db.rows("jobs").take(wait=0) as first:
                gate()
                second = await waiting
                assert [first.row["id"], second.row["id"]] == [1, 2]
                await second.release()

    async def test_a_claim_looks_again_behind_rows_that_others_have_locked(self, bench: MysqlRowBench) -> None:
        """Whether its first look has found some rows, or none at all."""
        add_jobs(bench, 12)
        async with client_of(bench) as db, bench.transaction() as transaction:
            await transaction.cursor().executemany("SELECT id FROM jobs WHERE id = %s FOR UPDATE", [*range(1, 10)])
            jobs = db.rows("jobs")
            async with jobs.batch(2).take(wait=0) as some, jobs.take(wait=0) as last:
                assert [row["id"] for row in [*some.rows, *last.rows]] == [10, 11, 12]

    async def test_a_row_that_is_locked_delays_the_renewal_of_no_other(self, bench: MysqlRowBench) -> None:
        add_jobs(bench, 2)
        ends = "SELECT leased_until FROM jobs ORDER BY id"
        async with client_of(bench) as db, db.rows("jobs").batch(2).take() as lease:
            before = bench.ask(ends)
            async with bench.transaction() as transaction:
                await transaction.cursor().execute("SELECT id FROM jobs WHERE id = 1 FOR UPDATE")
                with pytest.raises(BackendUnavailableError):
                    await lease.renew()
                after = bench.ask(ends)
                assert (after[0] == before[0], after[1] > before[1]) == (True, True)
            await lease.renew()
            assert bench.ask(ends)[0] > before[0]

    @pytest.mark.usefixtures("patient_mysql")
    async def test_a_deadlock_is_tried_again(self, bench: MysqlRowBench) -> None:
        """The claim waits for a row of its trigger, and its row is waited for by who has locked that one."""
        bench.ask("CREATE TABLE counted (id INT PRIMARY KEY, n INT)")
        bench.ask("INSERT INTO counted VALUES (1, 0)")
        bench.ask("CREATE TRIGGER counts BEFORE UPDATE ON jobs FOR EACH ROW UPDATE counted SET n = n + 1")
        add_jobs(bench, 2)
        async with client_of(bench) as db:
            async with bench.transaction() as transaction:
                cursor = transaction.cursor()
                await cursor.execute("UPDATE counted SET n = 10")
                await cursor.execute("CREATE TEMPORARY TABLE weight (n INT) ENGINE=InnoDB")
                await cursor.executemany("INSERT INTO weight VALUES (%s)", [(n,) for n in range(50)])
                claim = asyncio.create_task(db.rows("jobs").take(wait=0).acquire())
                await bench.server.has_a_waiter()
                await cursor.execute("UPDATE jobs SET priority = 7 WHERE id = 1")
            lease = await claim  # of the second row, unless the first one was free again by then
            assert bench.ask("SELECT n FROM counted") == [(12,)]
            await lease.release()

    async def test_a_batch_in_a_transaction_locks_no_other_row(self, bench: MysqlRowBench) -> None:
        """
        At the level of these servers, a table that is read as a whole is locked as a whole.

        They choose to read it so for most of its rows.
        """
        add_jobs(bench, 12)
        async with client_of(bench) as db, db.rows("jobs").batch(9).take() as lease:
            async with bench.transaction() as transaction:
                await lease.admit(transaction)
                await lease.finish(transaction, state="done")
                free = bench.ask("SELECT id FROM jobs FOR UPDATE SKIP LOCKED")
                assert sorted(free) == [(10,), (11,), (12,)]

    async def test_a_zombie_that_has_read_before_is_stale(self, bench: MysqlRowBench) -> None:
        """
        Its transaction sees the row as it was, and the row that counts is another one.

        From 11.6 on MariaDB itself refuses to lock a row that is newer than what the transaction has read.
        """
        add_jobs(bench, 1)
        async with client_of(bench) as db, db.rows("jobs").take() as zombie:
            async with bench.transaction() as transaction:
                await transaction.cursor().execute("SELECT * FROM jobs")
                bench.ask("UPDATE jobs SET lease_token = lease_token + 1")
                with pytest.raises((StaleTokenError, OperationalError)) as refused:
                    await zombie.finish(transaction, state="done")
            if isinstance(refused.value, OperationalError):
                assert refused.value.args[0] == _RECORD_CHANGED
        assert bench.ask("SELECT state FROM jobs") == [("queued",)]


class TestServers:
    async def test_one_that_is_read_only_is_refused(self, start_mysql: Callable[[], MysqlServer]) -> None:
        server = start_mysql()
        bench = with_jobs(MysqlRowBench(server), "mysql")
        add_jobs(bench, 2)
        async with client_of(bench) as db:
            lease = await db.rows("jobs").take().acquire()
            server.ask("SET GLOBAL read_only = ON")
            for said in ("the server is read-only", "read_only is on"):
                with pytest.raises(BackendUnavailableError, match=said):
                    await db.rows("jobs").take(wait=0).acquire()
            server.ask("SET GLOBAL read_only = OFF")
            await lease.renew()
            await lease.release()


KEYS: dict[str, tuple[str, list[object]]] = {
    "bigint": ("BIGINT", [1, 2, 3]),
    "text": ("CHAR(36) CHARACTER SET ascii COLLATE ascii_bin", [str(ID), "it's", "x"]),
    "bytes": ("BINARY(16)", [ID.bytes, bytes(16), b"'\\\xff\x00" * 4]),
}


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("driver", ["asyncmy", "aiomysql", "pymysql", "connection", "session-sync"])
async def test_a_row_is_finished_in_each_drivers_transaction(mysql_server: MysqlServer, driver: str, keys: str) -> None:
    if (driver, keys) == ("aiomysql", "bytes"):
        pytest.skip("aiomysql 0.3 writes no bytes with this PyMySQL")
    bench = MysqlRowBench(mysql_server)
    kind, those = KEYS[keys]
    bench.ask(f"CREATE TABLE works (name {kind} PRIMARY KEY, done BOOL NOT NULL DEFAULT 0)")
    for statement in schema_sql("works", dialect="mysql"):
        bench.ask(statement)
    for key in those:
        bench.ask("INSERT INTO works (name) VALUES (%s)", key)
    async with client_of(bench) as db, mysql_ways.opened(driver, bench.url) as way:
        works = db.rows("works", key="name", where="done = 0")
        async with works.take() as one, works.batch(2).take() as others:
            await one.renew()
            await others.renew()
            for lease in (one, others):
                async with way.begin() as transaction:
                    await lease.admit(transaction)
                    await lease.finish(transaction, done=1)
                with pytest.raises(UsageError, match="already"):
                    async with way.begin() as transaction:
                        await lease.finish(transaction, done=0)
    assert bench.ask("SELECT count(*) FROM works WHERE done = 1") == [(3,)]
