"""
A world on virtual time: a lock service, clients that can be paused, and stores with and without a fence.

    world = World()
    a, b, store = world.client("A"), world.client("B"), world.unfenced_store()
    token = a.acquire("seats/42", ttl=10).token         # 1
    a.pause(); world.sleep(12)                            # A does not run, and its lease expires
    b.write(store, "B", b.acquire("seats/42").token)      # 2
    a.resume(); a.write(store, "A", token)                # a number that was kept for too long
    assert store.value == "A"                             # B's write is gone

With ``world.fenced_store()`` the last write raises `StaleTokenError`, and the value stays "B".

Every client runs the real client, engine, leases and guards of this package, in an event loop and
on a clock of its own. Only the network, the store's table and time are simulated. A world is
driven by plain calls, from a plain function or from inside any event loop, and repeats itself from
its seed: two runs have the same history, to the byte.
"""

from __future__ import annotations

import asyncio
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, Unpack

from fencing_sdk._arguments import LockOptions
from fencing_sdk._client import LockClient, on_clock
from fencing_sdk._lease import Lease
from fencing_sdk._values.claim import check_name
from fencing_sdk._values.timing import Seconds, seconds
from fencing_sdk._values.token import Token, check_token
from fencing_sdk.errors import ConfigurationError, UsageError, shown
from fencing_sdk.events import Event
from fencing_sdk.guards import admitted
from fencing_sdk.rows._client import RowClient, locks_of
from fencing_sdk.rows.sync import RowClient as SyncRowClient
from fencing_sdk.sync._client import LockClient as SyncLockClient
from fencing_sdk.testing._kernel import Kernel, Link, Network, WorldBackend, without_thread
from fencing_sdk.testing._loop import Process, ProcessClock, Timeline
from fencing_sdk.testing._rows import WorldDatabase, WorldRows

__all__ = ["FencedStore", "Link", "Store", "UnfencedStore", "World", "WorldClient", "Write"]

P = ParamSpec("P")
T = TypeVar("T")

_NOTED = ("token", "reason", "resource", "fence", "conflict", "confirmed")
"""The fields of an event that a history shows: nothing that differs between two runs, such as an owner."""


