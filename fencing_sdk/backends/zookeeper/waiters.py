"""
Waiters: how they are woken, and the step by which a claim whose turn has come is granted.

The line of a lock is the nodes in its folder, in the order of their numbers. A claim joins with a node at the end, and
`fencing_sdk.backends._shared.node_line` says which node it waits for. A waiter watches that one, and is woken

1. when that node is deleted: it looks at the line, and watches the next one or has the lock;
2. when the session has another connection, because watches end with their connection (`ends`);
3. when its own node has gone, or its session has ended: it has to join again.

A waiter that is not woken tries again after about 5 s, by the engine's timer.

The first waiter for a permit watches the folder.

A lock has its grant when its turn has come. A permit replaces its node by one with its number, and with its token. The
phase of readers stands in the folder's data: the first reader writes it, and a grant of another mode ends it if there
is data. A node that is replaced keeps its place, and each of these transactions fails without the node of the claim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from weakref import WeakKeyDictionary

from kazoo.exceptions import NoNodeError

from fencing_sdk._values.claim import LOCK, READER, Busy, Claim, Grant, Mode, Permit
from fencing_sdk._values.tasks import SharedBatches, ask_by_name, move_on_after
from fencing_sdk.backends._shared.node_line import Permits, rival_of
from fencing_sdk.backends._shared.rules import free_permit
from fencing_sdk.backends._shared.waiters import FirstAsks, UnansweredRequests, WakeUp
from fencing_sdk.backends.zookeeper.driver import BACKEND
from fencing_sdk.backends.zookeeper.ends import CleanUp
from fencing_sdk.backends.zookeeper.nodes import Line, LineNode, OwnNode, OwnNodes, in_line, is_of, key_of, mark_of
from fencing_sdk.backends.zookeeper.requests import Found, Recipe
from fencing_sdk.backends.zookeeper.session import ZooKeeperSession, ZooKeeperSessions
from fencing_sdk.errors import BackendUnavailableError

__all__ = ["ZooKeeperWaitQueue"]

_TRIES = 3
"""Times that a line is looked at while it moves."""
_NUMBERS_WITHIN = 0.5
"""Seconds for which a claim that does not wait lets those ahead take their numbers, while there are enough permits."""
_READERS = 1000
"""Readers that are granted together."""
_READS = 5
"""Times that a folder is read while operators write notes into it."""


class ZooKeeperWaitQueue:
    """The lines of all locks, as this backend object sees them: one call about a claim at a time."""

    def __init__(self, recipe: Recipe, sessions: ZooKeeperSessions, own_nodes: OwnNodes, clean_up: CleanUp) -> None:
        self._recipe = recipe
        self._sessions = sessions
        self._own_nodes = own_nodes
        self._clean_up = clean_up
        self._phases: WeakKeyDictionary[ZooKeeperSession, SharedBatches[OwnNode, int]] = WeakKeyDictionary()
        self._unanswered = UnansweredRequests()
        self._first_asks = FirstAsks()
        self._readers: dict[tuple[ZooKeeperSession, int, str], list[OwnNode]] = {}
        """Readers that wait for the same node, by the connection and the path on which that is watched."""

    async def acquire(self, claim: Claim) -> Grant | Busy:
        """Try once. The node of a waiter stays in the line; any other claim that is refused leaves no node."""
        if claim.mode is not LOCK or self._own_nodes.get(key_of(claim)) is not None:
            return await self._acquire_in_turn(claim)
        if not self._unanswered.has(claim.owner):  # it cannot hold the lock, so it may be refused without a node
            if (busy := await self._first_asks.refusal(claim)) is not None:
                return busy
            if self._own_nodes.any_lock(claim.name) and self._sessions.of(claim.ttl).connected:
                return Busy(None)
        with self._first_asks.asking(claim) as settle:
            outcome = await self._acquire_in_turn(claim)
            settle(outcome)
        return outcome

    async def _acquire_in_turn(self, claim: Claim) -> Grant | Busy:
        self._unanswered.begin(claim.owner)
        async with self._own_nodes.turn(key_of(claim)):
            outcome = await self._acquire(claim)
        self._unanswered.answered(claim.owner)
        return outcome

    async def _acquire(self, claim: Claim) -> Grant | Busy:
        own_node = await self._current(claim)
        session = self._sessions.of(claim.ttl) if own_node is None else own_node.session
        await session.ready()
        try:
            if own_node is not None:
                try:
                    return await self._try(own_node, await self._recipe.look(session, claim.name))
                except NoNodeError:
                    if not own_node.over:
                        raise
                    own_node = await self._current(claim)  # another client has gone on with the claim meanwhile
            found, line = await self._recipe.join(session, claim)
            return await self._try(OwnNode(claim, session, *found), line)
        except BaseException:
            if own_node is None:
                self._clean_up.sweep_later(claim, session)
            raise

    async def _current(self, claim: Claim) -> OwnNode | None:
        """The node of the claim, if it still counts; one that has ended is deleted."""
        own_node = self._own_nodes.get(key_of(claim))
        if own_node is None or not (own_node.over or (own_node.ends_at is not None and not own_node.held)):
            return own_node
        own_node.finish()
        if own_node.session.error is None:
            await own_node.session.ready()
            await self._recipe.remove(own_node.session, own_node.path)
        self._own_nodes.drop(own_node)
        return None

    async def _try(self, own_node: OwnNode, line: Line) -> Grant | Busy:
        """Grant if the node is the first in the line. If not, delete it unless it is a waiter's."""
        claim, session = own_node.claim, own_node.session
        waiting = self._own_nodes.get(key_of(claim)) is own_node
        line = await self._watch_rival(own_node, line)
        if line:
            if claim.mode is not LOCK or line.noted:
                try:
                    await self._grant(own_node, line, await self._find(own_node, line))
                except BaseException:  # the node may be there under another name than the known one
                    self._clean_up.sweep_later(claim, session)
                    raise
            if own_node.over:
                raise NoNodeError
            self._own_nodes.put(own_node)
            self._clean_up.granted(own_node)
            if own_node.over:
                raise NoNodeError
            ttl = session.lease if session.lease < claim.ttl else None
            return Grant(own_node.token, ttl=ttl, permit=own_node.permit)
        if not waiting:
            await self._recipe.remove(session, own_node.path)
        return Busy()

    async def _watch_rival(self, own_node: OwnNode, line: Line) -> Line:
        """Return the line if it is the turn of *own_node*; else nothing, and a waiter watches the node it waits for."""
        claim, session = own_node.claim, own_node.session
        for _ in range(_TRIES):
            position = await self._find(own_node, line)
            rival = _rival_at(position, line, claim.mode)
            if rival is None:
                return line
            if self._own_nodes.get(key_of(claim)) is not own_node:
                return await self._wait_for_number(own_node, claim.mode, line)
            paths = self._recipe.paths
            path = paths.folder(claim.name) if isinstance(rival, Permits) else paths.node(claim.name, rival)
            if own_node.watched == path:
                return Line()
            own_node.watched = path
            session.ends.suspend(own_node.path)
            call = session.watched(self._on_rival_changed, own_node, path, wakes=lambda: [_end_of(own_node)])
            if isinstance(rival, Permits):
                line = await self._recipe.watch_line(session, claim.name, call)
                continue
            if await self._watch(own_node, path, call):
                return Line()
            own_node.watched = ""
            session.ends.prolong(*_end_of(own_node))
            line = await self._recipe.look(session, claim.name)
        own_node.woken.set()  # the line has moved at every look
        return Line()

    async def _wait_for_number(self, own_node: OwnNode, mode: Mode, line: Line) -> Line:
        """
        Return the line if a claim that does not wait may have a permit; else nothing.

        If there is room, those ahead have just come, too, and take their numbers one after the other.
        """
        name, session = own_node.claim.name, own_node.session
        with move_on_after(_NUMBERS_WITHIN):
            while isinstance(mode, Permit) and (position := await self._find(own_node, line)) < mode.of:
                rival = _rival_at(position, line, mode)
                if rival is None or isinstance(rival, Permits):
                    return line
                if rival.shared != "permit":  # it has no number to take
                    return Line()
                path, changed = self._recipe.paths.node(name, rival), WakeUp()
                if await self._recipe.watch(session, path, session.watched(lambda _, event=changed: event.set())):
                    await changed.wait()
                line = await self._recipe.look(session, name)
        return Line()

    async def _watch(self, own_node: OwnNode, path: str, call: Callable[[object], None]) -> bool:
        """
        Have a waiter woken when a node goes; False when it has gone already.

        Readers that wait for the same node share a watch: each watch that fires costs a switch between threads.
        """
        session = own_node.session
        if own_node.claim.mode != READER:
            return await self._recipe.watch(session, path, call)
        key = session, session.connections, path
        if (waiting := self._readers.get(key)) is not None:
            waiting.append(own_node)
            return True
        self._readers[key] = [own_node]
        there = False
        try:
            call = session.watched(
                self._on_rival_of_readers_gone,
                key,
                wakes=lambda: [_end_of(reader) for reader in tuple(self._readers.get(key, ()))],
            )
            there = await self._recipe.watch(session, path, call)
        finally:
            if not there:
                self._on_rival_of_readers_gone(key, None)
        return there

    def _on_rival_of_readers_gone(self, key: tuple[ZooKeeperSession, int, str], event: object) -> None:
        for own_node in self._readers.pop(key, ()):
            self._on_rival_changed(own_node, key[2], event)

    def _on_rival_changed(self, own_node: OwnNode, path: str, _: object) -> None:
        if own_node.watched == path:
            own_node.watched = ""
            own_node.woken.set()

    async def _find(self, own_node: OwnNode, line: Line) -> int:
        """
        Return the position of the claim's node in the line, and let *own_node* be that node.

        Usually it is the known one. A request whose answer was lost may have left another one before it, which
        counts then; or another client has one with the same claim, which this session then keeps alive.
        """
        claim, session = own_node.claim, own_node.session
        mark = mark_of(claim.owner)
        ours = [position for position, node in enumerate(line) if node.mark == mark]
        if not ours:
            own_node.finish()
            self._own_nodes.drop(own_node)
            own_node.woken.set()
            raise NoNodeError
        first = line[ours[0]]
        for position in ours[1:]:
            await self._recipe.remove(session, self._recipe.paths.node(claim.name, line[position]))
        path = self._recipe.paths.node(claim.name, first)
        if path != own_node.path:
            known = is_of(first, session.id)
            found: Found = await (
                self._recipe.find(session, claim, path) if known else self._recipe.adopt(session, claim, first)
            )
            own_node.path, own_node.token, own_node.born = found
            name = own_node.path.rpartition("/")[2]
            (line[ours[0]],) = in_line([name], {name: own_node.born})
        return ours[0]

    async def join(self, claim: Claim) -> OwnNode:
        """Join the end of the line, or go on with the node that is there."""
        session = self._sessions.of(claim.ttl)
        await session.ready()
        try:
            async with self._own_nodes.turn(key_of(claim)):
                known = await self._current(claim)
                if known is not None:
                    known.woken.set()
                    return known
                found, line = await self._recipe.join(session, claim)
                own_node = OwnNode(claim, session, *found)
                self._own_nodes.put(own_node)
                if await self._watch_rival(own_node, line):
                    own_node.woken.set()
                return own_node
        except BaseException:
            stray = self._own_nodes.get(key_of(claim))
            if stray is not None and stray.ends_at is None:
                self._own_nodes.drop(stray)
            await self._clean_up.leave_unknown(claim, session)
            raise

    # The grant of a claim whose turn has come

    async def _grant(self, own_node: OwnNode, line: Line, position: int) -> None:
        """
        Let *own_node* be the node of a grant, with its token and its number.

        A lock needs this only where the folder has data.

        Raises:
            NoNodeError: the node has gone.
        """
        claim, node = own_node.claim, line[position]
        if claim.mode == READER:
            own_node.token = await self._phases_of(own_node.session).ask(own_node)
            return
        if line.noted:
            await self._end_phase(own_node)
        own_node.permit = node.permit
        permit = free_permit(claim.mode, {node.permit for node in line[:position]})
        if permit is not None and node.permit is None:
            found = await self._recipe.write_number(own_node.session, claim, node, permit=permit, token=own_node.token)
            own_node.path, own_node.token, own_node.born = found
            own_node.permit = permit

    async def _end_phase(self, own_node: OwnNode) -> None:
        """No reader begins one while *own_node* is there, because it would have to be ahead."""
        recipe, name = self._recipe, own_node.claim.name
        for _ in range(_READS):
            phase = await recipe.phase(own_node.session, name)
            if phase.token is None or await recipe.change_phase(own_node.session, name, phase, None, own_node.path):
                return
        raise BackendUnavailableError(BACKEND, "acquire", "the notes of the lock change whenever they are looked at")

    def _phases_of(self, session: ZooKeeperSession) -> SharedBatches[OwnNode, int]:
        if (batches := self._phases.get(session)) is None:

            async def join(name: str, readers: list[OwnNode]) -> list[int]:
                # One of the readers that are granted at the same moment begins the phase, and all have its token.
                return [await self._join_phase(session, name, readers)] * len(readers)

            batches = SharedBatches(
                lambda readers: ask_by_name(readers, lambda reader: reader.claim.name, join), _READERS, one_by_one=True
            )
            self._phases[session] = batches
        return batches

    async def _join_phase(self, session: ZooKeeperSession, name: str, readers: Sequence[OwnNode]) -> int:
        for reader in readers:
            phase = await self._recipe.phase(session, name)
            token = phase.token
            if token is None:
                with suppress(NoNodeError):  # this reader has gone, and the next one may be there
                    if await self._recipe.change_phase(session, name, phase, reader.token, reader.path):
                        token = reader.token
            if token is not None:
                return token
        token = (await self._recipe.phase(session, name)).token
        if token is None:
            raise NoNodeError
        return token


def _rival_at(position: int, line: Line, mode: Mode) -> LineNode | Permits | None:
    """Return the node or permits that the node at *position* waits for; None for a permit with its number."""
    return None if line[position].permit is not None else rival_of(mode, line[:position])


def _end_of(own_node: OwnNode) -> tuple[str, float]:
    """The node of a waiter whose turn may have come, and the seconds in which the loop has to answer for it."""
    return own_node.path, own_node.claim.ttl
