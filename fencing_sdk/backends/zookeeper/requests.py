"""
The requests to ZooKeeper to join a line, to look at it and to leave it: the recipe of a lock.

It is the known one (ZooKeeper Recipes and Solutions, "Locks"): an ephemeral node with a number, the
lowest number holds the lock, and every waiter watches the node before its own alone. What belongs together is
sent together, so that a free lock costs one round trip. Every look is preceded by something that
only the leader answers (a create, or a sync): a server that is cut off from its leader goes on
answering reads, and would call a session alive that the leader has ended long ago.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple
from weakref import WeakKeyDictionary

from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError, UnimplementedError
from kazoo.protocol.serialization import (
    CheckVersion,
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

from fencing_sdk._values.claim import Claim
from fencing_sdk._values.tasks import SharedBatches
from fencing_sdk.backends.zookeeper.driver import ZooKeeperSettings
from fencing_sdk.backends.zookeeper.nodes import (
    Line,
    LineNode,
    Paths,
    in_line,
    phase_of,
    read_token,
    rewritten,
    with_phase,
    without_place,
    written,
)
from fencing_sdk.backends.zookeeper.session import ZooKeeperSession

__all__ = ["Found", "Phase", "Read", "Recipe"]

_LOOKS = 1000
"""Lines that are looked at together."""
_TRIES = 3
"""The server may delete the folder of a lock that is not in use just when it was made or found."""


_EPHEMERAL, _SEQUENTIAL, _CONTAINER = 1, 2, 4


class _CreateContainer(Create2):  # type: ignore[misc]  # kazoo has no types
    """A node that the server removes some time after its last child has gone. kazoo has no method for it."""

    type = 19


class Found(NamedTuple):
    """A node of a claim of this backend object."""

    path: str
    token: int
    born: int


class Read(NamedTuple):
    """A node that was read."""

    path: str
    data: bytes
    stat: Stat


class Phase(NamedTuple):
    """The phase of readers in the data of a folder."""

    token: int | None
    """The token of the readers that hold together; None if no reader came since the last grant of another mode."""
    version: int
    data: bytes


class Recipe:
    """The requests, each on a session that is connected. They raise what the driver raises."""

    def __init__(self, settings: ZooKeeperSettings) -> None:
        self._acl = settings.acl
        self.paths = Paths(settings.root)
        self._looks: WeakKeyDictionary[ZooKeeperSession, SharedBatches[str, Line]] = WeakKeyDictionary()

    async def join(self, session: ZooKeeperSession, claim: Claim) -> tuple[Found, Line]:
        """Create a node at the end of the line, and look at the line."""
        for last in range(1, _TRIES + 1):
            request = Create2(self.paths.stem(claim, session.id), written(claim), self._acl, _EPHEMERAL | _SEQUENTIAL)
            created = session.create(request, claim.ttl)
            listed = session.call(GetChildren2(self.paths.folder(claim.name), None))
            try:
                path, stat = await created
            except (NoNodeError, NodeExistsError) as error:
                if last == _TRIES:
                    raise
                if isinstance(error, NoNodeError):
                    await self._make_folder(session, claim.name)
                    continue
                # ZooKeeper gives its last number again and again: the name is that of an earlier try of the claim.
                line, stem = await self.look(session, claim.name), self.paths.stem(claim, session.id)
                for path in (self.paths.node(claim.name, node) for node in line):
                    if path.startswith(stem):
                        with suppress(NoNodeError):
                            return await self.find(session, claim, path), line
                continue
            return Found(path, stat.czxid, stat.czxid), await self._in_line(session, claim.name, *await listed)
        raise AssertionError

    async def _in_line(self, session: ZooKeeperSession, name: str, names: Sequence[str], stat: Stat) -> Line:
        """Sort the nodes of a lock. For those whose number shows no place, ask what created them."""
        folder = self.paths.folder(name)
        asked = {node: session.call(Exists(f"{folder}/{node}", None)) for node in without_place(names)}
        found: dict[str, Stat | None] = {node: await one for node, one in asked.items()}
        line = Line(in_line(names, {node: each.czxid for node, each in found.items() if each is not None}))
        line.noted = stat.dataLength > 0
        return line

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

    async def look(self, session: ZooKeeperSession, name: str) -> Line:
        """The line, as it is now. Those who look at the same moment look once."""
        batches = self._looks.get(session)
        if batches is None:
            batches = self._looks[session] = SharedBatches(
                lambda names: self.look_at_all(session, names), _LOOKS, one_by_one=True
            )
        return await batches.ask(name)

    async def watch_line(self, session: ZooKeeperSession, name: str, call: Callable[[object], None]) -> Line:
        """The line; *call* is made when a node comes or goes."""
        return await self._in_line(session, name, *await session.call(GetChildren2(self.paths.folder(name), call)))

    async def look_at_all(self, session: ZooKeeperSession, names: Sequence[str]) -> list[Line]:
        """Many lines at once, and one for names that stand there more than once: those of readers and permits."""
        synced = session.call(Sync(self.paths.root))
        listed = {name: session.call(GetChildren2(self.paths.folder(name), None)) for name in dict.fromkeys(names)}
        await synced
        lines: dict[str, Line] = {}
        for name, asked in listed.items():
            try:
                lines[name] = await self._in_line(session, name, *await asked)
            except NoNodeError:
                lines[name] = Line()
        return [lines[name] for name in names]

    async def born(self, session: ZooKeeperSession, paths: Sequence[str]) -> list[int | None]:
        """For many nodes, the transaction that created each, or None where there is none."""
        synced = session.call(Sync(self.paths.root))
        asked = [session.call(Exists(path, None)) for path in paths]
        await synced
        stats: list[Stat | None] = [await one for one in asked]
        return [None if stat is None else stat.czxid for stat in stats]

    async def read(self, session: ZooKeeperSession, path: str) -> tuple[bytes, Stat]:
        """The data of a node, and the record about it."""
        data, stat = await session.call(GetData(path, None))
        return data, stat

    async def find(self, session: ZooKeeperSession, claim: Claim, path: str) -> Found:
        """Read a node that was created by a request whose answer was lost."""
        session.ends.begin(path, claim.ttl)
        data, stat = await self.read(session, path)
        return Found(path, read_token(data, stat), stat.czxid)

    async def names(self, session: ZooKeeperSession) -> list[str]:
        """The folders of all locks, sorted. ZooKeeper answers with all of them at once."""
        synced = session.call(Sync(self.paths.root))
        listed = session.call(GetChildren2(self.paths.root, None))
        await synced
        try:
            names, _ = await listed
            return sorted(names)
        except NoNodeError:
            return []

    async def read_all(self, session: ZooKeeperSession, paths: Sequence[str]) -> list[Read | None]:
        """Read many nodes; None for those that are not there."""
        asked = [session.call(GetData(path, None)) for path in paths]
        found: list[Read | None] = []
        for path, one in zip(paths, asked, strict=True):
            try:
                found.append(Read(path, *await one))
            except NoNodeError:
                found.append(None)
        return found

    async def end(self, session: ZooKeeperSession, nodes: Sequence[Read], folder: Read, note: bytes) -> bool:
        """Delete nodes and write a *note* into their folder; False, and nothing is changed: one of them has changed."""
        versions = [(node.path, node.stat.version) for node in nodes]
        request = Transaction(
            [SetData(folder.path, note, folder.stat.version), *(Delete(*version) for version in versions)]
        )
        problems = [outcome for outcome in await session.call(request) if isinstance(outcome, Exception)]
        if any(isinstance(problem, BadVersionError | NoNodeError) for problem in problems):
            return False
        for problem in problems:
            raise problem
        return True

    async def watch(self, session: ZooKeeperSession, path: str, call: Callable[[object], None]) -> bool:
        """Have *call* made when a node goes; False when it has gone already."""
        try:
            await session.call(GetData(path, call))
        except NoNodeError:
            return False
        return True

    async def remove(self, session: ZooKeeperSession, path: str) -> bool:
        """Delete a node; False when it was not there."""
        try:
            await session.call(Delete(path, -1))
        except NoNodeError:
            session.ends.drop(path)
            return False
        session.ends.drop(path)
        return True

    async def adopt(self, session: ZooKeeperSession, claim: Claim, node: LineNode) -> Found:
        """
        Let *session* keep a node alive that was another one's: at its place, with its token.

        One transaction deletes the one and creates the other, so no other client gets in between.
        """
        old, new = self.paths.node(claim.name, node), self.paths.moved(claim, node, session.id)
        data, stat = await self.read(session, old)
        token = read_token(data, stat)
        return await self._replace(session, old, new, claim, data=data, token=token)

    async def write_number(
        self, session: ZooKeeperSession, claim: Claim, node: LineNode, *, permit: int, token: int
    ) -> Found:
        """Replace the waiting node of a permit by one with its number, at its place in the line, with its token."""
        old, new = self.paths.node(claim.name, node), self.paths.granted(claim, node, permit)
        found = await self._replace(session, old, new, claim, data=written(claim), token=token)
        session.ends.drop(old)
        return found

    async def _replace(
        self, session: ZooKeeperSession, old: str, new: str, claim: Claim, *, data: bytes, token: int
    ) -> Found:
        session.ends.begin(new, claim.ttl)
        replaced = session.call(
            Transaction([Delete(old, -1), Create(new, rewritten(data, claim, token), self._acl, _EPHEMERAL)])
        )
        found = session.call(Exists(new, None))
        _raise_first(await replaced)
        stat = await found
        if stat is None:
            raise NoNodeError
        return Found(new, token, stat.czxid)

    async def phase(self, session: ZooKeeperSession, name: str) -> Phase:
        """The phase of the readers of a name."""
        data, stat = await self.read(session, self.paths.folder(name))
        return Phase(phase_of(data), stat.version, data)

    async def change_phase(
        self, session: ZooKeeperSession, name: str, before: Phase, token: int | None, there: str
    ) -> bool:
        """Begin a phase with this *token*, or end it, while the node *there* exists; False: the folder has changed."""
        data = with_phase(before.data, token)
        outcomes = await session.call(
            Transaction([CheckVersion(there, -1), SetData(self.paths.folder(name), data, before.version)])
        )
        if any(isinstance(outcome, BadVersionError) for outcome in outcomes):
            return False
        _raise_first(outcomes)
        return True


def _raise_first(outcomes: Sequence[object]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
