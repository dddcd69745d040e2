"""
The one connection for a client's requests: the first request opens it, and the first after a failure opens another.

A caller that gives up does not cancel its statement at the driver. The driver would send a cancel request on another
connection, and the next request would wait for that. The statement runs to its end, and its answer is dropped. So one
task runs the statements, one after the other, renewals and releases first, and each caller waits for a future.

When a caller gives up while the server has not answered the statement under way for a while, the connection is
closed. A server that accepts connections and then does not answer must not get more and more of them, because each
closed one may leave a process on the server that waits for something. So the silence that is allowed doubles each time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import Context
from dataclasses import dataclass

from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.loop_owner import LoopOwner
from fencing_sdk.backends.postgresql.connection.dial import PostgresqlDialer
from fencing_sdk.backends.postgresql.connection.driver import DriverRow, OutdatedStatement, code_of
from fencing_sdk.backends.postgresql.connection.session import PostgresqlSession
from fencing_sdk.backends.postgresql.errors import ConnectionAbandonedError

SILENCE = 0.25
"""Seconds without an answer after which a connection is closed when a caller gives up."""
DIAL_PATIENCE = 1.0
"""Seconds after which an unfinished connection attempt is cancelled when a caller gives up."""

_TRIES = 4
_MOST_DOUBLINGS = 6
_CLOSING_PATIENCE = 0.5
"""Seconds that a request under way has to end when the backend is closed."""
_CLOCK = BootClock()

_ROLLED_BACK = {"40001", "40P01"}
_NOT_PREPARED = {"26000", "42P05"}
_NO_SCHEMA = {"3F000", "42883", "42P01"}
_WRONG_ISOLATION = "FS002"
_READ_ONLY = "25006"


RequestBody = Callable[[PostgresqlSession], Awaitable[DriverRow | None]]
"""What a request does on a session: one statement, or one transaction."""


@dataclass(slots=True, eq=False)
class _QueuedRequest:
    body: RequestBody
    answer: asyncio.Future[DriverRow | None]
    must_run: bool


class PostgresqlConnection:
    """The connection of one backend. Each event loop and each process that uses it gets a queue of its own."""

    def __init__(self, dialer: PostgresqlDialer) -> None:
        self._dialer = dialer
        self._queue: RequestQueue | None = None

    async def ask(
        self, statement: str, arguments: tuple[object, ...], *, urgent: bool = False, must_run: bool = False
    ) -> DriverRow | None:
        """
        Run one statement and return its first row.

        Args:
            statement: SQL.

            arguments: Its parameters.

            urgent: Overtake the requests that are not urgent.

            must_run: Run it even if the caller gives up before it was sent.

        Raises:
            Exception: the driver's error.
        """
        return await self.run(lambda session: session.ask(statement, arguments), urgent=urgent, must_run=must_run)

    async def run(self, body: RequestBody, *, urgent: bool = False, must_run: bool = False) -> DriverRow | None:
        """
        Do the same for a request of more than one statement. If the server rolled it back, it may run again.

        Raises:
            Exception: the error of *body*.
        """
        if self._queue is None or not self._queue.owner.is_current:
            self._queue = RequestQueue(self._dialer)
        request = self._queue.put(body, urgent=urgent, must_run=must_run)
        try:
            return await request.answer
        except asyncio.CancelledError:
            if self._queue is not None:
                self._queue.caller_gave_up()
            raise

    async def open(self) -> None:
        """Connect, unless connected already."""
        await self.ask("SELECT 1", ())

    async def aclose(self) -> None:
        """Close the connection within a bounded time. The next request opens another."""
        queue, self._queue = self._queue, None
        if queue is not None and queue.owner.is_current:
            await queue.aclose()


class RequestQueue:
    """Requests that wait for the connection, and the task that runs them, in one event loop of one process."""

    def __init__(self, dialer: PostgresqlDialer) -> None:
        self.owner = LoopOwner()
        self._dialer = dialer
        self._urgent: deque[_QueuedRequest] = deque()
        self._others: deque[_QueuedRequest] = deque()
        self._running = False
        self._runner: asyncio.Task[None] | None = None
        self._session: PostgresqlSession | None = None
        self._dialing: asyncio.Task[PostgresqlSession] | None = None
        self._since = 0.0
        """When the statement under way was sent, or the connection attempt began."""
        self._asking = False
        self._unanswered = 0
        """How many connections in a row were closed without an answer."""
        self._closed = False

    def put(self, body: RequestBody, *, urgent: bool, must_run: bool) -> _QueuedRequest:
        """Add a request, and start the task that runs requests unless it runs already."""
        request = _QueuedRequest(body, self.owner.loop.create_future(), must_run)
        (self._urgent if urgent else self._others).append(request)
        if not self._running:
            self._running = True
            self._runner = self.owner.loop.create_task(self._run_requests(), context=Context())
        return request

    async def _run_requests(self) -> None:
        try:
            while self._urgent or self._others:
                request = self._urgent.popleft() if self._urgent else self._others.popleft()
                if request.must_run or not request.answer.done():
                    await self._answer(request)
        finally:
            self._running = False

    async def _answer(self, request: _QueuedRequest) -> None:
        try:
            row = await self._run(request.body)
        except Exception as error:  # noqa: BLE001  (the caller that waits for the future raises it)
            if not request.answer.done():
                request.answer.set_exception(error)
        else:
            if not request.answer.done():
                request.answer.set_result(row)

    async def _run(self, body: RequestBody) -> DriverRow | None:
        tries = _TRIES
        while True:
            session = self._session
            if session is None or session.closed:
                session = await self._dial()
            self._since, self._asking = _CLOCK.now(), True
            try:
                row = await body(session)
            except Exception as error:
                tries -= 1
                if not self._adapt(session, error) or not tries:
                    raise
            else:
                self._unanswered = 0
                return row
            finally:
                self._asking = False

    def _adapt(self, session: PostgresqlSession, error: Exception) -> bool:
        """
        Adapt to *error*. Return whether the request surely did nothing and may succeed if it runs again at once.

        1. The server rolled the transaction back: run it again as it is.
        2. A prepared statement is missing or another client's: a proxy pools transactions. Stop preparing statements.
        3. The default isolation is not READ COMMITTED: give each statement a transaction with that level.
        4. The schema is missing: connect anew, which looks for the right server and creates what is missing.
        5. The server became read-only: connect anew for the next request. This one fails, because it was refused.
        6. A prepared statement is out of date: prepare it anew.
        """
        code = code_of(error)
        if code in _ROLLED_BACK:
            return True
        if code in _NOT_PREPARED and not session.pooled:
            session.pooled = self._dialer.pooled = True
            return True
        if code == _WRONG_ISOLATION and not session.wrapped:
            session.wrapped = True
            return True
        if code in _NO_SCHEMA or code == _READ_ONLY:
            session.drop()
            return code in _NO_SCHEMA
        if isinstance(error, OutdatedStatement):
            session.forget_statements()
            return True
        return False

    async def _dial(self) -> PostgresqlSession:
        self._check_open()
        dialing = self._dialing = self.owner.loop.create_task(self._dialer.dial(), context=Context())
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
                if not request.answer.done():
                    request.answer.set_exception(error)
            requests.clear()

    def caller_gave_up(self) -> None:
        """Close a connection that has been silent for too long, or cancel an attempt to connect that takes too long."""
        waited = _CLOCK.now() - self._since
        if self._dialing is not None:
            if waited >= DIAL_PATIENCE:
                self._dialing.cancel()
        elif self._asking and self._session is not None and waited >= SILENCE * 2**self._unanswered:
            self._unanswered = min(self._unanswered + 1, _MOST_DOUBLINGS)
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
