"""
The one module that knows kazoo: a client in one thread of its own, which calls back and never blocks the loop.

kazoo's own threads for callbacks are not started: its connection thread hands every answer to
whoever asked, who passes it on to the event loop. What kazoo leaves to the session's timeout, which
may be an hour, is bounded here: connecting, the handshake, and a connection that has gone silent.

Three things have no public name in kazoo: sending a request that it has no method for, the timeout
that the server has granted, and the line of what is still to be sent. They are used here, and nowhere else.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

from kazoo.client import KazooClient
from kazoo.exceptions import (
    AuthFailedError,
    ConnectionLoss,
    NodeExistsError,
    NoNodeError,
    SessionExpiredError,
    UnimplementedError,
)
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.serialization import Create, Create2, Delete, Exists, GetChildren, GetData, Sync, Transaction
from kazoo.protocol.states import EventType, KazooState
from kazoo.retry import KazooRetry
from kazoo.security import ACL, CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

__all__ = [
    "ANYBODY",
    "CREATOR",
    "Driver",
    "Identity",
    "News",
    "NoNodeError",
    "NodeExistsError",
    "Settings",
    "Stat",
    "UnimplementedError",
    "children",
    "create_container",
    "create_in_line",
    "create_persistent",
    "delete",
    "exists",
    "get",
    "is_acl",
    "is_deletion",
    "replace",
    "sync",
]

Identity = tuple[int, bytes]
"""The id of a session and its password, with which another connection may go on with it."""

ANYBODY: Sequence[object] = tuple(OPEN_ACL_UNSAFE)
CREATOR: Sequence[object] = tuple(CREATOR_ALL_ACL)

_EPHEMERAL = 1
_SEQUENTIAL = 2
_CONTAINER = 4
_FIRST_RETRY = 0.02
_LAST_RETRY = 0.5


class Stat(Protocol):
    """What is read of ZooKeeper's record about a node."""

    @property
    def czxid(self) -> int: ...

    @property
    def ephemeralOwner(self) -> int: ...  # noqa: N802  (the driver's word)


@dataclass(frozen=True, slots=True)
class Settings:
    """How to reach the servers. Nothing of it is shown: it holds passwords."""

    hosts: str
    root: str
    connect_timeout: float
    acl: Sequence[object] = field(default=ANYBODY, repr=False)
    auth: Sequence[tuple[str, str]] = field(default=(), repr=False)
    sasl: Mapping[str, str] | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None


class _CreateContainer(Create2):  # type: ignore[misc]  # kazoo has no types
    """A node that the server removes some time after its last child has gone. kazoo has no method for it."""

    type = 19


def create_in_line(path: str, data: bytes, acl: Sequence[object]) -> object:
    """An ephemeral node with the next number of its folder at the end of *path*; answers path and `Stat`."""
    return Create2(path, data, acl, _EPHEMERAL | _SEQUENTIAL)


def create_container(path: str, acl: Sequence[object]) -> object:
    return _CreateContainer(path, b"", acl, _CONTAINER)


def create_persistent(path: str, acl: Sequence[object]) -> object:
    return Create2(path, b"", acl, 0)


def replace(old: str, new: str, data: bytes, acl: Sequence[object]) -> object:
    """Delete one node and create an ephemeral one, both or neither; answers a list that holds no error if both."""
    return Transaction([Delete(old, -1), Create(new, data, acl, _EPHEMERAL)])


def delete(path: str) -> object:
    return Delete(path, -1)


def sync(path: str) -> object:
    """Answered by way of the leader, and nothing that is asked afterwards is answered with older knowledge."""
    return Sync(path)


def exists(path: str) -> object:
    """Answers a `Stat` or None."""
    return Exists(path, None)


def children(path: str) -> object:
    return GetChildren(path, None)


def get(path: str, watch: Callable[[object], None] | None = None) -> object:
    """
    Answers the data and the `Stat`, or fails with `NoNodeError`.

    *watch* is called once, in the driver's thread, when the node goes or the connection breaks. A
    node that is not there is not watched: one that never comes would be watched for ever.
    """
    return GetData(path, watch)


def is_acl(entry: object) -> bool:
    return isinstance(entry, ACL)


def is_deletion(event: object) -> bool:
    """Whether a watch was called because its node has gone, and not because the connection has."""
    return bool(getattr(event, "type", None) == EventType.DELETED)


