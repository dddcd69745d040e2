"""The file and the one thread that touches it: which file is meant, in which order it works, and SQLite's errors."""

from __future__ import annotations

import asyncio
import gc
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from inside import BootClock, wall_micros

from fencing_sdk import ConfigurationError, LossReason, connect
from fencing_sdk.abc import Busy, Claim, Gone, Place
from fencing_sdk.backends import from_url
from fencing_sdk.backends._shared.tokens import token_source
from fencing_sdk.backends.sqlite import SqliteBackend
from fencing_sdk.backends.sqlite import file as _file
from fencing_sdk.backends.sqlite.file import LockFile
from fencing_sdk.backends.sqlite.lines import LineFile
from fencing_sdk.backends.sqlite.thread import SqlThread
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError, LeaseLostError

# Which file is meant, which files are refused, and what becomes of SQLite's errors.


# The URL.


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///locks.db", "locks.db"),
        ("sqlite:///var/locks.db", "var/locks.db"),
        ("sqlite:////var/lib/locks.db", "/var/lib/locks.db"),
        ("sqlite:///a%20b%3F%23%25.db?tokens=counter", "a b?#%.db"),
        ("sqlite:///caf%C3%A9.db", "café.db"),
        ("sqlite:///~/locks.db", "~/locks.db"),
        ("sqlite:///file:x.db", "file:x.db"),
    ],
)
def test_three_slashes_are_relative_and_four_absolute(url: str, path: str):
    backend = from_url(url)
    assert isinstance(backend, SqliteBackend)
    assert backend._path == path


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite:///?tokens=counter"])
def test_a_url_without_a_file_is_refused_and_the_error_names_the_way_out(url: str):
    with pytest.raises(ConfigurationError, match="memory://"):
        connect(url)


@pytest.mark.parametrize("url", ["sqlite://locks.db", "sqlite://user:hunter2@host/locks.db", "sqlite:///hunter2#b.db"])
def test_a_url_that_names_a_host_or_a_fragment_is_refused(url: str):
    with pytest.raises(ConfigurationError, match=r"sqlite:///relative\.db|%23") as refused:
        connect(url)
    assert "hunter2" not in str(refused.value)


def test_nothing_is_touched_when_built(tmp_path: Path):
    SqliteBackend(tmp_path / "locks.db")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("synchronous", "level"), [("full", 2), ("normal", 1)])
async def test_a_grant_waits_for_the_disk_and_a_keep_does_not(
    tmp_path: Path, synchronous: str, level: int, monkeypatch: pytest.MonkeyPatch
):
    levels: dict[str, set[int]] = {}
    begin, call = LockFile._begin, ""

    def note(file: LockFile, setting: str) -> sqlite3.Cursor:
        begun = begin(file, setting)
        levels.setdefault(call, set()).add(file.execute("PRAGMA synchronous").fetchone()[0])
        return begun

    monkeypatch.setattr(LockFile, "_begin", note)
    backend = SqliteBackend(tmp_path / "locks.db", synchronous=synchronous)
    await backend.open()
    holder, waiter = Claim("a", 60.0), Claim("a", 60.0)
    for call, ask in {  # noqa: B007  (it is read in `note`)
        "grant": lambda: backend.draw(holder),
        "wait": lambda: backend.draw(waiter),
        "keep": lambda: backend.keep([(holder, 0), (waiter, 0)]),
        "leave": lambda: backend.give_back(waiter),
        "release": lambda: backend.give_back(holder),
    }.items():
        await ask()
    await backend.aclose()
    assert levels["grant"] == {level}
    assert levels["wait"] == levels["keep"] == levels["leave"] == levels["release"] == {1}


async def test_a_relative_path_is_not_moved_by_a_change_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    backend = from_url("sqlite:///locks.db")
    monkeypatch.chdir(tmp_path / "first")
    await backend.draw(Claim("a", 60.0))
    await backend.aclose()
    monkeypatch.chdir(tmp_path / "second")
    assert await backend.tickets(["a"]) != [[]]
    await backend.aclose()
    assert list((tmp_path / "second").iterdir()) == []


# Files that cannot be used.


def missing_folder(folder: Path) -> Path:
    return folder / "missing" / "locks.db"


def a_folder(folder: Path) -> Path:
    return folder


def a_socket(folder: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "socket"))
    return folder / "socket"


def a_text(folder: Path) -> Path:
    (folder / "notes.txt").write_text("dear diary, " * 1000)
    return folder / "notes.txt"


