"""
The recipe: what is asked of ZooKeeper to stand in a line, to look at it and to leave it.

It is the known one (ZooKeeper Recipes and Solutions, "Locks"): an ephemeral node with a number, the
lowest number holds the lock, everybody else watches the node ahead alone. What belongs together is
sent together, so that a free lock costs one round trip. Every look is preceded by something that
only the leader answers (a create, or a sync): a server that is cut off from its leader goes on
answering reads, and would call a session alive that the leader has ended long ago.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from fencing_sdk._values.claim import Claim
from fencing_sdk.backends.zookeeper._driver import Settings
from fencing_sdk.backends.zookeeper._nodes import Node, Paths, in_line, read_token, rewritten, written
from fencing_sdk.backends.zookeeper._requests import (
    NodeExistsError,
    NoNodeError,
    Stat,
    UnimplementedError,
    children,
    create_container,
    create_in_line,
    create_persistent,
    delete,
    exists,
    get,
    replace,
    sync,
)
from fencing_sdk.backends.zookeeper._session import Session

__all__ = ["Found", "Recipe"]

_TRIES = 3
"""The folder of a lock that nobody uses may be removed by the server just when it was made or found."""


class Found(NamedTuple):
    """A node of ours."""

    path: str
    token: int
    born: int


class Recipe:
    """The requests, each on a session that is connected. They raise what the driver raises."""

    def __init__(self, settings: Settings) -> None:
        self._acl = settings.acl
        self.paths = Paths(settings.root)

    async def stand(self, session: Session, claim: Claim) -> tuple[Found, list[Node]]:
        """Stand at the end of the line, and look at it."""
        for last in range(1, _TRIES + 1):
            request = create_in_line(self.paths.stem(claim, session.id), written(claim), self._acl)
            created = session.call(request)
            listed = session.call(children(self.paths.folder(claim.name)))
            try:
                path, stat = await created
            except NoNodeError:
                if last == _TRIES:
                    raise
                await self._make_folder(session, claim.name)
                continue
            return Found(path, stat.czxid, stat.czxid), in_line(await listed)
        raise AssertionError

    async def _make_folder(self, session: Session, name: str) -> None:
        folder = self.paths.folder(name)
        try:
            await self._create(session, create_container(folder, self._acl))
        except NoNodeError:
            await self._make_root(session)
            await self._create(session, create_container(folder, self._acl))
        except UnimplementedError:  # before ZooKeeper 3.5.3: a folder for each name stays for ever
            await self._create(session, create_persistent(folder, self._acl))

    async def _make_root(self, session: Session) -> None:
        for path in self.paths.parents():
            if await session.call(exists(path)) is None:
                await self._create(session, create_persistent(path, self._acl))

    async def _create(self, session: Session, request: object) -> None:
        with suppress(NodeExistsError):
            await session.call(request)

    async def look(self, session: Session, name: str) -> list[Node]:
        """The line, as it is now."""
        synced = session.call(sync(self.paths.root))
        listed = session.call(children(self.paths.folder(name)))
        await synced
        try:
            return in_line(await listed)
        except NoNodeError:
            return []

    async def look_at_all(self, session: Session, names: Sequence[str]) -> list[list[Node]]:
        """Many lines at once."""
        synced = session.call(sync(self.paths.root))
        listed = [session.call(children(self.paths.folder(name))) for name in names]
        await synced
        lines = []
        for asked in listed:
            try:
                lines.append(in_line(await asked))
            except NoNodeError:
                lines.append([])
        return lines

    async def born(self, session: Session, paths: Sequence[str]) -> list[int | None]:
        """For many nodes, the transaction that created each, or None where there is none."""
        synced = session.call(sync(self.paths.root))
        asked = [session.call(exists(path)) for path in paths]
        await synced
        stats: list[Stat | None] = [await one for one in asked]
        return [None if stat is None else stat.czxid for stat in stats]

    async def read(self, session: Session, path: str) -> tuple[bytes, Stat]:
        data, stat = await session.call(get(path))
        return data, stat

    async def find(self, session: Session, path: str) -> Found:
        """What we need to know of a node that was created by a request whose answer was lost."""
        data, stat = await self.read(session, path)
        return Found(path, read_token(data, stat), stat.czxid)

    async def watch(self, session: Session, path: str, call: Callable[[object], None]) -> bool:
        """Have *call* made when a node goes; False when it has gone already."""
        try:
            await session.call(get(path, call))
        except NoNodeError:
            return False
        return True

    async def remove(self, session: Session, path: str) -> bool:
        """Delete a node; False when it was not there."""
        try:
            await session.call(delete(path))
        except NoNodeError:
            return False
        return True

    async def adopt(self, session: Session, claim: Claim, node: Node) -> Found:
        """
        Let *session* keep a node alive that was another one's: at its place, with its token.

        Deleting the one and creating the other is one transaction, so nobody gets in between.
        """
        old, new = self.paths.node(claim.name, node), self.paths.moved(claim, node, session.id)
        data, stat = await self.read(session, old)
        token = read_token(data, stat)
        moved = session.call(replace(old, new, rewritten(data, claim, token), self._acl))
        found = session.call(exists(new))
        for outcome in await moved:
            if isinstance(outcome, Exception):
                raise outcome
        stat = await found
        if stat is None:
            raise NoNodeError
        return Found(new, token, stat.czxid)
