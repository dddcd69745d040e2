"""
The backend behind a `LockClient`: what users see of it, and what it never gets to see.

Also while the store is out of reach, and with a counter that only the lock protects, incremented by many tasks and by
real processes.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from fencing_sdk._client import LockClient
from fencing_sdk._lease import Lease
from fencing_sdk._lock import Lock
from fencing_sdk._values.claim import Busy, Claim, LockName, Renewal
from fencing_sdk._values.token import ENV_URL
from fencing_sdk.abc import Backend
from fencing_sdk.errors import (
    AcquireTimeoutError,
    BackendUnavailableError,
    ConfigurationError,
    LeaseLostError,
    LockHeldError,
    LossReason,
)
from fencing_sdk.events import Event, Lost, Renewed
from fencing_sdk.testing import counting
from fencing_sdk.testing.counting import Counter
from fencing_sdk.testing.faults import FaultyBackend
from fencing_sdk.testing.promises.grants import ODD_NAMES
from fencing_sdk.testing.promises.under_test import NAME, TRIES, BackendUnderTest, Reopen, needs

_NO_NUMBERS = (-1, -0.001, math.nan, math.inf, -math.inf, 10**400, True, False, "5", b"5", [5], 5j)
_ODD_NUMBERS = {
    "ttl": (*_NO_NUMBERS, 0, 1e-9, 1e308, None),
    "wait": _NO_NUMBERS,
    "safety_buffer": (*_NO_NUMBERS, 1e308, 60),
    "heartbeat_interval": (*_NO_NUMBERS, 0, 1e308, 30),
    "max_hold": (*_NO_NUMBERS, 0),
}
_ODD_LABELS: tuple[object, ...] = ("x" * 1025, "a\0b", "\ud800", b"text", 42, True, ["text"], {})
_ODD_NAMES = ("", "a\0b", "a\nb", "a\r", "\x7f", "\ud800", "x" * 513, "\N{LOCK}" * 129, None, 42, b"a", True)


class FrontDoorPromises(BackendUnderTest):
    """From ``async with`` to the store and back."""

    async def test_async_with_holds_the_lock_and_gives_it_back(self, backend: Backend) -> None:
        """The store shows the holder while the body runs, and no holder afterwards."""
        async with LockClient(backend) as locks:
            async with locks.lock(NAME, label="batch 7") as lease:
                holder = await locks.inspect(NAME)
                assert holder is not None
                assert (holder.token, holder.id, holder.label) == (lease.token, lease.holder, "batch 7")
            assert await locks.inspect(NAME) is None

    async def test_a_client_may_be_opened_again(self, backend: Backend) -> None:
        """Its backend was closed with it and opens again; tokens go on growing."""
        locks = LockClient(backend)
        tokens = []
        for _ in range(2):
            async with self.soon(), locks, locks.lock(NAME) as lease:
                tokens.append(lease.token)
        assert tokens[0] < tokens[1]

    async def test_a_waiter_gets_the_lock_when_it_is_released(self, backend: Backend, reopen: Reopen) -> None:
        """Through another client, with a higher token."""
        async with LockClient(backend) as here, LockClient(reopen()) as there:
            async with here.lock(NAME) as first:
                waiting = asyncio.create_task(there.lock(NAME, wait=self.patience).acquire())
                await asyncio.sleep(0.05)
                assert not waiting.done()
                token = first.token
            second = await waiting
            assert second.token > token
            await second.release()

    async def test_patience_ends_with_an_error_and_leaves_nothing(self, backend: Backend) -> None:
        """Asked once, or waited for a while: when the holder has gone, the lock is free for a newcomer."""
        holder = self.claim()
        await self.granted(backend, holder)
        async with LockClient(backend) as locks:
            with pytest.raises(LockHeldError) as held:
                await locks.lock(NAME, wait=0).acquire()
            assert held.value.retry_after is None or 0 <= held.value.retry_after <= self.ended_after(holder.ttl)
            with pytest.raises(AcquireTimeoutError):
                await locks.lock(NAME, wait=0.1).acquire()
            await backend.release(holder)
            await self.freed_soon(backend, self.claim())

    async def test_a_cancelled_waiter_leaves_nothing(self, backend: Backend) -> None:
        """Neither a grant nor a place in a line."""
        holder = self.claim()
        await self.granted(backend, holder)
        async with LockClient(backend) as locks:
            for pause in (0, 0.001, 0.01, 0.05):
                waiting = asyncio.create_task(locks.lock(NAME).acquire())
                await asyncio.sleep(pause)
                waiting.cancel()
                await asyncio.wait((waiting,))
            await backend.release(holder)
            await self.freed_soon(backend, self.claim())

    async def test_a_lease_that_was_taken_over_ends_its_work(self, backend: Backend) -> None:
        """The next heartbeat learns it: the body is cancelled and `LeaseLostError` leaves."""
        faulty = FaultyBackend(backend)
        faulty.fail("renew")  # until another owner has the lock
        async with LockClient(faulty) as locks, self.soon():
            lock = locks.lock(NAME, ttl=60, heartbeat_interval=0.2, label="")
            with pytest.raises(LeaseLostError) as lost:
                async with lock as lease:
                    await self._take_over(backend, lease, faulty)
        assert lost.value.reason is (LossReason.TAKEN_OVER if self.shows_taken_over else LossReason.REFUSED)

    async def _take_over(self, backend: Backend, lease: Lease, faulty: FaultyBackend) -> None:
        await backend.release(Claim(lease.name, 60, lease.owner))
        await self.granted(backend, Claim(lease.name, 60))
        faulty.heal("renew")
        await asyncio.Event().wait()

    async def test_a_block_whose_grant_has_gone_ends_with_the_loss(self, backend: Backend, reopen: Reopen) -> None:
        """Found by the release, if not earlier: a body that ends before the next heartbeat is not a success."""
        seen: list[Event] = []
        async with LockClient(backend, observers=[seen.append]) as locks, aclosing(reopen()) as other, self.soon():
            lock = locks.lock(NAME, ttl=60, heartbeat_interval=15, label="")
            for hold in (_entered, _held):
                with pytest.raises(LeaseLostError) as lost:
                    async with hold(lock) as lease:
                        await other.release(Claim(NAME, 60, lease.owner))
                assert lost.value.reason in {LossReason.REFUSED, LossReason.REVOKED}
                assert [event.kind for event in seen[-2:]] == ["lost", "released"]

    async def test_the_heartbeat_holds_the_lock_beyond_its_ttl(self, backend: Backend) -> None:
        """Renewal by renewal; a rival is refused all the time. Decorators and recipes make names of this kind."""
        for attempt in range(TRIES):
            name = LockName(f"{NAME}/{attempt}", f"{NAME}/{{number}}")
            if await self._held_beyond(backend, name, 2 * self.ttl * 2**attempt):
                return
        msg = f"this machine stands still for longer than ttl = {self.ttl} again and again; declare a longer one"
        raise AssertionError(msg)

    async def _held_beyond(self, backend: Backend, name: str, ttl: float) -> bool:
        """See a lock held beyond its *ttl*; False if the machine was too slow to renew it in time."""
        seen = asyncio.Queue[Event]()

        def observe(event: Event) -> None:
            if isinstance(event, Renewed | Lost):
                seen.put_nowait(event)

        async with LockClient(backend, observers=[observe]) as locks, self.soon():
            lease = await locks.lock(name, ttl=ttl).acquire()
            for _ in range(3):
                await self.pass_time(ttl * 0.4)
                while not seen.empty():
                    seen.get_nowait()
                if lease.held:
                    await seen.get()
                outcome = await backend.acquire(self.claim(name))
                if not lease.held:
                    assert lease.lost_reason in {None, LossReason.EXPIRED, LossReason.STALLED}
                    return False
                assert isinstance(outcome, Busy), f"expected a refusal of {name!r}, got {outcome}"
            await lease.release()
        return True

    async def test_many_locks_share_one_client(self, backend: Backend) -> None:
        """Entered and left by many tasks at once, each with a lease and a token of its own."""

        async def hold(number: int) -> None:
            async with locks.lock(f"reports/{number}") as lease:
                await lease.renew()
                holder = await locks.inspect(lease.name)
                assert holder is not None
                assert (holder.name, holder.token, holder.id) == (lease.name, lease.token, lease.holder)

        async with LockClient(backend) as locks, self.soon():
            await asyncio.gather(*(hold(number) for number in range(50)))
            assert await locks.inspect("reports/7") is None

    async def test_odd_names_pass_the_front_door(self, backend: Backend, reopen: Reopen) -> None:
        """Every valid name can be held, also behind a namespace, and excludes others as any name does."""
        async with LockClient(backend) as locks, LockClient(reopen(), namespace="{shop}:'") as shop:
            for name in ODD_NAMES:
                async with locks.lock(name):
                    assert await _is_refused(locks.lock(name))
            for name in ("../a", "*", "a'; DROP TABLE locks; --"):
                async with shop.lock(name), locks.lock(name):
                    assert await _is_refused(shop.lock(name))

    @pytest.mark.parametrize("name", _ODD_NAMES, ids=lambda name: ascii(name)[:20])
    async def test_an_invalid_name_is_refused_before_the_store_sees_it(self, backend: Backend, name: Any) -> None:
        """Empty, with control characters, too long, or no text at all."""
        counted = FaultyBackend(backend)
        async with LockClient(counted) as locks:
            with pytest.raises(ConfigurationError, match=r"^name "):
                locks.lock(name)
            with pytest.raises(ConfigurationError, match=r"^name "):
                await locks.inspect(name)
        assert counted.calls == []

    async def test_an_invalid_label_is_refused_before_the_store_sees_it(self, backend: Backend) -> None:
        """Too long, with NUL, or no text at all."""
        counted = FaultyBackend(backend)
        async with LockClient(counted) as locks:
            for label in _ODD_LABELS:
                options: dict[str, Any] = {"label": label}
                with pytest.raises(ConfigurationError, match=r"^label "):
                    await locks.lock(NAME, **options).acquire()
        assert counted.calls == []

    @pytest.mark.parametrize("parameter", _ODD_NUMBERS)
    async def test_an_odd_number_is_refused_before_the_store_sees_it(self, backend: Backend, parameter: str) -> None:
        """The error names the parameter; a bool, a text, nan and infinity are not numbers of seconds."""
        counted = FaultyBackend(backend)
        async with LockClient(counted) as locks:
            for number in _ODD_NUMBERS[parameter]:
                options: dict[str, Any] = {parameter: number}
                with pytest.raises(ConfigurationError, match=rf"^{parameter}\b"):
                    await locks.lock(NAME, **options).acquire()
        assert counted.calls == []

    async def test_a_client_leaves_the_backend_closed(self, backend: Backend, reopen: Reopen) -> None:
        """Leaving ``async with`` releases what is held; another client gets it at once."""
        async with LockClient(backend) as locks:
            lease = await locks.lock(NAME).acquire()
        assert lease.lost_reason is LossReason.CLOSED
        async with aclosing(reopen()) as other:
            await self.granted(other, self.claim())


async def _is_refused(lock: Lock) -> bool:
    """Return whether the store answers that *lock* is held; ask again if a slow machine exceeds the time of a call."""
    for _ in range(TRIES):
        with suppress(BackendUnavailableError):
            return await lock.try_acquire() is None
    return False


@asynccontextmanager
async def _entered(lock: Lock) -> AsyncIterator[Lease]:
    async with lock as lease:
        yield lease


@asynccontextmanager
async def _held(lock: Lock) -> AsyncIterator[Lease]:
    async with await lock.acquire() as lease:
        yield lease


_CALLS: dict[str, Callable[[Backend, Claim], Awaitable[object]]] = {
    "acquire": lambda backend, claim: backend.acquire(claim),
    "renew": lambda backend, claim: backend.renew([claim]),
    "release": lambda backend, claim: backend.release(claim),
    "inspect": lambda backend, claim: backend.inspect(claim.name),
}


@needs("breakable")
class OutagePromises(BackendUnderTest):
    """Error translation and recovery. For backends that declare ``breakable``."""

    @pytest.mark.parametrize("operation", _CALLS)
    async def test_a_store_out_of_reach_is_an_error_of_ours(self, backend: Backend, operation: str) -> None:
        """One class for every driver, with the driver's error as its cause, and without secrets."""
        claim = self.claim()
        await self.granted(backend, claim)
        async with self.soon(), self.break_store(backend):
            with pytest.raises(BackendUnavailableError) as raised:
                await _CALLS[operation](backend, claim)
        assert raised.value.operation == operation
        assert raised.value.backend
        assert raised.value.__cause__ is not None
        assert claim.owner not in f"{raised.value} {raised.value!r} {raised.value.__cause__!r}"

    async def test_the_same_object_works_again_after_an_outage(self, backend: Backend) -> None:
        """The backend reconnects by itself, and still knows an earlier grant."""
        claim = self.claim()
        token = await self.granted(backend, claim)
        async with self.soon(), self.break_store(backend):
            with pytest.raises(BackendUnavailableError):
                await backend.inspect(NAME)
        assert await self.renewed(backend, claim) is Renewal.RENEWED
        assert await self.granted(backend, claim) == token
        await backend.release(claim)
        await self.granted(backend, self.claim())

    async def test_a_lease_rides_out_an_outage(self, backend: Backend) -> None:
        """Renewals fail, the work goes on, and the first renewal after the outage makes good."""
        seen: asyncio.Queue[str] = asyncio.Queue()

        def observe(event: Event) -> None:
            seen.put_nowait(event.kind)

        async with LockClient(backend, observers=[observe]) as locks, self.soon():
            lease = await locks.lock(NAME, ttl=60, heartbeat_interval=0.2).acquire()
            async with self.break_store(backend):
                await _until(seen, "renewal_failed")
            await _until(seen, "renewed")
            lease.check()
            await lease.release()


