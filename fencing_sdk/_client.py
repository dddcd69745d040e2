"""
The client: owns a backend and the one heartbeat, and makes locks.

No task group and no cancel scope spans its entry and exit, so it may be entered and left by
different tasks (fixtures, application lifespans), and the errors of its body leave as they are.
"""
# ruff: noqa: PLC0415  (a recipe is loaded by the method that makes one: most programs use none, and all of them start)

from __future__ import annotations

import functools
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from fnmatch import fnmatchcase
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, Unpack, cast
from weakref import WeakSet

from fencing_sdk._arguments import (
    ElectionOptions,
    Fence,
    LockOptions,
    check_backend,
    check_backoff,
    check_fences,
    check_guards,
    check_label,
    check_reason,
    check_shares,
    check_threads_are_real,
)
from fencing_sdk._engine.acquisition import DEFAULT_BACKOFF, NO_FENCES, Backoff, Terms
from fencing_sdk._engine.draining import Draining
from fencing_sdk._engine.engine import Engine
from fencing_sdk._engine.hand_over import check_outlives, check_passes_on
from fencing_sdk._engine.store_calls import backend_name
from fencing_sdk._lease import state_of
from fencing_sdk._lease_ticket import LeaseTicket, claim_of, timing_of
from fencing_sdk._lock import Lock, in_mode, resuming
from fencing_sdk._name_template import template_for_tasks
from fencing_sdk._values.claim import (
    READER,
    WRITER,
    Holder,
    Waiting,
    check_name,
    check_namespace,
    in_namespace,
    name_for,
    new_owner,
)
from fencing_sdk._values.clock import BootClock, Clock
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.observers import Observer, Observers
from fencing_sdk._values.reports import Status, label_of
from fencing_sdk._values.timing import DEFAULT_TTL, Seconds, Timing, check_ttl, patience, seconds
from fencing_sdk._values.token import check_token
from fencing_sdk.abc import Backend, Guard
from fencing_sdk.errors import ConfigurationError, UsageError, shown

if TYPE_CHECKING:
    from fencing_sdk.diagnosis import Diagnosis
    from fencing_sdk.recipes.election import Election, ElectionState
    from fencing_sdk.recipes.jobs import AtLeastOn, Job, JobFunction
    from fencing_sdk.recipes.multilock import MultiLock
    from fencing_sdk.recipes.shares import ReadWriteLock, Semaphore

PAGE = 200
"""Holders in one page of a listing."""
_OVER = 5.0
_LONGEST_DIAGNOSIS = 3600.0

P = ParamSpec("P")
R = TypeVar("R")


