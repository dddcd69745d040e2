"""
One session of kazoo's client: in one thread of its own, which calls back and never blocks the loop.

Four things have no public name in kazoo: sending a request that it has no method
for, the timeout that the server has granted, the line of what is still to be sent, and what it makes of an answer.

Where there are several servers, the first tries give each of them little time, and one that hung is tried after all
others: a server that hangs must not cost what is left of a lease. When as many tries as there are servers have hung,
they get twice the time, up to the limit, because all may be slow.

kazoo's own threads for callbacks are not started: its connection thread hands every answer to
the caller's callback, which passes it on to the event loop. What kazoo leaves to the session's timeout, which
may be an hour, is bounded here: connecting, the handshake, and a connection that has gone silent.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

from fencing_sdk._http.tls import TlsContext
from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.drivers import DIFFERS, KnownDriver, imported_from
from fencing_sdk._values.url import joined

with imported_from("zookeeper", "kazoo"):
    from kazoo.client import KazooClient
from kazoo.exceptions import (
    AuthFailedError,
    ConnectionDropped,
    ConnectionLoss,
    NoNodeError,
    SessionExpiredError,
)
from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
from kazoo.protocol.serialization import Delete
from kazoo.protocol.states import KazooState
from kazoo.retry import KazooRetry
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

ALL_CLIENTS: Sequence[object] = tuple(OPEN_ACL_UNSAFE)
CREATOR: Sequence[object] = tuple(CREATOR_ALL_ACL)

Address = tuple[str, int]

_MOST_DOUBLINGS = 20
_CLOCK = BootClock()


class Dial(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """Runs all callbacks in the connection's thread, and can break a connection off from another thread."""

    def __init__(self, *, connect_timeout: float, first_timeout: float, servers: int, tls: TlsContext | None) -> None:
        super().__init__()
        self._limit = connect_timeout
        self._first_limit = min(first_timeout, connect_timeout)
        self._servers = servers
        self._connecting = False
        self._hangs = 0
        self._hung: dict[Address, int] = {}
        self._address: Address = ("", 0)
        self._tls = tls
        self._link: socket.socket | None = None
        self.refusing = False
        self.last_error: Exception | None = None
        self.tend: Callable[[], float] = lambda: math.inf
        """Called by the driver's thread before it waits for messages; returns the seconds until the next call."""

    def start(self) -> None:
        """Start no threads: as long as the handler does not run, kazoo calls back at once."""

    def stop(self) -> None:
        """Nothing was started."""

    def dispatch_callback(self, callback: Any) -> None:
        """Call back at once."""
        callback.func(*callback.args)

    def select(self, rlist: Any, wlist: Any, xlist: Any, timeout: float | None = None) -> Any:
        """Wait for sockets, by poll where there is one, and not longer than the limit for a single one."""
        if len(rlist) + len(wlist) == 1:  # in the middle of a message, or of the handshake: the peer hangs
            limit = self._limit_of_try()
            timeout = limit if timeout is None else min(timeout, limit)
            return self._select(rlist, wlist, xlist, timeout)
        end = math.inf if timeout is None else _CLOCK.now() + timeout
        while True:  # between messages
            pause = min(end - _CLOCK.now(), math.inf if self._connecting else self.tend())
            ready = self._select(rlist, wlist, xlist, None if math.isinf(pause) else max(0.0, pause))
            if any(ready) or _CLOCK.now() >= end:
                return ready

    def _select(self, rlist: Any, wlist: Any, xlist: Any, timeout: float | None) -> Any:
        if not hasattr(select, "poll"):
            return super().select(rlist, wlist, xlist, timeout)
        poll = select.poll()
        by_fd = {}
        for items, events in ((rlist, select.POLLIN), (wlist, select.POLLOUT)):
            for item in items:
                by_fd[item.fileno()] = item
                poll.register(item, events)
        ready = [by_fd[fd] for fd, _ in poll.poll(None if timeout is None else timeout * 1000)]
        if not ready and self._connecting:
            self._hangs_now()
        return [item for item in rlist if item in ready], [item for item in wlist if item in ready], []

    def create_connection(self, address: Any, hostname: str | None = None, timeout: float = 1.0, **_: object) -> Any:
        """Connect, by TLS if there is a context; kazoo leaves a connection open whose handshake failed."""
        if self.refusing:
            raise ConnectionAbortedError
        self._connecting, self._address = True, address
        try:
            link = socket.create_connection(address, min(timeout, self._limit_of_try()))
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                link = self._tls().wrap_socket(link, server_hostname=hostname)  # closes it when that fails
        except Exception as error:
            self.failed(error)
            if isinstance(error, TimeoutError):
                self._hangs_now()
            raise
        self._link = link
        self._refuse_late(link)
        return link

    def failed(self, error: Exception) -> None:
        """Note why a try failed. A refused connection, as at an address without a server, says less than others."""
        if self.last_error is None or not isinstance(error, ConnectionRefusedError):
            self.last_error = error

    def _limit_of_try(self) -> float:
        """Seconds for connecting, and for each step of the handshake. On a connection that serves: the whole limit."""
        if not self._connecting:
            return self._limit
        return min(self._limit, self._first_limit * 2.0 ** min(self._hangs // self._servers, _MOST_DOUBLINGS))

    def _hangs_now(self) -> None:
        self._hangs += 1
        self._hung[self._address] = self._hangs

    def serves(self) -> None:
        """The handshake is done: the next time, the first tries are short again."""
        self._connecting = False
        self._hangs = 0
        self._hung.pop(self._address, None)

    def in_turn(self, servers: Iterable[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
        """Sort *servers*, each a host, its address and its port: those that hung at the end."""
        return sorted(servers, key=lambda server: self._hung.get((server[1], server[2]), 0))

    def _refuse_late(self, link: socket.socket) -> None:
        """Close a connection that was made while `hang_up` looked for one."""
        if self.refusing:
            link.close()
            raise ConnectionAbortedError

    def hang_up(self) -> None:
        """Break the connection; kazoo then connects anew, unless it is to refuse."""
        self._hung[self._address] = self._hangs + 1
        if (link := self._link) is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(link, socket.SHUT_RDWR)


BACKEND = "ZooKeeperBackend"
KAZOO = KnownDriver("kazoo", user=BACKEND)

Identity = tuple[int, bytes]
"""The id of a session and its password, with which another connection may go on with it."""

_REFUSED_LOGINS = 3
_FIRST_RETRY = 0.02
_LAST_RETRY = 0.25
_FIRST_TIMEOUT = 1 / 30
"""Part of the session's timeout that a server has to accept a connection and the session, in the first tries."""
_LEAST_FIRST_TIMEOUT = 0.25


@dataclass(frozen=True, slots=True)
class ZooKeeperSettings:
    """Options of the connections. Nothing of it is shown: it holds passwords."""

    hosts: Sequence[tuple[str, int]]
    root: str
    connect_timeout: float
    acl: Sequence[object] = field(default=ALL_CLIENTS, repr=False)
    auth: Sequence[tuple[str, str]] = field(default=(), repr=False)
    sasl: Mapping[str, Any] | None = field(default=None, repr=False)
    tls: TlsContext | None = None

    @property
    def places(self) -> Sequence[str]:
        """Each server as ``host:port``."""
        return [joined(*host) for host in self.hosts]


class ConnectionNews(NamedTuple):
    """A change of the connection."""

    connected: bool = False
    ended: bool = False
    identity: Identity | None = None
    timeout: float = 0.0
    error: Exception | None = None


class _Client(KazooClient):  # type: ignore[misc]
    """A client that takes hosts and ports. kazoo reads them from a text, with `urllib.parse.urlsplit`."""

    def set_hosts(self, hosts: Sequence[tuple[str, int]]) -> None:
        self.hosts, self.chroot = list(hosts), ""


class KazooDriver:
    """
    One ZooKeeper session, by way of one kazoo client.

    A session that has ended is not followed by another one: a request that was meant for the first
    must not be carried out on the second.
    """

    def __init__(self, settings: ZooKeeperSettings, timeout: float, identity: Identity | None, ends: NodeEnds) -> None:
        self._ends = ends
        self._report: Callable[[ConnectionNews], None] = _ignore
        self._identity = identity
        self._refusal: Exception | None = None
        self._broken_logins = 0
        hosts = settings.hosts
        self._dial = Dial(
            connect_timeout=settings.connect_timeout,
            first_timeout=max(timeout * _FIRST_TIMEOUT, _LEAST_FIRST_TIMEOUT) if len(hosts) > 1 else math.inf,
            servers=len(hosts),
            tls=settings.tls,
        )
        self._dial.tend = self._give_up_overdue
        with KAZOO.known("connect"):
            self._client = self._make_client(settings, timeout, identity)

    def _make_client(self, settings: ZooKeeperSettings, timeout: float, identity: Identity | None) -> Any:
        # kazoo must not log credentials and data (at DEBUG), nor what our errors contain anyway (at WARNING).
        logger = logging.Logger("fencing_sdk.zookeeper", logging.ERROR)  # noqa: LOG001  (not one that others configure)
        logger.parent = logging.getLogger("fencing_sdk")
        client: Any = _Client(
            hosts=settings.hosts,
            timeout=timeout,
            client_id=identity,
            handler=self._dial,
            auth_data=list(settings.auth) or None,
            sasl_options=dict(settings.sasl) if settings.sasl else None,
            connection_retry=KazooRetry(max_tries=-1, delay=_FIRST_RETRY, max_delay=_LAST_RETRY),
            logger=logger,
        )
        connection = client._connection  # noqa: SLF001
        self._connect, connection._connect = connection._connect, self._connected  # noqa: SLF001
        servers = connection._expand_client_hosts  # noqa: SLF001
        connection._expand_client_hosts = lambda: self._dial.in_turn(servers())  # noqa: SLF001
        self._take, connection._read_response = connection._read_response, self._answered  # noqa: SLF001
        self._call, _ = client._call, client._queue  # noqa: SLF001  (what is not there is noticed now)
        client.add_listener(self._changed)
        return client

    @property
    def last_error(self) -> Exception | None:
        """Why connecting failed the last time."""
        return self._dial.last_error

    def start(self, report: Callable[[ConnectionNews], None]) -> None:
        """Begin to connect; *report* is called in the driver's thread."""
        self._report = report
        self._client.start_async()

    def _connected(self, *address: object) -> object:
        """Connect and log in as kazoo does; report which session it is and the timeout that the server granted."""
        timeouts = self._log_in(*address)
        try:
            self._drop_late_requests()
            identity, timeout = cast("Identity", self._client.client_id), timeouts[0] * 3 / 2 / 1000
        except DIFFERS as error:
            self._refusal = KAZOO.changed("connect", error)
            raise AuthFailedError from error
        if self._identity is not None and identity[0] != self._identity[0]:
            self._dial.refusing = True
            self._report(ConnectionNews(ended=True, error=SessionExpiredError()))
        else:
            self._identity = identity
            self._report(ConnectionNews(connected=True, identity=identity, timeout=timeout))
        return timeouts

    def _log_in(self, *address: object) -> Any:
        """
        Let kazoo connect.

        An error that kazoo does not expect would end its thread with a traceback. A connection that broke during a
        login by SASL is a refused login to kazoo, which ends the session. Servers do hang up on a wrong password, but
        so do networks: only several in a row are reported as a refusal, and none ends the session.
        """
        broken, self._broken_logins = self._broken_logins, 0
        try:
            timeouts = self._connect(*address)
        except (ConnectionDropped, KazooTimeoutError, SessionExpiredError) as error:
            self._dial.failed(_reason(error))
            raise
        except AuthFailedError as error:
            if not isinstance(error.__cause__, ConnectionDropped):
                raise
            self._broken_logins = broken + 1
            self._dial.last_error = error if self._broken_logins >= _REFUSED_LOGINS else error.__cause__
            raise error.__cause__ from error
        except Exception as error:
            self._refusal = error
            raise AuthFailedError from error
        self._dial.last_error = None
        self._dial.serves()
        return timeouts

    def _answered(self, *answer: object) -> object:
        """Take an answer as kazoo does; one that is out of turn costs the connection, and not kazoo's thread."""
        try:
            return self._take(*answer)
        except (RuntimeError, IndexError) as error:
            self._dial.last_error = error
            raise ConnectionDropped from error

    def _drop_late_requests(self) -> None:
        """
        Fail the requests between a loss and the moment in which the loop heard of it.

        kazoo would send it now, long after the caller has given it up.
        """
        queue = self._client._queue  # noqa: SLF001
        goodbyes = []
        while queue:
            request, result = queue.popleft()
            if result is None:  # kazoo's own, which no caller awaits: it ends the session
                goodbyes.append((request, result))
            else:
                result.set_exception(ConnectionLoss())
        queue.extend(goodbyes)

    def _changed(self, state: object) -> None:
        if state == KazooState.LOST:
            self._dial.refusing = True
            refused = self._client.client_state == "AUTH_FAILED"
            error = self._refusal or (AuthFailedError() if refused else SessionExpiredError())
            self._report(ConnectionNews(ended=True, error=error))
        elif state == KazooState.SUSPENDED:
            self._report(ConnectionNews())

    def ask(self, request: object, answer: Callable[[Any], None]) -> None:
        """Send *request*; *answer* is called in the driver's thread, with a kind of future that is done."""
        result = self._dial.async_result()
        result.rawlink(answer)
        try:
            self._call(request, result)
        except DIFFERS as error:
            result.set_exception(KAZOO.changed("request", error))

    def _give_up_overdue(self) -> float:
        """Delete the nodes that the loop has not prolonged in time; return the seconds until the next look."""
        due, following = self._ends.take_due()
        for path in due:
            self.ask(Delete(path, -1), partial(self._given_up, path))
        return following

    def _given_up(self, path: str, answer: Any) -> None:
        if answer.exception is None or isinstance(answer.exception, NoNodeError):
            self._ends.gone(path)
        else:
            self._ends.stays(path)

    def hang_up(self) -> None:
        """Break the connection and connect anew, with the same session."""
        self._dial.hang_up()

    def end(self, *, close_session: bool, done: Callable[[], None]) -> None:
        """
        Stop in a thread of its own, then call *done* there.

        Args:
            close_session: Close it at the server, which then removes what is the session's. If not, the
                session goes on without a connection until its timeout.

            done: Called when nothing of the client is left.
        """
        if not close_session:
            self._dial.refusing = True
            self._dial.hang_up()

        def stop() -> None:
            try:
                self._client.stop()
                self._client.close()
            except Exception:  # its thread hangs on, and is a daemon
                self._client.logger.exception("a ZooKeeper client does not end")
            finally:
                done()

        try:
            threading.Thread(target=stop, name="fencing-zookeeper-end", daemon=True).start()
        except RuntimeError:  # Python 3.12 starts no thread while the interpreter ends
            stop()

    def break_off(self) -> None:
        """Do not wait for the server's goodbye."""
        self._dial.refusing = True
        self._dial.hang_up()


def _reason(error: Exception) -> Exception:
    """Return what made kazoo drop a connection: kazoo's own error has it in the text alone."""
    return error.__context__ if isinstance(error.__context__, OSError) else error


def _ignore(_: ConnectionNews) -> None: ...


_CLOCK = BootClock()
_AT_ONCE = 100
"""Nodes that are deleted at once: the driver is woken by a byte for each, and its pipe takes few."""

_PAUSE = 0.1
"""Seconds until nodes that could not be deleted are due again."""


class NodeEnds:
    """
    When the nodes of one session have to go, whatever its event loop does. The loop and the driver's thread use it.

    The driver's thread keeps the session alive, and with it every node. An event loop that is blocked keeps no ticket.
    So the thread itself deletes the nodes of tickets that were not kept in time, whether they hold or wait.
    """

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}
        """The end of each path."""
        self._first = math.inf
        """No node ends earlier."""
        self._going: set[str] = set()
        self._lock = threading.Lock()

    def begin(self, path: str, ttl: float) -> bool:
        """Let a node end in *ttl* seconds, unless it is prolonged; False: the thread has given it up."""
        with self._lock:
            if path not in self._going:
                self._set(path, max(_CLOCK.now() + ttl, self._ends.get(path, 0.0)))
            return path not in self._going

    def prolong(self, path: str, ttl: float) -> bool:
        """Let a node last for *ttl* seconds from now on, or for longer; False: the thread has given it up."""
        with self._lock:
            end = self._ends.get(path)
            if end is not None:
                self._set(path, max(end, _CLOCK.now() + ttl))
            return end is not None

    def limit(self, path: str, ttl: float) -> None:
        """Let a node end in *ttl* seconds, or earlier."""
        with self._lock:
            if (end := self._ends.get(path)) is not None:
                self._set(path, min(end, _CLOCK.now() + ttl))

    def left(self, path: str) -> float | None:
        """Seconds until a node ends; None: it is not known, or was given up."""
        with self._lock:
            end = self._ends.get(path)
        return None if end is None else max(0.0, end - _CLOCK.now())

    def _set(self, path: str, end: float) -> None:
        self._ends[path] = end
        self._first = min(self._first, end)

    def drop(self, path: str) -> None:
        """Forget a node: it is deleted, or has another name."""
        with self._lock:
            self._ends.pop(path, None)

    def take_due(self) -> tuple[list[str], float]:
        """Give up the nodes that are to go now; also return the seconds until the next look."""
        with self._lock:
            now = _CLOCK.now()
            if now < self._first:
                return [], self._first - now
            due = [path for path, end in self._ends.items() if end <= now][: max(0, _AT_ONCE - len(self._going))]
            for path in due:
                del self._ends[path]
            self._going.update(due)
            self._first = min(self._ends.values(), default=math.inf)
            return due, max(_PAUSE, self._first - now)

    def gone(self, path: str) -> None:
        """An abandoned node is deleted."""
        with self._lock:
            self._going.discard(path)

    def stays(self, path: str) -> None:
        """An abandoned node could not be deleted: it is due again."""
        with self._lock:
            self._going.discard(path)
            if path not in self._ends:
                self._set(path, _CLOCK.now() + _PAUSE)
