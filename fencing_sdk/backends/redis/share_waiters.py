"""
The waiters of one client for permits, readers and writers, and what wakes them: see `waiters.py` for plain locks.

A share may be granted beside others, so no release can tell alone whom to hand it to. The server wakes the waiter at
the head of the line of shares (see `share_line.lua`), which then asks. A waiter tries again once a second, when a share
ends, and on a new connection. A try is also the sign of life that keeps it in the line.
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


class ShareWaiter(Waiter):
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


class ShareWaiters:
    """All waiters of one backend."""

    def __init__(self, router: RedisRouter, requests: RedisRequests, keys: RedisKeys, *, sharded: bool) -> None:
        self._router = router
        self._requests = requests
        self._keys = keys
        self._sharded = sharded
        self._client = uuid.uuid4().hex
        self._tickets = itertools.count(1)
        self._table: WaiterTable[ShareWaiter] = WaiterTable()

    def find(self, claim: Claim) -> ShareWaiter | None:
        """The waiter of *claim*, if there is one."""
        return self._table.find(claim)

    async def join(self, claim: Claim) -> ShareWaiter:
        """Join the line of a lock, until `leave`."""
        waiter = self._table.add(ShareWaiter(claim, str(next(self._tickets)), self._keys.tag(claim.name)))
        try:
            await self._enter_line(waiter)
        except BaseException:
            await self.leave(waiter)
            raise
        return waiter

    async def rejoin(self, waiter: ShareWaiter) -> None:
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

    async def _enter_line(self, waiter: ShareWaiter) -> None:
        """Send the requests of joining. SUBSCRIBE goes first, so that no message is missed."""
        waiter.node = await self._router.node(waiter.tag)
        subscription = self._subscribe(await waiter.node.pipe(), waiter)
        command = "SPUBLISH" if self._uses_shard_channel(waiter) else "PUBLISH"
        await self._router.run(self._requests.join_share_line(waiter.claim, command, waiter.channel, waiter.ticket))
        try:
            await asyncio.shield(subscription)
        except ReplyError as error:
            if error.code not in _NOT_PERMITTED:
                raise
            waiter.may_subscribe = False

    def is_reachable(self, waiter: ShareWaiter) -> bool:
        """Whether messages reach *waiter* as before: there is no better reason to join again."""
        pipe = None if waiter.node is None else waiter.node.open_pipe
        return not waiter.may_subscribe or (pipe is not None and waiter.channel in pipe.channels)

    async def leave(self, waiter: ShareWaiter) -> None:
        """
        Leave the line, unless the lock was granted.

        Raises no error: an error would replace the cancellation that ends the wait. If the request fails, the server
        drops the waiter for lack of a sign of life.
        """
        self._table.remove(waiter)
        self._unsubscribe(waiter)
        for _ in range(0 if waiter.served else _LEAVE_TRIES):
            with contextlib.suppress(Exception):
                await self._router.run(self._requests.leave_share_line(waiter.claim))
                return

    def _uses_shard_channel(self, waiter: ShareWaiter) -> bool:
        return self._sharded and waiter.node is not None and waiter.node.version >= _SHARDED_SINCE

    def _subscribe(self, pipe: Pipe, waiter: ShareWaiter) -> asyncio.Future[Reply]:
        """Subscribe to the channel of *waiter*, unless this connection has done so; return the confirmation."""
        sharded = self._uses_shard_channel(waiter)
        waiter.channel = f"{waiter.tag}:wake:{self._client}" if sharded else self._keys.wake_channel(self._client)
        subscription = pipe.channels.get(waiter.channel)
        if subscription is None:
            subscription = pipe.subscribe("SSUBSCRIBE" if sharded else "SUBSCRIBE", waiter.channel)
            pipe.channels[waiter.channel] = subscription
            subscription.add_done_callback(partial(_forget_refused, pipe.channels, waiter.channel))
        return subscription

    def _unsubscribe(self, waiter: ShareWaiter) -> None:
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
