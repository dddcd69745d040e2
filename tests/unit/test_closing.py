"""A client that is closed while bodies run under its locks: nobody else gets in before they have ended (P1)."""

import asyncio
import contextlib

import anyio
import pytest
from virtual_time import in_virtual_time, now

from fencing_sdk import LeaseLostError, LockClient, LossReason
from fencing_sdk._clock import LoopClock
from fencing_sdk.backends.memory import MemoryBackend

TTL = 10.0
PATIENCE = 5.0
"""Seconds for which closing waits for bodies."""


class TwoClients:
    """One that will be closed, and one that waits for the same lock."""

    def __init__(self) -> None:
        store = MemoryBackend(clock=LoopClock())
        self.ours, self.theirs = (LockClient(store, clock=LoopClock(), watch_stalls=False) for _ in range(2))
        self.log: list[str] = []

    async def __aenter__(self):
        await self.theirs.__aenter__()
        await self.ours.__aenter__()
        return self

    async def __aexit__(self, *_):
        await self.ours.aclose()
        await self.theirs.aclose()

    async def next_holder(self) -> float:
        async with self.theirs.lock("a", ttl=TTL):
            self.log.append("next holder")
            return now()


@in_virtual_time
async def test_the_lock_is_given_back_when_the_body_has_cleaned_up():
    async with TwoClients() as clients:

        async def body():
            async with clients.ours.lock("a", ttl=TTL):
                try:
                    await asyncio.sleep(3600)
                finally:
                    with anyio.CancelScope(shield=True):
                        await asyncio.sleep(1)
                    clients.log.append("cleaned up")

        working = asyncio.create_task(body())
        await asyncio.sleep(1)
        waiting = asyncio.create_task(clients.next_holder())
        await asyncio.sleep(1)
        await clients.ours.aclose()
        assert await waiting == pytest.approx(3, abs=0.01), "as soon as the body has ended, and not by the ttl"
        assert clients.log == ["cleaned up", "next holder"]
        with pytest.raises(LeaseLostError) as left:
            await working
        assert left.value.reason is LossReason.CLOSED


@in_virtual_time
async def test_the_lock_of_a_body_that_goes_on_is_left_to_its_ttl():
    async with TwoClients() as clients:

        async def body():
            async with clients.ours.lock("a", ttl=TTL):
                with anyio.CancelScope(shield=True):
                    await asyncio.sleep(30)

        working = asyncio.create_task(body())
        await asyncio.sleep(1)
        waiting = asyncio.create_task(clients.next_holder())
        closed = now()
        await clients.ours.aclose()
        assert now() - closed == pytest.approx(PATIENCE, abs=0.01), "closing is bounded"
        assert await waiting >= TTL
        assert not working.done()
        with contextlib.suppress(LeaseLostError):
            await working


@in_virtual_time
async def test_whoever_closes_the_client_in_its_own_body_does_not_wait_for_itself():
    async with TwoClients() as clients:
        with pytest.raises(LeaseLostError):
            async with clients.ours.lock("a", ttl=TTL):
                await clients.ours.aclose()
                assert now() == 0.0
        assert await clients.next_holder() == 0.0


@in_virtual_time
async def test_a_plain_handle_and_a_body_that_is_gone_are_given_back_at_once():
    async with TwoClients() as clients:
        handle = await clients.ours.lock("a", ttl=TTL).acquire()
        waiting = asyncio.create_task(clients.next_holder())
        await asyncio.sleep(1)
        await clients.ours.aclose()
        assert await waiting == 1.0
        assert handle.lost_reason is LossReason.CLOSED
