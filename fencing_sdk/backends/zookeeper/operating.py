"""
What operators ask: who holds and who waits, one name or all of them, and that a grant ends, with the reason.

ZooKeeper sends the names of all folders in one answer, and in no order. So the first page asks for them and sorts
them, and each page looks at the next slice: the lines first, then the nodes of the holders, all of them in two round
trips. The names that remain are kept for the next page. If that comes to another backend object, or too late, it asks
for the names again and goes on behind the last one that was seen.

A revocation is one transaction. It deletes the node of the holder, by its path and version, and writes a note for it
into the folder; for readers the nodes of all who share the token, and their phase ends. A path belongs to one grant, so
a successor is never hit; the version of the folder lets no two operators write at the same time. The deletion reaches
the next waiter and the holder by the watches that both have anyway, and the holder then reads the note.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fencing_sdk._values.claim import READER, Claim, Holder, Listing, Waiting, safe_segment
from fencing_sdk._values.clock import wall_seconds
from fencing_sdk.backends._shared.node_line import holding
from fencing_sdk.backends.zookeeper.connection.session import ZooKeeperSession
from fencing_sdk.backends.zookeeper.errors import BACKEND
from fencing_sdk.backends.zookeeper.nodes import (
    Line,
    LineNode,
    OwnNodes,
    mark_of,
    noted,
    phase_of,
    read_holder,
    read_notes,
    read_token,
    with_phase,
)
from fencing_sdk.backends.zookeeper.requests import Read, Recipe
from fencing_sdk.errors import BackendUnavailableError

__all__ = ["ZooKeeperOperating"]

_KEPT = 4
"""Listings whose names are kept at the same time."""
_TRIES = 5
"""Times that a lock is looked at while it goes from hand to hand, or while other operators write notes."""
_STRETCH = 100
"""Nodes in one round of requests."""


class _Held(NamedTuple):
    """Who holds a name."""

    nodes: list[tuple[LineNode, Read]]
    folder: Read | None
    phase: int | None
    """The token of readers, if they hold."""
    moved: bool
    """Every node of a holder has gone since the look at the line."""


class ZooKeeperOperating:
    """The answers of one backend object."""

    def __init__(self, recipe: Recipe, own_nodes: OwnNodes) -> None:
        self._recipe = recipe
        self._own_nodes = own_nodes
        self._rest: OrderedDict[tuple[str, str], list[str]] = OrderedDict()  # by the prefix and the cursor

    # Who holds, and who waits

    async def holders(self, session: ZooKeeperSession, names: Sequence[str]) -> list[Holder]:
        """
        Describe who holds the *names*: name by name, in the order of their permits, or of their tokens.

        What is left of a grant is known here if this object has it; of others, the whole ttl is shown.
        """
        found: dict[str, list[Holder]] = {name: [] for name in names}
        left = {own_node.path: max(0.0, own_node.left) for own_node in self._own_nodes.all() if own_node.held}
        for _ in range(_TRIES):
            lines = dict(zip(names, await self._recipe.look_at_all(session, names), strict=True))
            held = await self._read_held(session, lines)
            for name, each in held.items():
                waiters = len(lines[name]) - len(each.nodes)
                holders = [
                    read_holder(
                        name, node, read.data, read.stat, left.get(read.path), phase=each.phase, waiters=waiters
                    )
                    for node, read in each.nodes
                ]
                found[name] = sorted(holders, key=lambda holder: (holder.permit or 0, holder.token))
            if not (names := [name for name, each in held.items() if each.moved]):
                break
        return [holder for holders in found.values() for holder in holders]

    async def _read_held(
        self, session: ZooKeeperSession, lines: Mapping[str, Line], *, folders: bool = False
    ) -> dict[str, _Held]:
        """Read the nodes of all holders, and the folders where these have data, or all *folders*."""
        paths = {}
        for name, line in lines.items():
            folder = [self._recipe.paths.folder(name)] if line.noted or folders else []
            paths[name] = [self._recipe.paths.node(name, node) for node in holding(line, phase=True)] + folder
        every = [path for each in paths.values() for path in each]
        read = dict(zip(every, await self._recipe.read_all(session, every), strict=True))
        return {name: _held(line, [read[path] for path in paths[name]]) for name, line in lines.items()}

    async def waiters(self, session: ZooKeeperSession, name: str) -> list[Waiting]:
        """See `fencing_sdk.abc.SupportsListing.list_waiters`."""
        line = await self._recipe.look(session, name)
        (folder,) = await self._recipe.read_all(session, [self._recipe.paths.folder(name)]) if line.noted else (None,)
        phase = None if folder is None else phase_of(folder.data)
        waiting = line[len(holding(line, phase=phase is not None)) :]
        paths = [self._recipe.paths.node(name, node) for node in waiting]
        waiters: list[Waiting] = []
        for start in range(0, len(waiting), _STRETCH):
            reads = await self._recipe.read_all(session, paths[start : start + _STRETCH])
            for node, read in zip(waiting[start:], reads, strict=False):
                if read is not None:
                    holder = read_holder(name, node, read.data, read.stat, None)
                    waiting_for = max(0.0, wall_seconds() - read.stat.ctime / 1000)
                    waiters.append(Waiting(holder.id, holder.mode, waiting_for, holder.label))
        return waiters

    # All names

    async def page(self, session: ZooKeeperSession, prefix: str, cursor: str | None, limit: int) -> Listing:
        """See `fencing_sdk.abc.SupportsListing.list_holders`."""
        folders = await self._folders(session, safe_segment(prefix), cursor)
        names = [name for folder in folders[:limit] if (name := self._recipe.paths.name(folder)) is not None]
        holders = await self.holders(session, names)
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

    # Revocations

    async def revoke(self, session: ZooKeeperSession, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.SupportsRevoking.revoke`."""
        for _ in range(_TRIES):
            line = await self._recipe.look(session, name)
            held = (await self._read_held(session, {name: line}, folders=True))[name]
            if held.moved or (line and held.folder is None):
                continue
            tokens = {node.mark: held.phase or read_token(read.data, read.stat) for node, read in held.nodes}
            victims = {node.mark: read for node, read in held.nodes if tokens[node.mark] == token}
            if not victims or held.folder is None:
                return False
            note = noted(held.folder.data, victims, reason)
            if held.phase is not None:
                note = with_phase(note, None)
            if await self._recipe.end(session, list(victims.values()), held.folder, note):
                return True
        raise BackendUnavailableError(BACKEND, "revoke", "the lock changes whenever it is looked at")

    async def reasons(self, session: ZooKeeperSession, claims: Sequence[Claim]) -> list[str | None]:
        """For claims whose grants have ended: why they were taken away; None where no operator did it."""
        await session.ready()
        folders = await self._recipe.read_all(session, [self._recipe.paths.folder(claim.name) for claim in claims])
        return [
            None if folder is None else read_notes(folder.data).get(mark_of(claim.owner))
            for claim, folder in zip(claims, folders, strict=True)
        ]


def _held(line: Line, read: Sequence[Read | None]) -> _Held:
    """Take what was *read*: the nodes of the holders, or of readers who have not begun, and perhaps the folder."""
    nodes = holding(line, phase=True)
    folder = read[len(nodes)] if len(read) > len(nodes) else None
    phase = phase_of(folder.data) if folder is not None and nodes and nodes[0].shared == READER.word else None
    held = holding(line, phase=phase is not None)
    there = [(node, one) for node, one in zip(held, read, strict=False) if one is not None]
    return _Held(there, folder, phase, moved=bool(held) and not there)
