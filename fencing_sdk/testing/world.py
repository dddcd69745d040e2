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
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from fencing_sdk._values.timing import DEFAULT_DRIFT, Seconds, seconds
from fencing_sdk.testing._client import WorldClient
from fencing_sdk.testing._kernel import Kernel
from fencing_sdk.testing._network import Link
from fencing_sdk.testing._stores import FencedStore, Store, UnfencedStore, Write

__all__ = ["FencedStore", "Link", "Store", "UnfencedStore", "World", "WorldClient", "Write"]

T = TypeVar("T")


class World:
    """
    Virtual time, and everything that lives in it.

    Use it with ``with``, or let go of it: it ends when nothing refers to it or its clients any
    more. Then all clients are resumed, their work is cancelled and they are closed. If a task failed and
    was never awaited, its error is raised at the end; no error is lost.

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
        """What happened, a line each: every message when it is sent, every event of a client, every pause."""
        return list(self._kernel.timeline.history)

    def client(self, name: str, *, clock_rate: float = 1.0, drift: float = DEFAULT_DRIFT) -> WorldClient:
        """
        Add a process with a client of the lock service.

        Args:
            name: How histories and errors call it.

            clock_rate: Seconds that its clock shows after one second.

            drift: What the client believes about the rates of clocks, as for `LockClient`.

        Raises:
            ConfigurationError: an argument cannot work, or the name is taken.
        """
        process = self._kernel.new_process(name, clock_rate=seconds(clock_rate, "clock_rate", above=True))
        return WorldClient(self, self._kernel, process, drift)

    def unfenced_store(self, name: str = "store") -> UnfencedStore:
        """Add a resource that takes every write."""
        return UnfencedStore(self._kernel.timeline, self._kernel.network, self._kernel.new_name(name))

    def fenced_store(self, name: str = "store") -> FencedStore:
        """Add a resource that refuses stale tokens."""
        return FencedStore(self._kernel.timeline, self._kernel.network, self._kernel.new_name(name))

    def holder(self, name: str) -> str | None:
        """Tell which client holds lock *name* at this moment, in the eyes of the service."""
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
