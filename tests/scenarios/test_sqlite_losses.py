"""An operator takes a lock away in a file: which clients are sent a datagram, and which are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from patience import until
from revocation_notices_suite import FAR, holding, listening, shorten_the_moment, told
from stays import LONG, opened, staying
from store_bench import SqliteBench

from fencing_sdk import LeaseLostError, connect
from fencing_sdk.backends import sqlite
from fencing_sdk.backends.sqlite import losses
from fencing_sdk.backends.sqlite.operator_rows import OperatorRows


@pytest.fixture(autouse=True)
def short(monkeypatch):
    shorten_the_moment(monkeypatch)


@pytest.fixture
def bench(tmp_path: Path) -> SqliteBench:
    return SqliteBench(tmp_path / "locks.db")


def sockets(bench: SqliteBench) -> set[str]:
    return {name for (name,) in bench.ask("SELECT socket FROM fencing_listener")}


async def test_the_socket_of_a_client_that_was_killed_is_forgotten(bench):
    async with holding(bench.url, "a") as (locks, (stay,)):
        bench.ask("INSERT INTO fencing_listener SELECT 'gone', boot, network FROM fencing_listener")
        assert len(sockets(bench)) == 2
        assert await locks.revoke("a", token=stay.token, reason="hangs")
        await told(stay)
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
        monkeypatch.setattr(sqlite, "network_identity", lambda: "net:[elsewhere]")
        async with connect(bench.url) as operator:
            assert await operator.revoke("a", token=stay.token, reason="hangs")
        assert await locks.revoke("b", token=other.token, reason="hangs")
        await told(other)  # messages arrive in order, and there was none before
        assert stay.lease.held
        with pytest.raises(LeaseLostError):
            await stay.lease.renew()
        await told(stay)
        assert len(sockets(bench)) == 1


async def test_without_such_sockets_the_next_renewal_tells(bench, monkeypatch):
    monkeypatch.setattr(losses, "open_wakeup_socket", lambda _: None)
    async with opened(bench.url) as (locks, _), staying(locks.lock("a", **LONG)) as stay:
        await listening(locks)
        assert await locks.revoke("a", token=stay.token, reason="hangs")
        await told(stay)
        assert not sockets(bench)


async def test_a_file_that_cannot_be_written_at_first_is_asked_again(bench, monkeypatch):
    listen, failed = OperatorRows.listen, []

    def fail_once(rows, socket):
        if not failed:
            failed.append(socket)
            raise OSError("disk I/O error")
        listen(rows, socket)

    monkeypatch.setattr(OperatorRows, "listen", fail_once)
    async with opened(bench.url) as (locks, _), staying(locks.lock("a", **FAR)) as stay:
        await until(lambda: failed)
        assert await locks.revoke("a", token=stay.token, reason="hangs")
        await told(stay)
        assert failed[0] not in sockets(bench)


async def test_a_file_of_the_version_before_is_completed(bench):
    async with opened(bench.url) as (locks, _), locks.lock("a"):
        pass
    bench.ask("DROP TABLE fencing_listener")
    async with holding(bench.url, "a") as (locks, (stay,)):
        assert await locks.revoke("a", token=stay.token, reason="hangs")
        await told(stay)


FORKED = """
import asyncio, os, sqlite3, sys
from fencing_sdk._values.claim import Claim
from fencing_sdk.backends._shared import revocation_watcher
from fencing_sdk.backends.sqlite import SqliteBackend

revocation_watcher._MOMENT = 0.01

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
    assert file.execute("SELECT socket FROM fencing_listener").fetchall() == [(backend._losses._socket.name,)]
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
