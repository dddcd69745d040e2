"""
A drain that a signal begins.

    async with locks, locks.draining_on(SIGTERM, SIGINT, within=25):
        await work()

    first signal     the client drains; a block that goes on although all is released is cancelled a second later
    second signal    the bound is now: bodies are cancelled
    third signal     does what it did before the block, which ends most processes

The handlers are set by `signal.signal`, not by the event loop. So a handler that a server has set in the loop before
(aiohttp) is called as ever, and one that it has set in the process (uvicorn) is called by ours. Such a server ends
the block by itself, so the block is not cancelled then.

Several clients may have a block each around the same work. The signal goes from one to the next, and the blocks are
cancelled when all of these clients have released everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextvars import Context
from types import FrameType, TracebackType
from typing import Any

from fencing_sdk._engine.draining import Draining
from fencing_sdk._engine.engine import Engine
from fencing_sdk._engine.lease_scope import paced_scope
from fencing_sdk._lease import held_here, state_of
from fencing_sdk._values.observers import logger
from fencing_sdk.errors import ConfigurationError, DrainingError, UsageError, shown

_LAST_STEPS = 1.0
"""Seconds for which the block may go on when every lock was released."""
_PACE = 0.5
"""Seconds after which a block that goes on is cancelled again."""

_OTHER_WAY = (
    "have the client drain when it is closed instead: connect(url, drain=25), in a web application with "
    "lifespan=lifespan(locks)"
)

Handler = Callable[[int, FrameType | None], Any] | int | None
"""A handler, as `signal.getsignal` returns it."""


class DrainBlock(ABC):
    """The rules of a block that signals drain, whether tasks or a thread run it."""

    __slots__ = ("_entered", "_handlers", "_received", "_within")

    def __init__(self, signals: tuple[signal.Signals, ...], within: float) -> None:
        self._handlers = SignalHandlers(signals, self._receive)
        self._within = within
        self._received = 0
        self._entered = False

    @abstractmethod
    def _receive(self, number: int) -> None:
        """Called by the handler of a signal."""

    def _refuse_another_entry(self) -> None:
        if self._entered:
            msg = "draining_on() makes a block that is entered once; call it again for another one"
            raise UsageError(msg)

    def _bound(self, number: int) -> float:
        """Return the seconds that bodies may take from this signal on. After the second one, the handlers are gone."""
        self._received += 1
        if self._received == 1:
            logger.info("draining for at most %.3g s: signal %d", self._within, number)
            return self._within
        logger.info("draining now: signal %d came again", number)
        self._handlers.restore()
        return 0.0

    def _swallows(self, raised: BaseException | None) -> bool:
        """Return whether what leaves the block is its end in order."""
        return self._received > 0 and raised is not None and _says_draining(raised)


def _says_draining(error: BaseException) -> bool:
    """Return whether *error*, or each error of the group, is nothing but a refused acquisition."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_says_draining, error.exceptions))
    return isinstance(error, DrainingError)


class DrainOnSignals(DrainBlock):
    """The block during which a signal drains the client. Made by `LockClient.draining_on`."""

    __slots__ = ("_drain", "_draining", "_engine", "_loop", "_scope", "_task")

    def __init__(self, engine: Callable[[], Engine], signals: tuple[signal.Signals, ...], within: float) -> None:
        super().__init__(signals, within)
        self._engine = engine
        self._drain: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._refuse_another_entry()
        engine = self._engine()
        engine.check_usable()
        self._draining = engine.draining
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._scope = paced_scope(_PACE)  # before the handlers: it may raise
        self._handlers.set(self._draining)
        blocks = (lease for lease in self._draining.releases.unreleased.values() if lease.block is self._task)
        self._draining.around = (*map(state_of, held_here()), *blocks)
        self._scope.__enter__()
        self._entered = True

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        try:
            swallowed = self._close_scope(kind, raised, traceback)
            if self._drain is not None:
                try:
                    await self._draining.wait()  # the bodies of other tasks end too; the block itself has ended
                finally:
                    self._drain.cancel()
        finally:
            self._handlers.restore()
        return self._drain is not None and (swallowed or self._swallows(raised))

    def _close_scope(
        self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if asyncio.current_task() is self._task:
            with contextlib.suppress(RuntimeError):  # a scope that was entered later is not left
                return self._scope.__exit__(kind, raised, traceback)
        self._scope.give_up()
        msg = (
            "draining_on() was entered in one task and left in another (a fixture or a lifespan?), or left before a "
            f"block inside it; {_OTHER_WAY}"
        )
        raise UsageError(msg) from raised

    def _receive(self, number: int) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_signal, number, context=Context())

    def _on_signal(self, number: int) -> None:
        self._draining.begin(self._bound(number))
        if self._drain is None:
            self._drain = self._loop.create_task(self._end_block(), context=Context(), name="fencing-drain")

    async def _end_block(self) -> None:
        """Cancel a block that goes on although the drain is over, unless a server is about to end it."""
        if self._handlers.of_a_server:
            return
        await asyncio.sleep(0)  # blocks around this one begin to drain
        await self._draining.wait_together()
        await asyncio.sleep(_LAST_STEPS)
        self._scope.cancel()


