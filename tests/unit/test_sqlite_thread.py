"""The thread that touches SQLite: what is done, in which order, and what becomes of its connection."""

import asyncio
import gc
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest

from fencing_sdk._values.claim import Claim, Grant
from fencing_sdk._values.clock import BootClock, wall_micros
from fencing_sdk.backends._shared.lock_table import token_source
from fencing_sdk.backends.sqlite import SqliteBackend
from fencing_sdk.backends.sqlite.connection.file import LockFile
from fencing_sdk.backends.sqlite.connection.thread import SqlThread
from fencing_sdk.backends.sqlite.share_rows import ShareRows
from fencing_sdk.backends.sqlite.signs_of_life import SignsOfLife

LIMIT = 20.0


class Opening:
    """Opens the file and counts how often."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self.threads: list[str] = []

    def __call__(self) -> ShareRows:
        self.count += 1
        self.threads.append(threading.current_thread().name)
        file = LockFile(self.path, synchronous="normal", clock=BootClock())
        return ShareRows(
            file,
            SignsOfLife(self.path),
            next_token=token_source("counter", wall_micros),
            boot="boot",
            network="network",
        )


@pytest.fixture
def opening(tmp_path: Path) -> Opening:
    return Opening(tmp_path / "locks.db")


@pytest.fixture
def sql(opening: Opening) -> Iterator[SqlThread]:
    thread = SqlThread(opening)
    yield thread
    closed = thread.close()
    if closed is not None:
        closed.result(LIMIT)


@contextmanager
def busy(sql: SqlThread) -> Iterator[None]:
    """Keep the thread in the middle of some work."""
    begun, go_on = threading.Event(), threading.Event()

    def work(_: ShareRows) -> None:
        begun.set()
        assert go_on.wait(LIMIT)

    working = sql.submit(work)
    assert begun.wait(LIMIT)
    try:
        yield
    finally:
        go_on.set()
        working.result(LIMIT)


def workers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "fencing-sqlite"}


def test_nothing_is_opened_before_the_first_work(opening: Opening, sql: SqlThread):
    assert opening.count == 0
    sql.submit(lambda _: None).result(LIMIT)
    assert (opening.count, opening.threads) == (1, ["fencing-sqlite"])


def test_work_is_done_in_order_but_renewals_overtake(sql: SqlThread):
    done: list[str] = []
    with busy(sql):
        for word in ("first", "second"):
            last = sql.submit(lambda _, word=word: done.append(word))
        for word in ("renewal", "another renewal"):
            sql.submit(lambda _, word=word: done.append(word), urgent=True)
    last.result(LIMIT)
    assert done == ["renewal", "another renewal", "first", "second"]


def test_what_was_cancelled_before_it_began_is_not_done(sql: SqlThread):
    done: list[str] = []
    with busy(sql):
        assert sql.submit(lambda _: done.append("acquire")).cancel()
    sql.submit(lambda _: done.append("next")).result(LIMIT)
    assert done == ["next"]


def test_what_is_to_be_done_surely_is_done_although_nobody_waits(sql: SqlThread):
    done: list[str] = []
    with busy(sql):
        assert not sql.submit(lambda _: done.append("leave"), surely=True).cancel()
    sql.submit(lambda _: done.append("next")).result(LIMIT)
    assert done == ["leave", "next"]


def test_a_failure_closes_the_connection_and_the_next_work_gets_a_new_one(opening: Opening, sql: SqlThread):
    seen: list[ShareRows] = []

    def fail(rows: ShareRows) -> None:
        seen.append(rows)
        with rows._file.transaction():
            rows._file.execute("UPDATE fencing_token SET last = 99")
            raise sqlite3.OperationalError("disk I/O error")

    with pytest.raises(sqlite3.OperationalError):
        sql.submit(fail).result(LIMIT)
    last = sql.submit(lambda rows: rows._file.execute("SELECT last FROM fencing_token").fetchone()).result(LIMIT)
    assert last == (0,), "a transaction that failed left something behind"
    assert opening.count == 2
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        sql.submit(lambda _: seen[0].inspect("a")).result(LIMIT)


def test_a_failure_to_open_is_told_and_tried_again(tmp_path: Path):
    opening = Opening(tmp_path / "missing" / "locks.db")
    sql = SqlThread(opening)
    for _ in range(2):
        with pytest.raises(Exception, match="does not exist"):
            sql.submit(lambda _: None).result(LIMIT)
    opening.path.parent.mkdir()
    sql.submit(lambda _: None).result(LIMIT)
    closed = sql.close()
    assert closed is not None
    closed.result(LIMIT)


def test_closing_waits_for_what_was_asked_before(opening: Opening, sql: SqlThread):
    done: list[str] = []
    with busy(sql):
        sql.submit(lambda _: done.append("asked before"))
        closed = sql.close()
        assert closed is not None
        assert not closed.done()
    closed.result(LIMIT)
    assert done == ["asked before"]
    assert sql.close() is None
    assert not opening.path.with_name("locks.db-wal").exists(), "the last one to close cleans up"


def test_work_that_comes_after_closing_opens_again(opening: Opening, sql: SqlThread):
    for count in (1, 2):
        sql.submit(lambda _: None).result(LIMIT)
        assert opening.count == count
        closed = sql.close()
        assert closed is not None
        closed.result(LIMIT)


def test_a_backend_that_is_dropped_unclosed_ends_its_thread(opening: Opening):
    before = workers()
    sql = SqlThread(opening)
    sql.submit(lambda _: None).result(LIMIT)
    (thread,) = workers() - before
    del sql
    gc.collect()
    thread.join(LIMIT)
    assert not thread.is_alive()


async def test_a_closing_that_nobody_waits_for_still_closes(tmp_path: Path):
    before = workers()
    backend = SqliteBackend(tmp_path / "locks.db")
    await backend.open()
    with busy(backend._sql):
        closing = asyncio.ensure_future(backend.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait((closing,))
    await backend.aclose()
    while workers() - before:  # noqa: ASYNC110  (a thread ends by itself)
        await asyncio.sleep(0.01)
    assert not (tmp_path / "locks.db-wal").exists()


def test_a_disk_that_hangs_does_not_keep_the_process_from_ending(tmp_path: Path):
    code = f"""
