"""What a client tells of itself, for health endpoints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Status:
    """How a client stands at one moment, as `LockClient.status` tells it. Nothing was asked of the store for it."""

    open: bool
    """
    Whether the client was entered, is not being closed, and its heartbeat runs.

    A client for threads is entered by its first call. Before that it is open, too: it takes work.
    """
    draining: bool = False
    """Whether `LockClient.drain` has begun: what is held may end, and no acquisition begins."""
    leases: int = 0
    """How many leases are held."""
    least_spare: float | None = None
    """Seconds until the first of them is lost, if no renewal is confirmed meanwhile. None without leases."""
    store_answered: float | None = None
    """
    Seconds since the store last granted, renewed, or answered another call. None if it has not yet. A client that
    holds nothing asks nothing: the number grows although the store is well.
    """
    leads: tuple[str, ...] = ()
    """The elections that this process leads, by name. A process that leads none may be just as ready."""
