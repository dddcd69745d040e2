"""
The opening of a client's backend: once, by whichever call needs it first, and waited for while the store is away.

An acquisition waits for the backend as it waits for its lock, with its own patience and back-off, so it makes one try
after the other by `attempt`. For every other call, and for ``async with client``, `wait` does that.
"""

from __future__ import annotations

import asyncio
import copy

from fencing_sdk._engine.store_calls import StoreCalls
from fencing_sdk._engine.terms import DEFAULT_BACKOFF, Tries
from fencing_sdk._values.clock import Clock
from fencing_sdk.abc import Backend, SupportsOpen
from fencing_sdk.errors import BackendError, BackendUnavailableError, UsageError

LIMIT = 5.0
"""Seconds that one try may take."""


class BackendOpening:
    """The opening of one backend by one client."""

    def __init__(self, backend: Backend, clock: Clock, store_calls: StoreCalls, patience: float = 0.0) -> None:
        self._backend = backend
        self._clock = clock
        self._store_calls = store_calls
        self._try: asyncio.Task[None] | None = None
        self.over = not isinstance(backend, SupportsOpen)
        """Whether the backend is open, or has nothing to open."""
        self.patience = patience
        """Seconds for which a caller waits until the opening is over, unless it is more patient by itself; then 0."""

    async def wait(self) -> None:
        """
        Open the backend unless it is open, and wait for a store that is away.

        Raises:
            BackendUnavailableError: the store did not answer.
            BackendRefusedError: it will not, whatever is tried.
            UsageError: the client was closed meanwhile.
        """
        began, patience, tries = self._clock.now(), self.patience, Tries(DEFAULT_BACKOFF)
        while not self.over:
            try:
                await self.attempt()
            except BackendUnavailableError as error:
                waited = self._clock.now() - began
                if waited >= patience and not self._store_calls.closing:
                    error.waited = waited if patience else None
                    raise
                nap = min(tries.nap_after(error), max(0.0, patience - waited))
                await self._store_calls.sleep_until_closing(nap)
            if self._store_calls.closing:
                msg = "this client was closed while it was opening"
                raise UsageError(msg)

    async def attempt(self) -> None:
        """
        Try once, unless the backend is open: one try for all callers that wait for it. Closing the client ends it.

        Raises:
            BackendUnavailableError: the store did not answer.
            BackendRefusedError: it will not, whatever is tried.
        """
        if self.over:
            return
        if self._try is None or self._try.done():
            self._try = self._store_calls.stand(self._open())
        try:
            await self._store_calls.answer("open", self._try, LIMIT)
        except BackendError as failed:
            error, error.__cause__ = copy.copy(failed), failed.__cause__  # each caller raises its own
            failed.__traceback__ = None  # its frames lead to those of all callers
        else:
            return
        raise error

    async def _open(self) -> None:
        if isinstance(self._backend, SupportsOpen):
            await self._store_calls.send("open", self._backend.open, LIMIT)
        self.over, self.patience = True, 0.0
