"""Leased rows in the eyes of an operator: listed, shown, taken away, diagnosed and measured."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from postgresql_server import PostgresqlServer
from prometheus_client import CollectorRegistry
from row_benches import PostgresqlRowBench, RowBench, add_jobs, client_of

from fencing_sdk import (
    BackendRefusedError,
    BackendUnavailableError,
    ConfigurationError,
    LeaseLostError,
    LockClient,
    LossReason,
    StaleTokenError,
    connect,
)
from fencing_sdk.errors import UnsupportedError
from fencing_sdk.integrations.prometheus import PrometheusMetrics
from fencing_sdk.rows import schema_sql

pytest_plugins = ["postgresql_fixtures", "mysql_fixtures"]


def url_of(bench: RowBench, tables: str = "table=jobs") -> str:
    return f"rows+{bench.url}{'&' if '?' in bench.url else '?'}{tables}"


def store_of(bench: RowBench, tables: str = "table=jobs") -> LockClient:
    return connect(url_of(bench, tables))


def create(bench: RowBench, name: str, key: str, *, column: str = "id") -> None:
    bench.ask(f"CREATE TABLE {name} ({column} {key} PRIMARY KEY)")
    for statement in schema_sql(name, dialect=bench.url.partition(":")[0]):
        bench.ask(statement)


async def names_in(locks: LockClient, pattern: str = "*") -> list[str]:
    return [holder.name async for holder in locks.all_holders(pattern)]


async def fencing(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FENCING_")}
    command = [sys.executable, "-m", "fencing_sdk", *arguments]
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=False, env=environment, stdin=subprocess.DEVNULL
    )


async def test_the_command_line_lists_shows_and_breaks(bench: RowBench) -> None:
    add_jobs(bench, 2)
    url = url_of(bench)
    async with client_of(bench, label="worker 7") as db:
        rows = db.rows("jobs", ttl=3600)
        taken = await rows.take().acquire()
        token = taken.token
        listed = await fencing("ls", "jobs/*", "--json", "--url", url)
        (seen,) = map(json.loads, listed.stdout.splitlines())
        assert (seen["name"], seen["token"], seen["label"]) == ("jobs/1", token, "worker 7")
        assert 0 < seen["remaining"] <= 3600
        assert 0 <= seen["held_for"] < 3600
        shown = await fencing("show", "jobs/1", "--url", url)
        assert str(token) in shown.stdout
        assert "worker 7" in shown.stdout
        broken = await fencing("break", "jobs/1", "--reason", "it hangs", "--yes", "--url", url)
        assert (broken.returncode, broken.stderr.count("was taken away")) == (0, 1)
        with pytest.raises(LeaseLostError) as lost:
            await taken.renew()
        assert lost.value.reason is LossReason.TAKEN_OVER
        again = await rows.take(wait=0).acquire()
        assert (again.name, again.token > token) == ("jobs/1", True)
        await again.release()
    assert "nothing is held" in (await fencing("ls", "--url", url)).stderr


async def test_a_row_is_taken_from_the_claim_with_this_token_alone(bench: RowBench) -> None:
    add_jobs(bench, 1)
    async with client_of(bench) as db, store_of(bench) as locks:
        rows = db.rows("jobs", ttl=3600)
        async with rows.take() as first:
            before = first.token
        assert not await locks.revoke("jobs/1", token=before, reason="it is free")
        async with rows.take() as second:
            assert not await locks.revoke("jobs/1", token=before, reason="too late")
            assert await locks.holders("jobs/1")
            await second.renew()
        assert not await locks.revoke("jobs/2", token=before, reason="it is not there")


async def test_a_row_that_was_taken_away_is_finished_by_no_one(bench: RowBench) -> None:
    add_jobs(bench, 1)
    async with client_of(bench) as db, store_of(bench) as locks:
        lease = await db.rows("jobs", ttl=3600).take().acquire()
        assert await locks.revoke("jobs/1", token=lease.token, reason="it hangs")
        with pytest.raises(StaleTokenError):
            async with bench.transaction() as transaction:
                await lease.finish(transaction, state="done")
        await lease.release()
    assert bench.ask("SELECT state FROM jobs") == [("queued",)]


async def test_a_listing_goes_on_page_by_page_through_all_tables(bench: RowBench) -> None:
    create(bench, "imports", "BIGINT")
    bench.ask(f"INSERT INTO imports (id) VALUES {', '.join(f'({key})' for key in range(-5, 405))}")
    add_jobs(bench, 3)
    async with client_of(bench) as db, store_of(bench, "table=jobs,imports") as locks:
        assert await names_in(locks) == []
        async with db.rows("imports", ttl=3600).batch(410).take(), db.rows("jobs", where="id > 1", ttl=3600).take():
            imports = [f"imports/{key}" for key in range(-5, 405)]
            assert await names_in(locks) == ["jobs/2", *imports]
            assert await names_in(locks, "imports/-*") == imports[:5]
            assert await names_in(locks, "jobs*") == ["jobs/2"]
            assert await names_in(locks, "nothing/*") == []


async def test_keys_of_any_text_are_listed_and_broken(bench: RowBench) -> None:
    create(bench, "names", "VARCHAR(40)")
    keys = ["a\nb", "\x1b[2J", "x/y", " ", "r\u00e9sum\u00e9", "it's", "%s", "42"]
    for key in keys:
        bench.ask("INSERT INTO names (id) VALUES (%s)", key)
    async with client_of(bench) as db, store_of(bench, "table=names") as locks:
        async with db.rows("names", ttl=3600).batch(10).take() as lease:
            assert sorted(await names_in(locks)) == sorted(f"names/{key}" for key in keys)
            lines = (await fencing("ls", "--url", url_of(bench, "table=names"))).stdout
            assert len(lines.splitlines()) == len(keys) + 1
            assert "\x1b" not in lines
            tokens = {row["id"]: row["lease_token"] for row in lease.rows}
            assert await locks.revoke("names/x/y", token=tokens["x/y"], reason="it hangs")
            assert await locks.holders("names/x/y") == []
            assert len(await locks.holders("names/it's")) == 1


async def test_no_lock_is_held_at_such_a_url(bench: RowBench, tmp_path: Path) -> None:
    add_jobs(bench, 1)
    async with store_of(bench) as locks:
        with pytest.raises(BackendRefusedError, match="row_client"):
            await locks.lock("jobs/1").acquire()
        with pytest.raises(UnsupportedError):
            locks.semaphore("jobs", permits=2)
        with pytest.raises(BackendRefusedError, match=r"a table of the URL \(jobs\)"):
            await locks.holders("report")
    mark = tmp_path / "ran"
    done = await fencing("run", "jobs/1", "--url", url_of(bench), "--", "touch", str(mark))
    assert (done.returncode, mark.exists()) == (69, False)
    assert "row_client" in done.stderr


async def test_a_table_that_cannot_have_leases_is_refused_with_the_cure(bench: RowBench) -> None:
    bench.ask("CREATE TABLE plain (id INT PRIMARY KEY)")
    with pytest.raises(BackendRefusedError, match="schema_sql"):
        await store_of(bench, "table=plain").__aenter__()
    listed = await fencing("ls", "--url", url_of(bench, "table=plain"))
    assert (listed.returncode, "schema_sql()" in listed.stderr) == (69, True)


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("", "name the tables"),
        ("?table=", "name the tables"),
        ("?table=jobs&key=id&key=uuid", "once"),
        ("?table=hunter2@host/app", "name the tables"),
        ("?table=jobs&key=hunter2;", "name the tables"),
        ("?table=jobs&hunter2=1", "option"),
    ],
)
@pytest.mark.parametrize("scheme", ["sqlite:///app.db", "postgresql://me@host/app"])
def test_a_url_that_names_no_table_is_refused_without_repeating_it(scheme: str, query: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as refused:
        connect(f"rows+{scheme}{query}")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["rows+redis://host?table=jobs", "rows+://host?table=jobs", "rows+memory://?table=jobs"]
)
def test_only_databases_have_rows(url: str) -> None:
    with pytest.raises(ConfigurationError, match="the application's database"):
        connect(url)


@pytest.mark.parametrize(("scheme", "driver"), [("postgresql", "asyncpg"), ("mysql", "asyncmy")])
def test_a_driver_that_is_missing_is_named_with_its_cure(scheme: str, driver: str) -> None:
    code = f"import sys; sys.modules[{driver!r}] = None; from fencing_sdk.cli import main; sys.exit(main())"
    listed = subprocess.run(
        [sys.executable, "-c", code, "ls", "--url", f"rows+{scheme}://me@host/app?table=jobs"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert listed.returncode == 2
    assert re.fullmatch(rf"fencing: {driver} is not installed; run: pip install .*\n", listed.stderr)


async def test_what_else_stands_in_the_query_is_for_the_database(postgresql_server: PostgresqlServer) -> None:
    url = f"rows+{postgresql_server.url}?sslmode=disable&table=public.jobs&key=number"
    create(PostgresqlRowBench(postgresql_server), "jobs", "UUID", column="number")
    lease = "INSERT INTO jobs VALUES (gen_random_uuid(), now() + interval '1h') RETURNING number::text"
    ((number,),) = postgresql_server.ask(lease)
    async with connect(url) as locks:
        assert await names_in(locks) == [f"public.jobs/{number}"]
        with pytest.raises(BackendRefusedError, match="invalid input syntax for type uuid"):
            await locks.holders("public.jobs/42")


async def test_a_row_in_a_transaction_is_not_waited_for_long(postgresql_server: PostgresqlServer) -> None:
    """A worker that is frozen in the transaction that finishes its row keeps it locked."""
    create(PostgresqlRowBench(postgresql_server), "jobs", "INT")
    postgresql_server.ask("INSERT INTO jobs VALUES (1, now() + interval '1h', 7)")
    async with connect(f"rows+{postgresql_server.url}?table=jobs") as locks, postgresql_server.connected() as frozen:
        async with frozen.transaction():
            await frozen.execute("UPDATE jobs SET leased_until = 'epoch'")
            with pytest.raises(BackendUnavailableError, match="locked"):
                await locks.revoke("jobs/1", token=7, reason="it is frozen")
        assert await names_in(locks) == []


async def test_a_key_of_fixed_length_is_renewed_listed_and_given_back(postgresql_server: PostgresqlServer) -> None:
    """In PostgreSQL a cast to `character` cuts all but the first letter."""
    bench = PostgresqlRowBench(postgresql_server)
    create(bench, "parcels", "CHAR(8)")
    bench.ask("INSERT INTO parcels (id) VALUES ('DE-00042')")
    async with client_of(bench) as db, store_of(bench, "table=parcels") as locks:
        async with db.rows("parcels", ttl=3600).take() as lease:
            await lease.renew()
            assert await names_in(locks) == ["parcels/DE-00042"]
            assert len(await locks.holders("parcels/DE-00042")) == 1
        assert await names_in(locks) == []


# `fencing doctor`


async def findings_of(url: str) -> dict[str, Any]:
    diagnosed = await fencing("doctor", "--for", "0.1s", "--json", "--url", url)
    found = {finding["check"]: finding for finding in json.loads(diagnosed.stdout)["findings"]}
    return {check: finding for check, finding in found.items() if not check.startswith("machine.")}


async def test_the_doctor_looks_at_how_long_a_frozen_transaction_lasts(bench: RowBench) -> None:
    add_jobs(bench, 2)
    before = bench.ask("SELECT * FROM jobs ORDER BY id")
    findings = await findings_of(url_of(bench))
    if bench.url.startswith("sqlite"):
        assert set(findings) == {"rows.journal"}
        bench.ask("PRAGMA journal_mode = WAL")
        assert await findings_of(url_of(bench)) == {}
    else:
        assert set(findings) == {"rows.frozen"}
    assert bench.ask("SELECT * FROM jobs ORDER BY id") == before


async def test_the_doctor_knows_the_settings_of_the_role_and_a_proxy(postgresql_server: PostgresqlServer) -> None:
    from pgbouncer import PgBouncer
    from required_program import require_program

    create(PostgresqlRowBench(postgresql_server), "jobs", "INT")
    database = postgresql_server.database
    postgresql_server.ask(f"ALTER DATABASE \"{database}\" SET idle_in_transaction_session_timeout = '60s'")
    assert await findings_of(f"rows+{postgresql_server.url}?table=jobs") == {}
    with PgBouncer(postgresql_server, binary=require_program("pgbouncer")) as bouncer:
        assert set(await findings_of(f"rows+{bouncer.url}?table=jobs")) == {"rows.pooler"}


@pytest.mark.parametrize(
    "url", ["rows+postgresql://me@127.0.0.1:1/app", "rows+mysql://me@127.0.0.1:1/app", "rows+sqlite:////nowhere/app.db"]
)
async def test_the_doctor_reports_a_database_that_is_away(url: str) -> None:
    assert set(await findings_of(f"{url}?table=jobs")) == {"store.reachable", "store.settings"}


# Metrics


async def test_the_rows_of_a_table_share_their_series(bench: RowBench) -> None:
    add_jobs(bench, 3)
    registry = CollectorRegistry()
    async with client_of(bench, observers=[PrometheusMetrics(registry=registry)]) as db:
        rows = db.rows("jobs", ttl=3600)
        for _ in range(3):
            async with rows.take() as lease:
                async with bench.transaction() as transaction:
                    await lease.finish(transaction)
            bench.ask("DELETE FROM jobs WHERE id = %s", lease.row["id"])
        async with asyncio.timeout(60):
            assert await rows.take(wait=0).try_acquire() is None
    labels = {
        (sample.labels["lock"], sample.labels["recipe"]) for metric in registry.collect() for sample in metric.samples
    }
    assert labels == {("jobs/{id}", "row")}
    of_rows = {"lock": "jobs/{id}", "recipe": "row"}
    assert registry.get_sample_value("fencing_hold_seconds_count", of_rows) == 3
    assert registry.get_sample_value("fencing_waiting", of_rows) == 0