import asyncio, threading
from fencing_sdk.backends.sqlite import SqliteBackend
async def main():
    backend = SqliteBackend({str(tmp_path / "locks.db")!r})
    begun = threading.Event()
    backend._sql.submit(lambda _: (begun.set(), threading.Event().wait()))
    begun.wait()
    print("hangs", flush=True)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hangs\n", "")


async def test_a_waiter_that_is_cancelled_twice_while_the_thread_is_busy_still_leaves_the_line(tmp_path: Path):
    backend = SqliteBackend(tmp_path / "locks.db")
    standing = asyncio.Event()

    async def stand() -> None:
        async with backend.queue(Claim("a", 60.0)) as turn:
            standing.set()
            await turn.wait()

    waiter = asyncio.create_task(stand())
    await standing.wait()
    with busy(backend._sql):
        for _ in range(2):
            waiter.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert waiter.cancelled()
    assert isinstance(await backend.acquire(Claim("a", 60.0)), Grant), "it stands in the line still"
    await backend.aclose()


async def test_a_release_that_was_given_up_while_the_thread_was_busy_still_happens(tmp_path: Path):
    backend = SqliteBackend(tmp_path / "locks.db")
    claim = Claim("a", 60.0)
    await backend.acquire(claim)
    with busy(backend._sql):
        releasing = asyncio.create_task(backend.release(claim))
        await asyncio.sleep(0)
        releasing.cancel()
        await asyncio.wait((releasing,))
    assert await backend.inspect("a") is None
    await backend.aclose()


def test_an_answer_may_be_waited_for_from_outside(sql: SqlThread):
    answer: Future[int] = sql.submit(lambda _: 42)
    assert answer.result(LIMIT) == 42
