"""
Watches: a waiter is woken when the key before its own is deleted, and a holder hears that its key was.

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

The held keys of a client are watched by one stream, those that it has held for more than a moment, so that a short
hold costs nothing. A watch begins at the revision at which its key was last proven, so it misses no deletion. If
the stream breaks, the next heartbeat finds the loss, as it would without a stream.

A held key is in one of these states: *new* (its watch is not requested), then *lasting* (held for a moment, so that
the next request asks for its watch), then *watched*. When its grant ends, its watch is *cancelled* with the next
request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import Context

import anyio

from fencing_sdk._etcd import WATCH, Gateway, Json, StreamRequests, encoded, read_watch_answer
from fencing_sdk._values.claim import READER, Claim
from fencing_sdk._values.clock import JITTER
from fencing_sdk._values.loop_owner import LoopOwner
from fencing_sdk._values.tasks import SharedCall, Turns, cancel_and_wait, move_on_after, waiting_for
from fencing_sdk.backends._shared.background_task import BackgroundTask, BackgroundTasks
from fencing_sdk.backends._shared.error_translation import ErrorTranslation
from fencing_sdk.backends._shared.losses import LossNotices, reason_for
from fencing_sdk.backends._shared.node_line import Permits, rival_of
from fencing_sdk.backends._shared.waiters import Waiter, WaiterTable, WakeUp
from fencing_sdk.backends.etcd.keys import EtcdKeys, LineKey
from fencing_sdk.backends.etcd.leases import SharedLeases
from fencing_sdk.backends.etcd.line import EtcdLine, unreadable
from fencing_sdk.errors import BackendError, LossReason

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
        """Watches that readers share, by their key."""
        self._waiters: WaiterTable[EtcdWaiter] = WaiterTable()
        self._in_line: Counter[str] = Counter()
        self._joining: dict[str, Turns] = {}
        self._followers: dict[bytes, set[asyncio.Future[bool]]] = {}
        """Waiters for the deletion of a key of this client, by that key."""
        self._looks: dict[EtcdWaiter, set[bytes]] = {}
        """Keys that this client has deleted while a waiter looks for the key before its own."""

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
        waiter.watch.start(lambda: self._watch_line(waiter), waiting_for(claim.name))
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
        """Return the key to wait for, unless this client has deleted it meanwhile, and the revision of the look."""
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


_MOMENT = 0.1
"""Seconds for which a lock is held before its key is watched."""
_SILENCE = 15.0
"""Seconds without an answer after which the stream is closed: the client asks for progress three times as often."""


class EtcdLossWatcher(LossNotices):
    """Watches the grants of one backend while a client wants notices."""

    def __init__(
        self,
        gateway: Gateway,
        leases: SharedLeases,
        reasons: Callable[[Sequence[Claim]], Awaitable[Sequence[str | None]]],
        on_deleted: Callable[[bytes, bool], object],
    ) -> None:
        super().__init__()
        self._on_deleted = on_deleted
        """Waiters behind a key of this client watch it not by themselves: see `fencing_sdk.backends.etcd.watches`."""
        self._gateway = gateway
        self._reasons = reasons
        self._leases = leases
        self._held: dict[bytes, Claim] = {}
        self._new: dict[bytes, None] = {}
        self._lasting: set[bytes] = set()
        self._watched: dict[bytes, int] = {}
        """The id of each watch in the open stream, by key."""
        self._watch_ids: set[int] = set()
        self._to_cancel: dict[bytes, None] = {}
        self._last_id = 0
        self._changed = WakeUp()
        self._task = BackgroundTask()
        self._notifying = BackgroundTasks()

    def granted(self, key: bytes, claim: Claim) -> None:
        """Watch a grant, or one that was renewed, if a client wants notices."""
        if not self.wanted or (key in self._held and self._task.running):
            return
        self._held[key] = claim
        self._new[key] = None
        if not self._task.running:  # this is the first grant, or the first renewal after the backend was closed
            self._changed = WakeUp()
            self._reset_stream()
            self._task.start(self._keep_watching)
        self._changed.set()

    def ended(self, key: bytes) -> None:
        """Stop watching a grant: its holder has released it, or knows that it is lost."""
        if self._held.pop(key, None) is None:
            return
        self._new.pop(key, None)
        if key in self._watched:
            self._to_cancel[key] = None
            self._changed.set()

    async def _keep_watching(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            await self._next_change()
            if not (requests := self._next_requests()):
                continue
            try:
                if await self._watch(requests):
                    pause = _FIRST_PAUSE
            except BackendError:  # until the next stream, the heartbeat finds losses
                pass
            self._reset_stream()
            self._changed.set()
            await asyncio.sleep(pause * JITTER.uniform(0.5, 1.0))
            pause = min(pause * 2, _LAST_PAUSE)

    def _reset_stream(self) -> None:
        """The next stream has no watches: every held key is new to it."""
        self._watched, self._watch_ids, self._to_cancel, self._lasting = {}, set(), {}, set()
        self._new = dict.fromkeys(self._held)

    async def _next_change(self) -> None:
        """Wait until a grant begins or ends, and then a moment: a key that is new before and after it is lasting."""
        await self._changed.wait()
        self._changed.clear()
        new = self._new.keys() - self._lasting
        await asyncio.sleep(_MOMENT)
        self._lasting |= new & self._new.keys()

    async def _watch(self, first: list[Json]) -> bool:
        """Watch until the stream ends or is silent; return whether it had an answer."""
        requests, answered = StreamRequests(), False
        requests.send(first)
        with move_on_after(_SILENCE) as listening:
            async with self._gateway.stream("watch", WATCH, requests) as answers:
                loop, changes = asyncio.get_running_loop(), self._send_changes(requests)
                sending = loop.create_task(changes, context=Context(), name="fencing-store")
                try:
                    async for fields in answers:
                        listening.deadline = anyio.current_time() + _SILENCE
                        if not self._on_answer(fields):
                            break
                        answered = True
                finally:
                    await cancel_and_wait(sending)
        return answered

    async def _send_changes(self, requests: StreamRequests) -> None:
        while True:
            with move_on_after(_SILENCE / 3) as waiting:
                await self._next_change()
            if not requests.send(self._next_requests()) and waiting.cancelled_caught:
                requests.send([{"progress_request": {}}])

    def _next_requests(self) -> list[Json]:
        """Cancel the watches of grants that have ended, and watch the keys that are lasting."""
        requests: list[Json] = []
        for key in self._to_cancel:
            if (watch_id := self._watched.pop(key, None)) is not None:
                self._watch_ids.discard(watch_id)
                requests.append({"cancel_request": {"watch_id": watch_id}})
        for key in self._lasting & self._new.keys():
            del self._new[key]
            if (found := self._leases.find(key)) is None:  # the heartbeat has found that the grant is lost
                self._held.pop(key, None)
                continue
            self._last_id += 1
            self._watched[key] = self._last_id
            self._watch_ids.add(self._last_id)
            # From the revision at which the key was last proven, not a later one: etcd 3.5 answers no request for
            # progress of a stream with a watch that begins at a revision which is not written yet.
            start = str(found[1].proven)
            watch = {"key": encoded(key), "start_revision": start, "filters": ["NOPUT"], "watch_id": self._last_id}
            requests.append({"create_request": watch})
        self._to_cancel, self._lasting = {}, set()
        if self._new:
            self._changed.set()
        return requests

    def _on_answer(self, fields: Json) -> bool:
        """Read one answer. False: etcd has ended a watch that this client has not cancelled."""
        answer = read_watch_answer(fields)
        if answer.cancelled:
            return 0 < answer.watch_id <= self._last_id and answer.watch_id not in self._watch_ids
        for key, revision in answer.deletions:
            claim, found = self._held.get(key), self._leases.find(key)
            if claim is not None and found is not None and revision > found[1].created:
                self.ended(key)  # this client stops holding a key before it deletes it, so another one has deleted it
                self._on_deleted(key, False)  # noqa: FBT003  (see `SharedLeases.on_deleted`)
                self._notifying.start(self._notify(claim))
        return True

    async def _notify(self, claim: Claim) -> None:
        """Notify the clients, after a look for the operator's reason."""
        self.notify(claim, LossReason.REVOKED, await reason_for(claim, self._reasons))

    async def aclose(self) -> None:
        """Stop watching."""
        await self._task.aclose()
        await self._notifying.aclose(patience=0.0)
