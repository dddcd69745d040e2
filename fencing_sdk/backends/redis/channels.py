"""
The channels on which servers send messages to the waiters of one client.

On a cluster from Redis 7 on, a lock has a channel in its own slot (SPUBLISH), so that a message reaches one server
only. Everywhere else a client has one channel for all its waiters.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable
from functools import partial
from typing import Generic, TypeVar

from fencing_sdk._values.claim import Claim
from fencing_sdk._values.loop_owner import ForkDetector
from fencing_sdk._values.tasks import retrieve
from fencing_sdk.backends._shared.waiters import Waiter
from fencing_sdk.backends.redis.connection.node import RedisNode
from fencing_sdk.backends.redis.connection.pipe import Pipe, Reply, ReplyError
from fencing_sdk.backends.redis.connection.router import RedisRouter
from fencing_sdk.backends.redis.requests import RedisKeys

__all__ = ["ChannelId", "ListeningWaiter", "WakeChannels"]

_SHARDED_SINCE = (7,)
_NOT_PERMITTED = {"NOPERM"}


class ChannelId:
    """The part of a channel's name that only this client has. A forked child makes its own."""

    __slots__ = ("_fork", "_text")

    def __init__(self) -> None:
        self._fork = ForkDetector()
        self._text = uuid.uuid4().hex

    def __str__(self) -> str:
        if self._fork.forked():
            self._text = uuid.uuid4().hex
        return self._text


class ListeningWaiter(Waiter):
    """
    A waiter that a message reaches.

    Args:
        claim: What it waits for.

        ticket: Names it in messages.

        tag: The beginning of the lock's keys.
    """

    __slots__ = ("channel", "may_subscribe", "node", "tag")

    def __init__(self, claim: Claim, ticket: str, tag: str) -> None:
        super().__init__(claim, ticket)
        self.tag = tag
        self.node: RedisNode | None = None
        """The server with the line, once the waiter has asked for it."""
        self.channel = ""
        self.may_subscribe = True
        """True if the server permits its channel. If not, no message reaches it."""

    @property
    def open_pipe(self) -> Pipe | None:
        """The connection to the server with the line, if it is open."""
        return None if self.node is None else self.node.open_pipe


W = TypeVar("W", bound=ListeningWaiter)


class WakeChannels(Generic[W]):
    """
    The subscriptions for some waiters of one client.

    Args:
        router: Knows the server of a lock.

        keys: The keys of the prefix.

        waiters: All who wait, to find those that share a channel.

        sharded: Whether the servers are a cluster.
    """

    def __init__(self, router: RedisRouter, keys: RedisKeys, waiters: Iterable[W], *, sharded: bool) -> None:
        self._router = router
        self._keys = keys
        self._waiters = waiters
        self._sharded = sharded
        self._id = ChannelId()

    async def listen(self, waiter: ListeningWaiter) -> asyncio.Future[Reply]:
        """Subscribe to the channel of *waiter*, before it joins its line, so that no message is missed."""
        waiter.node = await self._router.node(waiter.tag)
        return self.subscribe(await waiter.node.pipe(), waiter)

    def subscribe(self, pipe: Pipe, waiter: ListeningWaiter) -> asyncio.Future[Reply]:
        """Subscribe to the channel of *waiter*, unless this connection has done so; return the confirmation."""
        sharded = self._is_sharded(waiter)
        waiter.channel = f"{waiter.tag}:wake:{self._id}" if sharded else self._keys.wake_channel(str(self._id))
        subscription = pipe.channels.get(waiter.channel)
        if subscription is None:
            subscription = pipe.subscribe("SSUBSCRIBE" if sharded else "SUBSCRIBE", waiter.channel)
            pipe.channels[waiter.channel] = subscription
            subscription.add_done_callback(partial(self._on_subscribed, pipe, waiter.channel))
        return subscription

    def _on_subscribed(self, pipe: Pipe, channel: str, subscription: asyncio.Future[Reply]) -> None:
        """Forget a subscription that was refused, so that the next waiter, or the next sign of life, asks again."""
        error = asyncio.CancelledError() if subscription.cancelled() else subscription.exception()
        if error is not None and pipe.channels.get(channel) is subscription:
            del pipe.channels[channel]
        permitted = not (isinstance(error, ReplyError) and error.code in _NOT_PERMITTED)
        for waiter in self._on(channel):
            waiter.may_subscribe = permitted

    def unsubscribe(self, waiter: ListeningWaiter) -> None:
        """End the subscription for a lock when its last waiter of this client has gone. The client's own stays."""
        if not self._is_sharded(waiter) or any(other.node is waiter.node for other in self._on(waiter.channel)):
            return
        pipe = waiter.open_pipe
        if pipe is not None and pipe.channels.pop(waiter.channel, None) is not None:
            pipe.subscribe("SUNSUBSCRIBE", waiter.channel).add_done_callback(retrieve)

    def command(self, waiter: ListeningWaiter) -> str:
        """The command by which the server reaches *waiter*."""
        return "SPUBLISH" if self._is_sharded(waiter) else "PUBLISH"

    def text_for_us(self, message: list[Reply]) -> str | None:
        """What a message on one of these channels says; None for any other message."""
        if message[0] not in {b"message", b"smessage"}:
            return None
        channel, text = message[1], message[2]
        ours = isinstance(channel, bytes) and channel.endswith(str(self._id).encode())
        return text.decode(errors="replace") if ours and isinstance(text, bytes) else None

    def cut_off(self, message: list[Reply]) -> list[W]:
        """The waiters whose channel the server has ended: the slot of their lock moves to another server."""
        if message[0] != b"sunsubscribe" or not isinstance(message[1], bytes):
            return []
        waiters = self._on(message[1].decode(errors="replace"))
        for waiter in waiters:
            if (pipe := waiter.open_pipe) is not None:
                pipe.channels.pop(waiter.channel, None)
        return waiters

    def _on(self, channel: str) -> list[W]:
        return [waiter for waiter in self._waiters if waiter.channel == channel]

    def _is_sharded(self, waiter: ListeningWaiter) -> bool:
        return self._sharded and waiter.node is not None and waiter.node.version >= _SHARDED_SINCE
