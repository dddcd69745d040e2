"""
The messages to one client: they wake its waiters, and tell its holders of revocations.

The server keeps the line of each lock, its waiters in the order of their arrival, in the table ``fencing_waiter``. A
waiter joins with the channel of its client and a ticket, which names it among the waiters of that client. What wakes
a waiter:

1. Its turn. A release, and a waiter at the head of the line that leaves, send NOTIFY to the waiter that is at the
   head of the line then: its ticket, on its client's channel. The client's listener passes the ticket on.
2. A new connection. Notifications are lost while a connection is broken. When the client listens again, all its
   waiters wake and try.
3. Time. A waiter tries again once a second, or four times a second while its client receives no notifications: the
   answer to each try shows which. A try is also the sign of life that keeps the waiter in the line.

A waiter also tries when the holder's ttl ends, because the server sends no notification then.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from contextlib import suppress

from fencing_sdk._values.claim import Busy, Claim, Grant
from fencing_sdk._values.clock import JITTER
from fencing_sdk._values.loop_owner import LoopOwner
from fencing_sdk._values.tasks import SharedBatches, ask_by_name
from fencing_sdk.backends._shared.background_task import BackgroundTask
from fencing_sdk.backends._shared.losses import RevocationWatcher, StopListening, name_digest
from fencing_sdk.backends._shared.rules import LINE_POLL
from fencing_sdk.backends._shared.waiters import Waiter, WaiterTable, new_ticket
from fencing_sdk.backends.postgresql.dial import PostgresqlConnection, PostgresqlDialer
from fencing_sdk.backends.postgresql.driver import DriverRow, PostgresqlSession
from fencing_sdk.backends.postgresql.requests import (
    PostgresqlRequests,
    mode_arguments,
    read_holders,
    read_readers,
    read_reasons,
)

_LISTEN_PATIENCE = 1.0
"""Seconds that joining waits for the listener. If the listener needs longer, it wakes the waiter once it listens."""

_LEAVE_TRIES = 2
"""One try on the open connection, and one on the next if that was broken."""


class PostgresqlWaiter(Waiter):
    """A waiter, and the channel of its client."""

    __slots__ = ("channel",)

    def __init__(self, claim: Claim, ticket: str) -> None:
        super().__init__(claim, ticket)
        self.channel = ""


class PostgresqlWaiters:
    """All waiters of one backend."""

    def __init__(
        self, connection: PostgresqlConnection, dialer: PostgresqlDialer, requests: PostgresqlRequests
    ) -> None:
        self._connection = connection
        self._requests = requests
        self.table: WaiterTable[PostgresqlWaiter] = WaiterTable()
        self.listener = NotifyListener(dialer, connection, requests, self.table)

    @property
    def poll(self) -> float:
        """Seconds after which a waiter tries again without a notification."""
        return LINE_POLL if self.listener.listening else LINE_POLL / 4

    async def join(self, claim: Claim) -> PostgresqlWaiter:
        """Join the line of a lock. Return once the client listens, or after a second without."""
        waiter = self.table.add(PostgresqlWaiter(claim, new_ticket()))
        try:
            self.listener.open()
            waiter.channel = self.listener.channel
            arguments = (claim.name, claim.owner, waiter.channel, waiter.ticket, claim.label)
            await self._connection.ask(self._requests.join, (*arguments, *mode_arguments(claim.mode)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LISTEN_PATIENCE):
                    await self.listener.tried.wait()
        except BaseException:
            await self.leave(waiter)
            raise
        return waiter

    async def leave(self, waiter: PostgresqlWaiter) -> None:
        """
        Leave the line, unless the lock was granted: then the server has removed the waiter.

        Raises no error: an error would replace the cancellation that ends the wait. If the request fails, the server
        removes the waiter for lack of a sign of life.
        """
        claim = waiter.claim
        self.table.remove(waiter)
        for _ in range(0 if waiter.served else _LEAVE_TRIES):
            with contextlib.suppress(Exception):
                # Not urgent: it must not overtake a try of the same waiter, which would join the line again.
                await self._connection.ask(self._requests.leave, (claim.name, claim.owner), must_run=True)
                return


_TOGETHER = 256
"""Readers of one statement."""

Tried = Grant | Busy | Exception | None
"""The answer to one reader; None if it has to ask alone."""


class WaitingReaders:
    """
    The readers of one backend that are trying now.

    Those that wait for the same name and try at the same moment are decided in one statement. They are woken together,
    when a writer has gone. A reader that gives up before the statement is sent is not asked for. One that has lost its
    place in the line asks alone, which gives it another.
    """

    def __init__(
        self, connection: PostgresqlConnection, requests: PostgresqlRequests, waiters: PostgresqlWaiters
    ) -> None:
        self._connection = connection
        self._requests = requests
        self._waiters = waiters
        self._trying: set[Claim] = set()
        self._batches: SharedBatches[Claim, Tried] = SharedBatches(
            lambda claims: ask_by_name(claims, lambda claim: claim.name, self._try_name), _TOGETHER, one_by_one=True
        )

    async def acquire(self, claim: Claim) -> Grant | Busy | None:
        """
        Try together with the others; return None if the reader has to ask alone.

        Raises:
            Exception: the driver's error.
        """
        self._trying.add(claim)
        try:
            outcome = await self._batches.ask(claim)
        finally:
            self._trying.discard(claim)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _try_name(self, name: str, claims: list[Claim]) -> list[Tried]:
        asked: list[Claim] = []

        async def ask(session: PostgresqlSession) -> DriverRow | None:
            """A reader that has left meanwhile would not release what it is granted."""
            asked[:] = [claim for claim in claims if claim in self._trying]
            arguments = self._requests.readers_arguments(name, asked)
            return await session.ask(self._requests.acquire_readers, arguments) if asked else None

        if len(claims) == 1:
            return [None]
        try:
            row = await self._connection.run(ask)
            found = read_readers(row, len(asked), self._waiters.poll) if asked else []
        except Exception as error:  # noqa: BLE001  (each reader raises it, and those of other names do not)
            return [error] * len(claims)
        outcomes: dict[Claim, Tried] = dict(zip(asked, found, strict=True))
        return [outcomes.get(claim) for claim in claims]


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


class NotifyListener:
    """
    Opens the connection that listens, checks it, and opens another when it breaks.

    Each client has it while at least one of its requests waits for a lock.

    A proxy that pools transactions accepts LISTEN and never delivers a notification. So the listener sends an echo, a
    notification to itself, on the connection for the requests, and listens once the echo arrives. It repeats the echo
    from time to time, which also finds a connection that broke without a sound.
    """

    def __init__(
        self,
        dialer: PostgresqlDialer,
        connection: PostgresqlConnection,
        requests: PostgresqlRequests,
        table: WaiterTable[PostgresqlWaiter],
    ) -> None:
        self._dialer = dialer
        self._connection = connection
        self._requests = requests
        self._table = table
        self._owner: LoopOwner | None = None
        self._task = BackgroundTask()
        self.tried = asyncio.Event()
        """Set when the connection listens, or when the attempt has failed."""
        self._echo_arrived = asyncio.Event()
        self.channel = ""
        """The channel on which this client receives notifications."""
        self.listening = False
        """True if the last echo arrived."""

    def open(self) -> None:
        """Begin to listen, unless listening already."""
        if self._owner is None or not self._owner.is_current:
            self._owner, self._task = LoopOwner(), BackgroundTask()
            self.channel = f"fencing_{uuid.uuid4().hex}"
        if not self._task.running:
            self.listening = False
            self.tried = asyncio.Event()
            self._task.start(self._listen_while_needed)

    async def _listen_while_needed(self) -> None:
        while self._table:
            pause = _RETRY_AFTER
            with suppress(Exception):  # without a connection, waiters still try again by themselves
                session = await self._dialer.dial(missing="")
                try:
                    pause = await self._listen(session)
                finally:
                    if not session.closed:
                        await session.aclose()
            self.listening = False
            self.tried.set()
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
                self.tried.set()
                self._table.wake_all()
            with suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_EVERY):
                    await ended.wait()
            if not self._table:
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
            await self._connection.ask(self._requests.notify, (self.channel, _ECHO))
        with suppress(TimeoutError):
            async with asyncio.timeout(ECHO_PATIENCE):
                await self._echo_arrived.wait()
        return self._echo_arrived.is_set() and not ended.is_set()

    def _on_notify(self, payload: str) -> None:
        if payload == _ECHO:
            self._echo_arrived.set()
        else:
            self._table.wake(payload)

    async def aclose(self) -> None:
        """Stop listening within a bounded time."""
        self.listening = False
        if self._owner is not None and self._owner.is_current:
            await self._task.aclose(limit=_CLOSING_PATIENCE)


def revocation_channel(schema: str) -> str:
    """Return the channel for the revocations in a schema, as ``fencing_revoke`` computes it."""
    return f"fencing_revoked_{name_digest(schema)[:32]}"


class PostgresqlLossWatcher(RevocationWatcher):
    """
    The grants of one backend, each until it ends.

    The client hears of revocations on the connection for its requests, so that no client has one more. The connection
    listens on the one channel of the schema; `RevocationWatcher` decides when.

    A proxy that pools transactions passes no messages on, and LISTEN would stay behind in the session of another
    program. The proxy gives itself away by its process id, which is not the server's. There, the next renewal
    notices the loss.
    """

    def __init__(self, connection: PostgresqlConnection, requests: PostgresqlRequests, schema: str) -> None:
        super().__init__()
        self._connection = connection
        self._requests = requests
        self._channel = revocation_channel(schema)
        self._session: PostgresqlSession | None = None
        """The connection that listens, or of which it is known that it cannot. It reports its end."""
        self._stop_at_server: StopListening | None = None

    async def listen(self) -> StopListening | None:
        """See `RevocationWatcher.listen`."""
        await self._connection.run(self._listen)
        if self._session is None or self._session.closed:
            msg = "the connection has ended"
            raise ConnectionError(msg)
        return None if self._stop_at_server is None else self._stop

    async def _listen(self, session: PostgresqlSession) -> None:
        if self._session is not session:
            self._session = session
            session.on_end(lambda: self._on_end(session))
        self._stop_at_server = None
        if await session.talks_to_server():
            self._stop_at_server = await session.listen(self._channel, self.on_message)

    def _on_end(self, session: PostgresqlSession) -> None:
        """Listen on the next connection."""
        if self._session is session:
            self.cut_off()

    async def _stop(self) -> None:
        async def stop_on(session: PostgresqlSession) -> None:
            stop, self._stop_at_server = self._stop_at_server, None
            if stop is not None and self._session is session:
                await stop()

        await self._connection.run(stop_on)

    async def reasons(self, claims: Sequence[Claim]) -> list[str | None]:
        """See `RevocationWatcher.reasons`. The reason may be that of an earlier grant of an owner that holds now."""
        found = await self.written(claims)
        for index, claim in enumerate(claims):
            if found[index] is not None:
                holders = read_holders(await self._connection.ask(self._requests.held, ([claim.name],)))
                if claim.holder in {holder.id for holder in holders}:
                    found[index] = None
        return found

    async def written(self, claims: Sequence[Claim]) -> list[str | None]:
        """Why the ended grants of *claims* were revoked, or None."""
        names, owners = [claim.name for claim in claims], [claim.owner for claim in claims]
        return read_reasons(await self._connection.ask(self._requests.reasons, (names, owners), urgent=True))