def a_broken_database(folder: Path) -> Path:
    path = folder / "broken.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE fencing_line (x)")
    connection.close()
    header = path.read_bytes()[:100]
    path.write_bytes(header + b"\xff" * 8092)
    return path


def tables_of_another_version(folder: Path) -> Path:
    path = folder / "other.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE fencing_line (name TEXT, something_else TEXT)")
    connection.execute("CREATE TABLE fencing_token (something_else TEXT)")
    connection.close()
    return path


UNUSABLE: dict[Callable[[Path], Path], str] = {
    missing_folder: "does not exist; create it",
    a_folder: "is not a file",
    a_socket: "is not a file",
    a_text: "not an SQLite database",
    a_broken_database: "damaged",
    tables_of_another_version: "not those of this version",
}


@pytest.mark.parametrize("make", UNUSABLE, ids=lambda make: make.__name__)
async def test_a_file_that_cannot_be_used_is_refused_when_opened(tmp_path: Path, make: Callable[[Path], Path]):
    path = make(tmp_path)
    before = path.read_bytes() if path.is_file() else None
    backend = SqliteBackend(path)
    for _ in range(2):
        with pytest.raises(BackendRefusedError, match=UNUSABLE[make]) as refused:
            await backend.open()
        assert refused.value.operation == "open"
        assert str(tmp_path) in str(refused.value)
    with pytest.raises(BackendRefusedError):
        await backend.draw(Claim("a", 60.0))
    await backend.aclose()
    if make in {a_text, a_broken_database}:
        assert path.read_bytes() == before


@pytest.fixture
def world_readable() -> Iterator[Path]:
    """A folder that every user may enter: the one of pytest belongs to its user alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@pytest.mark.parametrize("read_only", ["the file", "the folder"])
def test_a_read_only_file_is_refused_when_opened(world_readable: Path, read_only: str):
    path = world_readable / "locks.db"
    asyncio.run(_opened_once(path))
    path.chmod(0o444 if read_only == "the file" else 0o666)
    world_readable.chmod(0o777 if read_only == "the file" else 0o555)
    code = f"""
import asyncio, os
from fencing_sdk.backends.sqlite import SqliteBackend
from fencing_sdk.errors import BackendRefusedError
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
async def main():
    try:
        await SqliteBackend({str(path)!r}).open()
    except BackendRefusedError as error:
        print(error)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, cwd="/")
    assert "no permission" in done.stdout, done.stdout + done.stderr


async def _opened_once(path: Path) -> None:
    backend = SqliteBackend(path)
    await backend.open()
    await backend.aclose()


async def test_a_file_that_stays_locked_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_file, "PATIENCE", 0.2)
    hog = sqlite3.connect(tmp_path / "locks.db", isolation_level=None)
    hog.execute("BEGIN EXCLUSIVE")
    backend = SqliteBackend(tmp_path / "locks.db")
    with pytest.raises(BackendUnavailableError, match="write lock") as unavailable:
        await backend.open()
    assert isinstance(unavailable.value.__cause__, sqlite3.OperationalError)
    hog.close()
    await backend.open()
    await backend.aclose()


async def test_a_lease_that_is_lost_to_a_long_writer_tells_of_the_writer(tmp_path: Path):
    """The engine's limit ends before the file's patience, and alone would say that there was no answer."""
    hog = sqlite3.connect(tmp_path / "locks.db", isolation_level=None)
    async with connect(f"sqlite:///{tmp_path}/locks.db") as locks:
        for _ in range(10):
            lease = await locks.lock("a", ttl=3).acquire()
            hog.execute("BEGIN IMMEDIATE")
            if await lease.wait_lost() is LossReason.EXPIRED:
                break
            hog.execute("ROLLBACK")  # a loop that is late says that instead
        with pytest.raises(
            LeaseLostError, match=r"no answer within .* s: .*another process keeps the file's write lock"
        ):
            lease.check()
        with pytest.raises(BackendUnavailableError, match="another process keeps the file's write lock"):
            await locks.lock("b", ttl=1, wait=0).acquire()
        hog.close()


