"""
How the driver reaches a server: connecting with TLS, waiting on sockets, and breaking off.

Where there are several servers, the first tries give each of them little time, and one that hung is tried after all
others: a server that hangs must not cost what is left of a lease. When as many tries as there are servers have hung,
they get twice the time, up to the limit, because all may be slow.

kazoo's own threads for callbacks are not started: its connection thread hands every answer to
the caller's callback, which passes it on to the event loop. What kazoo leaves to the session's timeout, which
may be an hour, is bounded here: connecting, the handshake, and a connection that has gone silent.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
from collections.abc import Callable, Iterable
from typing import Any

from kazoo.handlers.threading import SequentialThreadingHandler

from fencing_sdk._http.tls import TlsContext
from fencing_sdk._values.clock import BootClock

__all__ = ["Dial"]

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
        """What the driver's thread does before it waits for messages; returns the seconds until the next time."""

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
