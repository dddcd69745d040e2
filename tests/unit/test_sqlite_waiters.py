"""Waiters of the SQLite backend: what their waiting costs, what keeps their places, and what remains of them."""

import asyncio
import sqlite3
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from fencing_sdk import connect
from fencing_sdk._values.claim import Claim, Grant, Held
from fencing_sdk._values.clock import BootClock
from fencing_sdk.backends import sqlite as _sqlite
from fencing_sdk.backends.sqlite import SqliteBackend
from fencing_sdk.backends.sqlite import waiter_rows as _queue
from fencing_sdk.backends.sqlite import waiters as _waiters
from fencing_sdk.backends.sqlite.signs_of_life import SignsOfLife

POLL = 0.05
LIMIT = 20.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "locks.db"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life twenty times a second."""
    monkeypatch.setattr(_waiters, "LINE_POLL", POLL)
    monkeypatch.setattr(_queue, "_TTL", int(3 * POLL * 1_000_000))


@pytest.fixture
def signs(path: Path) -> Iterator[SignsOfLife]:
    made = SignsOfLife(path)
    yield made
    made.close()


async def later_sign(signs: SignsOfLife, slot: int = 0) -> int:
    """Wait for the next sign in *slot*."""
    before = signs.seen(slot)
    async with asyncio.timeout(LIMIT):
        while signs.seen(slot) == before:  # noqa: ASYNC110  (another thread writes it)
            await asyncio.sleep(POLL / 10)
    return signs.seen(slot)


# What it costs.


@pytest.mark.usefixtures("quick")
async def test_twenty_waiters_of_two_clients_write_nothing_into_the_database(path: Path, signs: SignsOfLife):
    """Each commit would take the write lock that renewals need, and one of them in so many an fsync."""
    log = path.with_name("locks.db-wal")
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(connect(f"sqlite:///{path}")) for _ in range(2)]
        lease = await first.lock("a", ttl=60).acquire()
        waiting = [asyncio.create_task(locks.lock("a", ttl=60).acquire()) for locks in (first, second) * 10]
        async with asyncio.timeout(LIMIT):
            while _count(path) < len(waiting):  # noqa: ASYNC110  (other threads write them)
                await asyncio.sleep(0.01)
            while not first._backend._losses._listening:  # noqa: ASYNC110  (a holder's client writes that once)
                await asyncio.sleep(0.01)
        before = log.read_bytes()
        for _ in range(5):
            await later_sign(signs, 0)
            await later_sign(signs, 1)
        assert log.read_bytes() == before
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        await lease.release()


def _count(path: Path) -> int:
    connection = sqlite3.connect(path)
    try:
        return int(connection.execute("SELECT count(*) FROM fencing_waiter").fetchone()[0])
    finally:
        connection.close()


# What keeps a place.


@pytest.mark.usefixtures("quick")
async def test_a_backend_keeps_the_places_of_its_waiters_without_a_try_of_theirs(
    path: Path, signs: SignsOfLife, monkeypatch: pytest.MonkeyPatch
):
    """
    One sign for all of them, in one slot, however many they are.

    The clock jumps ahead, and so the test waits for no ttl: a place without a sign after the jump is lost.
    """
    ahead = 0.0

    class JumpingClock(BootClock):
        def now(self) -> float:
            return super().now() + ahead

    monkeypatch.setattr(_sqlite, "BootClock", JumpingClock)
    monkeypatch.setattr(_queue, "_TTL", 30 * _queue.SECOND)
    backend = SqliteBackend(path)
    holders = [Claim(name, 600.0) for name in "ab"]
    for holder in holders:
        await backend.acquire(holder)
    async with backend.queue(Claim("a", 60.0)), backend.queue(Claim("b", 60.0)):
        ahead = 60.0
        for _ in range(3):  # the first one may have been on its way
            await later_sign(signs)
        for holder in holders:
            await backend.release(holder)
            assert isinstance(await backend.acquire(Claim(holder.name, 60.0)), Held)
        assert signs.seen(1) == 0
    await backend.aclose()


@pytest.mark.usefixtures("quick")
async def test_a_loop_that_hangs_loses_its_place_and_stands_at_the_end_afterwards(path: Path):
    backend = SqliteBackend(path)
    newcomer, late = Claim("a", 60.0), Claim("a", 60.0)

    async def overtake() -> object:
        other = SqliteBackend(path)
        try:
            while isinstance(outcome := await other.acquire(newcomer), Held):  # noqa: ASYNC110
                await asyncio.sleep(POLL)
            return outcome
        finally:
            await other.aclose()

    async with backend.queue(late) as turn, asyncio.timeout(LIMIT):
        with ThreadPoolExecutor(1) as aside:
            assert isinstance(aside.submit(asyncio.run, overtake()).result(LIMIT), Grant)  # which blocks this loop
        await turn.wait()
        assert isinstance(await backend.acquire(late), Held)
        await backend.release(newcomer)
        while not isinstance(await backend.acquire(late), Grant):
            await turn.wait()
    await backend.aclose()


@pytest.mark.usefixtures("quick")
async def test_a_fault_of_the_file_is_told_by_the_next_try_and_the_waiter_goes_on(path: Path, signs: SignsOfLife):
    backend = SqliteBackend(path)
    holder, waiter = Claim("a", 60.0), Claim("a", 60.0)
    await backend.acquire(holder)
    async with backend.queue(waiter) as turn, asyncio.timeout(LIMIT):
        marks = path.with_name("locks.db-waiters")
        marks.unlink()
        marks.mkdir()
        await turn.wait()
        marks.rmdir()
        await later_sign(signs)
        await backend.release(holder)
        while not isinstance(await backend.acquire(waiter), Grant):
            await turn.wait()
    await backend.aclose()


# What remains.


@pytest.mark.usefixtures("quick")
async def test_nothing_goes_on_when_nobody_waits_any_more(path: Path, signs: SignsOfLife):
    backend = SqliteBackend(path)
    for _ in range(2):
        async with backend.queue(Claim("a", 60.0)):
            await later_sign(signs)
        last = signs.seen(0)
        assert backend._waiters is not None
        assert backend._waiters._timer is backend._waiters._attending is None
        await asyncio.sleep(2 * POLL)
        assert signs.seen(0) == last
    await backend.aclose()


async def test_the_file_of_the_signs_goes_with_the_last_client_that_nobody_waits_for(path: Path):
    marks = path.with_name("locks.db-waiters")
    first, second = SqliteBackend(path), SqliteBackend(path)
    assert isinstance(await first.acquire(Claim("a", 60.0)), Grant)
    assert not marks.exists(), "nobody has waited"
    async with second.queue(Claim("a", 60.0)):
        await first.aclose()
        assert marks.exists()
    await second.aclose()
    assert list(path.parent.iterdir()) == [path]


async def test_a_waiter_that_was_killed_leaves_the_file_to_the_next_sweep(path: Path):
    killed, other = SqliteBackend(path), SqliteBackend(path)
    stack = AsyncExitStack()
    await stack.enter_async_context(killed.queue(Claim("a", 60.0)))
    waiters, killed._waiters = killed._waiters, None
    assert waiters is not None
    waiters.close()  # as its kernel does
    await other.open()
    await other.aclose()
    assert path.with_name("locks.db-waiters").exists()
    await stack.aclose()
    await killed.aclose()
    assert list(path.parent.iterdir()) == [path]


# The file.


def test_a_sign_is_what_was_shown_last_in_its_slot(path: Path, signs: SignsOfLife):
    path.touch()
    other = SignsOfLife(path)
    assert other.seen(0) == other.seen(7) == 0
    signs.give(7, 1234)
    signs.give(0, 2**53)
    assert (other.seen(0), other.seen(3), other.seen(7), other.seen(8)) == (2**53, 0, 1234, 0)
    other.give(7, 1235)
    assert signs.seen(7) == 1235
    other.close()


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666, 0o644])
def test_who_may_use_the_database_may_use_the_signs(path: Path, signs: SignsOfLife, mode: int):
    """Whatever the umask of the one who comes first is."""
    path.touch()
    path.chmod(mode)
    signs.give(0, 1)
    assert stat.S_IMODE(path.with_name("locks.db-waiters").stat().st_mode) == mode


def test_a_file_that_was_deleted_or_replaced_is_made_again_and_found_by_all(path: Path, signs: SignsOfLife):
    path.touch()
    other = SignsOfLife(path)
    signs.give(0, 1)
    assert other.seen(0) == 1
    path.with_name("locks.db-waiters").unlink()
    assert signs.seen(0) == other.seen(0) == 0
    other.give(0, 2)
    assert signs.seen(0) == 2
    other.remove()
    other.remove()
    signs.give(0, 3)
    assert other.seen(0) == 3
    other.close()


def test_a_link_is_not_followed_and_a_linked_database_has_its_signs_beside_itself(tmp_path: Path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    database = tmp_path / "locks.db"
    database.touch()
    (tmp_path / "locks.db-waiters").symlink_to(victim)
    signs = SignsOfLife(database)
    with pytest.raises(OSError, match="symbolic links"):
        signs.give(0, 1)
    assert victim.read_bytes() == b"precious"
    (tmp_path / "locks.db-waiters").unlink()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "alias.db").symlink_to(database)
    alias = SignsOfLife(tmp_path / "folder" / "alias.db")
    alias.give(0, 1)
    assert signs.seen(0) == 1
    alias.close()
    signs.close()


async def test_a_file_of_an_earlier_version_is_taken_over(path: Path):
    """Its waiters stand in line again; locks and tokens are as they were."""
    backend = SqliteBackend(path, tokens="counter")
    held = Claim("a", 60.0)
    await backend.acquire(held)
    await backend.aclose()
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE fencing_waiter")
        connection.execute("CREATE TABLE fencing_waiter (number INTEGER PRIMARY KEY, name TEXT, seen INTEGER NOT NULL)")
    connection.close()
    async with backend.queue(Claim("a", 60.0)):
        assert isinstance(await backend.acquire(Claim("a", 60.0)), Held)
    assert await backend.acquire(Claim("b", 60.0)) == Grant(2)
    await backend.aclose()
