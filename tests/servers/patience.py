"""Bounded waiting for what cannot announce itself: a process, a server, a cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], *, what: str = "it is so", within: float = 60.0) -> None:
    """Ask for *condition* again and again until it holds; AssertionError when it does not within *within* seconds."""
    limit = time.monotonic() + within
    while not condition():
        assert time.monotonic() < limit, f"{what}: not within {within} s"
        time.sleep(0.005)


async def until(condition: Callable[[], object], *, what: str = "it is so", within: float = 60.0) -> None:
    """`wait_until` for a condition that is quick to ask, while the loop turns."""
    limit = time.monotonic() + within
    while not condition():
        assert time.monotonic() < limit, f"{what}: not within {within} s"
        await asyncio.sleep(0.002)
