"""
Calls to the store that may outlive the caller that asked for them.

Every request runs in a task that the client owns, in an empty context, so that cancelling the
caller never aborts a request half way: "sent, answer unknown" is how locks leak. Each call is
cancelled at its limit, and again after growing pauses, because some drivers swallow one
cancellation; a call whose driver ignores them all is left behind, and no caller waits for it.

There is a short way, too: a request is posted, and its answer is handed over by a callback. Most acquisitions ask once
and get the lock, and most releases are answered. Where the backend supports posts they need no task and no timer of
their own. The rules:

1. Only two outcomes suffice: a plain grant whose deadline is still ahead, and a release that ended the grant. After
   any other outcome the caller hands the flight to `Acquisition` or `Releases`, which goes on from there.
2. An answer always lands, however late, and also if its caller was cancelled. What was granted meanwhile is released.
3. Landing stores the outcome, drops the limit and wakes the caller, and nothing else: it runs inside the driver's
   callback, where an error would break the connection of all other requests.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from functools import partial
from typing import Any, TypeAlias, TypeVar

from fencing_sdk._engine.timers import CallTimeout, SuspendWatch, TimerQueue
from fencing_sdk._values.claim import Busy, Claim, Grant, Renewal, Revoked
from fencing_sdk._values.clock import JITTER, Clock
from fencing_sdk._values.observers import logger
from fencing_sdk._values.tasks import Turns, retrieve
from fencing_sdk._values.token import TOKEN_LIMIT
from fencing_sdk.abc import Backend
from fencing_sdk.abc._powers import PendingPost, PostOutcome, SupportsPosts
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError, FencingError, shown

T = TypeVar("T")

_GRACE = 0.05
"""Seconds beyond its limit after which a call that does not react to cancellation is left behind."""
_LAST_TRIES = 2
"""How often a release is tried in a client that closes: on the open connection, and on another one if that broke."""
_BEFORE_THE_LAST = 0.1
"""Seconds between the two: a driver marks its connection as broken a moment after the request on it has failed."""
_FIRST_RETRY = 0.02
_LAST_RETRY = 1.0
_MOST_TRIES = 32
"""Tries for locks that are under way at once. The others wait in the client, where releases and renewals pass them."""

_REFUSALS = (Renewal.REFUSED, Renewal.TAKEN_OVER)

Returned: TypeAlias = bool | Renewal | Revoked
"""
Outcome of a release: whether the store confirmed it in time.