class World:
    """
    Virtual time, and everything that lives in it.

    Use it with ``with``, or let go of it: it ends when nothing refers to it or its clients. Then all clients are
    resumed, their work is cancelled and they are closed. If a task failed and was never awaited, its error is raised at
    the end; no error is lost.

    Args:
        seed: Decides what is left to chance: latencies, where clocks begin, and what ``random`` draws.

        latency: Seconds a message travels, or the least and the most of them.

        service_rate: Seconds that the lock service's clock shows after one second.

        patience: Virtual seconds after which a call that does not end is an error.

    Raises:
        ConfigurationError: an argument cannot work.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        latency: Seconds | tuple[Seconds, Seconds] = 0.001,
        service_rate: float = 1.0,
        patience: Seconds = 3600.0,
    ) -> None:
        least, most = latency if isinstance(latency, tuple) else (latency, latency)
        self._kernel = Kernel(
            seed,
            latency=(seconds(least, "latency"), seconds(most, "latency")),
            service_rate=seconds(service_rate, "service_rate", above=True),
            patience=seconds(patience, "patience", above=True),
        )
        self._end = weakref.finalize(self, self._kernel.end)

    def __repr__(self) -> str:
        clients = ", ".join(process.name for process in self._kernel.processes)
        return f"<World at {self.now:.6f} s, clients: {clients or 'none'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as unseen:
            if error is None:
                raise
            error.add_note(f"and when the world ended: {unseen!r}")

    @property
    def now(self) -> float:
        """Seconds since the world began."""
        return self._kernel.timeline.now

    @property
    def history(self) -> list[str]:
        """Log of the world, a line each: every message when it is sent, every event of a client, every pause."""
        return list(self._kernel.timeline.history)

    def client(self, name: str, *, clock_rate: float = 1.0) -> WorldClient:
        """
        Add a process with a client of the lock service.

        Args:
            name: How histories and errors call it.

            clock_rate: Seconds that its clock shows after one second.

        Raises:
            ConfigurationError: an argument cannot work, or the name is taken.
        """
        process = self._kernel.new_process(name, clock_rate=seconds(clock_rate, "clock_rate", above=True))
        return WorldClient(self, self._kernel, process)

    def unfenced_store(self, name: str = "store") -> UnfencedStore:
        """Add a resource that takes every write."""
        return UnfencedStore(self._kernel.timeline, self._kernel.network, self._kernel.new_name(name))

    def fenced_store(self, name: str = "store") -> FencedStore:
        """Add a resource that refuses stale tokens."""
        return FencedStore(self._kernel.timeline, self._kernel.network, self._kernel.new_name(name))

    def database(self, name: str = "app") -> WorldDatabase:
        """Add a database in memory, with tables of your own, whose rows clients lease: see `WorldClient.row_client`."""
        return WorldDatabase(self._kernel.timeline, self._kernel.new_name(name))

    def holder(self, name: str) -> str | None:
        """Return the client that holds lock *name* at this moment, in the eyes of the service."""
        return self._kernel.service.holder(name)

    def sleep(self, duration: Seconds) -> None:
        """
        Let time go on by *duration* for all clients.

        Called by a client's own code it is a stall: that client stands still in the middle of a
        line, as in a garbage collection or a blocking call, while the other clients go on.
        """
        self._kernel.sleep(seconds(duration, "duration"))

    def after(self, delay: Seconds, call: Callable[[], object]) -> None:
        """Call something, such as ``client.pause``, *delay* seconds from now, while a later call lets time go on."""
        self._kernel.check_open()
        self._kernel.timeline.at(self.now + seconds(delay, "delay"), call)

    def finish(self, task: asyncio.Task[T]) -> T:
        """
        Let time go on until *task*, made by `WorldClient.start`, has ended; return or raise its outcome.

        Raises:
            UsageError: it does not end within the patience, or nothing is left that could end it.
        """
        return self._kernel.finish(task)

    def close(self) -> None:
        """
        End the world. Idempotent.

        Raises:
            BaseExceptionGroup: tasks failed and were never awaited; the bare error where there is only one.
            UsageError: code that runs in the world is calling.
        """
        self._kernel.end()
        self._end.detach()


class WorldClient:
    """
    A process of its own with a `LockClient` in it. Made by `World.client`.

    Its verbs are plain calls that let time go on until they are done. ``locks`` is the real client
    for code that runs inside: ``client.run(work)``, where ``work`` enters ``client.locks.lock(...)``
    as it would anywhere. ``sync_locks`` is for plain code, which the test calls by itself, such as a view of Django.
    """

    def __init__(self, world: object, kernel: Kernel, process: Process) -> None:
        self._world = world  # which lives as long as any of its clients
        self._kernel = kernel
        self._process = process
        self.link: Link = kernel.network.connect(process)
        """Way to the lock service and to the stores."""
        self.events: list[Event] = []
        """The events that its `LockClient` reported to its observers."""
        observers = [self.events.append, _historian(kernel.timeline, process.name)]
        self.locks = on_clock(LockClient(WorldBackend(self.link, kernel.service), observers=observers), process.clock)
        """The real client, open in this process."""
        self.sync_locks = without_thread(SyncLockClient(self.locks), kernel, process)
        """The same client for plain code, as `fencing_sdk.sync.connect` makes it: call that code, and time goes on."""
        process.on_close(self.locks.aclose)
        process.spawn(self.locks.__aenter__())  # in front of everything that the client will do

    def row_client(self, database: WorldDatabase) -> RowClient:
        """
        Open a client of leased rows in this process, on its clock; ``leased_by`` is the name of the process.

        Its messages go over `link`, where ``"acquire"`` stands for a claim.
        """
        observers = [self.events.append, _historian(self._kernel.timeline, self.name)]
        rows = WorldRows(self.link, database)
        client = RowClient(rows, observers=observers, open_wait=None, label=self.name)  # open at once
        on_clock(locks_of(client), self._process.clock)
        self._process.on_close(client.aclose)
        self._process.spawn(client.__aenter__())
        return client

    def sync_row_client(self, database: WorldDatabase) -> SyncRowClient:
        """Open such a client for plain code, as `fencing_sdk.rows.sync.row_client` does: call it, and time goes on."""
        return without_thread(SyncRowClient(self.row_client(database)), self._kernel, self._process)

    def __repr__(self) -> str:
        return f"<WorldClient {shown(self.name)}{', paused' if self.paused else ''}>"

    @property
    def name(self) -> str:
        """Name in histories and errors."""
        return self._process.name

    @property
    def clock(self) -> ProcessClock:
        """Monotonic clock of the process."""
        return self._process.clock

    @property
    def paused(self) -> bool:
        """True if nothing runs in it."""
        return self._process.paused

    def acquire(self, name: str, **options: Unpack[LockOptions]) -> Lease:
        """
        Acquire lock *name*, with the options of `LockClient.lock`: a plain handle, renewed until it is released.

        Raises:
            AcquireError, LeaseLostError, StaleTokenError, BackendError: as `Lock.acquire`.
            UsageError: as `run`.
        """
        lease = self.run(self.locks.lock(name, **options).acquire)
        self._process.keep(lease)  # a handle that is dropped warns, and is released
        return lease

    def release(self, lease: Lease) -> None:
        """Release *lease*."""
        self.run(lease.release)

    def write(self, store: Store, value: object, token: int) -> None:
        """
        Write *value* to *store* and wait for its answer.

        Raises:
            StaleTokenError: the store looks at tokens, and refused this one.
            UsageError: as `run`, also when the answer is lost: it is waited for without a limit.
        """
        self.run(store.write, value, token)

    def run(self, work: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """
        Run the coroutine function *work* in this client; return or raise its outcome.

        Raises:
            UsageError: the client is paused, its own code is calling, or the call does not end
                within the patience of the world.
        """
        if self.paused:
            msg = f"client {shown(self.name)} is paused: call resume() first, or start() to let the work wait"
            raise UsageError(msg)
        task = self.start(work, *args, **kwargs)
        try:
            return self._kernel.finish(task)
        finally:
            task.cancel()

    def start(self, work: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> asyncio.Task[T]:
        """Begin to run the coroutine function *work* in this client; `World.finish` waits for the task."""
        self._kernel.check_open()
        return self._process.spawn(_coroutine(work, *args, **kwargs))

    def pause(self) -> None:
        """
        Freeze the client between two callbacks: no heartbeat, no timer, no reply is processed.

        Time and its clock go on, and what it has sent travels on. A client that is never resumed
        has crashed.
        """
        self._note("paused")
        self._process.pause()

    def suspend(self) -> None:
        """Pause as a laptop that sleeps: its clock goes on, the clock of its event loop stands still."""
        self._note("suspended")
        self._process.pause(suspend=True)

    def resume(self) -> None:
        """Let the client go on: what was ready, what arrived meanwhile, the timers that are due, in this order."""
        self._note("resumed")
        self._process.resume()

    def _note(self, what: str) -> None:
        self._kernel.check_open()
        self._kernel.timeline.note(f"{self.name} {what}")


def _coroutine(work: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
    given: object = work
    coroutine = work(*args, **kwargs) if callable(given) else None
    if not asyncio.iscoroutine(coroutine):
        msg = f"pass a coroutine function and its arguments, not {type(given).__name__}; call plain code by yourself"
        raise ConfigurationError(msg)
    return coroutine


def _historian(timeline: Timeline, client: str) -> Callable[[Event], None]:
    def note(event: Event) -> None:
        details = [f"{field}={getattr(event, field)}" for field in _NOTED if hasattr(event, field)]
        timeline.note(" ".join([client, event.kind, event.name, *details]))

    return note


@dataclass(frozen=True, slots=True)
class Write:
    """A write that reached a store, and what became of it."""

    at: float
    """Arrival, in seconds since the world began."""
    client: str
    value: object
    token: int
    accepted: bool


class Store(ABC):
    """One value that clients write. Made by `World.fenced_store` and `World.unfenced_store`."""

    def __init__(self, timeline: Timeline, network: Network, name: str) -> None:
        self.name = check_name(name)
        self.value: object = None
        """The value of the last write that was accepted."""
        self.history: list[Write] = []
        """Every write that arrived, accepted or refused, in order of arrival."""
        self._timeline = timeline
        self._network = network

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {shown(self.name)} value={shown(self.value)}>"

    async def write(self, value: object, token: int) -> None:
        """
        Send a write and wait until it is confirmed. Only code of a client can: see `WorldClient.run`.

        Raises:
            StaleTokenError: the store looks at tokens, and refused this one.
            ConfigurationError: *token* is not one.
        """
        checked = check_token(token)
        about = f"{shown(value)}, token {checked:d}"
        await self._network.here().ask(self.name, "write", about, lambda client: self._apply(client, value, checked))

    def _apply(self, client: str, value: object, token: Token) -> None:
        """Check and write, in one step: nothing can happen in between."""
        accepted = False
        try:
            self._admit(token)
            self.value = value
            accepted = True
        finally:
            self.history.append(Write(self._timeline.now, client, value, int(token), accepted))

    @abstractmethod
    def _admit(self, token: Token) -> None:
        """Refuse a write by raising `StaleTokenError`."""


class UnfencedStore(Store):
    """Accepts every write, as a disk or a plain HTTP service does. It records the token and ignores it."""

    def _admit(self, token: Token) -> None:
        """Believe it."""


class FencedStore(Store):
    """
    Refuses a token below the highest it has seen, and an equal one from another holder.

    The decision is that of every guard of this package, taken in one step with the write. And the
    store is a guard: ``fences=[store]`` raises its fence at acquisition for a lock that is named
    like the store, ``fences=[(store, store.name)]`` for any other.
    """

    def __init__(self, timeline: Timeline, network: Network, name: str) -> None:
        super().__init__(timeline, network, name)
        self._fence: Token | None = None

    @property
    def fence(self) -> int | None:
        """The highest token seen; None before the first."""
        return None if self._fence is None else int(self._fence)

    async def raise_to(self, resource: str, token: int) -> None:
        """See `fencing_sdk.abc.Guard.raise_to`."""
        self._check_resource(resource)
        checked = check_token(token)
        await self._network.here().ask(self.name, "raise_to", f"token {checked:d}", lambda _: self._admit(checked))

    async def highest(self, resource: str) -> Token | None:
        """See `fencing_sdk.abc.Guard.highest`."""
        self._check_resource(resource)
        return self._fence

    def _admit(self, token: Token) -> None:
        self._fence = admitted(self.name, token, self._fence)

    def _check_resource(self, resource: str) -> None:
        if resource != self.name:
            msg = (
                f"the store {shown(self.name)} is one resource and not {shown(resource)}; name it like the lock, "
                f"or pass the pair: fences=[(store, store.name)]"
            )
            raise ConfigurationError(msg)
