"""
The two directions of a PostgreSQL connection, cut into messages without changing a byte.

The format is in the manual, "Frontend/Backend Protocol": a byte that names the kind, and a length that counts itself;
a client's first message has no kind.
"""

from __future__ import annotations

import struct

OPAQUE = object()
"""Stands for a message that does not matter here, or that cannot be read, as in TLS."""

READY = object()
"""Stands for the message that ends the reply to a request."""

ANSWER = object()
"""Stands for a message of which a reply is made: a row, the end of a statement, an error of a statement that ran."""

_SSL_REQUEST = struct.pack("!II", 8, 80877103)
_ANSWERS = frozenset(b"2DCIs")


class Requests:
    """What a client sends. A request is what the server runs at once: one query, or messages up to a Sync."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._group = bytearray()
        self._words: list[bytes] = []
        self._texts: dict[bytes, bytes] = {}
        self._begun = self._opaque = False

    def feed(self, data: bytes) -> list[tuple[bytes, object]]:
        """Whole requests as ``[kind, text of the statement, arguments, ...]``, and everything else as `OPAQUE`."""
        if self._opaque:
            return [(data, OPAQUE)]
        self._pending += data
        found: list[tuple[bytes, object]] = []
        while (message := self._next()) is not None:
            found += self._sorted(message)
        if self._opaque and self._pending:
            found.append((bytes(self._pending), OPAQUE))
        return found

    def _next(self) -> bytes | None:
        start = 1 if self._begun else 0
        if self._pending and not self._begun and self._pending[0] != 0:
            self._opaque = True  # no length of a first message is that high: this is TLS
        if self._opaque or len(self._pending) < start + 4:
            return None
        length = start + struct.unpack_from("!I", self._pending, start)[0]
        if len(self._pending) < length:
            return None
        message = bytes(self._pending[:length])
        del self._pending[:length]
        return message

    def _sorted(self, message: bytes) -> list[tuple[bytes, object]]:
        if not self._begun:
            self._begun = message != _SSL_REQUEST
            return [(message, OPAQUE)]
        self._group += message
        self._read(message[:1], message[5:])
        if message[:1] in {b"P", b"B", b"D", b"E", b"C"}:
            return []  # more will come
        whole = bytes(self._group)
        words = [b"EXECUTE", *self._words]
        self._group.clear()
        self._words.clear()
        return [(whole, words if message[:1] in {b"S", b"Q"} else OPAQUE)]

    def _read(self, kind: bytes, body: bytes) -> None:
        if kind == b"Q":
            self._words.append(body.rstrip(b"\0"))
        elif kind == b"P":
            name, text, _ = body.split(b"\0", 2)
            self._texts[name] = text
        elif kind == b"B":
            _, name, arguments = body.split(b"\0", 2)
            self._words += [self._texts.get(name, b""), arguments]


class Replies:
    """What a server sends: each message as `READY`, as `ANSWER`, or as `OPAQUE`."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._begun = self._opaque = False

    def feed(self, data: bytes) -> list[tuple[bytes, object]]:
        """The messages that *data* completes."""
        if self._opaque:
            return [(data, OPAQUE)]
        self._pending += data
        found: list[tuple[bytes, object]] = []
        if not self._begun and bytes(self._pending[:1]) in {
            b"N",
            b"S",
        }:  # the answer to a request for TLS is a bare byte
            self._opaque = self._pending[:1] == b"S"
            found.append((bytes(self._pending[:1]), OPAQUE))
            del self._pending[:1]
        if self._opaque and self._pending:
            found.append((bytes(self._pending), OPAQUE))
            return found
        self._begun = self._begun or bool(self._pending)
        while (message := self._next()) is not None:
            kind = message[0]
            found.append((message, READY if kind == ord("Z") else ANSWER if kind in _ANSWERS else OPAQUE))
        return found

    def _next(self) -> bytes | None:
        if self._opaque or len(self._pending) < 5:
            return None
        length = 1 + struct.unpack_from("!I", self._pending, 1)[0]
        if len(self._pending) < length:
            return None
        message = bytes(self._pending[:length])
        del self._pending[:length]
        return message
