"""
Sources of the bells of one client.

1. The script that lets a ticket hold, or that ends it, publishes the digest of its owner on the channel of its client.
   On a cluster from Redis 7 on, a name has a channel in its own slot (SPUBLISH), so that a message reaches one server
   only: a client listens to it while it waits for the name. Elsewhere a client has one channel for everything.
2. Client tracking: the server reports when another client changes what this connection has read, such as an operator
   who deletes the key, or FLUSHALL. A line is followed while this client holds the name, from a moment after the grant
   on: most locks are released sooner. The message says "changed", not "lost", and so does the bell, at most once a
   second for each name: a line changes with every ticket that comes and goes.
3. A new connection: messages are lost while a connection is broken, so that all bells ring.

If the server permits no channels or no tracking, waiters and holders learn everything from the next heartbeat.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from contextvars import Context
from functools import partial

from fencing_sdk._values.claim import Claim
from fencing_sdk._values.loop_owner import LoopOwner, loop_here
from fencing_sdk._values.tasks import retrieve
from fencing_sdk.abc import Bell
from fencing_sdk.backends._shared.bells import Bells, bell_key
from fencing_sdk.backends.redis.connection.node import RedisNode
from fencing_sdk.backends.redis.connection.pipe import Pipe, Reply
from fencing_sdk.backends.redis.connection.router import RedisRouter
from fencing_sdk.backends.redis.keys import LINE, RedisKeys

_MOMENT = 0.25
"""Seconds that a ticket holds before its line is followed."""
_LOOK_EVERY = 1.0
"""Seconds between two bells because the line of one name has changed."""
_SHARDED_SINCE = (7,)


class _Name:
    """A name whose changes concern this client."""

    __slots__ = ("channel", "look_at", "owners", "timer")

    def __init__(self) -> None:
        self.owners: dict[str, None] = {}
        self.channel = ""
        """Channel of its own, on a cluster."""
        self.look_at = 0.0
        """When its bells may ring again because the line has changed, by the clock of the loop."""
        self.timer: asyncio.TimerHandle | None = None


class HeardBell:
    """Stops the bell of one ticket when it is called. Every draw makes one."""

    __slots__ = ("_bells", "_claim", "_key")

    def __init__(self, bells: RedisBells, claim: Claim, key: str) -> None:
        self._bells = bells
        self._claim = claim
        self._key = key

    def __call__(self) -> None:
        """Stop the bell."""
        self._bells.stop(self._claim, self._key)


class RedisBells:
    """
    The bells of one backend. *sharded*: its servers are a cluster.

    Args:
        silent: True if a bell may only say that the client has to ask: a grant counts once replicas have it.
    """

    def __init__(self, keys: RedisKeys, *, sharded: bool, silent: bool) -> None:
        self._keys = keys
        self.router: RedisRouter
        """Set by the backend, whose router needs `on_connect`."""
        self._sharded = sharded
        how = "S" if sharded else "P"
        self._how = how.lower() if silent else how
        self._owner: LoopOwner | None = None
        self._known: set[RedisNode] = set()
        self._begin()

    def _begin(self) -> None:
        self._bells = Bells()
        self._names: dict[str, _Name] = {}
        self._fresh: dict[str, Claim] = {}  # by owner: hold, and their lines are not followed yet
        self._again: set[str] = set()  # names whose lines are not followed any longer
        self._timer: asyncio.TimerHandle | None = None
        self._client = os.urandom(12).hex()
        self._channel = self._keys.wake_channel(self._client)

    def _own(self) -> None:
        """Begin anew in another loop, and in a forked child: what is here belongs to the parent."""
        if self._owner is None or not self._owner.is_current:
            if self._owner is not None:
                self._known.clear()
                self._begin()
            self._owner = LoopOwner()

    def listen(self, claim: Claim, bell: Bell) -> Callable[[], object]:
        """See `fencing_sdk.abc.Backend.listen`."""
        if self._owner is None or not self._owner.is_current:
            self._own()
        return HeardBell(self, claim, self._bells.put(claim, bell))

    def stop(self, claim: Claim, key: str) -> None:
        """Ring no more for the ticket of *claim*."""
        self._bells.drop(key)
        self._fresh.pop(claim.owner, None)
        named = self._names.get(claim.name)
        if named is not None and self._owner is not None and self._owner.loop is loop_here():
            self._leave(claim, named)

    def _leave(self, claim: Claim, named: _Name) -> None:
        named.owners.pop(claim.owner, None)
        if named.owners:
            self._follow_again(claim.name)
        else:
            del self._names[claim.name]
            if named.timer is not None:
                named.timer.cancel()
            for node in self._known if named.channel else ():
                if (pipe := node.open_pipe) is not None and pipe.channels.pop(named.channel, None) is not None:
                    command = "SUNSUBSCRIBE" if pipe.version >= _SHARDED_SINCE else "UNSUBSCRIBE"
                    pipe.subscribe(command, named.channel).add_done_callback(retrieve)

    def address(self, claim: Claim, tag: str) -> str:
        """Return the bell of a ticket, as `tickets.lua` reads it."""
        channel = f"{tag}:wake:{self._client}" if self._sharded else self._channel
        return f"{self._how}{channel}{bell_key(claim.owner)}"

    # Waiters.

    def waits(self, claim: Claim, pipe: Pipe | None) -> None:
        """Listen for a ticket that waits, on the connection to its server."""
        if claim.name in self._names:
            self._follow_again(claim.name)
        if not self._sharded or pipe is None or not self._bells.has(claim):
            return
        named = self._names.setdefault(claim.name, _Name())
        named.owners[claim.owner] = None
        named.channel = f"{self._keys.tag(claim.name)}:wake:{self._client}"
        if named.channel not in pipe.channels:
            command = "SSUBSCRIBE" if pipe.version >= _SHARDED_SINCE else "SUBSCRIBE"
            subscription = pipe.channels[named.channel] = pipe.subscribe(command, named.channel)
            subscription.add_done_callback(partial(self._subscribed, claim.name, named, pipe))

    def _subscribed(self, name: str, named: _Name, pipe: Pipe, subscription: asyncio.Future[Reply]) -> None:
        """Ring, because a message may have been sent before. The next keep asks again for a refused channel."""
        if subscription.cancelled() or subscription.exception() is not None:
            pipe.channels.pop(named.channel, None)
        elif self._names.get(name) is named:
            self._bells.ring(named.owners)

    # Holders.

    def _follow_again(self, name: str) -> None:
        """Follow a line again: this connection changes it, which ends that, without a message."""
        self._again.add(name)
        self._plan()

    def holds(self, claim: Claim) -> None:
        """Follow the line of a ticket that holds, a moment from now."""
        self._fresh[claim.owner] = claim
        if self._timer is None:
            self._plan()

    def _plan(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_MOMENT, self._follow_fresh, context=Context())

    def followed(self, claims: Iterable[Claim]) -> None:
        """Note that the lines of these names are followed again, for the bells of these tickets."""
        for claim in claims:
            named = self._names.get(claim.name)
            if (named is None or claim.owner not in named.owners) and self._bells.has(claim):
                self._names.setdefault(claim.name, _Name()).owners[claim.owner] = None

    def _follow_fresh(self) -> None:
        self._timer = None
        fresh = [claim for claim in self._fresh.values() if self._bells.has(claim)]
        names = dict.fromkeys([claim.name for claim in fresh] + [name for name in self._again if name in self._names])
        self._fresh.clear()
        self._again.clear()
        self.followed(fresh)
        by_pipe: dict[Pipe, list[str]] = {}
        for name in names:
            key = f"{self._keys.tag(name)}{LINE}"
            if (pipe := self.router.last_pipe(key)) is not None:
                by_pipe.setdefault(pipe, []).append(key)
        for pipe, keys in by_pipe.items():
            for some in [[key] for key in keys] if self._sharded else [keys]:
                pipe.follow(some, partial(self._found, some))

    def _found(self, keys: list[str], count: Reply) -> None:
        if isinstance(count, int) and count < len(keys):  # some were deleted before
            self._changed(key.encode() for key in keys)

    # Messages.

    def on_connect(self, node: RedisNode, pipe: Pipe) -> None:
        """Listen, before anything else is sent on a new connection; then ask what was missed."""
        self._own()
        pipe.call("CLIENT", "TRACKING", "ON", "OPTIN", "NOLOOP").add_done_callback(retrieve)
        if not self._sharded:
            pipe.subscribe("SUBSCRIBE", self._channel).add_done_callback(retrieve)
        if node in self._known:
            self._bells.ring_all()
        self._known.add(node)

    def on_push(self, message: list[Reply]) -> None:
        """Ring for a ticket that a message names, or for the names that it reports as changed."""
        kind, about = message[0], message[1]
        if kind in {b"message", b"smessage"}:
            text = message[2]
            if isinstance(about, bytes) and about.endswith(self._client.encode()) and isinstance(text, bytes):
                self._bells.hear(text.decode(errors="replace"))
        elif kind == b"invalidate":
            if isinstance(about, list):
                self._changed(key for key in about if isinstance(key, bytes))
            else:  # FLUSHALL
                self._bells.ring_all()
        elif kind == b"sunsubscribe" and isinstance(about, bytes):  # the slot of a name moves to another server
            channel = about.decode(errors="replace")
            for node in self._known:
                if (pipe := node.open_pipe) is not None:
                    pipe.channels.pop(channel, None)
            for named in [named for named in self._names.values() if named.channel == channel]:
                self._bells.ring(named.owners)

    def _changed(self, keys: Iterable[bytes]) -> None:
        loop = asyncio.get_running_loop()
        for key in keys:
            name = self._keys.name(key)
            named = None if name is None else self._names.get(name)
            if named is None or named.timer is not None:
                continue
            if named.look_at <= loop.time():
                self._look(named)
            else:
                named.timer = loop.call_at(named.look_at, self._look, named, context=Context())

    def _look(self, named: _Name) -> None:
        named.timer, named.look_at = None, asyncio.get_running_loop().time() + _LOOK_EVERY
        self._bells.ring(named.owners)

    def aclose(self) -> None:
        """Follow no more lines."""
        if self._owner is not None and self._owner.is_current:
            for timer in (self._timer, *(named.timer for named in self._names.values())):
                if timer is not None:
                    timer.cancel()
        self._timer = None
        self._fresh.clear()
        self._again.clear()
        self._names.clear()
