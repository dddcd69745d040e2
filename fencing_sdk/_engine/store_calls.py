"""
Calls to the store that may outlive the caller that asked for them.

Every request runs in a task that the client owns, in an empty context, so that cancelling the
caller never aborts a request half way: "sent, answer unknown" is how locks leak. Each call is
cancelled at its limit, and again after growing pauses, because some drivers swallow one
cancellation; a call whose driver ignores them all is left behind, and no caller waits for it.

A backend may answer by an `Answer` instead, which needs no task: its reader settles it, and no cancelled caller takes
it along. Such a backend sends what it is asked at once, so that its draws wait for no turn.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Coroutine, Iterable
from contextvars import Context
from typing import Any, TypeAlias, TypeVar, cast

from fencing_sdk._engine.timers import CallTimeout, SuspendWatch, TimerQueue
from fencing_sdk._values.answer import Answer, Call
from fencing_sdk._values.claim import Claim, Gone
from fencing_sdk._values.clock import JITTER, Clock
from fencing_sdk._values.observers import logger
from fencing_sdk._values.tasks import Turns
from fencing_sdk.abc import Backend
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError, FencingError, shown

T = TypeVar("T")

_GRACE = 0.05
"""Seconds beyond its limit after which a call that does not react to cancellation is left behind."""
_LAST_TRIES = 2
"""Tries of a release in a client that closes: on the open connection, and on another one if that broke."""
_BEFORE_THE_LAST = 0.1
"""Seconds between the two: a driver marks its connection as broken a moment after the request on it has failed."""
_FIRST_RETRY = 0.02
_LAST_RETRY = 1.0
_MOST_DRAWS = 32
"""Draws in tasks of their own at once. The others wait in the client, where releases and renewals pass them."""

Returned: TypeAlias = bool | Gone
"""
Outcome of a release: whether the store confirmed it in time.

