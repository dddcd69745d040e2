"""What a store does that also keeps the fences of a guard: the grant and the fence come together, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from child_processes import state
from patience import until
from worker_processes import worker_processes

from fencing_sdk import AcquireTimeoutError, BackendUnavailableError, StaleTokenError, Token, connect
from fencing_sdk.abc import Busy, Claim, Grant
from fencing_sdk.backends import from_url
from fencing_sdk.errors import BackendRefusedError
from fencing_sdk.events import FenceRaised
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.guards.sql import SqlGuard

SEAT = "seats/42"
FROZEN = Path(__file__).with_name("fence_frozen.py")


class FencesSuite:
    def writing(self, bench: Any, guard: SqlGuard, token: int) -> AbstractAsyncContextManager[None]:
        """A transaction that writes under the fence and does not commit."""
        raise NotImplementedError

    async def end_grant(self, bench: Any) -> None:
        """Let the grant of `SEAT` end now."""
        raise NotImplementedError

    async def drop_schema(self, bench: Any) -> None:
        """Drop the tables of the store."""
        raise NotImplementedError

    async def waits_for_a_row(self, bench: Any) -> bool:
        """Return whether a transaction waits for a row that another one has locked."""
        raise NotImplementedError

    async def end_connections(self, bench: Any) -> None:
        """End every connection to the database, as an operator does."""
        raise NotImplementedError

    @pytest.fixture
    async def backend(self, bench: Any) -> AsyncIterator[Any]:
        backend = from_url(bench.url)
        yield backend
        await backend.aclose()

    @pytest.fixture
    def guard(self, bench: Any) -> SqlGuard:
        return SqlGuard(bench.url)

    async def granted(self, backend: Any, fences: Any, **claim: Any) -> Grant:
        answer = await backend.acquire_fenced(Claim(SEAT, 60.0, **claim), fences)
        assert isinstance(answer, Grant)
        return answer

    def test_a_guard_of_the_same_database_is_known_by_the_urls_of_both(self, backend, guard, bench):
        assert backend.keeps(guard)
        assert not backend.keeps(SqlGuard())
        assert not backend.keeps(MemoryGuard())
        assert not backend.keeps(SqlGuard("sqlite:///app.db"))
        assert not backend.keeps(SqlGuard(bench.server.url_as("another role")))
        assert not backend.keeps(SqlGuard(f"{bench.url}_other"))

    async def test_every_fence_of_a_grant_has_its_token_and_its_holder(self, backend, guard):
        claim = Claim(SEAT, 60.0)
        grant = await backend.acquire_fenced(claim, [(guard, SEAT), (guard, "seats/plan")])
        assert isinstance(grant, Grant)
        for resource in (SEAT, "seats/plan"):
            fence = await guard.highest(resource)
            assert (fence, fence.holder) == (grant.token, claim.holder)

    async def test_a_missing_table_of_the_guard_is_named_and_not_blamed_on_the_locks(self, backend, bench):
        guard = SqlGuard(bench.url, table="seats_fence", create=False)
        with pytest.raises(BackendRefusedError, match=r"seats_fence.*ddl\('") as refused:
            await backend.acquire_fenced(Claim(SEAT, 60.0), [(guard, SEAT)])
        assert "those of this version" not in str(refused.value)
        assert await backend.inspect(SEAT) is None
        assert isinstance(await backend.acquire(Claim(SEAT, 60.0)), Grant)

    async def test_a_fence_that_is_higher_already_means_no_grant(self, backend, guard):
        far = 2**52
        await guard.raise_to(SEAT, Token(far, "a0a0a0a0"))
        with pytest.raises(StaleTokenError) as refused:
            await backend.acquire_fenced(Claim(SEAT, 60.0), [(guard, SEAT)])
        assert refused.value.fence == far
        assert await backend.inspect(SEAT) is None
        assert isinstance(await backend.acquire(Claim(SEAT, 60.0)), Grant)  # nothing is held up

    async def test_with_one_fence_of_two_refused_the_other_is_not_raised(self, backend, guard):
        await guard.raise_to("seats/plan", Token(2**52, "a0a0a0a0"))
        with pytest.raises(StaleTokenError):
            await backend.acquire_fenced(Claim(SEAT, 60.0), [(guard, SEAT), (guard, "seats/plan")])
        assert await guard.highest(SEAT) is None

    async def test_the_same_owner_again_gets_the_same_and_a_refusal_raises_nothing(self, backend, guard):
        claim = Claim(SEAT, 60.0)
        first = await backend.acquire_fenced(claim, [(guard, SEAT)])
        assert await backend.acquire_fenced(claim, [(guard, SEAT)]) == first
        assert isinstance(await backend.acquire_fenced(Claim(SEAT, 60.0), [(guard, "other")]), Busy)
        assert await guard.highest("other") is None

    async def test_a_fence_that_a_transaction_holds_delays_no_renewal(self, backend, guard, bench):
        """A transaction that writes under the fence holds it until it ends; heartbeats use another connection."""
        before = await self.granted(backend, [(guard, SEAT)])
        other = Claim("other", 60.0)
        await backend.acquire(other)
        await self.end_grant(bench)
        async with self.writing(bench, guard, before.token):
            for _ in range(3):  # while the machine stands still, the patience for the fence may end
                waiting = asyncio.create_task(backend.acquire_fenced(Claim(SEAT, 60.0), [(guard, SEAT)]))
                while not waiting.done() and not await self.waits_for_a_row(bench):
                    pass
                assert [outcome.name for outcome in await backend.renew([other])] == ["RENEWED"]
                overtaken = not waiting.done()
                with pytest.raises(BackendUnavailableError, match="another transaction keeps"):
                    await waiting
                if overtaken:
                    break
            assert overtaken, "the renewal waited for the fence"
            assert await backend.inspect(SEAT) is None
        assert (await self.granted(backend, [(guard, SEAT)])).token > before.token

    async def test_an_attempt_that_is_given_up_leaves_a_connection_that_works(self, backend, guard, bench):
        before = await self.granted(backend, [(guard, SEAT)])
        await self.end_grant(bench)
        async with self.writing(bench, guard, before.token):
            waiting = asyncio.create_task(backend.acquire_fenced(Claim(SEAT, 60.0), [(guard, SEAT)]))
            await asyncio.sleep(0.05)
            waiting.cancel()
            await asyncio.wait([waiting])
        assert isinstance(await backend.acquire_fenced(Claim("another", 60.0), [(guard, "a0a0a0a0")]), Grant)

    async def test_a_holder_of_a_lock_has_its_fence_from_the_start(self, guard, bench):
        events = []
        async with connect(bench.url, observers=[events.append]) as locks:
            aside = MemoryGuard()
            async with locks.lock(SEAT, fences=[aside, guard]) as lease:
                assert await guard.highest(SEAT) == await aside.highest(SEAT) == lease.token
                with pytest.raises(StaleTokenError):
                    async with self.writing(bench, guard, Token(lease.token - 1, "b0b0b0b0")):
                        pass
                waiting = asyncio.create_task(locks.lock(SEAT, fences=[guard], wait=0.5).acquire())
                with pytest.raises((AcquireTimeoutError, BackendUnavailableError)):
                    await waiting
                assert await guard.highest(SEAT) == lease.token
        assert [event.resource for event in events if isinstance(event, FenceRaised)] == [SEAT, SEAT]

    async def test_waiters_with_fences_are_served_in_order(self, guard, bench):
        order: list[int] = []

        async def wait(locks, number):
            async with locks.lock(SEAT, fences=[guard], wait=20) as lease:
                order.append(number)
                assert await guard.highest(SEAT) == lease.token

        async with connect(bench.url) as locks:
            async with locks.lock(SEAT, fences=[guard]):
                tasks = []
                for number in range(5):
                    tasks.append(asyncio.create_task(wait(locks, number)))
                    await bench.waiting(SEAT, number + 1)
            await asyncio.gather(*tasks)
        assert order == [0, 1, 2, 3, 4]

    async def test_after_its_connection_was_ended_the_next_attempt_opens_another(self, backend, guard, bench):
        await self.granted(backend, [(guard, SEAT)])
        await self.end_connections(bench)
        claim, answer = Claim("after", 60.0), None
        for _ in range(3):
            with contextlib.suppress(BackendUnavailableError):
                answer = await backend.acquire_fenced(claim, [(guard, "after")])
        assert isinstance(answer, Grant)
        assert await guard.highest("after") == answer.token

    @pytest.mark.slow
    async def test_a_raise_that_was_given_up_stops_waiting_at_the_server(self, guard, bench):
        await guard.raise_to(SEAT, 1)
        async with self.writing(bench, guard, 1):
            waiting = asyncio.create_task(guard.raise_to(SEAT, 2))
            while not await self.waits_for_a_row(bench):
                pass
            waiting.cancel()
            async with asyncio.timeout(20):  # the writer holds the fence all the time
                while await self.waits_for_a_row(bench):
                    pass

    @pytest.mark.slow
    @pytest.mark.parametrize("action", ["fences", "raise_to", "schema"])
    async def test_a_client_that_freezes_before_any_message_holds_nobody_up(self, action, backend, guard, bench):
        """The next taker holds while the first one is still frozen."""
        async with worker_processes() as start, connect(bench.url) as locks:
            for number in itertools.count(1):
                worker = await start(FROZEN, bench.url, action, number)
                await worker.says("ready")
                await worker.go_on()
                await until(lambda at=worker.process.pid: state(at) in {"T", "Z", ""})
                if state(worker.process.pid) != "T":
                    break
                if action == "raise_to":
                    await guard.raise_to(SEAT, number + 1)
                elif action == "schema":
                    await backend.create_schema()
                    await self.drop_schema(bench)
                else:
                    await self.end_grant(bench)
                    for fences in [], [guard]:
                        async with locks.lock(SEAT, fences=fences, wait=10):
                            pass
                assert state(worker.process.pid) == "T"
                await worker.kill()
            await worker.says("done")
        assert number > 1

    async def test_permits_and_readers_raise_their_fences_after_the_grant(self, backend, guard):
        """The number of a permit is known only then, and the statement that grants with the fence knows locks alone."""
        async with connect(backend) as locks:
            async with locks.semaphore("pool", permits=2, fences=[guard]) as one:
                two = await locks.semaphore("pool", permits=2, fences=[guard]).acquire(wait=5)
                assert [await guard.highest(f"pool/{number}") for number in (0, 1)] == [one.token, two.token]
                assert {holder.mode.word for holder in await backend.holders("pool")} == {"permit"}
                await two.release()
            catalog = locks.rwlock("catalog", fences=[guard])
            async with catalog.reader as reader:
                other = await catalog.reader.try_acquire()
                assert other is not None
                fence = await guard.highest("catalog")
                assert (fence, fence.holder) == (reader.token, reader.token.holder)
                await other.release()
            async with catalog.writer as writer:
                assert await guard.highest("catalog") == writer.token
