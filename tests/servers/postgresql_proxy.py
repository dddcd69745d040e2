"""The proxy with faults, for the protocol of PostgreSQL."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

from fault_proxy import FaultProxy, Link
from postgresql_programs import USER
from postgresql_server import PostgresqlServer
from postgresql_stream import ANSWER, READY, Replies, Requests


class PostgresqlLink(Link):
    def __init__(self, proxy: FaultProxy) -> None:
        super().__init__(proxy)
        self.up.stream = cast(Any, Requests())
        self.down.stream = cast(Any, Replies())

    def _client_made(self, transport: asyncio.Transport) -> None:
        # A reply is several messages: without this, each waits until the one before it was confirmed.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super()._client_made(transport)

    def _reply(self, message: Any) -> bool:
        """Whether to deliver a message: nothing of a reply that is to be lost."""
        loss = self._unanswered[0] if self._unanswered else None
        if message is READY and self._unanswered:
            self._unanswered.popleft()
            if loss is not None:
                self._lose(loss)
        return loss is None or message not in (ANSWER, READY)


class PostgresqlProxy(FaultProxy):
    """
    What `FaultProxy` is for Redis: ``lose_replies(of="fencing_acquire")``, ``cut()``, ``blackhole()``, ``heal()``.

    *of* is looked for in the text of a statement and in its arguments. `requests` has what clients had executed:
    ``(b"EXECUTE", text, arguments)``. A statement that is only prepared is not among them. Nothing is seen through TLS.
    """

    def __init__(self, server: PostgresqlServer) -> None:
        super().__init__(server.port)
        self._of = server

    @property
    def url(self) -> str:
        return self.url_as(USER)

    def url_as(self, user: str, password: str = "", **options: Any) -> str:
        """As `PostgresqlServer.url_as`."""
        return self._of.url_as(user, password, port=self.port, **options)

    def _new_link(self) -> Link:
        return PostgresqlLink(self)
