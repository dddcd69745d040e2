"""
Waits for a ticket that holds, and undoes itself when the caller gives up.

Patience, back-off, and the meaning of a request without an answer live here. A backend tries exactly
once; this is the only place that draws again. A draw has four outcomes:

1. The ticket holds, and can still be used: the acquisition ends.
2. It waits: the heartbeat keeps it, and its bell, or the answer of a keep, says when it holds. One that died meanwhile
   is drawn again. A store without a line answers `Busy`, and is asked again after a pause.
3. The store gave no answer: the outcome is unknown. The owner is made before the first request and stays
   the same, so another draw finds a ticket whose answer was lost. The first request of all opens the connection.
4. The patience is over, or the caller was cancelled: the ticket, or what a request without an answer may still draw, is
   given back in the background, at once, and again when the request can no longer arrive.

A drain (`interrupt`), the closing of the client and the caller's cancellation end the wait.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import tenacity

from fencing_sdk._engine.heartbeat import SILENT, Heartbeat
from fencing_sdk._engine.observer_reports import report_beginning, report_end
from fencing_sdk._engine.store_calls import StoreCalls, backend_name
from fencing_sdk._engine.ticket import SHORTEST_PAUSE, Ticket
from fencing_sdk._lease import AnyLease, Lease
from fencing_sdk._lease_state import LeaseState
from fencing_sdk._lease_ticket import LeaseTicket, claim_of
from fencing_sdk._values.answer import Answer, Call, succeeded
from fencing_sdk._values.claim import LOCK, Busy, Claim, Gone, Mode, Place, mistake_in
from fencing_sdk._values.clock import JITTER, Clock, wall_seconds
from fencing_sdk._values.observers import Observers, logger
from fencing_sdk._values.reports import label_of
from fencing_sdk._values.tasks import scope_class, waiting_for
from fencing_sdk._values.timing import Timing
from fencing_sdk.abc import Backend, PassesOn, SupportsOpen
from fencing_sdk.errors import (
    AcquireTimeoutError,
    BackendError,
    BackendRefusedError,
    BackendUnavailableError,
    ConfigurationError,
    DrainingError,
    LockHeldError,
    LossReason,
    NotAcquiredReason,
    TicketRefusedError,
    UsageError,
    shown,
)

_LONGEST_PAUSE = 5.0
"""Seconds between the tries of a waiter that is not woken, whatever the store advises."""
_POLL_AFTER = 0.3, 0.6
"""Seconds up to which the default pauses grow at a store without a line: a longer wait is no reason to ask less."""
_OPENING_LIMIT = 5.0
"""Seconds that one try to open the backend may take."""

Backoff = Callable[[tenacity.RetryCallState], float]
"""A tenacity wait strategy: ``wait_exponential(...) + wait_random(...)``, or any callable like one."""

DEFAULT_BACKOFF: Backoff = tenacity.wait_random_exponential(multiplier=0.05, max=1.0)
NO_FENCES: tuple[()] = ()

_LAST_CALL = 2.0
"""Seconds that a request may take although the patience ends meanwhile."""


class Tries:
    """The tries of one caller, as a tenacity wait strategy sees them."""

    __slots__ = ("_backoff", "_state")

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._state = tenacity.RetryCallState(tenacity.AsyncRetrying(wait=backoff), None, (), {})

    def pause_after(self, error: Exception) -> float:
        """Seconds until the next try, after one that ended with *error*."""
        self._state.set_exception((type(error), error, None))
        pause = max(0.0, float(self._backoff(self._state)))
        self._state.prepare_for_next_attempt()
        self._state.idle_for += pause
        return pause


class Terms(NamedTuple):
    """The terms of an acquisition. ``name`` is the user's, ``store_name`` has the namespace."""

    name: str
    store_name: str
    timing: Timing
    wait: float | None
    backoff: Backoff
    label: str | None = None
    """A text that others see beside the grant; None for the facts about this process."""
    mode: Mode = LOCK
    on_held: Callable[[], object] | None = None
    """Called when the store answers that another holder has the lock."""
    under: tuple[AnyLease, ...] | None = None
    """The leases that the caller works under, where they are not all those of its context."""
    handle: Callable[[LeaseState], Lease] = Lease
    """Makes the lease that the caller gets."""
    owner: str | None = None
    """The owner, where it was written down before; None: a new one for each acquisition."""
    resumes: LeaseTicket | None = None
    """The ticket whose place is passed on, instead of a draw."""

    def claim(self) -> Claim:
        """A new claim, with an owner of its own."""
        label = label_of(None) if self.label is None else self.label or None
        return Claim(self.store_name, self.timing.ttl, self.owner, label, self.mode)

    def limit(self, started: float, sent_at: float) -> float:
        """Seconds that a request may take, of an acquisition that *started* then."""
        limit = self.timing.call_limit
        return limit if self.wait is None else min(limit, max(_LAST_CALL, started + self.wait - sent_at))


