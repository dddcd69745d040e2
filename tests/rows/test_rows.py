"""Promises of leased rows to tasks and threads, on each database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from both_worlds import beside, comes
from patience import until
from row_benches import RowBench, add_jobs, client_of, in_both_worlds, row_bench

from fencing_sdk import (
    BackendRefusedError,
    LeaseLostError,
    LockHeldError,
    LossReason,
    StaleTokenError,
    UsageError,
    current_token,
)
from fencing_sdk.rows import schema_sql

pytest_plugins = ["postgresql_fixtures", "mysql_fixtures"]

JOBS: dict[str, Any] = {
    "where": "state = 'queued'",
    "order": "priority, id",
    "on_claim": "attempts = attempts + 1",
    "ttl": 30,
    "poll": 0.05,
}


def jobs_of(db: Any, **options: Any) -> Any:
    return db.rows("jobs", **{**JOBS, **options})


async def finish(bench: RowBench, lease: Any) -> None:
    async with bench.transaction() as transaction:
        await lease.finish(transaction, state="done")


async def states(bench: RowBench, **numbers: int) -> bool:
    return dict(bench.ask("SELECT state, count(*) FROM jobs GROUP BY state")).items() >= numbers.items()


@in_both_worlds
async def test_a_row_is_claimed_and_finished_in_the_users_transaction(bench: RowBench) -> None:
    add_jobs(bench, 2)
    async with client_of(bench) as db, jobs_of(db).take() as lease:
        assert (lease.name, lease.row["id"], lease.row["attempts"]) == ("jobs/1", 1, 1)
        async with bench.transaction() as transaction:
            await lease.finish(transaction, state="done", result="pdf")
    assert bench.ask("SELECT id, state, result FROM jobs ORDER BY id") == [(1, "done", "pdf"), (2, "queued", None)]


@in_both_worlds
async def test_a_row_is_claimed_by_one_at_a_time(bench: RowBench) -> None:
    add_jobs(bench, 1)
    async with client_of(bench) as one, client_of(bench) as other, jobs_of(one).take():
        with pytest.raises(LockHeldError):
            await jobs_of(other).take(wait=0).acquire()


@in_both_worlds
async def test_rows_are_claimed_in_the_order_of_the_application(bench: RowBench) -> None:
    add_jobs(bench, 3)
    bench.ask("UPDATE jobs SET priority = id")
    async with client_of(bench) as db:
        async with jobs_of(db, order="priority DESC").batch(2).take(wait=0) as lease:
            assert {row["id"] for row in lease.rows} == {2, 3}


@in_both_worlds
async def test_leaving_without_a_finish_gives_the_row_back_at_once(bench: RowBench) -> None:
    add_jobs(bench, 1)
    async with client_of(bench) as db:
        async with jobs_of(db).take() as first:
            pass
        async with jobs_of(db).take(wait=0) as second:
            assert second.token > first._state.number


@in_both_worlds
async def test_a_token_grows_though_the_last_one_was_forgotten_or_is_ahead_of_the_clock(bench: RowBench) -> None:
    add_jobs(bench, 1)
    ahead, tokens = 9 * 10**15, list[int]()
    async with client_of(bench) as db:
        for last in ("lease_token", "0", str(ahead)):
            bench.ask(f"UPDATE jobs SET lease_token = {last}")
            async with jobs_of(db).take(wait=0) as lease:
                tokens.append(lease.row["lease_token"])
    assert tokens[0] < tokens[1] < tokens[2] == ahead + 1


@in_both_worlds
async def test_an_error_keeps_the_row_for_a_while(bench: RowBench) -> None:
    add_jobs(bench, 1)
    async with client_of(bench) as db:
        with pytest.raises(ZeroDivisionError):
            async with jobs_of(db, rest=60).take():
                raise ZeroDivisionError
        with pytest.raises(LockHeldError):
            await jobs_of(db).take(wait=0).acquire()


@in_both_worlds
async def test_a_finish_that_was_rolled_back_leaves_the_row_to_the_next(bench: RowBench) -> None:
    add_jobs(bench, 1)
    async with client_of(bench) as db:
        with pytest.raises(ZeroDivisionError):
            async with jobs_of(db, rest=0).take() as lease, bench.transaction() as transaction:
                await lease.finish(transaction, state="done")
                raise ZeroDivisionError
        async with jobs_of(db).take(wait=0) as again:
            assert again.row["attempts"] == 2


async def test_a_finish_that_is_rolled_back_late_leaves_the_row_to_the_next(bench: RowBench) -> None:
    """As after a connection that was closed in its transaction: the row is locked when the block gives it back."""
    add_jobs(bench, 1)
    late = AsyncExitStack()

    async def roll_back() -> None:
        await asyncio.sleep(0.3)
        with suppress(ZeroDivisionError):
            await late.__aexit__(ZeroDivisionError, ZeroDivisionError(), None)

    async with client_of(bench) as db:
        with pytest.raises(ZeroDivisionError):
            async with jobs_of(db, rest=0, ttl=90).take() as lease:
                await lease.finish(await late.enter_async_context(bench.transaction()), state="done")
                rolling_back = asyncio.create_task(roll_back())
                raise ZeroDivisionError
        async with jobs_of(db).take(wait=45) as again:
            assert again.row["attempts"] == 2
        await rolling_back


@in_both_worlds
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
        kept = bench.ask("SELECT state, leased_until FROM jobs")
    assert bench.ask("SELECT state, leased_until FROM jobs") == kept  # nor does it give back what is another's
    assert kept[0][0] == "queued"


@in_both_worlds
async def test_a_finish_is_made_once(bench: RowBench) -> None:
    add_jobs(bench, 1)
    async with client_of(bench) as db, jobs_of(db).take() as lease:
        async with bench.transaction() as transaction:
            await lease.finish(transaction, state="done")
        with pytest.raises(UsageError, match="already"):
            async with bench.transaction() as transaction:
                await lease.finish(transaction, state="queued")


@in_both_worlds
async def test_an_error_after_the_finish_leases_nothing_again(bench: RowBench) -> None:
    add_jobs(bench, 1)
    async with client_of(bench) as db:
        with pytest.raises(ZeroDivisionError):
            async with jobs_of(db, rest=60).take() as lease:
                async with bench.transaction() as transaction:
                    await lease.finish(transaction, state="queued")
                raise ZeroDivisionError
        async with jobs_of(db).take(wait=0) as again:
            assert again.row["attempts"] == 2


@in_both_worlds
async def test_a_renewal_revives_no_lease(bench: RowBench) -> None:
    add_jobs(bench, 2)
    free = "SELECT leased_until FROM jobs WHERE id = 2"
    async with client_of(bench) as db:
        lease = await jobs_of(db).take().acquire()
        bench.ask("UPDATE jobs SET leased_until = %s WHERE id = 1", bench.ask(free)[0][0])
        with pytest.raises(LeaseLostError):
            await lease.renew()
        assert bench.ask("SELECT leased_until FROM jobs WHERE id = 1") == bench.ask(free)
        await lease.release()


@in_both_worlds
async def test_a_lease_is_renewed_beyond_its_ttl_and_lost_to_a_later_claim(bench: RowBench) -> None:
    add_jobs(bench, 1)
    async with client_of(bench) as db:
        with pytest.raises(LeaseLostError) as lost:
            async with jobs_of(db, ttl=6).take() as lease:
                before = bench.ask("SELECT leased_until FROM jobs")
                await lease.renew()
                assert bench.ask("SELECT leased_until FROM jobs") > before
                bench.ask("UPDATE jobs SET lease_token = lease_token + 1")
                await lease.wait_lost()
        assert lost.value.reason is LossReason.TAKEN_OVER


@in_both_worlds
async def test_a_row_that_is_deleted_is_lost(bench: RowBench) -> None:
    add_jobs(bench, 1)
    async with client_of(bench) as db:
        with pytest.raises(LeaseLostError) as lost:
            async with jobs_of(db, ttl=6).take() as lease:
                bench.ask("DELETE FROM jobs")
                await lease.wait_lost()
        assert lost.value.reason is LossReason.REFUSED


@in_both_worlds
async def test_a_row_may_be_put_off(bench: RowBench) -> None:
    add_jobs(bench, 1)
    async with client_of(bench) as db:
        async with jobs_of(db).take() as lease:
            await lease.put_off(60)
        with pytest.raises(LockHeldError):
            await jobs_of(db).take(wait=0).acquire()


@in_both_worlds
async def test_a_batch_has_one_lease_and_one_finish(bench: RowBench) -> None:
    add_jobs(bench, 5)
    async with client_of(bench) as db, jobs_of(db).batch(3).take() as lease:
        assert sorted(row["id"] for row in lease.rows) == [1, 2, 3]
        await lease.renew()
        async with bench.transaction() as transaction:
            await lease.finish(transaction, state="done")
    assert bench.ask("SELECT count(*) FROM jobs WHERE state = 'done'") == [(3,)]


@in_both_worlds
async def test_several_that_wait_get_a_row_each(bench: RowBench) -> None:
    add_jobs(bench, 20)
    seen: list[int] = []
    async with client_of(bench) as db:

        async def work(lease: Any) -> None:
            seen.append(lease.row["id"])
            await finish(bench, lease)

        running = beside(partial(jobs_of(db).run, work, at_once=4))
        await comes(partial(states, bench, done=20))
        await db.drain(within=5)
        await running()
    assert sorted(seen) == list(range(1, 21))
    assert bench.ask("SELECT count(*) FROM jobs WHERE attempts = 1") == [(20,)]


@in_both_worlds
async def test_a_decorated_function_works_on_rows_until_the_drain(bench: RowBench) -> None:
    async with client_of(bench) as db:
        work = jobs_of(db).each(at_once=2)(partial(finish, bench))
        running = beside(work)
        add_jobs(bench, 3)
        await comes(partial(states, bench, done=3))
        await db.drain(within=5)
        await running()


@in_both_worlds
async def test_a_loop_waits_for_a_row_and_ends_with_the_drain(bench: RowBench) -> None:
    taken: list[int] = []
    async with client_of(bench) as db:

        async def loop() -> None:
            async for job in jobs_of(db):
                async with job as lease:
                    taken.append(lease.row["id"])
                    await finish(bench, lease)

        looping = beside(loop)
        add_jobs(bench, 1)
        await comes(partial(states, bench, done=1))
        await db.drain(within=5)
        await looping()
    assert taken == [1]


@in_both_worlds
async def test_an_error_in_a_run_is_logged_and_the_others_go_on(bench: RowBench) -> None:
    add_jobs(bench, 3)
    async with client_of(bench) as db:

        async def work(lease: Any) -> None:
            if lease.row["id"] == 2:
                raise ZeroDivisionError
            await finish(bench, lease)

        running = beside(partial(jobs_of(db, rest=60).run, work, at_once=2))
        await comes(partial(states, bench, done=2))
        await db.drain(within=5)
        await running()
    assert bench.ask("SELECT id, attempts FROM jobs WHERE state = 'queued'") == [(2, 1)]


@in_both_worlds
async def test_a_refusal_leaves_a_run_bare(bench: RowBench) -> None:
    async with client_of(bench) as db:
        with pytest.raises(BackendRefusedError, match="nowhere"):
            await db.rows("nowhere").run(partial(finish, bench), at_once=3)


@in_both_worlds
async def test_the_loss_of_a_row_ends_its_block_and_the_loop_goes_on(bench: RowBench) -> None:
    """So does a finish that another claim has made stale: of one row, and of one of a batch."""
    add_jobs(bench, 3)
    seen: list[list[int]] = []
    claimed_anew = "UPDATE jobs SET state = 'lost', lease_token = lease_token + 1 WHERE id = %s"
    async with client_of(bench) as db:
        async for job in jobs_of(db, ttl=6):
            async with job as lease:
                seen.append([lease.row["id"]])
                bench.ask(claimed_anew, lease.row["id"])
                await lease.wait_lost()
            if len(seen) == 2:
                break
        async for job in jobs_of(db):
            async with job as lease:
                seen.append([lease.row["id"]])
                bench.ask(claimed_anew, lease.row["id"])
                await finish(bench, lease)
            break
        bench.ask("INSERT INTO jobs (id) VALUES (4), (5), (6)")
        async for job in jobs_of(db, where="id >= 4 AND state = 'queued'", rest=0).batch(3):
            async with job as lease:
                seen.append(sorted(row["id"] for row in lease.rows))
                if len(seen) == 4:
                    bench.ask("UPDATE jobs SET lease_token = lease_token + 1 WHERE id = 6")
                await finish(bench, lease)
            if len(seen) == 5:
                break
    assert seen == [[1], [2], [3], [4, 5, 6], [4, 5]]


@in_both_worlds
async def test_an_error_of_another_row_leaves_a_loop(bench: RowBench) -> None:
    add_jobs(bench, 1)
    async with client_of(bench) as db:
        with pytest.raises(StaleTokenError, match="jobs/7"):
            async for job in jobs_of(db):
                async with job as lease:
                    raise StaleTokenError("jobs/7", int(lease.token), int(lease.token) + 1)


@in_both_worlds
async def test_a_generator_that_is_closed_over_a_lost_row_ends(bench: RowBench) -> None:
    add_jobs(bench, 2)
    async with client_of(bench) as db:

        async def walk() -> AsyncIterator[Any]:
            async for job in jobs_of(db, ttl=6):
                async with job as lease:
                    yield lease

        walking = walk()
        lease = await anext(walking)
        bench.ask("UPDATE jobs SET lease_token = lease_token + 1")
        with pytest.raises(LeaseLostError):
            await lease.renew()
        with suppress(LeaseLostError):
            await walking.aclose()


@in_both_worlds
async def test_a_row_of_a_loop_is_entered_as_its_first_line(bench: RowBench) -> None:
    add_jobs(bench, 1)
    async with client_of(bench) as db:
        with pytest.raises(UsageError, match="the first line of the loop"):
            async for _ in jobs_of(db):
                pass
        take = jobs_of(db).take(wait=0)
        async with take as lease:
            assert lease.row["id"] == 1
        with pytest.raises(UsageError, match="entered once"):
            await take.__aenter__()


@in_both_worlds
async def test_the_block_of_a_plain_handle_keeps_its_row_after_an_error(bench: RowBench) -> None:
    add_jobs(bench, 1)
    async with client_of(bench) as db:
        with pytest.raises(ZeroDivisionError):
            async with await jobs_of(db, rest=60).take().acquire():
                raise ZeroDivisionError
        assert await jobs_of(db).take().try_acquire() is None


@in_both_worlds
async def test_a_plain_handle_gives_back_what_was_rolled_back(bench: RowBench) -> None:
    add_jobs(bench, 1)
    async with client_of(bench) as db:
        lease = await jobs_of(db).take().acquire()
        with suppress(ZeroDivisionError):
            async with bench.transaction() as transaction:
                await lease.finish(transaction, state="done")
                raise ZeroDivisionError
        await lease.release()
        async with jobs_of(db).take(wait=0) as again:
            assert again.row["attempts"] == 2


@in_both_worlds
async def test_the_lease_of_a_row_is_the_current_one(bench: RowBench) -> None:
    add_jobs(bench, 1)
    async with client_of(bench) as db, jobs_of(db).take() as lease:
        assert current_token() == lease.token
        assert current_token("jobs/1") == lease.token


@pytest.mark.server
async def test_a_notification_wakes_a_client_that_waits(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The next poll comes after three seconds at the earliest."""
    with row_bench("postgresql", request, tmp_path) as bench:
        for statement in schema_sql("jobs", dialect="postgresql", notify="jobs_ready")[2:]:
            bench.ask(statement)
        async with client_of(bench) as db:
            jobs = jobs_of(db, poll=5, notify="jobs_ready")
            waiting = asyncio.create_task(jobs.take().acquire())
            listeners = "SELECT count(*) FROM pg_stat_activity WHERE query ILIKE 'LISTEN%jobs_ready%'"
            await until(lambda: bench.ask(listeners) == [(1,)])
            polling = asyncio.create_task(asyncio.sleep(2.5))
            bench.ask("INSERT INTO jobs (id) VALUES (1)")
            lease = await waiting
            assert not polling.done()
            polling.cancel()
            await lease.release()
