"""
One session of kazoo's client: in one thread of its own, which calls back and never blocks the loop.

kazoo is known here and in the two modules below: the requests are in `_requests`, and how a server is reached in
`_dial`. Four things have no public name in kazoo: sending a request that it has no method for,
the timeout that the server has granted, the line of what is still to be sent, and what it makes of an answer.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.drivers import imported_from

__all__ = ["BACKEND", "KAZOO", "ConnectionNews", "Identity", "KazooDriver", "NodeEnds", "ZooKeeperSettings"]

with imported_from("zookeeper", "kazoo"):
    from kazoo.client import KazooClient
from kazoo.exceptions import AuthFailedError, ConnectionDropped, ConnectionLoss, SessionExpiredError
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.states import KazooState
from kazoo.retry import KazooRetry

from fencing_sdk._http.tls import TlsContext
from fencing_sdk._values.drivers import DIFFERS, KnownDriver
from fencing_sdk._values.url import joined
from fencing_sdk.backends.zookeeper.connection.dial import Dial
from fencing_sdk.backends.zookeeper.connection.kazoo_requests import ALL_CLIENTS, NoNodeError, delete

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
    """How to reach the servers. Nothing of it is shown: it holds passwords."""

    hosts: Sequence[tuple[str, int]]
    root: str
    connect_timeout: float
    acl: Sequence[object] = field(default=ALL_CLIENTS, repr=False)
    auth: Sequence[tuple[str, str]] = field(default=(), repr=False)
    sasl: Mapping[str, str] | None = field(default=None, repr=False)
    tls: TlsContext | None = None

    @property
    def places(self) -> Sequence[str]:
        """Each server as ``host:port``."""
        return [joined(*host) for host in self.hosts]


class ConnectionNews(NamedTuple):
    """What became of the connection."""

    connected: bool = False
    ended: bool = False
    identity: Identity | None = None
    timeout: float = 0.0
    error: Exception | None = None


def _quiet_logger() -> logging.Logger:
    """Keep kazoo from logging credentials and data (at DEBUG), and what our errors contain anyway (at WARNING)."""
    logger = logging.Logger("fencing_sdk.zookeeper", logging.ERROR)  # noqa: LOG001  (not one that others configure)
    logger.parent = logging.getLogger("fencing_sdk")
    return logger


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
        client: Any = _Client(
            hosts=settings.hosts,
            timeout=timeout,
            client_id=identity,
            handler=self._dial,
            auth_data=list(settings.auth) or None,
            sasl_options=dict(settings.sasl) if settings.sasl else None,
            connection_retry=KazooRetry(max_tries=-1, delay=_FIRST_RETRY, max_delay=_LAST_RETRY),
            logger=_quiet_logger(),
        )
        connection = client._connection  # noqa: SLF001
        self._connect, connection._connect = connection._connect, self._connected  # noqa: SLF001
        self._servers, connection._expand_client_hosts = connection._expand_client_hosts, self._in_turn  # noqa: SLF001
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

    def _in_turn(self) -> object:
        """The servers as kazoo has them, in a random order, but those that hung at the end."""
        return self._dial.in_turn(self._servers())

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
            self._ends.resume_all()
            self._report(ConnectionNews(connected=True, identity=identity, timeout=timeout))
        return timeouts

    def _log_in(self, *address: object) -> Any:
        """
        Let kazoo connect, and see to it that it knows what became of it.

        What it does not expect would end its thread with a traceback; and a connection that broke during a login
        by SASL would be a refused login to it, which ends the session. Servers do hang up on a wrong password, but
        so do networks: only the same again and again is taken for a refusal, and neither ends the session.
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
            self.ask(delete(path), partial(self._given_up, path))
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

    The driver's thread keeps the session alive, and with it every node. An event loop that is blocked renews no lease,
    and lets no waiter take the turn that has come. So the thread itself deletes what the loop has not prolonged for a
    ttl. A node has an end from the moment of its creation, except while it is a waiter's that watches another node.
    """

    def __init__(self) -> None:
        self._ends: dict[str, tuple[float, float]] = {}
        """By path: the ttl, and the end."""
        self._first = math.inf
        """No node ends earlier."""
        self._going: set[str] = set()
        self._lock = threading.Lock()

    def begin(self, path: str, ttl: float) -> None:
        """Let a node end in *ttl* seconds, unless it is prolonged."""
        with self._lock:
            self._set(path, ttl, _CLOCK.now() + ttl)

    def prolong(self, path: str, ttl: float) -> bool:
        """Let a node end in *ttl* seconds from now on; False: the thread has given it up."""
        with self._lock:
            known = path in self._ends
            if known:
                self._set(path, ttl, _CLOCK.now() + ttl)
            return known

    def suspend(self, path: str) -> None:
        """Let a node stay: its waiter watches another one."""
        with self._lock:
            if path in self._ends:
                self._ends[path] = self._ends[path][0], math.inf

    def resume_all(self) -> None:
        """Let every node that stays end in its ttl: the watches have ended with their connection."""
        now = _CLOCK.now()
        with self._lock:
            for path, (ttl, end) in list(self._ends.items()):
                if math.isinf(end):
                    self._set(path, ttl, now + ttl)

    def _set(self, path: str, ttl: float, end: float) -> None:
        self._ends[path] = ttl, end
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
            due = [path for path, (_, end) in self._ends.items() if end <= now][: max(0, _AT_ONCE - len(self._going))]
            for path in due:
                del self._ends[path]
            self._going.update(due)
            self._first = min((end for _, end in self._ends.values()), default=math.inf)
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
                self._set(path, 0.0, _CLOCK.now() + _PAUSE)
