"""
What wakes a waiter of this store, and what keeps its place in the line.

1. A datagram: the process that frees a lock sends one to the waiter at the head of the line (`wakeup_socket`).
2. A timer: once in `LINE_POLL` seconds, one timer for all waiters of this object gives their signs of life, and wakes
   those whose turn it is although no datagram came: the holder died, or the system has no such sockets.

A waiter that gives no sign of life for `LINE_TTL` seconds loses its place. The timer is one of the event loop, so a
loop that hangs gives no sign, and its waiters lose their places to waiters that can use the lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from fencing_sdk._values.claim import Claim
from fencing_sdk._values.loop_owner import LoopOwner
from fencing_sdk.backends._shared.lock_table import LINE_POLL
from fencing_sdk.backends._shared.waiters import Waiter, WaiterTable
from fencing_sdk.backends.sqlite.wakeup_socket import WakeupAddress, new_ticket, open_wakeup_socket
from fencing_sdk.errors import BackendError

Attend = Callable[[str, Sequence[tuple[Claim, WakeupAddress]]], "Future[list[Claim]]"]
"""From a group and its waiters to the claims that should try: `LockRows.attend`, in the thread."""


class SqliteWaiter(Waiter):
    """A waiter, and the address that is written into its row."""

    __slots__ = ("address",)

    def __init__(self, claim: Claim, address: WakeupAddress) -> None:
        super().__init__(claim, address.ticket)
        self.address = address


class SqliteWaiters:
    """The waiters of one backend object in the running event loop."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self._owner = LoopOwner()
        self._table: WaiterTable[SqliteWaiter] = WaiterTable()
        self._socket = open_wakeup_socket(self._table.wake)
        self._group = new_ticket()
        self._timer: asyncio.TimerHandle | None = None
        self._attending: asyncio.Future[list[Claim]] | None = None

    @property
    def usable(self) -> bool:
        """Whether this loop of this process owns them: not in a forked child, and not in the next loop."""
        return self._owner.is_current

    def find(self, claim: Claim) -> SqliteWaiter | None:
        """The waiter of *claim*, if there is one."""
        return self._table.find(claim)

    def add(self, claim: Claim) -> SqliteWaiter:
        """Make a waiter for *claim*. The caller writes its row."""
        address = WakeupAddress("" if self._socket is None else self._socket.name, self._group)
        waiter = self._table.add(SqliteWaiter(claim, address))
        self._set_timer()
        return waiter

    def remove(self, waiter: SqliteWaiter) -> None:
        """Forget *waiter*; without waiters, the timer stops."""
        self._table.remove(waiter)
        if not self._table:
            self._stop()

    def close(self) -> None:
        """Close the socket and give no more signs of life. A forked child closes only its copy of the socket."""
        if self._socket is not None:
            self._socket.close()
        if self._owner.in_this_process:
            self._stop()

    def _set_timer(self) -> None:
        if self._timer is None and self._attending is None:
            self._timer = self._owner.loop.call_later(LINE_POLL, self._give_signs)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._attending is not None and not self._owner.loop.is_closed():
            self._attending.cancel()
        self._attending = None

    def _give_signs(self) -> None:
        self._timer = None
        waiting = [(waiter.claim, waiter.address) for waiter in self._table if not waiter.served]
        try:
            self._attending = asyncio.wrap_future(self._attend(self._group, waiting), loop=self._owner.loop)
        except BackendError:
            self._wake(claim for claim, _ in waiting)
        else:
            self._attending.add_done_callback(self._attended)

    def _attended(self, answer: asyncio.Future[list[Claim]]) -> None:
        failed = answer.cancelled() or answer.exception() is not None
        if answer is not self._attending:
            return  # stopped meanwhile
        self._attending = None
        # After a failure all of them try, and their calls tell why the file cannot be used.
        self._wake([waiter.claim for waiter in self._table] if failed else answer.result())

    def _wake(self, due: Iterable[Claim]) -> None:
        for claim in due:
            waiter = self._table.find(claim)
            if waiter is not None:
                waiter.wake()
        self._set_timer()
