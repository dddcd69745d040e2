"""
What a client runs while it is open: one heartbeat, the calls to its store, and every lease from grant to release.

An engine belongs to one event loop and is never used again after `aclose`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from typing import Any, TypeVar

from fencing_sdk._engine.acquisition import AcquireResult, Acquisition
from fencing_sdk._engine.draining import Draining, work_of
from fencing_sdk._engine.heartbeat import Heartbeat
from fencing_sdk._engine.lifetime import BackendOpening, Closing
from fencing_sdk._engine.observer_reports import LeaseReport
from fencing_sdk._engine.posted_requests import Flight, granted
from fencing_sdk._engine.releases import Parking, Releases
from fencing_sdk._engine.store_calls import StoreCalls
from fencing_sdk._engine.terms import Fences, Terms, raise_all, share_out
from fencing_sdk._lease import Lease, PermitLease, waiting_thread
from fencing_sdk._lease_state import LeaseState
from fencing_sdk._values.claim import LOCK, Claim, Grant, Holder
from fencing_sdk._values.clock import Clock
from fencing_sdk._values.loop_owner import loop_of, running_loop
from fencing_sdk._values.observers import Observers, logger
from fencing_sdk._values.reports import Status
from fencing_sdk._values.tasks import retrieve, scope_class
from fencing_sdk._values.timing import Timing
from fencing_sdk.abc import Backend, SupportsLossNotice, SupportsShares
from fencing_sdk.abc._powers import PostOutcome
from fencing_sdk.errors import BackendError, DrainingError, LossReason, NotAcquiredReason, StaleTokenError, UsageError

_T = TypeVar("_T")
_CALL_LIMIT = 5.0
"""Seconds for inspecting and closing a backend."""


class Engine:
    """The running part of one client. It is the keeper of its leases."""

    def __init__(
        self, backend: Backend, clock: Clock, observers: Observers, *, watch_stalls: bool, open_wait: float = 0.0
    ) -> None:
        self._loop = running_loop()
        self._backend_loop = loop_of(backend)
        self._backend_owner = self._backend_loop.enter(backend)
        scope_class()  # the first anyio call imports a backend for 0.1 s: now, not during the first lease
        self._backend = backend
        self._clock = clock
        self._observers = observers
        self._report = LeaseReport(observers, clock)
        self._pid = os.getpid()
        self._store_calls = StoreCalls(backend, clock)
        self.opening = BackendOpening(backend, clock, self._store_calls, open_wait)
        self._heartbeat = Heartbeat(backend, clock, self._store_calls, observers, watch_stalls=watch_stalls)
        self._beating: asyncio.Task[None] | None = None
        self._stop_notices: Callable[[], object] = lambda: None
        self._releases = Releases(self._heartbeat, self._store_calls, clock, self._report)
        self._closing = Closing(self._releases.unreleased)
        self.draining = Draining(self._releases)

    def __len__(self) -> int:
        return len(self._heartbeat)

    async def start(self, *, lazily: bool = False) -> None:
        """
        Open the backend and start the heartbeat. Started *lazily*, the first call opens the backend.

        Raises:
            BackendError, UsageError: as `BackendOpening.wait`.
        """
        if not lazily:
            await self.opening.wait()
        if isinstance(self._backend, SupportsLossNotice):
            self._stop_notices = self._backend.on_loss(self._on_loss)
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
        self.draining.check(terms)

    async def hold(self, terms: Terms, fences: Fences) -> Lease:
        """
        Acquire a lease that is renewed from now on, with every fence raised.

        There are three cases:

        1. One post is answered by a grant that can be used: nearly always. All of it stands here.
        2. It is answered by anything else, or not in time: an `Acquisition` goes on with what became of it.
        3. No post can ask for this, the backend takes none, or it is not open yet: an `Acquisition` does all of it.
        """
        if running_loop() is not self._loop or not self._may_begin:
            await self._begin_late(terms)
        if fences:
            terms, fences = share_out(self._backend, terms, fences)
        posts = self._store_calls.posts
        if posts is None or not self.opening.over or terms.fences or terms.mode is not LOCK:
            lease = self._begin(terms.name, *await self._acquire(terms))
        else:
            claim, sent_at = terms.claim(), self._clock.now()
            if self._report.observed:
                self._report.acquiring(terms.name, claim, sent_at)
            flight = posts.acquire(claim, sent_at, terms.limit(sent_at, sent_at))
            if flight.waiter is not None:
                self.draining.waiting[flight] = work_of(terms)
                try:
                    await flight.waiter
                except BaseException as error:
                    self._acquisition(terms, flight).abandon(error)  # which knows how to take the request back
                    raise
                finally:
                    self.draining.waits_no_more(flight)
            grant, now = granted(flight), self._clock.now()
            if grant is None or now >= terms.timing.deadline(sent_at) or not self._may_begin:
                lease = self._begin(terms.name, *await self._acquire(terms, flight))
            else:
                lease = self._begin(terms.name, claim, grant, terms.timing, sent_at, now - sent_at)
        if fences or terms.fences:
            await self._raise_all(lease, terms, fences)
        return Lease(lease) if lease.permit is None else PermitLease(lease)

    async def _begin_late(self, terms: Terms) -> None:
        """Let a body begin while the client drains, and raise for all others."""
        try:
            self._check_may_begin(terms)
        except DrainingError:
            await asyncio.sleep(0)  # tasks run, although the caller may ask again at once
            await self.draining.let_bodies_end()
            raise

    async def _raise_all(self, lease: LeaseState, terms: Terms, apart: Fences) -> None:
        try:
            await raise_all(lease, terms, apart, self._report)
            self.draining.check(terms)
        except BaseException as error:
            await self.release(lease)
            if isinstance(error, DrainingError):
                await self.draining.let_bodies_end()
            raise

    async def _acquire(self, terms: Terms, flight: Flight | None = None) -> AcquireResult:
        try:
            return await self._ask(terms, flight)
        except DrainingError:
            await self.draining.let_bodies_end()
            raise

    async def _ask(self, terms: Terms, flight: Flight | None) -> AcquireResult:
        acquisition = self._acquisition(terms, flight)
        self.draining.waiting[acquisition] = work_of(terms)
        try:
            if flight is not None:
                self._check_goes_on(terms, acquisition)
            result = await acquisition.run()
        finally:
            self.draining.waits_no_more(acquisition)
        try:
            self._check_may_begin(terms)
        except (UsageError, DrainingError) as error:
            closed = isinstance(error, UsageError)
            acquisition.undo(result, NotAcquiredReason.CLOSED if closed else NotAcquiredReason.DRAINING)
            raise
        return result

    def _check_goes_on(self, terms: Terms, acquisition: Acquisition) -> None:
        try:
            self._check_may_begin(terms)
        except (UsageError, DrainingError) as error:
            acquisition.abandon(error)
            raise

    def _acquisition(self, terms: Terms, flight: Flight | None) -> Acquisition:
        calls, opening = self._store_calls, self.opening
        return Acquisition(self._backend, self._clock, calls, opening, self._observers, terms, flight)

    def _begin(  # noqa: PLR0917  (what a lease is made of)
        self,
        name: str,
        claim: Claim,
        grant: Grant,
        timing: Timing,
        sent_at: float,
        waited: float,
        unanswered_calls: tuple[asyncio.Future[Any], ...] = (),
    ) -> LeaseState:
        deadline = timing.deadline(sent_at)
        lease = LeaseState(name, claim, grant.token, deadline, timing, self._clock, self, grant.permit)
        if (thread := waiting_thread()) is not None and thread.in_transactions:
            lease.older_transactions = thread.in_transactions
        lease.unanswered_calls = unanswered_calls  # before an observer hears of the lease, and may close the client
        self._heartbeat.add(lease, sent_at)
        if self._report.observed:
            self._report.acquired(lease, waited)
        return lease

    async def drain(self, within: float) -> bool:
        """Begin nothing new, and wait until every lock was released; return whether every body ended by itself."""
        self.draining.begin(within)
        return await self.draining.wait()

    async def inspect(self, name: str) -> Holder | None:
        """Ask the store who holds *name*."""
        return await self.ask("inspect", lambda: self._backend.inspect(name))

    async def holders(self, name: str) -> Sequence[Holder]:
        """Ask the store for all who hold *name*."""
        backend = self._backend
        assert isinstance(backend, SupportsShares)  # looked at when the recipe was described
        return await self.ask("inspect", lambda: backend.holders(name))

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
        return await self._store_calls.ask(operation, call, _CALL_LIMIT)

    async def renew(self, lease: LeaseState) -> None:
        """Renew one lease now."""
        self.check_usable()
        await self._heartbeat.renew_now(lease)

    async def release(self, lease: LeaseState) -> None:
        """
        Release *lease* once, for a bounded time, whatever cancels the caller; park a lock that has to stay taken.

        The wait for a posted release has no shield. If the caller is cancelled, `Releases.finish` goes on, shielded.

        Raises:
            LeaseLostError: the store did not confirm that it keeps it.
        """
        if lease.keep_for and lease.kept:
            await self.park(lease, lease.keep_for)
        if lease.pid != os.getpid() or not lease.mark_released() or not self._releases.take(lease):
            await self._releases.finish_behind(lease)  # in a forked child the lock belongs to its parent
        else:
            await self._return(lease)

    async def _return(self, lease: LeaseState) -> None:
        if self._closing.begun:
            self._closing.look_again()
        flight, cancelled = self._releases.post(lease), None
        if flight is not None and flight.waiter is not None:
            try:
                await flight.waiter
            except asyncio.CancelledError as error:
                cancelled = error
            except BaseException:
                self._releases.report_when_done(lease, self._releases.send(lease, flight))
                raise
        if flight is not None and flight.outcome is PostOutcome.RELEASED:
            self._releases.report_end(lease, confirmed=True)
        else:
            await self._releases.finish(lease, flight)
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
            self._closing.look_again()
            await self._releases.park(lease, parking, lease.timing.ttl if within is None else within)

    def _parking(self, lease: LeaseState, seconds: float) -> Parking:
        return Parking(self._backend, self._store_calls, self._clock, lease, lease.acquired_at + seconds)

    def lost(self, lease: LeaseState, reason: LossReason) -> None:
        """A lease was lost."""
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

    def _on_loss(self, claim: Claim, reason: LossReason, detail: str = "") -> None:
        lease = self._heartbeat.find(claim)
        if lease is not None:
            lease.lose(reason, detail)

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
        await self._closing.wait()

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
            self._leave_dead_loop()
        try:
            if drain is not None and not self._closing.begun and self._beating is not None:
                await self.drain(drain)
        finally:
            await self._closing.join(self._close)

    def _leave_dead_loop(self) -> None:
        """Close in the running loop. The old one is closed, so none of its tasks goes on, not even a closing."""
        if not self._loop.is_closed():
            msg = "this client was opened in another event loop, which still exists; close it there"
            raise UsageError(msg)
        self._loop = running_loop()
        self._store_calls = StoreCalls(self._backend, self._clock)
        self._releases.store_calls = self._store_calls
        self._closing = Closing(self._releases.unreleased)
        self._beating = None

    async def _close(self) -> None:
        """Take every step, although the one before it failed or was cancelled by a loop that shuts down."""
        async with contextlib.AsyncExitStack() as steps:
            steps.callback(self._backend_loop.leave, self._backend_owner)
            steps.push_async_callback(self._close_backend)
            steps.callback(self._releases.report_ends)
            steps.push_async_callback(self._store_calls.aclose, _CALL_LIMIT)
            steps.push_async_callback(self._end_heartbeat)
            self._heartbeat.lose_all(LossReason.CLOSED)
            self._stop_notices()
            self.draining.stop()
            held_by_bodies = await self._closing.await_bodies(_CALL_LIMIT)
            self._releases.release_all(but=held_by_bodies)

    async def _end_heartbeat(self) -> None:
        if self._beating is not None and not self._beating.done():
            self._beating.cancel()
            await asyncio.wait((self._beating,), timeout=_CALL_LIMIT)
        self._heartbeat.stop_watching()

    async def _close_backend(self) -> None:
        try:
            await self._store_calls.ask("close", self._backend.aclose, _CALL_LIMIT)
        except BackendError as error:
            logger.warning("closing the backend failed: %s", error)  # without its cause, whose text may hold a URL
        except Exception as error:  # noqa: BLE001  (closing must not replace the error of the user's body)
            logger.warning("closing the backend failed", exc_info=error)
