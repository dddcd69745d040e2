"""The event loop that runs here, or an error that says what is needed."""

from __future__ import annotations

import asyncio

from fencing_sdk.errors import UsageError


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
