"""
The keys of a lock, all in one slot of a Redis Cluster.

    {fencing:invoices/42}:s    its line: the last token, who holds alone, and what `tickets.lua` says
    {fencing:invoices/42}:w    who waits, and the tickets of those who hold together
    {fencing:invoices/42}:e    permits and readers: the owners that hold, by the time at which they die
    {fencing:invoices/42}:n    on a cluster, never written: see `tickets.lua`

A hash tag ends at the first closing brace, so braces in a name are percent-encoded. Otherwise two
names could have the same tag, or a tag could be empty.

A listing walks over the keys with SCAN, one server after the other: a page is one SCAN, so the server is kept busy for
less than a millisecond at a time, and nothing is remembered between pages. What SCAN finds belongs to one server, and
to its cursor. So a cursor of a listing has four parts:

1. The layout: which master has which slots. If that changes, lines may have moved to a server that was listed
   before, so the listing begins again. The map is read anew before each server, and after the last one.
2. The server, by its place in the layout.
3. The connection. On another connection may be another server, after a restart or a failover, and the server's part
   of the listing begins again.
4. The cursor of SCAN.

What is held from the first page to the last is listed at least once, except in a slot of a cluster that is moving
meanwhile, key by key.
"""

from __future__ import annotations

import math
from typing import NamedTuple
from weakref import WeakKeyDictionary

from fencing_sdk._values.claim import check_name
from fencing_sdk._values.clock import JITTER
from fencing_sdk.backends.redis.connection.pipe import Pipe
from fencing_sdk.backends.redis.connection.router import Masters
from fencing_sdk.errors import ConfigurationError

DEFAULT_PREFIX = "fencing"
LINE = ":s"
_ESCAPED = str.maketrans({"%": "%25", "{": "%7B", "}": "%7D"})
_GLOB = str.maketrans({char: f"\\{char}" for char in "\\*?[]"})
"""Escapes what has a meaning in the pattern of SCAN."""


def check_prefix(prefix: object) -> str:
    """Return *prefix* if the keys of locks can begin with it. Raise ConfigurationError if not."""
    prefix = check_name(prefix, parameter="prefix")
    if "{" in prefix or "}" in prefix:
        msg = "prefix must have no braces: the backend sets its own hash tag around prefix and name"
        raise ConfigurationError(msg)
    return prefix


class RedisKeys:
    """The keys that begin with one prefix."""

    __slots__ = ("_prefix",)

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def tag(self, name: str) -> str:
        """The hash tag with which all keys of a lock begin, braces included."""
        if "{" not in name and "}" not in name and "%" not in name:  # translate() is slow, and mostly changes nothing
            return f"{{{self._prefix}:{name}}}"
        return f"{{{self._prefix}:{name.translate(_ESCAPED)}}}"

    def lines(self, prefix: str, *, ending: str = LINE) -> str:
        """The pattern of SCAN for the lines of all names that begin with *prefix*."""
        return f"{{{self._prefix}:{prefix.translate(_ESCAPED)}".translate(_GLOB) + "*}" + ending

    def name(self, key: bytes, *, ending: str = LINE) -> str | None:
        """The name of a key that `lines` has found; None for a key of another program."""
        try:
            tag = key.decode().removesuffix(ending)
        except UnicodeDecodeError:
            return None
        escaped = tag.removeprefix(f"{{{self._prefix}:").removesuffix("}")
        name = escaped.replace("%7B", "{").replace("%7D", "}").replace("%25", "%")
        return name if self.tag(name) == tag else None

    def wake_channel(self, client: str) -> str:
        """The channel on which one client receives the messages for its waiters, whichever locks they wait for."""
        return f"{{{self._prefix}}}:wake:{client}"


def milliseconds(seconds: float) -> int:
    """Round up: the server may keep a ticket for longer than its ttl, never for less."""
    return math.ceil(seconds * 1000)


_BEGIN = b"0"


class ListingCursor(NamedTuple):
    """Cursor at which a listing goes on."""

    layout: str = ""
    server: int = 0
    connection: int = 0
    cursor: bytes = _BEGIN

    def written(self) -> str:
        """Return the text that a page shows."""
        return f"{self.layout}.{self.server}.{self.connection}.{self.cursor.decode()}"

    @classmethod
    def read(cls, cursor: str | None) -> ListingCursor:
        """Read the cursor of a page; None is the begin. Raise ConfigurationError if it comes from no page."""
        if cursor is None:
            return cls()
        layout, *numbers = cursor.split(".")
        if len(numbers) == 3 and all(number.isascii() and number.isdigit() for number in numbers):  # noqa: PLR2004
            return cls(layout, int(numbers[0]), int(numbers[1]), numbers[2].encode())
        msg = "cursor must come from a page of this listing"
        raise ConfigurationError(msg)


class KeyWalk:
    """Walks over the keys of several servers with SCAN, one server after the other."""

    def __init__(self) -> None:
        self._connections: WeakKeyDictionary[Pipe, int] = WeakKeyDictionary()

    async def page(self, at: ListingCursor, among: Masters, pattern: str, count: int) -> tuple[list[bytes], str | None]:
        """
        Look at *count* keys or so: return those that *pattern* matches, and where the next page begins.

        If the layout is another one than that of the page before, the walk begins again.
        """
        layout, servers = among.layout, among.nodes
        if at.layout != layout:
            at = ListingCursor(layout)
        if at.server >= len(servers):
            return [], None  # nothing has moved since the first page
        server = servers[at.server]
        # Unlike those of other processes, from one of which the cursor may come.
        connection = self._connections.setdefault(await server.pipe(), JITTER.getrandbits(63))
        scanned = at.cursor if at.connection == connection else _BEGIN
        match await server.ask("SCAN", scanned, "MATCH", pattern, "COUNT", count):
            case [bytes() as scanned, list() as keys]:
                found = [key for key in keys if isinstance(key, bytes)]
            case _:
                msg = "not an answer to SCAN"
                raise TypeError(msg)
        if scanned != _BEGIN:
            return found, ListingCursor(layout, at.server, connection, scanned).written()
        return found, ListingCursor(layout, at.server + 1).written() if layout else None
