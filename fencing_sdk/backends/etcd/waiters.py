"""
What wakes a waiter.

A waiter's place in the line is its key, and the line is the order in which keys were created. Each waiter has a
task that does this in a loop:

1. Read which key was created just before the waiter's own.
2. If there is none, wake the waiter: its next try is granted. Then wait until its own key may be another one.
3. Else watch that one key until it is deleted. So a release wakes one waiter and not all of them.

The watch starts at the revision at which that key was read, so it misses no deletion, however late the stream
opens. If etcd has forgotten that revision (compaction), or the stream breaks, the task begins again after a pause.
"""

from __future__ import annotations

import asyncio
import random

from fencing_sdk._etcd.gateway import WATCH, Gateway
from fencing_sdk._etcd.json_codec import encoded
from fencing_sdk._values.claim import Claim
from fencing_sdk._values.ownership import LoopOwner
from fencing_sdk.backends._shared.background_task import BackgroundTask
from fencing_sdk.backends._shared.waiters import Waiter, WaiterTable
from fencing_sdk.backends._shared.wakeup import WakeUp
from fencing_sdk.backends.etcd.requests import EtcdRequests
from fencing_sdk.backends.etcd.watches import read_watch_answer
from fencing_sdk.errors import BackendError

__all__ = ["EtcdWaiter", "EtcdWaiters"]

_FIRST_PAUSE = 0.05
_LAST_PAUSE = 2.0


class EtcdWaiter(Waiter):
    """A caller that waits, and the task that watches the key before its own."""

    __slots__ = ("created", "moved", "owner", "watch")

    def __init__(self, claim: Claim, created: int) -> None:
        super().__init__(claim)
        self.created = created
        """The revision at which the waiter's own key was created."""
        self.moved = WakeUp()
        self.owner = LoopOwner()
        self.watch = BackgroundTask()

    def move(self, created: int) -> None:
        """Take note of where the own key is: it may have been deleted, and put again at the end of the line."""
        if created != self.created:
            self.created = created
            self.moved.set()


class EtcdWaiters:
    """The waiters of one backend object."""

    def __init__(self, gateway: Gateway, requests: EtcdRequests) -> None:
        self._gateway = gateway
        self._requests = requests
        self._waiters: WaiterTable[EtcdWaiter] = WaiterTable()

    def find(self, claim: Claim) -> EtcdWaiter | None:
        """The waiter of *claim*, if it waits by way of this object."""
        return self._waiters.find(claim)

    def add(self, claim: Claim, created: int) -> EtcdWaiter:
        """Enter the waiter whose key was created at this revision, and start its task."""
        waiter = self._waiters.add(EtcdWaiter(claim, created))
        waiter.watch.start(lambda: self._watch_line(waiter))
        return waiter

    async def remove(self, waiter: EtcdWaiter) -> None:
        """Forget *waiter* and end its task."""
        self._waiters.remove(waiter)
        await waiter.watch.aclose()

    def pop_orphans(self) -> list[Claim]:
        """Forget the waiters whose event loop was closed; return the claims that are still in the line."""
        orphans = [waiter for waiter in self._waiters if waiter.owner.loop.is_closed()]
        for waiter in orphans:
            self._waiters.remove(waiter)
        return [waiter.claim for waiter in orphans if not waiter.served]

    async def _watch_line(self, waiter: EtcdWaiter) -> None:
        pause = _FIRST_PAUSE
        while True:
            try:
                if await self._watch_predecessor(waiter):
                    pause = _FIRST_PAUSE
                    continue
            except BackendError:  # the waiter also tries by its own timer
                pass
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, _LAST_PAUSE)

    async def _watch_predecessor(self, waiter: EtcdWaiter) -> bool:
        """Steps 1 to 3. False: the stream ended before the key was deleted."""
        waiter.moved.clear()
        before, revision = await self._requests.predecessor("queue", waiter.claim, waiter.created)
        if before is None:
            waiter.wake()
            await waiter.moved.wait()
            return True
        return await self._deleted(before.key, revision + 1)

    async def _deleted(self, key: bytes, start_revision: int) -> bool:
        request = {"key": encoded(key), "start_revision": str(start_revision), "filters": ["NOPUT"]}
        async with self._gateway.stream("queue", WATCH, {"create_request": request}) as answers:
            async for fields in answers:
                answer = read_watch_answer(fields)
                if answer.cancelled:
                    return False
                if any(deletion.key == key for deletion in answer.deletions):
                    return True
        return False
