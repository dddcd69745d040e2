"""One direction of a Redis connection, cut into whole messages without changing a byte."""

from __future__ import annotations

from typing import Any

import hiredis

OPAQUE = object()
"""Stands for a message that cannot be read, as in TLS or in a replication stream."""

_PARTIAL = object()
_SUBSCRIBING = {kind + verb for kind in (b"", b"p", b"s") for verb in (b"subscribe", b"unsubscribe")}
_PUSHED = _SUBSCRIBING | {b"message", b"pmessage", b"smessage"}


class RespStream:
    """Bytes in; out come whole messages, as they were sent and as they are read."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader(notEnoughData=_PARTIAL)
        self._pending = bytearray()
        self._opaque = False

    def feed(self, data: bytes) -> list[tuple[bytes, Any]]:
        """The messages that *data* completes, each as its bytes and its value."""
        if self._opaque:
            return [(data, OPAQUE)]
        whole = []
        for line in data.splitlines(keepends=True):
            self._pending += line
            if (message := self._read(line)) is not _PARTIAL:
                whole.append((bytes(self._pending), message))
                self._pending.clear()
        return [*whole, *self._unreadable()]

    def give_up(self) -> None:
        """From here on this is no RESP."""
        self._opaque = True

    def _read(self, line: bytes) -> Any:
        if self._opaque:
            return _PARTIAL
        try:
            self._reader.feed(line)
            return self._reader.gets()
        except hiredis.ProtocolError:
            self.give_up()
            return _PARTIAL

    def _unreadable(self) -> list[tuple[bytes, Any]]:
        if not self._opaque or not self._pending:
            return []
        rest = bytes(self._pending)
        self._pending.clear()
        return [(rest, OPAQUE)]


def is_request(message: object) -> bool:
    return isinstance(message, list) and bool(message) and all(isinstance(part, bytes) for part in message)


def has_reply(request: list[bytes]) -> bool:
    """Whether the server answers *request* in line; subscriptions are confirmed by messages among the pushes."""
    return request[0].lower() not in _SUBSCRIBING


def is_reply(message: object) -> bool:
    """Whether *message* answers a request; what the server says unasked does not."""
    if message is OPAQUE or isinstance(message, hiredis.PushNotification):
        return False
    head = message[0] if isinstance(message, list) and message else None
    return not (isinstance(head, bytes) and head in _PUSHED)