Anything else is a refusal of the first request: the owner's grant had already ended. Refusals of later requests count
as confirmed, because the first one may have ended the grant.
"""


def backend_name(backend: object) -> str:
    """Name a backend in events and errors: its class, never its URL."""
    return type(backend).__name__


_AT_ONCE = 16
"""After so many answers without a suspension the caller suspends once, so that other tasks run."""

Outcome = Grant | Busy | PostOutcome | Renewal | Revoked | BackendError


class Flight:
    """
    One posted request, from before it is sent until its answer has landed.

    The backend calls it with the answer. Its limit stays until then, also if its caller has stopped waiting,
    so that a silent connection is closed.
    """

    __slots__ = ("_call", "_timers", "claim", "outcome", "overdue", "sent", "sent_at", "waiter")

    def __init__(self, claim: Claim, sent_at: float, timers: TimerQueue) -> None:
        self._timers = timers
        self.claim = claim
        self.sent_at = sent_at
        self.outcome: Outcome | None = None
        """The answer; None while there is none."""
        self.overdue = False
        """True if the limit was reached before an answer came."""
        self.waiter: asyncio.Future[None] | None = None
        """A future for the caller to await; None if the answer came at once."""
        self.sent: PendingPost | None = None
        self._call: asyncio.Future[Any] | None = None

    def __call__(self, outcome: Outcome) -> None:
        """Land: take the answer, and wake the caller if it still waits. The first answer counts."""
        if self.outcome is not None:
            return
        self.outcome = outcome
        if self.waiter is not None:
            self._timers.drop(self)
            if not self.waiter.done():
                self.waiter.set_result(None)
        if self._call is not None:
            _settle(self._call, outcome)

    def over(self) -> None:
        """The limit is reached: wake the caller without an answer, which may still come."""
        if self.outcome is not None:
            return
        self.overdue = True
        self._timers.drop(self)
        if self.sent is not None:
            self.sent.give_up()
        _wake(self.waiter)

    def interrupt(self) -> None:
        """Wake the caller without an answer: the client drains."""
        _wake(self.waiter)

    def call(self) -> asyncio.Future[Any]:
        """The answer as a future, for `Acquisition` and `Releases`."""
        if self._call is None:
            self._call = asyncio.get_running_loop().create_future()
            self._call.add_done_callback(retrieve)
            if self.outcome is not None:
                _settle(self._call, self.outcome)
        return self._call


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def _settle(call: asyncio.Future[Any], outcome: Outcome) -> None:
    if call.done():
        return
    if isinstance(outcome, BackendError):
        call.set_exception(outcome)
    else:
        call.set_result(outcome)


class Posts:
    """Posts the requests of one client."""

    def __init__(self, backend: SupportsPosts, timers: TimerQueue) -> None:
        self._backend = backend
        self._timers = timers
        self._at_once = 0

    def acquire(self, claim: Claim, sent_at: float, limit: float) -> Flight:
        """Post an acquisition. The caller awaits the flight's waiter, if there is one."""
        flight = Flight(claim, sent_at, self._timers)
        flight.sent = self._backend.post_acquire(claim, flight)
        self._follow(flight, limit)
        return flight

    def release(self, claim: Claim, sent_at: float, limit: float) -> Flight:
        """Post a release, likewise."""
        flight = Flight(claim, sent_at, self._timers)
        flight.sent = self._backend.post_release(claim, flight)
        self._follow(flight, limit)
        return flight

    def _follow(self, flight: Flight, limit: float) -> None:
        if flight.outcome is not None:
            self._at_once += 1
            if self._at_once >= _AT_ONCE:  # others run now and then, although this answer needs no turn of the loop
                self._at_once = 0
                flight.waiter = self._timers.loop.create_future()
                self._timers.loop.call_soon(_wake, flight.waiter)
        elif flight.sent is not None:
            flight.waiter = self._timers.loop.create_future()
            self._timers.put(flight, limit, Flight.over)
        else:
            flight.outcome = PostOutcome.NOT_EXECUTED


def granted(flight: Flight) -> Grant | None:
    """A plain grant; None for everything that only the full way can judge."""
    grant = flight.outcome
    if isinstance(grant, Grant) and grant.ttl is None and type(grant.token) is int and 0 <= grant.token < TOKEN_LIMIT:
        return grant
    return None


def posts_of(backend: Backend) -> SupportsPosts | None:
    """
    Return *backend* if its posts do what its calls do.

    If a subclass or an object overrides a call and inherits the post, only the calls are used.
    """
    if not isinstance(backend, SupportsPosts):
        return None
    for call in ("acquire", "release"):
        places = [getattr(backend, "__dict__", {}), *map(vars, type(backend).__mro__)]
        first = next(place for place in places if call in place or f"post_{call}" in place)
        if f"post_{call}" not in first:
            return None
    return backend


