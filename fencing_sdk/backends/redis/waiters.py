"""
The waiters of one client, and what wakes them.

The server keeps a line of waiters for each lock (see `line.lua`). A waiter joins the line with the channel of its
client and a ticket, which names the waiter among those of its client. It needs no connection of its own. What wakes it:

1. Its turn. A release, and a waiter at the head of the line that leaves, publish the ticket of the waiter that is
   at the head then, on the channel of its client.
2. A new connection. Messages are lost while a connection is broken. When it is open again, the client subscribes
   again, and all its waiters wake and try.
3. A slot that moves to another server of a cluster. The old server ends the subscription, and the waiter wakes with
   an error: the engine joins the line again, at the new server.
4. Time. A waiter tries again once a second, and when the ttl of the holder ends, because the server publishes nothing
   then. A try is also the sign of life that keeps the waiter in the line.

On a cluster from Redis 7 on, a lock has a channel in its own slot (SPUBLISH), so that a message reaches one server
only. Everywhere else a client has one channel for all its waiters.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from functools import partial

from fencing_sdk._values.claim import Claim
from fencing_sdk._values.futures import retrieve
from fencing_sdk.backends._shared.waiters import Waiter, WaiterTable
from fencing_sdk.backends.redis.connection.dial import BACKEND
from fencing_sdk.backends.redis.connection.node import RedisNode
from fencing_sdk.backends.redis.connection.pipe import Pipe, Reply, ReplyError
from fencing_sdk.backends.redis.connection.router import RedisRouter
from fencing_sdk.backends.redis.keys import RedisKeys
from fencing_sdk.backends.redis.requests import RedisRequests
from fencing_sdk.errors import BackendUnavailableError

_SHARDED_SINCE = (7,)
_NOT_PERMITTED = {"NOPERM"}
_MOVED = "the slot of the lock has moved to another server"
_LEAVE_TRIES = 2
"""One try on the open connection, and one on the next if that was broken."""


class RedisWaiter(Waiter):
    """A waiter in the line of one lock."""

    __slots__ = ("channel", "may_subscribe", "node", "tag")

    def __init__(self, claim: Claim, ticket: str, tag: str) -> None:
        super().__init__(claim, ticket)
        self.tag = tag
        """The beginning of the lock's keys."""
        self.node: RedisNode | None = None
        """The server with the line, once the waiter has asked for it."""
        self.channel = ""
        self.may_subscribe = True
        """Whether the server permits its channel. If not, the waiter tries once a second."""


