"""The event that a waiter waits for."""

from __future__ import annotations

import asyncio
import contextlib


class WakeUp(asyncio.Event):
    """
    An event whose waiter may be in an event loop that was closed: such a waiter cannot be woken.

    An `asyncio.Event` raises then, in the task that wakes it, which has others to serve.
    """

    def set(self) -> None:
        """Wake the waiter, if it can be woken."""
        with contextlib.suppress(RuntimeError):
            super().set()
