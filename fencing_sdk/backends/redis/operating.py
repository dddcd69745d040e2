"""
Lists what is held and who waits.

A listing walks over the leases with SCAN, one server after the other: a page is one SCAN and one look at the leases
that it has found, so the server is kept busy for less than a millisecond at a time, and nothing is remembered
between pages. What SCAN finds belongs to one server, and to its cursor. So a cursor of a listing has four parts:

1. The layout: which master has which slots. If that changes, leases may have moved to a server that was listed
   before, so the listing begins again. The map is read anew before each server, and after the last one.
2. The server, by its place in the layout.
3. The connection. On another connection may be another server, after a restart or a failover, and the server's part
   of the listing begins again.
4. The cursor of SCAN.

What is held from the first page to the last is listed at least once, except in a slot of a cluster that is moving
meanwhile, key by key.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple
from weakref import WeakKeyDictionary

from fencing_sdk._values.claim import Holder, Listing, Waiting, holder_of, mode_named
from fencing_sdk._values.clock import JITTER
from fencing_sdk.backends.redis.connection.pipe import Pipe, Reply, ReplyError
from fencing_sdk.backends.redis.connection.router import Masters, RedisRouter
from fencing_sdk.backends.redis.requests import RedisKeys, RedisRequests, read_holders
from fencing_sdk.errors import ConfigurationError

_LOOKED_AT = 50
"""Locks that one run of a script describes: it keeps the server busy for some tenths of a millisecond."""
_STRETCH = 100
"""Waiters that one run of a script returns."""
_BEGIN = b"0"


class ListingCursor(NamedTuple):
    """Where a listing goes on."""

    layout: str = ""
    server: int = 0
    connection: int = 0
    cursor: bytes = _BEGIN

    def written(self) -> str:
        """As it stands in a page."""
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


class RedisListing:
    """Lists for one backend."""

    def __init__(self, keys: RedisKeys, requests: RedisRequests, router: RedisRouter, *, batch: int) -> None:
        self._keys = keys
        self._requests = requests
        self._router = router
        self._batch = min(batch, _LOOKED_AT)
        self._walk = KeyWalk()

    async def page(self, prefix: str, cursor: str | None, limit: int) -> Listing:
        """See `fencing_sdk.abc.SupportsListing.list_holders`."""
        at = ListingCursor.read(cursor)
        masters = await self._router.masters(anew=at.cursor == _BEGIN)
        found, after = await self._walk.page(at, masters, self._keys.leases(prefix), limit)
        return Listing(
            await self._describe([name for key in found if (name := self._keys.name(key)) is not None]), after
        )

    async def _describe(self, names: Sequence[str]) -> list[Holder]:
        """Look at leases: what has ended since they were found is left out, and so is what is not a lease."""
        batches = [names[start : start + self._batch] for start in range(0, len(names), self._batch)]
        holders: list[Holder] = []
        calls = [self._requests.listed(batch) for batch in batches]
        if self._batch == 1:
            outcomes = await self._router.run_all(calls)
        else:  # one run at a time on a single server, so that the calls of others get in between
            outcomes = [await self._router.run(call) for call in calls]
        for batch, outcome in zip(batches, outcomes, strict=True):
            if isinstance(outcome, Exception):
                raise outcome
            for name, lock in zip(batch, outcome if isinstance(outcome, list) else [], strict=True):
                with suppress(ReplyError):  # the key holds something else
                    holders += read_holders(name, lock)
        return holders

    async def waiters(self, name: str) -> list[Waiting]:
        """See `fencing_sdk.abc.SupportsListing.list_waiters`."""
        waiters: list[Waiting] = []
        after = "-inf"
        while after:
            reply = await self._router.run(self._requests.waiting(name, after, _STRETCH))
            stretch = reply if isinstance(reply, list) else []
            for place in range(0, len(stretch), 3):
                said, _, label = _text(stretch[place + 2]).partition("\0")
                match said.split(" "):
                    case [_, _, word, permits, *_]:  # else it has gone without leaving
                        mode = mode_named(word, int(permits) if word == "permit" else None)
                        waiters.append(
                            Waiting(holder_of(_text(stretch[place + 1])), mode, None, label[1:] if label else None)
                        )
            after = _text(stretch[-3]) if len(stretch) == 3 * _STRETCH else ""
        return waiters


def _text(reply: Reply) -> str:
    return reply.decode(errors="replace") if isinstance(reply, bytes) else ""
