"""Leased rows for threads: what ends a wait, a block and a run before its time, and what a fork leaves alone."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from patience import wait_until
from row_benches import RowBench, add_jobs, row_bench
from stays import PATIENCE

from fencing_sdk import ConfigurationError, LeaseLostError, LossReason, rows
from fencing_sdk.errors import AcquireCancelledError
from fencing_sdk.rows import RowTake as TaskRowTake
from fencing_sdk.rows import sync
from fencing_sdk.rows._client import RowOptions
from fencing_sdk.rows.sync import LeasedRows, RowClient, RowLease, row_client
from fencing_sdk.sync import _lease as blocks

pytest_plugins = ["postgresql_fixtures", "mysql_fixtures"]


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RowBench]:
    with row_bench("sqlite", request, tmp_path) as made:
        yield made


@pytest.fixture
def db(bench: RowBench) -> Iterator[RowClient]:
    with row_client(bench.url) as opened:
        yield opened


@pytest.fixture
def jobs(db: RowClient) -> LeasedRows:
    return db.rows("jobs", where="state = 'queued'", on_claim="attempts = attempts + 1", rest=60, poll=0.05)


def leased(bench: RowBench) -> int:
    return int(bench.ask("SELECT count(*) FROM jobs WHERE leased_until > 0")[0][0])


def finish(bench: RowBench, lease: RowLease) -> None:
    with closing(sqlite3.connect(bench.url.partition("///")[2], timeout=10)) as connection, connection:
        lease.finish(connection, state="done")


@contextlib.contextmanager
def handled_by(handle: Any) -> Iterator[None]:
    former = signal.signal(signal.SIGUSR1, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, former)


def interrupt() -> None:
    signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)  # type: ignore[arg-type]  # it runs


def test_the_door_for_threads_has_the_same_words() -> None:
    def public(thing: object) -> set[str]:
        return {name for name in dir(thing) if not name.startswith("_")}

    assert sync.__all__ == rows.__all__
    for name in {*rows.__all__} - {"row_client", "schema_sql"}:
        missing = public(getattr(rows, name)) - public(getattr(sync, name))
        assert missing == ({"aclose"} if name == "RowClient" else set()), name
    assert inspect.signature(sync.row_client).parameters == inspect.signature(rows.row_client).parameters
    assert ["self", "table", *RowOptions.__annotations__] == [*inspect.signature(rows.RowClient.rows).parameters]


# Waits


def test_an_event_ends_the_waits_for_rows(db: RowClient) -> None:
    cancel = threading.Event()
    jobs = db.rows("jobs", cancel=cancel)
    threading.Timer(0.1, cancel.set).start()
    with pytest.raises(AcquireCancelledError, match="jobs"):
        jobs.take().acquire()
    assert list(jobs) == []
    jobs.run(lambda _: None, at_once=2)
    cancel.clear()
    threading.Timer(0.1, cancel.set).start()
    jobs.batch(2).run(lambda _: None, at_once=2)


def test_what_is_no_event_is_refused(db: RowClient) -> None:
    with pytest.raises(ConfigurationError, match="cancel must be an event"):
        db.rows("jobs", cancel=7)  # type: ignore[arg-type]


TAKES: dict[str, Callable[[LeasedRows], object]] = {
    "handle": lambda jobs: jobs.take().acquire(),
    "block": lambda jobs: jobs.take().__enter__(),
    "loop": lambda jobs: next(iter(jobs)),
}


@pytest.mark.parametrize("take", [*TAKES.values(), lambda jobs: jobs.run(print, at_once=3)], ids=[*TAKES, "run"])
def test_a_wait_that_is_interrupted_claims_nothing(
    bench: RowBench, jobs: LeasedRows, take: Callable[[LeasedRows], object]
) -> None:
    with pytest.raises(KeyboardInterrupt), handled_by(signal.default_int_handler):
        threading.Timer(0.1, interrupt).start()
        take(jobs)
    add_jobs(bench, 1)
    time.sleep(0.2)  # several polls
    assert leased(bench) == 0


@pytest.mark.parametrize("take", TAKES.values(), ids=TAKES)
def test_a_row_that_was_claimed_when_its_caller_was_interrupted_is_given_back(
    bench: RowBench, jobs: LeasedRows, monkeypatch: pytest.MonkeyPatch, take: Callable[[LeasedRows], object]
) -> None:
    """The thread is interrupted in its sleep at the very moment at which the loop has the lease."""
    add_jobs(bench, 1)
    acquire, claimed = TaskRowTake.acquire, list[object]()

    async def slowly(*arguments: Any, **options: Any) -> object:
        claimed.append(await acquire(*arguments, **options))
        interrupt()
        return claimed[0]

    monkeypatch.setattr(TaskRowTake, "acquire", slowly)
    with pytest.raises(KeyboardInterrupt), handled_by(signal.default_int_handler):
        take(jobs)
        time.sleep(PATIENCE)  # the interrupt may come when the call has returned
    del claimed[:]
    wait_until(lambda: leased(bench) == 0, what="it is given back")


# Blocks


def test_a_loop_that_is_left_before_the_block_gives_its_row_back(bench: RowBench, jobs: LeasedRows) -> None:
    add_jobs(bench, 1)
    for _ in jobs:
        assert leased(bench) == 1
        break
    assert leased(bench) == 0

    def interrupted() -> None:
        for _ in jobs:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert leased(bench) == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_of_the_work_gives_the_row_back_at_once(
    bench: RowBench, jobs: LeasedRows, error: type[BaseException]
) -> None:
    add_jobs(bench, 1)
    for block in (jobs.take(), jobs.take().acquire):
        with pytest.raises(error), block() if callable(block) else block:
            assert leased(bench) == 1
            raise error
        assert leased(bench) == 0


def test_an_interrupt_at_the_first_step_out_of_a_block_gives_back_what_was_rolled_back(
    bench: RowBench, jobs: LeasedRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_jobs(bench, 1)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def work() -> None:
        with jobs.take() as lease, closing(sqlite3.connect(bench.url.partition("///")[2])) as connection:
            connection.execute("BEGIN IMMEDIATE")
            lease.finish(connection, state="done")
            connection.rollback()

    with monkeypatch.context() as patch:
        patch.setattr(blocks, "_left", interrupted)
        with pytest.raises(KeyboardInterrupt):
            work()
    wait_until(lambda: leased(bench) == 0, what="it is given back")
    with jobs.take(wait=PATIENCE) as lease:
        assert lease.row["attempts"] == 2


def test_a_thread_may_hold_several_rows(bench: RowBench, jobs: LeasedRows) -> None:
    add_jobs(bench, 2)
    with jobs.take() as one, jobs.take() as other:
        assert [one.row["id"], other.row["id"]] == [1, 2]
        finish(bench, other)
        finish(bench, one)
    assert bench.ask("SELECT count(*) FROM jobs WHERE state = 'done'") == [(2,)]


def test_work_whose_row_is_lost_goes_on_and_finishes_nothing(bench: RowBench, db: RowClient) -> None:
    add_jobs(bench, 1)
    with pytest.raises(LeaseLostError) as lost:
        with db.rows("jobs", max_hold=0.2).take() as lease:
            assert lease.wait_lost(PATIENCE) is LossReason.EXPIRED
            with closing(sqlite3.connect(bench.url.partition("///")[2])) as connection, pytest.raises(LeaseLostError):
                lease.admit(connection)
            finish(bench, lease)
    assert lost.value.reason is LossReason.EXPIRED
    assert bench.ask("SELECT state FROM jobs") == [("queued",)]


def test_closing_the_client_gives_its_rows_back(bench: RowBench) -> None:
    add_jobs(bench, 2)
    with row_client(bench.url) as db:
        one, other = db.rows("jobs").take().acquire(), db.rows("jobs").take().acquire()
    assert leased(bench) == 0
    for lease in (one, other):
        with pytest.raises(LeaseLostError):
            finish(bench, lease)


def test_a_signal_ends_a_loop_in_order(bench: RowBench, db: RowClient, jobs: LeasedRows) -> None:
    add_jobs(bench, 2)
    with db.draining_on(signal.SIGUSR1, within=PATIENCE):
        for job in jobs:
            with job as lease:
                os.kill(os.getpid(), signal.SIGUSR1)
                wait_until(lambda: db.draining)
                finish(bench, lease)
    assert bench.ask("SELECT state FROM jobs ORDER BY id") == [("done",), ("queued",)]
    assert db.status().draining


# Runs


@pytest.mark.parametrize("handle", [None, 7, "work"])
def test_what_cannot_be_called_with_a_lease_is_refused(jobs: LeasedRows, handle: Any) -> None:
    async def work(_: object) -> None: ...

    for wrong in (handle, work):
        with pytest.raises(ConfigurationError, match="handle must be a plain function"):
            jobs.run(wrong)
        with pytest.raises(ConfigurationError, match="handle must be a plain function"):
            jobs.each()(wrong)


def test_an_interrupt_of_a_run_waits_for_the_work_of_its_threads(bench: RowBench, jobs: LeasedRows) -> None:
    add_jobs(bench, 3)
    begun, interrupted = threading.Event(), threading.Event()

    def work(lease: RowLease) -> None:
        if threading.current_thread() is threading.main_thread():
            begun.wait(PATIENCE)
            interrupted.set()
            raise KeyboardInterrupt
        begun.set()
        interrupted.wait(PATIENCE)
        time.sleep(0.1)
        finish(bench, lease)

    with pytest.raises(KeyboardInterrupt):
        jobs.run(work, at_once=2)
    assert bench.ask("SELECT state, count(*) FROM jobs GROUP BY state") == [("done", 1), ("queued", 2)]
    assert leased(bench) == 0


def test_a_second_interrupt_leaves_the_threads_of_a_run_behind(bench: RowBench, jobs: LeasedRows) -> None:
    add_jobs(bench, 2)
    begun, may_end = threading.Event(), threading.Event()

    def work(_: RowLease) -> None:
        if threading.current_thread() is threading.main_thread():
            begun.wait(PATIENCE)
            threading.Timer(0.3, interrupt).start()
            raise KeyboardInterrupt
        begun.set()
        may_end.wait(PATIENCE)

    with pytest.raises(KeyboardInterrupt), handled_by(signal.default_int_handler):
        jobs.run(work, at_once=2)
    assert leased(bench) == 1
    may_end.set()
    wait_until(lambda: leased(bench) == 0, what="the work beside has ended")


def test_an_error_that_ends_one_thread_of_a_run_ends_the_others(bench: RowBench, jobs: LeasedRows) -> None:
    add_jobs(bench, 1)

    def work(_: RowLease) -> None:
        raise SystemExit(7)

    with pytest.raises(SystemExit, match="7"):
        jobs.run(work, at_once=3)
    wait_until(lambda: leased(bench) == 0)  # another thread's claim may have been under way


# Forks

FORKS = """
import os, sys, threading, time
from fencing_sdk.rows._store import RowStore
from fencing_sdk.rows.sync import row_client

