"""Processes that share a lock file, and that are killed, stopped and forked at the worst moments."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from worker_processes import LIMIT, WorkerProcess, worker_processes

from fencing_sdk.abc import Claim, Place
from fencing_sdk.backends.sqlite import SqliteBackend

pytestmark = pytest.mark.slow

WORKERS = Path(__file__).parent


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "locks.db"


@pytest.fixture
async def backend(path: Path) -> AsyncIterator[SqliteBackend]:
    made = SqliteBackend(path)
    yield made
    await made.aclose()


@pytest.fixture
async def start(path: Path) -> AsyncIterator[Callable[..., Awaitable[WorkerProcess]]]:
    async with worker_processes() as start:
        yield lambda command, *arguments: start(WORKERS / "sqlite_worker.py", command, path, *arguments)


def intact(path: Path) -> bool:
    connection = sqlite3.connect(path)
    try:
        return connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    finally:
        connection.close()


# Kills.


async def test_eight_processes_that_are_killed_all_the_time_never_share_a_token(path, backend, start, tmp_path):
    journals: list[Path] = []

    async def fighter() -> WorkerProcess:
        journals.append(tmp_path / f"journal-{len(journals)}")
        return await start("fight", journals[-1])

    fighters = [await fighter() for _ in range(8)]
    for _ in range(20):
        grants = len(_grants(journals))
        while len(_grants(journals)) < grants + 10:  # noqa: ASYNC110  (other processes write them)
            await asyncio.sleep(0.01)
        number = random.randrange(len(fighters))
        await fighters[number].kill()
        fighters[number] = await fighter()
    for process in fighters:
        await process.kill()
    grants = _grants(journals)
    assert len({grant["token"] for grant in grants}) == len(grants) >= 200
    for journal in journals:
        tokens = [grant["token"] for grant in _grants([journal])]
        assert tokens == sorted(tokens)
    _check_exclusion(grants)
    assert intact(path)
    last = await _next_count(path)
    assert last > max(grant["token"] for grant in grants)


async def _next_count(path: Path) -> int:
    backend = SqliteBackend(path, tokens="counter")
    try:
        place = await backend.draw(Claim("another", 60.0))
        assert place.token is not None
        return place.token
    finally:
        await backend.aclose()


def _grants(journals: list[Path]) -> list[dict]:
    """Every grant that was written down, with the moment its holder let it go, if it came so far."""
    grants: dict[int, list[dict]] = {}
    for journal in journals:
        if not journal.exists():
            continue
        for line in journal.read_text().split("\n")[:-1]:
            facts = json.loads(line)
            if "name" in facts:
                grants.setdefault(facts["token"], []).append(facts)
            else:
                grants[facts["token"]][-1]["held_until"] = facts["held_until"]
    return [grant for same in grants.values() for grant in same]


def _check_exclusion(grants: list[dict]) -> None:
    """No client was granted a lock while another one held it within its ttl."""
    checked = 0
    for earlier in grants:
        held_until = earlier.get("held_until", 0)
        if held_until > earlier["ends"]:
            continue
        for later in grants:
            if later["name"] == earlier["name"] and later["token"] > earlier["token"]:
                assert later["granted_by"] >= held_until
                checked += 1
    assert checked > 1000


async def test_a_transaction_that_was_killed_never_happened(path, backend, start):
    half = await start("half")
    await half.says("half")
    blocked = asyncio.create_task(backend.draw(Claim("half", 60.0)))
    await asyncio.sleep(0.1)
    assert not blocked.done()
    await half.kill()
    async with asyncio.timeout(LIMIT):
        assert isinstance(await blocked, Place)
    assert intact(path)


async def test_sixteen_processes_that_fight_without_a_line_all_get_their_turn(backend, start):
    await backend.open()
    racers = [await start("race", 8) for _ in range(16)]
    assert [int(await racer.ended()) for racer in racers] == [0] * 16, "the store was called unavailable"


# Forks, threads and loops.


def _forked(command: str, path: Path) -> dict:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(WORKERS / "sqlite_fork.py"), command, str(path)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_a_forked_child_has_a_connection_and_a_socket_of_its_own(path: Path):
    heard = _forked("idle", path)
    assert heard["child"] == {"granted": True, "locks": 1}, (
        "the kernel knows of no lock: SQLite took the parent's for its own"
    )
    assert heard["woken"], "the child took away the parent's socket"
    assert heard["kept"]
    assert intact(path)


def test_a_fork_waits_for_the_transaction_that_is_under_way(path: Path):
    assert _forked("busy", path) == {"child": {"sees": True, "granted": True}, "parent": True}


def test_a_child_of_a_process_whose_connection_is_stuck_is_refused_instead_of_hanging(path: Path):
    heard = _forked("stuck", path)
    assert len(heard["child"]) == 4, "the inherited object and a new one, in the child and in its child"
    assert all("spawn" in refused for refused in heard["child"])
    assert heard["parent"]