async def _until(seen: asyncio.Queue[str], kind: str) -> None:
    while await seen.get() != kind:
        pass


_ROUNDS = 8
_PROCESSES = 4
_TASKS = 8
_FICKLE = 30


class CounterPromises(BackendUnderTest):
    """Exclusion and rising tokens, under load."""

    async def test_many_tasks_count_exactly(self, backend: Backend, reopen: Reopen, tmp_path: Path) -> None:
        """The sum is exact and the tokens rise in the order of the writes."""
        counter = Counter(tmp_path)
        async with (
            LockClient(backend) as here,
            LockClient(reopen()) as there,
            self.soon(),
            asyncio.TaskGroup() as tasks,
        ):
            for locks in (here, there) * (_TASKS // 2):
                tasks.create_task(counter.increment(locks, _ROUNDS))
        self._check(counter, _TASKS * _ROUNDS)

    async def test_tasks_that_are_cancelled_at_random_harm_nobody(self, backend: Backend, tmp_path: Path) -> None:
        """Waiting, acquiring, holding or releasing: the others count on, and exactly."""
        counter = Counter(tmp_path)

        async def harass() -> None:
            for _ in range(_FICKLE):
                fickle = asyncio.create_task(self._hold(locks))
                await asyncio.sleep(random.uniform(0, 0.01))
                fickle.cancel()
                await asyncio.wait((fickle,))

        async with LockClient(backend) as locks, self.soon(), asyncio.TaskGroup() as tasks:
            tasks.create_task(harass())
            for _ in range(2):
                tasks.create_task(counter.increment(locks, _ROUNDS))
        self._check(counter, 2 * _ROUNDS)

    @needs("processes")
    async def test_processes_count_exactly(self, backend: Backend, url: str, tmp_path: Path) -> None:
        """Each with a client of its own on the store's URL; one more task counts in this process."""
        counter = Counter(tmp_path)
        async with AsyncExitStack() as running:
            processes = [await self._start(running, url, tmp_path) for _ in range(_PROCESSES)]
            locks = await running.enter_async_context(LockClient(backend))
            await _set_off_together(processes)
            await counter.increment(locks, _ROUNDS)
            for process in processes:
                output, _ = await process.communicate()
                assert process.returncode == 0, output.decode(errors="replace")
        self._check(counter, (_PROCESSES * counting.TASKS + 1) * _ROUNDS)

    async def _start(self, running: AsyncExitStack, url: str, folder: Path) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            counting.__name__,
            str(folder),
            str(_ROUNDS),
            env={**os.environ, ENV_URL: url},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        running.push_async_callback(_stop, process)
        return process

    def _check(self, counter: Counter, expected: int) -> None:
        assert counter.read() == expected, "increments were lost: two held the lock at once"
        assert len(counter.tokens()) == expected
        self.assert_rising(counter.tokens())

    async def _hold(self, locks: LockClient) -> None:
        async with locks.lock(counting.LOCK, ttl=30):
            await asyncio.sleep(random.uniform(0, 0.005))


async def _set_off_together(processes: list[asyncio.subprocess.Process]) -> None:
    """Let all processes begin at once: a process that ends before the next one starts would meet no rival."""
    for process in processes:
        assert process.stdout is not None
        first = await process.stdout.readline()
        assert first == b"ready\n", first.decode(errors="replace")
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()
