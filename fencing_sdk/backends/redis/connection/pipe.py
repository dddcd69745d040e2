"""
One connection that all requests share. It speaks RESP3: the server replies in the order of the commands.

All commands of one turn of the event loop leave in one write. No request has the connection to itself,
so a cancelled one does no harm: the pipe reads its reply and drops it. Messages that the server sends
unasked (wake-ups, changed keys) may stand between the replies.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import TypeAlias

from fencing_sdk._values.drivers import imported_from

with imported_from("redis", "hiredis"):
    import hiredis

from fencing_sdk._values.clock import BootClock
from fencing_sdk.backends.redis.scripts import Argument

Reply: TypeAlias = object
"""None, int, bytes, float, bool, or a list or dict of those."""

Take = Callable[[Reply], None]
"""Called with the reply to a posted command, or with its error."""

Push = Callable[[list[Reply]], None]
"""Called with every message that is not a reply: its kind, then its parts."""


class PipeError(Exception):
    """The connection broke. It is unknown whether the server has run the command."""


class ReplyError(Exception):
    """
    The server refused a command.

    Only the code and the words before the first quote are shown: what some errors quote is the command, which may have
    owner ids.
    """

    said: str
    """The server's words behind the code, up to the first quote; empty without a code."""

    command: str
    """
    The command that the user may not run, or that the server does not know, such as ``scan``; empty if the server does
    not name it, as Redis before 7.2 does not for a command of a script.
    """

    def __init__(self, text: str) -> None:
        if text.startswith("@user_script: "):  # Redis 6.2 puts the place in the script first
            text = text.split(" ", 2)[-1].removeprefix("-")
            text = text if text.partition(" ")[0].isupper() else f"ERR {text}"
        if text.startswith("ERR "):
            text = next((f"{code} {text}" for code, said in _WITHOUT_CODE if said.match(text)), text)
        self.words = text.split(" ", 3)[:3]  # enough for MOVED, and no owner id
        self.said = before_quotes(text.partition(" ")[2]) if self.code != "?" else ""
        self.command = named_command(text) if self.code in {"NOPERM", "NOCOMMAND"} else ""
        super().__init__(self.code)

    @property
    def code(self) -> str:
        """The first word of the error, such as NOSCRIPT or MOVED, or "?" if it is not made of capital letters."""
        return self.words[0] if _CODE.fullmatch(self.words[0]) else "?"


_CODE = re.compile("[A-Z]{1,32}")
_QUOTE = re.compile(r"[\s(][`'\"]|[\r\n]")
_NAMED = re.compile(r" run the '([a-z_|]{1,40})' command|ERR unknown command ['`]([A-Za-z_|]{1,40})['`]")
_WITHOUT_CODE = (
    # Redis 7.0 says "The user executing the script can't ...", from 7.2 on and Valkey "ACL failure in script: ...".
    ("NOPERM", re.compile(r"ERR (The user executing the script can't |[^'`]*\b(ACL|permissions?)\b)")),
    ("NOCOMMAND", re.compile(r"ERR unknown (\w+ )?command\b", re.IGNORECASE)),
    ("TRYAGAIN", re.compile(r"ERR Script attempted to access a non local key")),
)
"""Codes for errors that servers report as ERR alone, by the words before the first quote."""


def before_quotes(text: str) -> str:
    """Return *text* up to the first thing that it quotes."""
    return _QUOTE.split(text, maxsplit=1)[0][:200].rstrip(" ,:")


def named_command(text: str) -> str:
    """The command that the *text* of the server says is forbidden or unknown; empty if it names no such word."""
    found = _NAMED.search(text)
    return "" if found is None else (found[1] or found[2]).lower()


