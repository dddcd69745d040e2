"""
Worlds of the plugin's fixtures: make them, stop a client in them, and end a lease of the code under test.

A lease ends in any event loop, also in that of a client for threads. The store gives the lock away and the lease
learns why, in one step. From there on everything is the engine's own: the work is cancelled, observers are notified,
the token is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from typing import Protocol

from fencing_sdk._engine.engine import Engine
from fencing_sdk._lease import AnyLease, state_of
from fencing_sdk._lease_state import LeaseState
from fencing_sdk._values.loop_owner import loop_here
from fencing_sdk._values.timing import Seconds
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.errors import LossReason, UsageError, shown
from fencing_sdk.testing.faults import FaultyBackend
from fencing_sdk.testing.world import World, WorldClient

# ruff: noqa: SLF001  (a world shows its users no leases and no turns of loops)

_SOON = 0.01
"""Seconds in which a client notices a change, and what it has sent arrives."""
_PATIENCE = 10.0
"""Seconds until the loop of another thread has ended a lease."""


class Pause(Protocol):
    """The fixture ``pause``."""

    def __call__(self, client: WorldClient, *, seconds: Seconds | None = None) -> AbstractContextManager[None]: ...


class PauseOfRound(Protocol):
    """The ``pause`` of one round of ``pause_anywhere``."""

    def __call__(self, client: WorldClient) -> AbstractContextManager[None]: ...


class PauseAnywhere(Protocol):
    """The fixture ``pause_anywhere``."""

    def __call__(self, *, seed: int = 0, at_most: int = 1000) -> Iterator[tuple[World, PauseOfRound]]: ...


class LeaseEnder(Protocol):
    """The fixtures ``expire`` and ``lose``."""

    def __call__(self, lease: AnyLease | str) -> None: ...


class StageWorld(World):
    """A world that knows its clients."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.clients: list[WorldClient] = []

    def client(self, name: str, *, clock_rate: float = 1.0) -> WorldClient:
        """See `World.client`."""
        client = super().client(name, clock_rate=clock_rate)
        self.clients.append(client)
        return client


class Worlds:
    """The worlds of one test."""

    def __init__(self) -> None:
        self._worlds: list[StageWorld] = []

    def make(self, seed: int = 0) -> StageWorld:
        """Make a world that ends with the test."""
        world = StageWorld(seed)
        self._worlds.append(world)
        return world

    def histories(self) -> list[tuple[str, str]]:
        """Titles and texts for a report, from worlds in which anything happened."""
        histories = [world.history for world in self._worlds]
        return [("history of the lock world", "\n".join(history)) for history in histories if history]

    def close(self) -> None:
        """End every world; raise the errors of tasks that were never awaited."""
        with contextlib.ExitStack() as stack:
            for world in self._worlds:
                stack.callback(world.close)
            self._worlds.clear()

    # What the fixtures are.

    @contextlib.contextmanager
    def pause(self, client: WorldClient, *, seconds: Seconds | None = None) -> Iterator[None]:
        """Freeze *client* while the block runs."""
        world = self._world_of(client)
        if seconds is None and not _held_by(world, client):
            msg = (
                f"client {shown(client.name)} holds no lock at this moment, so a pause would show nothing; "
                "let time go on first, or pass seconds="
            )
            raise UsageError(msg)
        client.pause()
        if seconds is None:
            _outlast(world, client)
        else:
            world.sleep(seconds)
        try:
            yield
        finally:
            client.resume()

    def pause_anywhere(self, *, seed: int = 0, at_most: int = 1000) -> Iterator[tuple[World, PauseOfRound]]:
        """Yield a new world and a pause that comes one step later, until the work has no more steps."""
        for step in range(at_most):
            world = self.make(seed)
            later = PauseLater(world, step)
            yield world, later
            if later.came is None:
                msg = f"round {step} of pause_anywhere() was without 'with pause(client):'"
                raise UsageError(msg)
            self._worlds.remove(world)
            world.close()
            if not later.came:
                return
        msg = f"the work has more than {at_most} steps; make it shorter, or pass at_most="
        raise UsageError(msg)

    def expire(self, lease: AnyLease | str) -> None:
        """Let *lease* run out."""
        self._end(lease, LossReason.EXPIRED)

    def lose(self, lease: AnyLease | str) -> None:
        """Take the lock of *lease* away."""
        self._end(lease, LossReason.REVOKED)

    def _end(self, named: AnyLease | str, reason: LossReason) -> None:
        world, client, lease = self._find(named)
        if world is None or client is None:
            end_here(lease, reason)
            return
        check_held(lease)
        world._kernel.service.revoke(lease.name)
        if client._process.turning:  # its own code asks for it
            lease.lose(reason)
        else:
            client._process.loop.arrive(lease.lose, reason)
            world.sleep(_SOON)

    def _world_of(self, client: WorldClient) -> StageWorld:
        for world in self._worlds:
            if client in world.clients:
                return world
        msg = f"client {shown(client.name)} does not live in the world of this test; make it with lock_world.client()"
        raise UsageError(msg)

    def _find(self, lease: AnyLease | str) -> tuple[StageWorld | None, WorldClient | None, LeaseState]:
        """Where *lease* lives: nowhere when that is not a world of this test."""
        state = state_of(lease) if isinstance(lease, AnyLease) else None
        for world in self._worlds:
            for client in world.clients:
                if state is not None and state.loop is client._process.loop:
                    return world, client, state
                if isinstance(lease, str) and (found := _lease_on(client, lease)) is not None:
                    return world, client, found
        if state is not None:
            return None, None, state
        msg = f"no client of this test's world holds lock {shown(lease)} at this moment"
        raise UsageError(msg)


