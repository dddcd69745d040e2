"""
The waiters of one client for permits, readers and writers, and what wakes them: see `waiters.py` for plain locks.

A share may be granted beside others, so a release alone cannot choose the waiter. The server wakes the waiter at the
head of the line of shares (see `waking_line.lua`), which then asks. If that is a reader, the readers behind it are
woken by the same message, up to the first other waiter, and each may be granted before the others have asked: see
`share.lua`. A waiter tries again once a second, when a share ends, and on a new connection. A try is also the sign of
life that keeps it in the line.
"""

from __future__ import annotations

import asyncio
import contextlib

from fencing_sdk._values.claim import Claim
from fencing_sdk.backends._shared.waiters import WaiterTable, new_ticket
from fencing_sdk.backends.redis.channels import ListeningWaiter, WakeChannels
from fencing_sdk.backends.redis.connection.dial import BACKEND
from fencing_sdk.backends.redis.connection.node import RedisNode
from fencing_sdk.backends.redis.connection.pipe import Pipe, Reply
from fencing_sdk.backends.redis.connection.router import RedisRouter
from fencing_sdk.backends.redis.keys import RedisKeys
from fencing_sdk.backends.redis.requests import RedisRequests
from fencing_sdk.errors import BackendUnavailableError

_MOVED = "the slot of the lock has moved to another server"
_LEAVE_TRIES = 2
"""One try on the open connection, and one on the next if that was broken."""


class ShareWaiters:
    """All waiters of one backend."""

    def __init__(self, router: RedisRouter, requests: RedisRequests, keys: RedisKeys, *, sharded: bool) -> None:
        self._router = router
        self._requests = requests
        self._keys = keys
        self._table: WaiterTable[ListeningWaiter] = WaiterTable()
        self._channels = WakeChannels(router, keys, self._table, sharded=sharded)

    def find(self, claim: Claim) -> ListeningWaiter | None:
        """The waiter of *claim*, if there is one."""
        return self._table.find(claim)

    async def join(self, claim: Claim) -> ListeningWaiter:
        """Join the line of a lock, until `leave`."""
        waiter = self._table.add(ListeningWaiter(claim, new_ticket(), self._keys.tag(claim.name)))
        try:
            await self._enter_line(waiter)
        except BaseException:
            await self.leave(waiter)
            raise
        return waiter

    async def rejoin(self, waiter: ListeningWaiter) -> None:
        """
        Join the line again: the server has dropped *waiter*, or sends it no messages any more.

        The waiter may leave while this runs, and the server may then carry out the leaving before the joining.
        So it leaves once more.
        """
        if self.find(waiter.claim) is not waiter:
            return
        try:
            await self._enter_line(waiter)
        finally:
            if self.find(waiter.claim) is not waiter:
                await self.leave(waiter)

    async def _enter_line(self, waiter: ListeningWaiter) -> None:
        """Send the requests of joining. SUBSCRIBE goes first, so that no message is missed."""
        subscription = await self._channels.listen(waiter)
        command = self._channels.command(waiter)
        await self._router.run(self._requests.join_share_line(waiter.claim, command, waiter.channel, waiter.ticket))
        await asyncio.wait((subscription,))
        if waiter.may_subscribe:
            subscription.result()

    def may_stay(self, waiter: ListeningWaiter) -> bool:
        """Whether joining again would change nothing: the channel is subscribed, or the user may not subscribe."""
        pipe = waiter.open_pipe
        return not waiter.may_subscribe or (pipe is not None and waiter.channel in pipe.channels)

    async def leave(self, waiter: ListeningWaiter) -> None:
        """
        Leave the line, unless the lock was granted.

        Raises no error: an error would replace the cancellation that ends the wait. If the request fails, the server
        drops the waiter for lack of a sign of life.
        """
        self._table.remove(waiter)
        self._channels.unsubscribe(waiter)
        for _ in range(0 if waiter.served else _LEAVE_TRIES):
            with contextlib.suppress(Exception):
                await self._router.run(self._requests.leave_share_line(waiter.claim))
                return

    def on_connect(self, node: RedisNode, pipe: Pipe) -> None:
        """Subscribe on a new connection, and wake the waiters that may have missed a message."""
        for waiter in self._table:
            if waiter.node is node:
                self._channels.subscribe(pipe, waiter)
                waiter.wake()

    def on_push(self, message: list[Reply]) -> None:
        """Wake the waiters that a message names, or those of a channel that the server has ended."""
        for ticket in (self._channels.text_for_us(message) or "").split():
            self._table.wake(ticket)
        for waiter in self._channels.cut_off(message):
            waiter.fail(BackendUnavailableError(BACKEND, "queue", _MOVED))
