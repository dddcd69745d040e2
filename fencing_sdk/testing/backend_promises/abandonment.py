"""What is left of an acquisition that was given up: nothing, once it is released by its claim."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from fencing_sdk._values.claim import Claim, Grant, Holder, Renewal
from fencing_sdk.abc import Backend
from fencing_sdk.errors import BackendUnavailableError
from fencing_sdk.testing.backend_promises.backend_under_test import BackendUnderTest

_YIELDS = (0, 1, 2, 3, 5, 8, 13, 21, 34)
"""Turns of the event loop after which a call is cancelled: before, during and after its way to the store."""


class AbandonmentPromises(BackendUnderTest):
    """Cancelled calls, and answers that were never read."""

    async def test_a_claim_is_enough_to_free_a_grant_that_nobody_read(self, backend: Backend) -> None:
        """The answer got lost: the claim is enough to release the lock, without the token."""
        claim = self.claim()
        await backend.acquire(claim)
        await backend.release(Claim(claim.name, claim.ttl, claim.owner))
        await self.granted(backend, self.claim())

    async def test_a_cancelled_acquisition_can_be_given_back(self, backend: Backend) -> None:
        """Wherever the cancellation hits, releasing by claim, again if need be, frees the lock."""
        for yields in _YIELDS:
            claim = self.claim(f"cancelled/{yields}")
            await _cut_short(backend.acquire(claim), yields)
            await self._given_back(backend, claim)

    async def test_a_release_that_overtakes_its_acquisition_is_repeated(self, backend: Backend) -> None:
        """The release finds nothing and says nothing; the late grant is freed by the next release."""
        claim = self.claim()
        await backend.release(claim)
        await self.granted(backend, claim)
        await self.refused(backend, self.claim())
        await backend.release(claim)
        await self.granted(backend, self.claim())

    async def test_a_cancelled_call_does_not_harm_the_next_ones(self, backend: Backend) -> None:
        """The connection is not left in the middle of something, and answers are not mixed up."""
        mine, other = self.claim(), self.claim("invoices/43")
        await self.granted(backend, mine)
        token = await self.granted(backend, other)
        calls: tuple[Callable[[], Awaitable[object]], ...] = (
            lambda: backend.renew([mine]),
            lambda: backend.inspect(mine.name),
            lambda: backend.acquire(self.claim()),
            lambda: backend.release(self.claim()),
        )
        for yields in _YIELDS:
            for call in calls:
                await _cut_short(_awaited(call), yields)
                holder = await backend.inspect(other.name)
                assert isinstance(holder, Holder), f"expected what inspect shows, got {holder}"
                assert (holder.name, holder.token) == (other.name, token)
        assert await self.renewed(backend, mine) is Renewal.RENEWED

    async def _given_back(self, backend: Backend, claim: Claim) -> None:
        rival = self.claim(claim.name)
        async with self.soon():
            while True:
                await backend.release(claim)
                if isinstance(await backend.acquire(rival), Grant):
                    return
                await asyncio.sleep(0.01)


async def _awaited(call: Callable[[], Awaitable[object]]) -> None:
    await call()


async def _cut_short(call: Coroutine[Any, Any, object], yields: int) -> None:
    task = asyncio.ensure_future(call)
    for _ in range(yields):
        await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError, BackendUnavailableError):
        await task