_CLOCK = BootClock()
_MORE = object()
_PUSH = hiredis.PushNotification
pack: Callable[[tuple[Argument, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]
"""Pack the words of a command into bytes of the protocol."""
_TRACKED = pack(("CLIENT", "CACHING", "YES"))
"""Client tracking follows what the next command reads."""


class Pipe(asyncio.Protocol):
    """The protocol of one open connection, in one event loop. It is not used again once the connection is lost."""

    def __init__(self, on_push: Push) -> None:
        self.loop = asyncio.get_running_loop()
        self.version: tuple[int, ...] = ()
        """The version of the server."""
        self._on_push = on_push
        self._reader = hiredis.Reader(protocolError=PipeError, replyError=ReplyError, notEnoughData=_MORE)
        self._transport: asyncio.Transport | None = None
        self._loss: str | None = None  # why the connection is lost
        self._unsent: list[bytes] = []
        self._flushing = False
        self._pid = os.getpid()
        self._expected: deque[asyncio.Future[Reply] | Take] = deque()  # what each reply to come is for, in their order
        self._subscribing: deque[tuple[asyncio.Future[Reply], bytes, bytes]] = deque()
        self._confirmation: asyncio.Future[Reply] | None = None
        self._wait_command: bytes = b""
        self._disconnected = self.loop.create_future()
        self.channels: dict[str, asyncio.Future[Reply]] = {}
        """The subscriptions of this connection, each with its confirmation."""
        self._silent_since = 0.0  # when the first command was sent after the last byte had arrived

    @property
    def silent_for(self) -> float:
        """Seconds without a byte from the server while commands wait for replies."""
        return _CLOCK.now() - self._silent_since if self._expected else 0.0

    def attach(self, transport: asyncio.Transport) -> None:
        """Begin to use *transport*, which hands its bytes to this protocol."""
        self._transport = transport

    @property
    def usable(self) -> bool:
        """True if the connection is open, as far as this end knows."""
        return self._loss is None and self._transport is not None and not self._transport.is_closing()

    def call(self, *words: Argument) -> asyncio.Future[Reply]:
        """Send one command. The future is its reply, or raises `ReplyError` or `PipeError`."""
        future: asyncio.Future[Reply] = self.loop.create_future()
        if self._loss is not None or self._transport is None:
            _fail(future, PipeError(self._loss or "not connected yet"))
            return future
        self._write(pack(words))
        self._expected.append(future)
        return future

    def follow(self, keys: Sequence[str], take: Take | None = None) -> None:
        """Let client tracking follow these keys, until one changes. *take* gets the number of those that exist."""
        if self.post(_TRACKED + pack(("EXISTS", *keys)), self._drop):
            self._expected.append(self._drop if take is None else take)

    @staticmethod
    def _drop(reply: Reply) -> None:
        """Neither the value nor an error matters."""

    def post(self, packed: bytes, take: Take) -> bool:
        """
        Send a *packed* command, and call *take* with its reply or its error. It must not raise.

        Returns: whether it was sent. If the connection cannot be used here, *take* is not called.
        """
        transport = self._transport
        if transport is None or self._loss is not None or transport.is_closing():
            return False
        if self._pid != os.getpid() or asyncio.get_running_loop() is not self.loop:
            return False
        self._write(packed)
        self._expected.append(take)
        return True

    def _write(self, packed: bytes) -> None:
        if self._expected or self._unsent:
            self._unsent.append(packed)
            self._flush_soon()
        elif self._transport is not None:
            self._silent_since = _CLOCK.now()
            self._transport.write(packed)  # no other command could share the write

    def subscribe(self, command: str, channel: str) -> asyncio.Future[Reply]:
        """Send SUBSCRIBE, SSUBSCRIBE or their opposites. The server confirms them by a message, not by a reply."""
        future = self.call(command, channel)
        if not future.done():
            self._subscribing.append((future, command.lower().encode(), channel.encode()))
        return future

    def confirm(self, replicas: int, milliseconds: int) -> asyncio.Future[Reply]:
        """
        Send WAIT: how many of *replicas* have everything that was sent in this turn of the loop.

        All calls of one turn share one answer. Call it right after `call`, without an ``await`` in between.
        """
        if self._confirmation is None:
            self._confirmation = self.loop.create_future()
            self._wait_command = pack(("WAIT", replicas, milliseconds))
            self._flush_soon()
        return self._confirmation

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._confirmation is not None:
            self._unsent.append(self._wait_command)
            self._expected.append(self._confirmation)
            self._confirmation = None
        if self._loss is not None or self._transport is None:
            self._fail_expected()
        else:
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def data_received(self, data: bytes) -> None:
        """Give each reply to its future, and each message to `on_push`."""
        self._silent_since = _CLOCK.now()
        reader = self._reader
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not _MORE:
                if type(reply) is _PUSH:
                    self._take_push(reply)
                else:
                    self._settle(reply)
        except (PipeError, TypeError, IndexError):  # the last two: a map with lists as keys, a message without parts
            self.close("the server sent something that is not RESP3")

    def _settle(self, reply: Reply) -> None:
        if not self._expected:
            self.close("the server sent a reply to no command")
            return
        future = self._expected.popleft()
        if not isinstance(future, asyncio.Future):
            future(reply)
            return
        if self._subscribing and self._subscribing[0][0] is future:
            self._subscribing.popleft()
        if future.done():
            return  # its caller was cancelled
        if isinstance(reply, ReplyError):
            _fail(future, reply)
        else:
            future.set_result(reply)

    def _take_push(self, message: list[Reply]) -> None:
        if self._subscribing:
            future, command, channel = self._subscribing[0]
            if future is self._expected[0] and message[:2] == [command, channel]:
                self._settle(message)
                return
        self._on_push(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail every command that waits for a reply."""
        if not self._disconnected.done():
            self._disconnected.set_result(None)
        self._lose("the connection was lost" if exc is None else f"the connection was lost ({type(exc).__name__})")

    def close(self, why: str = "the connection was closed") -> None:
        """Close the connection at once, and fail every command that waits for a reply."""
        self._lose(why)
        if self._transport is not None:
            self._transport.abort()

    def close_soon(self, why: str) -> None:
        """Close the connection in the next turn of the loop: other replies may be in the same read."""
        self.loop.call_soon(self.close, why, context=Context())

    async def closed(self) -> None:
        """Wait until the socket is closed, at most a second."""
        if self._transport is not None:
            await asyncio.wait((self._disconnected,), timeout=1.0)

    def _lose(self, why: str) -> None:
        if self._loss is None:
            self._loss = why
            self._fail_expected()

    def _fail_expected(self) -> None:
        expected, self._expected = self._expected, deque()
        self._subscribing.clear()
        for future in expected:
            if not isinstance(future, asyncio.Future):
                future(PipeError(self._loss))
            elif not future.done():
                _fail(future, PipeError(self._loss))


def _fail(future: asyncio.Future[Reply], error: Exception) -> None:
    future.set_exception(error)
    future.exception()  # read here, so that asyncio logs nothing when its caller was cancelled
