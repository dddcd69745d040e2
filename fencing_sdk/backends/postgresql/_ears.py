"""
The connection that listens, while anybody waits: one for each client.

Whether it hears is found out by a message to itself, sent on the connection of the calls: a proxy that gives every
transaction to another server process accepts LISTEN and never passes anything on. The same message, from time to
time, finds a connection that has broken without a sound.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import Context
from typing import Protocol

from fencing_sdk._values.process import generation
from fencing_sdk.backends.postgresql._dial import Dialer
from fencing_sdk.backends.postgresql._session import Session

_ECHO = ""
"""The word of a message to oneself."""
ECHO_PATIENCE = 2.0
"""Seconds after which a message to oneself counts as lost."""
_CHECK_EVERY = 10.0
"""Seconds between messages to oneself. With nobody waiting, the connection is closed after so long."""
_AGAIN_AFTER = 1.0
_AGAIN_AFTER_DEAF = 60.0
"""Seconds until another connection is tried where one has heard nothing."""


class Listener(Protocol):
    """Who wants to hear."""

    @property
    def occupied(self) -> bool:
        """Whether anybody waits."""
        ...

    def hear(self, word: str) -> None:
        """Somebody is spoken to."""
        ...

    def wake_everybody(self) -> None:
        """Messages may have been missed until now."""
        ...


class Ears:
    """
    Opens the connection, checks it, and opens another when it has broken.

    Args:
        dialer: Opens sessions.

        notify: Sends a word to a channel, on another connection than the one that listens.

        listener: Who is told what was heard.
    """

    def __init__(self, dialer: Dialer, notify: Callable[[str, str], Awaitable[object]], listener: Listener) -> None:
        self._dialer = dialer
        self._notify = notify
        self._listener = listener
        self._loop: asyncio.AbstractEventLoop | None = None
        self._generation = generation()
        self._task: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()
        self._heard = asyncio.Event()
        self.channel = ""
        """On which this client is spoken to."""
        self.deaf = True
        """Whether messages do not come, as far as anybody knows."""

    def open(self) -> None:
        """Begin to listen, unless listening already."""
        if not self._ours():
            self._loop, self._generation = asyncio.get_running_loop(), generation()
            self._task = None
            self.channel = f"fencing_{uuid.uuid4().hex}"
        if self._task is None or self._task.done():
            self.deaf = True
            self._tried = asyncio.Event()
            self._task = asyncio.get_running_loop().create_task(self._listen(), context=Context())

    def _ours(self) -> bool:
        return self._loop is asyncio.get_running_loop() and self._generation == generation()

    async def tried(self) -> None:
        """Return when the connection hears, or is known not to."""
        await self._tried.wait()

    async def _listen(self) -> None:
        while self._listener.occupied:
            pause = _AGAIN_AFTER
            with suppress(Exception):  # no connection, or it broke: whoever waits tries again without a message
                session = await self._dialer.dial_anyway()
                try:
                    pause = await self._stay(session)
                finally:
                    await self._end(session)
            self.deaf = True
            self._tried.set()
            if pause:
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    async def _stay(self, session: Session) -> float:
        """Listen until the connection is no good any more; return the seconds until another is worth a try."""
        ended = asyncio.Event()
        session.on_end(ended.set)
        await session.listen(self.channel, self._hear)
        while not ended.is_set():
            if not await self._echoed(ended):
                return _AGAIN_AFTER_DEAF if self.deaf else 0.0
            if self.deaf:
                self.deaf = False
                self._tried.set()
                self._listener.wake_everybody()
            with suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_EVERY):
                    await ended.wait()
            if not self._listener.occupied:
                break
        return 0.0 if not self.deaf else _AGAIN_AFTER

    async def _echoed(self, ended: asyncio.Event) -> bool:
        """
        Whether a message to oneself comes back.

        Raises:
            Exception: it could not be sent, which tells nothing about this connection.
        """
        self._heard.clear()
        async with asyncio.timeout(ECHO_PATIENCE):
            await self._notify(self.channel, _ECHO)
        with suppress(TimeoutError):
            async with asyncio.timeout(ECHO_PATIENCE):
                await self._heard.wait()
        return self._heard.is_set() and not ended.is_set()

    def _hear(self, word: str) -> None:
        if word == _ECHO:
            self._heard.set()
        else:
            self._listener.hear(word)

    async def _end(self, session: Session) -> None:
        if session.closed:
            return
        await session.aclose()

    async def aclose(self) -> None:
        """Stop listening. Bounded."""
        task, self._task = self._task, None
        self.deaf = True
        if task is None or not self._ours():
            return
        task.cancel()
        await asyncio.wait((task,), timeout=1.0)
