"""``client.status()``: for health endpoints, told from what the client knows."""

import asyncio
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from virtual_time import in_virtual_time, settle

import fencing_sdk.sync
from fencing_sdk import LeaseLostError, LockClient, Status, UsageError
from fencing_sdk._values import forks
from fencing_sdk._values.clock import LoopClock
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.errors import BackendUnavailableError


class Store(MemoryBackend):
    """One that can be out of reach."""

    def __init__(self) -> None:
        super().__init__(clock=LoopClock())
        self.away = False

    async def renew(self, claims):
        if self.away:
            backend, operation = "Store", "renew"
            raise BackendUnavailableError(backend, operation, "no answer")
        return await super().renew(claims)


def client() -> LockClient:
    return LockClient(Store(), clock=LoopClock(), watch_stalls=False)


@in_virtual_time
async def test_a_client_that_was_not_entered_or_was_closed_is_not_open():
    locks = client()
    assert locks.status() == Status(open=False)
    async with locks:
        assert locks.status() == Status(open=True)
    assert locks.status() == Status(open=False)


@in_virtual_time
async def test_leases_and_the_least_time_that_one_has_left():
    async with client() as locks, locks.lock("a", ttl=30), locks.lock("b", ttl=10, heartbeat_interval=2) as lease:
        status = locks.status()
        assert (status.open, status.draining, status.leases, status.leads) == (True, False, 2, ())
        assert status.least_spare == pytest.approx(lease.remaining)
        await asyncio.sleep(1.5)
        assert locks.status().least_spare == pytest.approx(status.least_spare - 1.5)
        await asyncio.sleep(1.0)  # a renewal was confirmed half a second ago
        assert locks.status().least_spare == pytest.approx(status.least_spare - 0.5)


@in_virtual_time
async def test_when_the_store_last_answered():
    async with client() as locks:
        assert locks.status().store_answered is None
        async with locks.lock("a", ttl=10, heartbeat_interval=2):
            assert locks.status().store_answered == 0
            await asyncio.sleep(1.5)
            assert locks.status().store_answered == 1.5
            await asyncio.sleep(1.5)  # renewed a second ago
            assert locks.status().store_answered == 1
            locks._backend.away = True
            await asyncio.sleep(3)
            assert locks.status().store_answered == 4
        assert locks.status().leases == 0


@in_virtual_time
async def test_a_lease_that_is_lost_counts_no_more():
    async with client() as locks:
        with pytest.raises(LeaseLostError):
            async with locks.lock("a", ttl=3):
                locks._backend.away = True
                try:
                    await asyncio.sleep(60)
                finally:
                    status = locks.status()
        assert (status.open, status.leases, status.least_spare) == (True, 0, None)


@in_virtual_time
async def test_a_client_that_drains_says_so_and_is_open_until_it_is_closed():
    async with client() as locks:
        lease = await locks.lock("a").acquire()
        draining = asyncio.create_task(locks.drain(within=5))
        await settle()
        status = locks.status()
        assert (status.open, status.draining, status.leases) == (True, True, 1)
        await lease.release()
        await draining


@in_virtual_time
async def test_the_elections_that_this_process_leads():
    async with client() as locks:
        told = []

        @locks.elected("scheduler/{region}")
        async def schedule(region: str) -> None:
            await settle()
            told.append(locks.status().leads)

        async for term in locks.election("reports"):
            async with term:
                await schedule("eu")
                break
        assert told == [("reports", "scheduler/eu")]
        async with locks.lock("not an election"):
            assert locks.status().leads == ()


async def test_in_a_forked_child_the_client_of_the_parent_is_not_open_and_says_why(monkeypatch):
    async with LockClient(MemoryBackend()) as locks:
        with monkeypatch.context() as child:
            child.setattr(forks, "here", partial(int, forks.here() + 1))
            assert not locks.status().open
            with pytest.raises(UsageError, match="before a fork"):
                await asyncio.to_thread(lambda: asyncio.run(locks.inspect("a")))
        assert locks.status().open


# Readiness, as docs/operations.md has it

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
READY = next(block for block in PAGE.split("```") if "def ready(" in block).removeprefix("python")
TASKS = """
import asyncio
from fencing_sdk import connect

async def main():
    locks = connect("memory://")
    print("made", ready(locks))
    async with locks:
        print("entered", ready(locks))
        async with locks.lock("a"):
            print("held", ready(locks))
        await locks.drain(within=1)
        print("drained", ready(locks))
    print("left", ready(locks))
    async with locks:
        print("entered again", ready(locks))

asyncio.run(main())
"""
THREADS = """
import os
from fencing_sdk.sync import connect

locks = connect("memory://")
print("made", ready(locks))
with locks.lock("a"):
    print("held", ready(locks), flush=True)
if not (child := os.fork()):
    print("forked", ready(locks), flush=True)
    os._exit(0)
os.waitpid(child, 0)
locks.drain(within=1)
print("drained", ready(locks))
locks.close()
print("closed", ready(locks))
with locks.lock("a"):
    print("used again", ready(locks))
locks.close()
with locks:
    print("entered", ready(locks))
print("left", ready(locks))
unused = connect("memory://")
unused.close()
print("closed before its first call", ready(unused))
"""


@pytest.mark.parametrize(
    ("script", "steps"),
    [
        (TASKS, "made - entered + held + drained - left - entered again +"),
        (
            THREADS,
            "made + held + forked + drained - closed - used again + entered + left - closed before its first call -",
        ),
    ],
    ids=["tasks", "threads"],
)
def test_a_fresh_process_becomes_ready_and_stays_it_until_it_drains_or_closes(script, steps):
    quiet = "ignore::DeprecationWarning"  # Python 3.12 warns of a fork beside threads
    done = subprocess.run(
        [sys.executable, "-W", quiet, "-c", READY + script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.replace("True", "+").replace("False", "-")
    assert " ".join(said.split()) == steps


@pytest.mark.parametrize("open_wait", [0, None])
def test_a_worker_whose_store_is_away_is_ready(open_wait):
    """It is no reason to restart it."""

    class Away(MemoryBackend):
        async def open(self):
            raise BackendUnavailableError("Away", "open")

    locks = fencing_sdk.sync.connect(Away(), open_wait=open_wait)
    for _ in range(2):
        assert locks.status() == Status(open=True)
        with pytest.raises(BackendUnavailableError):
            locks.inspect("a")
    locks.close()
    assert locks.status() == Status(open=False)
