"""Loss notices: a holder hears at once that its grant was taken away."""

from __future__ import annotations

import asyncio

import pytest

from fencing_sdk._client import LockClient
from fencing_sdk._values.claim import Claim
from fencing_sdk.errors import LeaseLostError, LossReason
from fencing_sdk.testing._powers import needs
from fencing_sdk.testing.backend_promises.backend_under_test import NAME, BackendUnderTest, NoticingBackend


class NoticePromises(BackendUnderTest):
    """For backends that declare ``notices``."""

    @needs("notices")
    async def test_the_holder_is_told_that_its_grant_was_taken_away(self, backend: NoticingBackend) -> None:
        """The notice names the claim and the reason, and the lock is free."""
        told: asyncio.Queue[tuple[str, str, LossReason]] = asyncio.Queue()
        backend.on_loss(lambda claim, reason, *_: told.put_nowait((claim.name, claim.owner, reason)))
        claim = self.claim()
        await self.granted(backend, claim)
        await self.revoke(backend, NAME)
        async with self.soon():
            assert await told.get() == (NAME, claim.owner, LossReason.REVOKED)
        await self.granted(backend, self.claim())

    @needs("notices")
    async def test_giving_back_is_no_loss(self, backend: NoticingBackend) -> None:
        """Only a grant that ends behind its holder's back is worth a notice."""
        told: list[Claim] = []
        backend.on_loss(lambda claim, *_: told.append(claim))
        claim = self.claim()
        await self.granted(backend, claim)
        await backend.release(claim)
        await self.revoke(backend, NAME)
        await self.granted(backend, self.claim())
        assert not told

    @needs("notices")
    async def test_notices_stop_when_nobody_wants_them(self, backend: NoticingBackend) -> None:
        """One client leaves, the others still hear."""
        told: asyncio.Queue[str] = asyncio.Queue()
        stop = backend.on_loss(lambda *_: told.put_nowait("left"))
        backend.on_loss(lambda *_: told.put_nowait("here"))
        stop()
        stop()
        await self.granted(backend, self.claim())
        await self.revoke(backend, NAME)
        async with self.soon():
            assert await told.get() == "here"
        assert told.empty()

    @needs("notices")
    async def test_a_notice_ends_the_lease_and_its_work(self, backend: NoticingBackend) -> None:
        """No heartbeat is needed: the next one would be minutes away."""
        async with LockClient(backend) as locks:
            working = asyncio.create_task(_work(locks))
            await self.taken(backend)
            await self.revoke(backend, NAME)
            with pytest.raises(LeaseLostError) as lost:
                await asyncio.wait_for(working, self.patience)
        assert lost.value.reason is LossReason.REVOKED


async def _work(locks: LockClient) -> None:
    async with locks.lock(NAME, ttl=3600):
        await asyncio.Event().wait()
