"""
The opening and the end of a client.

Its backend is opened once, by whichever call needs it first, and waited for while the store is away. An acquisition
waits for the backend as it waits for its lock, with its own patience and back-off, so it makes one try after the other
by `attempt`. For every other call, and for ``async with client``, `wait` does that.

It ends once, in a task of its own, however many callers ask for it and are cancelled. A caller that is cancelled
meanwhile still waits for the end, which is bounded, and raises its cancellation afterwards: half a closing would leave
the heartbeat, a thread and connections behind.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context
from typing import Any

from fencing_sdk._engine.store_calls import StoreCalls
from fencing_sdk._engine.terms import DEFAULT_BACKOFF, Tries
from fencing_sdk._lease_state import LeaseState
from fencing_sdk._values.clock import Clock
from fencing_sdk._values.tasks import move_on_after, outlast_cancellation
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
        """True if the backend is open, or has nothing to open."""
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
                pause = min(tries.pause_after(error), max(0.0, patience - waited))
                await self._store_calls.sleep_until_closing(pause)
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
            self._try = self._store_calls.start_until_closing(self._open())
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


Unreleased = Mapping[str, LeaseState]
"""By owner: the leases that were not released."""


class Closing:
    """Begins once, and lets every caller wait for its end."""

    def __init__(self, unreleased: Unreleased) -> None:
        self.begun = False
        self.over = False
        self._unreleased = unreleased
        self._ended = asyncio.Event()
        self._changed = asyncio.Event()
        self._callers: set[asyncio.Task[Any] | None] = set()
        self._task: asyncio.Task[None] | None = None

    async def join(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """
        Have *close* run unless it does already, and wait for its end.

        Raises:
            asyncio.CancelledError: the caller was cancelled while it waited. The closing has ended all the same.
        """
        self._callers.add(asyncio.current_task())
        self.look_again()
        if not self.begun:
            self.begun = True  # before the task: an eager one runs observers, and those may close the client too
            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._run(close), context=Context(), name="fencing-closing")
        cancelled = await outlast_cancellation(self._ended.wait, lambda: self.over)
        if cancelled is not None:
            raise cancelled
        if self._task is not None and not self._task.cancelled():
            self._task.result()

    async def wait(self) -> None:
        """Wait for the end. Nothing begins by this, and a cancellation passes."""
        await self._ended.wait()

    async def _run(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await close()
        finally:
            self.over = True
            self._ended.set()

    def look_again(self) -> None:
        """A lease was released, or a body closes the client itself."""
        self._changed.set()

    async def await_bodies(self, limit: float) -> frozenset[str]:
        """
        Let the bodies that were cancelled end and release their locks; return the owners whose body did not.

        Their locks are left to the ttl: released, another client could hold one while the body goes on.
        """
        with move_on_after(limit):
            while self._inside():
                self._changed.clear()
                await self._changed.wait()
        return self._inside()

    def _inside(self) -> frozenset[str]:
        """The owners of leases whose ``async with`` is entered, except by a task that waits for this closing."""
        return frozenset(owner for owner, lease in self._unreleased.items() if self._runs(lease.task))

    def _runs(self, task: asyncio.Task[object] | None) -> bool:
        return task is not None and task not in self._callers and not task.done() and not task.get_loop().is_closed()
