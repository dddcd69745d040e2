"""
The bells of one client: NOTIFY on a channel of its own, heard on a second connection.

Each ticket names its client's channel. The function that lets it hold, or ends it, sends NOTIFY with the digest of its
owner. Notifications are lost while the connection is broken: when the client listens again, all its bells ring.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import suppress

from fencing_sdk._values.clock import JITTER
from fencing_sdk._values.loop_owner import LoopOwner
from fencing_sdk.backends._shared.background_task import BackgroundTask
from fencing_sdk.backends._shared.bells import Bells
from fencing_sdk.backends.postgresql.dial import PostgresqlConnection, PostgresqlDialer
from fencing_sdk.backends.postgresql.driver import PostgresqlSession

_ECHO = ""
"""The payload of an echo: no bell has an empty message."""
ECHO_PATIENCE = 2.0
"""Seconds after which an echo counts as lost."""
_CHECK_EVERY = 10.0
"""Seconds between two echoes. If no waiter is left by then, the connection is closed."""
_RETRY_AFTER = 1.0
_RETRY_AFTER_SILENCE = 60.0
"""Seconds until the next attempt where a connection never delivered an echo."""
_CLOSING_PATIENCE = 1.0


class NotifyListener:
    """
    Opens the connection that listens, checks it, and opens another when it breaks.

    A client has it while one of its tickets waits, or holds for more than a moment.

    A proxy that pools transactions accepts LISTEN and never delivers a notification. It gives itself away by its
    process id, which is not the server's, and no client listens there. The listener sends an echo, a notification to
    itself, on the connection for the requests, and listens once the echo arrives. It repeats the echo from time to
    time, which also finds a connection that broke without a sound.
    """

    def __init__(
        self,
        dialer: PostgresqlDialer,
        connection: PostgresqlConnection,
        bells: Bells,
    ) -> None:
        self._dialer = dialer
        self._connection = connection
        self._bells = bells
        self._owner: LoopOwner | None = None
        self._task = BackgroundTask()
        self._echo_arrived = asyncio.Event()
        self.channel = ""
        """The channel on which this client receives notifications."""
        self.listening = False
        """True if the last echo arrived."""

    def name_channel(self) -> str:
        """Return the channel of this client, on which nothing listens before `open`."""
        if self._owner is None or not self._owner.is_current:
            self._owner, self._task = LoopOwner(), BackgroundTask()
            self.channel = f"fencing_{uuid.uuid4().hex}"
        return self.channel

    def open(self) -> None:
        """Begin to listen, unless listening already, or no bell is left to ring."""
        self.name_channel()
        if self._bells and not self._task.running:
            self.listening = False
            self._task.start(self._listen_while_needed)

    async def _listen_while_needed(self) -> None:
        while self._bells:
            pause = _RETRY_AFTER
            with suppress(Exception):  # without a connection, waiters still try again by themselves
                session = await self._dialer.dial(missing="")
                try:
                    pause = await self._listen(session)
                finally:
                    if not session.closed:
                        await session.aclose()
            self.listening = False
            if pause:
                await asyncio.sleep(pause * JITTER.uniform(0.5, 1.0))

    async def _listen(self, session: PostgresqlSession) -> float:
        """Listen until the connection breaks or is not needed. Return how many seconds to wait before the next one."""
        ended = asyncio.Event()
        session.on_end(ended.set)
        if not await session.talks_to_server():  # LISTEN would stay behind in the session of another program
            return _RETRY_AFTER_SILENCE
        await session.listen(self.channel, self._on_notify)
        while not ended.is_set():
            if not await self._echo(ended):
                return 0.0 if self.listening else _RETRY_AFTER_SILENCE
            if not self.listening:
                self.listening = True
                self._bells.ring_all()
            with suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_EVERY):
                    await ended.wait()
            if not self._bells:
                break
        return 0.0 if self.listening else _RETRY_AFTER

    async def _echo(self, ended: asyncio.Event) -> bool:
        """
        Send an echo. Return whether it arrived on this connection.

        Raises:
            Exception: it could not be sent, so it proves nothing about this connection.
        """
        self._echo_arrived.clear()
        async with asyncio.timeout(ECHO_PATIENCE):
            await self._connection.ask("SELECT pg_catalog.pg_notify($1, $2)", (self.channel, _ECHO))
        with suppress(TimeoutError):
            async with asyncio.timeout(ECHO_PATIENCE):
                await self._echo_arrived.wait()
        return self._echo_arrived.is_set() and not ended.is_set()

    def _on_notify(self, payload: str) -> None:
        if payload == _ECHO:
            self._echo_arrived.set()
        else:
            self._bells.hear(payload)

    async def aclose(self) -> None:
        """Stop listening within a bounded time."""
        self.listening = False
        if self._owner is not None and self._owner.is_current:
            await self._task.aclose(limit=_CLOSING_PATIENCE)
