"""
The one connection on which a client's calls are made, opened when it is needed and again when it has broken.

A call that is given up is not cancelled at the driver: that would send a cancel request on a connection of its own,
and keep the next call waiting for it. Its statement runs to its end and the answer is dropped. So one task runs the
statements, one after the other, renewals and releases first, and whoever asked waits for a future.

The connection is dropped when a call was given up and its statement, or the one before it, has been silent for a
while. A server that lets a client in and then does not answer is not asked for a new connection more and more often:
the pause doubles, because every dropped one may leave a process behind on the server that waits for something.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import Context
from dataclasses import dataclass

from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.process import generation
from fencing_sdk.backends.postgresql._dial import Dialer
from fencing_sdk.backends.postgresql._driver import Outdated, Row, code_of
from fencing_sdk.backends.postgresql._session import Session
from fencing_sdk.backends.postgresql._translation import LinkError

SILENCE = 0.25
"""Seconds without an answer after which a call that is given up condemns its connection."""
DIAL_PATIENCE = 1.0
"""Seconds after which the opening of a connection is begun anew when somebody has given up waiting for it."""

_TRIES = 4
_MOST_STRIKES = 6
_LAST_WORDS = 0.5
"""Seconds that a call which is under way has to end when the backend is closed."""
_CLOCK = BootClock()

_ROLLED_BACK = {"40001", "40P01"}
_NOT_PREPARED = {"26000", "42P05"}
_NO_SCHEMA = {"3F000", "42883", "42P01"}
_WRONG_ISOLATION = "FS002"
_READ_ONLY = "25006"


Do = Callable[[Session], Awaitable[Row | None]]
"""What is to be done on a session: one statement, or one transaction."""


@dataclass(slots=True, eq=False)
class _Work:
    do: Do
    answer: asyncio.Future[Row | None]
    surely: bool


class Link:
    """The connection of one backend, for whichever event loop of whichever process uses it."""

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        self._desk: _Desk | None = None

    async def ask(
        self, statement: str, arguments: tuple[object, ...], *, urgent: bool = False, surely: bool = False
    ) -> Row | None:
        """
        Run one statement; return its first row.

        Args:
            statement: SQL.

            arguments: Its parameters.

            urgent: Overtake what is not.

            surely: Run it even if the caller gives up before it was sent.

        Raises:
            Exception: whatever the driver raises.
        """
        return await self.run(lambda session: session.ask(statement, arguments), urgent=urgent, surely=surely)

    async def run(self, do: Do, *, urgent: bool = False, surely: bool = False) -> Row | None:
        """
        `ask`, for more than a statement; what was rolled back may be done again.

        Raises:
            Exception: whatever *do* raises.
        """
        work = self._own().put(do, urgent=urgent, surely=surely)
        try:
            return await work.answer
        except asyncio.CancelledError:
            if self._desk is not None:
                self._desk.given_up()
            raise

    async def open(self) -> None:
        """Connect, unless connected already."""
        await self.ask("SELECT 1", ())

    def _own(self) -> _Desk:
        desk = self._desk
        if desk is None or not desk.ours():
            desk = self._desk = _Desk(self._dialer)
        return desk

    async def aclose(self) -> None:
        """Close the connection; the next call opens another. Bounded, whatever the server does."""
        desk, self._desk = self._desk, None
        if desk is not None and desk.ours():
            await desk.aclose()


class _Desk:
    """Work that waits for the connection, and the task that does it. Belongs to one event loop of one process."""

    def __init__(self, dialer: Dialer) -> None:
        self._loop = asyncio.get_running_loop()
        self._generation = generation()
        self._dialer = dialer
        self._urgent: deque[_Work] = deque()
        self._others: deque[_Work] = deque()
        self._busy = False
        self._server: asyncio.Task[None] | None = None
        self._session: Session | None = None
        self._dialing: asyncio.Task[Session] | None = None
        self._since = 0.0  # when the statement under way was sent, or the dialing begun
        self._asking = False
        self._strikes = 0
        self._closed = False

    def ours(self) -> bool:
        """Whether this loop of this process uses it; a child must not even close its parent's connection."""
        return self._loop is asyncio.get_running_loop() and self._generation == generation()

    def put(self, do: Do, *, urgent: bool, surely: bool) -> _Work:
        work = _Work(do, self._loop.create_future(), surely)
        (self._urgent if urgent else self._others).append(work)
        if not self._busy:
            self._busy = True
            self._server = self._loop.create_task(self._serve(), context=Context())
        return work

    async def _serve(self) -> None:
        try:
            while self._urgent or self._others:
                work = self._urgent.popleft() if self._urgent else self._others.popleft()
                if work.surely or not work.answer.done():
                    await self._do(work)
        finally:
            self._busy = False

    async def _do(self, work: _Work) -> None:
        try:
            row = await self._run(work)
        except Exception as error:  # noqa: BLE001  (it is raised where it is waited for)
            if not work.answer.done():
                work.answer.set_exception(error)
        else:
            if not work.answer.done():
                work.answer.set_result(row)

    async def _run(self, work: _Work) -> Row | None:
        tries = _TRIES
        while True:
            session = self._session
            if session is None or session.closed:
                session = await self._dial()
            self._since, self._asking = _CLOCK.now(), True
            try:
                row = await work.do(session)
            except Exception as error:
                tries -= 1
                if not self._worth_another_try(session, error) or not tries:
                    raise
            else:
                self._strikes = 0
                return row
            finally:
                self._asking = False

    def _worth_another_try(self, session: Session, error: Exception) -> bool:
        """Whether the statement surely did nothing, and will do better at once."""
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
            session.drop()  # the next one looks again whether it is the right server, with the tables it needs
            return code in _NO_SCHEMA
        if isinstance(error, Outdated):
            session.forget()
            return True
        return False

    async def _dial(self) -> Session:
        if self._closed:
            msg = "the backend was closed meanwhile"
            raise LinkError(msg)
        dialing = self._dialing = self._loop.create_task(self._dialer.dial(), context=Context())
        self._since = _CLOCK.now()
        try:
            await asyncio.wait((dialing,))
        finally:
            self._dialing = None
            dialing.cancel()
        error = LinkError("it took too long to open") if dialing.cancelled() else dialing.exception()
        if error is not None:
            self._fail_all(error)
            raise error
        self._session = dialing.result()
        return self._session

    def _fail_all(self, error: BaseException) -> None:
        """Whoever waits for a connection is told that there is none, instead of trying one after the other."""
        for line in (self._urgent, self._others):
            for work in line:
                if not work.answer.done():
                    work.answer.set_exception(error)
            line.clear()

    def given_up(self) -> None:
        """Somebody waits no more: drop a connection that is silent, or that cannot be opened."""
        waited = _CLOCK.now() - self._since
        if self._dialing is not None:
            if waited >= DIAL_PATIENCE:
                self._dialing.cancel()
        elif self._asking and self._session is not None and waited >= SILENCE * 2**self._strikes:
            self._strikes = min(self._strikes + 1, _MOST_STRIKES)
            self._session.drop()

    async def aclose(self) -> None:
        if self._busy and self._server is not None and self._dialing is None:
            await asyncio.wait((self._server,), timeout=_LAST_WORDS)  # for who releases or leaves a line at the end
        self._closed = True
        self._fail_all(LinkError("the backend was closed meanwhile"))
        session, self._session = self._session, None
        if self._dialing is not None:
            self._dialing.cancel()
        if session is not None and self._asking:
            session.drop()
        elif session is not None and not session.closed:
            await session.aclose()
        if self._busy and self._server is not None:
            await asyncio.wait((self._server,), timeout=_LAST_WORDS)
        await asyncio.sleep(0)  # the transport says farewell in the next turn of the loop
