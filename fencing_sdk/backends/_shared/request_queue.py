"""
The one connection for a client's requests: the first request opens it, and the first after a failure opens another.

A caller that gives up does not cancel its statement at the driver. One driver would send a cancel request on another
connection, for which the next request would wait; another would close the connection. The statement runs to its end,
and its answer is dropped. So one task runs the statements, one after the other, renewals and releases first, and each
caller waits for a future.

When a caller gives up while the server has not answered the statement under way for a while, the connection is
closed. A server that accepts connections and then does not answer must not get more and more of them, because each
closed one may leave a process on the server that waits for something. So the silence that is allowed doubles each time.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.loop_owner import LoopOwner
from fencing_sdk._values.tasks import start_task

__all__ = ["ConnectionAbandonedError", "QueuedRequest", "RequestConnection", "Session", "keep_in_children"]

SILENCE = 0.25
"""Seconds without an answer that are too many for a statement that waits for nothing."""
DIAL_PATIENCE = 1.0
"""Seconds after which an unfinished connection attempt is cancelled when a caller gives up."""

_TRIES = 4
_MOST_DOUBLINGS = 6
_CLOSING_PATIENCE = 0.5
"""Seconds that a request under way has to end when the backend is closed."""
_CLOCK = BootClock()

T = TypeVar("T")


class ConnectionAbandonedError(Exception):
    """The backend itself closed the connection, or gave up opening one. The outcome of the request is unknown."""


class Session(Protocol):
    """One open connection, which runs one request at a time."""

    @property
    def closed(self) -> bool:
        """True if the driver knows that the connection is closed."""
        ...

    def drop(self) -> None:
        """Close the connection at once, even while a statement runs."""
        ...

    async def aclose(self) -> None:
        """Close the connection with a message to the server, within a bounded time."""
        ...


S = TypeVar("S", bound=Session)


@dataclass(slots=True, eq=False)
class QueuedRequest(Generic[S]):
    """A request that waits for the connection, or is under way."""

    body: Callable[[S], Awaitable[Any]]
    """Runs one statement on a session, or one transaction."""
    answer: asyncio.Future[Any]
    must_run: bool


class RequestConnection(Generic[S]):
    """
    The connection of one backend. Each event loop and each process that uses it gets a queue of its own.

    Args:
        dial: Opens a session.

        adapt: Called with a session and the error of a request. Returns whether the request surely did nothing and may
            succeed if it runs again at once. It may change the session before, or drop it.

        silence: Seconds without an answer after which a connection is closed when a caller gives up.
    """

    def __init__(
        self,
        dial: Callable[[], Coroutine[Any, Any, S]],
        adapt: Callable[[S, Exception], bool],
        *,
        silence: float = SILENCE,
    ) -> None:
        self._dial_session = dial
        self._adapt_to = adapt
        self._silence = silence
        self._queue: _RequestQueue[S] | None = None

    @property
    def connected(self) -> bool:
        """True if the connection is open in this event loop, as far as the driver knows."""
        return self._queue is not None and self._queue.owner.is_current and self._queue.connected

    async def run(self, body: Callable[[S], Awaitable[T]], *, urgent: bool = False, must_run: bool = False) -> T:
        """
        Run *body* on the connection. If the server rolled it back, it may run again.

        Args:
            body: One statement, or one transaction.

            urgent: Overtake the requests that are not urgent.

            must_run: Run it even if the caller gives up before it was sent.

        Raises:
            Exception: the error of *body*.
        """
        return cast("T", await self.answer_to(self.put(body, urgent=urgent, must_run=must_run)))

    def put(
        self, body: Callable[[S], Awaitable[Any]], *, urgent: bool = False, must_run: bool = False
    ) -> QueuedRequest[S]:
        """Queue a request for `run` without waiting for it. Its answer may stay unread."""
        if self._queue is None or not self._queue.owner.is_current:
            self._queue = _RequestQueue(self._dial_session, self._adapt_to, self._silence)
        return self._queue.put(body, urgent=urgent, must_run=must_run)

    async def answer_to(self, request: QueuedRequest[S]) -> Any:
        """
        Wait for the answer to a request.

        Raises:
            Exception: the error of its body.
        """
        try:
            return await request.answer
        except asyncio.CancelledError:
            if self._queue is not None:
                self._queue.caller_gave_up()
            raise

    def drop(self) -> None:
        """Close the connection at once if a statement runs on it. The next request opens another."""
        if self._queue is not None and self._queue.owner.is_current:
            self._queue.drop()

    async def aclose(self) -> None:
        """Close the connection within a bounded time. The next request opens another."""
        queue, self._queue = self._queue, None
        if queue is not None and queue.owner.is_current:
            await queue.aclose()


class _RequestQueue(Generic[S]):
    """Requests that wait for the connection, and the task that runs them, in one event loop of one process."""

    def __init__(
        self, dial: Callable[[], Coroutine[Any, Any, S]], adapt: Callable[[S, Exception], bool], silence: float
    ) -> None:
        self.owner = LoopOwner()
        self._dial_session = dial
        self._adapt = adapt
        self._silence = silence
        self._urgent: deque[QueuedRequest[S]] = deque()
        self._others: deque[QueuedRequest[S]] = deque()
        self._running = False
        self._runner: asyncio.Task[None] | None = None
        self._session: S | None = None
        self._dialing: asyncio.Task[S] | None = None
        self._since = 0.0
        """When the statement under way was sent, or the connection attempt began."""
        self._asking = False
        self._unanswered = 0
        """Number of connections in a row that were closed without an answer."""
        self._closed = False

    @property
    def connected(self) -> bool:
        """True if the connection is open, as far as the driver knows."""
        return self._session is not None and not self._session.closed

    def put(self, body: Callable[[S], Awaitable[Any]], *, urgent: bool, must_run: bool) -> QueuedRequest[S]:
        """Add a request, and start the task that runs requests unless it runs already."""
        request = QueuedRequest(body, self.owner.loop.create_future(), must_run)
        (self._urgent if urgent else self._others).append(request)
        if not self._running:
            self._running = True
            self._runner = start_task(self._run_requests())
        return request

    async def _run_requests(self) -> None:
        try:
            while self._urgent or self._others:
                request = self._urgent.popleft() if self._urgent else self._others.popleft()
                if request.answer.done() and not request.must_run:
                    continue
                try:
                    row = await self._run(request)
                except Exception as error:  # noqa: BLE001  (the caller that waits for the future raises it)
                    _fail(request, error)
                else:
                    if not request.answer.done():
                        request.answer.set_result(row)
        finally:
            self._running = False

    async def _run(self, request: QueuedRequest[S]) -> Any:
        tries = _TRIES
        while True:
            session = self._session
            if session is None or session.closed:
                session = await self._dial()
                if request.answer.done() and not request.must_run:  # its caller has given up meanwhile
                    return None
            self._since, self._asking = _CLOCK.now(), True
            try:
                row = await request.body(session)
            except Exception as error:
                if not session.closed:
                    self._unanswered = 0
                tries -= 1
                if not self._adapt(session, error) or not tries:
                    raise
            else:
                self._unanswered = 0
                return row
            finally:
                self._asking = False

    async def _dial(self) -> S:
        self._check_open()
        dialing = self._dialing = start_task(self._dial_session())
        self._since = _CLOCK.now()
        try:
            await asyncio.wait((dialing,))
        finally:
            self._dialing = None
            dialing.cancel()
        error = ConnectionAbandonedError("it took too long to open") if dialing.cancelled() else dialing.exception()
        if error is not None:
            self._fail_all(error)
            raise error
        try:
            self._check_open()  # `aclose` may have run since the dialing ended
        except ConnectionAbandonedError:
            dialing.result().drop()
            raise
        self._session = dialing.result()
        return self._session

    def _check_open(self) -> None:
        if self._closed:
            msg = "the backend was closed meanwhile"
            raise ConnectionAbandonedError(msg)

    def _fail_all(self, error: BaseException) -> None:
        """Fail every request at once: without a connection, each of them would wait for another attempt to connect."""
        for requests in (self._urgent, self._others):
            for request in requests:
                _fail(request, error)
            requests.clear()

    def caller_gave_up(self) -> None:
        """Close a connection that has been silent for too long, or cancel an attempt to connect that takes too long."""
        waited = _CLOCK.now() - self._since
        if self._dialing is not None:
            if waited >= DIAL_PATIENCE:
                self._dialing.cancel()
        elif self._asking and self._session is not None and waited >= self._silence * 2**self._unanswered:
            self._unanswered = min(self._unanswered + 1, _MOST_DOUBLINGS)
            self._session.drop()

    def drop(self) -> None:
        """Close the connection if a statement runs on it."""
        if self._asking and self._session is not None:
            self._session.drop()

    async def aclose(self) -> None:
        """Give requests under way a moment to end, such as those that release a lock; then close the connection."""
        if self._running and self._runner is not None and self._dialing is None:
            await asyncio.wait((self._runner,), timeout=_CLOSING_PATIENCE)
        self._closed = True
        self._fail_all(ConnectionAbandonedError("the backend was closed meanwhile"))
        session, self._session = self._session, None
        if self._dialing is not None:
            self._dialing.cancel()
        if session is not None and self._asking:
            session.drop()
        elif session is not None and not session.closed:
            await session.aclose()
        if self._running and self._runner is not None:
            await asyncio.wait((self._runner,), timeout=_CLOSING_PATIENCE)
        await asyncio.sleep(0)  # in the next turn of the loop the transport calls connection_lost


def _fail(request: QueuedRequest[S], error: BaseException) -> None:
    if not request.answer.done():
        request.answer.set_exception(error)
        request.answer.exception()  # without this, an answer that stays unread would be logged


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_inherited: list[Session] = []


def keep_in_children(session: Session) -> None:
    """
    Keep *session* alive for ever in a child that inherits it.

    Parent and child share one epoll object. If the child collected a session, its finalizer would remove the
    connection from that epoll object, and the parent would never see its data.
    """
    _sessions.add(session)


def _after_fork() -> None:
    _inherited.extend(_sessions)
    _sessions.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
