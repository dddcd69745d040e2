"""
What wakes a waiter.

A waiter's place in the line is its key, and the line is the order in which keys were created. Each waiter has a
task that does this in a loop:

1. Read which key was created just before the waiter's own.
2. If there is none, wake the waiter: its next try is granted. Then wait until its own key may be another one.
3. Else watch that one key until it is deleted. So a release wakes one waiter and not all of them.

Shares differ in step 1. A reader does not wait for readers: it watches the last key before its own that is no reader's.
A permit watches the last waiter before its own, until that leaves or has its number. If there is none, it is the head
of the line, and watches all permits: of many that wait, one is woken by a permit that is given back.

The watch starts at the revision at which that key was read, so it misses no deletion, however late the stream
opens. If etcd has forgotten that revision (compaction), or the stream breaks, the task begins again after a pause.
A waiter that is not woken tries again after a quarter of the lease, or 5 s.
"""

from __future__ import annotations

import asyncio

from fencing_sdk._etcd.gateway import WATCH, Gateway
from fencing_sdk._etcd.json_codec import Json, encoded
from fencing_sdk._values.claim import READER, Claim, Permit
from fencing_sdk._values.jitter import JITTER
from fencing_sdk._values.loop_owner import LoopOwner
from fencing_sdk._values.shared_call import SharedCall
from fencing_sdk.backends._shared.background_task import BackgroundTask
from fencing_sdk.backends._shared.error_translation import ErrorTranslation
from fencing_sdk.backends._shared.waiters import Waiter, WaiterTable
from fencing_sdk.backends._shared.wakeup import WakeUp
from fencing_sdk.backends.etcd.errors import unreadable
from fencing_sdk.backends.etcd.keys import KeyFacts
from fencing_sdk.backends.etcd.requests import EtcdRequests
from fencing_sdk.backends.etcd.shares import EtcdShares, lowest_free
from fencing_sdk.backends.etcd.watch_answers import read_watch_answer
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

    def __init__(self, gateway: Gateway, requests: EtcdRequests, shares: EtcdShares) -> None:
        self._gateway = gateway
        self._requests = requests
        self._shares = shares
        self._watches: dict[str, SharedCall[bool]] = {}
        """By the key that is watched for readers."""
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
            await asyncio.sleep(pause * JITTER.uniform(0.5, 1.0))
            pause = min(pause * 2, _LAST_PAUSE)

    async def _watch_predecessor(self, waiter: EtcdWaiter) -> bool:
        """Steps 1 to 3. False: the stream ended before the key was deleted."""
        waiter.moved.clear()
        watched = await self._to_watch(waiter)
        if watched is None:
            waiter.wake()
            await waiter.moved.wait()
            return True
        if waiter.claim.mode == READER:
            return await self._changed_for_all(watched)
        return await self._changed(watched)

    async def _to_watch(self, waiter: EtcdWaiter) -> Json | None:
        """The watch that tells when to look again; None if it is the waiter's turn."""
        claim = waiter.claim
        if isinstance(claim.mode, Permit):
            return await self._before_permit(waiter, claim.mode)
        if claim.mode == READER:
            rivals, revision = await self._shares.rivals(claim.name)
            before = next((entry for entry in reversed(rivals) if entry.created < waiter.created), None)
        else:
            before, revision = await self._requests.predecessor("queue", claim, waiter.created)
        return None if before is None else _deletion_of(before.key, revision)

    async def _before_permit(self, waiter: EtcdWaiter, mode: Permit) -> Json | None:
        line, revision = await self._requests.before("queue", waiter.claim, waiter.created)
        with ErrorTranslation(unreadable, "queue"):
            waiting = next((entry for entry in reversed(line) if KeyFacts.read(entry).permit is None), None)
            if waiting is not None:
                return {"key": encoded(waiting.key), "start_revision": str(revision + 1)}
            if lowest_free(mode, line) is not None:
                return None
        begin, end = self._requests.keys.permits(waiter.claim.name)
        return _deletion_of(begin, revision) | {"range_end": encoded(end)}

    async def _changed_for_all(self, watched: Json) -> bool:
        """Watch a key once for all readers that wait for it. A watch that was opened earlier misses no more."""
        key = watched["key"]
        call = self._watches.get(key)
        if call is None or not call.can_join(0.0):
            call = self._watches[key] = SharedCall(lambda: self._changed(watched), 0.0)
        try:
            return await call.join()
        finally:
            if self._watches.get(key) is call and not call.can_join(0.0):
                del self._watches[key]

    async def _changed(self, watched: Json) -> bool:
        async with self._gateway.stream("queue", WATCH, {"create_request": watched}) as answers:
            async for fields in answers:
                answer = read_watch_answer(fields)
                if answer.cancelled:
                    return False
                if answer.deletions or answer.puts:
                    return True
        return False


def _deletion_of(key: bytes, revision: int) -> Json:
    """A watch for deletions that came after a look at this revision."""
    return {"key": encoded(key), "start_revision": str(revision + 1), "filters": ["NOPUT"]}
