"""
One connection that everybody shares: RESP3, with replies matched in order.

What is asked in one turn of the event loop leaves in one write. Nobody owns the connection for the
time of a call, so a call that is given up costs nothing: its reply is read and dropped. Messages
that the server sends by itself (wake-ups, invalidated keys) come between the replies.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import hiredis

from fencing_sdk._values.clock import BootClock
from fencing_sdk.backends.redis._script import Word

Reply: TypeAlias = object
"""None, int, bytes, float, bool, or a list or dict of those."""

Push = Callable[[list[Reply]], None]
"""Called for every message that is not a reply: its kind, then its parts."""


class PipeError(Exception):
    """The connection is gone; whether the server has run what was asked is not known."""


class ReplyError(Exception):
    """
    The server refused a command.

    It shows the code of the error alone: some errors repeat the command, owner ids included.
    """

    def __init__(self, text: str) -> None:
        if text.startswith("@user_script: "):  # Redis 6.2 says first where in the script it was
            text = text.split(" ", 2)[-1].removeprefix("-")
            text = text if text.partition(" ")[0].isupper() else f"ERR {text}"
        self.words = text.split(" ", 3)[:3]  # enough for MOVED, and no owner id
        super().__init__(self.code)

    @property
    def code(self) -> str:
        """The first word of the error, such as NOSCRIPT or MOVED; what is no such word may be anything, and is "?"."""
        return self.words[0] if _CODE.fullmatch(self.words[0]) else "?"


_CODE = re.compile("[A-Z]{1,32}")
_CLOCK = BootClock()
_MORE = object()
_packed: Callable[[tuple[Word, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]


class Pipe(asyncio.Protocol):
    """The protocol of one open connection. Belongs to one event loop, and is never used again when lost."""

    def __init__(self, on_push: Push) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_push = on_push
        self._reader = hiredis.Reader(protocolError=PipeError, replyError=ReplyError, notEnoughData=_MORE)
        self._transport: asyncio.Transport | None = None
        self._lost: str | None = None
        self._out: list[bytes] = []
        self._flushing = False
        self._waiting: deque[asyncio.Future[Reply]] = deque()
        self._subscribing: deque[tuple[asyncio.Future[Reply], bytes, bytes]] = deque()
        self._confirmation: asyncio.Future[Reply] | None = None
        self._wait: bytes = b""
        self._gone = self._loop.create_future()
        self._nobody = self._loop.create_future()
        self._nobody.cancel()  # stands for whoever gave up: its reply is read and dropped
        self.channels: dict[str, asyncio.Future[Reply]] = {}
        """What this connection listens to, with the confirmation of each."""
        self._unheard_since = 0.0  # when the first call was sent after the last byte had come

    @property
    def silent_for(self) -> float:
        """Seconds for which calls have waited without a single byte from the server."""
        return _CLOCK.now() - self._unheard_since if self._waiting else 0.0

    def attach(self, transport: asyncio.Transport) -> None:
        """Begin to use *transport*, whose bytes come here from now on."""
        self._transport = transport

    @property
    def usable(self) -> bool:
        """Whether the connection is open, as far as anybody knows."""
        return self._lost is None and self._transport is not None and not self._transport.is_closing()

    def call(self, *words: Word, follow: str = "") -> asyncio.Future[Reply]:
        """
        Send one command; the future has its reply, or raises `ReplyError` or `PipeError`.

        When a key is to be followed, it is read behind the command, in the same write; nobody waits for that reply.
        """
        future: asyncio.Future[Reply] = self._loop.create_future()
        if self._lost is not None or self._transport is None:
            _fail(future, PipeError(self._lost or "not connected yet"))
            return future
        packed = _packed(words) + _packed(("EXISTS", follow)) if follow else _packed(words)
        if self._waiting or self._out:
            self._out.append(packed)
            self._flush_soon()
        else:
            self._unheard_since = _CLOCK.now()
            self._transport.write(packed)  # nobody to share the write with
        self._waiting.append(future)
        if follow:
            self._waiting.append(self._nobody)
        return future

    def subscribe(self, command: str, channel: str) -> asyncio.Future[Reply]:
        """Send SUBSCRIBE, SSUBSCRIBE or their opposites, which are confirmed by a message instead of a reply."""
        future = self.call(command, channel)
        if not future.done():
            self._subscribing.append((future, command.lower().encode(), channel.encode()))
        return future

    def confirm(self, replicas: int, milliseconds: int) -> asyncio.Future[Reply]:
        """
        Ask how many of *replicas* have everything that was sent in this turn; all who ask share one answer.

        Call it right after `call`, without an ``await`` in between.
        """
        if self._confirmation is None:
            self._confirmation = self._loop.create_future()
            self._wait = _packed(("WAIT", replicas, milliseconds))
            self._flush_soon()
        return self._confirmation

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._confirmation is not None:
            self._out.append(self._wait)
            self._waiting.append(self._confirmation)
            self._confirmation = None
        if self._lost is not None or self._transport is None:
            self._fail_waiting()
        else:
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def data_received(self, data: bytes) -> None:
        """Hand out what the server sent."""
        self._unheard_since = _CLOCK.now()
        reader = self._reader
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not _MORE:
                if type(reply) is hiredis.PushNotification:
                    self._take_push(reply)
                else:
                    self._settle(reply)
        except (PipeError, TypeError, IndexError):  # the latter two: a map by lists, a message without parts
            self.close("the server sent something that is not RESP3")

    def _settle(self, reply: Reply) -> None:
        if not self._waiting:
            self.close("the server answered what nobody had asked")
            return
        future = self._waiting.popleft()
        if self._subscribing and self._subscribing[0][0] is future:
            self._subscribing.popleft()
        if future.done():
            return  # given up meanwhile
        if isinstance(reply, ReplyError):
            _fail(future, reply)
        else:
            future.set_result(reply)

    def _take_push(self, message: list[Reply]) -> None:
        if self._subscribing:
            future, command, channel = self._subscribing[0]
            if future is self._waiting[0] and message[:2] == [command, channel]:
                self._settle(message)
                return
        self._on_push(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail everything that waits."""
        if not self._gone.done():
            self._gone.set_result(None)
        self._lose("the connection was lost" if exc is None else f"the connection was lost ({type(exc).__name__})")

    def close(self, why: str = "the connection was closed") -> None:
        """Drop the connection at once; whatever waits for a reply fails."""
        self._lose(why)
        if self._transport is not None:
            self._transport.abort()

    async def closed(self) -> None:
        """Wait until the socket is closed, for a bounded time."""
        if self._transport is not None:
            await asyncio.wait((self._gone,), timeout=1.0)

    def _lose(self, why: str) -> None:
        if self._lost is None:
            self._lost = why
            self._fail_waiting()

    def _fail_waiting(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        self._subscribing.clear()
        for future in waiting:
            if not future.done():
                _fail(future, PipeError(self._lost))


def _fail(future: asyncio.Future[Reply], error: Exception) -> None:
    future.set_exception(error)
    future.exception()  # whoever has stopped waiting is not told about it by the loop
