"""
One ZooKeeper session in the event loop: requests as futures, and what becomes of the connection.

A request is sent only while there is a connection, and fails with it: nothing is kept to be sent
later without the caller's knowledge. So few are under way at once that handing them to the driver never
blocks the loop. A connection on which answers are due but do not come is broken off long before
the driver would notice, so that another server gets its chance. It is done early where there is another server.

A backend has one session for each ttl in use, shared by all tickets of that ttl. The timeout of a session is fixed when
it is opened, and it is what ends the tickets of a process that died. So tickets of different ttls have different
sessions, up to a number.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.loop_owner import ForkDetector
from fencing_sdk._values.tasks import move_on_after, retrieve
from fencing_sdk._values.timing import DEFAULT_TTL
from fencing_sdk.backends._shared.error_translation import NoConnectionError, reason_of
from fencing_sdk.backends.zookeeper.driver import (
    ConnectionNews,
    Identity,
    KazooDriver,
    NodeEnds,
    ZooKeeperSettings,
)

_WINDOW = 100
"""Requests under way at once. The driver is woken by a byte for each, through a pipe that takes 278 of them."""
_SILENCE = 1 / 5
"""Part of the session's timeout after which a connection that owes an answer is broken off."""
_FIRST_SILENCE = 1 / 18
"""The same where there are several servers, and an answer has come since it was done last."""
_SHORTEST_SILENCE = 0.3
_LONGEST_SILENCE = 5.0
_GOODBYE = 1.0
"""Seconds for the server to confirm that a session was closed."""
_GRANTED = 2 / 3
"""Part of a session's timeout that a lease may count on. See docs/backends/zookeeper.md, "Whose clock"."""
MOST_SESSIONS = 8
"""Each costs a connection and a thread. Locks of more different ttls share the sessions that are there."""

_CLOCK = BootClock()


