"""
The connection that listens for notifications. Each client has one while at least one of its requests waits for a lock.

A proxy that pools transactions accepts LISTEN and never delivers a notification. So the listener sends an echo, a
notification to itself, on the connection for the requests, and listens once the echo arrives. It repeats the echo
from time to time, which also finds a connection that broke without a sound.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from fencing_sdk._values.jitter import JITTER
from fencing_sdk._values.loop_owner import LoopOwner
from fencing_sdk.backends._shared.background_task import BackgroundTask
from fencing_sdk.backends.postgresql.connection.dial import PostgresqlDialer
from fencing_sdk.backends.postgresql.connection.session import PostgresqlSession

_ECHO = ""
"""The payload of an echo. Tickets of waiters are never empty."""
ECHO_PATIENCE = 2.0
"""Seconds after which an echo counts as lost."""
_CHECK_EVERY = 10.0
"""Seconds between two echoes. If no waiter is left by then, the connection is closed."""
_RETRY_AFTER = 1.0
_RETRY_AFTER_SILENCE = 60.0
"""Seconds until the next attempt where a connection never delivered an echo."""
_CLOSING_PATIENCE = 1.0


class NotifyReceiver(Protocol):
    """The object that the listener calls."""

    @property
    def has_waiters(self) -> bool:
        """Whether a connection that listens is needed."""
        ...

    def on_notify(self, payload: str) -> None:
        """Receive a notification."""
        ...

    def wake_all(self) -> None:
        """Wake every waiter, because notifications may have been missed until now."""
        ...


class NotifyListener:
    """
    Opens the connection that listens, checks it, and opens another when it breaks.

    Args:
        dialer: Opens sessions.

        notify: Sends a payload to a channel, on another connection than the one that listens.

        receiver: Gets the notifications.
    """

    def __init__(
        self, dialer: PostgresqlDialer, notify: Callable[[str, str], Awaitable[object]], receiver: NotifyReceiver
    ) -> None:
        self._dialer = dialer
        self._notify = notify
        self._receiver = receiver
        self._owner: LoopOwner | None = None
        self._task = BackgroundTask()
        self._tried = asyncio.Event()
        self._echo_arrived = asyncio.Event()
        self.channel = ""
        """The channel on which this client receives notifications."""
        self.listening = False
        """Whether the last echo arrived."""

    def open(self) -> None:
        """Begin to listen, unless listening already."""
        if self._owner is None or not self._owner.is_current:
            self._owner, self._task = LoopOwner(), BackgroundTask()
            self.channel = f"fencing_{uuid.uuid4().hex}"
        if not self._task.running:
            self.listening = False
            self._tried = asyncio.Event()
            self._task.start(self._listen_while_needed)

    async def tried(self) -> None:
        """Return when the connection listens, or when the attempt has failed."""
        await self._tried.wait()

    async def _listen_while_needed(self) -> None:
        while self._receiver.has_waiters:
            pause = _RETRY_AFTER
            with suppress(Exception):  # without a connection, waiters still try again by themselves
                session = await self._dialer.dial_without_schema()
                try:
                    pause = await self._listen(session)
                finally:
                    if not session.closed:
                        await session.aclose()
            self.listening = False
            self._tried.set()
            if pause:
                await asyncio.sleep(pause * JITTER.uniform(0.5, 1.0))

    async def _listen(self, session: PostgresqlSession) -> float:
        """Listen until the connection breaks or is not needed. Return how many seconds to wait before the next one."""
        ended = asyncio.Event()
        session.on_end(ended.set)
        await session.listen(self.channel, self._on_notify)
        while not ended.is_set():
            if not await self._echo(ended):
                return 0.0 if self.listening else _RETRY_AFTER_SILENCE
            if not self.listening:
                self.listening = True
                self._tried.set()
                self._receiver.wake_all()
            with suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_EVERY):
                    await ended.wait()
            if not self._receiver.has_waiters:
                break
        return 0.0 if self.listening else _RETRY_AFTER

    async def _echo(self, ended: asyncio.Event) -> bool:
        """
        Send an echo. Return whether it arrived on this connection.

        Raises:
            Exception: it could not be sent, so it tells nothing about this connection.
        """
        self._echo_arrived.clear()
        async with asyncio.timeout(ECHO_PATIENCE):
            await self._notify(self.channel, _ECHO)
        with suppress(TimeoutError):
            async with asyncio.timeout(ECHO_PATIENCE):
                await self._echo_arrived.wait()
        return self._echo_arrived.is_set() and not ended.is_set()

    def _on_notify(self, payload: str) -> None:
        if payload == _ECHO:
            self._echo_arrived.set()
        else:
            self._receiver.on_notify(payload)

    async def aclose(self) -> None:
        """Stop listening within a bounded time."""
        self.listening = False
        if self._owner is not None and self._owner.is_current:
            await self._task.aclose(limit=_CLOSING_PATIENCE)
