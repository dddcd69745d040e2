"""
Watches of keys, all of a client in one stream.

A watch begins at a revision at which the client has seen what it watches, so it misses no change, however late the
stream opens. If the stream breaks or is silent, the next one begins at the same revisions. If etcd has forgotten a
revision (compaction), the watch ends, and its client has to look.

etcd brings a watch up to date ten times a second if it begins at a revision that is written already, and only then
reports changes as they come. So the watch of a ticket that waits begins at the revision after the one that was seen: if
nothing was written meanwhile, it is up to date at once, and if something was, etcd repeats that. Nothing is missed by
that, because the client has seen all up to the revision before. Its one drawback is that etcd 3.5 answers no request
for progress while a watch of the stream begins at a revision which is not written yet. In an etcd without any writes
such a stream counts as silent, and the next one begins at the revisions that were seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

import anyio

from fencing_sdk._etcd import WATCH, Entry, Gateway, Json, StreamRequests, encoded, read_watch_answer
from fencing_sdk._values.clock import JITTER
from fencing_sdk._values.tasks import move_on_after
from fencing_sdk.backends._shared.background_task import BackgroundTask
from fencing_sdk.errors import BackendError

_FIRST_PAUSE = 0.05
_LAST_PAUSE = 2.0
_MOMENT = 0.1
_SILENCE = 15.0
"""Seconds without an answer after which the stream is closed: the client asks for progress three times as often."""

E = TypeVar("E", bound=Entry)
Change = Callable[[list[E]], object]
"""Called with the puts since the watch began; without any: a key was deleted, or the watch has ended."""


class Watches(Generic[E]):
    """The watches of one client, on keys of one *kind*."""

    def __init__(self, gateway: Gateway, kind: type[E]) -> None:
        self._gateway = gateway
        self._kind = kind
        self._wanted: dict[int, tuple[Json, int, Change[E]]] = {}
        self._last = 0
        self._requests: StreamRequests | None = None
        self._removed: list[int] = []
        self._task, self._cancelling = BackgroundTask(), BackgroundTask()

    def add(
        self,
        key: bytes,
        seen: int,
        change: Change[E],
        *,
        end: bytes | None = None,
        puts: bool = False,
        at_once: bool = False,
    ) -> int:
        """
        Watch a key, or those up to *end*, for what came after the revision at which it was *seen*; return the watch.

        *at_once*: report also the changes of the first moment as they come; see the module.
        """
        self._last += 1
        body: Json = {"key": encoded(key), "start_revision": str(seen + at_once), "watch_id": self._last}
        body |= ({} if end is None else {"range_end": encoded(end)}) | ({} if puts else {"filters": ["NOPUT"]})
        self._wanted[self._last] = body, seen, change
        if not self._task.running:
            self._requests = None
            self._task.start(self._run)
        elif self._requests is not None:
            self._requests.send([{"create_request": body}])
        return self._last

    def remove(self, watch: int) -> None:
        """End a watch; it may have ended already. etcd hears of that in a moment, together with others."""
        if self._wanted.pop(watch, None) is not None and self._requests is not None and self._task.running:
            self._removed.append(watch)
            self._cancelling.start(self._cancel)

    async def _cancel(self) -> None:
        await asyncio.sleep(_MOMENT)
        removed, self._removed = self._removed, []
        if self._requests is not None:
            self._requests.send([{"cancel_request": {"watch_id": watch}} for watch in removed])

    def clear(self) -> None:
        """Forget all: in a forked child they are the parent's."""
        self._wanted.clear()
        self._task, self._cancelling = BackgroundTask(), BackgroundTask()

    async def _run(self) -> None:
        pause = _FIRST_PAUSE
        while self._wanted:
            self._requests, self._removed = StreamRequests(_SILENCE / 3), []
            self._requests.send([{"create_request": body} for body, _, _ in self._wanted.values()])
            try:
                if await self._read(self._requests):
                    pause = _FIRST_PAUSE
            except BackendError:  # until the next stream, keeps find what has changed
                pass
            self._requests = None
            for body, seen, _ in self._wanted.values():
                body["start_revision"] = str(seen)
            if self._wanted:
                await asyncio.sleep(pause * JITTER.uniform(0.5, 1.0))
                pause = min(pause * 2, _LAST_PAUSE)

    async def _read(self, requests: StreamRequests) -> bool:
        """Read the answers until the stream ends or is silent; return whether there was one."""
        answered = False
        with move_on_after(_SILENCE) as listening:
            async with self._gateway.stream("watch", WATCH, requests) as answers:
                async for fields in answers:
                    listening.deadline = anyio.current_time() + _SILENCE
                    answered = True
                    self._take(fields)
                    if not self._wanted and requests.idle:
                        break
        return answered

    def _take(self, fields: Json) -> None:
        answer = read_watch_answer(fields, self._kind)
        if answer.watch_id not in self._wanted:
            return
        _, seen, change = self._wanted[answer.watch_id]
        puts = [put for put in answer.puts if put.modified > seen]
        if answer.cancelled:
            del self._wanted[answer.watch_id]
            change([])
        elif any(revision > seen for revision in answer.deletions):
            change([])
        elif puts:
            change(puts)

    async def aclose(self) -> None:
        """End all watches."""
        self._wanted.clear()
        await self._cancelling.aclose()
        await self._task.aclose()
