"""
The waiters of one client, and what wakes them.

The server keeps the line of each lock, its waiters in the order of their arrival, in the table ``fencing_waiter``. A
waiter joins with the channel of its client and a ticket, which names it among the waiters of that client. What wakes
a waiter:

1. Its turn. A release, and a waiter at the head of the line that leaves, send NOTIFY to the waiter that is at the
   head of the line then: its ticket, on its client's channel. The client's listener passes the ticket on.
2. A new connection. Notifications are lost while a connection is broken. When the client listens again, all its
   waiters wake and try.
3. Time. A waiter tries again once a second, or four times a second while its client receives no notifications.
   The answer to each try says so. A try is also the sign of life that keeps the waiter in the line.

A waiter also tries when the holder's ttl ends, because the server sends no notification then.
"""

from __future__ import annotations

import asyncio
import contextlib

from fencing_sdk._values.claim import Claim
from fencing_sdk.backends._shared.lock_table import LINE_POLL
from fencing_sdk.backends._shared.waiters import Waiter, WaiterTable, new_ticket
from fencing_sdk.backends.postgresql.connection.dial import PostgresqlDialer
from fencing_sdk.backends.postgresql.connection.listener import NotifyListener
from fencing_sdk.backends.postgresql.connection.request_queue import PostgresqlConnection
from fencing_sdk.backends.postgresql.requests import PostgresqlRequests, mode_arguments

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
        self._listener = NotifyListener(dialer, self._notify, self)
        self._table: WaiterTable[PostgresqlWaiter] = WaiterTable()

    @property
    def has_waiters(self) -> bool:
        """See `NotifyReceiver`."""
        return len(self._table) > 0

    @property
    def listening(self) -> bool:
        """Whether notifications arrive."""
        return self._listener.listening

    @property
    def poll(self) -> float:
        """Seconds after which a waiter tries again without a notification."""
        return LINE_POLL if self.listening else LINE_POLL / 4

    def find(self, claim: Claim) -> PostgresqlWaiter | None:
        """Return the waiter of *claim*, if it stands in a line."""
        return self._table.find(claim)

    async def join(self, claim: Claim) -> PostgresqlWaiter:
        """Join the line of a lock. Return once the client listens, or after a second without."""
        waiter = self._table.add(PostgresqlWaiter(claim, new_ticket()))
        try:
            self._listener.open()
            waiter.channel = self._listener.channel
            arguments = (claim.name, claim.owner, waiter.channel, waiter.ticket, claim.metadata)
            await self._connection.ask(self._requests.join, (*arguments, *mode_arguments(claim.mode)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LISTEN_PATIENCE):
                    await self._listener.tried()
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
        self._table.remove(waiter)
        for _ in range(0 if waiter.served else _LEAVE_TRIES):
            with contextlib.suppress(Exception):
                # Not urgent: it must not overtake a try of the same waiter, which would join the line again.
                await self._connection.ask(self._requests.leave, (claim.name, claim.owner), must_run=True)
                return

    def on_notify(self, payload: str) -> None:
        """Wake the waiter whose ticket arrived."""
        self._table.wake(payload)

    def wake_all(self) -> None:
        """Wake every waiter, because its notification may have been missed."""
        self._table.wake_all()

    async def _notify(self, channel: str, payload: str) -> object:
        return await self._connection.ask(self._requests.notify, (channel, payload))

    async def aclose(self) -> None:
        """Stop listening."""
        await self._listener.aclose()