class SignalHandlers:
    """The handlers of one block. Each calls *receive*, and the handler of a server that was there before."""

    __slots__ = ("_process", "_receive", "_signals", "draining", "former")

    def __init__(self, signals: tuple[signal.Signals, ...], receive: Callable[[int], object]) -> None:
        self._signals = signals
        self._receive = receive
        self.former: dict[signal.Signals, Handler] = {}
        self.draining: Draining | None = None

    def set(self, draining: Draining | None = None) -> None:
        """
        Handle the signals from now on. A *draining* joins that of a block which handles one of them already.

        Raises:
            UsageError: this is not the main thread.
        """
        self._process = os.getpid()
        try:
            for number in self._signals:
                former = signal.getsignal(number)
                if former is not signal.SIG_IGN:  # as under nohup: what was ignored is meant to be
                    signal.signal(number, self._handle)
                    self.former[number] = former
        except ValueError as error:
            msg = f"draining_on() works in the main thread alone, where signals arrive; elsewhere {_OTHER_WAY}"
            raise UsageError(msg) from error
        around = next((one.draining for one in map(_ours, self.former.values()) if one and one.draining), None)
        if around is draining:  # a block of the same client
            return
        if draining is not None and around is not None:
            draining.join(around)
        self.draining = draining

    def restore(self) -> None:
        """Let the signals do what they did before."""
        while self.former:
            number, former = self.former.popitem()
            inside = self._inside(number)
            if inside is not None:  # a block that was entered later and has not been left
                inside.former[number] = former
            elif signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if former is None else former)
        if self.draining is not None:
            self.draining.part()
            self.draining = None

    def _inside(self, number: signal.Signals) -> SignalHandlers | None:
        """Return what passes the signal on to this one."""
        inside = _ours(signal.getsignal(number))
        while inside is not None and inside.former.get(number) != self._handle:
            inside = _ours(inside.former.get(number))
        return inside

    @property
    def of_a_server(self) -> bool:
        """True if a server had a handler of its own, by which it ends the block."""
        return any(
            around.of_a_server if (around := _ours(former)) else callable(former) and _is_of_a_program(former)
            for former in self.former.values()
        )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Called by Python between two instructions of the main thread, wherever that is."""
        if os.getpid() != self._process:  # a forked child, where the client does not run: a parent ends it by this
            self.restore()
            signal.raise_signal(number)
            return
        former = self.former.get(signal.Signals(number))
        self._receive(number)
        if callable(former) and _is_of_a_program(former):
            former(number, frame)


def check_signals(signals: tuple[object, ...]) -> tuple[signal.Signals, ...]:
    """
    Return *signals*, each once, if a process may handle them.

    Raises:
        ConfigurationError: the list is empty, or a process cannot handle one of them.
    """
    if not signals:
        msg = "draining_on() needs signals, such as draining_on(signal.SIGTERM, signal.SIGINT, within=25)"
        raise ConfigurationError(msg)
    for number in signals:
        if number not in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            msg = f"signals must be some that a process can handle, such as signal.SIGTERM, not {shown(number)}"
            raise ConfigurationError(msg)
    return tuple(dict.fromkeys(signal.Signals(number) for number in signals))  # type: ignore[arg-type]


def _ours(handler: Handler) -> SignalHandlers | None:
    """Return the handlers of the block that has set *handler*."""
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, SignalHandlers) else None


def _is_of_a_program(handler: Callable[[int, FrameType | None], Any]) -> bool:
    """Return whether *handler* was set by a program, and not by Python or by `asyncio.run` to end it at once."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    return handler is not signal.default_int_handler and getattr(handler, "__module__", None) != "asyncio.runners"