claim_for, under_way, forked = RowStore._claim_for, threading.Event(), threading.Event()

async def claim_after_the_fork(*claim):
    under_way.set()
    forked.wait()
    await claim_for(*claim)

db = row_client(sys.argv[1])
jobs = db.rows("jobs", where="state = 'queued'", ttl=60)

def finish(lease):
    if sys.argv[1].startswith("sqlite"):
        import sqlite3
        connection = sqlite3.connect(sys.argv[1].partition("///")[2], timeout=10)
    else:
        import psycopg
        connection = psycopg.connect(sys.argv[1])
    with connection:
        lease.finish(connection, state="done")
    connection.close()

with db:
    lease = jobs.take().acquire()
    RowStore._claim_for = claim_after_the_fork
    beside = threading.Thread(target=lambda: jobs.take().acquire().release())
    beside.start()
    under_way.wait()
    child = os.fork()
    forked.set()
    if child == 0:
        assert not lease.held
        with jobs.take(wait=20) as own:
            assert own.row["id"] != lease.row["id"]
            finish(own)
        db.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    beside.join()
    with lease:
        finish(lease)
"""


@pytest.mark.server
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_forked_child_claims_rows_of_its_own(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Another thread's claim is under way when its parent forks."""
    with row_bench(kind, request, tmp_path) as bench:
        add_jobs(bench, 3)
        subprocess.run([sys.executable, "-c", FORKS, bench.url], check=True, timeout=PATIENCE)
        assert bench.ask("SELECT count(*) FROM jobs WHERE state = 'done'") == [(2,)]
