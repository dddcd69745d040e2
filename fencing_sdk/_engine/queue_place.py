"""
A waiter's place in the store's line.

Some stores hand the lock to the waiter at the head of the line, with its token (`SupportsDirectGrant`). Others
wake it for another try (`SupportsQueue`): `QueuePlace` gives their line the same shape, so that an acquisition has
one way of waiting.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from fencing_sdk._engine.store_calls import StoreCalls
from fencing_sdk._values.claim import Claim
from fencing_sdk._values.jitter import JITTER
from fencing_sdk.abc import SupportsQueue, Tell
from fencing_sdk.errors import BackendUnavailableError


class QueuePlace:
    """A place that a task of its own keeps, so that joining and leaving never hold up the waiter."""

    __slots__ = ("_backend", "_claim", "_joined", "_queued", "_store_calls", "_task", "_tell")

    def __init__(self, backend: SupportsQueue, claim: Claim, tell: Tell, store_calls: StoreCalls) -> None:
        self._backend = backend
        self._claim = claim
        self._tell = tell
        self._store_calls = store_calls
        self._joined = False
        self._queued = False  # whether this client has to let other waiters join first
        self._task = store_calls.stand(self._keep())

    def nap(self, advice: float) -> float | None:
        """See `fencing_sdk.abc.PlaceInLine.nap`."""
        return advice if self._joined or self._queued else None

    def leave(self) -> None:
        """See `fencing_sdk.abc.PlaceInLine.leave`."""
        self._store_calls.leave(self._task)

    async def _keep(self) -> None:
        """Stay in the queue until cancelled; join again after a fault, and let the waiter poll meanwhile."""
        try:
            while True:
                try:
                    await self._stand()
                except BackendUnavailableError:
                    self._joined = False
                    await asyncio.sleep(JITTER.uniform(0.5, 1.0))
        finally:
            self._joined = self._queued = False
            self._tell()

    async def _stand(self) -> None:
        async with AsyncExitStack() as staying:
            self._queued = True
            async with self._store_calls.joining.turn():
                self._queued = False
                turn = await staying.enter_async_context(self._backend.queue(self._claim))
            self._joined = True
            self._tell()  # joined first, then one more try: a release in between is not missed
            while True:
                await turn.wait()
                self._tell()