`Gone`: the first request found that the owner's ticket had ended already. Later requests that find it so count as
confirmed, because the first one may have ended it.
"""


def backend_name(backend: object) -> str:
    """Name a backend in events and errors: its class, never its URL."""
    return type(backend).__name__


_AT_ONCE = 16
"""After so many answers without a suspension the caller suspends once, so that other tasks run."""


def _give_up(answer: Answer[Any]) -> None:
    answer.cancel()


async def _wait(calls: Iterable[Call[Any]], seconds: float | None) -> None:
    await asyncio.wait(cast("Iterable[asyncio.Future[Any]]", calls), timeout=seconds)  # which an `Answer` will do for


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class StoreCalls:
    """The tasks of one client, and the calls they make to its backend."""

    def __init__(self, backend: Backend, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        # Some loops have a factory, or count their tasks: they make each task themselves.
        self._plain_tasks = self._loop.get_task_factory() is None and type(asyncio.current_task()) is asyncio.Task
        self._timers = TimerQueue(self._loop)
        self.suspends = SuspendWatch(self._loop, clock)
        self._waiters: dict[Call[Any], asyncio.Future[None]] = {}
        self._in_a_row = 0
        self._tasks: dict[Call[Any], None] = {}  # ordered, so that a simulation can repeat itself
        self._until_closing: dict[asyncio.Future[Any], None] = {}
        self.closing = False
        """True if the client is being closed: nothing new should begin."""
        self.answered_at: float | None = None
        """When the store last answered one of these calls, on the client's clock."""
        self.wakeups: set[asyncio.Event] = set()
        """Events of waiters, which the closing of the client sets."""
        self.polling: dict[str, list[asyncio.Event]] = {}
        """At a store without a line: the waiters of this client for a name. Only the first of them asks."""
        self._draws = Turns(_MOST_DRAWS)
        self._on_landing = self._landed  # bound once: every request has it
        self._draws_at_once = False  # the backend answers a draw by an `Answer`

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

    def send(self, operation: str, request: Awaitable[T], limit: float) -> Call[T]:
        """Send a *request*; it fails with `BackendUnavailableError` after *limit* seconds, or is cancelled."""
        if not isinstance(request, Answer):
            return self.start(self._bounded(operation, request, limit), f"fencing-{operation}")
        if request.done():
            self.answered_at = self._clock.now()
        else:
            self._timers.put(request, limit, _give_up)
            self._tasks[request] = None
            request.on_end = self._on_landing
        return request

    def _landed(self, answer: Answer[Any], answered: bool) -> None:  # noqa: FBT001  (called by the answer)
        self._timers.drop(answer)
        self._tasks.pop(answer, None)
        if answered:
            self.answered_at = self._clock.now()

    async def _bounded(self, operation: str, request: Awaitable[T], limit: float) -> T:
        with CallTimeout(self._timers, limit) as reached:
            answer = await request
            self.answered_at = self._clock.now()
            self._wake(reached.task)  # now and not when it is done: a turn of the loop earlier
            return answer
        detail = f"no answer within {limit:.3g} s" if reached else "its driver was cancelled from inside"
        if isinstance(reached.why, BackendError):
            detail += f": {reached.why.detail}"
        raise BackendUnavailableError(backend_name(self._backend), operation, detail)

    def take_turn_at_once(self) -> bool:
        """Take the turn of a draw if it may be sent now; `send_draw` or `end_turn` has to follow then."""
        return self._draws_at_once or self._draws.take_at_once()

    async def turn_to_draw(self, patience: float, limit: float) -> bool:
        """
        Wait until one more draw may be sent; `send_draw` or `end_turn` has to follow then. False: *patience* is over.

        What this client cannot send yet waits, for as long as the store answers what is sent.

        Args:
            patience: Seconds.

            limit: Seconds without an answer to any call after which the store counts as silent.

        Raises:
            BackendUnavailableError: the store is silent.
        """
        turn, end = self._draws.ask(), self._clock.now() + patience
        try:
            while not turn.done() and (left := end - (since := self._clock.now())) > 0:
                await asyncio.wait((turn,), timeout=min(limit, left))
                if left > limit and not turn.done() and not self.answered_since(since):
                    break
        except BaseException:
            self._draws.release(turn)
            raise
        if turn.done():
            return True
        self._draws.release(turn)
        if left <= limit:
            return False
        detail = f"earlier calls of this client had no answer within {limit:.3g} s"
        raise BackendUnavailableError(backend_name(self._backend), "acquire", detail)

    def answered_since(self, moment: float) -> bool:
        """Return whether the store has answered one of these calls since then."""
        return self.answered_at is not None and self.answered_at >= moment

    def send_draw(self, request: Awaitable[T], limit: float) -> Call[T]:
        """`send` for a draw that has its turn, which ends with the call."""
        call = self.send("acquire", request, limit)
        if self._draws_at_once:
            return call
        if call is request:  # an `Answer`
            self._draws_at_once = True
            self._draws.open_to_all()
        elif call.done():
            self.end_turn()
        else:
            call.add_done_callback(self.end_turn, context=Context())
        return call

    def end_turn(self, _: object = None) -> None:
        """End the turn of a draw."""
        self._draws.release()

    async def wait_for(self, task: Call[Any], seconds: float) -> None:
        """Return when *task* is done, or after *seconds*. Cancelling the caller leaves the task alone."""
        end = self._loop.time() + seconds
        while not task.done() and (left := end - self._loop.time()) > 0:
            if task in self._waiters:  # the timer wakes one waiter of a task; others wait by themselves
                await _wait((task,), left)
                continue
            waiter = self._waiters[task] = self._loop.create_future()
            self._timers.put(waiter, left, _wake)
            try:
                await waiter
            finally:
                self._timers.drop(waiter)
                self._waiters.pop(task, None)

    def _wake(self, task: Call[Any]) -> None:
        """Let the caller that waits for *task* look at it again."""
        if (waiter := self._waiters.get(task)) is not None:
            _wake(waiter)

    async def answer(self, operation: str, task: Call[T], limit: float) -> T:
        """
        Wait for the answer of *task*, a little longer than *limit* and not for ever.

        Raises:
            BackendUnavailableError: there is none, even if the driver ignores its cancellation.
            asyncio.CancelledError: the caller was cancelled; the task goes on.
        """
        if not self.may_go_on(task):
            self._in_a_row = 0
            if task.done():
                await asyncio.sleep(0)
            elif isinstance(task, Answer):
                await task.waiter()
            else:
                await self.wait_for(task, limit + _GRACE)
        if not task.done() or task.cancelled():
            detail = "no answer, and no reaction" if not isinstance(task, Answer) else f"no answer within {limit:.3g} s"
            raise BackendUnavailableError(backend_name(self._backend), operation, detail)
        return task.result()

    def may_go_on(self, task: Call[Any]) -> bool:
        """Return whether the answer is there, and the caller may go on with it: not too often without a suspension."""
        self._in_a_row += 1
        return task.done() and self._in_a_row < _AT_ONCE

    def suspended(self) -> None:
        """Note that a caller has let other tasks run."""
        self._in_a_row = 0

    async def ask(self, operation: str, request: Awaitable[T], limit: float) -> T:
        """`send` and `answer` in one."""
        return await self.answer(operation, self.send(operation, request, limit), limit)

    def give_back(self, claim: Claim, limit: float, after: float = 0.0) -> Call[Gone | None]:
        """Send one request that ends the ticket of *claim*, or lets it stand for so many seconds more."""
        request = self._backend.give_back(claim, after=after)
        return self.send(
            "release", self._then_poll(claim.name, request) if claim.name in self.polling else request, limit
        )

    async def _then_poll(self, name: str, request: Awaitable[T]) -> T:
        """Let the first waiter for *name* ask once the *request* has ended."""
        try:
            return await request
        finally:
            self.look_again(name)

    def look_again(self, name: str) -> None:
        """Let the first waiter for *name* ask now, at a store without a line."""
        if name in self.polling:
            self.polling[name][0].set()

    def release(self, claim: Claim, limit: float, first: Call[Gone | None] | None = None) -> asyncio.Task[Returned]:
        """
        Release *claim* in the background, for as long as its ttl; the task returns what became of it.

        *first*: the first request, if it was sent already.
        """
        return self.start(self._release(claim, limit, first), "fencing-release")

    async def _release(self, claim: Claim, limit: float, first: Call[Gone | None] | None = None) -> Returned:
        stop = self._clock.now() + claim.ttl
        pause, last_tries, repeated = _FIRST_RETRY, _LAST_TRIES, False
        while True:
            call, first = self.give_back(claim, limit) if first is None else first, None
            try:
                gone = await self.answer("release", call, limit)
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
                return gone if isinstance(gone, Gone) and not repeated else True
            repeated = True
            if self.closing:
                await asyncio.sleep(_BEFORE_THE_LAST)
            else:
                await self.sleep_until_closing(pause * JITTER.uniform(0.5, 1.0))
            pause = min(pause * 2, _LAST_RETRY)

    def undo(
        self,
        claim: Claim,
        calls: list[Call[Any]],
        limit: float,
        returned: asyncio.Task[Returned] | None = None,
    ) -> asyncio.Task[None]:
        """Give up an acquisition whose outcome is not known; *returned* is its first release, if that has begun."""
        return self.start(self._undo(claim, calls, limit, returned), "fencing-release")

    async def _undo(
        self,
        claim: Claim,
        calls: list[Call[Any]],
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
            await _wait((returned,), None)
        if pending:
            await _wait(pending, claim.ttl)
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
        self._draws.open_to_all()
        for task in self._until_closing:
            task.cancel()
        end = self._clock.now() + limit
        while ((calls := list(self._tasks)) or self.wakeups) and (left := end - self._clock.now()) > 0:
            if calls:
                await _wait(calls, left)
            else:
                await asyncio.sleep(min(left, _GRACE / 50))  # waiters that were woken are about to leave their lines
            await asyncio.sleep(0)  # a caller that waited for one of these may have a lock to release now
        leftover = tuple(self._tasks)
        for call in leftover:
            call.cancel()
        if leftover:
            await _wait(leftover, _GRACE)
        self._timers.end()
        self.suspends.stop()
        still = [call for call in leftover if not call.done()]
        if still:
            logger.warning("%d calls to the store do not end; they are left behind", len(still))
