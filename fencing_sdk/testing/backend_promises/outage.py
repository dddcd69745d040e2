"""A store out of reach: its errors are ours, its outcome is unknown, and nothing has to be built anew."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from fencing_sdk._client import LockClient
from fencing_sdk._values.claim import Claim, Renewal
from fencing_sdk.abc import Backend
from fencing_sdk.errors import BackendUnavailableError
from fencing_sdk.events import Event
from fencing_sdk.testing._powers import needs
from fencing_sdk.testing.backend_promises.backend_under_test import NAME, BackendUnderTest

_CALLS: dict[str, Callable[[Backend, Claim], Awaitable[object]]] = {
    "acquire": lambda backend, claim: backend.acquire(claim),
    "renew": lambda backend, claim: backend.renew([claim]),
    "release": lambda backend, claim: backend.release(claim),
    "inspect": lambda backend, claim: backend.inspect(claim.name),
}


class OutagePromises(BackendUnderTest):
    """Error translation and recovery. For backends that declare ``breakable``."""

    @needs("breakable")
    @pytest.mark.parametrize("operation", _CALLS)
    async def test_a_store_out_of_reach_is_an_error_of_ours(self, backend: Backend, operation: str) -> None:
        """Of one class for every driver; with the driver's error as its cause, and without secrets."""
        claim = self.claim()
        await self.granted(backend, claim)
        async with self.soon(), self.break_store(backend):
            with pytest.raises(BackendUnavailableError) as raised:
                await _CALLS[operation](backend, claim)
        assert raised.value.operation == operation
        assert raised.value.backend
        assert raised.value.__cause__ is not None
        assert claim.owner not in f"{raised.value} {raised.value!r} {raised.value.__cause__!r}"

    @needs("breakable")
    async def test_the_same_object_works_again_after_an_outage(self, backend: Backend) -> None:
        """It reconnects by itself, and a grant that was given before is still known."""
        claim = self.claim()
        token = await self.granted(backend, claim)
        async with self.soon(), self.break_store(backend):
            with pytest.raises(BackendUnavailableError):
                await backend.inspect(NAME)
        assert await self.renewed(backend, claim) is Renewal.RENEWED
        assert await self.granted(backend, claim) == token
        await backend.release(claim)
        await self.granted(backend, self.claim())

    @needs("breakable")
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
