"""
The requests to ZooKeeper to draw a ticket, to look at its line and to end it: the recipe.

It is the known one (ZooKeeper Recipes and Solutions, "Locks"): an ephemeral node with a number, the
lowest number holds the lock, and every waiter watches the node before its own alone. What belongs together is
sent together, so that a free lock costs one round trip. Every look that may end in a loss is preceded by something that
only the leader answers (a create, or a sync): a server that is cut off from its leader goes on
answering reads, and would call a session alive that the leader has ended long ago.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError, UnimplementedError
from kazoo.protocol.serialization import (
    Create,
    Create2,
    Delete,
    Exists,
    GetChildren2,
    GetData,
    SetData,
    Sync,
    Transaction,
)
from kazoo.protocol.states import ZnodeStat as Stat

from fencing_sdk._values.claim import LOCK, Claim
from fencing_sdk.backends.zookeeper.driver import ZooKeeperSettings
from fencing_sdk.backends.zookeeper.nodes import (
    NOTHING,
    Facts,
    LineNode,
    Paths,
    Record,
    in_line,
    mark_of,
    node_at,
    read_facts,
    read_record,
    without_place,
    written,
)
from fencing_sdk.backends.zookeeper.session import ZooKeeperSession

__all__ = ["Look", "Made", "Recipe"]

_TRIES = 3
"""The server may delete the folder of a lock that is not in use just when it was made or found."""
_EPHEMERAL, _SEQUENTIAL, _CONTAINER = 1, 2, 4


class _CreateContainer(Create2):  # type: ignore[misc]  # kazoo has no types
    """A node that the server removes some time after its last child has gone. kazoo has no method for it."""

    type = 19


class Made(NamedTuple):
    """A node of a ticket of this backend object."""

    node: LineNode
    path: str
    number: int
    """The transaction that drew the ticket."""
    born: int
    """The transaction that created the node, which may have replaced another one."""


class Look(NamedTuple):
    """The line of a name, and what its folder says."""

    line: Sequence[LineNode] = ()
    record: Record | None = NOTHING
    """None: the folder has data, which was not read."""
    version: int = -1
    """Version of the folder's data."""

    def of(self, *marks: str) -> LineNode | None:
        """The first node with one of these marks."""
        return next((node for node in self.line if node.mark in marks), None)


