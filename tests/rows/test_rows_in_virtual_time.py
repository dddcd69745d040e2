"""Leased rows in a world: a worker's promises without real time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from fencing_sdk import LeaseLostError, LockHeldError, StaleTokenError
from fencing_sdk.rows import LeasedRows, RowLease, schema_sql
from fencing_sdk.testing import World, WorldClient


class Office:
    """Two workers, and the jobs in their database."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.app = world.database()
        create = "CREATE TABLE jobs (id INTEGER PRIMARY KEY, state TEXT NOT NULL DEFAULT 'queued', leased_by TEXT)"
        for statement in (create, *schema_sql("jobs", dialect="sqlite")):
            self.app.connection.execute(statement)
        self.a, self.b = world.client("A"), world.client("B")
        self.clients = {client: client.row_client(self.app) for client in (self.a, self.b)}

    def add(self, *keys: int) -> None:
        self.app.connection.executemany("INSERT INTO jobs (id) VALUES (?)", [(key,) for key in keys])

    def jobs(self, client: WorldClient, **options: Any) -> LeasedRows:
        return self.clients[client].rows("jobs", **{"where": "state = 'queued'", "ttl": 10, **options})

    def states(self) -> list[tuple[int, str]]:
        return self.app.connection.execute("SELECT id, state FROM jobs ORDER BY id").fetchall()

    async def finish(self, lease: RowLease, state: str = "done") -> None:
        async with self.app.transaction() as transaction:
            await lease.finish(transaction, state=state)

    async def take_and_admit(self, jobs: LeasedRows, work: float) -> None:
        async with jobs.take() as lease:
            await asyncio.sleep(work)
            async with self.app.transaction() as transaction:
                await lease.admit(transaction)

    async def take_and_finish(self, jobs: LeasedRows, work: float, state: str = "done") -> str:
        async with jobs.take() as lease:
            await asyncio.sleep(work)
            await self.finish(lease, state)
            return lease.name


@pytest.fixture
def office() -> Iterator[Office]:
    with World() as world:
        yield Office(world)


def test_a_row_is_renewed_for_as_long_as_its_work_takes(office: Office) -> None:
    office.add(1)
    jobs = office.jobs(office.a)
    work = office.a.start(office.take_and_finish, jobs, 100.0)
    office.world.sleep(50)
    with pytest.raises(LockHeldError):
        office.b.run(office.jobs(office.b).take(wait=0).acquire)
    assert office.world.finish(work) == "jobs/1"
    assert office.states() == [(1, "done")]
    assert [event.kind for event in office.a.events].count("renewed") > 10


def test_a_row_of_a_worker_that_crashed_is_free_after_its_ttl(office: Office) -> None:
    office.add(1)
    office.a.start(office.take_and_finish, office.jobs(office.a), 100.0)
    office.world.sleep(1)
    office.a.pause()  # for ever
    began = office.world.now
    assert office.b.run(office.take_and_finish, office.jobs(office.b, poll=0.1), 1.0) == "jobs/1"
    assert 5 < office.world.now - began < 12
    assert office.states() == [(1, "done")]


@pytest.mark.parametrize("settle", [Office.take_and_finish, Office.take_and_admit])
def test_a_frozen_worker_finishes_nothing(office: Office, settle: Callable[..., Awaitable[object]]) -> None:
    office.add(1)
    work = office.a.start(settle, office, office.jobs(office.a), 3.0)
    office.world.sleep(1)
    office.a.pause()
    assert office.b.run(office.take_and_finish, office.jobs(office.b), 0.0, "by B") == "jobs/1"
    office.a.resume()
    with pytest.raises(LeaseLostError):
        office.world.finish(work)
    assert office.states() == [(1, "by B")]


def test_the_finish_of_a_worker_with_a_slow_clock_is_refused(office: Office) -> None:
    """The comparison of tokens alone keeps a worker that believes in its lease from writing."""
    office.add(1)
    slow = office.world.client("slow", clock_rate=0.1)
    office.clients[slow] = slow.row_client(office.app)
    slow.link.drop("renew")
    work = slow.start(office.take_and_finish, office.jobs(slow), 3.0, "by the slow one")
    office.world.sleep(1)
    assert office.b.run(office.take_and_finish, office.jobs(office.b), 0.0, "by B") == "jobs/1"
    with pytest.raises(StaleTokenError):
        office.world.finish(work)
    assert office.states() == [(1, "by B")]


def test_a_transaction_of_one_client_is_waited_for_by_the_others(office: Office) -> None:
    office.add(1, 2)

    async def write(seconds: float) -> None:
        async with office.app.transaction():
            await asyncio.sleep(seconds)

    writing = office.a.start(write, 3.0)
    office.world.sleep(1)
    assert office.b.run(office.take_and_finish, office.jobs(office.b), 0.0) == "jobs/1"
    assert writing.done()


def test_an_error_in_a_transaction_rolls_it_back(office: Office) -> None:
    office.add(1)

    async def fail() -> None:
        async with office.jobs(office.a, rest=0).take() as lease, office.app.transaction() as transaction:
            await lease.finish(transaction, state="done")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        office.a.run(fail)
    assert office.states() == [(1, "queued")]
    assert office.b.run(office.take_and_finish, office.jobs(office.b), 0.0) == "jobs/1"


