"""
The ends of grants, and the deletion of nodes that must go.

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
from contextlib import suppress
from functools import partial
from typing import Any

from fencing_sdk._values.claim import LOCK, Claim
from fencing_sdk._values.clock import JITTER
from fencing_sdk.backends._shared.background_task import BackgroundTasks
from fencing_sdk.backends._shared.losses import LossNotices, reason_for
from fencing_sdk.backends._shared.node_line import holds
from fencing_sdk.backends.zookeeper.connection.kazoo_requests import NoNodeError, get, is_deletion
from fencing_sdk.backends.zookeeper.connection.session import ZooKeeperSession
from fencing_sdk.backends.zookeeper.nodes import OwnNode, OwnNodes, is_of, key_of, mark_of
from fencing_sdk.backends.zookeeper.operating import ZooKeeperOperating
from fencing_sdk.backends.zookeeper.requests import Recipe
from fencing_sdk.errors import LossReason

__all__ = ["CleanUp", "ZooKeeperLossWatcher"]

_MOMENT = 0.05
"""Seconds after which a grant is watched."""
_PAUSE = 0.1
"""Seconds between two tries to delete a node."""
_LAST_DELETIONS = 1.0
"""Seconds that leaving a line, or closing, waits for nodes to be deleted."""


class ZooKeeperLossWatcher(LossNotices):
    """Watches the nodes of grants, and notifies the clients of one backend object of those that have gone."""

    def __init__(
        self, recipe: Recipe, own_nodes: OwnNodes, operating: ZooKeeperOperating, tasks: BackgroundTasks
    ) -> None:
        super().__init__()
        self._recipe = recipe
        self._operating = operating
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
        answer = own_node.session.call(get(own_node.path, watch))
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
        if not own_node.over and is_deletion(event):
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
                    reasons = partial(self._operating.reasons, own_node.session)
                    self.notify(own_node.claim, LossReason.REVOKED, await reason_for(own_node.claim, reasons))

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
            own_node.timer = self._loop().call_later(own_node.claim.ttl, self._check_end, own_node)
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
            own_node.timer = self._loop().call_later(own_node.left, self._check_end, own_node)
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
        self._timers = {timer for timer in self._timers if timer.when() > self._loop().time()}
        self._timers.add(self._loop().call_later(claim.ttl, self.sweep, claim, session))

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
                own_node.timer = self._loop().call_later(max(0.0, own_node.left), self._check_end, own_node)
                self._losses.watch(own_node)

    def ended(self, session: ZooKeeperSession) -> None:
        """Drop every node of *session*: the server has given it up, and deleted them."""
        for own_node in self._own_nodes.of(session):
            self._losses.session_ended(own_node)

    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

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