class PauseLater:
    """``with pause(client):`` of one round: the client's work goes on for so many steps, and then it is frozen."""

    def __init__(self, world: StageWorld, steps: int) -> None:
        self._world = world
        self._steps = steps
        self.came: bool | None = None
        """True if the work was still going on then; None before the work asked for it."""

    @contextlib.contextmanager
    def __call__(self, client: WorldClient) -> Iterator[None]:
        """Freeze *client* as soon as its work has taken that many steps, until the block ends."""
        world = self._world
        with _stopped_after(client, self._steps):
            while client._process._spawned and not client.paused:
                world.sleep(_SOON)
        self.came = client.paused
        if self.came:
            _outlast(world, client)
        try:
            yield
        finally:
            client.resume()


@contextlib.contextmanager
def _stopped_after(client: WorldClient, steps: int) -> Iterator[None]:
    """Freeze *client* between two turns of its loop, *steps* turns from now, if the block lasts that long."""
    loop = client._process.loop
    turn, left = loop.turn, steps

    def counted() -> None:
        nonlocal left
        turn()
        left -= 1
        if left == 0:
            client.pause()

    if not steps:
        client.pause()
    loop.turn = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        loop.turn = turn  # type: ignore[method-assign]


def _held_by(world: StageWorld, client: WorldClient) -> list[float]:
    """Seconds that are left of every lock that the store has granted to *client*, which may not know it yet."""
    service = world._kernel.service
    names = {event.name for event in client.events if event.kind == "acquiring"}
    holders = [service.inspect(name) for name in names if service.holder(name) == client.name]
    return [holder.remaining for holder in holders if holder is not None]


def _outlast(world: StageWorld, client: WorldClient) -> None:
    """Let time go on until the store has given away everything that *client*, which is frozen, had."""
    while left := _held_by(world, client):
        world.sleep(max(left) + _SOON)


def _lease_on(client: WorldClient, name: str) -> LeaseState | None:
    engine = client.locks._engine
    leases = () if engine is None else tuple(engine._heartbeat.leases.values())
    return next((lease for lease in leases if lease.name == name and lease.held), None)


# ruff: noqa: SLF001  (a test kit reaches into the engine, so that the code under test meets the real one)


def check_held(lease: LeaseState) -> None:
    """Raise if there is nothing to end."""
    if not lease.held:
        msg = f"{lease!r} is over already, so there is nothing to end"
        raise UsageError(msg)


def end_here(lease: LeaseState, reason: LossReason) -> None:
    """End a *lease* in its event loop: the one that runs here, or one that runs in another thread."""
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
    store._lines.give_back(lease.claim)
    lease.lose(reason)


def _store_of(lease: LeaseState) -> MemoryBackend:
    assert isinstance(lease.keeper, Engine)
    backend: object = lease.keeper._backend
    while isinstance(backend, FaultyBackend):
        backend = backend._backend
    if isinstance(backend, MemoryBackend):
        return backend
    msg = f"{type(backend).__name__} has no way to end a lease; use a MemoryBackend, or a World"
    raise UsageError(msg)
