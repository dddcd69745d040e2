"""
A drain that a signal begins, in a script or a worker whose main thread runs the block.

    with locks, locks.draining_on(SIGTERM, SIGINT, within=25):
        work()

    first signal     the client drains: threads that wait for a lock leave the line by a `DrainingError`, bodies go on
    second signal    the bound is now: the leases are lost, which bodies learn as from every loss
    third signal     does what it did before the block, which ends most processes

No thread is cancelled, so a block that waits for no lock asks ``locks.draining``.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from functools import partial
from types import TracebackType

from fencing_sdk._client import LockClient
from fencing_sdk._client_operating import draining_of
from fencing_sdk._current_lease import held_here
from fencing_sdk._lease import state_of
from fencing_sdk._values.observers import logger
from fencing_sdk.errors import UsageError
from fencing_sdk.recipes.drain_signals import SignalHandlers, says_draining
from fencing_sdk.sync._loop_thread import LoopThread
from fencing_sdk.sync._thread_call import ClosedMeanwhileError


class SyncDrainOnSignals:
    """The block during which a signal drains the client. Made by `SyncLockClient.draining_on`."""

    __slots__ = ("_bridge", "_client", "_handlers", "_loop", "_received", "_within")

    def __init__(
        self,
        bridge: Callable[[], LoopThread],
        client: LockClient,
        signals: tuple[signal.Signals, ...],
        within: float,
    ) -> None:
        self._bridge = bridge
        self._client = client
        self._handlers = SignalHandlers(signals, self._receive)
        self._within = within
        self._received = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> None:
        if self._loop is not None:
            msg = "draining_on() makes a block that is entered once; call it again for another one"
            raise UsageError(msg)
        self._loop = self._bridge().open()
        self._handlers.set()
        draining_of(self._client).around = tuple(map(state_of, held_here()))

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        try:
            if self._received:
                with contextlib.suppress(ClosedMeanwhileError):  # all was given back
                    self._bridge().call(partial(self._drain, self._within), only=self._loop)
        finally:
            self._handlers.restore()
        return bool(self._received) and raised is not None and says_draining(raised)

    def _receive(self, number: int) -> None:
        assert self._loop is not None  # __enter__ found it
        self._received += 1
        if self._received == 1:
            logger.info("draining for at most %.3g s: signal %d", self._within, number)
        else:
            logger.info("draining now: signal %d came again", number)
            self._handlers.restore()
        with contextlib.suppress(ClosedMeanwhileError):
            self._bridge().watch(partial(self._drain, self._within if self._received == 1 else 0.0), self._loop)

    async def _drain(self, within: float) -> None:
        if self._client.status().open:
            await self._client.drain(within=within)
