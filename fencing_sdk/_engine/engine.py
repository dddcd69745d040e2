"""
The running part of an open client: one heartbeat, the calls to its store, and every lease from grant to release.

An engine belongs to one event loop and is never used again after `aclose`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import Context
from typing import Any, TypeVar

from fencing_sdk._engine.acquisition import Acquisition, BackendOpening, HeldTicket, Terms, closed_meanwhile
from fencing_sdk._engine.draining import Draining, work_of
from fencing_sdk._engine.hand_over import HandOver
from fencing_sdk._engine.heartbeat import Heartbeat
from fencing_sdk._engine.observer_reports import LeaseReport
from fencing_sdk._engine.releases import Parking, Releases
from fencing_sdk._engine.store_calls import StoreCalls, backend_name
from fencing_sdk._lease import Lease, PermitLease, waiting_thread
from fencing_sdk._lease_state import LeaseState
from fencing_sdk._lease_ticket import LeaseTicket
from fencing_sdk._values.answer import Answer, succeeded
from fencing_sdk._values.claim import Holder, holders_in
from fencing_sdk._values.clock import Clock
from fencing_sdk._values.loop_owner import loop_of, no_task, running_loop
from fencing_sdk._values.observers import Observers, logger
from fencing_sdk._values.reports import Status
from fencing_sdk._values.tasks import move_on_after, outlast_cancellation, retrieve, scope_class
from fencing_sdk.abc import Backend, Guard
from fencing_sdk.errors import (
    AcquireError,
    BackendError,
    BackendUnavailableError,
    DrainingError,
    LossReason,
    NotAcquiredReason,
    StaleTokenError,
    TicketRefusedError,
    UsageError,
)

_T = TypeVar("_T")
_CALL_LIMIT = 5.0
"""Seconds for inspecting and closing a backend."""

Fences = Sequence[tuple[Guard, str | None]]
"""Guards to raise at acquisition, each with its resource; None means the resource is named like the lock."""


class Engine:
    """The running part of one client. It is the keeper of its leases."""

    def __init__(
        self, backend: Backend, clock: Clock, observers: Observers, *, watch_stalls: bool, open_wait: float = 0.0
    ) -> None:
        self._loop = running_loop()
        if asyncio.current_task() is None:
            raise no_task()
        self._backend_loop = loop_of(backend)
        self._backend_owner = self._backend_loop.enter(backend)
        self._backend = backend
        self._clock = clock
        self._observers = observers
        self._report = LeaseReport(observers, clock)
        self._pid = os.getpid()
        self._store_calls = StoreCalls(backend, clock)
        self.opening = BackendOpening(backend, clock, self._store_calls, open_wait)
        self._heartbeat = Heartbeat(backend, clock, self._store_calls, observers, watch_stalls=watch_stalls)
        self._beating: asyncio.Task[None] | None = None
        self._releases = Releases(self._heartbeat, self._store_calls, clock, self._report)
        self._closing = Closing(self._releases.unreleased)
        self.draining = Draining(self._releases)
        self.hand_over = HandOver(backend, clock, self._releases, self.ask)

    def __len__(self) -> int:
        return len(self._heartbeat)

    async def start(self, *, lazily: bool = False) -> None:
        """
        Open the backend and start the heartbeat. Started *lazily*, the first call opens the backend.

        Raises:
            BackendError, UsageError: as `BackendOpening.wait`.
        """
        if not lazily:
            scope_class()
            await self.opening.wait()
        self._beating = self._loop.create_task(self._heartbeat.run(), context=Context(), name="fencing-heartbeat")
        self._beating.add_done_callback(retrieve, context=Context())

    def check_usable(self) -> None:
        """
        Raise if no lease can be kept here.

        Raises:
            UsageError: another event loop or none, a client that is closed or still opens, or a failed heartbeat.
        """
        if self._pid != os.getpid():
            msg = "this client was opened before a fork and belongs to the parent; enter it again here: async with"
            raise UsageError(msg)
        if running_loop() is not self._loop:
            msg = "this client was opened in another event loop; open one client for each loop"
            raise UsageError(msg)
        if self._closing.begun:
            msg = "this client is closed; enter it again"
            raise UsageError(msg)
        if self._beating is None:
            msg = "this client is still opening; enter it first, and use it when that is done"
            raise UsageError(msg)
        if self._beating.done():
            msg = "the heartbeat of this client failed, so it cannot keep a lease; close it and open it again"
            raise UsageError(msg) from self._heartbeat.failure

    @property
    def _may_begin(self) -> bool:
        beating = self._beating is not None and not self._beating.done()
        return beating and not self._closing.begun and not self.draining.begun and self._pid == os.getpid()

    def _check_may_begin(self, terms: Terms) -> None:
        self.check_usable()
        if asyncio.current_task() is None:
            raise no_task()
        self.draining.check(terms)

    async def hold(self, terms: Terms, fences: Fences) -> Lease:
        """Acquire a lease that is renewed from now on, with every fence raised."""
        try:
            if running_loop() is not self._loop or asyncio.current_task(self._loop) is None or not self._may_begin:
                try:
                    self._check_may_begin(terms)  # a body may begin more while the client drains
                except DrainingError:
                    await asyncio.sleep(0)  # tasks run, although the caller may ask again at once
                    raise
            acquisition = Acquisition(
                self._backend, self._clock, self._store_calls, self.opening, self._heartbeat, self._observers, terms
            )
            acquired = acquisition.begin()
            if acquired is None:
                self.draining.waiting[acquisition] = work_of(terms)
                try:  # here and in no other coroutine: most acquisitions end with the first answer
                    if (answer := acquisition.first_answer()) is not None:
                        try:
                            await answer.waiter()
                        except BaseException as error:
                            acquisition.end_by(error)
                            raise
                        acquired = acquisition.take_first_answer()
                    if acquired is None:
                        acquired = await acquisition.run()
                finally:
                    self.draining.waits_no_more(acquisition)
                self._check_may_go_on(acquisition, acquired, terms)
            elif self._report.observed:  # which may have begun to drain or to close the client
                self._check_may_go_on(acquisition, acquired, terms)
            lease = self._begin(terms, acquired)
            if fences:
                await self._raise_fences(lease, terms, fences)
        except (DrainingError, TicketRefusedError) as error:
            raise await self._refused(terms, error) from None
        return terms.handle(lease) if lease.permit is None else PermitLease(lease)

    async def _refused(self, terms: Terms, error: DrainingError | TicketRefusedError) -> AcquireError:
        """Return what to raise instead of *error*, now or when bodies have ended."""
        if terms.resumes is not None and isinstance(error, TicketRefusedError):
            return await self.hand_over.explained(terms.resumes, error)
        await self.draining.let_bodies_end()
        return error

    def _check_may_go_on(self, acquisition: Acquisition, acquired: HeldTicket, terms: Terms) -> None:
        if not self._may_begin:
            try:
                self._check_may_begin(terms)
            except (UsageError, DrainingError) as error:
                closed = isinstance(error, UsageError)
                acquisition.undo(acquired, NotAcquiredReason.CLOSED if closed else NotAcquiredReason.DRAINING)
                raise closed_meanwhile(terms.name) if self._closing.begun else error  # noqa: B904  (the same)

    async def _raise_fences(self, lease: LeaseState, terms: Terms, fences: Fences) -> None:
        """
        Raise the *fences*, one after the other; if one fails, release the lease.

        A guard is asked twice within what the lease is worth, as the first answer may be lost: to raise a fence twice
        is to raise it once.

        Raises:
            StaleTokenError: a resource has seen a later token.
            BackendUnavailableError: a guard did not answer, and the lease goes on.
            LeaseLostError: the lease is over.
            DrainingError: the client began to drain.
            Exception: what a guard raised.
        """
        try:
            for guard, name in fences:
                resource, token, worth = lease.resource(name or lease.name), lease.token, lease.remaining
                for _ in range(2):
                    with move_on_after(worth / 2):
                        await guard.raise_to(resource, token)
                        break
                else:
                    lease.check()
                    detail = f"no answer within {worth:.3g} s"
                    raise BackendUnavailableError(backend_name(guard), "raise_to", detail)  # noqa: TRY301
                lease.check()
                self._report.fence_raised(lease, resource, token)
            self.draining.check(terms)
        except BaseException as error:
            if isinstance(error, StaleTokenError):
                self._report.stale(lease, error)
            await self.release(lease)
            raise

    def _begin(self, terms: Terms, acquired: HeldTicket) -> LeaseState:
        ticket, place, timing, deadline, renew_at, waited, unanswered = acquired
        assert place.token is not None  # it holds
        name = terms.name if place.name is None else place.name
        lease = LeaseState(name, ticket.claim, place.token, deadline, timing, self._clock, self, place.permit)
        if (thread := waiting_thread()) is not None and thread.in_transactions:
            lease.older_transactions = thread.in_transactions
        lease.unanswered_calls = unanswered  # before an observer hears of it, and may close the client
        lease.ticket, ticket.lease = ticket, lease
        if terms.resumes is not None:
            lease.resumed_from = terms.resumes.holder
        self._heartbeat.add(lease, renew_at)
        if self._report.observed:
            self._report.acquired(lease, waited)
        return lease

    async def drain(self, within: float) -> bool:
        """Begin nothing new, and wait until every lock was released; return whether every body ended by itself."""
        self.draining.begin(within)
        return await self.draining.wait()

    async def inspect(self, name: str) -> Holder | None:
        """Ask the store who holds *name*: the one whose ticket lives longest, if several do."""
        return max(await self.holders(name), key=lambda holder: holder.remaining, default=None)

    def look_again(self, name: str) -> None:
        """Let the first waiter for *name* ask now, at a store without a line."""
        self._store_calls.look_again(name)

    async def holders(self, *names: str) -> Sequence[Holder]:
        """Ask the store for all who hold the *names*, of each in the order of their permits, or of their tokens."""
        found = await self.ask("inspect", lambda: self._backend.tickets(names))
        lines = self._backend.rings
        return [
            holder for name, seen in zip(names, found, strict=True) for holder in holders_in(name, seen, lines=lines)
        ]

    def status(self, leader_of: Sequence[str]) -> Status:
        """Return the state of the client, without asking the store."""
        here = self._pid == os.getpid()
        usable = here and self._beating is not None and not self._beating.done() and not self._closing.begun
        return self._heartbeat.status(leader_of, usable=usable, draining=self.draining.begun)

    async def ask(self, operation: str, call: Callable[[], Awaitable[_T]]) -> _T:
        """Make one call to the store that is about no lease of ours."""
        self.check_usable()
        if not self.opening.over:
            await self.opening.wait()
        return await self._store_calls.ask(operation, call(), _CALL_LIMIT)

    async def renew(self, lease: LeaseState) -> None:
        """Renew one lease now."""
        self.check_usable()
        await self._heartbeat.renew_now(lease)

    async def release(self, lease: LeaseState) -> None:
        """
        Release *lease* once, for a bounded time, whatever cancels the caller; park a lock that has to stay taken.

        The wait for the first answer has no shield. If the caller is cancelled, `Releases.finish` goes on, shielded.

        Raises:
            LeaseLostError: the store did not confirm that it keeps it.
        """
        if lease.keep_for and lease.kept:
            await self.park(lease, lease.keep_for)
        if lease.pid != os.getpid() or not lease.mark_released() or not self._releases.take(lease):
            await self._releases.finish_behind(lease)  # in a forked child the lock belongs to its parent
            return
        if self._closing.begun:
            self._closing.changed.set()
        sent_at, cancelled = self._clock.now(), None
        first = self._releases.send_first(lease)
        if isinstance(first, Answer) and not first.done():
            try:
                await first.waiter()
            except asyncio.CancelledError as error:
                cancelled = error
            except BaseException:
                self._releases.report_when_done(lease, self._releases.send(lease, first))
                raise
        if first is not None and succeeded(first) and first.result() is None:
            self._releases.report_end(lease, confirmed=True)
        else:
            await self._releases.finish(lease, first, sent_at)
        if cancelled is not None:
            raise cancelled

    async def park(self, lease: LeaseState, seconds: float, within: float | None = None) -> None:
        """
        End *lease*, and let the store keep the lock until *seconds* after its grant; shielded, and bounded by *within*.

        Raises:
            LeaseLostError: the lease is over; or the store did not confirm it in time, or refused.
        """
        lease.check()
        parking = self._parking(lease, seconds)
        lease.mark_released()  # before the store shortens the ttl: the deadline comes from the longer one
        if self._releases.take(lease):
            self._closing.changed.set()
            await self._releases.park(lease, parking, lease.timing.ttl if within is None else within)

    async def detach(self, lease: LeaseState, keep: float, ticket: LeaseTicket | None = None) -> LeaseTicket:
        """End *lease*, and return the ticket for which the store keeps the lock: see `HandOver.detach`."""
        ticket = await self.hand_over.detach(lease, keep, ticket)
        self._closing.changed.set()
        return ticket

    async def release_ticket(self, ticket: LeaseTicket) -> None:
        """Give back what *ticket* stands for."""
        await self.hand_over.release(ticket)

    def _parking(self, lease: LeaseState, seconds: float) -> Parking:
        return Parking(self._store_calls, self._clock, lease, lease.acquired_at + seconds)

    def lost(self, lease: LeaseState, reason: LossReason) -> None:
        """Report that *lease* was lost."""
        self._heartbeat.report_lost(lease, reason)
        if lease.held_to_the_end:  # nothing stops its work, which may hang
            self.abandon(lease)

    def stale(self, lease: LeaseState, error: StaleTokenError) -> None:
        """Report to the observers that a guard refused a write made under *lease*."""
        self._report.stale(lease, error)

    def abandon(self, lease: LeaseState) -> None:
        """Release a lease whose holder can no longer release it: its handle or its task is gone."""
        lease.forget_scope()
        parking = self._parking(lease, lease.keep_for) if lease.kept else None
        lease.mark_released()  # a renewal on its way, which finds the lock free, is not a loss
        self._releases.release_behind(lease, parking)

    @property
    def closed(self) -> bool:
        """True if nothing of this engine runs."""
        return self._closing.over

    async def wait_closed(self) -> None:
        """
        Wait for the end of a closing that has begun.

        Raises:
            UsageError: it has not begun, or goes on in another event loop.
        """
        elsewhere = running_loop() is not self._loop
        if elsewhere and self._loop.is_closed():
            msg = "this client was left open in an event loop that is gone; close it first: await client.aclose()"
            raise UsageError(msg)
        if elsewhere and not self._closing.begun:
            msg = (
                "this client is open in another event loop, and a client belongs to one loop: "
                "let each thread that runs a loop open a client of its own: async with connect(...)"
            )
            raise UsageError(msg)
        if not self._closing.begun:
            msg = "this client is open already; enter it once and share it between tasks"
            raise UsageError(msg)
        if elsewhere:
            msg = "this client is still being closed in another event loop; open one client for each loop"
            raise UsageError(msg)
        await self._closing.ended.wait()

    async def aclose(self, *, drain: float | None = None) -> None:
        """
        End every lease, release what can be released, and close the backend. Bounded.

        Before that, *drain* lets bodies go on for at most so many seconds. A caller that is cancelled meanwhile
        begins to close at once.

        Every caller waits for the end of the same closing, also one that is cancelled meanwhile.
        Nothing is done in a forked child, whose parent goes on with all of it.

        Raises:
            UsageError: the event loop that opened the client runs elsewhere.
        """
        if self._pid != os.getpid():
            self._closing.over = True
        if self._closing.over:
            return
        if running_loop() is not self._loop:
            if not self._loop.is_closed():
                msg = "this client was opened in another event loop, which still exists; close it there"
                raise UsageError(msg)
            self._loop = running_loop()  # no task of the old one goes on, not even a closing
            self._releases.store_calls = self._store_calls = StoreCalls(self._backend, self._clock)
            self._closing = Closing(self._releases.unreleased)
            self._beating = None
            for ticket in self._heartbeat.forget_waiting():  # no task will give it back
                ticket.close()
                self._store_calls.undo(ticket.claim, [], _CALL_LIMIT)
        try:
            if drain is not None and not self._closing.begun and self._beating is not None:
                await self.drain(drain)
        finally:
            await self._closing.join(self._close)

    async def _close(self) -> None:
        """Take every step, although the one before it failed or was cancelled by a loop that shuts down."""
        async with contextlib.AsyncExitStack() as steps:
            steps.callback(self._backend_loop.leave, self._backend_owner)
            steps.push_async_callback(self._close_backend)
            steps.callback(self._releases.report_ends)
            steps.push_async_callback(self._store_calls.aclose, _CALL_LIMIT)
            steps.push_async_callback(self._end_heartbeat)
            self._heartbeat.lose_all(LossReason.CLOSED)
            self.draining.stop()
            held_by_bodies = await self._closing.await_bodies(_CALL_LIMIT)
            self._releases.release_all(but=held_by_bodies)

    async def _end_heartbeat(self) -> None:
        if self._beating is not None and not self._beating.done():
            self._beating.cancel()
            await asyncio.wait((self._beating,), timeout=_CALL_LIMIT)
        self._heartbeat.log.stop()

    async def _close_backend(self) -> None:
        try:
            await self._store_calls.ask("close", self._backend.aclose(), _CALL_LIMIT)
        except BackendError as error:
            logger.warning("closing the backend failed: %s", error)  # without its cause, whose text may hold a URL
        except Exception as error:  # noqa: BLE001  (closing must not replace the error of the user's body)
            logger.warning("closing the backend failed", exc_info=error)


class Closing:
    """
    The end of a client: once, in a task of its own, however many callers ask for it.

    A caller that is cancelled meanwhile still waits for the end, which is bounded, and raises its cancellation
    afterwards: half a closing would leave the heartbeat, a thread and connections behind.
    """

    def __init__(self, unreleased: Mapping[str, LeaseState]) -> None:
        self.begun = False
        self.over = False
        self._unreleased = unreleased
        self.ended = asyncio.Event()
        self.changed = asyncio.Event()
        """Set when a lease was released, or when a body closes the client itself."""
        self._callers: set[asyncio.Task[Any] | None] = set()
        self._task: asyncio.Task[None] | None = None

    async def join(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """
        Have *close* run unless it does already, and wait for its end.

        Raises:
            asyncio.CancelledError: the caller was cancelled while it waited. The closing has ended all the same.
        """
        self._callers.add(asyncio.current_task())
        self.changed.set()
        if not self.begun:
            self.begun = True  # before the task: an eager one runs observers, and those may close the client too
            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._run(close), context=Context(), name="fencing-closing")
        cancelled = await outlast_cancellation(self.ended.wait, lambda: self.over)
        if cancelled is not None:
            raise cancelled
        if self._task is not None and not self._task.cancelled():
            self._task.result()

    async def _run(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await close()
        finally:
            self.over = True
            self.ended.set()

    async def await_bodies(self, limit: float) -> frozenset[str]:
        """
        Let the bodies that were cancelled end and release their locks; return the owners whose body did not.

        Their locks are left to the ttl: released, another client could hold one while the body goes on.
        """
        if self._inside():
            with move_on_after(limit):
                while self._inside():
                    self.changed.clear()
                    await self.changed.wait()
        return self._inside()

    def _inside(self) -> frozenset[str]:
        """Return the owners of leases inside ``async with``, except those of tasks that wait for this closing."""
        return frozenset(
            owner
            for owner, lease in self._unreleased.items()
            if (task := lease.task) is not None
            and task not in self._callers
            and not task.done()
            and not task.get_loop().is_closed()
        )