class Recipe:
    """The requests, each on a session that is connected. They raise what the driver raises."""

    def __init__(self, settings: ZooKeeperSettings) -> None:
        self._acl = settings.acl
        self.paths = Paths(settings.root)

    async def draw(self, session: ZooKeeperSession, claim: Claim) -> tuple[Made, Look]:
        """
        Create a node at the end of the line, and look at the line.

        Raises:
            NodeExistsError: an earlier try has created one. ZooKeeper gives its last number again and again.
        """
        stem = self.paths.stem(claim.name, claim.mode, mark_of(claim.owner), session.id)
        for last in range(1, _TRIES + 1):
            data = written(claim.ttl, claim.label)
            created = session.create(Create2(stem, data, self._acl, _EPHEMERAL | _SEQUENTIAL), claim.ttl)
            looked = self._ask(session, claim.name, record=claim.mode is not LOCK)
            try:
                path, stat = await created
            except NoNodeError:
                if last == _TRIES:
                    raise
                await self._make_folder(session, claim.name)
                continue
            made = Made(node_at(path, stat.czxid), path, stat.czxid, stat.czxid)
            return made, await self._looked(session, claim.name, *looked)
        raise AssertionError

    def _ask(
        self, session: ZooKeeperSession, name: str, *, record: bool, call: Callable[[object], None] | None = None
    ) -> tuple[asyncio.Future[Any] | None, asyncio.Future[Any]]:
        """Ask for the data of the folder, and then for its nodes: nothing that stands there is of a later node."""
        folder = self.paths.folder(name)
        read = session.call(GetData(folder, None)) if record else None
        return read, session.call(GetChildren2(folder, call))

    async def _looked(
        self, session: ZooKeeperSession, name: str, read: asyncio.Future[Any] | None, listed: asyncio.Future[Any]
    ) -> Look:
        try:
            data, stat = (None, None) if read is None else await read
            names, listed_at = await listed
        except NoNodeError:
            return Look()
        if stat is None or not listed_at.dataLength:
            data, stat = None if listed_at.dataLength else b"", listed_at
        folder = self.paths.folder(name)
        asked = {node: session.call(Exists(f"{folder}/{node}", None)) for node in without_place(names)}
        found: dict[str, Stat | None] = {node: await one for node, one in asked.items()}
        line = in_line(names, {node: each.czxid for node, each in found.items() if each is not None})
        return Look(line, None if data is None else read_record(data), stat.version)

    async def look(
        self,
        session: ZooKeeperSession,
        name: str,
        *,
        record: bool = True,
        synced: bool = True,
        call: Callable[[object], None] | None = None,
    ) -> Look:
        """
        Look at a line.

        Args:
            session: On which one.

            name: Whose line.

            record: Read the folder's data.

            synced: Ask the leader first. Else a ticket of another session may be missing.

            call: Made when a node comes or goes.
        """
        sync = self.sync(session) if synced else None
        asked = self._ask(session, name, record=record, call=call)
        if sync is not None:
            await sync
        return await self._looked(session, name, *asked)

    async def look_at_all(self, session: ZooKeeperSession, names: Sequence[str]) -> list[Look]:
        """Look at many lines at once."""
        sync = self.sync(session)
        asked = [self._ask(session, name, record=True) for name in names]
        await sync
        return [await self._looked(session, name, *each) for name, each in zip(names, asked, strict=True)]

    async def _make_folder(self, session: ZooKeeperSession, name: str) -> None:
        folder = self.paths.folder(name)
        try:
            await self._create(session, _CreateContainer(folder, b"", self._acl, _CONTAINER))
        except NoNodeError:
            for path in self.paths.parents():
                if await session.call(Exists(path, None)) is None:
                    await self._create(session, Create2(path, b"", self._acl, 0))
            await self._create(session, _CreateContainer(folder, b"", self._acl, _CONTAINER))
        except UnimplementedError:  # before ZooKeeper 3.5.3: a folder for each name stays for ever
            await self._create(session, Create2(folder, b"", self._acl, 0))

    async def _create(self, session: ZooKeeperSession, request: object) -> None:
        with suppress(NodeExistsError):
            await session.call(request)

    def sync(self, session: ZooKeeperSession) -> asyncio.Future[Any]:
        """Hear from the leader: it still knows the session."""
        return session.call(Sync(self.paths.root))

    def read(
        self, session: ZooKeeperSession, path: str, call: Callable[[object], None] | None = None
    ) -> asyncio.Future[Any]:
        """Ask for the data of a node, and the record about it. *call* is made when it changes or goes."""
        return session.call(GetData(path, call))

    async def all_facts(self, session: ZooKeeperSession, paths: Sequence[str]) -> list[tuple[Facts, Stat] | None]:
        """Read many nodes; None for those that are not there."""
        asked = [self.read(session, path) for path in paths]
        found: list[tuple[Facts, Stat] | None] = []
        for one in asked:
            try:
                data, stat = await one
            except NoNodeError:
                found.append(None)
            else:
                found.append((read_facts(data, stat), stat))
        return found

    async def names(self, session: ZooKeeperSession) -> list[str]:
        """The folders of all locks, sorted. ZooKeeper answers with all of them at once."""
        synced = self.sync(session)
        listed = session.call(GetChildren2(self.paths.root, None))
        await synced
        try:
            names, _ = await listed
        except NoNodeError:
            return []
        return sorted(names)

    async def write(
        self, session: ZooKeeperSession, name: str, record: Record, version: int, ended: Sequence[LineNode] = ()
    ) -> bool:
        """Write a folder's data, and delete the nodes that *ended*; False, and nothing is changed: something has."""
        paths = [self.paths.node(name, node) for node in ended]
        outcomes = await session.call(
            Transaction(
                [
                    SetData(self.paths.folder(name), record.written(), version),
                    *(Delete(path, -1) for path in paths),
                ]
            )
        )
        return _done(outcomes, BadVersionError, NoNodeError)

    async def remove(self, session: ZooKeeperSession, path: str) -> bool:
        """Delete a node; False when it was not there."""
        try:
            await session.call(Delete(path, -1))
        except NoNodeError:
            session.ends.drop(path)
            return False
        session.ends.drop(path)
        return True

    async def move(
        self, session: ZooKeeperSession, name: str, node: LineNode, mark: str, *, data: bytes, ttl: float
    ) -> Made | None:
        """
        Let *session* keep a ticket alive, perhaps with another mark: at its place, with its number.

        One transaction deletes the one node and creates the other, so no other client gets in between. None: the node
        has gone.

        Args:
            session: The session that keeps it from now on.

            name: Whose line.

            node: The present node.

            mark: The mark of the next.

            data: The data of the next, with the number of the ticket.

            ttl: Seconds that the ticket lives.
        """
        old, new = self.paths.node(name, node), self.paths.moved(name, node, mark, session.id)
        session.ends.begin(new, ttl)
        moved = session.call(Transaction([Delete(old, -1), Create(new, data, self._acl, _EPHEMERAL)]))
        found = self.read(session, new)
        if not _done(await moved, NoNodeError):
            session.ends.drop(new)
            return None
        try:
            read, stat = await found
        except NoNodeError:
            return None
        return Made(node_at(new, stat.czxid), new, read_facts(read, stat).number, stat.czxid)


def _done(outcomes: Sequence[object], *misses: type[Exception]) -> bool:
    """Return whether a transaction was carried out; False for one of the *misses*. Raises any other error."""
    problems = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if any(isinstance(problem, misses) for problem in problems):
        return False
    for problem in problems:
        raise problem
    return True
