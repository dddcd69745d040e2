"""
Which event loop, of which process, something belongs to: a connection, a socket, a pool, a lease.

An object of a backend lives on when its loop is closed and the next one is opened, and a forked child
inherits it. What was opened in the earlier loop is of no use in the next one, and what the parent opened
must not even be closed by the child: they share the socket.
"""

from __future__ import annotations

import asyncio

from fencing_sdk._values import forks
from fencing_sdk.errors import UsageError

__all__ = ["ForkDetector", "LoopOwner", "running_loop"]


def running_loop() -> asyncio.AbstractEventLoop:
    """
    Return the running event loop.

    Raises:
        UsageError: none runs in this thread. Under trio and curio none does.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        msg = (
            "no asyncio event loop runs here, and fencing_sdk needs one: it works on asyncio and uvloop, not on trio "
            'or curio (with anyio: backend="asyncio"); from a thread use asyncio.run_coroutine_threadsafe'
        )
        raise UsageError(msg) from None


class LoopOwner:
    """The event loop and the process that made this object."""

    __slots__ = ("_generation", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._generation = forks.here()

    @property
    def is_current(self) -> bool:
        """Whether the running loop of this process is the owner: only then what it owns may be used."""
        return self.in_this_process and self.loop is asyncio.get_running_loop()

    @property
    def in_this_process(self) -> bool:
        """Whether this process is the owner's. If not, a parent owns it: leave it alone, do not even close it."""
        return self._generation == forks.here()


class ForkDetector:
    """Tells a forked child, once, that what it has inherited belongs to its parent."""

    __slots__ = ("_generation",)

    def __init__(self) -> None:
        self._generation = forks.here()

    def forked(self) -> bool:
        """Whether the process was forked since the last call."""
        if self._generation == forks.here():
            return False
        self._generation = forks.here()
        return True