async def test_a_full_disk_is_unavailable_until_there_is_room(tmp_path: Path):
    backend = SqliteBackend(tmp_path / "locks.db")

    def limit(pages: int) -> None:
        backend._sql.submit(lambda rows: rows.file.execute(f"PRAGMA max_page_count = {pages:d}").fetchone())

    await backend.open()
    limit(1)
    with pytest.raises(BackendUnavailableError, match="disk is full"):
        for number in range(1000):
            await backend.draw(Claim(f"report/{number}", 60.0, label="x" * 1000))
    assert (await backend.draw(Claim("a", 60.0))).token is not None
    await backend.aclose()


async def test_what_cannot_be_stored_is_refused_and_harms_no_other(tmp_path: Path):
    claim = Claim("\ud800", 60.0)
    backend = SqliteBackend(tmp_path / "locks.db")
    with pytest.raises(BackendRefusedError, match="cannot be stored") as refused:
        await backend.draw(claim)
    assert claim.owner not in f"{refused.value!r}{refused.value}"
    assert (await backend.draw(Claim("a", 60.0))).token is not None
    await backend.aclose()


# The file moves.


async def test_a_file_that_is_deleted_while_it_is_used_is_made_again_by_all(tmp_path: Path):
    first, second = (SqliteBackend(tmp_path / "locks.db") for _ in range(2))
    lost = Claim("a", 60.0)
    before = await first.draw(lost)
    await second.open()
    _delete_everything_in(tmp_path)
    found = Claim("a", 60.0)
    after = await second.draw(found)
    assert after.token > before.token
    assert await first.keep([(lost, 0)]) == [Gone(taken=True)]
    assert isinstance(await first.draw(Claim("a", 60.0), only_if_it_holds=True), Busy)
    await first.aclose()
    assert isinstance((await second.keep([(found, 0)]))[0], Place), "closing the old file harmed the new one"
    await second.aclose()


def _delete_everything_in(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


async def test_tables_of_others_in_the_same_file_are_left_alone(tmp_path: Path):
    path = tmp_path / "app.db"
    app = sqlite3.connect(path)
    with app:
        app.execute("CREATE TABLE lock (name)")
        app.execute("INSERT INTO lock VALUES ('mine')")
    backend = SqliteBackend(path)
    assert (await backend.draw(Claim("a", 60.0))).token is not None
    await backend.aclose()
    assert app.execute("SELECT name FROM lock").fetchall() == [("mine",)]
    app.close()


# The event loop.


@pytest.mark.every_loop
@pytest.mark.usefixtures("no_blocking_calls")
async def test_the_event_loop_never_waits_for_the_disk(tmp_path: Path):
    async with connect(f"sqlite:///{tmp_path}/locks.db") as locks:
        async with locks.lock("a") as lease:
            await lease.renew()
            assert await locks.inspect("a") is not None
            waiting = asyncio.create_task(locks.lock("a").acquire())
            await asyncio.sleep(0.05)
        await (await waiting).release()


# The thread that touches SQLite: what is done, in which order, and what becomes of its connection.


LIMIT = 20.0


class Opening:
    """Opens the file and counts how often."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self.threads: list[str] = []

    def __call__(self) -> LineFile:
        self.count += 1
        self.threads.append(threading.current_thread().name)
        file = LockFile(self.path, synchronous="normal", clock=BootClock())
        return LineFile(file, token_source("counter", wall_micros), "boot")


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

    def work(_: LineFile) -> None:
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


def test_a_failure_closes_the_connection_and_the_next_work_gets_a_new_one(opening: Opening, sql: SqlThread):
    seen: list[LineFile] = []

    def fail(rows: LineFile) -> None:
        seen.append(rows)
        with rows.file.transaction():
            rows.file.execute("UPDATE fencing_token SET last = 99")
            raise sqlite3.OperationalError("disk I/O error")

    with pytest.raises(sqlite3.OperationalError):
        sql.submit(fail).result(LIMIT)
    last = sql.submit(lambda rows: rows.file.execute("SELECT last FROM fencing_token").fetchone()).result(LIMIT)
    assert last == (0,), "a transaction that failed left something behind"
    assert opening.count == 2
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        sql.submit(lambda _: seen[0].sweep()).result(LIMIT)


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


async def test_a_draw_that_was_given_up_while_the_thread_was_busy_is_not_made(tmp_path: Path):
    backend = SqliteBackend(tmp_path / "locks.db")
    with busy(backend._sql):
        drawing = asyncio.create_task(backend.draw(Claim("a", 60.0)))
        await asyncio.sleep(0)
        drawing.cancel()
        await asyncio.wait((drawing,))
    assert await backend.tickets(["a"]) == [[]]
    await backend.aclose()
