"""
Renewals in one batch, the ends of grants, and the deletion of nodes that must go.

Nothing in ZooKeeper has to be prolonged lock by lock: any request keeps the session alive, and the
session keeps its nodes. What a renewal proves is that the leader still knew the session after the
renewal was sent, and that each node is still the one that was granted. One request does that for all watched nodes;
each of the others needs a request of its own.

The session of a living process never ends, so a node that is not deleted would stay in its line for ever. Therefore
every node of this object has an end:

1. A grant that is not renewed is deleted when its ttl is over.
2. A node that may exist, because the request for it was not answered, is looked for and deleted one ttl later.
3. A waiter's node is deleted when the waiter leaves.

Grants that end behind their holder's back are noticed by push:

1. The node of a grant is watched: if it is deleted from elsewhere, the holder gets the notice that its lock was
   revoked.
2. If the server has given up the session, it has deleted all of its nodes: their holders get a notice at once.

A watch ends with its connection. When the session has another one, each node is watched again, which fails for a node
that has gone meanwhile. A grant is watched only after a moment, because most locks are released before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from kazoo.exceptions import NoNodeError
from kazoo.protocol.serialization import GetData
from kazoo.protocol.states import EventType

from fencing_sdk._values.claim import LOCK, Claim, Renewal
from fencing_sdk._values.clock import JITTER
from fencing_sdk.backends._shared.background_task import BackgroundTasks
from fencing_sdk.backends._shared.losses import LossNotices, reason_for
from fencing_sdk.backends._shared.node_line import holds, refusal
from fencing_sdk.backends.zookeeper.nodes import Key, Line, OwnNode, OwnNodes, is_of, key_of, mark_of
from fencing_sdk.backends.zookeeper.requests import Recipe
from fencing_sdk.backends.zookeeper.session import ZooKeeperSession, ZooKeeperSessions
from fencing_sdk.errors import LossReason

_MOMENT = 0.05
"""Seconds after which a grant is watched."""
_PAUSE = 0.1
"""Seconds between two tries to delete a node."""
_LAST_DELETIONS = 1.0
"""Seconds that leaving a line, or closing, waits for nodes to be deleted."""


class ZooKeeperLossWatcher(LossNotices):
    """Watches the nodes of grants, and notifies the clients of one backend object of those that have gone."""

    def __init__(
        self,
        recipe: Recipe,
        own_nodes: OwnNodes,
        reasons: Callable[[Sequence[Claim]], Awaitable[Sequence[str | None]]],
        tasks: BackgroundTasks,
    ) -> None:
        super().__init__()
        self._recipe = recipe
        self._reasons = reasons
        self._own_nodes = own_nodes
        self._tasks = tasks

    def watch_soon(self, own_node: OwnNode) -> None:
        """Watch the node of a new grant, after a moment."""
        asyncio.get_running_loop().call_later(_MOMENT, self.watch, own_node)

    def watch(self, own_node: OwnNode) -> None:
        """Watch the node of a grant."""
        if own_node.over or not own_node.session.connected:
            return
        events: list[object] = []
        watch = own_node.session.watched(self._on_event, own_node, events)
        answer = own_node.session.call(GetData(own_node.path, watch))
        answer.add_done_callback(partial(self._on_watched, own_node, events, own_node.session.connections))

    def _on_watched(
        self, own_node: OwnNode, events: list[object], connection: int, answer: asyncio.Future[Any]
    ) -> None:
        """Note that the node is watched, unless the event came in the same turn of the loop: then that is over."""
        if answer.cancelled() or own_node.over or events:
            return
        if isinstance(answer.exception(), NoNodeError):
            self._tasks.start(self._look(own_node))
        elif answer.exception() is None and answer.result()[1].czxid == own_node.born:
            own_node.watched_on = connection

    def _on_event(self, own_node: OwnNode, events: list[object], event: object) -> None:
        events.append(event)
        own_node.watched_on = 0
        if not own_node.over and getattr(event, "type", None) == EventType.DELETED:
            self._tasks.start(self._look(own_node))
        else:  # changed, but there; or the connection broke, and the next one watches again
            self.watch(own_node)

    async def _look(self, own_node: OwnNode) -> None:
        """Notify the holder that its node has gone, unless another client keeps a node for the same owner."""
        with suppress(Exception):  # an error proves nothing; the heartbeat goes on asking
            line = await self._recipe.look(own_node.session, own_node.claim.name)
            position = line.position_of(own_node.claim)
            node = None if position is None else line[position]
            if node is not None and not holds(own_node.claim.mode, node, line[:position]):
                node = None
            if node is not None and is_of(node, own_node.session.id):
                self.watch(own_node)  # it is there, or there again: the next renewal compares which request created it
            elif not own_node.over:
                self._own_nodes.drop(own_node)
                if node is None:
                    reason = await reason_for(own_node.claim, self._reasons)
                    self.notify(own_node.claim, LossReason.REVOKED, reason)

    def session_ended(self, own_node: OwnNode) -> None:
        """The server has given up the session of *own_node*, and deleted the node."""
        held = own_node.held
        self._own_nodes.drop(own_node)
        own_node.woken.set()
        if held:
            self.notify(own_node.claim, LossReason.REFUSED)


class CleanUp:
    """The timers of one backend object, and the tasks that delete nodes."""

    def __init__(
        self, recipe: Recipe, own_nodes: OwnNodes, losses: ZooKeeperLossWatcher, tasks: BackgroundTasks
    ) -> None:
        self._recipe = recipe
        self._own_nodes = own_nodes
        self._losses = losses
        self._tasks = tasks
        self._timers: set[asyncio.TimerHandle] = set()

    def granted(self, own_node: OwnNode) -> None:
        """Count the ttl of a grant or a renewal from now on, and watch a grant that is new."""
        new = own_node.ends_at is None
        own_node.renew()
        if own_node.over:
            return
        if own_node.timer is None:
            own_node.timer = asyncio.get_running_loop().call_later(own_node.claim.ttl, self._check_end, own_node)
        if new:
            self._losses.watch_soon(own_node)

    def renewed(self, own_node: OwnNode, claim: Claim) -> None:
        """
        Count the ttl of *claim* from now on, which may be another than before.

        The node stays with its session, whose timeout is fixed. While this client runs the session does not end, so
        the ttl counts. After the client has gone, the node lasts until that timeout.
        """
        if claim.ttl != own_node.claim.ttl:
            own_node.claim = claim
            if own_node.timer is not None:
                own_node.timer.cancel()
                own_node.timer = None
        self.granted(own_node)

    def _check_end(self, own_node: OwnNode) -> None:
        own_node.timer = None
        if own_node.over:
            return
        if own_node.left > 0:  # it was renewed meanwhile
            own_node.timer = asyncio.get_running_loop().call_later(own_node.left, self._check_end, own_node)
        else:
            self.discard(own_node)

    async def leave(self, own_node: OwnNode) -> None:
        """Discard a waiter's node, and wait a moment for it: the next waiter should not stand behind it."""
        await asyncio.wait((self.discard(own_node),), timeout=_LAST_DELETIONS)

    async def leave_unknown(self, claim: Claim, session: ZooKeeperSession) -> None:
        """`leave`, where it is not known whether the waiter has a node."""
        await asyncio.wait((self.sweep(claim, session),), timeout=_LAST_DELETIONS)

    def discard(self, own_node: OwnNode) -> asyncio.Task[None]:
        """Delete the node, however long that takes. Its grant has ended from now on."""
        own_node.finish()
        return self._tasks.start(self._discard(own_node))

    async def _discard(self, own_node: OwnNode) -> None:
        while await own_node.session.settled() and self._own_nodes.get(key_of(own_node.claim)) is own_node:
            try:
                known = await self._recipe.remove(own_node.session, own_node.path)
                if not known and own_node.claim.mode is not LOCK:  # its grant was broken off: it may have another name
                    await self._sweep_once(own_node.claim, own_node.session)
            except Exception:  # noqa: BLE001  (after any error the node must go)
                await asyncio.sleep(_PAUSE * JITTER.uniform(0.5, 1.0))
            else:
                break
        self._own_nodes.drop(own_node)

    def sweep_later(self, claim: Claim, session: ZooKeeperSession) -> None:
        """
        One ttl from now, delete the node that an unanswered request may have left in the line.

        Not earlier: until then the same owner may try again, and needs to find it.
        """
        loop = asyncio.get_running_loop()
        self._timers = {timer for timer in self._timers if timer.when() > loop.time()}
        self._timers.add(loop.call_later(claim.ttl, self.sweep, claim, session))

    def sweep(self, claim: Claim, session: ZooKeeperSession) -> asyncio.Task[None]:
        """Delete every node of *claim* that is not known to be its grant or its waiter."""
        return self._tasks.start(self._sweep(claim, session))

    async def _sweep(self, claim: Claim, session: ZooKeeperSession) -> None:
        while await session.settled():
            try:
                async with self._own_nodes.turn(key_of(claim)):
                    await self._sweep_once(claim, session)
            except Exception:  # noqa: BLE001  (after any error the nodes must go)
                await asyncio.sleep(_PAUSE * JITTER.uniform(0.5, 1.0))
            else:
                return

    async def _sweep_once(self, claim: Claim, session: ZooKeeperSession) -> None:
        own_node = self._own_nodes.get(key_of(claim))
        kept = own_node.path if own_node is not None and not own_node.over else None
        for node in await self._recipe.look(session, claim.name):
            path = self._recipe.paths.node(claim.name, node)
            if node.mark == mark_of(claim.owner) and is_of(node, session.id) and path != kept:
                await self._recipe.remove(session, path)

    def resumed(self, session: ZooKeeperSession) -> None:
        """Look at every node again: *session* has another connection, and its watches have ended with the last one."""
        for own_node in self._own_nodes.of(session):
            if own_node.over:
                self._tasks.start(self._discard(own_node))
            elif own_node.ends_at is None:
                own_node.woken.set()
            else:
                if own_node.timer is not None:  # perhaps of a loop that was closed
                    own_node.timer.cancel()
                own_node.timer = asyncio.get_running_loop().call_later(
                    max(0.0, own_node.left), self._check_end, own_node
                )
                self._losses.watch(own_node)

    def ended(self, session: ZooKeeperSession) -> None:
        """Drop every node of *session*: the server has given it up, and deleted them."""
        for own_node in self._own_nodes.of(session):
            self._losses.session_ended(own_node)

    def forget(self) -> None:
        """Forget tasks and timers: this process is a fork, and they are its parent's."""
        self._tasks.forget()
        self._timers.clear()

    async def aclose(self) -> None:
        """Stop. Nodes that are being deleted get a moment for that."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        for own_node in self._own_nodes.all():
            if own_node.timer is not None:
                own_node.timer.cancel()
                own_node.timer = None
        await self._tasks.aclose(patience=_LAST_DELETIONS)


_PATIENCE = 1 / 8
"""Part of a ttl after which those that have an answer wait for the others no longer: more than half an interval."""

Outcomes = dict[Key, Renewal]


class ZooKeeperRenewals:
    """One call of `Backend.renew` after the other, or side by side."""

    def __init__(self, recipe: Recipe, sessions: ZooKeeperSessions, own_nodes: OwnNodes, clean_up: CleanUp) -> None:
        self._recipe = recipe
        self._sessions = sessions
        self._own_nodes = own_nodes
        self._clean_up = clean_up

    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """
        Renew all; a session without an answer stops no other one.

        Raises:
            Exception: no claim has an answer; it is what the driver raised for the first.
        """
        outcomes: Outcomes = {}
        groups: dict[ZooKeeperSession, dict[Key, Claim]] = {}
        for claim in claims:
            own_node = self._own_nodes.get(key_of(claim))
            session = self._sessions.of(claim.ttl) if own_node is None else own_node.session
            groups.setdefault(session, {})[key_of(claim)] = claim
        errors = await _side_by_side(
            [self._renew(session, list(group.values()), outcomes) for session, group in groups.items()],
            patience=_PATIENCE * min(claim.ttl for claim in claims) if claims else 0.0,
            enough=lambda: bool(outcomes),
        )
        if errors and not outcomes:
            raise errors[0]
        return [outcomes.get(key_of(claim), Renewal.UNKNOWN) for claim in claims]

    async def _renew(self, session: ZooKeeperSession, claims: list[Claim], outcomes: Outcomes) -> None:
        if session.error is not None:  # its nodes went with it; the next one looks for the holders
            session = self._sessions.of(claims[0].ttl)
        await session.ready()
        asked = {key_of(claim): claim for claim in claims}
        own_nodes = {key: self._own_nodes.get(key) for key in asked}
        held = [
            own_node
            for own_node in own_nodes.values()
            if own_node is not None and own_node.held and own_node.session is session
        ]
        lost = await self._gone(session, held)
        for own_node in held:
            if own_node in lost:
                self._own_nodes.drop(own_node)
            elif own_node.held:
                self._clean_up.renewed(own_node, asked[key_of(own_node.claim)])
                outcomes[key_of(own_node.claim)] = Renewal.REFUSED if own_node.over else Renewal.RENEWED
        rest = [claim for claim in claims if key_of(claim) not in outcomes]
        lines = await self._recipe.look_at_all(session, [claim.name for claim in rest]) if rest else []
        for claim, line in zip(rest, lines, strict=True):
            outcomes[key_of(claim)] = await self._judge(session, claim, line)

    async def _gone(self, session: ZooKeeperSession, held: list[OwnNode]) -> list[OwnNode]:
        """Return the nodes that are gone or were created anew. This syncs with the leader even for an empty list."""
        lost = []
        asked = [own_node for own_node in held if not own_node.surely_there]
        while True:
            found = await self._recipe.born(session, [own_node.path for own_node in asked])
            lost += [own_node for own_node, born in zip(asked, found, strict=True) if born != own_node.born]
            held = [own_node for own_node in held if own_node not in asked]
            asked = [
                own_node for own_node in held if not own_node.surely_there
            ]  # something was heard of them meanwhile
            if not asked:
                return lost

    async def _judge(self, session: ZooKeeperSession, claim: Claim, line: Line) -> Renewal:
        """
        Renew a claim that has no grant here.

        Its node may be another client's, whose session keeps it alive; a client with the claim may
        renew it, and then has to keep it alive. A node on a session of ours is one that must go.
        """
        position = line.position_of(claim)
        if position is None or not holds(claim.mode, line[position], line[:position]):
            return refusal(claim.mode, others=bool(line))
        if is_of(line[position], session.id) or self._own_nodes.get(key_of(claim)) is not None:
            return Renewal.REFUSED
        found = await self._recipe.adopt(session, claim, line[position])
        own_node = OwnNode(claim, session, *found)
        self._own_nodes.put(own_node)
        self._clean_up.granted(own_node)
        return Renewal.RENEWED


async def _side_by_side(
    works: Iterable[Coroutine[Any, Any, None]], *, patience: float, enough: Callable[[], bool]
) -> list[Exception]:
    """Do all, for *patience* seconds and until there is *enough*; cancel the rest. Return errors."""
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(work, name="fencing-store") for work in works]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks, timeout=patience)
        if not enough():
            await asyncio.wait(tasks)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    return [end for end in ends if isinstance(end, Exception)]
