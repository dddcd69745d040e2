"""Waiters and holders of a lock file, and the datagrams that reach them."""

from __future__ import annotations

import asyncio
import socket
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest
from inside import BootClock
from patience import until
from revocation_notices_suite import heard, holding, listening, shorten_the_moment
from stays import LONG, opened, staying
from store_bench import SqliteBench

from fencing_sdk import LeaseLostError, connect
from fencing_sdk.abc import Busy, Claim, Grant
from fencing_sdk.backends._shared import rules as _rules
from fencing_sdk.backends._shared.row_backend import WaiterAddress, random_text
from fencing_sdk.backends.sqlite import SqliteBackend, store
from fencing_sdk.backends.sqlite import store as _store
from fencing_sdk.backends.sqlite.rows import OpenFile
from fencing_sdk.backends.sqlite.waiter_signs import SignsOfLife, WakeupSocket, open_wakeup_socket, send_wakeup
from fencing_sdk.testing.promises.under_test import in_line

# Waiters of the SQLite backend: what their waiting costs, what keeps their places, and what remains of them.


POLL = 0.05
LIMIT = 20.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "locks.db"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life twenty times a second."""
    monkeypatch.setattr(_rules, "LINE_POLL", POLL)
    monkeypatch.setattr(_rules, "LINE_TTL", 3 * POLL)


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

    monkeypatch.setattr(_store, "BootClock", JumpingClock)
    monkeypatch.setattr(_rules, "LINE_TTL", 30.0)
    backend = SqliteBackend(path)
    holders = [Claim(name, 600.0) for name in "ab"]
    for holder in holders:
        await backend.acquire(holder)
    async with in_line(backend, Claim("a", 60.0)), in_line(backend, Claim("b", 60.0)):
        ahead = 60.0
        for _ in range(3):  # the first one may have been on its way
            await later_sign(signs)
        for holder in holders:
            await backend.release(holder)
            assert isinstance(await backend.acquire(Claim(holder.name, 60.0)), Busy)
        assert signs.seen(1) == 0
    await backend.aclose()


@pytest.mark.usefixtures("quick")
async def test_a_loop_that_hangs_loses_its_place_and_stands_at_the_end_afterwards(path: Path):
    backend = SqliteBackend(path)
    newcomer, late = Claim("a", 60.0), Claim("a", 60.0)

    async def overtake() -> object:
        other = SqliteBackend(path)
        try:
            while isinstance(outcome := await other.acquire(newcomer), Busy):  # noqa: ASYNC110
                await asyncio.sleep(POLL)
            return outcome
        finally:
            await other.aclose()

    async with in_line(backend, late) as turn, asyncio.timeout(LIMIT):
        with ThreadPoolExecutor(1) as aside:
            assert isinstance(aside.submit(asyncio.run, overtake()).result(LIMIT), Grant)  # which blocks this loop
        await turn.wait()
        assert isinstance(await backend.acquire(late), Busy)
        await backend.release(newcomer)
        while not isinstance(await backend.acquire(late), Grant):
            await turn.wait()
    await backend.aclose()


async def test_a_waiter_that_leaves_before_its_sign_is_given_stays_out_of_the_line(path: Path):
    """Its group goes on giving signs, so that a row without a waiter would be the head for as long as others wait."""
    backend, leaving = SqliteBackend(path), Claim("a", 60.0)
    async with AsyncExitStack() as line:
        await line.enter_async_context(in_line(backend, Claim("b", 60.0)))
        await line.enter_async_context(in_line(backend, leaving))
        waiters = backend._waiters
        assert waiters is not None
        waiters._give_signs()
        waiters.remove(waiters.table.find(leaving))
        step = ("a", partial(_rules.leave, owner=leaving.owner))
        backend._store.sql.submit(lambda file: file.run([step])).result(LIMIT)
        await waiters._attending
        assert _count(path) == 1
    await backend.aclose()


@pytest.mark.usefixtures("quick")
async def test_a_fault_of_the_file_is_told_by_the_next_try_and_the_waiter_goes_on(path: Path, signs: SignsOfLife):
    backend = SqliteBackend(path)
    holder, waiter = Claim("a", 60.0), Claim("a", 60.0)
    await backend.acquire(holder)
    async with in_line(backend, waiter) as turn, asyncio.timeout(LIMIT):
        marks = path.with_name("locks.db-waiters")
        backend._store.sql.submit(lambda _: (marks.unlink(), marks.mkdir())).result(LIMIT)  # no sign comes between
        await turn.wait()
        marks.rmdir()
        await later_sign(signs)
        await backend.release(holder)
        while not isinstance(await backend.acquire(waiter), Grant):
            await turn.wait()
    await backend.aclose()


# What remains.


async def test_the_file_of_the_signs_goes_with_the_last_client_that_nobody_waits_for(path: Path):
    marks = path.with_name("locks.db-waiters")
    first, second = SqliteBackend(path), SqliteBackend(path)
    assert isinstance(await first.acquire(Claim("a", 60.0)), Grant)
    assert not marks.exists(), "nobody has waited"
    async with in_line(second, Claim("a", 60.0)):
        await first.aclose()
        assert marks.exists()
    await second.aclose()
    assert list(path.parent.iterdir()) == [path]


async def test_a_waiter_that_was_killed_leaves_the_file_to_the_next_sweep(path: Path):
    killed, other = SqliteBackend(path), SqliteBackend(path)
    stack = AsyncExitStack()
    await stack.enter_async_context(in_line(killed, Claim("a", 60.0)))
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


# The wake-up socket: a datagram with the right ticket wakes, everything else does nothing.


class Mailbox(dict[str, asyncio.Event]):
    """The tickets that wake, and the events that they set."""

    def __call__(self, ticket: str) -> None:
        if ticket in self:
            self[ticket].set()

    def expect(self, ticket: str) -> asyncio.Event:
        return self.setdefault(ticket, asyncio.Event())


@pytest.fixture
def mailbox() -> Mailbox:
    return Mailbox()


@pytest.fixture
async def wakeup_socket(mailbox: Mailbox):
    made = open_wakeup_socket(mailbox)
    assert made is not None
    yield made
    made.close()


async def settled(wakeup_socket: WakeupSocket, mailbox: Mailbox) -> None:
    """Wait until everything that was sent to the socket has been read."""
    last = WaiterAddress(wakeup_socket.name)
    woken = mailbox.expect(last.ticket)
    assert send_wakeup(last)
    async with asyncio.timeout(10):
        await woken.wait()


@pytest.mark.every_loop
async def test_strangers_and_late_tickets_wake_no_waiter(wakeup_socket: WakeupSocket, mailbox: Mailbox):
    woken, late = mailbox.expect("1"), WaiterAddress(wakeup_socket.name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for noise in (b"", b"2", b"\xff\x00", b"x" * 5000):
            stranger.sendto(noise, b"\0fencing-sdk/" + wakeup_socket.name.encode())
    assert send_wakeup(late)
    await settled(wakeup_socket, mailbox)
    assert not woken.is_set()


@pytest.mark.every_loop
async def test_a_socket_that_is_full_is_not_taken_for_gone():
    full, name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), random_text()
    with full:
        full.bind(b"\0fencing-sdk/" + name.encode())
        assert all(send_wakeup(WaiterAddress(name)) for _ in range(2000))


@pytest.mark.every_loop
async def test_tickets_cannot_be_guessed(wakeup_socket: WakeupSocket):
    tickets = {WaiterAddress(wakeup_socket.name).ticket for _ in range(100)}
    assert len(tickets) == 100
    assert all(len(ticket) == 32 for ticket in tickets)


@pytest.mark.every_loop
async def test_without_such_sockets_waiters_stand_in_line_and_learn_from_the_timer(
    tmp_path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(_rules, "LINE_POLL", 0.05)
    backend = SqliteBackend(tmp_path / "locks.db")
    holder, waiter = Claim("a", 60.0), Claim("a", 60.0)
    await backend.acquire(holder)
    async with in_line(backend, waiter) as turn, asyncio.timeout(20):
        assert isinstance(await backend.acquire(waiter), Busy)
        await backend.release(holder)
        assert isinstance(await backend.acquire(Claim("a", 60.0)), Busy), "the line is kept without sockets too"
        await turn.wait()
        assert not isinstance(await backend.acquire(waiter), Busy)
    await backend.aclose()


# An operator takes a lock away in a file: which clients are sent a datagram, and which are not.


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SqliteBench:
    shorten_the_moment(monkeypatch)
    return SqliteBench(tmp_path / "locks.db")


def sockets(bench: SqliteBench) -> set[str]:
    return {name for (name,) in bench.ask("SELECT socket FROM fencing_listener")}


async def test_the_socket_of_a_client_that_was_killed_is_forgotten(bench):
    async with holding(bench.url, "a") as (locks, (stay,)):
        bench.ask("INSERT INTO fencing_listener SELECT 'gone', boot, network FROM fencing_listener")
        assert len(sockets(bench)) == 2
        assert await locks.revoke("a", token=stay.token, reason="hangs")
        await heard(stay)
        await until(lambda: "gone" not in sockets(bench))
        assert len(sockets(bench)) == 1


async def test_a_socket_of_an_earlier_boot_is_forgotten_when_the_file_is_opened(bench):
    async with holding(bench.url, "a"):
        bench.ask("INSERT INTO fencing_listener SELECT 'gone', 'earlier', network FROM fencing_listener")
        async with connect(bench.url):
            assert len(sockets(bench)) == 1
            assert "gone" not in sockets(bench)


async def test_an_operator_in_another_network_namespace_reaches_no_socket_and_the_next_renewal_tells(
    bench, monkeypatch
):
    async with holding(bench.url, "a", "b") as (locks, (stay, other)):
        monkeypatch.setattr(store, "network_identity", lambda: "net:[elsewhere]")
        async with connect(bench.url) as operator:
            assert await operator.revoke("a", token=stay.token, reason="hangs")
        assert await locks.revoke("b", token=other.token, reason="hangs")
        await heard(other)  # messages arrive in order, and there was none before
        assert stay.lease.held
        with pytest.raises(LeaseLostError):
            await stay.lease.renew()
        await heard(stay)
        assert len(sockets(bench)) == 1


async def test_without_such_sockets_the_next_renewal_tells(bench, monkeypatch):
    monkeypatch.setattr(store, "open_wakeup_socket", lambda _: None)
    async with opened(bench.url) as (locks, _), staying(locks.lock("a", **LONG)) as stay:
        await listening(locks)
        assert await locks.revoke("a", token=stay.token, reason="hangs")
        await heard(stay)
        assert not sockets(bench)


async def test_a_revocation_that_cannot_be_announced_is_one_all_the_same(bench, monkeypatch):
    def fail(rows, message):
        raise OSError("disk I/O error")

    async with opened(bench.url) as (locks, _), staying(locks.lock("a", **LONG)) as stay:
        monkeypatch.setattr(OpenFile, "announce", fail)
        assert await locks.revoke("a", token=stay.token, reason="hangs")
        await heard(stay)


async def test_a_file_of_the_version_before_is_completed(bench):
    async with opened(bench.url) as (locks, _), locks.lock("a"):
        pass
    bench.ask("DROP TABLE fencing_listener")
    async with holding(bench.url, "a") as (locks, (stay,)):
        assert await locks.revoke("a", token=stay.token, reason="hangs")
        await heard(stay)


FORKED = """
import asyncio, os, sqlite3, sys
from fencing_sdk._values.claim import Claim
from fencing_sdk.backends._shared import losses
from fencing_sdk.backends.sqlite import SqliteBackend

losses._MOMENT = 0.01

async def hold(backend):
    await backend.acquire(Claim("a", 60))
    while not backend._losses._listening:
        await asyncio.sleep(0.01)

async def use(backend):
    await backend.acquire(Claim("b", 60))
    await backend.aclose()

backend = SqliteBackend(sys.argv[1])
backend.on_loss(print)
loop = asyncio.new_event_loop()
loop.run_until_complete(hold(backend))
if not (child := os.fork()):
    asyncio.run(use(backend))
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
with sqlite3.connect(sys.argv[1]) as file:
    assert file.execute("SELECT socket FROM fencing_listener").fetchall() == [(backend._store._hearing.name,)]
loop.run_until_complete(backend.aclose())
print("left alone")
"""


def test_a_forked_child_leaves_the_socket_of_its_parent_alone(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, str(tmp_path / "locks.db")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "left alone\n", done.stderr