class BackendOpening:
    """The opening of one backend by one client."""

    def __init__(self, backend: Backend, clock: Clock, store_calls: StoreCalls, patience: float = 0.0) -> None:
        self._backend = backend
        self._clock = clock
        self._store_calls = store_calls
        self._try: asyncio.Task[None] | None = None
        self.over = not isinstance(backend, SupportsOpen)
        """True if the backend is open, or has nothing to open."""
        self.patience = patience
        """Seconds for which a caller waits until the opening is over, unless it is more patient by itself; then 0."""

    async def wait(self) -> None:
        """
        Open the backend unless it is open, and wait for a store that is away.

        Raises:
            BackendUnavailableError: the store did not answer.
            BackendRefusedError: it will not, whatever is tried.
            UsageError: the client was closed meanwhile.
        """
        began, patience, tries = self._clock.now(), self.patience, Tries(DEFAULT_BACKOFF)
        while not self.over:
            try:
                await self.attempt()
            except BackendUnavailableError as error:
                waited = self._clock.now() - began
                if waited >= patience and not self._store_calls.closing:
                    error.waited = waited if patience else None
                    raise
                pause = min(tries.pause_after(error), max(0.0, patience - waited))
                await self._store_calls.sleep_until_closing(pause)
            if self._store_calls.closing:
                msg = "this client was closed while it was opening"
                raise UsageError(msg)

    async def attempt(self) -> None:
        """
        Try once, unless the backend is open: one try for all callers that wait for it. Closing the client ends it.

        Raises:
            BackendUnavailableError: the store did not answer.
            BackendRefusedError: it will not, whatever is tried.
        """
        if self.over:
            return
        if self._try is None or self._try.done():
            self._try = self._store_calls.start_until_closing(self._open())
        try:
            await self._store_calls.answer("open", self._try, _OPENING_LIMIT)
        except BackendError as failed:
            error, error.__cause__ = copy.copy(failed), failed.__cause__  # each caller raises its own
            failed.__traceback__ = None  # its frames lead to those of all callers
        else:
            return
        raise error

    async def _open(self) -> None:
        if isinstance(self._backend, SupportsOpen):
            await self._store_calls.send("open", self._backend.open(), _OPENING_LIMIT)
        self.over, self.patience = True, 0.0


class HeldTicket(NamedTuple):
    """A ticket that holds, and the moments that follow from its latest sign of life."""

    ticket: Ticket
    place: Place
    timing: Timing
    deadline: float
    renew_at: float
    """When to renew it first: where its latest sign of life was a waiter's, when it would have been kept next."""
    waited: float
    unanswered_calls: tuple[Call[Any], ...]
    """Earlier requests without an answer, which may still reach the store after a release."""


