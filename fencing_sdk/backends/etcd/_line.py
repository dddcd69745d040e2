"""
Who waits by way of one client, and how it is woken.

A place in the line is a key, and the line is the order in which keys were created. Each waiter
watches the one key that was created just before its own, so that a release wakes one waiter and
not all of them. The watch starts at the revision at which that key was seen, so no deletion is
missed, however late the stream is opened; where etcd has forgotten that revision (compaction), or
the stream broke, the waiter looks again who is before it.
"""

from __future__ import annotations

import asyncio
import random
from contextvars import Context

from fencing_sdk._etcd.gateway import WATCH, Gateway
from fencing_sdk._etcd.json_codec import encoded
from fencing_sdk._etcd.shared_call import ended
from fencing_sdk._values.claim import Claim
from fencing_sdk.backends._shared.wakeup import WakeUp
from fencing_sdk.backends.etcd._calls import Calls
from fencing_sdk.backends.etcd._watches import told
from fencing_sdk.errors import BackendError

__all__ = ["Line", "Place"]

_FIRST_PAUSE = 0.05
_LAST_PAUSE = 2.0


class Place:
    """A place in the line of one lock."""

    def __init__(self, claim: Claim, created: int) -> None:
        self.claim = claim
        self.created = created
        """The revision of the own key."""
        self.served = False
        self._woken = WakeUp()
        self._moved = WakeUp()
        self.follower: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """Another try may succeed."""
        self._woken.set()

    async def wait(self) -> None:
        """See `fencing_sdk.abc.Turn.wait`."""
        await self._woken.wait()
        self._woken.clear()

    def move(self, created: int) -> None:
        """The own key had gone, and was made again at the end of the line."""
        if created != self.created:
            self.created = created
            self._moved.set()

    async def moved(self) -> None:
        """Wait until the key before the own one may be another."""
        await self._moved.wait()

    def settle(self) -> None:
        """From now on the place is where it is now."""
        self._moved.clear()


class Line:
    """Everybody who waits by way of one backend."""

    def __init__(self, gateway: Gateway, calls: Calls) -> None:
        self._gateway = gateway
        self._calls = calls
        self._places: dict[tuple[str, str], Place] = {}

    def place(self, claim: Claim) -> Place | None:
        """Where *claim* stands."""
        return self._places.get((claim.name, claim.owner))

    def add(self, claim: Claim, created: int) -> Place:
        """Follow whoever stands before the key that was created at this revision."""
        place = self._places[claim.name, claim.owner] = Place(claim, created)
        place.follower = asyncio.get_running_loop().create_task(self._follow(place), context=Context())
        return place

    async def remove(self, place: Place) -> None:
        """Follow nobody any more."""
        self._places.pop((place.claim.name, place.claim.owner), None)
        if place.follower is not None:
            await ended(place.follower)

    def orphans(self) -> list[Claim]:
        """Forget the waiters of event loops that were closed, and return what they waited for."""
        found = [place for place in self._places.values() if place.follower and place.follower.get_loop().is_closed()]
        for place in found:
            del self._places[place.claim.name, place.claim.owner]
        return [place.claim for place in found if not place.served]

    async def _follow(self, place: Place) -> None:
        """Wake the waiter when nobody is before it; after a fault, look again."""
        pause = _FIRST_PAUSE
        while True:
            try:
                if await self._pass_one(place):
                    pause = _FIRST_PAUSE
                    continue
            except BackendError:  # the waiter tries by its own timer meanwhile
                pass
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, _LAST_PAUSE)

    async def _pass_one(self, place: Place) -> bool:
        """Wait until the key before the own one has gone; False when the stream ended before that."""
        place.settle()
        before, revision = await self._calls.predecessor("queue", place.claim, place.created)
        if before is None:
            place.wake()
            await place.moved()
            return True
        return await self._gone(before.key, revision + 1)

    async def _gone(self, key: bytes, revision: int) -> bool:
        request = {"key": encoded(key), "start_revision": str(revision), "filters": ["NOPUT"]}
        async with self._gateway.stream("queue", WATCH, {"create_request": request}) as answers:
            async for fields in answers:
                answer = told(fields)
                if answer.cancelled:
                    return False
                if any(deletion.key == key for deletion in answer.deletions):
                    return True
        return False