class News(NamedTuple):
    """What became of the connection."""

    connected: bool = False
    ended: bool = False
    identity: Identity | None = None
    timeout: float = 0.0
    error: Exception | None = None


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """Runs everything in the connection's thread, and can break a connection off from another one."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._limit = settings.connect_timeout
        self._tls = settings.tls
        self._link: socket.socket | None = None
        self.refusing = False
        self.last_error: Exception | None = None

    def start(self) -> None:
        """Start no threads: as long as the handler does not run, kazoo calls back at once."""

    def stop(self) -> None:
        """Nothing was started."""

    def dispatch_callback(self, callback: Any) -> None:
        callback.func(*callback.args)

    def select(self, rlist: Any, wlist: Any, xlist: Any, timeout: float | None = None) -> Any:
        if len(rlist) + len(wlist) == 1:  # in the middle of a message, or of the handshake: the peer hangs
            timeout = self._limit if timeout is None else min(timeout, self._limit)
        if not hasattr(select, "poll"):
            return super().select(rlist, wlist, xlist, timeout)
        poll = select.poll()
        by_fd = {}
        for items, events in ((rlist, select.POLLIN), (wlist, select.POLLOUT)):
            for item in items:
                by_fd[item.fileno()] = item
                poll.register(item, events)
        ready = [by_fd[fd] for fd, _ in poll.poll(None if timeout is None else timeout * 1000)]
        return [item for item in rlist if item in ready], [item for item in wlist if item in ready], []

    def create_connection(self, address: Any, hostname: str | None = None, timeout: float = 1.0, **_: object) -> Any:
        """Connect, by TLS if there is a context; kazoo leaves a connection open whose handshake failed."""
        if self.refusing:
            raise ConnectionAbortedError
        try:
            link = socket.create_connection(address, min(timeout, self._limit))
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                link = self._tls.wrap_socket(link, server_hostname=hostname)  # closes it when that fails
        except Exception as error:
            self.last_error = error
            raise
        self._link = link
        self._refuse_late(link)
        return link

    def _refuse_late(self, link: socket.socket) -> None:
        """Whoever hung up while the connection was made could not reach it."""
        if self.refusing:
            link.close()
            raise ConnectionAbortedError

    def hang_up(self) -> None:
        """Break the connection; kazoo then connects anew, unless it is to refuse."""
        if (link := self._link) is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(link, socket.SHUT_RDWR)


def _quiet_logger() -> logging.Logger:
    """Keep kazoo from logging credentials and data (at DEBUG), and what our errors tell anyway (at WARNING)."""
    logger = logging.Logger("fencing_sdk.zookeeper", logging.ERROR)  # noqa: LOG001  (not one that others configure)
    logger.parent = logging.getLogger("fencing_sdk")
    return logger


class Driver:
    """
    One ZooKeeper session, by way of one kazoo client.

    A session that has ended is not followed by another one: a request that was meant for the first
    must not be carried out on the second.
    """

    def __init__(self, settings: Settings, timeout: float, identity: Identity | None) -> None:
        self._tell: Callable[[News], None] = _ignore
        self._identity = identity
        self._handler = _Handler(settings)
        self._client: Any = KazooClient(
            hosts=settings.hosts,
            timeout=timeout,
            client_id=identity,
            handler=self._handler,
            auth_data=list(settings.auth) or None,
            sasl_options=dict(settings.sasl) if settings.sasl else None,
            connection_retry=KazooRetry(max_tries=-1, delay=_FIRST_RETRY, max_delay=_LAST_RETRY),
            logger=_quiet_logger(),
        )
        self._connect = self._client._connection._connect  # noqa: SLF001
        self._client._connection._connect = self._connected  # noqa: SLF001
        self._client.add_listener(self._changed)

    @property
    def last_error(self) -> Exception | None:
        """Why connecting failed the last time."""
        return self._handler.last_error

    def start(self, tell: Callable[[News], None]) -> None:
        """Begin to connect; *tell* is called in the driver's thread."""
        self._tell = tell
        self._client.start_async()

    def _connected(self, *address: object) -> object:
        """Connect and log in as kazoo does; tell which session it is and for how long it was granted."""
        timeouts = self._connect(*address)
        self._drop_late_requests()
        identity = cast("Identity", self._client.client_id)
        if self._identity is not None and identity[0] != self._identity[0]:
            self._handler.refusing = True
            self._tell(News(ended=True, error=SessionExpiredError()))
        else:
            self._identity = identity
            self._tell(News(connected=True, identity=identity, timeout=timeouts[0] * 3 / 2 / 1000))
        return timeouts

    def _drop_late_requests(self) -> None:
        """
        Fail what was asked between a loss and the moment in which the loop heard of it.

        kazoo would send it now, long after whoever asked has given it up.
        """
        queue = self._client._queue  # noqa: SLF001
        goodbyes = []
        while queue:
            request, result = queue.popleft()
            if result is None:  # kazoo's own, which nobody waits for: it takes leave
                goodbyes.append((request, result))
            else:
                result.set_exception(ConnectionLoss())
        queue.extend(goodbyes)

    def _changed(self, state: object) -> None:
        if state == KazooState.LOST:
            self._handler.refusing = True
            refused = self._client.client_state == "AUTH_FAILED"
            self._tell(News(ended=True, error=AuthFailedError() if refused else SessionExpiredError()))
        elif state == KazooState.SUSPENDED:
            self._tell(News())

    def ask(self, request: object, answer: Callable[[Any], None]) -> None:
        """Send *request*; *answer* is called in the driver's thread, with a kind of future that is done."""
        result = self._handler.async_result()
        result.rawlink(answer)
        self._client._call(request, result)  # noqa: SLF001

    def hang_up(self) -> None:
        """Break the connection and connect anew, with the same session."""
        self._handler.hang_up()

    def end(self, *, close_session: bool, done: Callable[[], None]) -> None:
        """
        Stop in a thread of its own, then call *done* there.

        Args:
            close_session: Tell the server, which then removes what is the session's. If not, the
                session goes on without a connection until its timeout.

            done: Called when nothing of the client is left.
        """
        if not close_session:
            self._handler.refusing = True
            self._handler.hang_up()

        def stop() -> None:
            try:
                self._client.stop()
                self._client.close()
            except Exception:  # its thread hangs on, and is a daemon
                self._client.logger.exception("a ZooKeeper client does not end")
            finally:
                done()

        threading.Thread(target=stop, name="fencing-zookeeper-end", daemon=True).start()

    def break_off(self) -> None:
        """Do not wait for the server's goodbye."""
        self._handler.refusing = True
        self._handler.hang_up()


def _ignore(_: News) -> None: ...
