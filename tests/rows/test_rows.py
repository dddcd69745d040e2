"""Promises of leased rows, on each database."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mysql_programs import flavours
from patience import until
from row_benches import RowBench, add_jobs, client_of, row_bench

from fencing_sdk import LeaseLostError, LockHeldError, LossReason, StaleTokenError, UsageError
from fencing_sdk.rows import LeasedRows, RowClient, schema_sql

pytest_plugins = ["postgresql_fixtures", "mysql_fixtures"]
pytestmark = pytest.mark.server

COLUMNS = ["sqlite", "postgresql", *flavours()]
JOBS: dict[str, Any] = {
    "where": "state = 'queued'",
    "order": "priority, id",
    "on_claim": "attempts = attempts + 1",
    "ttl": 5,
    "poll": 0.05,
}


@pytest.fixture(params=COLUMNS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RowBench]:
    with row_bench(request.param, request, tmp_path) as made:
        yield made


def jobs_of(db: RowClient, **options: Any) -> LeasedRows:
    return db.rows("jobs", **{**JOBS, **options})


async def test_a_row_is_claimed_and_finished_in_the_users_transaction(bench: RowBench) -> None:
    add_jobs(bench, 2)
    async with client_of(bench) as db, jobs_of(db).take() as lease:
        assert (lease.name, lease.row["id"], lease.row["attempts"]) == ("jobs/1", 1, 1)
        async with bench.transaction() as transaction:
            await lease.finish(transaction, state="done", result="pdf")
    assert bench.ask("SELECT id, state, result FROM jobs ORDER BY id") == [(1, "done", "pdf"), (2, "queued", None)]


async def test_a_row_is_claimed_by_one_at_a_time(bench: RowBench) -> None:
    add_jobs(bench, 1)
    async with client_of(bench) as one, client_of(bench) as other, jobs_of(one).take():
        with pytest.raises(LockHeldError):
            await jobs_of(other).take(wait=0).acquire()


async def test_leaving_without_a_finish_gives_the_row_back_at_once(bench: RowBench) -> None:
    add_jobs(bench, 1)
    async with client_of(bench) as db:
        async with jobs_of(db).take() as first:
            pass
        async with jobs_of(db).take(wait=0) as second:
            assert second.token > first._state.number


async def test_an_error_keeps_the_row_for_a_while(bench: RowBench) -> None:
    add_jobs(bench, 1)
    async with client_of(bench) as db:
        with pytest.raises(ZeroDivisionError):
            async with jobs_of(db, rest=60).take():
                raise ZeroDivisionError
        with pytest.raises(LockHeldError):
            await jobs_of(db).take(wait=0).acquire()


async def test_a_finish_that_was_rolled_back_leaves_the_row_to_the_next(bench: RowBench) -> None:
    add_jobs(bench, 1)
    async with client_of(bench) as db:
        with pytest.raises(ZeroDivisionError):
            async with jobs_of(db, rest=0).take() as lease, bench.transaction() as transaction:
                await lease.finish(transaction, state="done")
                raise ZeroDivisionError
        async with jobs_of(db).take(wait=0) as again:
            assert again.row["attempts"] == 2


async def test_a_zombie_finishes_nothing(bench: RowBench) -> None:
    """Its claim is over, and another one came later: all that its transaction has written is rolled back."""
    add_jobs(bench, 1)
    async with client_of(bench) as db, jobs_of(db).take() as zombie:
        bench.ask("UPDATE jobs SET lease_token = lease_token + 1")
        with pytest.raises(StaleTokenError) as stale:
            async with bench.transaction() as transaction:
                await zombie.finish(transaction, state="done")
        assert stale.value.resource == "jobs/1"
        with pytest.raises(StaleTokenError):
            async with bench.transaction() as transaction:
                await zombie.admit(transaction)
    assert bench.ask("SELECT state FROM jobs") == [("queued",)]


async def test_a_finish_is_made_once(bench: RowBench) -> None:
    add_jobs(bench, 1)
    async with client_of(bench) as db, jobs_of(db).take() as lease:
        async with bench.transaction() as transaction:
            await lease.finish(transaction, state="done")
        with pytest.raises(UsageError, match="already"):
            async with bench.transaction() as transaction:
                await lease.finish(transaction, state="queued")


async def test_a_lease_is_renewed_beyond_its_ttl_and_lost_to_a_later_claim(bench: RowBench) -> None:
    add_jobs(bench, 1)
    async with client_of(bench) as db:
        with pytest.raises(LeaseLostError) as lost:
            async with jobs_of(db, ttl=1).take() as lease:
                before = bench.ask("SELECT leased_until FROM jobs")
                await lease.renew()
                assert bench.ask("SELECT leased_until FROM jobs") > before
                bench.ask("UPDATE jobs SET lease_token = lease_token + 1")
                await asyncio.sleep(60)
        assert lost.value.reason is LossReason.TAKEN_OVER


async def test_a_row_that_is_deleted_is_lost(bench: RowBench) -> None:
    add_jobs(bench, 1)
    async with client_of(bench) as db:
        with pytest.raises(LeaseLostError) as lost:
            async with jobs_of(db, ttl=1).take():
                bench.ask("DELETE FROM jobs")
                await asyncio.sleep(60)
        assert lost.value.reason is LossReason.REFUSED


async def test_a_row_may_be_put_off(bench: RowBench) -> None:
    add_jobs(bench, 1)
    async with client_of(bench) as db:
        async with jobs_of(db).take() as lease:
            await lease.put_off(60)
        with pytest.raises(LockHeldError):
            await jobs_of(db).take(wait=0).acquire()


async def test_a_batch_has_one_lease_and_one_finish(bench: RowBench) -> None:
    add_jobs(bench, 5)
    async with client_of(bench) as db, jobs_of(db).batch(3).take() as lease:
        assert sorted(row["id"] for row in lease.rows) == [1, 2, 3]
        await lease.renew()
        async with bench.transaction() as transaction:
            await lease.finish(transaction, state="done")
    assert bench.ask("SELECT count(*) FROM jobs WHERE state = 'done'") == [(3,)]


async def test_tasks_that_wait_get_a_row_each(bench: RowBench) -> None:
    add_jobs(bench, 20)
    seen: list[int] = []
    async with client_of(bench) as db:
        jobs = jobs_of(db)

        async def work(lease: Any) -> None:
            seen.append(lease.row["id"])
            async with bench.transaction() as transaction:
                await lease.finish(transaction, state="done")
            if len(seen) == 20:
                drained.set()

        drained = asyncio.Event()
        running = asyncio.create_task(jobs.run(work, at_once=4))
        await drained.wait()
        await db.drain(within=5)
        await running
    assert sorted(seen) == list(range(1, 21))
    assert bench.ask("SELECT count(*) FROM jobs WHERE state = 'done' AND attempts = 1") == [(20,)]


async def test_a_loop_waits_for_a_row_and_ends_with_the_drain(bench: RowBench) -> None:
    taken: list[int] = []
    async with client_of(bench) as db:

        async def loop() -> None:
            async for job in jobs_of(db):
                async with job as lease:
                    taken.append(lease.row["id"])
                    async with bench.transaction() as transaction:
                        await lease.finish(transaction, state="done")
                    done.set()

        done = asyncio.Event()
        looping = asyncio.create_task(loop())
        await asyncio.sleep(0.1)
        add_jobs(bench, 1)
        await done.wait()
        await db.drain(within=5)
        await looping
    assert taken == [1]


async def test_a_notification_wakes_a_client_that_waits(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The next poll comes after three seconds at the earliest."""
    with row_bench("postgresql", request, tmp_path) as bench:
        for statement in schema_sql("jobs", dialect="postgresql", notify="jobs_ready")[2:]:
            bench.ask(statement)
        async with client_of(bench) as db:
            jobs = jobs_of(db, poll=5, notify="jobs_ready")
            waiting = [asyncio.create_task(jobs.take().acquire()) for _ in range(3)]
            listeners = "SELECT count(*) FROM pg_stat_activity WHERE query ILIKE 'LISTEN%jobs_ready%'"
            await until(lambda: bench.ask(listeners) == [(1,)])
            polling = asyncio.create_task(asyncio.sleep(2.5))
            bench.ask("INSERT INTO jobs (id) VALUES (1), (2), (3)")
            leases = await asyncio.gather(*waiting)
            assert not polling.done()
            polling.cancel()
            assert sorted(lease.row["id"] for lease in leases) == [1, 2, 3]
            for lease in leases:
                await lease.release()