class Acquisition:
    """One acquisition, from the first request to a ticket that holds, or to an error."""

    __slots__ = (
        "_backend", "_began", "_call", "_calls", "_cancelling", "_clock", "_given_up", "_heartbeat", "_interrupted",
        "_observers", "_opening", "_outcome", "_sent_at", "_silent_since", "_started", "_store_calls", "_terms",
        "_tries", "_turn", "_undone", "task", "ticket",
    )  # fmt: skip

    _began: float
    _started: float
    ticket: Ticket

    def __init__(  # noqa: PLR0917  (the parts of an engine, and the request)
        self,
        backend: Backend,
        clock: Clock,
        store_calls: StoreCalls,
        opening: BackendOpening,
        heartbeat: Heartbeat,
        observers: Observers,
        terms: Terms,
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._store_calls = store_calls
        self._opening = opening
        self._heartbeat = heartbeat
        self._observers = observers
        self._terms = terms
        self._undone = 0  # requests without an answer of this owner, whose release is on its way
        self._given_up = False  # whether a release of this owner is on its way
        self._silent_since: float | None = None
        self._tries: Tries | None = None
        self._interrupted = False
        self._call: Call[Place | Busy | Gone] | None = None  # a draw that is under way
        self._sent_at = 0.0
        self._outcome: HeldTicket | Place | Busy | BackendUnavailableError | None = None  # of the first draw
        self._turn: asyncio.Event | None = None  # among the waiters of this client, at a store without a line
        self._calls: list[Call[Any]] = []  # requests whose outcome is not known, or that drew the ticket
        self.task = task = asyncio.current_task()
        self._cancelling = 0 if task is None else task.cancelling()

    def _draw_anew(self) -> None:
        """Go on with another owner."""
        self.ticket = Ticket(self._terms.claim(), self._heartbeat.on_bell)
        self._began = self._clock.now()
        if self._observers.any:
            report_beginning(self._observers, self._terms.name, self.ticket.claim, self._began)

    def begin(self) -> HeldTicket | None:
        """
        Send the first draw. Return the ticket that holds, if the store answers so at once; else `run` goes on.

        Raises:
            BackendRefusedError: as `run`.
        """
        if self._terms.owner is None:  # else no block of this process follows
            scope_class()  # the first anyio call imports a backend for 0.1 s: now, not during the first lease
        self._draw_anew()
        self._started, calls = self._began, self._store_calls
        behind = bool(calls.polling) and self._is_behind()
        if self._opening.over and not calls.closing and not behind and calls.take_turn_at_once():
            try:
                self._call = call = self._send(self._began)
                if calls.may_go_on(call) and call.exception() is None and isinstance(place := call.result(), Place):
                    self._call = None
                    self._outcome = outcome = self._take(place)
                    return outcome if isinstance(outcome, HeldTicket) else None
            except BaseException as error:
                self._abandon(error)
                raise
        return None

    async def run(self) -> HeldTicket:
        """
        Go on after `begin`: draw a ticket, and wait until it holds or the patience is over.

        Raises:
            LockHeldError: asked once, and another holder has the lock.
            AcquireTimeoutError: another holder still has it when the patience ends.
            BackendUnavailableError: the store did not answer until the patience ended; without a limit, for a ttl.
            BackendRefusedError: the store will not grant this, whatever is tried.
            DrainingError: it was interrupted.
            TicketRefusedError: it resumes a ticket that no longer stands for a lease.
        """
        try:
            if self._outcome is None and self._call is None and self._is_behind():
                await self._poll(math.inf)
            while True:
                drawn, self._outcome = self._outcome or await self._draw(), None
                outcome = await self._stand() if isinstance(drawn, Place) else drawn
                if isinstance(outcome, HeldTicket):
                    return outcome
                self._check_patience(outcome)
                if not isinstance(outcome, Gone):
                    await self._pause(outcome)
                if isinstance(outcome, BackendUnavailableError):
                    _forget_frames(outcome)
        except BaseException as error:
            self.end_by(error)
            raise
        finally:
            self._poll_no_more()

    def end_by(self, error: BaseException) -> None:
        """
        Undo what was asked for. The caller raises *error* then.

        Raises:
            DrainingError: it was interrupted.
        """
        by_drain = self._interrupted and self.task is not None and self.task.uncancel() <= self._cancelling
        if not by_drain or not isinstance(error, asyncio.CancelledError):  # a cancellation from outside wins
            self._abandon(error)
            return
        draining = DrainingError(self._terms.name, self._clock.now() - self._started)
        self._abandon(draining)
        raise draining from None

    def first_answer(self) -> Answer[Place | Busy | Gone] | None:
        """Return the answer to the first draw, if it is under way, and `take_first_answer` may take it."""
        call = self._call
        return call if isinstance(call, Answer) and not call.done() else None

    def take_first_answer(self) -> HeldTicket | None:
        """
        Take an answer that is there. Return the ticket that holds; else `run` goes on.

        Raises:
            BackendRefusedError, TicketRefusedError: as `run`.
        """
        call = self._call
        self._store_calls.suspended()
        if call is None or not succeeded(call):
            return None
        self._call = None
        try:
            self._outcome = outcome = self._take(call.result())
        except BaseException as error:
            self._abandon(error)
            raise
        return outcome if isinstance(outcome, HeldTicket) else None

    def _abandon(self, error: BaseException) -> None:
        if self._terms.owner is not None and isinstance(error, BackendError):  # who has it written down asks again
            self.ticket.close()
        else:
            self._give_up()
        self._report_end(error)

    def undo(self, result: HeldTicket, reason: NotAcquiredReason) -> None:
        """Give back the ticket in *result* after all, because of what happened to the client meanwhile."""
        self.ticket.close()
        self._store_calls.undo(result.ticket.claim, list(result.unanswered_calls), self._terms.timing.call_limit)
        self._report_end(reason)

    def _report_end(self, why: BaseException | NotAcquiredReason) -> None:
        if self._observers.any:
            now, closing = self._clock.now(), self._store_calls.closing
            waited, claim = now - self._began, self.ticket.claim
            report_end(self._observers, self._terms.name, claim, now, waited, why, self._undone, closing=closing)

    def interrupt(self) -> None:
        """End the waiting at once, also for an answer of the store: the client drains."""
        assert self.task is not None  # an acquisition runs in a task
        if not self._interrupted:
            self._interrupted = True
            self.task.cancel()

    # The draw.

    async def _draw(self) -> HeldTicket | Place | Busy | BackendUnavailableError:
        """Send one draw, if none is under way. A `Place` is that of a ticket which waits."""
        asked_at, calls = self._sent_at, self._store_calls
        if self._call is None:
            asked_at = self._clock.now()
            self._check_open()
            if self._given_up:  # a release of the former owner is on its way
                self._report_end(NotAcquiredReason.TOO_LATE)
                self._undone, self._given_up = 0, False
                self._draw_anew()
            try:
                await self._get_ready(asked_at)
            except BackendUnavailableError as error:
                return self._silent(error, asked_at)
            self._call = self._send(self._clock.now())
        call, self._call = self._call, None
        try:
            outcome = await calls.answer("acquire", call, self._terms.limit(self._started, self._sent_at))
        except BackendUnavailableError as error:
            return self._silent(error, self._sent_at if calls.answered_since(asked_at) else asked_at)
        except BackendRefusedError:
            self._calls.pop()  # nothing was drawn, for certain
            raise
        return self._take(outcome)

    def _send(self, now: float) -> Call[Place | Busy | Gone]:
        ticket, backend, terms = self.ticket, self._backend, self._terms
        self._sent_at = now
        if ticket.stop is None and backend.rings:
            ticket.stop = backend.listen(ticket.claim, ticket.bell)
        draw: Awaitable[Place | Busy | Gone]
        if terms.resumes is not None and isinstance(backend, PassesOn):
            draw = backend.pass_on(claim_of(terms.resumes), ticket.claim)
        else:
            draw = backend.draw(ticket.claim, only_if_it_holds=terms.wait == 0 or not backend.rings)
        call = self._store_calls.send_draw(draw, terms.limit(self._started, now))
        self._calls.append(call)
        return call

    def _take(self, outcome: Place | Busy | Gone) -> HeldTicket | Place | Busy | BackendUnavailableError:
        self._silent_since = None
        if isinstance(outcome, Place):
            self.ticket.take(outcome, self._sent_at)
            return outcome if outcome.token is None else self._judge(outcome)
        if self._terms.resumes is not None and isinstance(outcome, Gone):
            self._calls.pop()
            raise refusal(self._terms.resumes, outcome)
        if not isinstance(outcome, Busy):
            detail = f"its answer must be a Place or Busy, not {type(outcome).__name__}"
            raise BackendRefusedError(backend_name(self._backend), "acquire", detail)
        self._calls.pop()
        if self._terms.on_held is not None:
            self._terms.on_held()
        return outcome

    async def _get_ready(self, asked_at: float) -> None:
        """Open the backend, and wait for a turn."""
        if not self._opening.over:
            await self._opening.attempt()
        calls, terms = self._store_calls, self._terms
        if not calls.take_turn_at_once():
            limit = terms.limit(self._started, asked_at)
            # An acquisition without patience asks once, however late its turn comes.
            patience = max(limit, self._patience_left()) if terms.wait else math.inf
            if not await calls.turn_to_draw(patience, limit):
                raise AcquireTimeoutError(terms.name, self._clock.now() - self._started)
        if calls.closing:
            calls.end_turn()
            self._check_open()

    def _check_open(self) -> None:
        if self._store_calls.closing:
            raise closed_meanwhile(self._terms.name)

    def _silent(self, error: BackendUnavailableError, since: float) -> BackendUnavailableError:
        """Note since when the store has given no answer that could be used."""
        self._silent_since = since if self._silent_since is None else self._silent_since
        return error

    def _judge(self, place: Place) -> HeldTicket | BackendUnavailableError:
        """Take a ticket that holds only if the backend has filled it in rightly and its deadline is still ahead."""
        ticket, timing = self.ticket, self._terms.timing
        mistake = mistake_in(place, ticket.claim.mode)
        if mistake is not None:
            raise BackendRefusedError(backend_name(self._backend), "acquire", mistake)
        if place.ttl is not None:
            try:
                timing = timing.granted(place.ttl)
            except ConfigurationError as error:
                raise BackendRefusedError(backend_name(self._backend), "acquire", f"it grants less: {error}") from error
        now, sent_at, lives = self._clock.now(), ticket.counts_from, ticket.lives
        deadline = sent_at + (timing.valid_for if lives >= timing.ttl else timing.validity(lives))
        if now < deadline:
            renew_at = sent_at + (timing.heartbeat_interval if lives >= timing.ttl else ticket.every)
            calls = () if len(self._calls) == 1 else tuple(filter(_unanswered, self._calls))
            return HeldTicket(ticket, place, timing, deadline, renew_at, now - self._began, calls)
        if self._terms.owner is None and self._terms.resumes is None:  # else the same owner asks again, and lives on
            self._give_up()
        detail = f"the grant came {now - sent_at:.3g} s after its request, too late to be used"
        logger.warning("acquire: %s", detail)
        return self._silent(BackendUnavailableError(backend_name(self._backend), "acquire", detail), sent_at)

    # The wait.

    async def _stand(self) -> HeldTicket | Gone | BackendUnavailableError:
        """
        Wait in the line until the ticket holds. `Gone`: it died, and another one has to be drawn.

        The heartbeat keeps the ticket meanwhile, together with the leases. A bell about the ticket of the latest
        answer, or the answer of a keep, says that it holds.
        """
        if self._terms.on_held is not None:
            self._terms.on_held()
        if self.task is not None and self.task.get_name() == "fencing-thread":  # no task of the user's
            self.task.set_name(waiting_for(self._terms.name))
        ticket, news = self.ticket, self._store_calls.new_wakeup()
        ticket.news = news
        self._heartbeat.wait(ticket)
        try:
            while True:
                latest = ticket.latest
                if isinstance(latest, Gone):
                    return latest
                if isinstance(latest, Place) and latest.token is not None:
                    if ticket.counts_from + self._terms.timing.validity(ticket.lives) > self._clock.now():
                        return self._judge(latest)
                    ticket.latest = latest._replace(token=None)  # what is left of a waiter's life is too little
                    self._heartbeat.keep_soon(ticket)
                self._check_open()
                if self._patience_left() <= 0:
                    raise AcquireTimeoutError(self._terms.name, self._clock.now() - self._started)
                if self._silent_for_too_long(ticket.silent_since):
                    silent = BackendUnavailableError(backend_name(self._backend), "acquire", SILENT)
                    silent.waited = self._clock.now() - self._started
                    raise silent
                await self._store_calls.suspends.watched_sleep(news, self._patience_left())
                news.clear()
        finally:
            self._heartbeat.wait_no_more(ticket)
            self._store_calls.wakeups.discard(news)
            ticket.news = None

    # Patience.

    def _patience_left(self) -> float:
        wait = math.inf if self._terms.wait is None else self._terms.wait
        return self._started + max(wait, self._opening.patience) - self._clock.now()

    def _check_patience(self, outcome: Busy | Gone | BackendUnavailableError) -> None:
        waited, over = self._clock.now() - self._started, self._patience_left() <= 0
        if isinstance(outcome, BackendUnavailableError):
            if over or self._silent_for_too_long(self._started if self._silent_since is None else self._silent_since):
                outcome.waited = waited if self._terms.wait != 0 else None
                raise outcome
        elif over and self._terms.wait == 0 and isinstance(outcome, Busy):
            raise LockHeldError(self._terms.name, waited, outcome.look_after)
        elif over:
            raise AcquireTimeoutError(self._terms.name, waited)

    def _silent_for_too_long(self, since: float | None) -> bool:
        longest = max(self._terms.timing.ttl, self._opening.patience)
        return since is not None and self._terms.wait is None and self._clock.now() - since >= longest

    async def _pause(self, outcome: Busy | BackendUnavailableError) -> None:
        error = LockHeldError(self._terms.name, 0.0, outcome.look_after) if isinstance(outcome, Busy) else outcome
        self._tries = self._tries or Tries(self._terms.backoff)
        pause = self._tries.pause_after(error)
        if isinstance(outcome, Busy):
            if self._terms.backoff is DEFAULT_BACKOFF:
                pause = min(pause, JITTER.uniform(*_POLL_AFTER))
            await self._poll(min(pause, _advised(outcome)))
        else:
            await self._store_calls.sleep_until_closing(min(pause, max(0.0, self._patience_left())))

    def _is_behind(self) -> bool:
        """Return whether others of this client wait for the name, at a store without a line."""
        terms = self._terms
        return terms.wait != 0 and terms.resumes is None and terms.store_name in self._store_calls.polling

    async def _poll(self, pause: float) -> None:
        """
        Wait for the next try at a store without a line.

        The first waiter of a client asks for all of them, after a *pause* or a release by this client. The others
        follow in the order of their arrival.
        """
        calls = self._store_calls
        if self._turn is None:
            self._turn = calls.new_wakeup()
            calls.polling.setdefault(self._terms.store_name, []).append(self._turn)
        if calls.polling[self._terms.store_name][0] is not self._turn:
            pause = math.inf
        await calls.suspends.watched_sleep(self._turn, min(pause, max(0.0, self._patience_left())))
        if not calls.closing:
            self._turn.clear()

    def _poll_no_more(self) -> None:
        turn, self._turn = self._turn, None
        if turn is None:
            return
        calls, name = self._store_calls, self._terms.store_name
        calls.wakeups.discard(turn)
        line = calls.polling[name]
        line.remove(turn)
        if line:
            line[0].set()
        else:
            del calls.polling[name]

    def _give_up(self) -> None:
        """Give back the ticket that was drawn, or that a request without an answer may still draw."""
        self.ticket.close()
        calls, self._calls = self._calls, []
        if calls:
            self._given_up = True
            self._undone += sum(map(_unanswered, calls))
            self._store_calls.undo(self.ticket.claim, calls, self._terms.timing.call_limit)


def _unanswered(call: Call[Any]) -> bool:
    return not succeeded(call)


def refusal(ticket: LeaseTicket, gone: Gone) -> TicketRefusedError:
    """Say what became of a *ticket* that has *gone*. No store remembers that: the wall clock says what ran out."""
    ran_out = wall_seconds() >= ticket.until
    if gone.reason is not None:
        reason = LossReason.REVOKED
    elif gone.taken:
        reason = LossReason.TAKEN_OVER if ran_out else LossReason.HANDED_OVER
    else:
        reason = LossReason.EXPIRED if ran_out and ticket.token is not None else LossReason.REFUSED
    token = None if ticket.token is None else int(ticket.token)
    return TicketRefusedError(ticket.name, token, reason, gone.reason or "")


def closed_meanwhile(name: str) -> UsageError:
    """The error of a caller whose client was closed while it waited for the lock *name*."""
    return UsageError(f"the client was closed while it waited for lock {shown(name)}")


def _forget_frames(error: BaseException | None) -> None:
    """
    Let go of the frames that led to an *error* which the caller will not see: its task is kept with the lease.

    From Python 3.12 on they lead to the frames of the caller and to what those hold: a lease that is dropped would be
    noticed by the cyclic garbage collector only, and renewed until then.
    """
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _advised(busy: Busy) -> float:
    """Seconds until another try makes sense, by the store's advice; never so few that waiting becomes spinning."""
    advice = busy.look_after
    return _LONGEST_PAUSE if advice is None or not math.isfinite(advice) else max(advice, SHORTEST_PAUSE)
