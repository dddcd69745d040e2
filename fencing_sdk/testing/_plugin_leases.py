"""
How a test ends a lease that the code under test holds, in any event loop.

The store gives the lock away and the lease learns why, in one step. From there on everything is the
engine's own: the work is cancelled, observers are told, the token is refused.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from fencing_sdk._engine.engine import Engine
from fencing_sdk._engine.lease_state import LeaseState
from fencing_sdk._lease import Lease
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.errors import LossReason, UsageError, shown
from fencing_sdk.testing.faults import FaultyBackend

# ruff: noqa: SLF001  (a test kit reaches into the engine, so that the code under test meets the real one)


class LeaseEnder(Protocol):
    """The fixtures ``expire`` and ``lose``."""

    def __call__(self, lease: Lease | str) -> None: ...


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
    End a *lease* of the event loop that runs.

    Raises:
        UsageError: it is over, is held elsewhere, or its backend takes no orders.
    """
    check_held(lease)
    store, name = _store_of(lease), lease.claim.name
    store._table.revoke(name, store._clock.now())
    store._wake_next(name)
    lease.lose(reason)


def _store_of(lease: LeaseState) -> MemoryBackend:
    if asyncio._get_running_loop() is not lease.loop:
        msg = f"{shown(lease.name)} is held in an event loop that does not run here; end its lease from inside"
        raise UsageError(msg)
    assert isinstance(lease.keeper, Engine)
    backend: object = lease.keeper._backend
    while isinstance(backend, FaultyBackend):
        backend = backend._backend
    if isinstance(backend, MemoryBackend):
        return backend
    msg = f"{type(backend).__name__} cannot be told to end a lease; use a MemoryBackend, or a World"
    raise UsageError(msg)
