"""
Locks whose loss breaks what the main thread does, also a call that blocks.

A signal does it: its handler raises `LeaseLostError` wherever the main thread is. The signal is SIGURG, which a process
ignores unless it has a handler, so that one which comes late does no harm.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType

from fencing_sdk._lease import state_of
from fencing_sdk.errors import LossReason, UnsupportedError, UsageError, shown
from fencing_sdk.sync._lease import SyncLease
from fencing_sdk.sync._lock import SyncLock

_Handler = Callable[[int, FrameType | None], object] | int | None


class InterruptingLock(SyncLock):
    """A `SyncLock` of ``interrupt=True``: the loss of its lease raises `LeaseLostError` in the block, at once."""

    __slots__ = ("_interrupt",)

    _interrupt: Interrupt

    def __enter__(self) -> SyncLease:
        interrupt = Interrupt(self.name)
        lease = super().__enter__()
        self._interrupt = interrupt
        try:
            interrupt.begin(lease)
            lease.check()  # the signal of a loss that came meanwhile has broken nothing
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return lease

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._interrupt.end()
        finally:
            super().__exit__(kind, raised, traceback)


_OWN = frozenset({InterruptingLock.__enter__.__code__, InterruptingLock.__exit__.__code__})
"""Where the handler raises nothing: the end of the block tells the loss by itself."""


class Interrupt:
    """
    One block of the main thread, and the signal that may break it.

    Raises:
        UsageError: this is not the main thread.
        UnsupportedError: the system has no such signals.
    """

    __slots__ = ("_before", "_lease")

    def __init__(self, name: str) -> None:
        if not hasattr(signal, "pthread_kill"):
            msg = "interrupt=True needs signals that reach a thread, which this system does not have"
            raise UnsupportedError(msg)
        if threading.current_thread() is not threading.main_thread():
            msg = f"lock {shown(name)} has interrupt=True, which works in the main thread alone; ask lease.check() here"
            raise UsageError(msg)
        self._lease: SyncLease | None = None
        self._before: _Handler = None

    def begin(self, lease: SyncLease) -> None:
        """Break the block from now on when *lease* is lost."""
        self._before = signal.signal(signal.SIGURG, self._on_signal)
        self._lease = lease
        lease.on_lost(self._send)

    def end(self) -> None:
        """Break nothing any more."""
        if self._lease is not None:
            self._lease = None
            signal.signal(signal.SIGURG, signal.SIG_DFL if self._before is None else self._before)

    def _send(self, _reason: LossReason) -> None:
        """In a thread of its own: call the main thread away from what it does."""
        main = threading.main_thread().ident
        if self._lease is not None and main is not None:
            with suppress(ProcessLookupError):
                signal.pthread_kill(main, signal.SIGURG)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        lease = self._lease
        if lease is not None and lease.lost_reason not in _NO_REASON and not _is_own(frame):
            raise state_of(lease).loss()
        if callable(self._before):  # the block around this one has been lost, or the signal was for the program
            self._before(number, frame)


_NO_REASON = frozenset({None, LossReason.CLOSED})
"""Without a loss, and while the client is closed, perhaps by this very thread, nothing is broken."""


def _is_own(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code in _OWN:
            return True
        frame = frame.f_back
    return False
