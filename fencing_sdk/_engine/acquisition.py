"""
Waits for a grant, and undoes itself when the caller gives up.

Patience, back-off, and the meaning of an attempt without an answer live here. A backend tries exactly
once; this is the only place that tries again. After each attempt there are four cases:

1. A grant that can still be used ends the acquisition.
2. Another holder has the lock: the waiter joins the store's line, if there is one, and pauses.
3. The store gave no answer: the outcome is unknown. The owner id is made before the first request and stays
   the same, so a retry finds a grant whose answer was lost. The first request of all opens the client's connection.
4. The patience is over, or the caller was cancelled: every attempt whose outcome is unknown is released by its
   claim in the background, at once, and again when the request can no longer arrive.

What wakes a waiter that pauses: the store's line, which may also hand it the lock (`SupportsLine`), the end of its
pause (the store's advice where it gave one, otherwise the back-off), its patience, or the closing of the client. A
drain (`interrupt`) and the caller's cancellation end the wait.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import tenacity

from fencing_sdk._engine.observer_reports import AcquisitionReport
from fencing_sdk._engine.store_calls import Flight, StoreCalls, backend_name
from fencing_sdk._lease import AnyLease
from fencing_sdk._values.claim import LOCK, Busy, Claim, Grant, Mode, mistake_in, mistake_in_refusal
from fencing_sdk._values.clock import JITTER, Clock
from fencing_sdk._values.observers import Observers, logger
from fencing_sdk._values.reports import label_of
from fencing_sdk._values.tasks import waiting_for
from fencing_sdk._values.timing import Timing
from fencing_sdk.abc import Backend, Guard, PlaceInLine, SupportsLine, SupportsOpen
from fencing_sdk.abc._powers import PostOutcome, SupportsFence
from fencing_sdk.errors import (
    AcquireTimeoutError,
    BackendError,
    BackendRefusedError,
    BackendUnavailableError,
    ConfigurationError,
    DrainingError,
    LockHeldError,
    NotAcquiredReason,
    StaleTokenError,
    UsageError,
    shown,
)

_LONGEST_PAUSE = 5.0
"""Seconds between the tries of a waiter that is not woken, whatever the store advises."""
_SHORTEST_PAUSE = 0.001
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
    fences: Sequence[tuple[Guard, str]] = ()
    """Guards, each with its resource, whose fences the backend raises with the grant: see `SupportsFence`."""
    mode: Mode = LOCK
    on_held: Callable[[], object] | None = None
    """Called when the store answers that another holder has the lock."""
    under: tuple[AnyLease, ...] | None = None
    """The leases that the caller works under, where they are not all those of its context."""

    def claim(self) -> Claim:
        """A new claim, with an owner of its own."""
        return Claim(self.store_name, self.timing.ttl, None, label_of(self.label) or None, self.mode)

    def limit(self, started: float, sent_at: float) -> float:
        """Seconds that a request may take, of an acquisition that *started* then."""
        limit = self.timing.call_limit
        return limit if self.wait is None else min(limit, max(_LAST_CALL, started + self.wait - sent_at))


Fences = Sequence[tuple[Guard, str | None]]
"""Guards to raise at acquisition, each with its resource; None means the resource is named like the lock."""


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
            await self._store_calls.send("open", self._backend.open, _OPENING_LIMIT)
        self.over, self.patience = True, 0.0


class AcquireResult(NamedTuple):
    """A grant that is worth using, and the moment from which it counts."""

    claim: Claim
    grant: Grant
    timing: Timing
    sent_at: float
    waited: float
    unanswered_calls: tuple[asyncio.Future[Any], ...]
    """Earlier attempts without an answer, which may still reach the store after a release."""


class Acquisition:
    """One acquisition, from the first attempt to a grant or an error."""

    def __init__(  # noqa: PLR0917  (the parts of an engine, and the request)
        self,
        backend: Backend,
        clock: Clock,
        store_calls: StoreCalls,
        opening: BackendOpening,
        observers: Observers,
        terms: Terms,
        flight: Flight | None = None,
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._store_calls = store_calls
        self._opening = opening
        self._report = AcquisitionReport(observers, clock, terms.name)
        self._terms = terms
        self._limit = terms.timing.call_limit
        self._started = 0.0
        self._flight = flight
        if flight is None:
            self._claim = terms.claim()
        else:
            self._claim = flight.claim
            self._report.goes_on(flight.claim, flight.sent_at)
        self._place: PlaceInLine | None = None
        self._news: asyncio.Event | None = None  # set when the line has news
        self._woken = False  # whether the line has woken this waiter for its next try
        self._handed: tuple[Grant, float] | None = None  # what the line has handed over, and since when it counts
        self._calls: list[asyncio.Future[Any]] = []  # attempts whose outcome is not known
        self._undone = 0  # such attempts of this owner id, whose release is on its way
        self._given_up = False  # whether a release of this owner id is on its way
        self._unknown_since: float | None = None
        self._silent_since: float | None = None
        self._tries: Tries | None = None
        self._task = asyncio.current_task()
        self._cancelling = 0 if self._task is None else self._task.cancelling()
        self._interrupted = False

    async def run(self) -> AcquireResult:
        """
        Try until there is a grant or the patience is over.

        Raises:
            LockHeldError: asked once, and another holder has the lock.
            AcquireTimeoutError: another holder still has it when the patience ends.
            BackendUnavailableError: the store did not answer until the patience ended; without a limit, for a ttl.
            BackendRefusedError: the store will not grant this, whatever is tried.
            StaleTokenError: a fence could not be raised with the grant, so there is none.
            DrainingError: it was interrupted.
        """
        if self._flight is None:
            self._report.began(self._claim)
        self._started = self._report.began_at
        try:
            while True:
                outcome = await self._attempt()
                if isinstance(outcome, AcquireResult):
                    break
                self._check_patience(outcome)
                if isinstance(outcome, Busy):
                    self._join_line()
                await self._pause(outcome)
                if isinstance(outcome, BackendUnavailableError):
                    _forget_frames(outcome)
        except BaseException as error:
            by_drain = self._interrupted and self._task is not None and self._task.uncancel() <= self._cancelling
            if not by_drain or not isinstance(error, asyncio.CancelledError):  # a cancellation from outside wins
                self.abandon(error)
                raise
            draining = DrainingError(self._terms.name, self._clock.now() - self._started)
            self.abandon(draining)
            raise draining from None
        self._leave_line()
        self._calls.clear()
        return outcome

    def abandon(self, error: BaseException) -> None:
        """End without a lease, because of *error*."""
        if self._flight is not None:
            self._calls.append(self._flight.call())
        self._give_up()
        self._report.failed(error, self._undone, closing=self._store_calls.closing or self._flight is not None)

    def undo(self, result: AcquireResult, reason: NotAcquiredReason) -> None:
        """Give the grant in *result* back after all, because of what happened to the client meanwhile."""
        self._store_calls.undo(result.claim, list(result.unanswered_calls), self._limit)
        self._report.ended(reason, self._undone)

    def interrupt(self) -> None:
        """End the waiting at once, also for an answer of the store: the client drains."""
        assert self._task is not None  # an acquisition runs in a task
        if not self._interrupted:
            self._interrupted = True
            self._task.cancel()

    async def _attempt(self) -> AcquireResult | Busy | BackendUnavailableError:
        self._check_open()
        if self._given_up:  # a release of the former owner id is on its way
            self._report.ended(NotAcquiredReason.TOO_LATE, self._undone)
            self._claim = self._terms.claim()
            self._unknown_since, self._undone, self._given_up = None, 0, False
            self._report.began(self._claim)
        flight, self._flight = self._flight, None
        if flight is not None and flight.outcome is not PostOutcome.NOT_EXECUTED:
            self._calls.append(flight.call())
            no_answer = BackendUnavailableError(backend_name(self._backend), "acquire", "no answer in time")
            return self._take(flight.outcome or no_answer, flight.sent_at)
        if (handed := self._take_handed()) is not None:
            return handed
        asked_at = self._clock.now()
        try:
            await self._opening.attempt()
            limit = self._terms.limit(self._started, asked_at)
            # An acquisition without patience asks once, however late its turn comes.
            patience = max(limit, self._patience_left()) if self._terms.wait else math.inf
            woken, self._woken = self._woken, False
            if not await self._store_calls.turn_to_try(patience, limit, hurry=woken):
                raise AcquireTimeoutError(self._terms.name, self._clock.now() - self._started)
        except BackendUnavailableError as error:
            return self._silent(error, asked_at)
        if self._store_calls.closing:
            self._store_calls.end_try()
            self._check_open()
        sent_at = self._clock.now()
        if self._silent_since is None and not self._store_calls.answered_since(asked_at):
            self._silent_since = asked_at
        limit = self._terms.limit(self._started, sent_at)
        claim = self._claim
        call = self._store_calls.send_try(lambda: self._ask(claim), limit)
        self._calls.append(call)
        try:
            outcome: Grant | Busy | Exception = await self._store_calls.answer("acquire", call, limit)
        except (BackendError, StaleTokenError) as error:
            outcome = error
        return self._take(outcome, sent_at)

    def _check_open(self) -> None:
        if self._store_calls.closing:
            raise closed_meanwhile(self._terms.name)

    def _take(self, outcome: object, sent_at: float) -> AcquireResult | Busy | BackendUnavailableError:
        """Return what the outcome of the latest attempt is worth, by whichever way it was made."""
        if isinstance(outcome, Grant):
            return self._judge(outcome, sent_at)
        if isinstance(outcome, BackendUnavailableError):
            self._unknown_since = sent_at if self._unknown_since is None else self._unknown_since
            return self._silent(outcome, sent_at)
        if isinstance(outcome, Busy) and (mistake := mistake_in_refusal(outcome)) is not None:
            raise BackendRefusedError(backend_name(self._backend), "acquire", mistake)
        if isinstance(outcome, Busy | BackendRefusedError | StaleTokenError):
            self._calls.pop()  # nothing was granted, for certain
        if isinstance(outcome, Busy):
            self._silent_since = None
            if self._terms.on_held is not None:
                self._terms.on_held()
            return outcome
        if isinstance(outcome, Exception):
            raise outcome
        detail = f"its answer must be a Grant or Busy, not {type(outcome).__name__}"
        raise BackendRefusedError(backend_name(self._backend), "acquire", detail)

    def _ask(self, claim: Claim) -> Awaitable[Grant | Busy]:
        if self._terms.fences and isinstance(self._backend, SupportsFence):
            return self._backend.acquire_fenced(claim, self._terms.fences)
        return self._backend.acquire(claim)

    def _silent(self, error: BackendUnavailableError, sent_at: float) -> BackendUnavailableError:
        """Note since when the store has given no answer that could be used."""
        self._silent_since = sent_at if self._silent_since is None else self._silent_since
        return error

    def _judge(self, grant: Grant, sent_at: float) -> AcquireResult | BackendUnavailableError:
        """Take a grant only if the backend has filled it in rightly and its deadline is still ahead."""
        mistake = mistake_in(grant, self._claim.mode)
        if mistake is not None:
            raise BackendRefusedError(backend_name(self._backend), "acquire", mistake)
        try:
            timing = self._terms.timing.granted(grant.ttl)
        except ConfigurationError as error:
            raise BackendRefusedError(backend_name(self._backend), "acquire", f"it grants less: {error}") from error
        counts_from = sent_at
        if not grant.restarted and self._unknown_since is not None:
            counts_from = self._unknown_since
        now = self._clock.now()
        if now < timing.deadline(counts_from):
            unanswered_calls = tuple(self._calls[:-1])
            return AcquireResult(self._claim, grant, timing, counts_from, now - self._report.began_at, unanswered_calls)
        self._give_up()
        detail = f"the grant came {now - counts_from:.3g} s after its request, too late to be used"
        logger.warning("acquire: %s", detail)
        return self._silent(BackendUnavailableError(backend_name(self._backend), "acquire", detail), sent_at)

    @property
    def _patience(self) -> float:
        wait = math.inf if self._terms.wait is None else self._terms.wait
        return max(wait, self._opening.patience)

    def _patience_left(self) -> float:
        return self._started + self._patience - self._clock.now()

    def _check_patience(self, outcome: Busy | BackendUnavailableError) -> None:
        waited = self._clock.now() - self._started
        over = self._patience_left() <= 0
        if isinstance(outcome, BackendUnavailableError):
            since = self._started if self._silent_since is None else self._silent_since
            longest = max(self._terms.timing.ttl, self._opening.patience)
            if over or (self._terms.wait is None and self._clock.now() - since >= longest):
                outcome.waited = waited if self._patience else None
                raise outcome
        elif over and self._terms.wait == 0:
            raise LockHeldError(self._terms.name, waited, outcome.retry_after)
        elif over:
            raise AcquireTimeoutError(self._terms.name, waited)

    def _join_line(self) -> None:
        if self._place is not None or not isinstance(self._backend, SupportsLine):
            return
        if self._task is not None and self._task.get_name() == "fencing-thread":  # no task of the user's
            self._task.set_name(waiting_for(self._terms.name))
        asks = bool(self._terms.fences) or self._terms.mode is not LOCK  # fences and shares are granted by a try
        self._news = self._store_calls.new_wakeup()
        self._place = self._backend.stand(self._claim, self._notified, hand_over=not asks)

    def _notified(self, grant: Grant | None = None, age: float = 0.0) -> None:
        """See `fencing_sdk.abc.WaiterNotice`."""
        if grant is not None:
            self._handed = grant, self._clock.now() - age
        if self._news is not None:
            self._news.set()

    def _take_handed(self) -> AcquireResult | BackendUnavailableError | None:
        """
        Take the grant that the line has handed over.

        If its first renewal is due already, ask for the lock: the same owner gets the same token, and a fresh ttl.
        """
        if self._handed is None:
            return None
        (grant, counts_from), self._handed = self._handed, None
        if self._clock.now() - counts_from >= self._terms.timing.heartbeat_interval:
            return None
        result = self._judge(grant, counts_from)
        return result._replace(unanswered_calls=tuple(self._calls)) if isinstance(result, AcquireResult) else result

    async def _pause(self, outcome: Busy | BackendUnavailableError) -> None:
        pause = None
        if self._place is not None and isinstance(outcome, Busy):
            pause = self._place.retry_after(min(_advised(outcome), _LONGEST_PAUSE * JITTER.uniform(0.75, 1.0)))
        chosen = self._terms.backoff is not DEFAULT_BACKOFF
        if pause is None or (chosen and self._place is not None and self._place.polls):
            error = LockHeldError(self._terms.name, 0.0, outcome.retry_after) if isinstance(outcome, Busy) else outcome
            self._tries = self._tries or Tries(self._terms.backoff)
            pause = self._tries.pause_after(error)
            pause = min(pause, _advised(outcome)) if isinstance(outcome, Busy) else pause
        pause = min(pause, max(0.0, self._patience_left()))
        if self._news is None:
            await self._store_calls.sleep_until_closing(pause)
            return
        await self._store_calls.suspends.watched_sleep(self._news, pause)
        self._woken = self._news.is_set()
        self._news.clear()

    def _give_up(self) -> None:
        """Leave the line, and release by claim what the attempts without an answer, or the line, may still get."""
        handing = self._place is not None and self._place.hands_over  # the line may still grant the lock
        self._leave_line()
        calls, self._calls = self._calls, []
        if calls or handing:
            self._given_up = True
            self._undone += len(calls)
            self._store_calls.undo(self._claim, calls, self._limit)

    def _leave_line(self) -> None:
        place, self._place = self._place, None
        if place is None:
            return
        self._handed = None
        if (leaving := place.leave()) is not None:
            self._store_calls.outlast(leaving)
        if self._news is not None:
            self._store_calls.wakeups.discard(self._news)
            self._news = None


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
    advice = busy.retry_after
    return _LONGEST_PAUSE if advice is None or not math.isfinite(advice) else max(advice, _SHORTEST_PAUSE)
