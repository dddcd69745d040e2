"""
Threads hold locks as tasks do: one at a time, renewed while they compute, told when it is over.

The scenarios are written once. A store runs them by a subclass with a fixture ``bench``. Each runs in a thread beside
the loop of the test, in which the proxies before the servers run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import pytest
from campaigns import amount
from child_processes import WARNINGS, guarded
from event_log import CLOCK
from inside import HolderFacts, read_facts, state_of
from patience import wait_until
from refused_urls import refuse_every_url
from stays import PATIENCE

from fencing_sdk import (
    AcquireTimeoutError,
    BackendUnavailableError,
    LeaseLostError,
    LockHeldError,
    LossReason,
)
from fencing_sdk.backends import from_url
from fencing_sdk.errors import NoLeaseError
from fencing_sdk.recipes import Ran
from fencing_sdk.sync import LockClient, connect, current_lease, current_token

WORKER = Path(__file__).parents[1] / "support" / "workers" / "sync_worker.py"
STANDSTILL = 2.0
"""Seconds for one look at a lock from which on a store may have dropped a waiter: it tries each second of three."""
LIMIT = 100.0
"""Seconds for what several processes do on a busy machine."""

T = TypeVar("T")


class SyncBench(Protocol):
    """What a scenario needs of a store."""

    url: str


def through(number: int, work: Callable[[int], object]) -> list[object]:
    """Run *work* in so many threads, which begin together."""
    gate = threading.Barrier(number)

    def begin(which: int) -> object:
        gate.wait(PATIENCE)
        return work(which)

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(begin, range(number), timeout=LIMIT))


def answered(ask: Callable[[], T]) -> T:
    """Ask until the store answers: a call without patience has a second for that, and a machine may stand still."""
    stop = CLOCK.now() + PATIENCE
    while CLOCK.now() < stop:
        with contextlib.suppress(BackendUnavailableError):
            return ask()
    return ask()


def in_a_thread(scenario: Callable[[Any, str], None]) -> Callable[[Any, SyncBench], Coroutine[Any, Any, None]]:
    """Run a scenario beside the loop of its test."""

    async def test(self: Any, bench: SyncBench) -> None:
        await asyncio.to_thread(scenario, self, bench.url)

    test.__doc__ = scenario.__doc__
    return test


class SyncSuite:
    """What the threads of one process see."""

    async def test_a_lock_is_held_where_urlsplit_refuses_every_url(self, bench: SyncBench, monkeypatch):
        from_url(bench.url)  # loads the driver
        refuse_every_url(monkeypatch)

        def hold() -> None:
            with connect(bench.url) as locks, locks.lock("a", ttl=60) as lease:
                assert lease.held

        await asyncio.to_thread(hold)

    @in_a_thread
    def test_a_look_names_the_process_and_tells_a_job_that_runs_from_a_lock_that_is_kept(self, url: str) -> None:
        """On ZooKeeper it does so to the client of the job alone: the node keeps the ttl of the grant."""

        def look() -> HolderFacts:
            holder = answered(lambda: locks.inspect("a"))
            assert holder is not None
            return read_facts(holder)

        with connect(url) as locks:
            run = locks.job("a", at_least_for=3600)(look)
            outcome = answered(run)
            assert isinstance(outcome, Ran)
            during, after = outcome.value, look()
        assert f"(pid {os.getpid()}) on {os.uname().nodename}" in str(during.who)
        assert during.kept_until is None
        assert during.state.startswith("when its run has ended, kept ")
        assert after.state == f"kept until {after.kept_until}, nothing runs"

    @in_a_thread
    def test_one_thread_at_a_time_is_inside_and_tokens_grow(self, url: str) -> None:
        inside: list[int] = []
        tokens: list[int] = []

        def work(number: int) -> None:
            for _ in range(4):
                with locks.lock("a", ttl=60, wait=PATIENCE) as lease:
                    assert inside == []
                    inside.append(number)
                    assert current_lease() is current_lease("a") is lease
                    tokens.append(current_token())
                    assert inside.pop() == number

        with connect(url) as locks:
            through(6, work)
            assert locks.inspect("a") is None
            with pytest.raises(NoLeaseError):
                current_token()
        assert tokens == sorted(set(tokens))
        assert len(tokens) == 6 * 4

    @pytest.mark.campaign
    @in_a_thread
    def test_many_threads_are_served_in_the_order_of_the_line(self, url: str) -> None:
        """
        Where the store shows its line; in any order where it does not.

        Nor in any certain order if the store or this process stood still: a waiter that is silent loses its place.
        """
        number = amount(1000, short=30)
        served: list[str] = []
        line: list[str] = []
        looks: list[float] = []

        def work() -> None:
            with locks.lock("a", ttl=60) as lease:
                served.append(lease.holder)

        def all_stand_in_line() -> bool:
            time.sleep(number / 1000)  # to show a long line is work for the store
            with contextlib.suppress(BackendUnavailableError):
                line[:] = [waiter.id for waiter in locks.waiters("a")]
            return len(line) == number

        def look() -> None:
            while any(worker.is_alive() for worker in workers):
                before = CLOCK.now()
                with contextlib.suppress(BackendUnavailableError), locks.lock("b", ttl=60).acquire():
                    pass  # it waits where the signs of life of the waiters wait: behind the other tries of this client
                looks.append(CLOCK.now() - before)
                time.sleep(0.05)

        with connect(url) as locks:
            holder = locks.lock("a", ttl=300).acquire()
            workers = [threading.Thread(target=work) for _ in range(number)]
            for worker in workers:
                worker.start()
            if from_url(url).rings:
                wait_until(all_stand_in_line, what="all threads stand in line", within=6 * LIMIT)
            watcher = threading.Thread(target=look)
            watcher.start()
            holder.release()
            for worker in [*workers, watcher]:
                worker.join(6 * LIMIT)
        assert len(set(served)) == number
        assert not line or max(looks, default=0.0) > STANDSTILL or served == line

    @pytest.mark.slow
    @pytest.mark.campaign
    @in_a_thread
    def test_a_lease_is_kept_while_its_thread_computes_for_longer_than_its_ttl(self, url: str) -> None:
        with connect(url) as locks, locks.lock("a", ttl=4, safety_buffer=0.2, heartbeat_interval=0.3) as lease:
            until = CLOCK.now() + amount(12.0, short=4.2)
            while CLOCK.now() < until:
                sum(range(10_000))
            assert lease.held
            assert lease.wait_lost(0) is None

    @in_a_thread
    def test_what_cannot_be_had_is_told_as_to_tasks(self, url: str) -> None:
        def enter(wait: float) -> None:
            with locks.lock("a", wait=wait):
                pass

        with connect(url) as locks:
            lease = locks.lock("a", ttl=60).acquire()
            with pytest.raises(LockHeldError):
                answered(lambda: enter(0))
            with pytest.raises(AcquireTimeoutError):
                answered(lambda: enter(0.2))
            assert answered(locks.lock("a").try_acquire) is None
            assert answered(locks.lock("a").locked)
            lease.release()
            lease.release()
            with locks.lock("a", wait=PATIENCE) as again:
                assert again.token > state_of(lease).number

    @in_a_thread
    def test_a_body_that_has_lost_its_lease_goes_on_and_is_told_at_the_end(self, url: str) -> None:
        heard: SimpleQueue[LossReason] = SimpleQueue()
        with connect(url) as locks:
            # The longer the ttl, the later the loss may be noticed and still be an expiry. The test waits for max_hold.
            with pytest.raises(LeaseLostError) as loss, locks.lock("a", ttl=300, max_hold=0.5) as lease:
                lease.on_lost(heard.put)
                assert lease.wait_lost(PATIENCE) is LossReason.EXPIRED
                for ask in (lease.check, lambda: lease.token, current_token, lease.renew):
                    with pytest.raises(LeaseLostError):
                        ask()
                with ThreadPoolExecutor(1) as pool:  # the lock is free, although the body goes on
                    pool.submit(locks.lock("a", wait=PATIENCE).acquire).result().release()
            assert loss.value.reason is LossReason.EXPIRED
            with locks.lock("a", wait=PATIENCE):
                pass
            assert heard.get(timeout=PATIENCE) is LossReason.EXPIRED
            assert heard.empty()

    @pytest.mark.slow
    @in_a_thread
    def test_closing_releases_what_is_held_and_the_client_opens_again(self, url: str) -> None:
        locks: LockClient = connect(url)
        lease = locks.lock("a", ttl=300).acquire()
        locks.close()
        assert lease.lost_reason is LossReason.CLOSED
        lease.release()
        with locks.lock("a", ttl=300, wait=PATIENCE) as again:
            assert again.held
        locks.close()


class SyncRevokingSuite:
    """What the thread of a holder is told when an operator takes its lock away."""

    @in_a_thread
    def test_a_lease_that_the_store_ends_is_told_with_the_reason(self, url: str) -> None:
        heard: SimpleQueue[LossReason] = SimpleQueue()
        with connect(url) as locks:
            lock = locks.lock("a", ttl=60, heartbeat_interval=0.5)
            with pytest.raises(LeaseLostError) as loss, lock as lease:
                lease.on_lost(heard.put)
                assert locks.revoke("a", token=lease.token, reason="deploy")
                assert heard.get(timeout=PATIENCE) is LossReason.REVOKED
                assert not lease.held
                with pytest.raises(LeaseLostError):
                    current_token()
            assert (loss.value.reason, loss.value.detail) == (LossReason.REVOKED, "deploy")
            with locks.lock("a", wait=PATIENCE) as again:
                assert again.token > state_of(lease).number


class SyncProcessesSuite:
    """What several processes see of each other."""

    @pytest.fixture
    def start(self, bench: SyncBench) -> Iterator[Callable[..., subprocess.Popen[str]]]:
        """Start a worker of a kind, which does not outlive the test."""
        workers: list[subprocess.Popen[str]] = []

        def start(kind: str, *arguments: object) -> subprocess.Popen[str]:
            command = guarded([sys.executable, *WARNINGS, str(WORKER), bench.url, kind, *map(str, arguments)])
            pipe = subprocess.PIPE
            workers.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, process_group=0))
            return workers[-1]

        yield start
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)  # its children, too, which hold its pipes
            worker.communicate()

    @pytest.mark.slow
    async def test_one_thread_of_all_processes_is_inside(self, start, tmp_path: Path):
        number = tmp_path / "number"
        number.write_text("0")
        workers = [start("counts", number) for _ in range(3)]
        said = [await asyncio.to_thread(worker.communicate, timeout=LIMIT) for worker in workers]
        assert [errors for _, errors in said] == ["", "", ""]
        tokens = [int(line.split()[1]) for lines, _ in said for line in lines.splitlines()]
        assert len(set(tokens)) == len(tokens) == 3 * 4 * 5
        assert int(number.read_text()) == len(tokens)

    @pytest.mark.slow
    async def test_children_that_inherit_one_client_do_not_take_each_others_grants(self, start, tmp_path: Path):
        number = tmp_path / "number"
        number.write_text("0")
        worker = start("siblings", number)
        said, errors = await asyncio.to_thread(worker.communicate, timeout=LIMIT)
        assert (worker.returncode, "Traceback" in errors) == (0, False), errors
        tokens = [int(line.split()[1]) for line in said.splitlines()]
        assert len(set(tokens)) == len(tokens) == 4 * 4 * 5
        assert int(number.read_text()) == len(tokens)

    @pytest.mark.slow
    @pytest.mark.parametrize(("kind", "code"), [("exits", 0), ("raises", 3)])
    async def test_an_interpreter_that_ends_frees_its_locks_at_once(self, kind, code, start, bench: SyncBench):
        worker = start(kind)
        said, errors = await asyncio.to_thread(worker.communicate, timeout=LIMIT)
        assert (worker.returncode, errors) == (code, "")
        await asyncio.to_thread(self._take, bench.url, int(said.split()[1]))  # long before the end of its ttl

    @pytest.mark.slow
    async def test_a_process_that_is_killed_leaves_its_lock_to_the_ttl(self, start, bench: SyncBench):
        worker = start("holds")
        token = await self._token(worker)
        worker.kill()
        await asyncio.to_thread(self._take, bench.url, token)

    @pytest.mark.slow
    async def test_a_process_that_was_frozen_does_not_get_to_read_its_token(self, start, bench: SyncBench):
        worker = start("holds")
        token = await self._token(worker)
        worker.send_signal(signal.SIGSTOP)
        await asyncio.to_thread(self._take, bench.url, token)
        worker.send_signal(signal.SIGCONT)
        said, errors = await asyncio.to_thread(worker.communicate, "\n", timeout=LIMIT)
        assert said.split()[0] == "lost"
        assert "Traceback" not in errors

    @pytest.mark.slow
    async def test_a_forked_child_is_no_holder_and_its_parent_goes_on(self, start):
        worker = start("forks")
        said, errors = await asyncio.to_thread(worker.communicate, timeout=LIMIT)
        assert "Traceback" not in errors, errors
        assert said.splitlines() == ["inert False closed None", "child True", "parent None True True"]

    async def _token(self, worker: subprocess.Popen[str]) -> int:
        assert worker.stdout is not None
        return int((await asyncio.to_thread(worker.stdout.readline)).split()[1])

    def _take(self, url: str, before: int) -> None:
        with connect(url) as locks, locks.lock("a", ttl=30, wait=PATIENCE) as lease:
            assert lease.token > before
