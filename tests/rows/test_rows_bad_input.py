"""Mistakes of an application with leased rows: each has an error that says what to do, and no row is lost by it."""

from __future__ import annotations

from typing import Any

import pytest
from row_benches import RowBench, add_jobs, client_of, refusal

from fencing_sdk import BackendRefusedError, ConfigurationError, LockHeldError, UsageError
from fencing_sdk.rows import RowLease, row_client, schema_sql, sync

pytest_plugins = ["postgresql_fixtures", "mysql_fixtures"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"table": "jobs; DROP TABLE jobs"}, "table must be"),
        ({"table": "jobs", "key": "id, name"}, "key must be"),
        ({"table": "jobs", "where": "state = 'x'; --"}, "where must be a part of one SQL statement"),
        ({"table": "jobs", "where": "queue = :queue"}, "values lacks queue"),
        ({"table": "jobs", "values": {"queue": "mail"}}, "values has queue in surplus"),
        ({"table": "jobs", "ttl": 0}, "ttl"),
        ({"table": "jobs", "rest": -1}, "rest"),
        ({"table": "jobs", "poll": 60}, "poll"),
        ({"table": "jobs", "notify": "jobs_ready"}, "notify is for PostgreSQL"),
    ],
)
def test_what_cannot_work_is_refused_before_any_request(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        row_client("sqlite:///app.db").rows(**options)


@pytest.mark.parametrize("number", [0, True, "8", 1.5, 10**6])
def test_a_number_of_tasks_threads_or_rows_is_a_whole_number(number: Any) -> None:
    threads = sync.row_client("sqlite:///app.db").rows("jobs")
    for jobs in (row_client("sqlite:///app.db").rows("jobs"), threads):
        with pytest.raises(ConfigurationError, match="at_once"):
            jobs.each(at_once=number)
        with pytest.raises(ConfigurationError, match="most"):
            jobs.batch(number)
    with pytest.raises(ConfigurationError, match="at_once"):
        threads.run(print, at_once=number)


@pytest.mark.parametrize("url", ["redis://:s3cret@localhost", "s3cret", "", None, "postgresql+asyncpg://u:s3cret@h/db"])
def test_the_url_of_another_store_is_refused_and_not_shown(url: Any) -> None:
    with pytest.raises(ConfigurationError) as error:
        row_client(url)
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize("dialect", ["oracle", "", None])
def test_a_migration_for_another_database_is_refused(dialect: Any) -> None:
    with pytest.raises(ConfigurationError, match="dialect"):
        schema_sql("jobs", dialect=dialect)


class TestTables:
    async def test_one_that_is_not_there(self, bench: RowBench) -> None:
        assert "there is no table nowhere" in await refusal(bench, table="nowhere")

    async def test_one_without_the_columns(self, bench: RowBench) -> None:
        bench.ask("CREATE TABLE plain (id INT PRIMARY KEY)")
        assert "no column leased_until; add the columns that schema_sql() returns" in await refusal(
            bench, table="plain"
        )

    async def test_one_whose_key_is_no_key(self, bench: RowBench) -> None:
        assert "no column uuid; name its key by key=" in await refusal(bench, key="uuid")
        assert "column state of table jobs is no key" in await refusal(bench, key="state")

    async def test_a_column_that_is_too_narrow_or_takes_nulls(self, bench: RowBench) -> None:
        bench.ask("CREATE TABLE narrow (id INT PRIMARY KEY, leased_until TEXT, lease_token SMALLINT)")
        assert "column leased_until of table narrow must be of type" in await refusal(bench, table="narrow")
        statements = schema_sql("nulls", dialect=bench.url.partition(":")[0])
        bench.ask("CREATE TABLE nulls (id INT PRIMARY KEY)")
        for statement in statements:
            bench.ask(statement.partition(" NOT NULL")[0])
        assert "must be NOT NULL" in await refusal(bench, table="nulls")

    async def test_one_that_is_found_when_the_client_is_opened(self, bench: RowBench) -> None:
        db = client_of(bench)
        db.rows("nowhere")
        with pytest.raises(BackendRefusedError, match="there is no table nowhere"):
            await db.__aenter__()


class TestSqlOfTheApplication:
    async def test_a_column_that_is_not_there(self, bench: RowBench) -> None:
        assert "prioritaet" in await refusal(bench, order="prioritaet")

    async def test_a_value_for_a_name(self, bench: RowBench) -> None:
        add_jobs(bench, 2)
        bench.ask("UPDATE jobs SET state = 'it''s :new' WHERE id = 2")
        async with client_of(bench) as db:
            jobs = db.rows(
                "jobs", where="state = :state AND priority = :priority", values={"state": "it's :new", "priority": 0}
            )
            async with jobs.take(wait=0) as lease:
                assert lease.row["id"] == 2

    async def test_two_clients_with_different_conditions_share_the_table(self, bench: RowBench) -> None:
        add_jobs(bench, 2)
        async with client_of(bench) as one, client_of(bench) as other:
            async with (
                one.rows("jobs", where="id <= 1").take(wait=0),
                other.rows("jobs", where="id >= 1").take() as lease,
            ):
                assert lease.row["id"] == 2
                with pytest.raises(LockHeldError):
                    await other.rows("jobs", where="id >= 1").take(wait=0).acquire()

    async def test_a_column_that_is_renamed_meanwhile(self, bench: RowBench) -> None:
        """The row that is leased is finished all the same; the next claim says what is wrong."""
        add_jobs(bench, 2)
        async with client_of(bench) as db:
            jobs = db.rows("jobs", where="state = 'queued'")
            async with jobs.take() as lease:
                bench.ask("ALTER TABLE jobs RENAME COLUMN state TO status")
                async with bench.transaction() as transaction:
                    await lease.finish(transaction, status="done")
            with pytest.raises(BackendRefusedError, match="state"):
                await jobs.take(wait=0).acquire()
        assert bench.ask("SELECT status FROM jobs ORDER BY id") == [("done",), ("queued",)]


class TestTransactions:
    @pytest.fixture
    async def lease(self, bench: RowBench) -> Any:
        add_jobs(bench, 1)
        async with client_of(bench) as db:
            lease = await db.rows("jobs").take().acquire()
            yield lease
            await lease.release()

    async def test_what_the_lease_writes_by_itself_is_no_column_of_a_finish(
        self, bench: RowBench, lease: RowLease
    ) -> None:
        for columns in ({"lease_token": 1}, {"leased_until": 0}, {"id": 7}):
            async with bench.transaction() as transaction:
                with pytest.raises(ConfigurationError, match="by itself"):
                    await lease.finish(transaction, **columns)

    async def test_what_is_no_transaction(self, lease: RowLease) -> None:
        with pytest.raises(UsageError, match="a transaction must be a connection"):
            await lease.finish(object(), state="done")

    async def test_a_row_that_was_deleted(self, bench: RowBench, lease: RowLease) -> None:
        bench.ask("DELETE FROM jobs")
        with pytest.raises(UsageError, match="was deleted while it was leased"):
            async with bench.transaction() as transaction:
                await lease.finish(transaction, state="done")

    async def test_a_finished_row_is_not_put_off(self, bench: RowBench, lease: RowLease) -> None:
        async with bench.transaction() as transaction:
            await lease.finish(transaction, state="done")
        with pytest.raises(UsageError, match="cannot be put off"):
            await lease.put_off(60)