class RedisWaiters:
    """All waiters of one backend."""

    def __init__(self, router: RedisRouter, requests: RedisRequests, keys: RedisKeys, *, sharded: bool) -> None:
        self._router = router
        self._requests = requests
        self._keys = keys
        self._sharded = sharded
        self._client = uuid.uuid4().hex
        self._tickets = itertools.count(1)
        self._table: WaiterTable[RedisWaiter] = WaiterTable()

    def find(self, claim: Claim) -> RedisWaiter | None:
        """The waiter of *claim*, if there is one."""
        return self._table.find(claim)

    async def join(self, claim: Claim) -> RedisWaiter:
        """Join the line of a lock, until `leave`."""
        waiter = self._table.add(RedisWaiter(claim, str(next(self._tickets)), self._keys.tag(claim.name)))
        try:
            await self._enter_line(waiter)
        except BaseException:
            await self.leave(waiter)
            raise
        return waiter

    async def rejoin(self, waiter: RedisWaiter) -> None:
        """
        Join the line again: the server has dropped *waiter*, or sends it no messages any more.

        The waiter may leave while this runs, and the server may then carry out the leaving before the joining.
        So it leaves once more.
        """
        if self.find(waiter.claim) is not waiter:
            return
        try:
            await self._enter_line(waiter)
        finally:
            if self.find(waiter.claim) is not waiter:
                await self.leave(waiter)

    async def _enter_line(self, waiter: RedisWaiter) -> None:
        """Send the requests of joining. SUBSCRIBE goes first, so that no message is missed."""
        waiter.node = await self._router.node(waiter.tag)
        subscription = self._subscribe(await waiter.node.pipe(), waiter)
        command = "SPUBLISH" if self._uses_shard_channel(waiter) else "PUBLISH"
        await self._router.run(self._requests.join(waiter.claim, command, waiter.channel, waiter.ticket))
        try:
            await asyncio.shield(subscription)
        except ReplyError as error:
            if error.code not in _NOT_PERMITTED:
                raise
            waiter.may_subscribe = False

    def is_reachable(self, waiter: RedisWaiter) -> bool:
        """Whether messages reach *waiter* as before: there is no better reason to join again."""
        pipe = None if waiter.node is None else waiter.node.open_pipe
        return not waiter.may_subscribe or (pipe is not None and waiter.channel in pipe.channels)

    async def leave(self, waiter: RedisWaiter) -> None:
        """
        Leave the line, unless the lock was granted.

        Raises no error: an error would replace the cancellation that ends the wait. If the request fails, the server
        drops the waiter for lack of a sign of life.
        """
        self._table.remove(waiter)
        self._unsubscribe(waiter)
        for _ in range(0 if waiter.served else _LEAVE_TRIES):
            with contextlib.suppress(Exception):
                await self._router.run(self._requests.leave(waiter.claim))
                return

    def _uses_shard_channel(self, waiter: RedisWaiter) -> bool:
        return self._sharded and waiter.node is not None and waiter.node.version >= _SHARDED_SINCE

    def _subscribe(self, pipe: Pipe, waiter: RedisWaiter) -> asyncio.Future[Reply]:
        """Subscribe to the channel of *waiter*, unless this connection has done so; return the confirmation."""
        sharded = self._uses_shard_channel(waiter)
        waiter.channel = f"{waiter.tag}:wake:{self._client}" if sharded else self._keys.wake_channel(self._client)
        subscription = pipe.channels.get(waiter.channel)
        if subscription is None:
            subscription = pipe.subscribe("SSUBSCRIBE" if sharded else "SUBSCRIBE", waiter.channel)
            pipe.channels[waiter.channel] = subscription
            subscription.add_done_callback(partial(_forget_refused, pipe.channels, waiter.channel))
        return subscription

    def _unsubscribe(self, waiter: RedisWaiter) -> None:
        """End the subscription for a lock that has no waiter of this client any more. The client's own stays."""
        node, channel = waiter.node, waiter.channel
        if node is None or not self._uses_shard_channel(waiter):
            return
        if any(other.node is node and other.channel == channel for other in self._table):
            return
        pipe = node.open_pipe
        if pipe is not None and pipe.channels.pop(channel, None) is not None:
            pipe.subscribe("SUNSUBSCRIBE", channel).add_done_callback(retrieve)

    def on_connect(self, node: RedisNode, pipe: Pipe) -> None:
        """Subscribe on a new connection, and wake the waiters that may have missed a message."""
        for waiter in self._table:
            if waiter.node is node:
                self._subscribe(pipe, waiter)
                waiter.wake()

    def on_push(self, message: list[Reply]) -> None:
        """Wake the waiter that a message names, or the waiters of a channel that the server has ended."""
        kind = message[0]
        if kind in {b"message", b"smessage"} and isinstance(message[2], bytes):
            self._table.wake(message[2].decode(errors="replace"))
        elif kind == b"sunsubscribe" and isinstance(message[1], bytes):
            channel = message[1].decode(errors="replace")
            for waiter in self._table:
                if waiter.channel == channel:
                    waiter.fail(BackendUnavailableError(BACKEND, "queue", _MOVED))


def _forget_refused(
    channels: dict[str, asyncio.Future[Reply]], channel: str, subscription: asyncio.Future[Reply]
) -> None:
    """Forget a subscription that was refused, so that the next waiter asks again."""
    refused = subscription.cancelled() or subscription.exception() is not None
    if refused and channels.get(channel) is subscription:
        del channels[channel]
