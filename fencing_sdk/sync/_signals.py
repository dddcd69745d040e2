"""
What signals do to threads: one breaks a block whose lock is lost, others begin a drain.

A lock with ``interrupt=True`` breaks what the main thread does, also a call that blocks. A signal does it: its handler
raises `LeaseLostError` wherever the main thread is. The signal is SIGURG, which a process ignores unless it has a
handler, so that one which comes late does no harm. Each loss breaks its block once:

* of several blocks that are lost, the outermost is broken, and the others with it;
* the end of a block is not broken, because it releases the lock and decides what leaves. So a signal that comes
  meanwhile, which may be for a block around that one, is sent again.

A drain by signals is that of tasks, but nothing is cancelled:

    with locks, locks.draining_on(SIGTERM, SIGINT, within=25):
        work()

    first signal     threads that wait for a lock leave the line by a `DrainingError`, and bodies go on
    second signal    the leases are lost now, which bodies learn as from every loss
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType, TracebackType

from fencing_sdk._client import LockClient as TaskLockClient
from fencing_sdk._client_operating import draining_of
from fencing_sdk._lease import held_here, state_of
from fencing_sdk._values.loop_owner import loop_here
from fencing_sdk.errors import LossReason, UnsupportedError, UsageError, shown
from fencing_sdk.recipes.drain_signals import DrainBlock
from fencing_sdk.sync._lease import LEAVING, Block, Lease, owned
from fencing_sdk.sync._lock import Lock
from fencing_sdk.sync._loop_thread import LoopThread
from fencing_sdk.sync._thread_call import ClosedMeanwhileError

_AGAIN, _LATER = 0.02, 1.0
"""Seconds until a signal that has broken nothing is sent again, at first and in the end."""

_Handler = Callable[[int, FrameType | None], object] | int | None


class InterruptingLock(Lock):
    """A `Lock` of ``interrupt=True``: the loss of its lease raises `LeaseLostError` in the block, at once."""

    __slots__ = ()

    def _enter(self, block: Block) -> Lease:
        interrupt = Interrupt(self.name)
        block.ending = interrupt.end
        lease = super()._enter(block)
        try:
            interrupt.begin(lease)
        except BaseException as error:
            block.leave(error)
            raise
        return lease

    def _end(self, block: Block, raised: BaseException | None) -> None:
        if block.ending is not None:
            block.ending()
        block.leave(raised)

    __exit__ = owned(_end)


class Interrupt:
    """
    One block of the main thread, which a signal may break.

    Raises:
        UsageError: this is not the main thread.
        UnsupportedError: the system has no such signals.
    """

    __slots__ = ("_broken", "_entered", "_lease")

    def __init__(self, name: str) -> None:
        if not hasattr(signal, "pthread_kill"):
            msg = "interrupt=True needs signals that reach a thread, which this system does not have"
            raise UnsupportedError(msg)
        if threading.current_thread() is not threading.main_thread():
            msg = f"lock {shown(name)} has interrupt=True, which works in the main thread alone; ask lease.check() here"
            raise UsageError(msg)
        self._lease: Lease | None = None
        self._entered = False
        self._broken = False

    def begin(self, lease: Lease) -> None:
        """
        Break the block from now on when *lease* is lost.

        Raises:
            LeaseLostError: it was lost meanwhile.
        """
        self._lease = lease
        _signals.add(self)
        lease.on_lost(self._send)
        lease.check()  # the signal of a loss that came until now has broken nothing
        self._entered = True

    def end(self) -> None:
        """Stop breaking calls. Idempotent."""
        self._lease = None
        _signals.remove(self)

    @property
    def is_due(self) -> bool:
        """True if the block was lost, and has not been broken. Perhaps this very thread closes the client."""
        lease = self._lease
        return lease is not None and not self._broken and lease.lost_reason not in {None, LossReason.CLOSED}

    def break_all(self, inner: Sequence[Interrupt]) -> None:
        """
        Break the block, unless it is being entered, and with it those that are lost *inner* to it.

        Raises:
            LeaseLostError: it was lost.
        """
        if self._lease is not None and self._entered:
            for block in (self, *inner):
                block._broken = True  # noqa: SLF001  (of this class)
            raise state_of(self._lease).loss()

    def _send(self, _: LossReason) -> None:
        """In a thread of its own: call the main thread away from what it does, until the block is broken or left."""
        main, sleep, pause = threading.main_thread().ident, threading.Event(), _AGAIN
        while self.is_due and main is not None:
            with suppress(ProcessLookupError):
                signal.pthread_kill(main, signal.SIGURG)
            if loop_here() is not None:  # the client's own thread: no other can start now
                return
            sleep.wait(pause)
            pause = min(2 * pause, _LATER)


class _Signals:
    """The handler of SIGURG, for all such blocks that the main thread is inside."""

    def __init__(self) -> None:
        self._blocks: list[Interrupt] = []
        self._former: _Handler = None

    def add(self, block: Interrupt) -> None:
        """Handle the signal until *block* is left."""
        if signal.getsignal(signal.SIGURG) != self._handle:
            self._former = signal.signal(signal.SIGURG, self._handle)
        self._blocks.append(block)

    def remove(self, block: Interrupt) -> None:
        """*block* is left. After the last one, the signal does what it did before."""
        if block in self._blocks:
            self._blocks.remove(block)
        if not self._blocks and signal.getsignal(signal.SIGURG) == self._handle:
            with suppress(ValueError):  # another thread collects the block: the handler does nothing from now on
                signal.signal(signal.SIGURG, signal.SIG_DFL if self._former is None else self._former)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        due = [block for block in self._blocks if block.is_due]
        if due and not _is_leaving(frame):
            due[0].break_all(due[1:])
        if not due and callable(self._former):
            self._former(number, frame)


_signals = _Signals()


def _is_leaving(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code in LEAVING:
            return True
        frame = frame.f_back
    return False


class DrainOnSignals(DrainBlock):
    """The block during which a signal drains the client. Made by `LockClient.draining_on`."""

    __slots__ = ("_bridge", "_client", "_loop")

    def __init__(
        self,
        bridge: Callable[[], LoopThread],
        client: TaskLockClient,
        signals: tuple[signal.Signals, ...],
        within: float,
    ) -> None:
        super().__init__(signals, within)
        self._bridge = bridge
        self._client = client

    def __enter__(self) -> None:
        self._refuse_another_entry()
        self._loop = self._bridge().open()
        self._entered = True
        self._handlers.set()
        draining_of(self._client).around = tuple(map(state_of, held_here()))

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        try:
            if self._received:
                with contextlib.suppress(ClosedMeanwhileError):  # all was released
                    self._bridge().call(partial(self._drain, self._within), only=self._loop)
        finally:
            self._handlers.restore()
        return self._swallows(raised)

    def _receive(self, number: int) -> None:
        bound = self._bound(number)
        with contextlib.suppress(ClosedMeanwhileError):
            self._bridge().watch(partial(self._drain, bound), self._loop)

    async def _drain(self, within: float) -> None:
        if self._client.status().open:
            await self._client.drain(within=within)
