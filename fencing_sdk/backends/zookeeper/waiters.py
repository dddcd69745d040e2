"""
What wakes a waiter of this store, and when a claim has the lock.

The line of a lock is the nodes in its folder, in the order of their numbers. A claim joins with a node at the end, and
has the lock when its node is the first. A waiter watches the node before its own, and is woken

1. when that node is deleted: it looks at the line, and watches the next one or has the lock;
2. when the session has another connection, because watches end with their connection (`clean_up`);
3. when its own node has gone, or its session has ended: it has to join again.

A waiter that is not woken tries again after about 5 s, by the engine's timer.

A claim of another mode waits for another node than the one before its own: see `shares`. The first waiter for a permit
watches the folder.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fencing_sdk._values.claim import LOCK, READER, Claim, Grant, Held, Mode, Permit
from fencing_sdk._values.scopes import move_on_after
from fencing_sdk.backends._shared.unanswered_requests import UnansweredRequests
from fencing_sdk.backends._shared.waiters import FirstAsks
from fencing_sdk.backends._shared.wakeup import WakeUp
from fencing_sdk.backends.zookeeper.clean_up import CleanUp
from fencing_sdk.backends.zookeeper.connection.kazoo_requests import NoNodeError
from fencing_sdk.backends.zookeeper.connection.session import ZooKeeperSession
from fencing_sdk.backends.zookeeper.connection.sessions import ZooKeeperSessions
from fencing_sdk.backends.zookeeper.nodes import Line, LineNode, is_of, mark_of
from fencing_sdk.backends.zookeeper.own_nodes import OwnNode, OwnNodes, key_of
from fencing_sdk.backends.zookeeper.requests import Found, Recipe
from fencing_sdk.backends.zookeeper.shares import ShareGrants, rival_of

__all__ = ["ZooKeeperWaitQueue"]

_TRIES = 3
"""Times that a line is looked at while it moves."""
_NUMBERS_WITHIN = 0.5
"""Seconds for which a claim that does not wait lets those ahead take their numbers, while there are enough permits."""


class ZooKeeperWaitQueue:
    """The lines of all locks, as this backend object sees them: one call about a claim at a time."""

    def __init__(self, recipe: Recipe, sessions: ZooKeeperSessions, own_nodes: OwnNodes, clean_up: CleanUp) -> None:
        self._recipe = recipe
        self._sessions = sessions
        self._own_nodes = own_nodes
        self._clean_up = clean_up
        self._shares = ShareGrants(recipe)
        self._unanswered = UnansweredRequests()
        self._first_asks = FirstAsks()
        self._readers: dict[tuple[ZooKeeperSession, int, str], list[OwnNode]] = {}
        """Readers that wait for the same node, by the connection and the path on which that is watched."""

    async def acquire(self, claim: Claim) -> Grant | Held:
        """Try once. The node of a waiter stays in the line; any other claim that is refused leaves no node."""
        if claim.mode is not LOCK or self._own_nodes.get(key_of(claim)) is not None:
            return await self._acquire_in_turn(claim)
        if (held := await self._refusal(claim)) is not None:
            return held
        with self._first_asks.asking(claim) as told:
            outcome = await self._acquire_in_turn(claim)
            told(outcome)
        return outcome

    async def _refusal(self, claim: Claim) -> Held | None:
        """Refuse a claim without a node if another claim of this client is before it, or is just being refused."""
        if self._unanswered.has(claim.owner):
            return None  # it may hold the lock
        held = await self._first_asks.refusal(claim)
        if held is None and self._own_nodes.any_lock(claim.name) and self._sessions.of(claim.ttl).connected:
            return Held(None)
        return held

    async def _acquire_in_turn(self, claim: Claim) -> Grant | Held:
        self._unanswered.begin(claim.owner)
        async with self._own_nodes.turn(key_of(claim)):
            outcome = await self._acquire(claim)
        self._unanswered.answered(claim.owner)
        return outcome

    async def _acquire(self, claim: Claim) -> Grant | Held:
        own_node = await self._current(claim)
        session = self._sessions.of(claim.ttl) if own_node is None else own_node.session
        await session.ready()
        try:
            if own_node is not None:
                return await self._try(own_node, await self._recipe.look(session, claim.name))
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

    async def _try(self, own_node: OwnNode, line: Line) -> Grant | Held:
        """Grant if the node is the first in the line. If not, delete it unless it is a waiter's."""
        claim, session = own_node.claim, own_node.session
        waiting = self._own_nodes.get(key_of(claim)) is own_node
        line = await self._watch_rival(own_node, line)
        if line:
            if claim.mode is not LOCK or line.noted:
                await self._grant(own_node, line)
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
        return Held()

    async def _grant(self, own_node: OwnNode, line: Line) -> None:
        """If this is broken off, the node may be there under another name than the known one."""
        try:
            await self._shares.grant(own_node, line, await self._find(own_node, line))
        except BaseException:
            self._clean_up.sweep_later(own_node.claim, own_node.session)
            raise

    async def _watch_rival(self, own_node: OwnNode, line: Line) -> Line:
        """
        Return the line if it is the turn of *own_node*; else nothing.

        A waiter then watches the node that it waits for.
        """
        claim, session = own_node.claim, own_node.session
        for _ in range(_TRIES):
            position = await self._find(own_node, line)
            rival = rival_of(claim.mode, line, position)
            if rival is None:
                return line
            if self._own_nodes.get(key_of(claim)) is not own_node:
                return await self._wait_for_number(own_node, claim.mode, line)
            paths = self._recipe.paths
            path = paths.node(claim.name, rival) if isinstance(rival, LineNode) else paths.folder(claim.name)
            if own_node.watched == path:
                return Line()
            own_node.watched = path
            session.ends.suspend(own_node.path)
            call = session.watched(self._on_rival_changed, own_node, path, wakes=lambda: [_end_of(own_node)])
            if not isinstance(rival, LineNode):
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
                rival = rival_of(mode, line, position)
                if not isinstance(rival, LineNode):
                    return line
                if not rival.waits:  # it is no permit's
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
            wakes = partial(self._ends_of_readers, key)
            call = session.watched(self._on_rival_of_readers_gone, key, wakes=wakes)
            there = await self._recipe.watch(session, path, call)
        finally:
            if not there:
                self._on_rival_of_readers_gone(key, None)
        return there

    def _ends_of_readers(self, key: tuple[ZooKeeperSession, int, str]) -> list[tuple[str, float]]:
        return [_end_of(own_node) for own_node in tuple(self._readers.get(key, ()))]

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


def _end_of(own_node: OwnNode) -> tuple[str, float]:
    """The node of a waiter whose turn may have come, and the seconds in which the loop has to answer for it."""
    return own_node.path, own_node.claim.ttl
