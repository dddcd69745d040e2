"""The event that a waiter waits for."""

from __future__ import annotations

import asyncio
import contextlib

__all__ = ["WakeUp"]


class WakeUp(asyncio.Event):
    """
    An event that may be set although the loop of its waiter was closed: that waiter cannot be woken.

    `asyncio.Event.set` raises then, in the task that wakes the waiters, which has others to serve.
    """

    def set(self) -> None:
        """Wake the waiter, if its loop still runs."""
        with contextlib.suppress(RuntimeError):
            super().set()
