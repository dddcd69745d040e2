"""A waiter's place in the store's queue."""

from __future__ import annotations

import asyncio
import random

from fencing_sdk._values.claim import Claim
from fencing_sdk.abc import SupportsQueue
from fencing_sdk.errors import BackendUnavailableError


class QueuePlace:
    """A place that a task of its own keeps, so that joining and leaving never hold up the waiter."""

    __slots__ = ("_backend", "_claim", "joined", "task", "woken")

    def __init__(self, backend: SupportsQueue, claim: Claim) -> None:
        self._backend = backend
        self._claim = claim
        self.joined = False
        self.woken = asyncio.Event()
        """Set when the waiter should try again."""
        self.task: asyncio.Task[None] | None = None
        """What runs `keep`."""

    async def keep(self) -> None:
        """Stay in the queue until cancelled; join again after a fault, and let the waiter poll meanwhile."""
        try:
            while True:
                try:
                    await self._stand()
                except BackendUnavailableError:
                    self.joined = False
                    await asyncio.sleep(random.uniform(0.5, 1.0))
        finally:
            self.joined = False
            self.woken.set()

    async def _stand(self) -> None:
        async with self._backend.queue(self._claim) as turn:
            self.joined = True
            self.woken.set()  # joined first, then one more try: a release in between is not missed
            while True:
                await turn.wait()
                self.woken.set()
