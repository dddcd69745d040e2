"""The backend behind a `LockClient`: calls that are given up, restarts, outages, many tasks and processes."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, suppress
from functools import partial
from pathlib import Path

import pytest

from fencing_sdk._client import LockClient
from fencing_sdk._values.claim import Busy, Claim, LockName, Place, Seen
from fencing_sdk._values.token import ENV_URL
from fencing_sdk.abc import Backend
from fencing_sdk.errors import BackendUnavailableError, LeaseLostError, LossReason
from fencing_sdk.events import Event, Lost, Renewed
from fencing_sdk.testing import counting
from fencing_sdk.testing.counting import Counter
from fencing_sdk.testing.promises.under_test import NAME, TRIES, BackendUnderTest, Reopen, needs

_YIELDS = (0, 1, 2, 3, 5, 8, 13, 21, 34)
"""Turns of the event loop after which a call is given up: before, during and after its way to the store."""
_CALLS: dict[str, Callable[[Backend, Claim], Awaitable[object]]] = {
    "acquire": lambda backend, claim: backend.draw(claim),
    "renew": lambda backend, claim: backend.keep([(claim, 0)]),
    "release": lambda backend, claim: backend.give_back(claim),
    "inspect": lambda backend, claim: backend.tickets([claim.name]),
}
"""Calls by the operation that an error names."""


class AbandonmentPromises(BackendUnderTest):
    """Calls that are given up, and answers that were never read."""

    async def test_a_draw_that_is_given_up_can_be_given_back(self, backend: Backend) -> None:
        """Wherever the cancellation hits, the claim alone is enough to free the name, with a second call if need be."""
        for yields in _YIELDS:
            claim = self.claim(f"cancelled/{yields}")
            await _cut_short(partial(backend.draw, claim, only_if_it_holds=True), yields)
            await self._freed_by(backend, claim)

    async def _freed_by(self, backend: Backend, claim: Claim) -> None:
        rival = self.claim(claim.name)
        async with self.soon():
            while True:
                await backend.give_back(claim)
                if isinstance(await backend.draw(rival, only_if_it_holds=True), Place):
                    return
                await asyncio.sleep(0.01)

    async def test_a_call_that_is_given_up_does_not_harm_the_next_ones(self, backend: Backend) -> None:
        """The connection is not left in the middle of something, and answers are not mixed up."""
        mine, other = self.claim(), self.claim("invoices/43")
        await self.granted(backend, mine)
        token = await self.granted(backend, other)
        for yields in _YIELDS:
            for call in _CALLS.values():
                await _cut_short(partial(call, backend, self.claim("invoices/44")), yields)
                (answer,) = await self.seen(backend, other.name)
                assert isinstance(answer, Seen), f"expected a ticket, got {answer}"
                assert answer.token == token
        assert isinstance(await self.kept(backend, mine), Place)

    async def test_a_closed_backend_opens_again(self, backend: Backend) -> None:
        """The tickets stay, and the next call connects again."""
        claim = self.claim()
        token = await self.granted(backend, claim)
        await backend.aclose()
        async with self.soon():
            await self.refused(backend, self.claim())
        assert await self.granted(backend, claim) == token

    async def test_tickets_outlive_the_object_that_drew_them(self, backend: Backend, reopen: Reopen) -> None:
        """Another client of the store sees the ticket of one that has closed, until it dies."""
        claim = self.claim()
        token = await self.granted(backend, claim)
        await backend.aclose()
        async with aclosing(reopen()) as other:
            (seen,) = await self.seen(other)
            assert seen.token == token


async def _cut_short(call: Callable[[], Awaitable[object]], yields: int) -> None:
    task = asyncio.ensure_future(_awaited(call))
    for _ in range(yields):
        await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError, BackendUnavailableError):
        await task


async def _awaited(call: Callable[[], Awaitable[object]]) -> None:
    answer = call()
    try:
        await answer
    except asyncio.CancelledError:
        if isinstance(answer, asyncio.Future):
            answer.cancel()
        raise


class RestartPromises(BackendUnderTest):
    """Tokens that never begin again."""

    async def test_tokens_grow_after_a_clean_up(self, backend: Backend) -> None:
        """The store may delete tickets that were given back or died, but never the last number."""
        dead = await self.granted(backend, self.claim(ttl=self.ttl))
        await self.expire(self.ttl)
        await self.purge(backend)
        given_back = await self._drawn_and_given_back(backend)
        await self.purge(backend)
        self.assert_rising([dead, given_back, await self.granted(backend, self.claim())])

    async def test_tokens_grow_after_restarts(self, backend: Backend, reopen: Reopen) -> None:
        """Also when a restart follows at once, and when nothing happened in between."""
        async with AsyncExitStack() as opened:
            tokens = [await self._drawn_and_given_back(backend), await self.granted(backend, self.claim(ttl=self.ttl))]
            await self.expire(self.ttl)
            for _ in range(2):
                for _ in range(2):
                    backend = await opened.enter_async_context(aclosing(await self.restart(backend, reopen)))
                tokens.append(await self._drawn_and_given_back(backend))
        self.assert_rising(tokens)

    @needs("survives_restart")
    async def test_tickets_survive_a_restart(self, backend: Backend, reopen: Reopen) -> None:
        """The holder goes on, with its token; a rival is still refused."""
        claim = self.claim()
        token = await self.granted(backend, claim)
        async with aclosing(await self.restart(backend, reopen)) as restarted:
            await self.refused(restarted, self.claim())
            assert isinstance(await self.kept(restarted, claim), Place)
            assert await self.granted(restarted, claim) == token

    async def _drawn_and_given_back(self, backend: Backend) -> int:
        claim = self.claim()
        token = await self.granted(backend, claim)
        await backend.give_back(claim)
        return token


class ClientPromises(BackendUnderTest):
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
                tokens.append(int(lease.token))
        self.assert_rising(tokens)

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

    async def test_a_cancelled_waiter_leaves_nothing(self, backend: Backend) -> None:
        """Neither a lock nor a place in a line."""
        holder = self.claim()
        await self.granted(backend, holder)
        async with LockClient(backend) as locks:
            for pause in (0, 0.001, 0.01, 0.05):
                waiting = asyncio.create_task(locks.lock(NAME).acquire())
                await asyncio.sleep(pause)
                waiting.cancel()
                await asyncio.wait((waiting,))
            await backend.give_back(holder)
            await self.freed_soon(backend, self.claim())

    async def test_a_block_whose_ticket_has_gone_ends_with_the_loss(self, backend: Backend, reopen: Reopen) -> None:
        """Found by the release, if not earlier: a body that ends before the next heartbeat is not a success."""
        seen: list[Event] = []
        async with LockClient(backend, observers=[seen.append]) as locks, aclosing(reopen()) as other, self.soon():
            with pytest.raises(LeaseLostError) as lost:
                async with locks.lock(NAME, ttl=60, heartbeat_interval=15, label="batch 7") as lease:
                    await other.give_back(Claim(NAME, 60, lease.owner, "batch 7"))
            assert lost.value.reason in {LossReason.REFUSED, LossReason.REVOKED}
            assert [event.kind for event in seen[-2:]] == ["lost", "released"]

    async def test_the_heartbeat_holds_the_lock_beyond_its_ttl(self, backend: Backend) -> None:
        """Keep by keep; a rival is refused all the time. Decorators and recipes make names of this kind."""
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
                outcome = await backend.draw(self.claim(name), only_if_it_holds=True)
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

    async def test_a_client_leaves_the_backend_closed(self, backend: Backend, reopen: Reopen) -> None:
        """Leaving ``async with`` releases what is held; another client gets it at once."""
        async with LockClient(backend) as locks:
            lease = await locks.lock(NAME).acquire()
        assert lease.lost_reason is LossReason.CLOSED
        async with aclosing(reopen()) as other:
            await self.granted(other, self.claim())


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
        """The backend reconnects by itself, and still knows an earlier ticket."""
        claim = self.claim()
        token = await self.granted(backend, claim)
        async with self.soon(), self.break_store(backend):
            with pytest.raises(BackendUnavailableError):
                await backend.tickets([NAME])
        assert isinstance(await self.kept(backend, claim), Place)
        assert await self.granted(backend, claim) == token
        await backend.give_back(claim)
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
    """Exclusion and rising tokens, under load: a counter in a file, which is right only if the lock is."""

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

    async def test_tasks_that_are_cancelled_at_random_harm_no_other(self, backend: Backend, tmp_path: Path) -> None:
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
