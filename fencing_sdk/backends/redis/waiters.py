"""
The waiters of one client, and what wakes them.

The server keeps a line of waiters for each name, in which locks, writers, readers and permits stand together (see
`line.lua`). A client gives signs of life for all its waiters: one call for each server and second, in a
cluster one for each name. The first sign joins the line. A sign says by which message the server reaches the waiter,
and when it was sent, on the client's own clock. What wakes a waiter:

1. A release hands it the lock. The server grants the lock to the first waiter that can be reached, with its full ttl,
   and publishes its ticket, the moment of its last sign of life, and the token. The grant was made after that sign
   had arrived, so it counts from that moment: a message that is late buys no time, and no two clocks are compared.
2. A release, or a grant beside which it fits, wakes it, and it asks: where it waits for a share or as a writer, where a
   grant needs more than the server can do alone (``min_replicas``), and where its last sign of life is so old that it
   may be frozen. A reader wakes the readers behind it, which need not wait until it has asked.
3. The answer to its sign of life, if the message was lost or no client released the lock. A sign makes the server
   serve the line, so the client sends the next one when the ttl of the holder ends. A waiter that may not subscribe is
   served only in this way.
4. A new connection. Messages are lost while a connection is broken. When it is open again, the client listens and
   gives signs of life at once, and so it does when the slot of a name moves to another server of a cluster.
5. A sign of life without an answer: the waiter asks by itself, until a sign is answered.

On a cluster from Redis 7 on, a name has a channel in its own slot (SPUBLISH), so that a message reaches one server
only. Everywhere else a client has one channel for all its waiters.

A waiter that gives up releases its claim, which takes it out of the line, and releases what it was handed meanwhile.
If a message for it comes later, the client releases the claim once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from functools import partial

from fencing_sdk._values.claim import Claim, Grant
from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.loop_owner import LoopOwner
from fencing_sdk._values.tasks import retrieve
from fencing_sdk.abc import PlaceInLine, WaiterNotice
from fencing_sdk.backends._shared.background_task import BackgroundTasks
from fencing_sdk.backends._shared.waiters import LEAVING, Waiter, WaiterTable, new_ticket
from fencing_sdk.backends.redis.connection.node import RedisNode
from fencing_sdk.backends.redis.connection.pipe import Pipe, Reply, ReplyError
from fencing_sdk.backends.redis.connection.router import RedisRouter
from fencing_sdk.backends.redis.losses import RedisLossWatcher
from fencing_sdk.backends.redis.requests import (
    LEASE,
    RedisKeys,
    RedisRequests,
    WaiterSign,
    read_line,
    read_token,
)

_SIGN_EVERY = 1.0
"""Seconds between the signs of life of a waiter. `line.lua` knows a waiter that is late by its `SUSPECT`."""
_TOGETHER = 0.5
"""Seconds by which a sign goes out earlier, to share a call with one that is due."""
_SOONEST = 0.01
"""Seconds after which a waiter looks again whether the ttl of a holder has ended."""
_ANSWER_LIMIT = 2.0
"""Seconds without an answer to a sign of life after which a waiter tries by itself. The server waits for 3."""
_WAITERS_A_CALL = 100
"""Waiters of one call: it keeps the server busy for less than a millisecond."""
_REMEMBERED = 1000
"""Waiters that have left, and to which a message may still be on its way."""
_LONGEST_PAUSE = 60.0
"""Seconds between the tries of a waiter whose signs of life are answered."""
_LEAVE_TRIES = 2
"""One try on the open connection, and one on the next if that was broken."""
_HANDING = 2
"""Words behind the ticket in a message that hands the lock over. One that only wakes has the tickets alone."""
_SHARDED_SINCE = (7,)
_CLOCK = BootClock()


class RedisWaiter(Waiter, PlaceInLine):
    """A waiter in the line of one name. *hands_over*: it can be handed the lock; if not, it is woken only."""

    def __init__(  # noqa: PLR0917
        self,
        claim: Claim,
        ticket: str,
        tag: str,
        notify: WaiterNotice,
        hands_over: bool,  # noqa: FBT001
        leave: Callable[[RedisWaiter], asyncio.Task[None] | None],
    ) -> None:
        super().__init__(claim, ticket)
        self.tag = tag
        self.notify = notify
        self.hands_over = hands_over
        self._leave = leave
        self.node: RedisNode | None = None
        """The server with the line, once the waiter has asked for it."""
        self.channel = ""
        self.may_subscribe = True
        """True if the server permits its channel. If not, no message reaches it."""
        self.loop = asyncio.get_running_loop()
        self.due = self.loop.time()
        """Time of its next sign of life, by the clock of its event loop."""
        self.asking = False
        """True if a sign of life is on its way."""
        self.joined = False
        """True if the server knows it: its last sign of life was answered."""

    @property
    def open_pipe(self) -> Pipe | None:
        """The connection to the server with the line, if it is open."""
        return None if self.node is None else self.node.open_pipe

    def retry_after(self, advice: float) -> float | None:  # noqa: ARG002  (the answers to signs of life are the better advice)
        """See `fencing_sdk.abc.PlaceInLine.retry_after`."""
        return _LONGEST_PAUSE if self.joined else None

    def leave(self) -> asyncio.Task[None] | None:
        """See `fencing_sdk.abc.PlaceInLine.leave`."""
        return self._leave(self)


class ClientId:
    """The part of a channel's name that only this client has, and of its forks only this process."""

    def __init__(self) -> None:
        self._text = uuid.uuid4().hex

    def __str__(self) -> str:
        return f"{self._text}.{os.getpid()}"


