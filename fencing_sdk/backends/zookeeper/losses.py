"""
Grants that end behind their holder's back, noticed by push.

1. The node of a grant is watched: if it is deleted from elsewhere, the holder is told that its lock was revoked.
2. If the server has given up the session, it has deleted all of its nodes: their holders are told at once.

A watch ends with its connection. When the session has another one, each node is watched again, which fails for a node
that has gone meanwhile. A grant is watched only after a moment, because most locks are given back before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from fencing_sdk._values.claim import LOCK
from fencing_sdk.abc import LossNotice
from fencing_sdk.backends._shared.background_task import BackgroundTasks
from fencing_sdk.backends._shared.loss_notices import LossNotices
from fencing_sdk.backends._shared.revocation_reasons import reason_for
from fencing_sdk.backends.zookeeper.connection.kazoo_requests import NoNodeError, get, is_deletion
from fencing_sdk.backends.zookeeper.nodes import is_of, mark_of
from fencing_sdk.backends.zookeeper.own_nodes import OwnNode, OwnNodes
from fencing_sdk.backends.zookeeper.requests import Recipe
from fencing_sdk.backends.zookeeper.revoking import ZooKeeperRevocations
from fencing_sdk.errors import LossReason

__all__ = ["ZooKeeperLossWatcher"]

_MOMENT = 0.05
"""Seconds after which a grant is watched."""


class ZooKeeperLossWatcher:
    """Watches the nodes of grants, and tells the clients of one backend object of those that have gone."""

    def __init__(
        self, recipe: Recipe, own_nodes: OwnNodes, revocations: ZooKeeperRevocations, tasks: BackgroundTasks
    ) -> None:
        self._recipe = recipe
        self._revocations = revocations
        self._own_nodes = own_nodes
        self._tasks = tasks
        self._notices = LossNotices()

    def on_loss(self, notice: LossNotice) -> Callable[[], None]:
        """See `fencing_sdk.abc.SupportsLossNotice.on_loss`."""
        return self._notices.on_loss(notice)

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
        """Tell the holder that its node has gone, unless another client keeps a node for the same owner."""
        with suppress(Exception):  # an error proves nothing; the heartbeat goes on asking
            line = await self._recipe.look(own_node.session, own_node.claim.name)
            mark = mark_of(own_node.claim.owner)
            places = line[:1] if own_node.claim.mode is LOCK else line  # a share need not be the first
            node = next((node for node in places if node.mark == mark), None)
            if node is not None and is_of(node, own_node.session.id):
                self.watch(own_node)  # it is there, or there again: the next renewal compares which request created it
            elif not own_node.over:
                self._own_nodes.drop(own_node)
                if node is None:
                    reasons = partial(self._revocations.reasons, own_node.session)
                    self._notices.tell(own_node.claim, LossReason.REVOKED, await reason_for(own_node.claim, reasons))

    def session_ended(self, own_node: OwnNode) -> None:
        """The server has given up the session of *own_node*, and deleted the node."""
        held = own_node.held
        self._own_nodes.drop(own_node)
        own_node.woken.set()
        if held:
            self._notices.tell(own_node.claim, LossReason.REFUSED)