class LockClient(Uncopied):
    """
    Makes locks on one backend and renews all their leases with one heartbeat.

    Enter it once with ``async with``; then use it from any number of tasks of that event loop.
    You may enter it again later, also in another loop. If it is still being closed then, the entry waits for that.

    Args:
        backend: Where the locks are kept. See `connect` for URLs.

        namespace: A prefix for every lock name, so that applications can share a store.

        observers: Callables that receive every event, such as `Acquired` and `Lost`.

        drain: Seconds for which closing the client lets bodies go on, as `drain` does. None ends them at once.

        open_wait: Seconds for which opening the client waits for a store that is away. 0, the default, asks once. None
            asks nothing: the first lock opens the connection, and its ``wait`` counts for both.

        label: The label of every lock without one of its own. The default is a JSON object: host, process id
            and the name of the program without its arguments. ``""`` stores nothing.

    Raises:
        ConfigurationError: an argument cannot work.
        UnsupportedError: gevent or eventlet has replaced the threads of this process.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        namespace: str = "",
        observers: Sequence[Observer] = (),
        drain: Seconds | None = None,
        open_wait: Seconds | None = 0.0,
        label: str | None = None,
    ) -> None:
        check_threads_are_real()
        check_backend(backend)
        self._backend = backend
        self._namespace = check_namespace(namespace)
        self._observers = Observers(observers)
        self._clock: Clock = BootClock()
        self._watch_stalls = True
        self._drain = None if drain is None else seconds(drain, "drain")
        self._open_wait = None if open_wait is None else seconds(open_wait, "open_wait")
        self._label = check_label(label)
        self._engine: Engine | None = None
        self._elections: WeakSet[ElectionState] = WeakSet()
        """The elections in which this process is a candidate."""

    def _opened(self) -> Engine:
        if self._engine is None:
            msg = (
                "this client is not open; enter it first: async with locks. If the lifespan of an application enters "
                "it, use a server that runs the lifespan: daphne does not, nor does ASGITransport of httpx"
            )
            raise UsageError(msg)
        return self._engine

    def __repr__(self) -> str:
        held = 0 if self._engine is None else len(self._engine)
        state = "closed" if self._engine is None else f"open, {held} {'lease' if held == 1 else 'leases'}"
        return f"<LockClient on {backend_name(self._backend)}, {state}>"

    async def __aenter__(self) -> Self:
        await self._enter(lazily=self._open_wait is None)
        return self

    async def _enter(self, *, lazily: bool) -> None:
        while (former := self._engine) is not None and not former.closed:
            await former.wait_closed()
        wait, watch = self._open_wait or 0.0, self._watch_stalls
        self._engine = engine = Engine(self._backend, self._clock, self._observers, watch_stalls=watch, open_wait=wait)
        try:
            await engine.start(lazily=lazily)
        except BaseException:
            await self.aclose()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """
        Close the client. Idempotent, bounded, and never raises because of the store.

        A client with ``drain`` is drained first, for at most so many seconds.

        Leases that are still held are lost with `LossReason.CLOSED` and released. Every caller waits until
        the client is closed; one that is cancelled meanwhile is cancelled afterwards.

        Raises:
            UsageError: the event loop that opened the client runs elsewhere.
        """
        if (engine := self._engine) is None:
            return
        try:
            await engine.aclose(drain=self._drain)
        finally:
            if engine.closed and self._engine is engine:
                self._engine = None

    def lock(
        self,
        name: str,
        *,
        ttl: Seconds = DEFAULT_TTL,
        wait: Seconds | None = None,
        safety_buffer: Seconds | None = None,
        heartbeat_interval: Seconds | None = None,
        max_hold: Seconds | None = None,
        fences: Sequence[Fence] = NO_FENCES,
        backoff: Backoff = DEFAULT_BACKOFF,
        label: str | None = None,
    ) -> Lock:
        """
        Describe how to hold *name*; nothing is sent until the lock is entered.

        One lock may be entered by many tasks. Each entry is a lease of its own, with its own token.
        All times are in seconds, or timedeltas.

        Args:
            name: What is protected, such as ``"invoices/42"``: 1 to 512 bytes without control characters.

            ttl: Seconds the store keeps a grant after the last renewal, 15 by default. If this process dies,
                others wait at most this long. From 50 ms to one day; use 1 s or more over a network.

            wait: Seconds to wait for another holder, and for a store that does not answer. 0 asks once. None waits for
                ever for a holder, and one ttl for the store. A request that is on its way still gets two seconds, with
                ``wait=0`` too, and the first connection of a client gets five.

            safety_buffer: Seconds before the ttl ends at which the work is cancelled. A fifth of
                the ttl by default; make it three times the longest pause of your event loop.

            heartbeat_interval: Seconds between renewals. A quarter of what is left of the ttl
                without the buffer by default.

            max_hold: Seconds after which a lease ends although it could be renewed. Without it a
                body that hangs keeps its lock for ever. A plain handle and a thread's block, whose work nothing
                stops, release the lock at that moment.

            fences: Fences to raise as soon as the lock is held, so that an earlier holder is refused even before the
                first write. Each is a guard, for its resource that is named like the lock, without the namespace, or
                a pair of a guard and a resource.

            backoff: A tenacity wait strategy, for stores that cannot wake a waiter.

            label: A text that `inspect` shows to others instead of the client's. Not a place for secrets.

        Raises:
            ConfigurationError: an argument is out of range, or the times do not fit together.
        """
        timing = Timing.build(
            ttl=ttl,
            safety_buffer=safety_buffer,
            heartbeat_interval=heartbeat_interval,
            max_hold=max_hold,
        )
        name = check_name(name)
        store_name = in_namespace(self._namespace, name) if self._namespace else name
        wait = None if wait is None else patience(wait)
        backoff = backoff if backoff is DEFAULT_BACKOFF else check_backoff(backoff)
        label = self._label if label is None else check_label(label)
        terms = Terms(name, store_name, timing, wait, backoff, label)
        return Lock(self._opened, terms, fences if fences is NO_FENCES else check_fences(fences))

    def resume(self, ticket: LeaseTicket | str, **options: Unpack[LockOptions]) -> Lock:
        """
        Describe how to go on with a detached lease: ``async with locks.resume(ticket) as lease:``.

        To enter it takes the lease over in one step, with a higher token. Of several that resume one ticket, one goes
        on; the others get a `TicketRefusedError`.

        Args:
            ticket: A ticket of `Lease.detach` or `take`, or its text.

            **options: As for `lock`, without ``wait``: the ticket holds the lock already.

        Raises:
            ConfigurationError: it is no ticket, or one of another namespace, or an option cannot work.
            UnsupportedError: the tickets of the store do not change hands.
        """
        if "wait" in options:
            msg = "resume() takes no wait: the ticket holds the lock already"
            raise ConfigurationError(msg)
        given = self._given(ticket)
        check_passes_on(self._backend)
        return resuming(self.lock(given.name, **options), given)

    def detached(self, name: str, *, ttl: Seconds = DEFAULT_TTL, label: str | None = None) -> LeaseTicket:
        """
        Make a ticket by which `take` acquires *name* for no process in particular. Nothing is sent.

        Write it down first: if the process is killed while it takes the lock, the next `take` finds what it got.

        Args:
            name: What is protected.

            ttl: Seconds for which the store keeps the lock without a renewal of the ticket, at most one day.

            label: As for `lock`. Others see it behind a note that the lease is detached.

        Raises:
            ConfigurationError: an argument cannot work.
            UnsupportedError: the store ends its tickets with the session of a process.
        """
        check_outlives(self._backend)
        in_namespace(self._namespace, name)
        text = label_of(self._label if label is None else check_label(label)) or None
        return LeaseTicket(str(name), check_ttl(ttl), new_owner(), label=text, namespace=self._namespace)

    async def take(self, ticket: LeaseTicket | str, *, wait: Seconds | None = 0.0) -> LeaseTicket:
        """
        Acquire the lock of a *ticket* from `detached`, and return the ticket with its token. No process renews it.

        Idempotent: a ticket that holds already is renewed. After an `AcquireError`, and after a cancellation, it is
        used up: make another one. After a `BackendError` take it again, or release it. *wait*: as for `lock`.

        Raises:
            TicketRefusedError: it was taken before, and no longer stands for a lease.
            AcquireError, BackendError, UsageError: as `Lock.acquire`.
            LeaseLostError: the answer came when the time was over.
            ConfigurationError: it is no ticket, or one of another namespace, or *wait* is not a valid time.
        """
        given, patient = self._given(ticket), patience(wait)
        if given.token is not None:
            return await self.renew(given)
        engine, claim = self._opened(), claim_of(given)
        terms = Terms(given.name, claim.name, timing_of(given), patient, DEFAULT_BACKOFF, claim.label, claim.mode)
        lease = await engine.hold(terms._replace(owner=claim.owner), NO_FENCES)
        return engine.hand_over.leave(state_of(lease), given)

    async def renew(self, ticket: LeaseTicket | str, *, ttl: Seconds | None = None) -> LeaseTicket:
        """
        Restart the time of a detached lease, and return the ticket with its new bound. Its owner and token stay.

        *ttl*: seconds for which the store keeps the lock from now on. That of the ticket by default.

        Raises:
            TicketRefusedError: it no longer stands for a lease.
            BackendError: the store did not answer; the lock is held until the ticket runs out.
            ConfigurationError: it is no ticket, or one of another namespace, or *ttl* is out of range.
            UsageError: the client is not open.
        """
        given = self._given(ticket)
        given = given if ttl is None else replace(given, ttl=check_ttl(ttl))
        return await self._opened().hand_over.renew(given)

    async def release(self, ticket: LeaseTicket | str) -> None:
        """
        Give back a detached lease. Idempotent, and a ticket that was used before does nothing.

        Raises:
            BackendError: the store did not answer; the lock is free when the ticket has run out.
            ConfigurationError: it is no ticket, or one of another namespace.
            UsageError: the client is not open.
        """
        await self._opened().release_ticket(self._given(ticket))

    def _given(self, ticket: LeaseTicket | str) -> LeaseTicket:
        """Read a *ticket* that this client can use."""
        check_outlives(self._backend)
        given = ticket if isinstance(ticket, LeaseTicket) else LeaseTicket.load(ticket)
        if given.namespace != self._namespace:
            theirs, ours = shown(given.namespace), shown(self._namespace)
            msg = f"the ticket for {shown(given.name)} is of namespace {theirs}, and this client has {ours}"
            raise ConfigurationError(msg)
        return given

    def multilock(self, *names: str, **options: Unpack[LockOptions]) -> MultiLock:
        """
        Describe how to hold several locks together; nothing is sent until ``async with`` enters them.

        They are acquired in the order of their names, whatever the order of the arguments, so that callers that need
        the same locks do not wait for each other in a circle. That holds among multi-locks: do not enter one while
        this task holds another lock that their callers need.

        Args:
            *names: What is protected: one or more names, in any order.

            **options: As for `lock`, for each of the locks. ``wait`` is the patience for all of them together.
                ``fences`` are guards alone: each lock raises the fence of the resource that is named like it.

        Returns:
            A `MultiLock`, whose ``async with`` yields `HeldLocks` and raises what that of a `Lock` raises.

        Raises:
            ConfigurationError: a name occurs twice or cannot be a name, or an option cannot work.
        """
        from fencing_sdk.recipes.multilock import MultiLock, check_names

        in_order = check_names(names, options.get("fences"))
        wait = patience(options.pop("wait", None))
        return MultiLock([self.lock(name_for("multilock", name), **options) for name in in_order], wait, self._clock)

    def locking(
        self, name: str, **options: Unpack[LockOptions]
    ) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], Callable[P, Coroutine[Any, Any, R]]]:
        """
        Decorate a coroutine function: every call holds the lock.

        Args:
            name: The lock's name, with placeholders for the call's arguments:
                ``"report/{report_id}"``, ``"tenant/{self.tenant}"``.

            **options: As for `lock`.

        Raises:
            ConfigurationError: at decoration, when a placeholder is not a parameter, an option
                cannot work, or the function is not a coroutine function. When called, when the
                arguments do not make a valid name.
        """
        check_name(name)
        self.lock("checked-when-decorated", **options)

        def decorate(function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
            template = template_for_tasks(name, function, "locking")

            @functools.wraps(function)
            async def under_lock(*args: P.args, **kwargs: P.kwargs) -> R:
                async with self.lock(template.fill(args, kwargs), **options):
                    return await function(*args, **kwargs)

            return under_lock

        return decorate

    def election(self, name: str, **options: Unpack[ElectionOptions]) -> Election:
        """
        Describe an election: ``async for term in election:``, and in it ``async with term as lease:``.

        One of the candidates leads, for as long as it holds the lock *name*. The body is cancelled when the
        lead is lost, and the loop stands again. The loop rides out an outage of the store. It ends when the client
        drains.

        Args:
            name: What is led, such as ``"scheduler"``. Nothing else should lock this name.

            **options: As for `lock`, but without ``wait``: a candidate waits until it leads. ``finish_within`` is
                the number of seconds for which the body may go on when the client drains. 0, the default, cancels it
                at once. The lock is released when the body has ended.

        Raises:
            ConfigurationError: an option cannot work.
        """
        from fencing_sdk.recipes.election import Election

        if "wait" in options:
            msg = "election() takes no wait: a candidate waits until it leads; put a timeout around the loop instead"
            raise ConfigurationError(msg)
        finish_within = seconds(options.pop("finish_within", 0.0), "finish_within")
        lock = functools.partial(self.lock, name_for("election", name), **cast("LockOptions", options))
        return Election(lock, self._opened, functools.partial(self.inspect, name), finish_within, self._elections)

    def elected(
        self, name: str, **options: Unpack[ElectionOptions]
    ) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], Callable[P, Coroutine[Any, Any, R | None]]]:
        """
        Decorate a coroutine function: a call waits for the lead, and runs the function as the leader.

        When the lead is lost, the function is cancelled, and called again with the same arguments in the next term.
        The call returns what the function returns, or None when the client drains.

        Args:
            name: What is led, with placeholders for the call's arguments, as for `locking`.

            **options: As for `election`.

        Raises:
            ConfigurationError: as `locking`.
        """
        from fencing_sdk.recipes.election import as_leader

        check_name(name)
        self.election("checked-when-decorated", **options)

        def decorate(function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R | None]]:
            template = template_for_tasks(name, function, "elected")
            return as_leader(function, lambda args, kwargs: self.election(template.fill(args, kwargs), **options))

        return decorate

    async def drain(self, *, within: Seconds) -> bool:
        """
        Let what runs end, and begin nothing new: the last call before the client is closed.

        Acquisitions that wait leave the line at once. Bodies go on, may acquire more, and are renewed until they end
        or *within* is over. Then they are cancelled, with `LossReason.DRAINED`. Each lock is released after its body.
        All other acquisitions raise `DrainingError`, but not while a body runs, which a task group would cancel.
        A second call may bring the bound forward. No call waits for locks of the calling task, for plain handles that
        are held beyond *within*, or for a body that has not ended five seconds after it was cancelled.

        Args:
            within: Seconds that bodies may take.

        Returns:
            True if every body ended by itself.

        Raises:
            ConfigurationError: *within* is not a valid time.
            UsageError: the client is not open.
        """
        limit, engine = seconds(within, "within"), self._opened()
        engine.check_usable()
        return await engine.drain(limit)

    def draining_on(self, *signals: int, within: Seconds) -> AbstractAsyncContextManager[None]:
        """
        Drain when one of the *signals* comes: ``async with locks, locks.draining_on(SIGTERM, within=25):``.

        A second signal cancels the bodies now; a third does what it did before the block. If the block goes on for a
        second after every lock was released, it is cancelled, unless a server has a handler of its own (uvicorn,
        aiohttp): that handler runs too, and ends the block. After a signal the block swallows the `DrainingError`
        that ends it. For the lifespan of an application and for fixtures there is ``connect(url, drain=25)`` instead.

        Args:
            *signals: Such as ``signal.SIGTERM``. One that is ignored stays ignored.

            within: As for `drain`. Choose less than the platform's patience: 30 s on Kubernetes, 10 s with Docker.

        Raises:
            ConfigurationError: a signal cannot be handled, or *within* is not a valid time.
            UsageError: on entering, the client is not open or this is not the main thread; on leaving, this is
                another task than that which entered.
        """
        from fencing_sdk.recipes.drain_signals import DrainOnSignals, check_signals

        return DrainOnSignals(self._opened, check_signals(signals), seconds(within, "within"))

    @property
    def draining(self) -> bool:
        """True if the client drains, so that nothing new begins. Worker loops should check it."""
        return self._engine is not None and self._engine.draining.begun

    def job(
        self,
        name: str,
        *,
        at_least_for: Seconds,
        at_least_on: AtLeastOn = "success",
        **options: Unpack[LockOptions],
    ) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], JobFunction[P, R]]:
        """
        Decorate a coroutine function that several processes call at the same time, and that one of them should run.

        A call asks for the lock once. It returns `Ran` with the function's value, or `Skipped` when the lock is held.
        After a run that succeeded, the lock stays taken until *at_least_for* seconds after its grant: in the store
        alone, so that it outlives this process. A run that fails releases it at once, so that another process may
        take over. Every call ends with an event `JobEnded`.

        Not promised: exactly once. If the process is killed while the function runs, the lock is free after one ttl,
        and the next call runs the function again.

        Args:
            name: The lock's name, with placeholders for the call's arguments, as for `locking`.

            at_least_for: Seconds from the grant for which no other call gets the lock, at most a day. Make it half
                of the interval between two ticks, and never more than the interval minus the skew of the clocks.

            at_least_on: ``"any"`` keeps the lock after a run that failed, was cancelled or ends the process, too: for
                work that a tick must not begin twice.

            **options: As for `lock`, without ``wait``. ``max_hold`` ends a run that hangs.

        Raises:
            ConfigurationError: at decoration, as for `locking`, or *at_least_for* or *at_least_on* is out of range.
            LeaseLostError: when called: the lease was lost while the function ran, or the store did not confirm
                afterwards that it keeps the lock.
            BackendError, StaleTokenError, UsageError, DrainingError: when called, as `Lock.acquire`: the function was
                not called.
        """
        return job_of(self, name, at_least_for, at_least_on, options).decorate

    def semaphore(self, name: str, *, permits: int, **options: Unpack[LockOptions]) -> Semaphore:
        """
        Describe so many permits of *name*, of which each task holds one; nothing is sent until it is entered.

        Args:
            name: What is shared, such as ``"gpu-pool"``. Use it for this semaphore alone.

            permits: How many may be held at the same time: 1 to 1,000.

            **options: As for `lock`. ``fences`` are raised for ``name/permit``, a resource for each permit.

        Raises:
            ConfigurationError: an argument cannot work.
            UnsupportedError: the backend has no permits.
        """
        from fencing_sdk.recipes.shares import Semaphore, check_permits

        check_shares(self._backend, "semaphores")
        return in_mode(self.lock(name, **options), check_permits(name, permits), Semaphore, "semaphore")

    def rwlock(self, name: str, **options: Unpack[LockOptions]) -> ReadWriteLock:
        """
        Describe two locks on *name*: one that many readers hold together, and one that a writer holds alone.

        Args:
            name: What is protected, such as ``"catalog"``. Use it for this lock alone.

            **options: As for `lock`, for both. Readers may ask for different ttls.

        Raises:
            ConfigurationError: an argument cannot work.
            UnsupportedError: the backend has no readers.
        """
        from fencing_sdk.recipes.shares import ReadWriteLock

        check_shares(self._backend, "read/write locks")
        lock = self.lock(name, **options)
        reader, writer = in_mode(lock, READER, Lock, "reader"), in_mode(lock, WRITER, Lock, "writer")
        return ReadWriteLock(self._namespace, reader, writer)

    async def inspect(self, name: str) -> Holder | None:
        """
        Return the holder of *name*, or None when it is free. An answer may be outdated when it arrives.

        Raises:
            BackendError: the store did not answer, or refused.
            UsageError: the client is not open.
        """
        return await self._opened().inspect(in_namespace(self._namespace, check_name(name)))

    def status(self) -> Status:
        """
        Return the state of this client, for health endpoints. It does not ask the store.

        Do not use leadership as readiness: only one ready process leads.
        """
        if self._engine is None:
            return Status(open=False)
        return self._engine.status(sorted(election.name for election in tuple(self._elections) if election.leading))

    async def all_holders(self, pattern: str = "*") -> AsyncIterator[Holder]:
        """
        Yield the holders of all locks of this store and namespace whose names match, page by page, in any order.

        A lock that is held all the time appears at least once. One that changes hands meanwhile may appear twice, or
        not at all. Readers of one name, and holders of its permits, appear one by one.

        Args:
            pattern: A shell pattern, such as ``report/*`` or ``seats/4?``. The store searches for
                the text before its first ``*``, ``?`` or ``[``.

        Raises:
            ConfigurationError: *pattern* cannot match any name.
            UnsupportedError: the store cannot list.
            BackendError: it did not answer, or refused.
            UsageError: the client is not open.
        """
        backend, engine = self._backend, self._opened()
        namespace = f"{self._namespace}:" if self._namespace else ""
        check_name(pattern, parameter="pattern")
        prefix = namespace + re.split(r"[*?[]", pattern, maxsplit=1)[0]
        cursor: str | None = None
        while True:
            found, cursor = await engine.ask("list", functools.partial(backend.names, prefix, cursor, PAGE))
            asked = [name for name in found if fnmatchcase(name.removeprefix(namespace), pattern)]
            for holder in await engine.holders(*asked):
                yield replace(holder, name=holder.name.removeprefix(namespace))
            if cursor is None:
                return

    async def holders(self, name: str) -> Sequence[Holder]:
        """
        Return all holders of *name*: several if they share it as readers or permits, empty if it is free.

        Raises:
            InvalidNameError: *name* names no lock.
            BackendError: the store did not answer, or refused.
            UsageError: the client is not open.
        """
        engine, store_name = self._opened(), in_namespace(self._namespace, check_name(name))
        return [replace(holder, name=name) for holder in await engine.holders(store_name)]

    async def waiters(self, name: str) -> Sequence[Waiting]:
        """
        Return the waiters for *name*, in the order of the line. An answer may be outdated when it arrives.

        Raises:
            InvalidNameError: *name* names no lock.
            BackendError: the store did not answer, or refused.
            UsageError: the client is not open.
        """
        backend, engine = self._backend, self._opened()
        store_name = in_namespace(self._namespace, check_name(name))
        (seen,) = await engine.ask("list", lambda: backend.tickets((store_name,)))
        return [Waiting(each.holder, each.mode, each.since, each.label) for each in seen if each.token is None]

    async def revoke(self, name: str, *, token: int, reason: str) -> bool:
        """
        Take *name* away from the holder that has this *token*, and pass the *reason* on to it.

        The holder's work is cancelled with `LossReason.REVOKED`: at once where the store pushes, else at the next
        renewal.
        Guards refuse a process that does not hear of it as soon as the next holder has written, because the next token
        is higher. A later holder is never hit: its token differs.

        Args:
            name: The lock's name.

            token: The token of the grant, from `inspect` or `all_holders`. All readers who share it lose the
                lock.

            reason: What the holder finds in the ``detail`` of `LeaseLostError` and in the event `Lost`: up to 200
                printable characters. Not a place for secrets.

        Returns:
            True if the grant was taken away. False if no grant has this token: it was released, has expired, has gone
            to another holder, or never existed.

        Raises:
            InvalidNameError: *name* names no lock.
            ConfigurationError: *token* or *reason* cannot work.
            BackendUnavailableError: the store did not answer; the grant may be over. Look, then try again with the same
                token.
            BackendRefusedError: it refused.
            UsageError: the client is not open.
        """
        backend, engine = self._backend, self._opened()
        store_name = in_namespace(self._namespace, check_name(name))
        number, text = int(check_token(token)), check_reason(reason)
        return await engine.ask("revoke", lambda: backend.end(store_name, number, text))

    async def diagnose(
        self,
        *,
        over: Seconds = _OVER,
        ttl: Seconds = DEFAULT_TTL,
        other: LockClient | None = None,
        guards: Sequence[Guard] = (),
    ) -> Diagnosis:
        """
        Check whether this process and its store keep the promises: ``fencing doctor`` as a function.

        It takes, hands on and releases a scratch lock, and renews it ten times a second. It reports no event. The store
        may be down, slow or read-only: that is a finding. The client need not be open; close one that was not
        afterwards.

        Args:
            over: Seconds for which pauses and renewals are measured, at most an hour. The store's settings and the
                self-test take a second or so more, and at most a minute if the store does not answer.

            ttl: Seconds of the locks in use, by which the measurements are judged.

            other: A second client of the same store, to which the self-test hands the lock on. Without it, two owners
                on one connection do.

            guards: Guards that the self-test examines, with tokens of its own. It raises one fence in each, that of a
                scratch resource, and none that protects data, as ``fences`` of a lock do.

        Returns:
            The findings, the worst first, and the timing of a lock that fits what was measured.

        Raises:
            ConfigurationError: an argument cannot work.
        """
        from fencing_sdk.diagnosis import examine

        second: object = self if other is None else other
        if not isinstance(second, LockClient):
            msg = f"other must be a second client of the same store, not {shown(other)}"
            raise ConfigurationError(msg)
        return await examine(
            self._backend,
            other=None if other is None else second._backend,  # noqa: SLF001  (of the same class)
            guards=check_guards(guards),
            namespace=self._namespace,
            over=seconds(over, "over", high=_LONGEST_DIAGNOSIS),
            ttl=check_ttl(ttl),
        )


async def enter(client: LockClient, *, lazily: bool) -> None:
    """Do what ``async with`` does first, or leave the store to the first call. For this package alone."""
    await client._enter(lazily=lazily)  # noqa: SLF001


def job_of(client: LockClient, name: str, at_least_for: Seconds, at_least_on: AtLeastOn, options: LockOptions) -> Job:
    """Describe a job of *client*. For this package alone."""
    from fencing_sdk.recipes.jobs import Job

    return Job(
        client.lock,
        client._observers,  # noqa: SLF001
        client._clock,  # noqa: SLF001
        name=name,
        at_least_for=at_least_for,
        at_least_on=at_least_on,
        label=client._label,  # noqa: SLF001
        options=options,
    )


def drain_of(client: LockClient) -> float | None:
    """Return the seconds for which closing *client* lets bodies go on. For this package alone."""
    return client._drain  # noqa: SLF001  (the one door to it)


def on_clock(client: LockClient, clock: Clock) -> LockClient:
    """Have *client* measure its leases by *clock*, without the thread that looks for stalls. For simulations alone."""
    client._clock, client._watch_stalls = clock, False  # noqa: SLF001  (no option: users have one clock)
    return client


async def reach(client: LockClient) -> None:
    """Wait for the store of *client*, which was entered lazily, as ``async with`` does. For this package alone."""
    if client._open_wait is not None:  # noqa: SLF001
        await client._opened().opening.wait()  # noqa: SLF001


def engine_of_client(client: LockClient) -> Engine:
    """Return what keeps the leases of *client*, which is open. For this package alone."""
    return client._opened()  # noqa: SLF001  (the one door to it)


def draining_of(client: LockClient) -> Draining:
    """Return the drain of *client*, which is open. For this package alone."""
    return engine_of_client(client).draining
