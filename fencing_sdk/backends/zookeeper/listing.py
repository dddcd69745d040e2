"""
Lists what is held, and who waits.

ZooKeeper tells the names of all folders in one answer, and in no order. So the first page asks for them and sorts
them, and each page looks at the next slice: the lines first, then the first node of each, all of them in two round
trips. The names that remain are kept for the next page. If that comes to another backend object, or too late, it asks
for the names again and goes on behind the last one that was seen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import replace

from fencing_sdk._values.claim import LOCK, READER, Holder, Listing, Waiting
from fencing_sdk._values.clock import wall_seconds
from fencing_sdk._values.names import safe_segment
from fencing_sdk.backends.zookeeper.connection.kazoo_requests import Stat
from fencing_sdk.backends.zookeeper.connection.session import ZooKeeperSession
from fencing_sdk.backends.zookeeper.nodes import Line, LineNode, phase_of, read_holder
from fencing_sdk.backends.zookeeper.requests import Recipe
from fencing_sdk.backends.zookeeper.shares import holding

__all__ = ["ZooKeeperListing"]

_KEPT = 4
"""Listings whose names are kept at the same time."""
_TRIES = 3
"""Times that a lock is looked at while it goes from hand to hand."""
_STRETCH = 100
"""Nodes that are asked for together."""


class ZooKeeperListing:
    """Lists for one backend."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._rest: OrderedDict[tuple[str, str], list[str]] = OrderedDict()  # by the prefix and the cursor

    async def page(self, session: ZooKeeperSession, prefix: str, cursor: str | None, limit: int) -> Listing:
        """See `fencing_sdk.abc.SupportsListing.list_held`."""
        folders = await self._folders(session, safe_segment(prefix), cursor)
        named = [(folder, name) for folder in folders[:limit] if (name := self._recipe.paths.name(folder)) is not None]
        holders = await self._holders(session, [name for _, name in named])
        if len(folders) <= limit:
            return Listing(holders, None)
        after = folders[limit - 1]
        self._rest[safe_segment(prefix), after] = folders[limit:]
        while len(self._rest) > _KEPT:
            self._rest.popitem(last=False)
        return Listing(holders, after)

    async def _folders(self, session: ZooKeeperSession, prefix: str, cursor: str | None) -> list[str]:
        """The folders that this page and the later ones look at."""
        if cursor is not None and (rest := self._rest.pop((prefix, cursor), None)) is not None:
            return rest
        folders = [folder for folder in await self._recipe.names(session) if folder.startswith(prefix)]
        return folders if cursor is None else folders[bisect_right(folders, cursor) :]

    async def _holders(self, session: ZooKeeperSession, names: Sequence[str]) -> list[Holder]:
        lines = await self._recipe.look_at_all(session, names)
        held = [(name, line, node) for name, line in zip(names, lines, strict=True) for node in holding(line)]
        phases = await self._phases(session, {name for name, _, node in held if node.mode == READER.word})
        paths = [self._recipe.paths.node(name, node) for name, _, node in held]
        holders = []
        for (name, line, node), read in zip(held, await self._recipe.read_all(session, paths), strict=True):
            if read is None and node.mode == LOCK.word:  # it goes from hand to hand: ask for the next
                line, read = await self._next_holder(session, name)  # noqa: PLW2901
                node = line[0] if line else node  # noqa: PLW2901
            if line and read is not None:
                waiters = len(line) - len(holding(line))
                holder = read_holder(name, node, *read, None, phase=phases.get(name))
                holders.append(replace(holder, waiters=waiters))
        return holders

    async def _phases(self, session: ZooKeeperSession, names: Collection[str]) -> dict[str, int]:
        """The tokens of the readers of each name."""
        found = await self._recipe.read_all(session, [self._recipe.paths.folder(name) for name in names])
        return {
            name: phase
            for name, read in zip(names, found, strict=True)
            if read is not None and (phase := phase_of(read[0])) is not None
        }

    async def _next_holder(self, session: ZooKeeperSession, name: str) -> tuple[Line, tuple[bytes, Stat] | None]:
        for _ in range(_TRIES):
            if not (line := await self._recipe.look(session, name)):
                break
            (read,) = await self._recipe.read_all(session, [self._recipe.paths.node(name, line[0])])
            if read is not None:
                return line, read
        return Line(), None

    async def waiters(self, session: ZooKeeperSession, name: str) -> list[Waiting]:
        """See `fencing_sdk.abc.SupportsListing.list_waiters`."""
        line = await self._recipe.look(session, name)
        waiters: list[Waiting] = []
        for start in range(len(holding(line)), len(line), _STRETCH):
            waiters += await self._read_waiters(session, name, line[start : start + _STRETCH])
        return waiters

    async def _read_waiters(self, session: ZooKeeperSession, name: str, line: Sequence[LineNode]) -> list[Waiting]:
        paths = [self._recipe.paths.node(name, node) for node in line]
        waiters = []
        for node, read in zip(line, await self._recipe.read_all(session, paths), strict=True):
            if read is not None:
                holder = read_holder(name, node, *read, None)
                waiting_for = max(0.0, wall_seconds() - read[1].ctime / 1000)
                waiters.append(Waiting(holder.holder, holder.mode, waiting_for, holder.metadata))
        return waiters
