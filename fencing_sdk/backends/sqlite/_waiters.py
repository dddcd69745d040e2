"""
The waiters of a backend in one event loop: what wakes them, and what keeps their places.

Once in `LINE_POLL` seconds, one timer for all of them shows that they live, and wakes those whose turn it is although
no datagram came: the holder died, or the system has no such sockets. The timer is one of the event loop, so a loop
that hangs shows no sign of life, and loses its places to waiters that can use them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from fencing_sdk._values.claim import Claim
from fencing_sdk.backends._shared.lock_table import LINE_POLL
from fencing_sdk.backends._shared.wakeup import WakeUp
from fencing_sdk.backends.sqlite._bell import Place, hang_bell
from fencing_sdk.errors import BackendError

Attend = Callable[[str, Sequence[tuple[Claim, Place]]], "Future[list[Claim]]"]
"""From a station and its waiters to those who should try: `LockRows.attend`, in the thread."""


class Waiter:
    """One who waits; the `Turn` of the contract."""

    def __init__(self, claim: Claim, place: Place) -> None:
        self.claim = claim
        self.place = place
        self.served = False
        """It holds the lock, and has not left the line yet."""
        self._woken = WakeUp()

    def wake(self) -> None:
        """Let it try."""
        self._woken.set()

    async def wait(self) -> None:
        """See `fencing_sdk.abc.Turn.wait`."""
        await self._woken.wait()
        self._woken.clear()


class Waiters:
    """Those who wait in the running event loop."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._bell = hang_bell()
        self._station = os.urandom(16).hex()
        self._waiters: dict[tuple[str, str], Waiter] = {}  # by name and owner
        self._timer: asyncio.TimerHandle | None = None
        self._attending: asyncio.Future[list[Claim]] | None = None

    @property
    def usable(self) -> bool:
        """Whether this is their process and their loop: not in a forked child, and not in the next loop."""
        return self._pid == os.getpid() and self._loop is asyncio.get_running_loop()

    def find(self, claim: Claim) -> Waiter | None:
        """The waiter with this *claim*."""
        return self._waiters.get((claim.name, claim.owner))

    def add(self, claim: Claim) -> Waiter:
        """Let one wait. Its row is the caller's to write."""
        place = Place("" if self._bell is None else self._bell.name, self._station)
        waiter = self._waiters[claim.name, claim.owner] = Waiter(claim, place)
        if self._bell is not None:
            self._bell.expect(place.word, waiter.wake)
        self._set_timer()
        return waiter

    def remove(self, waiter: Waiter) -> None:
        """Let it wait no more."""
        self._waiters.pop((waiter.claim.name, waiter.claim.owner), None)
        if self._bell is not None:
            self._bell.forget(waiter.place.word)
        if not self._waiters:
            self._stop()

    def close(self) -> None:
        """Close the bell and show no more signs of life. A forked child closes only its copy of the bell."""
        if self._bell is not None:
            self._bell.close()
        if self._pid == os.getpid():
            self._stop()

    def _set_timer(self) -> None:
        if self._timer is None and self._attending is None:
            self._timer = self._loop.call_later(LINE_POLL, self._show)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._attending is not None and not self._loop.is_closed():
            self._attending.cancel()
        self._attending = None

    def _show(self) -> None:
        self._timer = None
        waiting = [(waiter.claim, waiter.place) for waiter in self._waiters.values() if not waiter.served]
        try:
            self._attending = asyncio.wrap_future(self._attend(self._station, waiting), loop=self._loop)
        except BackendError:
            self._go_on(claim for claim, _ in waiting)
        else:
            self._attending.add_done_callback(self._shown)

    def _shown(self, attended: asyncio.Future[list[Claim]]) -> None:
        failed = attended.cancelled() or attended.exception() is not None
        if attended is not self._attending:
            return  # stopped meanwhile
        self._attending = None
        # After a failure they all try, and their calls tell why the file cannot be used.
        self._go_on([waiter.claim for waiter in self._waiters.values()] if failed else attended.result())

    def _go_on(self, due: Iterable[Claim]) -> None:
        for claim in due:
            waiter = self.find(claim)
            if waiter is not None:
                waiter.wake()
        self._set_timer()
