"""
The two directions of a connection to MySQL or MariaDB, cut into requests and whole replies without changing a byte.

The format is in the manuals, "Client/Server Protocol": three bytes for a length, and a number that begins again at 0
with every request. A reply has several packets, and a text of several statements several results.
"""

from __future__ import annotations

from resp_stream import OPAQUE

REPLY = object()
"""Stands for all packets that answer one request."""

_HEAD = 4
_SILENT = {0x01, 0x19}
"""COM_QUIT and COM_STMT_CLOSE, which get no reply."""
_COMMANDS = {0x03: b"COM_QUERY"}
_TLS = 0x0800
_MORE_RESULTS = 0x0008
_ERROR, _END, _OK = 0xFF, 0xFE, 0x00


class _Packets:
    """Cuts bytes into packets, until the connection goes on in TLS."""

    def __init__(self) -> None:
        self.opaque = False
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[tuple[bytes, object]]:
        """What *data* completes: each with what it stands for."""
        self._pending += data
        found: list[tuple[bytes, object]] = []
        while not self.opaque and (packet := self._next()) is not None:
            found += self.sort(packet)
        if self.opaque and self._pending:
            found.append((bytes(self._pending), OPAQUE))
            self._pending.clear()
        return found

    def give_up(self) -> None:
        """Pass everything on as it is."""
        self.opaque = True

    def sort(self, packet: bytes) -> list[tuple[bytes, object]]:
        raise NotImplementedError

    def begins_tls(self, pending: bytes) -> bool:
        return False

    def _next(self) -> bytes | None:
        if self.begins_tls(bytes(self._pending[:2])):
            self.opaque = True
        length = _HEAD + int.from_bytes(self._pending[:3], "little")
        if self.opaque or len(self._pending) < _HEAD or len(self._pending) < length:
            return None
        packet = bytes(self._pending[:length])
        del self._pending[:length]
        return packet


class Requests(_Packets):
    """What a client sends: ``[b"COM_QUERY", text]``, or `OPAQUE` for its login and for what gets no reply."""

    def sort(self, packet: bytes) -> list[tuple[bytes, object]]:
        number, body = packet[3], packet[_HEAD:]
        if number == 1 and len(body) == 32 and int.from_bytes(body[:4], "little") & _TLS:
            self.opaque = True
        if number or body[0] in _SILENT:
            return [(packet, OPAQUE)]
        return [(packet, [_COMMANDS.get(body[0], b"COM"), body[1:]])]


class Replies(_Packets):
    """What a server sends: `REPLY` for all that answers a request, and `OPAQUE` for its part of the login."""

    def __init__(self) -> None:
        super().__init__()
        self._greeted = self._logged_in = False
        self._reply = bytearray()
        self._columns: int | None = None
        """How many descriptions of columns come before the rows; None before a result."""
        self._described = False

    def begins_tls(self, pending: bytes) -> bool:
        return self._greeted and not self._logged_in and pending == b"\x16\x03"

    def sort(self, packet: bytes) -> list[tuple[bytes, object]]:
        if not self._logged_in:
            self._logged_in = self._greeted and packet[_HEAD] == _OK
            self._greeted = True
            return [(packet, OPAQUE)]
        self._reply += packet
        if not self._ends(packet[_HEAD:]):
            return []
        whole = bytes(self._reply)
        self._reply.clear()
        return [(whole, REPLY)]

    def _ends(self, body: bytes) -> bool:
        """Whether the packet is the last one of the reply."""
        if self._columns is None:
            if body[0] in {_OK, _ERROR}:
                return self._is_last(body)
            self._columns, self._described = body[0], False
        elif self._columns:
            self._columns -= 1
        elif body[0] == _END and len(body) == 5 and not self._described:
            self._described = True  # where the server ends the descriptions by a packet of their own
        elif body[0] in {_END, _ERROR} and len(body) < 1 << 24:
            self._columns = None
            return self._is_last(body)
        else:
            self._described = True
        return False

    @staticmethod
    def _is_last(body: bytes) -> bool:
        if body[0] == _ERROR:
            return True
        at = 3 if len(body) == 5 else _after_number(body, _after_number(body, 1))
        return not int.from_bytes(body[at : at + 2], "little") & _MORE_RESULTS


def _after_number(body: bytes, at: int) -> int:
    """Where a number ends whose length depends on its first byte."""
    return at + {0xFC: 3, 0xFD: 4, 0xFE: 9}.get(body[at], 1)
