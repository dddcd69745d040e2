"""A proxy before MySQL or MariaDB that is like some services: it refuses two statements in one text, or renumbers."""

from __future__ import annotations

from fault_proxy import FaultProxy, Link
from mysql_server import USER, MysqlServer, Setting

_FLAGS = 4 + 2
"""Where a client's first packet has the flag for several statements: behind the header and two bytes of other flags."""


class BetweenLink(Link):
    """One connection: only the first packet of each side is changed."""

    def __init__(self, proxy: MysqlBetween) -> None:
        super().__init__(proxy)
        self._one_by_one = proxy.one_by_one
        self._renumber = proxy.renumber
        self._greeting = b""

    def _from_client(self, data: bytes) -> None:
        if self._one_by_one:
            self._one_by_one = False
            data = data[:_FLAGS] + bytes([data[_FLAGS] & ~1]) + data[_FLAGS + 1 :]
        super()._from_client(data)

    def _from_server(self, data: bytes) -> None:
        if self._renumber:
            self._greeting += data
            number = self._greeting.find(b"\0", 5) + 1  # behind the version of the server
            if not number or len(self._greeting) < number + 4:
                return
            self._renumber = False
            changed = bytes([self._greeting[number] ^ 0x55])
            data = self._greeting[:number] + changed + self._greeting[number + 1 :]
        super()._from_server(data)


class MysqlBetween(FaultProxy):
    """
    A `FaultProxy`, with which connections may be cut.

    Args:
        server: What stands behind it.

        one_by_one: Take the right from clients to send several statements in one text.

        renumber: Give each connection a number that is not the server's.
    """

    def __init__(self, server: MysqlServer, *, one_by_one: bool = False, renumber: bool = False) -> None:
        super().__init__(server.port)
        self._of = server
        self.one_by_one = one_by_one
        self.renumber = renumber

    @property
    def url(self) -> str:
        return self.url_as(USER)

    def url_as(self, user: str, password: str = "", **options: Setting) -> str:
        """As `MysqlServer.url_as`."""
        return self._of.url_as(user, password, port=self.port, **options)

    def _new_link(self) -> Link:
        return BetweenLink(self)
