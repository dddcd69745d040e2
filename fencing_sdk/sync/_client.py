"""The client for threads: the client for tasks, run by a thread of its own."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, Unpack

from fencing_sdk._arguments import ElectionOptions, LockOptions
from fencing_sdk._client import LockClient as TaskLockClient
from fencing_sdk._client import draining_of, job_of
from fencing_sdk._lease import held_here, state_of
from fencing_sdk._lease_ticket import LeaseTicket
from fencing_sdk._name_template import template_for_threads
from fencing_sdk._values.claim import Holder, Waiting, check_name
from fencing_sdk._values.drivers import check_daemon_threads
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.reports import Status
from fencing_sdk._values.timing import DEFAULT_TTL, Seconds, seconds
from fencing_sdk.errors import ConfigurationError, shown
from fencing_sdk.recipes.drain_signals import DrainBlock, check_signals
from fencing_sdk.recipes.jobs import AtLeastOn, Ran, Skipped
from fencing_sdk.sync._bridge import ClosedMeanwhileError, LoopThread
from fencing_sdk.sync._lock import Election, Lock, MultiLock, ReadWriteLock, Semaphore, as_leader, run_job

P = ParamSpec("P")
R = TypeVar("R")


class ClientForThreads(Uncopied):
    """A client for tasks, opened, drained and closed by a thread of its own: what such clients have in common."""

    def __init__(self, client: TaskLockClient) -> None:
        given: object = client
        if not isinstance(given, TaskLockClient):
            msg = f"client must be a LockClient, not {shown(given)}; fencing_sdk.sync.connect makes one from a URL"
            raise ConfigurationError(msg)
        check_daemon_threads("a client of fencing_sdk.sync")
        self._client = client
        self._bridges: dict[int, LoopThread] = {}

    def __repr__(self) -> str:
        return repr(self._client).replace("LockClient", f"sync.{type(self).__name__}", 1)

    def __del__(self, interpreter_ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if interpreter_ends():  # it was closed before, and the globals of this module may be gone
            return
        bridge: LoopThread | None = getattr(self, "_bridges", {}).get(os.getpid())
        if bridge is not None:
            bridge.close_soon()

    def __enter__(self) -> Self:
        self._bridge().open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """
        Close the client. Idempotent, bounded, and never raises because of the store. A later call opens it again.

        A client with ``drain`` is drained first: other threads may release their locks for at most so many seconds.
        Leases that are still held are lost with `LossReason.CLOSED` and released. Threads that wait for a lock get a
        `UsageError`, or a `DrainingError` while it drains. A call of another thread waits for the end, and opens the
        client again.

        Raises:
            UsageError: this is the client's own thread.
        """
        self._bridge().close()

    def drain(self, *, within: Seconds) -> bool:
        """
        Let what runs end, and begin nothing new: the last call before `close`. See `fencing_sdk.LockClient.drain`.

        A lease that is held after *within* seconds is lost with `LossReason.DRAINED`. Its thread is not stopped. Return
        whether every lock was released in time.
        """
        return self._bridge().call(functools.partial(self._client.drain, within=within))

    def draining_on(self, *signals: int, within: Seconds) -> AbstractContextManager[None]:
        """
        Drain when one of the *signals* comes: ``with locks, locks.draining_on(SIGTERM, SIGINT, within=25):``.

        Threads that wait for a lock get a `DrainingError` at once, and bodies go on. A second signal ends the leases
        now, a third does what it did before. No thread is stopped: a block that waits for no lock asks `draining`.
        The end of the block waits until every lock was released. A `DrainingError` that leaves it is its end in
        order. A handler that a program has set before, such as gunicorn's, is called too.

        Arguments are those of `fencing_sdk.LockClient.draining_on`.

        Raises:
            ConfigurationError: as `fencing_sdk.LockClient.draining_on`.
            BackendError: on entering, the client was not open yet, and could not be opened.
            UsageError: on entering, this is not the main thread.
        """
        limit = seconds(within, "within")
        return DrainOnSignals(self._bridge, self._client, check_signals(signals), limit)

    @property
    def draining(self) -> bool:
        """True if the client drains, so that nothing new begins. Worker loops should check it."""
        return self._client.draining

    def status(self) -> Status:
        """See `fencing_sdk.LockClient.status`. A client that no call has opened yet is ready, until `close`."""
        return Status(open=True) if self._bridge().idle else self._client.status()

    def _bridge(self) -> LoopThread:
        bridge = self._bridges.get(os.getpid())
        return bridge or self._bridges.setdefault(os.getpid(), LoopThread(self._client))


class LockClient(ClientForThreads):
    """
    Makes locks for threads on one backend, and renews all their leases in one background thread.

    Make one for a process, at import if you like, and use it from all threads. The first call that needs the store
    starts the thread and opens the connection. `close` ends both, and so does the end of the interpreter: what is
    held then is released at once. ``with client`` opens it and closes it.

    A forked child may use it too: its first call starts a thread and a connection of its own. The leases of its parent
    are over in the child, and go on in the parent.

    Args:
        client: A client that is used here alone, and that is not open.

    Raises:
        UnsupportedError: this is a subinterpreter, in which its background thread cannot run.
    """

    def lock(self, name: str, *, cancel: threading.Event | None = None, **options: Unpack[LockOptions]) -> Lock:
        """
        Describe how to hold *name*; nothing is sent until the lock is entered.

        Args:
            name: What is protected, such as ``"invoices/42"``.

            cancel: An event that ends the wait for the lock, within a twentieth of a second, by an
                `AcquireCancelledError`. It does nothing to a body. So for multi-locks, semaphores, readers and writers;
                the loop of an election ends by it.

            **options: As for `fencing_sdk.LockClient.lock`. ``max_hold`` ends the lease of a body that hangs.

        Raises:
            ConfigurationError: an argument is out of range, or the times do not fit together.
        """
        return Lock(self._bridge, self._client.lock(name, **options), cancel)

    def resume(self, ticket: LeaseTicket | str, **options: Unpack[LockOptions]) -> Lock:
        """Describe how to go on with a detached lease. Arguments, errors: as `fencing_sdk.LockClient.resume`."""
        return Lock(self._bridge, self._client.resume(ticket, **options))

    def detached(self, name: str, *, ttl: Seconds = DEFAULT_TTL, label: str | None = None) -> LeaseTicket:
        """Make a ticket for `take`. Arguments and errors are those of `fencing_sdk.LockClient.detached`."""
        return self._client.detached(name, ttl=ttl, label=label)

    def take(self, ticket: LeaseTicket | str, *, wait: Seconds | None = 0.0) -> LeaseTicket:
        """Acquire the lock of a ticket. Arguments and errors are those of `fencing_sdk.LockClient.take`."""
        return self._bridge().call(functools.partial(self._client.take, ticket, wait=wait), undo=self._client.release)

    def renew(self, ticket: LeaseTicket | str, *, ttl: Seconds | None = None) -> LeaseTicket:
        """Restart the time of a ticket. Arguments and errors are those of `fencing_sdk.LockClient.renew`."""
        return self._bridge().call(functools.partial(self._client.renew, ticket, ttl=ttl))

    def release(self, ticket: LeaseTicket | str) -> None:
        """Give back what a ticket stands for. Errors are those of `fencing_sdk.LockClient.release`."""
        self._bridge().call(functools.partial(self._client.release, ticket))

    def locking(
        self, name: str, *, cancel: threading.Event | None = None, **options: Unpack[LockOptions]
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """
        Decorate a plain function: every call holds the lock. Arguments are those of `lock`.

        *name* may have placeholders for the call's arguments: ``"report/{report_id}"``.

        Raises:
            ConfigurationError: as `fencing_sdk.LockClient.locking`, or the function is a coroutine function or a
                generator.
        """
        check_name(name)
        self.lock("checked-when-decorated", cancel=cancel, **options)

        def decorate(function: Callable[P, R]) -> Callable[P, R]:
            template = template_for_threads(name, function, "locking")

            @functools.wraps(function)
            def under_lock(*args: P.args, **kwargs: P.kwargs) -> R:
                with self.lock(template.fill(args, kwargs), cancel=cancel, **options):
                    return function(*args, **kwargs)

            return under_lock

        return decorate

    def job(
        self, name: str, *, at_least_for: Seconds, at_least_on: AtLeastOn = "success", **options: Unpack[LockOptions]
    ) -> Callable[[Callable[P, R]], Callable[P, Ran[R] | Skipped]]:
        """
        Decorate a plain function that several processes call at the same time, and one is to run.

        A call returns `Ran` with the function's value, or `Skipped` when the lock is held. The function runs in the
        thread that called. Arguments and errors are those of `fencing_sdk.LockClient.job`.

        Raises:
            ConfigurationError: as `fencing_sdk.LockClient.job`, or the function is a coroutine function or a generator.
        """
        job = job_of(self._client, name, at_least_for, at_least_on, options)

        def decorate(function: Callable[P, R]) -> Callable[P, Ran[R] | Skipped]:
            template = template_for_threads(name, function, "job")
            job.report_made()

            @functools.wraps(function)
            def once(*args: P.args, **kwargs: P.kwargs) -> Ran[R] | Skipped:
                body = functools.partial(function, *args, **kwargs)
                return run_job(self._bridge, job.call(template, args, kwargs), body)

            return once

        return decorate

    def election(
        self, name: str, *, cancel: threading.Event | None = None, **options: Unpack[ElectionOptions]
    ) -> Election:
        """
        Describe an election: ``for term in election:``, and in it ``with term as lease:``.

        One process of all that stand leads, for as long as it holds the lock *name*. A body that outlasts the lead is
        not stopped, so it asks ``term.over``, and reads ``lease.token`` for each write.

        Args:
            name: What is led, such as ``"scheduler"``. Nothing else should lock this name.

            cancel: An event that ends the loop while it waits for the lead. A leader looks at the event by itself.

            **options: As for `fencing_sdk.LockClient.election`, but without ``finish_within``: a body ends by itself.

        Raises:
            ConfigurationError: an option cannot work.
        """
        if "finish_within" in options:
            msg = "election() of fencing_sdk.sync takes no finish_within: a body is not stopped; let it ask term.over"
            raise ConfigurationError(msg)
        return Election(self._bridge, self._client.election(name, **options), cancel)

    def elected(
        self, name: str, *, cancel: threading.Event | None = None, **options: Unpack[ElectionOptions]
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
        """
        Decorate a plain function: a call waits for the lead, and runs the function as the leader.

        When the lead is lost meanwhile, the function is called again with the same arguments in the next term. The call
        returns what the function returns, or None when the client drains or the wait is cancelled. *name* may have
        placeholders, as for `locking`. The other arguments are those of `election`.

        Raises:
            ConfigurationError: as `locking`, or as `election`.
        """
        check_name(name)
        self.election("checked-when-decorated", cancel=cancel, **options)

        def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
            template = template_for_threads(name, function, "elected")

            def election_of(args: tuple[object, ...], kwargs: dict[str, object]) -> Election:
                return self.election(template.fill(args, kwargs), cancel=cancel, **options)

            return as_leader(function, election_of)

        return decorate

    def multilock(
        self, *names: str, cancel: threading.Event | None = None, **options: Unpack[LockOptions]
    ) -> MultiLock:
        """
        Describe how to hold several locks together: ``with`` yields `HeldLocks`.

        Arguments and errors are those of `fencing_sdk.LockClient.multilock`, and `lock`.
        """
        return MultiLock(self._bridge, self._client.multilock(*names, **options), cancel)

    def semaphore(
        self, name: str, *, permits: int, cancel: threading.Event | None = None, **options: Unpack[LockOptions]
    ) -> Semaphore:
        """
        Describe so many permits of *name*.

        Arguments and errors are those of `fencing_sdk.LockClient.semaphore`, and `lock`.
        """
        return Semaphore(self._bridge, self._client.semaphore(name, permits=permits, **options), cancel)

    def rwlock(
        self, name: str, *, cancel: threading.Event | None = None, **options: Unpack[LockOptions]
    ) -> ReadWriteLock:
        """
        Describe a lock for readers and one for writers.

        Arguments are those of `fencing_sdk.LockClient.rwlock`, and `lock`.
        """
        return ReadWriteLock(self._bridge, self._client.rwlock(name, **options), cancel)

    def inspect(self, name: str) -> Holder | None:
        """Return who holds *name*, or None when it is free. Errors are those of `fencing_sdk.LockClient.inspect`."""
        return self._bridge().call(functools.partial(self._client.inspect, name))

    def all_holders(self, pattern: str = "*") -> Sequence[Holder]:
        """
        Return who holds the locks whose names match.

        Arguments and errors are those of `fencing_sdk.LockClient.all_holders`.
        """

        async def collect() -> list[Holder]:
            return [holder async for holder in self._client.all_holders(pattern)]

        return self._bridge().call(collect)

    def holders(self, name: str) -> Sequence[Holder]:
        """Return all who hold *name*. Errors are those of `fencing_sdk.LockClient.holders`."""
        return self._bridge().call(functools.partial(self._client.holders, name))

    def waiters(self, name: str) -> Sequence[Waiting]:
        """Return who waits for *name*, in the order of the line. Errors: as `fencing_sdk.LockClient.waiters`."""
        return self._bridge().call(functools.partial(self._client.waiters, name))

    def revoke(self, name: str, *, token: int, reason: str) -> bool:
        """Take *name* away from its holder. Arguments, value and errors: as `fencing_sdk.LockClient.revoke`."""
        return self._bridge().call(functools.partial(self._client.revoke, name, token=token, reason=reason))

    def run(self, function: Callable[P, Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs) -> R:
        """
        Call an ``async def`` function in the thread of this client, and wait for what it returns.

        For what has no call of its own for threads, such as ``locks.run(guard.write, resource, lease.token, ...)`` of a
        guard. All locks share that thread, so it must not block. The context is that of the caller: `current_token`
        works there.

        Raises:
            ConfigurationError: *function* is not an ``async def`` function.
            UsageError: the client was closed meanwhile.
            Exception: what *function* raises.
        """
        _check_runs(function, runs=callable(function))

        def called() -> Coroutine[Any, Any, R]:
            running = function(*args, **kwargs)
            _check_runs(function, runs=inspect.isawaitable(running))
            return running

        return self._bridge().call(called)


def _check_runs(function: object, *, runs: bool) -> None:
    if not runs:
        if inspect.iscoroutine(function):
            function.close()  # or Python warns that it was never awaited
        msg = f"run() calls an 'async def' function with the arguments that follow it, got {shown(function)}"
        raise ConfigurationError(msg)


class DrainOnSignals(DrainBlock):
    """
    The block during which a signal drains the client. Made by `LockClient.draining_on`.

    Nothing is cancelled. After the first signal, threads that wait for a lock leave the line by a `DrainingError`, and
    bodies go on. After the second one, the leases are lost, which bodies learn as from every loss.
    """

    __slots__ = ("_bridge", "_client", "_loop")

    def __init__(
        self,
        bridge: Callable[[], LoopThread],
        client: TaskLockClient,
        signals: tuple[signal.Signals, ...],
        within: float,
    ) -> None:
        super().__init__(signals, within)
        self._bridge = bridge
        self._client = client

    def __enter__(self) -> None:
        self._refuse_another_entry()
        self._loop = self._bridge().open()
        self._entered = True
        self._handlers.set()
        draining_of(self._client).around = tuple(map(state_of, held_here()))

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        try:
            if self._received:
                with contextlib.suppress(ClosedMeanwhileError):  # all was released
                    self._bridge().call(functools.partial(self._drain, self._within), only=self._loop)
        finally:
            self._handlers.restore()
        return self._swallows(raised)

    def _receive(self, number: int) -> None:
        bound = self._bound(number)
        with contextlib.suppress(ClosedMeanwhileError):
            self._bridge().watch(functools.partial(self._drain, bound), self._loop)

    async def _drain(self, within: float) -> None:
        if self._client.status().open:
            await self._client.drain(within=within)