def test_plain_code_works_on_rows(office: Office) -> None:
    office.add(1)
    rows = office.a.sync_row_client(office.app).rows("jobs", where="state = 'queued'", ttl=10)
    with rows.take() as lease:
        office.world.sleep(60)  # and its heartbeat goes on
        office.app.connection.execute("BEGIN IMMEDIATE")
        lease.finish(office.app.connection, state="done")
        office.app.connection.execute("COMMIT")
    assert office.states() == [(1, "done")]


def test_the_database_has_the_time_of_the_world(office: Office) -> None:
    def now() -> int:
        ((seconds,),) = office.app.connection.execute("SELECT unixepoch()")
        return int(seconds)

    began = now()
    office.world.sleep(3600)
    assert now() - began == 3600


def test_one_seed_gives_one_history() -> None:
    def run() -> list[str]:
        with World(seed=7, latency=(0.001, 0.2)) as world:
            office = Office(world)
            office.add(1, 2)
            for client in (office.a, office.b):
                client.run(office.take_and_finish, office.jobs(client), 20.0)
            return world.history

    assert run() == run()


def test_two_clients_share_the_rows(office: Office) -> None:
    office.add(*range(1, 21))
    done: list[str] = []

    async def work(lease: RowLease) -> None:
        await asyncio.sleep(1)
        await office.finish(lease, lease.row["leased_by"])
        done.append(lease.name)

    runs = [client.start(office.jobs(client).run, work, at_once=2) for client in (office.a, office.b)]
    office.world.sleep(30)
    drains = [client.start(office.clients[client].drain, within=5) for client in (office.a, office.b)]
    for task in (*runs, *drains):
        office.world.finish(task)
    assert sorted(done) == sorted(f"jobs/{key}" for key in range(1, 21))
    assert {state for _, state in office.states()} == {"A", "B"}


def test_a_drain_lets_work_end_and_claims_nothing_more(office: Office) -> None:
    office.add(1, 2)
    ended: list[str] = []

    async def loop(jobs: LeasedRows) -> None:
        async for job in jobs:
            async with job as lease:
                await asyncio.sleep(20)
                await office.finish(lease)
            ended.append(lease.name)

    looping = office.a.start(loop, office.jobs(office.a))
    office.world.sleep(5)
    assert office.a.run(office.clients[office.a].drain, within=60)
    office.world.finish(looping)
    assert ended == ["jobs/1"]
    assert office.states() == [(1, "done"), (2, "queued")]


def test_a_row_that_is_claimed_for_a_task_that_has_left_is_free_at_once(office: Office) -> None:
    """Tasks that ask while a claim is under way share the next one: the rows go to those that are still there."""
    office.add(1, 2, 3)
    jobs = office.jobs(office.a)
    office.a.link.delay(0.5, "acquire")
    first = office.a.start(office.take_and_finish, jobs, 5.0)
    office.world.sleep(0.1)
    left, other = (office.a.start(office.take_and_finish, jobs, 3.0) for _ in range(2))
    office.world.sleep(0.1)
    left.cancel()
    office.world.sleep(2)
    assert office.b.run(office.take_and_finish, office.jobs(office.b), 0.0) == "jobs/3"
    assert not other.done()
    assert [office.world.finish(task) for task in (first, other)] == ["jobs/1", "jobs/2"]


def test_the_loss_of_one_row_of_a_batch_is_found_although_another_one_is_locked(office: Office) -> None:
    office.add(1, 2)
    ask = office.app.connection.execute

    async def lose() -> None:
        async with office.jobs(office.a).batch(2).take() as lease:
            ask("UPDATE jobs SET lease_token = lease_token + 1 WHERE id = 1")
            ask("CREATE TRIGGER locked BEFORE UPDATE ON jobs WHEN old.id = 2 BEGIN SELECT raise(IGNORE); END")
            try:
                await lease.renew()
            finally:
                ask("DROP TRIGGER locked")

    with pytest.raises(LeaseLostError):
        office.a.run(lose)


def test_a_commit_may_take_longer_than_the_lease(office: Office) -> None:
    """Its lock on the row is the lease: no renewal has to be answered."""
    office.add(1)

    async def commit_slowly() -> None:
        async with office.jobs(office.a).take() as lease, office.app.transaction() as transaction:
            await lease.finish(transaction, state="done")
            office.a.link.drop("renew")
            await asyncio.sleep(100)

    office.a.run(commit_slowly)
    assert office.states() == [(1, "done")]


def test_a_row_that_is_finished_while_its_renewal_is_under_way_is_not_lost(office: Office) -> None:
    office.add(1)

    async def finish_meanwhile() -> None:
        async with office.jobs(office.a).take() as lease:
            office.a.link.delay(0.5, "renew", way="request", times=1)
            renewing = asyncio.create_task(lease.renew())
            await asyncio.sleep(0.1)
            await office.finish(lease)
            await renewing

    office.a.run(finish_meanwhile)
    assert office.states() == [(1, "done")]


def test_one_claim_of_a_table_is_under_way_at_a_time(office: Office) -> None:
    """Tasks that ask meanwhile share the next one."""
    office.add(1, 2, 3)
    statements: list[str] = []
    office.app.connection.set_trace_callback(statements.append)
    jobs = office.jobs(office.a)
    office.a.link.delay(0.5, "acquire")
    tasks = []
    for _ in range(3):
        tasks.append(office.a.start(office.take_and_finish, jobs, 5.0))
        office.world.sleep(0.1)
    assert [office.world.finish(task) for task in tasks] == ["jobs/1", "jobs/2", "jobs/3"]
    assert sum("leased_by =" in statement for statement in statements) == 2