class StoreCalls:
    """The tasks of one client, and the calls they make to its backend."""

    def __init__(self, backend: Backend, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        # Some loops have a factory, or count their tasks: they make each task themselves.
        self._plain_tasks = self._loop.get_task_factory() is None and type(asyncio.current_task()) is asyncio.Task
        self._timers = TimerQueue(self._loop)
        posting = posts_of(backend)
        self.posts = None if posting is None else Posts(posting, self._timers)
        """The short way to the store, where the backend has one."""
        self.suspends = SuspendWatch(self._loop, clock)
        self._waiters: dict[asyncio.Future[Any], asyncio.Future[None]] = {}
        self._in_a_row = 0
        self._tasks: dict[asyncio.Future[Any], None] = {}  # ordered, so that a simulation can repeat itself
        self._until_closing: dict[asyncio.Future[Any], None] = {}
        self.closing = False
        """True if the client is being closed: nothing new should begin."""
        self.answered_at: float | None = None
        """When the store last answered one of these calls, on the client's clock."""
        self.wakeups: set[asyncio.Event] = set()
        """Events of waiters, which the closing of the client sets."""
        self._tries = Turns(_MOST_TRIES)

    def start(self, work: Coroutine[Any, Any, T], name: str = "fencing-call") -> asyncio.Task[T]:
        """Run *work* in an owned task. Its context is its own, so that it does not keep the caller's lease alive."""
        context = Context()
        task: asyncio.Task[T]
        if sys.version_info >= (3, 12) and self._plain_tasks:  # up to its first suspension, without a turn of the loop
            task = asyncio.Task(work, loop=self._loop, context=context, eager_start=True, name=name)
        else:
            task = self._loop.create_task(work, context=context, name=name)
        if task.done():
            self._done(task)
        else:
            self._tasks[task] = None
            task.add_done_callback(self._done, context=context)
        return task

    def start_until_closing(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """`start` for *work* that the closing of the client cancels at once."""
        task = self.start(work)
        if not task.done():
            self._until_closing[task] = None
        return task

    def outlast(self, leaving: asyncio.Future[None]) -> None:
        """Let the closing of the client wait for *leaving*: a waiter that takes its place out of the store's line."""
        if not leaving.done():
            self._tasks[leaving] = None
            leaving.add_done_callback(self._done, context=Context())

    def new_wakeup(self) -> asyncio.Event:
        """Make an event that wakes a waiter. Closing the client sets it, too, while it is among `wakeups`."""
        wakeup = asyncio.Event()
        self.wakeups.add(wakeup)
        if self.closing:
            wakeup.set()
        return wakeup

    def _done(self, task: asyncio.Future[Any]) -> None:
        self._tasks.pop(task, None)
        self._until_closing.pop(task, None)
        self._wake(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, BackendError):
            logger.debug("a call to the store failed", exc_info=error)

    def send(self, operation: str, call: Callable[[], Awaitable[T]], limit: float) -> asyncio.Task[T]:
        """Begin *call*; the task fails with `BackendUnavailableError` after *limit* seconds."""
        return self.start(self._bounded(operation, call, limit), f"fencing-{operation}")

    async def _bounded(self, operation: str, call: Callable[[], Awaitable[T]], limit: float) -> T:
        with CallTimeout(self._timers, limit) as reached:
            answer = await call()
            self.answered_at = self._clock.now()
            self._wake(reached.task)  # now and not when it is done: a turn of the loop earlier
            return answer
        detail = f"no answer within {limit:.3g} s" if reached else "its driver was cancelled from inside"
        if isinstance(reached.why, BackendError):
            detail += f": {reached.why.detail}"
        raise BackendUnavailableError(backend_name(self._backend), operation, detail)

    async def turn_to_try(self, patience: float, limit: float, *, hurry: bool) -> bool:
        """
        Wait until one more try for a lock may be sent; `send_try` has to follow then. False: the *patience* is over.

        What this client cannot send yet waits, for as long as the store answers what is sent.

        Args:
            patience: Seconds.

            limit: Seconds without an answer to any call after which the store counts as silent.

            hurry: True if the store has signalled that the lock may be free: then this try goes before others.

        Raises:
            BackendUnavailableError: the store is silent.
        """
        if self._tries.take_at_once():
            return True
        turn, end = self._tries.ask(hurry=hurry), self._clock.now() + patience
        try:
            while not turn.done() and (left := end - (since := self._clock.now())) > 0:
                await asyncio.wait((turn,), timeout=min(limit, left))
                if left > limit and not turn.done() and not self.answered_since(since):
                    break
        except BaseException:
            self._tries.release(turn)
            raise
        if turn.done():
            return True
        self._tries.release(turn)
        if left <= limit:
            return False
        detail = f"earlier calls of this client had no answer within {limit:.3g} s"
        raise BackendUnavailableError(backend_name(self._backend), "acquire", detail)

    def answered_since(self, moment: float) -> bool:
        """Return whether the store has answered one of these calls since then."""
        return self.answered_at is not None and self.answered_at >= moment

    def send_try(self, call: Callable[[], Awaitable[T]], limit: float) -> asyncio.Task[T]:
        """`send` for a try that has its turn, which ends with the call."""
        task = self.send("acquire", call, limit)
        if task.done():
            self._tries.release()
        else:
            task.add_done_callback(self.end_try, context=Context())
        return task

    def end_try(self, _: object = None) -> None:
        """The turn of a try ends."""
        self._tries.release()

    async def wait_for(self, task: asyncio.Future[Any], seconds: float) -> None:
        """Return when *task* is done, or after *seconds*. Cancelling the caller leaves the task alone."""
        end = self._loop.time() + seconds
        while not task.done() and (left := end - self._loop.time()) > 0:
            if task in self._waiters:  # the timer wakes one waiter of a task; others wait by themselves
                await asyncio.wait((task,), timeout=left)
                continue
            waiter = self._waiters[task] = self._loop.create_future()
            self._timers.put(waiter, left, _wake)
            try:
                await waiter
            finally:
                self._timers.drop(waiter)
                self._waiters.pop(task, None)

    def _wake(self, task: asyncio.Future[Any]) -> None:
        """Let the caller that waits for *task* look at it again."""
        if (waiter := self._waiters.get(task)) is not None:
            _wake(waiter)

    async def answer(self, operation: str, task: asyncio.Future[T], limit: float) -> T:
        """
        Wait for the answer of *task*, a little longer than *limit* and not for ever.

        Raises:
            BackendUnavailableError: there is none, even if the driver ignores its cancellation.
            asyncio.CancelledError: the caller was cancelled; the task goes on.
        """
        if not task.done():
            await self.wait_for(task, limit + _GRACE)
        elif (in_a_row := self._in_a_row + 1) < _AT_ONCE:
            self._in_a_row = in_a_row
        else:  # let others run now and then, although an answer that came at once needs no turn of the loop
            self._in_a_row = 0
            await asyncio.sleep(0)
        if not task.done() or task.cancelled():
            raise BackendUnavailableError(backend_name(self._backend), operation, "no answer, and no reaction")
        return task.result()

    async def ask(self, operation: str, call: Callable[[], Awaitable[T]], limit: float) -> T:
        """`send` and `answer` in one."""
        return await self.answer(operation, self.send(operation, call, limit), limit)

    def release(self, claim: Claim, limit: float, flight: Flight | None = None) -> asyncio.Task[Returned]:
        """
        Release *claim* in the background, for as long as its ttl; the task returns what became of it.

        A release that was posted already is waited for first, as long as its answer can come in time.
        """
        return self.start(self._release(claim, limit, flight), "fencing-release")

    async def _release(self, claim: Claim, limit: float, flight: Flight | None = None) -> Returned:
        stop = self._clock.now() + claim.ttl
        pause, last_tries, repeated = _FIRST_RETRY, _LAST_TRIES, False
        while True:
            begin, flight = partial(self._send_release, claim, flight), None
            try:
                refusal = await self._bounded("release", begin, limit)
            except BackendRefusedError as error:
                logger.warning("release of %s refused, its ttl will free it: %s", shown(claim.name), error)
                return False
            except Exception as error:  # noqa: BLE001  (whatever a driver raises, the release must be tried again)
                last_tries -= self.closing
                if self._clock.now() + pause >= stop or not last_tries:
                    if not isinstance(error, FencingError):
                        logger.warning("release of %s failed", shown(claim.name), exc_info=error)
                    return False
            else:
                return True if refusal is None or repeated else refusal
            repeated = True
            if self.closing:
                await asyncio.sleep(_BEFORE_THE_LAST)
            else:
                await self.sleep_until_closing(pause * JITTER.uniform(0.5, 1.0))
            pause = min(pause * 2, _LAST_RETRY)

    async def _send_release(self, claim: Claim, flight: Flight | None) -> Renewal | Revoked | None:
        if flight is not None and flight.overdue and flight.outcome is None:
            raise BackendUnavailableError(backend_name(self._backend), "release", "no answer in time")
        outcome = PostOutcome.NOT_EXECUTED if flight is None else await flight.call()
        if outcome is PostOutcome.NOT_EXECUTED:
            outcome = await self._backend.release(claim)
        return outcome if outcome in _REFUSALS or isinstance(outcome, Revoked) else None

    def undo(
        self,
        claim: Claim,
        calls: list[asyncio.Future[Any]],
        limit: float,
        returned: asyncio.Task[Returned] | None = None,
    ) -> asyncio.Task[None]:
        """Give up an acquisition whose outcome is not known; *returned* is its first release, if that has begun."""
        return self.start(self._undo(claim, calls, limit, returned), "fencing-release")

    async def _undo(
        self,
        claim: Claim,
        calls: list[asyncio.Future[Any]],
        limit: float,
        returned: asyncio.Task[Returned] | None,
    ) -> None:
        """
        Release at once, and again when the request can no longer arrive.

        A release can overtake the acquisition that it undoes: sent later, on another connection,
        executed first. So it is repeated once the call has ended, and, where the call ended
        without an answer, after growing pauses until a ttl has passed.
        """
        pending = [call for call in calls if not call.done()]  # answered during the release, it may still come after it
        if returned is None:
            await self._release(claim, limit)
        else:
            await asyncio.wait((returned,))
        if pending:
            await asyncio.wait(pending, timeout=claim.ttl)
            await self._release(claim, limit)
        if any(not call.done() or call.cancelled() or call.exception() is not None for call in calls):
            stop, pause = self._clock.now() + claim.ttl, _FIRST_RETRY
            while (left := stop - self._clock.now()) > 0 and not self.closing:
                await self.sleep_until_closing(min(pause, left))
                await self._release(claim, limit)
                pause *= 2

    async def sleep_until_closing(self, delay: float) -> None:
        """Sleep, but not into the closing of the client."""
        wakeup = self.new_wakeup()
        try:
            await self.suspends.watched_sleep(wakeup, delay)
        finally:
            self.wakeups.discard(wakeup)

    async def aclose(self, limit: float) -> None:
        """Let releases finish for at most *limit* seconds, then cancel what is left and stop waiting for it."""
        self.closing = True
        for wakeup in self.wakeups:
            wakeup.set()
        self._tries.open_to_all()
        for task in self._until_closing:
            task.cancel()
        end = self._clock.now() + limit
        while ((calls := self._under_way()) or self.wakeups) and (left := end - self._clock.now()) > 0:
            if calls:
                await asyncio.wait(calls, timeout=left)
            else:
                await asyncio.sleep(min(left, _GRACE / 50))  # waiters that were woken are about to leave their lines
            await asyncio.sleep(0)  # a caller that waited for one of these may have a lock to release now
        for flight in self._flights():
            flight.over()
        leftover = tuple(self._tasks)
        for task in leftover:
            task.cancel()
        if leftover:
            await asyncio.wait(leftover, timeout=_GRACE)
        self._timers.end()
        self.suspends.stop()
        still = [task for task in leftover if not task.done()]
        if still:
            logger.warning("%d calls to the store do not end; they are left behind", len(still))

    def _flights(self) -> list[Flight]:
        return [key for key in self._timers if isinstance(key, Flight) and key.outcome is None]

    def _under_way(self) -> list[asyncio.Future[Any]]:
        return [*self._tasks, *(flight.call() for flight in self._flights())]
