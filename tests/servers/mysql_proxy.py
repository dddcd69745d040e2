"""The proxy with faults, for the protocol of MySQL and MariaDB."""

from __future__ import annotations

from typing import Any, cast

from fault_proxy import FaultProxy, Link
from mysql_server import USER, MysqlServer
from mysql_stream import Replies, Requests


class MysqlLink(Link):
    def __init__(self, proxy: FaultProxy) -> None:
        super().__init__(proxy)
        self.up.stream = cast(Any, Requests())
        self.down.stream = cast(Any, Replies())


class MysqlProxy(FaultProxy):
    """
    What `FaultProxy` is for Redis: ``lose_replies(of="INSERT INTO fencing_ticket")``, ``cut()``, ``blackhole()``.

    *of* is looked for in the text, which may have several statements. `requests` has ``(b"COM_QUERY", text)`` for each.
    The reply to a text is delivered whole, or not at all. Nothing is seen through TLS.
    """

    def __init__(self, server: MysqlServer) -> None:
        super().__init__(server.port)
        self._of = server

    @property
    def url(self) -> str:
        return self.url_as(USER)

    def url_as(self, user: str, password: str = "", **options: Any) -> str:
        """As `MysqlServer.url_as`."""
        return self._of.url_as(user, password, port=self.port, **options)

    def _new_link(self) -> Link:
        return MysqlLink(self)
