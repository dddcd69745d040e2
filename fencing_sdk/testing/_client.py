"""A simulated process with the real client in it, and plain calls that run the world until they are done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, Unpack

from fencing_sdk._arguments import LockOptions
from fencing_sdk._client import LockClient
from fencing_sdk._lease import Lease
from fencing_sdk.errors import ConfigurationError, UsageError, shown
from fencing_sdk.events import Event
from fencing_sdk.testing._kernel import Kernel
from fencing_sdk.testing._network import Link
from fencing_sdk.testing._process import Process, ProcessClock
from fencing_sdk.testing._service import WorldBackend
from fencing_sdk.testing._stores import Store
from fencing_sdk.testing._timeline import Timeline
from fencing_sdk.testing._world_thread import client_for_threads

P = ParamSpec("P")
T = TypeVar("T")

_TOLD = ("token", "reason", "resource", "fence", "conflict", "confirmed")
"""What a history tells about an event: nothing that differs between two runs, such as an owner."""


class WorldClient:
    """
    A process of its own with a `LockClient` in it. Made by `World.client`.

    Its verbs are plain calls that let time go on until they are done. ``locks`` is the real client
    for code that runs inside: ``client.run(work)``, where ``work`` enters ``client.locks.lock(...)``
    as it would anywhere. ``sync_locks`` is for plain code, which the test calls by itself, such as a view of Django.
    """

    def __init__(self, world: object, kernel: Kernel, process: Process, drift: float) -> None:
        self._world = world  # which lives as long as any of its clients
        self._kernel = kernel
        self._process = process
        self.link: Link = kernel.network.connect(process)
        """Its way to the lock service and to the stores."""
        self.events: list[Event] = []
        """What its `LockClient` told its observers."""
        self.locks = LockClient(
            WorldBackend(self.link, kernel.service),
            observers=[self.events.append, _historian(kernel.timeline, process.name)],
            drift=drift,
            clock=process.clock,
            watch_stalls=False,  # a thread, on real time
        )
        """The real client, open in this process."""
        self.sync_locks = client_for_threads(self.locks, kernel, process)
        """The same client for plain code, as `fencing_sdk.sync.connect` makes it: call that code, and time goes on."""
        process.on_close(self.locks.aclose)
        process.spawn(_open(self.locks))  # in front of everything the client will be asked to do

    def __repr__(self) -> str:
        return f"<WorldClient {shown(self.name)}{', paused' if self.paused else ''}>"

    @property
    def name(self) -> str:
        """How histories and errors call it."""
        return self._process.name

    @property
    def clock(self) -> ProcessClock:
        """Its monotonic clock."""
        return self._process.clock

    @property
    def paused(self) -> bool:
        """Whether nothing runs in it."""
        return self._process.paused

    def acquire(self, name: str, **options: Unpack[LockOptions]) -> Lease:
        """
        Acquire lock *name*, with the options of `LockClient.lock`: a plain handle, renewed until it is released.

        Raises:
            AcquireError, LeaseLostError, StaleTokenError, BackendError: as `Lock.acquire`.
            UsageError: as `run`.
        """
        lease = self.run(self.locks.lock(name, **options).acquire)
        self._process.keep(lease)  # a handle that is dropped warns, and is given back
        return lease

    def release(self, lease: Lease) -> None:
        """Give *lease* back."""
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
        self._tell("paused")
        self._process.pause()

    def suspend(self) -> None:
        """Pause as a laptop that sleeps: its clock goes on, the clock of its event loop stands still."""
        self._tell("suspended")
        self._process.pause(suspend=True)

    def resume(self) -> None:
        """Let the client go on: what was ready, what arrived meanwhile, the timers that are due, in this order."""
        self._tell("resumed")
        self._process.resume()

    def _tell(self, what: str) -> None:
        self._kernel.check_open()
        self._kernel.timeline.note(f"{self.name} {what}")


def _coroutine(work: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
    given: object = work
    coroutine = work(*args, **kwargs) if callable(given) else None
    if not asyncio.iscoroutine(coroutine):
        msg = f"pass a coroutine function and its arguments, not {type(given).__name__}; call plain code by yourself"
        raise ConfigurationError(msg)
    return coroutine


async def _open(locks: LockClient) -> None:
    await locks.__aenter__()


def _historian(timeline: Timeline, client: str) -> Callable[[Event], None]:
    def tell(event: Event) -> None:
        details = [f"{field}={getattr(event, field)}" for field in _TOLD if hasattr(event, field)]
        timeline.note(" ".join([client, event.kind, event.name, *details]))

    return tell
