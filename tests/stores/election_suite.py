"""Elections among real processes, which get real signals, and through a network with faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator

import anyio
import pytest
from patience import until
from stays import eventually
from store_bench import StoreBench, WaitersBench
from worker_processes import LIMIT as PATIENCE
from worker_processes import WORKERS, WorkerProcess, worker_processes

from fencing_sdk import LockClient, connect
from fencing_sdk.recipes import Election, ElectionStanding

TTL = 4.0
LONG_TTL = 600.0
"""Longer than any of these tests: nothing in it waits for the end of a ttl."""


class Candidate(WorkerProcess):
    """A process that stands."""

    async def moment(self, word: str) -> tuple[float, int]:
        """Wait for the line *word*, and return its moment and its token."""
        moment, token = await self.says(word)
        return float(moment), int(token)


@contextlib.asynccontextmanager
async def candidate(url: str, *, ttl: float = TTL, cleanup: float = 0.0) -> AsyncIterator[Candidate]:
    async with worker_processes(Candidate) as start:
        yield await start(WORKERS / "standing.py", url, "scheduler", ttl, cleanup)


class ElectionSuite:
    """What an election does on every store that processes share."""

    @pytest.mark.slow
    async def test_a_leader_that_is_told_to_end_hands_over_when_its_body_has_ended(self, bench: WaitersBench):
        async with candidate(bench.url, ttl=LONG_TTL, cleanup=0.5) as leader:
            _, token = await leader.moment("leads")
            async with candidate(bench.url, ttl=LONG_TTL) as other:
                await self._hand_over(bench, leader, token, other)

    async def _hand_over(self, bench: WaitersBench, leader: Candidate, token: int, other: Candidate) -> None:
        await bench.waiting("scheduler", 1)
        leader.process.send_signal(signal.SIGTERM)
        ended, _ = await leader.moment("ended")
        began, next_token = await other.moment("leads")
        assert ended <= began
        assert next_token > token
        await leader.says("left")
        assert await leader.process.wait() == 0
        other.process.send_signal(signal.SIGINT)
        await other.moment("ended")
        await other.says("left")
        assert await other.process.wait() == 0

    @pytest.mark.slow
    async def test_a_leader_that_is_killed_is_followed_after_one_ttl(self, bench: WaitersBench):
        async with candidate(bench.url) as leader:
            await leader.moment("leads")
            async with connect(bench.url) as locks:
                election = locks.election("scheduler", ttl=TTL)
                following = asyncio.create_task(_first_token(election))
                await bench.waiting("scheduler", 1)
                assert election.standing is ElectionStanding.CANDIDATE
                holder = await election.leader()
                assert holder is not None
                assert holder.label is not None
                assert json.loads(holder.label)["pid"] == leader.process.pid
                leader.process.kill()
                with anyio.fail_after(PATIENCE):
                    assert await following > holder.token


class FaultyElectionSuite:
    """What an election does when its store is away: for stores that are servers."""

    @pytest.mark.slow
    async def test_an_outage_longer_than_a_ttl_ends_the_term_and_not_the_loop(self, bench: StoreBench):
        ttl, tokens = 3.0, []
        led, ended = asyncio.Event(), asyncio.Event()

        async def leads() -> None:
            async for term in election:
                async with term as lease:
                    tokens.append(int(lease.token))
                    led.set()
                    try:
                        await asyncio.Event().wait()
                    finally:
                        assert not lease.held or len(tokens) > 1
                        ended.set()

        async with connect(bench.by_proxy) as locks:
            election = locks.election("scheduler", ttl=ttl)
            leading = asyncio.create_task(leads())
            with anyio.fail_after(PATIENCE):
                await led.wait()
                led.clear()
                bench.proxy.blackhole()
                await ended.wait()
                assert not election.leading
                async with connect(bench.url) as others:
                    await eventually(lambda: _vacant(others), what="the grant has ended")
                await until(lambda: election.standing in {ElectionStanding.CANDIDATE, ElectionStanding.UNAVAILABLE})
                bench.proxy.cut()
                bench.proxy.heal()
                await led.wait()
            assert tokens == sorted(set(tokens))
            assert election.standing is ElectionStanding.LEADING
            leading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await leading


async def _vacant(locks: LockClient) -> bool:
    return await locks.election("scheduler").leader() is None


async def _first_token(election: Election) -> int:
    async for term in election:
        async with term as lease:
            return int(lease.token)
    raise AssertionError("drained")