class ZooKeeperSession:
    """
    One session, which may outlive its connection and even its event loop.

    Args:
        settings: How to reach the servers.

        ttl: Seconds that a lease on this session is to last without a sign of life.

        on_resumed: Called when the connection was lost and found again.

        on_ended: Called when the server has given the session up, and with it all of its nodes.
    """

    def __init__(
        self,
        settings: ZooKeeperSettings,
        ttl: float,
        *,
        on_resumed: Callable[[ZooKeeperSession], None],
        on_ended: Callable[[ZooKeeperSession], None],
    ) -> None:
        self._settings = settings
        self._asked = (math.ceil(1000 * ttl / _GRANTED) + 1.5) / 1000  # the driver rounds down to milliseconds
        self._on_resumed = on_resumed
        self._on_ended = on_ended
        self._identity: Identity | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._driver: KazooDriver | None = None
        self._news = asyncio.Event()
        self._waiting: deque[tuple[object, asyncio.Future[Any], Callable[[Any], object] | None]] = deque()
        self._callbacks: deque[Callable[[], None]] = deque()
        self._scheduled = False
        self._under_way: dict[asyncio.Future[Any], None] = {}
        self.ends = NodeEnds()
        """When its nodes have to go, although the session goes on."""
        self._heard_at = 0.0
        self._first_silence = _FIRST_SILENCE if len(settings.hosts) > 1 else _SILENCE
        self._silence = self._first_silence
        self._alarm: asyncio.TimerHandle | None = None
        self.connected = False
        self.connections = 0
        """Number of its connections: a watch ends with its connection."""
        self.error: Exception | None = None
        """Why the session has ended, if it has."""
        self.timeout = 0.0
        """Seconds that the server keeps the session without a sign of life."""

    @property
    def id(self) -> int:
        """The number of this session in the names of nodes."""
        assert self._identity is not None, "the session was never connected"
        return self._identity[0]

    @property
    def asked(self) -> float:
        """Seconds for which the client asked the server to keep the session without a sign of life."""
        return self._asked

    @property
    def lease(self) -> float:
        """Seconds after its last sign of life for which a lease on this session surely holds."""
        return self.timeout * _GRANTED

    def attach(self) -> None:
        """Connect, in the running loop, unless that is done or under way."""
        loop = asyncio.get_running_loop()
        if self.error is not None or (self._driver is not None and self._loop is loop):
            return
        if self._driver is not None:  # of a loop that has ended without closing us
            self._driver.end(close_session=False, done=lambda: None)
        self._loop = loop
        self._reset()
        self._news = asyncio.Event()
        driver = self._driver = KazooDriver(self._settings, self._asked, self._identity, self.ends)
        driver.start(lambda news: self._post(driver, partial(self._hear, driver, news)))

    async def ready(self) -> None:
        """
        Wait for the connection, not much longer than one takes.

        Raises:
            NoConnectionError: the session is not connected yet.
            Exception: what the driver says when the session has ended.
        """
        self.attach()
        if not self.connected and self.error is None:
            with move_on_after(2 * self._settings.connect_timeout):
                await self._news.wait()
        if self.error is not None:
            raise self.error
        if not self.connected:
            cause = None if self._driver is None else self._driver.last_error
            raise NoConnectionError(*self._settings.places, reason=self._reason(cause)) from cause

    def _reason(self, cause: Exception | None) -> str:
        """Return why there is no connection, with a hint at a wrong URL if there never was one."""
        if cause is None:
            return "no answer"
        if isinstance(cause, ConnectionRefusedError | socket.gaierror) or self.connections:
            return reason_of(cause)
        if self._settings.tls is None:
            return f"{reason_of(cause)}; is it a ZooKeeper, and does it want TLS, which is tls=true?"
        return f"{reason_of(cause)}; does it speak TLS?"

    async def settled(self) -> bool:
        """Wait for the connection for as long as it takes; False when the session ends instead."""
        while not self.connected and self.error is None:
            self.attach()
            await self._news.wait()
        return self.error is None

    def create(self, request: object, ttl: float) -> asyncio.Future[Any]:
        """`call` for the creation of a node, whose path the server makes: it ends in *ttl* seconds unless prolonged."""
        return self.call(request, lambda answer: self.ends.begin(answer.value[0], ttl))

    def call(self, request: object, created: Callable[[Any], object] | None = None) -> asyncio.Future[Any]:
        """
        Send *request*, in the order of the calls; the future has the driver's answer or error.

        *created* is called in the driver's thread, with an answer that is not an error.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.add_done_callback(retrieve)  # a caller that fails with the first of several stops awaiting the others
        if not self.connected or future.get_loop() is not self._loop:
            future.set_exception(self.error or NoConnectionError())
        else:
            self._waiting.append((request, future, created))
            self._send()
        return future

    def watched(self, call: Callable[..., None], *arguments: object) -> Callable[[object], None]:
        """A watch for the driver: *call* is made in the loop, with the event as the last argument."""
        driver = self._driver

        def on_event(event: object) -> None:
            self._post(driver, partial(call, *arguments, event))

        return on_event

    def _send(self) -> None:
        driver = self._driver
        assert driver is not None
        while self._waiting and len(self._under_way) < _WINDOW and self.connected:
            request, future, created = self._waiting.popleft()
            if future.done():
                continue
            if not self._under_way:
                self._heard_at = _CLOCK.now()
                self._watch_silence()
            self._under_way[future] = None
            driver.ask(request, partial(self._on_answer, driver, future, created))

    def _answer(self, future: asyncio.Future[Any], answer: Any) -> None:
        self._under_way.pop(future, None)
        self._heard_at = _CLOCK.now()
        if answer.exception is None:
            self._silence = self._first_silence
        if not future.done():
            if answer.exception is None:
                future.set_result(answer.value)
            else:
                future.set_exception(answer.exception)
        self._send()

    def _watch_silence(self) -> None:
        if self._alarm is not None:
            return
        limit = min(max(self.timeout * self._silence, _SHORTEST_SILENCE), _LONGEST_SILENCE)
        rest = self._heard_at + limit - _CLOCK.now()
        if rest <= 0 and self._driver is not None:
            self._heard_at = _CLOCK.now()
            self._silence = min(2 * self._silence, _SILENCE)  # all servers may be slow: give the next one more time
            self._driver.hang_up()
            rest = limit
        assert self._loop is not None
        self._alarm = self._loop.call_later(rest, self._look_again)

    def _look_again(self) -> None:
        self._alarm = None
        if self._under_way and self.connected:
            self._watch_silence()

    # From the driver's thread to the loop, in order

    def _on_answer(
        self, driver: KazooDriver, future: asyncio.Future[Any], created: Callable[[Any], object] | None, answer: Any
    ) -> None:
        if created is not None and answer.exception is None:
            created(answer)
        self._post(driver, partial(self._answer, future, answer))

    def _post(self, driver: KazooDriver | None, callback: Callable[[], None]) -> None:
        if driver is not self._driver or self._loop is None:
            return
        self._callbacks.append(callback)
        if not self._scheduled:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._run_callbacks)
            except RuntimeError:  # the loop was closed, and with it every caller
                self._scheduled = False

    def _run_callbacks(self) -> None:
        self._scheduled = False
        while self._callbacks:
            self._callbacks.popleft()()

    def _hear(self, driver: KazooDriver | None, news: ConnectionNews) -> None:
        if driver is not self._driver or self.error is not None:
            return
        resumed = news.connected and self._identity is not None
        self.connected = news.connected
        if news.connected:
            self._identity, self.timeout = news.identity, news.timeout
            self.connections += 1
            self._news.set()
            self._send()
            if resumed:
                self._on_resumed(self)
            return
        self._fail_waiting(news.error)
        # The driver has answered what it had before this news; it got the rest in between.
        late = list(self._under_way)
        self._under_way.clear()
        _fail(late, news.error)
        self._news.clear()
        if news.ended:
            self.error = news.error
            self._news.set()
            self._part(close_session=True)
            self._on_ended(self)

    def _fail_waiting(self, error: Exception | None) -> None:
        waiting = [future for _, future, _ in self._waiting]
        self._waiting.clear()
        _fail(waiting, error)

    # The end

    async def aclose(self, *, close_session: bool) -> None:
        """Disconnect; without *close_session* the session goes on until its timeout, and may be attached again."""
        ended = self._part(close_session=close_session)
        if ended is not None:
            with move_on_after(2 * _GOODBYE):
                await ended.wait()

    def _part(self, *, close_session: bool) -> asyncio.Event | None:
        driver, loop = self._driver, self._loop
        self._reset()
        if driver is None or loop is None or loop is not asyncio.get_running_loop():
            return None
        ended = asyncio.Event()
        alarm = loop.call_later(_GOODBYE, driver.break_off)

        def done() -> None:
            alarm.cancel()
            ended.set()

        def closed() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(done)

        driver.end(close_session=close_session, done=closed)
        return ended

    def _reset(self) -> None:
        self._driver = None
        self.connected = False
        self._fail_waiting(self.error)
        _fail(self._under_way, self.error)
        self._under_way.clear()
        self._callbacks.clear()
        self._scheduled = False
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None


def _fail(futures: Iterable[asyncio.Future[Any]], error: Exception | None) -> None:
    for future in futures:
        if not future.done() and not future.get_loop().is_closed():
            future.set_exception(error or NoConnectionError())


class ZooKeeperSessions:
    """Opens sessions when they are needed, and finds the one for a ttl."""

    def __init__(
        self,
        settings: ZooKeeperSettings,
        *,
        on_resumed: Callable[[ZooKeeperSession], None],
        on_ended: Callable[[ZooKeeperSession], None],
    ) -> None:
        self._settings = settings
        self._on_resumed = on_resumed
        self._on_ended = on_ended
        self._by_ttl: dict[int, ZooKeeperSession] = {}
        self._fork = ForkDetector()

    def forked(self) -> bool:
        """Return whether this process is a fork that was not noticed yet; its parent's sessions are then forgotten."""
        if not self._fork.forked():
            return False
        self._by_ttl.clear()  # not even closed: the server would end the parent's session
        return True

    def of(self, ttl: float) -> ZooKeeperSession:
        """
        Return the session for locks of *ttl*; one that has ended is replaced.

        At the limit it is the shortest session that is long enough, else the longest.
        """
        wanted = math.ceil(ttl * 1000)
        session = self._by_ttl.get(wanted)
        if session is not None and session.error is None:
            return session
        if session is None and len(self._by_ttl) >= MOST_SESSIONS:
            longer = [ttl for ttl in self._by_ttl if ttl >= wanted]
            return self.of((min(longer) if longer else max(self._by_ttl)) / 1000)
        session = ZooKeeperSession(self._settings, wanted / 1000, on_resumed=self._on_resumed, on_ended=self._on_ended)
        self._by_ttl[wanted] = session
        return session

    def any(self) -> ZooKeeperSession:
        """A session for questions: one that is connected, if there is one."""
        living = [session for session in self._by_ttl.values() if session.error is None]
        connected = [session for session in living if session.connected]
        return (connected or living or [self.of(DEFAULT_TTL)])[0]

    async def aclose(self, *, keep: Collection[ZooKeeperSession]) -> None:
        """Close all, and disconnect without closing those that still have grants to *keep*."""
        sessions = list(self._by_ttl.values())
        self._by_ttl = {ttl: session for ttl, session in self._by_ttl.items() if session in keep}
        await asyncio.gather(*(session.aclose(close_session=session not in keep) for session in sessions))
