"""
The waiters of one client: their places in the lines, and how they are woken.

A waiter costs no connection. The server keeps the line of every lock; whoever frees a lock wakes
the head of its line by a message on the channel of the head's client, with the head's ticket. On a
cluster from Redis 7 on, each lock has a channel in its own slot, so that no message crosses the
cluster; elsewhere a client has one channel for everything.

A message may get lost with its connection. So whoever waits tries again once a second, and at once
when a connection was opened anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from functools import partial

from fencing_sdk._values.claim import Claim
from fencing_sdk.backends._shared.wakeup import WakeUp
from fencing_sdk.backends.redis._calls import Calls
from fencing_sdk.backends.redis._dial import BACKEND
from fencing_sdk.backends.redis._keys import Keys
from fencing_sdk.backends.redis._node import Node, ignore
from fencing_sdk.backends.redis._pipe import Pipe, Reply, ReplyError
from fencing_sdk.backends.redis._router import Router
from fencing_sdk.errors import BackendUnavailableError

_SHARDED_SINCE = (7,)
_REFUSED = {"NOPERM"}
_LEAVE_TRIES = 2
"""One for the connection that is open, and one for the next if that was broken."""


class Place:
    """A place in the line of one lock."""

    def __init__(self, claim: Claim, ticket: int, tag: str) -> None:
        self.claim = claim
        self.ticket = ticket
        self.tag = tag
        self.node: Node | None = None
        self.channel = ""
        self.served = False
        self.deaf = False
        self._woken = WakeUp()
        self._broken = False

    def wake(self) -> None:
        """Another try may succeed."""
        self._woken.set()

    def break_off(self) -> None:
        """Wake-ups come here no more; stand in line again."""
        self._broken = True
        self._woken.set()

    async def wait(self) -> None:
        """See `fencing_sdk.abc.Turn.wait`."""
        await self._woken.wait()
        self._woken.clear()
        if self._broken:
            raise BackendUnavailableError(BACKEND, "queue", "the slot of the lock has moved to another server")


class Line:
    """Everybody who waits by way of one backend."""

    def __init__(self, router: Router, calls: Calls, keys: Keys, *, sharded: bool) -> None:
        self._router = router
        self._calls = calls
        self._keys = keys
        self._sharded = sharded
        self._client = uuid.uuid4().hex
        self._tickets = itertools.count(1)
        self._places: dict[tuple[str, str], Place] = {}
        self._by_ticket: dict[bytes, Place] = {}

    def place(self, claim: Claim) -> Place | None:
        """Where *claim* stands."""
        return self._places.get((claim.name, claim.owner))

    async def stand(self, claim: Claim) -> Place:
        """Stand in the line of a lock until `leave`."""
        place = Place(claim, next(self._tickets), self._keys.tag(claim.name))
        self._places[claim.name, claim.owner] = place
        self._by_ticket[b"%d" % place.ticket] = place
        try:
            await self.join(place)
        except BaseException:
            await self.leave(place)
            raise
        return place

    async def join(self, place: Place) -> None:
        """Stand at the end of the line, with an ear at the channel before anybody can speak to it."""
        node = await self._router.node(place.tag)
        pipe = await node.pipe()
        place.node = node
        listening = self._listen(pipe, place)
        command = "SPUBLISH" if self._shards(node) else "PUBLISH"
        await self._router.run(self._calls.join(place.claim, command, place.channel, place.ticket))
        try:
            await asyncio.shield(listening)
        except ReplyError as error:
            if error.code not in _REFUSED:
                raise
            place.deaf = True  # not permitted to listen: the line is kept, and the waiter tries once a second

    async def stay(self, place: Place) -> None:
        """
        Stand at the end of the line again, after the server has passed *place* over or messages come to it no more.

        Whoever leaves meanwhile may have been told so by the server before it stands there again: then once more.
        """
        if not self._stands(place):
            return
        try:
            await self.join(place)
        finally:
            if not self._stands(place):
                await self.leave(place)

    def _stands(self, place: Place) -> bool:
        return self.place(place.claim) is place

    def hears(self, place: Place) -> bool:
        """Whether messages still come to *place*, or never will."""
        pipe = None if place.node is None else place.node.open_pipe
        return place.deaf or (pipe is not None and place.channel in pipe.channels)

    async def leave(self, place: Place) -> None:
        """
        Leave, unless the lock was granted.

        Raises no error, which would replace the cancellation that ends the wait.
        """
        self._places.pop((place.claim.name, place.claim.owner), None)
        self._by_ticket.pop(b"%d" % place.ticket, None)
        self._stop_listening(place)
        for _ in range(0 if place.served else _LEAVE_TRIES):
            with contextlib.suppress(Exception):  # in vain: who gives no signs of life is passed over
                await self._router.run(self._calls.leave(place.claim))
                return

    def _shards(self, node: Node) -> bool:
        return self._sharded and node.version >= _SHARDED_SINCE

    def _listen(self, pipe: Pipe, place: Place) -> asyncio.Future[Reply]:
        sharded = place.node is not None and self._shards(place.node)
        place.channel = f"{place.tag}:wake:{self._client}" if sharded else self._keys.wake_channel(self._client)
        listening = pipe.channels.get(place.channel)
        if listening is None:
            listening = pipe.subscribe("SSUBSCRIBE" if sharded else "SUBSCRIBE", place.channel)
            pipe.channels[place.channel] = listening
            listening.add_done_callback(partial(_drop_in_vain, pipe.channels, place.channel))
        return listening

    def _stop_listening(self, place: Place) -> None:
        """Close the channel of a lock for which nobody here waits any more; the client's own stays open."""
        node = place.node
        if (
            node is None
            or not self._shards(node)
            or any(p.node is node and p.channel == place.channel for p in self._places.values())
        ):
            return
        pipe = node.open_pipe
        if pipe is not None and pipe.channels.pop(place.channel, None) is not None:
            pipe.subscribe("SUNSUBSCRIBE", place.channel).add_done_callback(ignore)

    def greet(self, node: Node, pipe: Pipe) -> None:
        """Listen on a connection that was opened anew, and let everybody try who may have missed a message."""
        for place in self._places.values():
            if place.node is node:
                self._listen(pipe, place)
                place.wake()

    def hear(self, message: list[Reply]) -> None:
        """Wake whom a message is for."""
        if message[0] in {b"message", b"smessage"}:
            place = self._by_ticket.get(message[2]) if isinstance(message[2], bytes) else None
            if place is not None:
                place.wake()
        elif message[0] == b"sunsubscribe" and isinstance(message[1], bytes):
            channel = message[1].decode(errors="replace")
            for place in self._places.values():
                if place.channel == channel:
                    place.break_off()


def _drop_in_vain(channels: dict[str, asyncio.Future[Reply]], channel: str, listening: asyncio.Future[Reply]) -> None:
    """Forget a subscription that was refused, so that the next who waits tries again."""
    if (listening.cancelled() or listening.exception() is not None) and channels.get(channel) is listening:
        del channels[channel]
