"""
What wakes a waiter.

A waiter's place in the line is its key, and the line is the order in which keys were created. Each waiter has a
task that does this in a loop:

1. Read the keys that were created before the waiter's own: `fencing_sdk.backends._shared.node_line` says for which one
   it waits.
2. If there is none, wake the waiter: its next try is granted. Then wait until its own key may be another one.
3. Else watch that one key until it is deleted, or, of a permit, has its number; the first waiter for a permit watches
   all permits. So a release wakes one waiter and not all of them. A key that this client has put, it also deletes,
   and its loss watcher hears when another client deletes a key that is held: then no watch is needed here, and a
   crowd in one client needs no connection for each.

The watch starts at the revision at which that key was read, so it misses no deletion, however late the stream
opens. If etcd has forgotten that revision (compaction), or the stream breaks, the task begins again after a pause.
A waiter that is not woken tries again after a quarter of the lease, or 5 s.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fencing_sdk._etcd.gateway import WATCH, Gateway
from fencing_sdk._etcd.messages import Json, encoded
from fencing_sdk._etcd.streams import read_watch_answer
from fencing_sdk._values.claim import READER, Claim
from fencing_sdk._values.clock import JITTER
from fencing_sdk._values.loop_owner import LoopOwner
from fencing_sdk._values.tasks import SharedCall, Turns
from fencing_sdk.backends._shared.background_task import BackgroundTask
from fencing_sdk.backends._shared.error_translation import ErrorTranslation
from fencing_sdk.backends._shared.node_line import Permits, rival_of
from fencing_sdk.backends._shared.waiters import Waiter, WaiterTable, WakeUp
from fencing_sdk.backends.etcd.keys import EtcdKeys, LineKey
from fencing_sdk.backends.etcd.line import EtcdLine
from fencing_sdk.backends.etcd.requests import unreadable
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

    def __init__(self, gateway: Gateway, keys: EtcdKeys, line: EtcdLine, owns: Callable[[int], bool]) -> None:
        self._gateway = gateway
        self._keys = keys
        self._line = line
        self._owns = owns
        self._watches: dict[str, SharedCall[bool]] = {}
        """By the key that is watched for readers."""
        self._waiters: WaiterTable[EtcdWaiter] = WaiterTable()
        self._in_line: Counter[str] = Counter()
        self._joining: dict[str, Turns] = {}
        self._followers: dict[bytes, set[asyncio.Future[bool]]] = {}
        """Those that wait for the deletion of a key of this client, by that key."""
        self._looks: dict[EtcdWaiter, set[bytes]] = {}
        """Those that look for the key before their own, with the keys that this client has deleted meanwhile."""

    def any_for(self, name: str) -> bool:
        """Return whether a claim of this client is in the line of *name*, so that no later one is granted before it."""
        return name in self._in_line

    @asynccontextmanager
    async def joining(self, name: str) -> AsyncIterator[None]:
        """Let the waiters of this client join a line in the order in which they came."""
        turns = self._joining.setdefault(name, Turns(1))
        try:
            async with turns.turn():
                yield
        finally:
            if turns.idle:
                self._joining.pop(name, None)

    def find(self, claim: Claim) -> EtcdWaiter | None:
        """The waiter of *claim*, if it waits by way of this object."""
        return self._waiters.find(claim)

    def add(self, claim: Claim, created: int) -> EtcdWaiter:
        """Enter the waiter whose key was created at this revision, and start its task."""
        waiter = self._waiters.add(EtcdWaiter(claim, created))
        self._in_line[claim.name] += 1
        waiter.watch.start(lambda: self._watch_line(waiter))
        return waiter

    async def remove(self, waiter: EtcdWaiter) -> None:
        """Forget *waiter* and end its task."""
        self._forget(waiter)
        await waiter.watch.aclose()

    def pop_orphans(self) -> list[Claim]:
        """Forget the waiters whose event loop was closed; return the claims that are still in the line."""
        orphans = [waiter for waiter in self._waiters if waiter.owner.loop.is_closed()]
        for waiter in orphans:
            self._forget(waiter)
        return [waiter.claim for waiter in orphans if not waiter.served]

    def _forget(self, waiter: EtcdWaiter) -> None:
        if self._waiters.find(waiter.claim) is waiter:
            self._in_line -= Counter((waiter.claim.name,))
        self._waiters.remove(waiter)

    def deleted(self, key: bytes, was_held: bool) -> None:  # noqa: FBT001  (see `SharedLeases.on_deleted`)
        """This client has deleted *key*, or has heard that it is deleted."""
        for deleted in self._looks.values():
            deleted.add(key)
        for follower in self._followers.pop(key, ()):
            if not follower.done() and not follower.get_loop().is_closed():
                follower.set_result(was_held)

    async def _watch_line(self, waiter: EtcdWaiter) -> None:
        pause = _FIRST_PAUSE
        while True:
            try:
                if await self._watch_rival(waiter):
                    pause = _FIRST_PAUSE
                    continue
            except BackendError:  # the waiter also tries by its own timer
                pass
            await asyncio.sleep(pause * JITTER.uniform(0.5, 1.0))
            pause = min(pause * 2, _LAST_PAUSE)

    async def _watch_rival(self, waiter: EtcdWaiter) -> bool:
        """Steps 1 to 3. False: the stream ended before the key was deleted."""
        waiter.moved.clear()
        claim, (rival, revision) = waiter.claim, await self._rival_of(waiter)
        if isinstance(rival, LineKey) and not claim.mode.shared and self._owns(rival.lease):
            if not await self._deleted_here(rival.key):
                return True
            rival = None  # the holder of a lock is the first: no other key is before the waiter's own
        if rival is None:
            waiter.wake()
            await waiter.moved.wait()
            return True
        if isinstance(rival, Permits):
            begin, end = self._keys.permits(claim.name)
            return await self._changed(_deletion_of(begin, revision) | {"range_end": encoded(end)})
        if claim.mode == READER:
            return await self._changed_for_all(_deletion_of(rival.key, revision))
        if rival.shared and claim.mode.shared:  # it may get its number
            return await self._changed({"key": encoded(rival.key), "start_revision": str(revision + 1)})
        return await self._changed(_deletion_of(rival.key, revision))

    async def _rival_of(self, waiter: EtcdWaiter) -> tuple[LineKey | Permits | None, int]:
        """What the waiter waits for, and this client has not deleted while it was looked for; with the revision."""
        while True:
            deleted = self._looks[waiter] = set()
            try:
                ahead, revision = await self._line.ahead(waiter.claim, waiter.created)
            finally:
                del self._looks[waiter]
            with ErrorTranslation(unreadable, "queue"):
                rival = rival_of(waiter.claim.mode, ahead)
            if not isinstance(rival, LineKey) or rival.key not in deleted:
                return rival, revision

    async def _deleted_here(self, key: bytes) -> bool:
        """Wait until this client has deleted *key*; return whether that was a lock, released."""
        follower: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        followers = self._followers.setdefault(key, set())
        followers.add(follower)
        try:
            return await follower
        finally:
            followers.discard(follower)
            if not followers and self._followers.get(key) is followers:
                del self._followers[key]

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
