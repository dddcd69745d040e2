"""An event loop whose time stands still, and in which each client has a time of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import Any

CLIENT: ContextVar[int] = ContextVar("client", default=-1)
"""The client whose code runs."""


class ClientTimeLoop(asyncio.SelectorEventLoop):
    """See the module. No timer runs by itself, so nothing depends on how quick the machine is."""

    def __init__(self) -> None:
        super().__init__()
        self._now = [1000.0, 1000.0, 1000.0]
        self._timers: list[tuple[float, int, int, asyncio.TimerHandle]] = []
        self._count = itertools.count()

    def time(self) -> float:
        return self._now[CLIENT.get()]

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        _mark(context)
        return super().call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        client = CLIENT.get()
        _mark(context)
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers.append((when, next(self._count), client, timer))
        if when <= self.time():
            self.call_soon(self.tick, client, 0.0)
        return timer

    def tick(self, client: int, seconds: float) -> None:
        """Let *seconds* pass for one client, and run its timers that are due."""
        self._now[client] += seconds
        due = sorted(one for one in self._timers if one[2] == client and one[0] <= self._now[client])
        self._timers = [one for one in self._timers if one not in due and not one[3].cancelled()]
        for *_, timer in due:
            if not timer.cancelled():
                self.call_soon(timer._run)


def _mark(context: Context | None) -> None:
    """Let an empty context, which a client has made for its work, know whose it is."""
    if context is not None and CLIENT not in context and (client := CLIENT.get()) >= 0:
        context.run(CLIENT.set, client)
