"""
Grants that end behind their holder's back, noticed by push.

One stream for each client watches the key of every lock that it holds for more than a moment: who
holds locks for less pays nothing. A watch begins at the revision at which its key was last proven,
so nothing that happened before the stream was opened is missed. Where the stream breaks, the
next heartbeat notices, as it would without one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextvars import Context

import anyio

from fencing_sdk._etcd.gateway import WATCH, Gateway, Requests
from fencing_sdk._etcd.json_codec import Json, encoded
from fencing_sdk._etcd.shared_call import ended
from fencing_sdk._values.claim import Claim
from fencing_sdk.abc import LossNotice
from fencing_sdk.backends._shared.wakeup import WakeUp
from fencing_sdk.backends.etcd._leases import Leases
from fencing_sdk.backends.etcd._watches import told
from fencing_sdk.errors import BackendError, LossReason

__all__ = ["Losses"]

_MOMENT = 0.1
"""Seconds for which a lock is held before its key is watched."""
_SILENCE = 15.0
"""Seconds without a word after which the member is given up: it is asked for one three times as often."""
_FIRST_PAUSE = 0.1
_LAST_PAUSE = 5.0


class Losses:
    """The grants of one backend, and who wants to hear of their loss."""

    def __init__(self, gateway: Gateway, leases: Leases) -> None:
        self._gateway = gateway
        self._leases = leases
        self._notices: dict[LossNotice, None] = {}
        self._held: dict[bytes, Claim] = {}
        self._watches: dict[bytes, int] = {}
        """The number of each watch of the stream that is open."""
        self._numbers: set[int] = set()
        self._begun: dict[bytes, None] = {}
        self._lasting: set[bytes] = set()
        self._ended: dict[bytes, None] = {}
        self._last = 0
        self._changed = WakeUp()
        self._watching: asyncio.Task[None] | None = None

    def on_loss(self, notice: LossNotice) -> Callable[[], None]:
        """See `fencing_sdk.abc.SupportsLossNotice.on_loss`."""
        self._notices[notice] = None
        return lambda: self._notices.pop(notice, None)

    def granted(self, key: bytes, claim: Claim) -> None:
        """Watch over a grant, if anybody wants to know."""
        if not self._notices or key in self._held:
            return
        self._held[key] = claim
        self._begun[key] = None
        watching = self._watching
        if watching is None or watching.done() or watching.get_loop() is not asyncio.get_running_loop():
            self._changed = WakeUp()
            self._begin_anew()
            self._watching = asyncio.get_running_loop().create_task(self._watch_on(), context=Context())
        self._changed.set()

    def ended(self, key: bytes) -> None:
        """A grant ended with its holder's knowledge."""
        if self._held.pop(key, None) is None:
            return
        self._begun.pop(key, None)
        if key in self._watches:
            self._ended[key] = None
            self._changed.set()

    async def _watch_on(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            await self._moment()
            if not (news := self._news()):
                continue
            try:
                if await self._watch(news):
                    pause = _FIRST_PAUSE
            except BackendError:  # the heartbeat goes on asking
                pass
            self._begin_anew()
            self._changed.set()
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, _LAST_PAUSE)

    def _begin_anew(self) -> None:
        """The next stream knows of nothing."""
        self._watches, self._numbers, self._ended, self._lasting = {}, set(), {}, set()
        self._begun = dict.fromkeys(self._held)

    async def _moment(self) -> None:
        """Wait until something has changed, and a moment more."""
        await self._changed.wait()
        self._changed.clear()
        begun = self._begun.keys() - self._lasting
        await asyncio.sleep(_MOMENT)
        self._lasting |= begun & self._begun.keys()

    async def _watch(self, news: list[Json]) -> bool:
        """Watch until the stream ends or falls silent; whether it was of any use."""
        requests, heard = Requests(), False
        requests.send(news)
        with anyio.move_on_after(_SILENCE) as listening:
            async with self._gateway.stream("watch", WATCH, requests) as answers:
                sending = asyncio.get_running_loop().create_task(self._send_on(requests), context=Context())
                try:
                    async for fields in answers:
                        listening.deadline = anyio.current_time() + _SILENCE
                        if not self._hear(fields):
                            break
                        heard = True
                finally:
                    await ended(sending)
        return heard

    async def _send_on(self, requests: Requests) -> None:
        while True:
            with anyio.move_on_after(_SILENCE / 3) as waiting:
                await self._moment()
            if not requests.send(self._news()) and waiting.cancelled_caught:
                requests.send([{"progress_request": {}}])

    def _news(self) -> list[Json]:
        """What to tell etcd of the grants that ended, and of those that began and have lasted for a moment."""
        news: list[Json] = []
        for key in self._ended:
            if (watch := self._watches.pop(key, None)) is not None:
                self._numbers.discard(watch)
                news.append({"cancel_request": {"watch_id": watch}})
        for key in self._lasting & self._begun.keys():
            del self._begun[key]
            if (found := self._leases.find(key)) is None:  # the heartbeat has learnt of its end
                self._held.pop(key, None)
                continue
            self._last += 1
            self._watches[key] = self._last
            self._numbers.add(self._last)
            since = str(found[1].proven + 1)
            create = {"key": encoded(key), "start_revision": since, "filters": ["NOPUT"], "watch_id": self._last}
            news.append({"create_request": create})
        self._ended, self._lasting = {}, set()
        if self._begun:
            self._changed.set()
        return news

    def _hear(self, fields: Json) -> bool:
        """Look at one answer; False: etcd has ended a watch that we have not."""
        answer = told(fields)
        if answer.cancelled:
            return 0 < answer.watch <= self._last and answer.watch not in self._numbers
        for deletion in answer.deletions:
            self._deleted(deletion.key, deletion.revision)
        return True

    def _deleted(self, key: bytes, revision: int) -> None:
        """Our own deletions are of keys that are not held any more."""
        claim, found = self._held.get(key), self._leases.find(key)
        if claim is None or found is None or revision <= found[1].created:
            return
        self.ended(key)
        for notice in tuple(self._notices):
            notice(claim, LossReason.REVOKED)

    async def aclose(self) -> None:
        """Stop watching."""
        watching, self._watching = self._watching, None
        if watching is not None and watching.get_loop() is asyncio.get_running_loop():
            await ended(watching)
