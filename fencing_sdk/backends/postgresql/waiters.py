"""
The waiters of one client, and what wakes them.

The server keeps a queue of waiters for each lock, in the table ``fencing_waiter``. A waiter joins with the channel of
its client and a ticket, which names the waiter among those of its client. What wakes a waiter:

1. Its turn. A release, and a waiter at the head of the queue that leaves, send NOTIFY to the waiter that is at the
   head of the queue then: its ticket, on its client's channel. The client's listener passes the ticket on.
2. A new connection. Notifications are lost while a connection is broken. When the client listens again, all its
   waiters wake and try.
3. Time. A waiter tries again once a second, or four times a second while its client receives no notifications.
   The answer to each try says so. A try is also the sign of life that keeps the waiter in the queue.

A waiter also tries when the holder's ttl ends, because the server sends no notification then.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools

from fencing_sdk._values.claim import Claim
from fencing_sdk.backends._shared.lock_table import LINE_POLL
from fencing_sdk.backends._shared.wakeup import WakeUp
from fencing_sdk.backends.postgresql.connection.dial import PostgresqlDialer
from fencing_sdk.backends.postgresql.connection.listener import NotifyListener
from fencing_sdk.backends.postgresql.connection.request_queue import PostgresqlConnection
from fencing_sdk.backends.postgresql.requests import PostgresqlRequests

_LISTEN_PATIENCE = 1.0
"""Seconds that joining waits for the listener. If the listener needs longer, it wakes the waiter once it listens."""

_LEAVE_TRIES = 2
"""One try on the open connection, and one on the next if that was broken."""


class PostgresqlWaiter:
    """A request that waits for one lock, in the lock's queue."""

    __slots__ = ("_woken", "channel", "claim", "granted", "ticket")

    def __init__(self, claim: Claim, ticket: str) -> None:
        self.claim = claim
        self.channel = ""
        self.ticket = ticket
        self.granted = False
        """The server has granted the lock, and removed the waiter from the queue."""
        self._woken = WakeUp()

    def wake(self) -> None:
        """Another try may succeed."""
        self._woken.set()

    async def wait(self) -> None:
        """See `fencing_sdk.abc.Turn.wait`."""
        await self._woken.wait()
        self._woken.clear()


class PostgresqlWaiters:
    """All waiters of one backend."""

    def __init__(
        self, connection: PostgresqlConnection, dialer: PostgresqlDialer, requests: PostgresqlRequests
    ) -> None:
        self._connection = connection
        self._requests = requests
        self._listener = NotifyListener(dialer, self._notify, self)
        self._tickets = itertools.count(1)
        self._by_claim: dict[tuple[str, str], PostgresqlWaiter] = {}
        self._by_ticket: dict[str, PostgresqlWaiter] = {}

    @property
    def has_waiters(self) -> bool:
        """See `NotifyReceiver`."""
        return bool(self._by_claim)

    @property
    def listening(self) -> bool:
        """Whether notifications arrive."""
        return self._listener.listening

    @property
    def poll(self) -> float:
        """Seconds after which a waiter tries again without a notification."""
        return LINE_POLL if self.listening else LINE_POLL / 4

    def find(self, claim: Claim) -> PostgresqlWaiter | None:
        """Return the waiter of *claim*, if it waits in a queue."""
        return self._by_claim.get((claim.name, claim.owner)) if self._by_claim else None

    async def join(self, claim: Claim) -> PostgresqlWaiter:
        """Join the queue of a lock. Return once the client listens, or after a second without."""
        waiter = PostgresqlWaiter(claim, str(next(self._tickets)))
        self._by_claim[claim.name, claim.owner] = self._by_ticket[waiter.ticket] = waiter
        try:
            self._listener.open()
            waiter.channel = self._listener.channel
            arguments = (claim.name, claim.owner, waiter.channel, waiter.ticket)
            await self._connection.ask(self._requests.join, arguments)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LISTEN_PATIENCE):
                    await self._listener.tried()
        except BaseException:
            await self.leave(waiter)
            raise
        return waiter

    async def leave(self, waiter: PostgresqlWaiter) -> None:
        """
        Leave the queue, unless the lock was granted.

        Raises no error: an error would replace the cancellation that ends the wait. If the request fails, the server
        removes the waiter for lack of a sign of life.
        """
        claim = waiter.claim
        self._by_claim.pop((claim.name, claim.owner), None)
        self._by_ticket.pop(waiter.ticket, None)
        for _ in range(0 if waiter.granted else _LEAVE_TRIES):
            with contextlib.suppress(Exception):
                # Not urgent: it must not overtake a try of the same waiter, which would join the queue again.
                await self._connection.ask(self._requests.leave, (claim.name, claim.owner), must_run=True)
                return

    def on_notify(self, payload: str) -> None:
        """Wake the waiter whose ticket arrived."""
        if (waiter := self._by_ticket.get(payload)) is not None:
            waiter.wake()

    def wake_all(self) -> None:
        """Wake every waiter, because its notification may have been missed."""
        for waiter in tuple(self._by_claim.values()):
            waiter.wake()

    async def _notify(self, channel: str, payload: str) -> object:
        return await self._connection.ask(self._requests.notify, (channel, payload))

    async def aclose(self) -> None:
        """Stop listening."""
        await self._listener.aclose()
