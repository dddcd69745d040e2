"""
How a test ends a lease that the code under test holds, in any event loop: also in that of a client for threads.

The store gives the lock away and the lease learns why, in one step. From there on everything is the
engine's own: the work is cancelled, observers are told, the token is refused.
"""

from __future__ import annotations

from concurrent.futures import Future, wait
from typing import Protocol

from fencing_sdk._engine.engine import Engine
from fencing_sdk._engine.lease_state import LeaseState
from fencing_sdk._lease import AnyLease
from fencing_sdk._values.loop_owner import loop_here
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.errors import LossReason, UsageError, shown
from fencing_sdk.testing.faults import FaultyBackend

# ruff: noqa: SLF001  (a test kit reaches into the engine, so that the code under test meets the real one)

_PATIENCE = 10.0
"""Seconds until the loop of another thread has ended a lease."""


class LeaseEnder(Protocol):
    """The fixtures ``expire`` and ``lose``."""

    def __call__(self, lease: AnyLease | str) -> None: ...


def check_held(lease: LeaseState) -> None:
    """
    Raise if there is nothing to end.

    Raises:
        UsageError: the lease is over.
    """
    if not lease.held:
        msg = f"{lease!r} is over already, so there is nothing to end"
        raise UsageError(msg)


def end_here(lease: LeaseState, reason: LossReason) -> None:
    """
    End a *lease* in its event loop: the one that runs here, or one that runs in another thread.

    Raises:
        UsageError: it is over, its loop does not run, or its backend takes no orders.
    """
    check_held(lease)
    store = _store_of(lease)
    if loop_here() is lease.loop:
        _end(store, lease, reason)
        return

    ending: Future[None] = Future()

    def ended() -> None:
        if ending.set_running_or_notify_cancel():
            _end(store, lease, reason)
            ending.set_result(None)

    if lease.loop.is_running():
        lease.loop.call_soon_threadsafe(ended)
        wait((ending,), _PATIENCE)
        if not ending.cancel():  # else the loop has been set aside in this very thread, or is blocked
            return
    msg = f"{shown(lease.name)} is held in an event loop that does not run now; end its lease while it does"
    raise UsageError(msg)


def _end(store: MemoryBackend, lease: LeaseState, reason: LossReason) -> None:
    name = lease.claim.name
    store._table.revoke(name, store._clock.now())
    store._wake_next(name)
    lease.lose(reason)


def _store_of(lease: LeaseState) -> MemoryBackend:
    assert isinstance(lease.keeper, Engine)
    backend: object = lease.keeper._backend
    while isinstance(backend, FaultyBackend):
        backend = backend._backend
    if isinstance(backend, MemoryBackend):
        return backend
    msg = f"{type(backend).__name__} cannot be told to end a lease; use a MemoryBackend, or a World"
    raise UsageError(msg)
