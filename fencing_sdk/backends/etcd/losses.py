"""
Notices of grants that end while their holder works: a key was deleted by an operator, or by the end of its lease.

One stream for each client watches the keys of all locks that it has held for more than a moment, so that a short
hold costs nothing. A watch begins at the revision at which its key was last proven, so it misses no deletion. If
the stream breaks, the next heartbeat finds the loss, as it would without a stream.

A held key is in one of these states: *new* (its watch is not requested), then *lasting* (held for a moment, so that
the next request asks for its watch), then *watched*. When its grant ends, its watch is *cancelled* with the next
request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context

import anyio

from fencing_sdk._etcd.gateway import WATCH, Gateway
from fencing_sdk._etcd.messages import Json, encoded
from fencing_sdk._etcd.streams import StreamRequests, read_watch_answer
from fencing_sdk._values.claim import Claim
from fencing_sdk._values.clock import JITTER
from fencing_sdk._values.tasks import cancel_and_wait, move_on_after
from fencing_sdk.backends._shared.background_task import BackgroundTask, BackgroundTasks
from fencing_sdk.backends._shared.losses import LossNotices, reason_for
from fencing_sdk.backends._shared.waiters import WakeUp
from fencing_sdk.backends.etcd.leases import SharedLeases
from fencing_sdk.backends.etcd.operating import EtcdOperating
from fencing_sdk.errors import BackendError, LossReason

__all__ = ["EtcdLossWatcher"]

_MOMENT = 0.1
"""Seconds for which a lock is held before its key is watched."""
_SILENCE = 15.0
"""Seconds without an answer after which the stream is closed: the client asks for progress three times as often."""
_FIRST_PAUSE = 0.1
_LAST_PAUSE = 5.0


class EtcdLossWatcher(LossNotices):
    """Watches the grants of one backend while a client wants notices."""

    def __init__(
        self,
        gateway: Gateway,
        leases: SharedLeases,
        operating: EtcdOperating,
        on_deleted: Callable[[bytes, bool], object],
    ) -> None:
        super().__init__()
        self._on_deleted = on_deleted
        """Waiters behind a key of this client watch it not by themselves: see `fencing_sdk.backends.etcd.waiters`."""
        self._gateway = gateway
        self._operating = operating
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
                sending = asyncio.get_running_loop().create_task(self._send_changes(requests), context=Context())
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
            _, held = found
            requests.append({"create_request": self._new_watch(key, held.proven)})
        self._to_cancel, self._lasting = {}, set()
        if self._new:
            self._changed.set()
        return requests

    def _new_watch(self, key: bytes, start_revision: int) -> Json:
        # From the revision at which the key was last proven, not a later one: etcd 3.5 answers no request for progress
        # of a stream with a watch that begins at a revision which is not written yet.
        self._last_id += 1
        self._watched[key] = self._last_id
        self._watch_ids.add(self._last_id)
        start = str(start_revision)
        return {"key": encoded(key), "start_revision": start, "filters": ["NOPUT"], "watch_id": self._last_id}

    def _on_answer(self, fields: Json) -> bool:
        """Read one answer. False: etcd has ended a watch that this client has not cancelled."""
        answer = read_watch_answer(fields)
        if answer.cancelled:
            return 0 < answer.watch_id <= self._last_id and answer.watch_id not in self._watch_ids
        for deletion in answer.deletions:
            self._on_deletion(deletion.key, deletion.revision)
        return True

    def _on_deletion(self, key: bytes, revision: int) -> None:
        """Notify the clients, if the deleted key was held: this client stops holding a key before it deletes it."""
        claim, found = self._held.get(key), self._leases.find(key)
        if claim is None or found is None or revision <= found[1].created:
            return
        self.ended(key)
        self._on_deleted(key, False)  # noqa: FBT003  (see `SharedLeases.on_deleted`)
        self._notifying.start(self._notify(claim))

    async def _notify(self, claim: Claim) -> None:
        """Notify the clients, after a look for the operator's reason."""
        self.notify(claim, LossReason.REVOKED, await reason_for(claim, self._operating.reasons))

    async def aclose(self) -> None:
        """Stop watching."""
        await self._task.aclose()
        await self._notifying.aclose(patience=0.0)