class RedisWaiters:
    """All waiters of one backend. *sharded*: its servers are a cluster."""

    def __init__(
        self, router: RedisRouter, requests: RedisRequests, keys: RedisKeys, losses: RedisLossWatcher, *, sharded: bool
    ) -> None:
        self._router = router
        self._requests = requests
        self._keys = keys
        self._losses = losses
        self._sharded = sharded
        self._table: WaiterTable[RedisWaiter] = WaiterTable()
        self._id = ClientId()
        self._left: OrderedDict[str, RedisWaiter] = OrderedDict()
        self._calls = BackgroundTasks()
        self._owner: LoopOwner | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._looks_at = 0.0

    def stand(self, claim: Claim, notify: WaiterNotice, *, hand_over: bool) -> RedisWaiter:
        """Join the line of a name in the background."""
        hands_over = hand_over and not self._requests.replicas
        waiter = RedisWaiter(claim, new_ticket(), self._keys.tag(claim.name), notify, hands_over, self._leave)
        self._table.add(waiter)
        self._plan(waiter.due)
        return waiter

    def _leave(self, waiter: RedisWaiter) -> asyncio.Task[None] | None:
        """
        Give *waiter* no more news. One that is woken leaves the line; another releases its claim.

        The first does not release it: its own call may be on its way, and a release would end the grant that it gets.
        """
        if waiter.notify is _ignore:
            return None  # it has left
        self._table.remove(waiter)
        if self._is_sharded(waiter) and not any(other.node is waiter.node for other in self._on(waiter.channel)):
            pipe = waiter.open_pipe  # the last waiter of this client for the name; a channel for all waiters stays
            if pipe is not None and pipe.channels.pop(waiter.channel, None) is not None:
                pipe.subscribe("SUNSUBSCRIBE", waiter.channel).add_done_callback(retrieve)
        waiter.notify = _ignore  # it drops the acquisition: its task may hold anything, and the lease itself
        self._left[waiter.ticket] = waiter
        if len(self._left) > _REMEMBERED:
            self._left.popitem(last=False)
        return None if waiter.hands_over or self._holds(waiter) else self._calls.start(self._take_out(waiter))

    def _holds(self, waiter: RedisWaiter) -> bool:
        return self._losses.holds(f"{waiter.tag}{LEASE}", waiter.claim)

    async def _take_out(self, waiter: RedisWaiter) -> None:
        """
        Take *waiter* out of the line, and release what it was handed.

        Raises no error: if the request fails, the server drops the waiter for lack of a sign of life.
        """
        # The end of the time closes the connection to a silent server. What may be a grant is released at any cost.
        limit = None if waiter.hands_over else LEAVING
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                for _ in range(_LEAVE_TRIES):
                    with contextlib.suppress(Exception):
                        if waiter.hands_over:
                            self._losses.leaving(waiter.claim)
                            await self._router.run(self._requests.release(waiter.claim, waits=True))
                        else:
                            await self._router.run(self._requests.leave(waiter.claim))
                        return

    # Signs of life.

    def _plan(self, at: float) -> None:
        if self._owner is None or not self._owner.is_current:
            self._owner, self._timer = LoopOwner(), None
            self._calls.forget()
        if self._timer is None or at < self._looks_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(at, self._look, context=Context())
            self._looks_at = at

    def _look(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        here = [waiter for waiter in self._table if waiter.loop is loop and not waiter.asking]
        soon = loop.time() + _TOGETHER
        if any(waiter.due <= loop.time() for waiter in here):
            groups: dict[str, list[RedisWaiter]] = {}  # of one server; in a cluster, of one name
            for waiter in sorted((each for each in here if each.due <= soon), key=lambda waiter: waiter.tag):
                waiter.asking = True
                groups.setdefault(waiter.tag if self._sharded else "", []).append(waiter)
            for group in groups.values():
                for start in range(0, len(group), _WAITERS_A_CALL):
                    self._calls.start(self._give_signs(group[start : start + _WAITERS_A_CALL]))
        self._plan_next()

    def _plan_next(self) -> None:
        loop = asyncio.get_running_loop()
        due = [waiter.due for waiter in self._table if waiter.loop is loop and not waiter.asking]
        if due:
            self._plan(min(due))

    async def _give_signs(self, waiters: list[RedisWaiter]) -> None:
        try:
            async with asyncio.timeout(_ANSWER_LIMIT):
                subscriptions = []
                for waiter in waiters:  # before they join their lines, so that no message is missed
                    waiter.node = await self._router.node(waiter.tag)
                    subscriptions.append(self._subscribe(await waiter.node.pipe(), waiter))
                staying = [waiter for waiter in waiters if self._table.find(waiter.claim) is waiter]
                lines = [list(line) for _, line in itertools.groupby(staying, key=lambda waiter: waiter.tag)]
                if not lines:
                    return
                sent_at = int(_CLOCK.now() * 1000)  # rounded down: a grant counts from no later moment
                signs: list[list[WaiterSign]] = [[] for _ in lines]
                for line, given in zip(lines, signs, strict=True):
                    for waiter in line:
                        way = "wake" if not waiter.hands_over else "direct" if waiter.may_subscribe else "silent"
                        command = "SPUBLISH" if self._is_sharded(waiter) else "PUBLISH"
                        sign = WaiterSign(waiter.claim, way, sent_at, waiter.ticket, command, waiter.channel)
                        given.append(sign)
                answers = await self._router.run(self._requests.stand(signs))
                await asyncio.wait(set(subscriptions))
            for line, answer in zip(lines, answers if isinstance(answers, list) else [], strict=True):
                self._take(line, answer, sent_at)
        except Exception:  # noqa: BLE001  (whatever it is, the waiters try by themselves, and again)
            self._missed(waiters)
        finally:
            for waiter in waiters:
                waiter.asking = False
            self._plan_next()

    def _take(self, line: list[RedisWaiter], reply: Reply, sent_at: int) -> None:
        """Read what the server says about one line."""
        try:
            answer = read_line(reply)
        except Exception:  # noqa: BLE001  (the key of one lock may hold something else)
            self._missed(line)
            return
        now = asyncio.get_running_loop().time()
        left = _SIGN_EVERY if answer.left is None else max(answer.left, 0.0) + _SOONEST  # of the holder's ttl
        for number, waiter in enumerate(line, 1):
            waiter.due = now + min(_SIGN_EVERY, left)
            waiter.joined = True
            if self._table.find(waiter.claim) is not waiter:
                self._release(waiter)  # it has left, and its leaving may have been processed before this sign
            elif number in answer.numbers and answer.token is not None:
                self._hand(waiter, answer.token, sent_at)
            elif number in answer.numbers:
                waiter.notify()  # its turn

    def _missed(self, waiters: Sequence[RedisWaiter]) -> None:
        """A sign of life was not answered: the waiters poll until one is."""
        now = asyncio.get_running_loop().time()
        for waiter in waiters:
            waiter.due = now + _SIGN_EVERY
            waiter.joined = False
            waiter.notify()

    # Channels.

    def _subscribe(self, pipe: Pipe, waiter: RedisWaiter) -> asyncio.Future[Reply]:
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
        for waiter in self._on(channel):
            waiter.may_subscribe = not (isinstance(error, ReplyError) and error.code == "NOPERM")

    def _on(self, channel: str) -> list[RedisWaiter]:
        return [waiter for waiter in self._table if waiter.channel == channel]

    def _is_sharded(self, waiter: RedisWaiter) -> bool:
        return self._sharded and waiter.node is not None and waiter.node.version >= _SHARDED_SINCE

    # Grants that the server has made for a waiter.

    def _hand(self, waiter: RedisWaiter, token: int, sent_at: int) -> None:
        """Hand *waiter* the lock. The grant counts from the moment at which the sign that it names was sent."""
        if self._table.find(waiter.claim) is not waiter:
            self._release(waiter)
        elif waiter.hands_over:
            age = max(0.0, _CLOCK.now() - sent_at / 1000)
            lease = f"{waiter.tag}{LEASE}"
            self._losses.granted(lease, waiter.claim, token)
            waiter.notify(Grant(token), age)
            self._losses.follow(lease, waiter.open_pipe)  # last: the waiter runs before this command is written
        else:
            waiter.notify()

    def _release(self, waiter: RedisWaiter) -> None:
        """Release the claim of a waiter that has left. If it holds the lock, a message was late, or came twice."""
        if not self._holds(waiter):
            self._calls.start(self._take_out(waiter))

    def on_push(self, message: list[Reply]) -> None:
        """Wake the waiters that a message names, or hand one the lock; listen anew where the server ended a channel."""
        kind, channel = message[0], message[1]
        if not isinstance(channel, bytes):
            return
        if kind == b"sunsubscribe":  # the slot of the name moves to another server
            cut_off = self._on(channel.decode(errors="replace"))
            for waiter in cut_off:
                if (pipe := waiter.open_pipe) is not None:
                    pipe.channels.pop(waiter.channel, None)
            if cut_off:
                self._sign_now(cut_off)
        elif kind in {b"message", b"smessage"} and channel.endswith(str(self._id).encode()):
            text = message[2]
            if isinstance(text, bytes):
                self._on_message(text.decode(errors="replace"))

    def _on_message(self, text: str) -> None:
        """Read ``TICKET SIGN TOKEN``, which hands the lock over, or the tickets of those that may ask, in one word."""
        tickets, *handing = text.split(" ")
        for ticket in tickets.split(","):
            waiter = self._table.find_ticket(ticket) or self._left.get(ticket)
            if waiter is None or waiter.loop.is_closed():
                continue
            with contextlib.suppress(ValueError):
                if len(handing) == _HANDING:
                    self._hand(waiter, read_token(handing[1].encode()), int(handing[0]))
                elif self._table.find(waiter.claim) is waiter:
                    waiter.notify()

    def on_connect(self, node: RedisNode, pipe: Pipe) -> None:
        """Listen on a new connection, and ask what the waiters have missed."""
        waiters = [waiter for waiter in self._table if waiter.node is node]
        for waiter in waiters:
            self._subscribe(pipe, waiter)
        self._sign_now(waiters)

    def _sign_now(self, waiters: Iterable[RedisWaiter]) -> None:
        """Give signs of life at once, and once more after those that are on their way."""
        now = asyncio.get_running_loop().time()
        for waiter in waiters:
            waiter.due = now
        self._plan_next()

    async def aclose(self) -> None:
        """End the signs of life, and leave the lines for the waiters whose event loop was closed."""
        orphans = [waiter for waiter in self._table if waiter.loop.is_closed()]
        for waiter in orphans:
            self._table.remove(waiter)
        await asyncio.gather(*(self._take_out(waiter) for waiter in orphans if not self._holds(waiter)))
        if self._owner is not None and self._owner.is_current:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
            await self._calls.aclose(patience=0.0)


def _ignore(grant: Grant | None = None, age: float = 0.0) -> None:
    pass
